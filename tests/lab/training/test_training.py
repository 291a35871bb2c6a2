"""Training on lessons: it learns, it can be stopped at any update, and it leaves the model alone."""

import itertools
import json
import math
import sys
from dataclasses import replace

import pytest
import torch
from helpers import tiny_models
from helpers.inspect_engine import inspect
from helpers.model_configs import CONFIGS
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from choreograph import Engine, SamplingParams
from choreograph.attention.metadata import Alignment
from choreograph.errors import ConfigError, DataError, ModelError
from choreograph.lab.replay.packed_forward import forward, forward_no_grad, pack
from choreograph.lab.replay.traced_calls import TracedCall, TraceSlice
from choreograph.lab.training import TrainConfig, TrainingExample, train
from choreograph.lab.training.losses import example_losses, log_likelihood, mean_loss, mean_losses, token_losses
from choreograph.lab.training.train import resolve_target_modules

training = sys.modules["choreograph.lab.training.train"]  # the package has a function of this name

FAST = {"lora_rank": 4, "lora_alpha": 8, "learning_rate": 1e-2, "batch_size": 2, "dropout": 0.0}


def lesson(number):
    """Two texts that do not see each other, placed over each other, and an answer that follows a rule."""
    a = TracedCall("text", [number % 7 + 1, 2, 3], 0)
    b = TracedCall("text", [number % 5 + 10, 12], 0)
    said = TracedCall("answer", [20], 3, (TraceSlice(0, 0, 3, 0), TraceSlice(1, 0, 2, 0)), [number % 7 + 30, 41, 42])
    return TrainingExample(str(number), (a, b, said))


LEARN, CHECK = [lesson(i) for i in range(12)], [lesson(i) for i in range(12, 16)]


@pytest.fixture
def adapter():
    return inspect(Engine.from_pretrained(tiny_models.build())).hf_model


def weights(folder):
    return load_file(folder / "adapter_model.safetensors")


def assert_same(one, other, atol=1e-6):
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], atol=atol, rtol=1e-5)


def test_training_lowers_the_loss_and_reports_its_cost(adapter, tmp_path):
    before = example_losses(adapter, CHECK)
    names = [n for n, _ in adapter.model.named_parameters()]
    likely = min(LEARN, key=lambda one: example_losses(adapter, [one])[0])
    report = train(adapter, LEARN, CHECK, tmp_path, TrainConfig(**FAST, epochs=6), baseline=[likely])
    assert report.loss_after < report.loss_before - 0.5
    assert report.gap_closed == pytest.approx(
        (report.loss_before - report.loss_after) / (report.loss_before - report.baseline)
    )
    assert report.model_copy(update={"baseline": report.loss_before + 0.1}).gap_closed is None, "there was no gap"
    assert report.updates == 36 and report.seconds > 0 and report.peak_memory > 0
    assert 0 < report.trained_share < 1
    assert example_losses(adapter, CHECK) == before, "the model is as it was"
    assert [n for n, _ in adapter.model.named_parameters()] == names
    assert not adapter.model.training
    log = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [e["step"] for e in log if "loss" in e] == list(range(1, 37))
    assert [e["step"] for e in log if "eval_loss" in e] == [6, 12, 18, 24, 30, 36]
    assert json.loads((tmp_path / "report.json").read_text())["after"] == report.loss_after


def test_a_single_update_learns_too(adapter, tmp_path):
    report = train(adapter, LEARN[:2], CHECK, tmp_path, TrainConfig(**FAST, epochs=1))
    assert report.updates == 1 and report.loss_after < report.loss_before


def test_a_finished_training_is_read_if_this_version_wrote_it(adapter, tmp_path):
    asked = (adapter, LEARN, CHECK, tmp_path, TrainConfig(**FAST, epochs=1))
    assert train(*asked) == train(*asked, on_update=pytest.fail)
    file = tmp_path / "report.json"
    result = json.loads(file.read_text())
    del result["divergence"]
    file.write_text(json.dumps(result))
    with pytest.raises(DataError, match=r"report\.json.*another version"):
        train(*asked)
    manifest = tmp_path / "train.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"version": 1}))
    with pytest.raises(DataError, match=r"train\.json.*another version"):
        train(*asked)


def test_the_adapter_is_served_as_it_was_trained(adapter, tmp_path):
    report = train(adapter, LEARN, CHECK, tmp_path, TrainConfig(**FAST, epochs=4))
    engine = Engine(adapter, adapters={"FT": tmp_path})
    total, count = 0.0, 0
    with engine.session(model="FT") as session:
        for one in CHECK:
            a, b, said = one.calls
            texts = [session.prefill(x.prompt, new_offset=0) for x in (a, b)]
            answer = session.decode(
                said.prompt,
                texts,
                offsets=[0, 0],
                new_offset=3,
                forced_tokens=said.generated,
                sampling=SamplingParams(logprobs=0),
            )
            total -= sum(x.logprob for x in answer.logprobs)
            count += 3
    assert total / count == pytest.approx(report.loss_after, abs=1e-4)


class StoppedError(Exception):
    pass


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_training_that_was_stopped_goes_on_as_if_it_had_not_been(adapter, tmp_path, dropout):
    """Six updates an epoch, a checkpoint every third."""
    config = TrainConfig(**FAST | {"dropout": dropout}, epochs=3, evals_per_epoch=2)
    whole = train(adapter, LEARN, CHECK, tmp_path / "whole", config)

    def stop(done, most):
        assert most == 18
        if done == 10:  # behind the checkpoint of update 9
            raise StoppedError

    with pytest.raises(StoppedError):
        train(adapter, LEARN, CHECK, tmp_path / "parts", config, on_update=stop)
    broken = tmp_path / "parts" / "checkpoint-12"  # the process ended while it wrote this one
    broken.mkdir()
    (broken / "trainer_state.json").write_text('{"cut')
    made = []
    parts = train(adapter, LEARN, CHECK, tmp_path / "parts", config, on_update=lambda done, most: made.append(done))
    assert made == list(range(10, 19))
    assert_same(weights(tmp_path / "whole"), weights(tmp_path / "parts"))
    assert [e.get("eval_loss") for e in whole.log] == pytest.approx([e.get("eval_loss") for e in parts.log])
    again = train(adapter, LEARN, CHECK, tmp_path / "parts", config, on_update=lambda *_: pytest.fail("it has ended"))
    assert again == parts


def test_a_checkpoint_that_lacks_a_part_is_passed_over(adapter, tmp_path):
    config = TrainConfig(**FAST, epochs=3, evals_per_epoch=2)
    train(adapter, LEARN, CHECK, tmp_path / "whole", config)

    def stop(done, most):
        if done == 10:
            raise StoppedError

    with pytest.raises(StoppedError):
        train(adapter, LEARN, CHECK, tmp_path / "parts", config, on_update=stop)
    (tmp_path / "parts" / "checkpoint-9" / "optimizer.pt").unlink()
    made = []
    train(adapter, LEARN, CHECK, tmp_path / "parts", config, on_update=lambda done, most: made.append(done))
    assert made == list(range(7, 19))
    assert_same(weights(tmp_path / "whole"), weights(tmp_path / "parts"))


def test_patience_is_not_forgotten_between_two_processes(adapter, tmp_path):
    config = TrainConfig(**FAST | {"learning_rate": 0.5}, epochs=30, patience=3)
    whole = train(adapter, LEARN, CHECK, tmp_path / "whole", config)

    def stop(done, most):
        if done == whole.updates - 3:
            raise StoppedError

    with pytest.raises(StoppedError):
        train(adapter, LEARN, CHECK, tmp_path / "parts", config, on_update=stop)
    parts = train(adapter, LEARN, CHECK, tmp_path / "parts", config)
    assert whole.updates < 180 and parts.updates == whole.updates


def test_checkpointing_computes_layers_again_and_changes_nothing(adapter, tmp_path):
    passes = {}
    for name, checkpointing in (("plain", False), ("again", True)):
        count = 0

        def counted(*_):
            nonlocal count
            count += 1

        forget = adapter.model.model.layers[0].mlp.register_forward_pre_hook(counted)
        config = TrainConfig(**FAST | {"dropout": 0.2}, epochs=1, gradient_checkpointing=checkpointing)
        train(adapter, LEARN, CHECK, tmp_path / name, config)
        forget.remove()
        passes[name] = count
    assert passes["again"] == passes["plain"] + len(LEARN)
    assert_same(weights(tmp_path / "plain"), weights(tmp_path / "again"))
    assert not adapter.model.get_input_embeddings()._forward_hooks
    engine = Engine(adapter)
    with engine.session() as session:
        assert session.decode([1], sampling=SamplingParams(max_tokens=2)).result()


def test_an_update_is_one_of_the_sum_of_its_lessons(adapter, tmp_path):
    """By hand: the loss of whole traces in units of a typical one, the mean over an update, AdamW, cosine."""
    short, long = lesson(1), lesson(2)
    said = TracedCall("answer", [20], 3, long.calls[2].parents, [5, 6, 7, 8, 9, 10, 11, 12, 13])
    learn = [short, TrainingExample("long", (*long.calls[:2], said)), lesson(4)]
    config = TrainConfig(**FAST, epochs=1, warmup_ratio=0.0)
    train(adapter, learn, CHECK, tmp_path, config)
    result = weights(tmp_path)
    orders = [
        _by_hand(adapter, learn, order, config) for order in itertools.permutations(range(3))
    ]  # the sampler's own
    assert any(all(torch.allclose(one[name], result[name], atol=1e-5) for name in result) for one in orders)


def _by_hand(adapter, learn, order, config):
    """Two updates, of two lessons and of one, in some order; the weights under the names of the file."""
    torch.manual_seed(config.seed)
    model = get_peft_model(
        adapter.model, LoraConfig(r=4, lora_alpha=8, target_modules=resolve_target_modules(adapter.model, None))
    )
    given = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(given, lr=config.learning_rate, weight_decay=0.0)
    typical = sum(x.num_targets for x in learn) / len(learn)
    for update, group in enumerate((order[:2], order[2:])):
        for number in group:
            packed = pack(learn[number].calls)
            with adapter.attention_hook():
                logits = forward(adapter, packed)
                (-log_likelihood(logits, packed.targets).sum() / typical / len(group)).backward()
        torch.nn.utils.clip_grad_norm_(given, config.max_grad_norm)
        for settings in optimizer.param_groups:
            settings["lr"] = config.learning_rate * 0.5 * (1 + math.cos(math.pi * update / 2))
        optimizer.step()
        optimizer.zero_grad()
    result = {n: p.detach().clone() for n, p in get_peft_model_state_dict(model).items()}
    model.unload()
    for parameter in adapter.model.parameters():
        parameter.requires_grad_(True)
    return result


@pytest.mark.parametrize("kl", [0.0, 2.0])
def test_lessons_that_share_a_pass_teach_the_same(adapter, tmp_path, kl):
    """Six lessons, four to an update: two passes of two, and at the end one."""
    learn = [with_readings(adapter, one)[0] for one in LEARN[:6]]
    result = []
    for packed in (1, 2):
        config = TrainConfig(**FAST | {"batch_size": 4}, epochs=2, examples_per_forward=packed, kl_weight=kl)
        report = train(adapter, learn, learn[:2], tmp_path / str(packed), config)
        result.append((report.updates, report.loss_after))
    assert result[0] == pytest.approx(result[1], abs=1e-4)
    assert_same(*(weights(tmp_path / packed) for packed in "12"))
    with pytest.raises(ConfigError, match="examples_per_forward=3: use a number that divides batch_size=8"):
        TrainConfig(examples_per_forward=3)


@pytest.mark.parametrize(("count", "packed"), [(5, 4), (7, 2)])
def test_a_pass_that_is_not_full_counts_by_its_lessons(adapter, tmp_path, count, packed):
    """Of an epoch's last update: one lesson in a pass for four, or two and one in passes for two."""
    logs = []
    for shared in (1, packed):
        config = TrainConfig(**FAST | {"batch_size": 4}, epochs=3, examples_per_forward=shared, max_grad_norm=1e9)
        logs.append(train(adapter, LEARN[:count], CHECK, tmp_path / str(shared), config).log)
    apart, together = ([entry["grad_norm"] for entry in log if "grad_norm" in entry] for log in logs)
    assert apart == pytest.approx(together, rel=1e-4)
    # Adam scales rounding differences of small gradients; they differ by processor (3e-6 with AVX-512)
    assert_same(weights(tmp_path / "1"), weights(tmp_path / str(packed)), atol=1e-5)


def test_a_base_model_drops_nothing(tmp_path):
    """OPT drops a tenth of what a layer computes while it is trained."""
    torch.manual_seed(0)
    adapter = inspect(Engine.from_pretrained(AutoModelForCausalLM.from_config(CONFIGS["opt"]).eval())).hf_model
    before = {path: vars(module).get("dropout") for path, module in adapter.model.named_modules()}
    assert any(before.values())
    report = train(adapter, LEARN[:1], LEARN[:1], tmp_path, TrainConfig(**FAST, epochs=1))
    assert report.log[0]["loss"] == pytest.approx(report.loss_before, rel=1e-4), "the adapter changes nothing yet"
    assert {path: vars(module).get("dropout") for path, module in adapter.model.named_modules()} == before


def test_what_cannot_be_learned_is_refused(adapter, tmp_path):
    silent = TrainingExample("silent", LEARN[0].calls[:2])
    for learn, check in (([silent, *LEARN], CHECK), (LEARN, [silent])):
        with pytest.raises(DataError, match=r"'silent'.*generate nothing"):
            train(adapter, learn, check, tmp_path)
    with pytest.raises(DataError, match="train on one kind"):
        train(adapter, [LEARN[0], replace(LEARN[1], adapter_only=True)], CHECK, tmp_path)
    stages = [[replace(example, adapter_only=True) for example in part] for part in (LEARN, CHECK)]
    with pytest.raises(DataError, match="alignment: it does not go with adapter stages"):
        train(adapter, *stages, tmp_path, TrainConfig(alignment=(0.9, 0.8)))

    def within(done, most):
        with pytest.raises(ModelError, match="being trained"):
            train(adapter, LEARN, CHECK, tmp_path / "within")

    train(adapter, LEARN[:2], CHECK, tmp_path, TrainConfig(**FAST, epochs=1), on_update=within)


def test_what_is_gone_from_a_finished_training_is_told(adapter, tmp_path):
    asked = (adapter, LEARN[:2], CHECK, tmp_path, TrainConfig(**FAST, epochs=1))
    train(*asked)
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="holds a report, but no adapter"):
        train(*asked)


def test_one_that_waited_long_enough_makes_no_further_update(adapter, tmp_path, monkeypatch):
    """The process ended between the last checkpoint and the report."""
    config = TrainConfig(**FAST | {"learning_rate": 0.5}, epochs=30, patience=1, evals_per_epoch=3)
    whole = train(adapter, LEARN, CHECK, tmp_path / "whole", config)
    with monkeypatch.context() as patched:
        patched.setattr(PeftModel, "save_pretrained", stop_after_checkpoints(PeftModel.save_pretrained))
        with pytest.raises(StoppedError):
            train(adapter, LEARN, CHECK, tmp_path / "parts", config)
    parts = train(adapter, LEARN, CHECK, tmp_path / "parts", config, on_update=lambda *_: pytest.fail("it has ended"))
    assert (parts.updates, parts.loss_after, parts.log) == (whole.updates, whole.loss_after, whole.log)
    assert_same(weights(tmp_path / "whole"), weights(tmp_path / "parts"))


def stop_after_checkpoints(save):
    def saved(model, out, **options):
        if "checkpoint" not in str(out):
            raise StoppedError
        save(model, out, **options)

    return saved


def test_training_stops_early_and_keeps_the_best_weights(adapter, tmp_path):
    config = TrainConfig(**FAST | {"learning_rate": 0.5}, epochs=30, patience=2)
    report = train(adapter, LEARN, CHECK, tmp_path, config)
    result = [e["eval_loss"] for e in report.log if "eval_loss" in e]
    assert len(result) < 30 and result.index(min(result)) < len(result) - 1
    engine = Engine(adapter, adapters={"FT": tmp_path})
    assert mean_loss(inspect(engine).hf_model, CHECK, "FT") == pytest.approx(min(result), abs=1e-4)


def test_nobody_computes_on_a_model_in_training(adapter, tmp_path):
    engine = Engine(adapter)

    def use(done, most):
        with engine.session() as session, pytest.raises(ModelError, match="being trained"):
            session.prefill([1, 2]).result()

    before = (torch.random.get_rng_state(), adapter.model.config.use_cache)
    train(adapter, LEARN[:2], CHECK[:1], tmp_path, TrainConfig(**FAST, epochs=1), on_update=use)
    assert torch.equal(torch.random.get_rng_state(), before[0]) and adapter.model.config.use_cache == before[1]
    with engine.session() as session:
        session.prefill([1, 2]).result()
    engine.check()


def with_readings(adapter, one):
    """The lesson with the log-probabilities of every token of the vocabulary, as the model has them now."""
    packed = pack(one.calls)
    with torch.no_grad(), adapter.attention_hook():
        rows = forward(adapter, packed).log_softmax(-1)
    top = tuple(tuple(enumerate(row.tolist())) for row in rows)
    said = one.calls[-1]
    return TrainingExample(one.id, (*one.calls[:-1], TracedCall(said.stage, said.prompt, said.start, said.parents,
                                                       said.generated, top=top))), rows  # fmt: skip


def divergence(logits, one):
    return token_losses(logits, pack(one.calls).targets, one)[1]


def test_divergence_is_the_whole_one_where_every_token_is_kept(adapter):
    one, rows = with_readings(adapter, lesson(3))
    other = torch.randn(rows.shape, generator=torch.Generator().manual_seed(0))
    expected = (rows.exp() * (rows - other.log_softmax(-1))).sum(-1)
    torch.testing.assert_close(divergence(other, one), expected, atol=1e-4, rtol=1e-4)
    assert float(divergence(rows, one).abs().max()) < 1e-4
    few = TrainingExample("few", (*one.calls[:-1], TracedCall("answer", [20], 3, one.calls[-1].parents, [1, 2, 3], top=tuple(
        tuple(sorted(t, key=lambda p: -p[1])[:5]) for t in one.calls[-1].top))))  # fmt: skip
    assert (divergence(other, few) <= expected + 1e-5).all() and (divergence(other, few) > 0).all()


def test_divergence_can_be_learned_from(adapter, tmp_path):
    learn, check = ([with_readings(adapter, x)[0] for x in some] for some in (LEARN[:4], CHECK))
    config = TrainConfig(**FAST, epochs=1, kl_weight=1.0)
    report = train(adapter, learn, check, tmp_path / "kl", config)
    assert math.isfinite(report.loss_after)
    for some, others in ((LEARN, check), (learn, CHECK)):
        with pytest.raises(DataError, match="top"):
            train(adapter, some, others, tmp_path / "none", config)


def test_where_the_divergence_is_learned_it_chooses_the_best(adapter, tmp_path):
    """The readings are the model's own, so every update leads away from them, while log-loss on the texts may fall."""
    examples = [with_readings(adapter, x)[0] for x in LEARN[:6]]
    report = train(adapter, examples, examples, tmp_path, TrainConfig(**FAST, epochs=5, kl_weight=100.0))
    measured = [e for e in report.log if "eval_loss" in e]
    best = min(measured, key=lambda e: e["eval_learned"])
    assert best["eval_learned"] == pytest.approx(best["eval_loss"] + 100 * best["eval_divergence"])
    assert best["eval_loss"] > min(e["eval_loss"] for e in measured), "else this shows nothing"
    assert report.divergence == (pytest.approx(0, abs=1e-5), best["eval_divergence"])
    assert report.loss_after == best["eval_loss"]
    engine = Engine(adapter, adapters={"FT": tmp_path})
    result = mean_losses(inspect(engine).hf_model, examples, "FT", with_kl=True)
    assert result == pytest.approx((report.loss_after, report.divergence[1]), abs=1e-4)


def test_another_setting_needs_another_folder(adapter, tmp_path):
    train(adapter, LEARN[:2], CHECK[:1], tmp_path, TrainConfig(**FAST, epochs=1))
    with pytest.raises(ConfigError, match="another"):
        train(adapter, LEARN[:2], CHECK[:1], tmp_path, TrainConfig(**FAST, epochs=2))
    with pytest.raises(ConfigError, match="another"):
        train(adapter, LEARN[1:3], CHECK[:1], tmp_path, TrainConfig(**FAST, epochs=1))
    with pytest.raises(ConfigError, match="target_modules"):
        train(adapter, LEARN, CHECK, tmp_path / "y", TrainConfig(**FAST, target_modules=("nothing",)))
    with pytest.raises(DataError, match="one or more"):
        train(adapter, [], CHECK, tmp_path / "x")


def test_a_training_that_was_refused_keeps_no_folder(adapter, tmp_path):
    """A slip of the pen in the first setting is mended in the second."""
    with pytest.raises(ConfigError, match="nothing"):
        train(adapter, LEARN[:2], CHECK[:1], tmp_path, TrainConfig(**FAST, epochs=1, target_modules=("nothing",)))
    assert train(adapter, LEARN[:2], CHECK[:1], tmp_path, TrainConfig(**FAST, epochs=1)).updates


def test_what_is_not_installed_is_said_before_anything_is_done(adapter, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "is_tensorboard_available", lambda: False)
    with pytest.raises(ConfigError, match="pip install"):
        train(adapter, LEARN[:2], CHECK[:1], tmp_path / "x", TrainConfig(**FAST, epochs=1, tensorboard=True))
    assert not (tmp_path / "x").exists()


def test_checkpoints_of_nobody_knows_what_are_left_alone(adapter, tmp_path):
    (tmp_path / "checkpoint-500").mkdir()
    (tmp_path / "checkpoint-500" / "model.safetensors").write_bytes(b"mine")
    with pytest.raises(ConfigError, match="checkpoint-500"):
        train(adapter, LEARN, CHECK, tmp_path, TrainConfig(**FAST, epochs=1))
    assert (tmp_path / "checkpoint-500" / "model.safetensors").read_bytes() == b"mine"


def test_a_folder_may_move_between_two_processes(adapter, tmp_path):
    """The best checkpoint is the first of five, since what is validated is what the model says before it learns; the
    training stops behind the fourth, and goes on elsewhere."""
    config = TrainConfig(**FAST, epochs=5)
    other = []
    for one in CHECK:
        a, b, said = one.calls
        likeliest = int(forward_no_grad(adapter, one.packed)[0].argmax())
        other.append(TrainingExample(one.id, (a, b, replace(said, generated=[likeliest]))))
    whole = train(adapter, LEARN, other, tmp_path / "whole", config)
    result = [e["eval_loss"] for e in whole.log if "eval_loss" in e]
    assert result[0] < min(result[1:]) - 0.1, "else this shows nothing"

    def stop(done, most):
        if done == most - 2:
            raise StoppedError

    with pytest.raises(StoppedError):
        train(adapter, LEARN, other, tmp_path / "here", config, on_update=stop)
    (tmp_path / "here").rename(tmp_path / "there")
    moved = train(adapter, LEARN, other, tmp_path / "there", config)
    assert moved.loss_after == pytest.approx(whole.loss_after)
    assert_same(weights(tmp_path / "whole"), weights(tmp_path / "there"))


def test_what_is_not_finite_is_no_adapter(adapter, tmp_path):
    adapter.model.model.norm.weight.data.fill_(float("nan"))
    with pytest.raises(DataError, match="nan"):
        train(adapter, LEARN[:2], CHECK[:1], tmp_path, TrainConfig(**FAST, epochs=1))
    assert not (tmp_path / "adapter_model.safetensors").exists()


def test_targets_are_linear_layers_of_the_model(adapter, tmp_path):
    for bad in (("q_proj", "o_prjo"), ("embed_tokens",)):
        with pytest.raises(ConfigError, match=bad[-1]):
            train(adapter, LEARN[:2], CHECK[:1], tmp_path / bad[-1], TrainConfig(**FAST, epochs=1, target_modules=bad))
    assert resolve_target_modules(adapter.model, None) == ["k_proj", "o_proj", "q_proj", "v_proj"]


@pytest.mark.parametrize(
    ("family", "wanted"),
    [
        ("phi", ["dense", "k_proj", "q_proj", "v_proj"]),
        ("phi3", ["o_proj", "qkv_proj"]),
        ("opt", ["k_proj", "out_proj", "q_proj", "v_proj"]),
        ("gpt_neox", ["dense", "query_key_value"]),
        ("falcon", ["dense", "query_key_value"]),
        ("bloom", ["dense", "query_key_value"]),
        ("mpt", ["Wqkv", "out_proj"]),
    ],
)
def test_the_attention_is_found_whatever_it_is_called(family, wanted):
    assert resolve_target_modules(AutoModelForCausalLM.from_config(CONFIGS[family]), None) == wanted


@pytest.mark.parametrize(
    "bad",
    [
        {"lora_rank": 0},
        {"dropout": 1.0},
        {"learning_rate": 0},
        {"learning_rate": float("inf")},
        {"warmup_ratio": 1.5},
        {"kl_weight": -1},
        {"seed": 1 << 32},
        {"target_modules": ()},
        {"target_modules": ("lm_head",)},
    ],
)
def test_settings_out_of_range_are_refused(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        TrainConfig(**bad)


def test_a_training_with_an_alignment_learns_and_validates_with_it(adapter, tmp_path):
    aligned = [replace(example, alignment=Alignment(0.8, 0.5)) for example in CHECK]
    report = train(adapter, LEARN, CHECK, tmp_path, TrainConfig(**FAST, epochs=1, alignment=(0.8, 0.5)))
    assert report.loss_before == pytest.approx(mean_loss(adapter, aligned))
    assert report.loss_before != pytest.approx(mean_loss(adapter, CHECK), abs=1e-4)
    assert report.loss_after < report.loss_before
    with pytest.raises(ConfigError, match="alignment"):
        TrainConfig(alignment=(0.0, 1.0))
    with pytest.raises(ConfigError, match="another setting"):
        train(adapter, LEARN, CHECK, tmp_path, TrainConfig(**FAST, epochs=1))
