"""Adapters that only read what the base model encoded: one pass is the engine, training is what is served."""

import json
import re
from dataclasses import replace

import pytest
import torch
from helpers import tiny_models
from helpers.command_line import app
from helpers.hypothesis_profile import many
from helpers.inspect_engine import inspect
from helpers.message_graphs import graphs
from helpers.model_configs import CONFIGS
from helpers.trace_builders import WITH_LOGPROBS, run_graph
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from choreograph import Engine, SamplingParams
from choreograph.errors import ConfigError, DataError
from choreograph.lab.evaluation.datasets import Example
from choreograph.lab.evaluation.experiment import Experiment
from choreograph.lab.evaluation.fidelity import measure_divergence
from choreograph.lab.evaluation.report import add_adapter_conditions
from choreograph.lab.evaluation.run_dir import RunDirectory
from choreograph.lab.evaluation.runner import evaluate_conditions
from choreograph.lab.replay.packed_forward import (
    BaseKVMemo,
    compute_kv,
    forward,
    forward_no_grad,
    pack,
    pack_adapter_stages,
)
from choreograph.lab.replay.traced_calls import TracedCall, TraceSlice, split_adapter_stages, trace_calls
from choreograph.lab.training import (
    TrainConfig,
    TrainingExample,
    collect_traces,
    make_examples,
    train,
    train_from_traces,
)
from choreograph.lab.training.examples import baseline_examples, concat_examples
from choreograph.lab.training.losses import example_losses, log_likelihood
from choreograph.lab.workflows import conditions_of, find
from choreograph.lab.workflows.run import Condition, WorkflowRun
from choreograph.models.adapter_usage import check_adapter_usage

SHORT = SamplingParams(max_tokens=5)
LISTS = [Example(f"c{i}", "concepts", ["dog", "ball", f"tree{i}", "cat"], {}) for i in range(3)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters") / "FT"
    torch.manual_seed(1)
    asked = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False)
    get_peft_model(tiny_models.build(), asked).save_pretrained(str(folder))
    return Engine.from_pretrained(tiny_models.build(), adapters={"FT": folder})


def closed(nodes, wanted):
    """Of these decodes, those that only such see, be it through a prefill; and the prefills that see them."""
    while True:
        read = set()
        for n, node in enumerate(nodes):
            if n in wanted or (node.generated is None and read & set(node.parents)):
                read.add(n)
        late = {i for n, node in enumerate(nodes) if n not in read for i in node.parents} & read
        if not late:
            return {f"s{n}" for n in read}
        for n in sorted(range(len(nodes)), reverse=True):
            late |= set(nodes[n].parents) if n in late else set()
        wanted = wanted - late


def lesson_on(engine, nodes, draw, reading=True):
    """Of a graph's calls; some of its decodes, which only such see, are readers'."""
    with engine.session() as session:
        calls = trace_calls(run_graph(session, nodes))
    decodes = [n for n, node in enumerate(nodes) if node.generated]
    readers = closed(nodes, draw.draw(st.sets(st.sampled_from(decodes))) if decodes else set())
    return TrainingExample("a graph", tuple(split_adapter_stages(calls, readers) if reading else calls), reading)


@given(nodes=graphs(), draw=st.data())
@settings(max_examples=many(60), deadline=None)
def test_one_pass_of_readers_is_the_engine_step_by_step(engine, nodes, draw):
    decodes = [n for n, node in enumerate(nodes) if node.generated]
    readers = closed(nodes, draw.draw(st.sets(st.sampled_from(decodes))) if decodes else set())
    with engine.session() as session:
        calls = trace_calls(run_graph(session, nodes))
    with engine.session() as session:
        steps = run_graph(session, nodes, readers)
        said = [s.message for s in steps if s.stage in readers and s.message.kind == "decode"]
        heard = [one.logprob for message in said for one in message.logprobs]
    packed = pack_adapter_stages(split_adapter_stages(calls, readers))
    packed.check()
    said = log_likelihood(forward_no_grad(inspect(engine).hf_model, packed, "FT"), packed.targets).tolist()
    assert said == pytest.approx(heard, abs=1e-4)


@given(pair=st.tuples(graphs(4), graphs(4)), reading=st.booleans(), draw=st.data())
@settings(max_examples=many(40), deadline=None)
def test_lessons_in_one_pass_say_what_each_says_alone(engine, pair, reading, draw):
    """Equal prefills are rows of both; what a reader computes is never the base's."""
    examples = [lesson_on(engine, nodes, draw, reading) for nodes in pair]
    both, model = concat_examples([*examples, examples[0]]), "FT" if reading else "base"
    both.packed.check()
    alone, result = [], []
    for said, them in ((alone, [*examples, examples[0]]), (result, [both])):
        for packed in (one.packed for one in them):
            said += log_likelihood(forward_no_grad(inspect(engine).hf_model, packed, model), packed.targets).tolist()
    assert result == pytest.approx(alone, abs=1e-4)
    shared = 0 if reading else sum(len(c.tokens) for c in examples[0].calls if c.generated is None and not c.parents)
    assert _rows(both) <= sum(map(_rows, examples)) + _rows(examples[0]) - shared


@given(many_nodes=st.lists(graphs(4), min_size=1, max_size=3), tokens=st.integers(0, 30), draw=st.data())
@settings(max_examples=many(40), deadline=None)
def test_what_passes_share_changes_nothing(engine, many_nodes, tokens, draw):
    """Every graph comes twice, alone and with another one in its pass."""
    examples = [lesson_on(engine, nodes, draw) for nodes in many_nodes]
    packs = [one.packed for one in (*examples, concat_examples([examples[0], examples[-1]]))]
    adapter = inspect(engine).hf_model
    shared = BaseKVMemo(adapter, [packed.prefix for packed in packs], tokens)
    shared.check()
    for packed in packs:
        with torch.no_grad(), adapter.attention_hook():
            alone = forward(adapter, packed)
            result = forward(adapter, packed, base_kv_provider=shared)
        torch.testing.assert_close(result, alone, atol=1e-5, rtol=1e-5)
        shared.check()


def test_what_passes_share_is_computed_once_and_comes_out_the_same(monkeypatch):
    adapter = inspect(Engine.from_pretrained(tiny_models.build())).hf_model
    computed = []
    compute = adapter.logits

    def logits(tokens, *rest, **named):
        computed.append(len(tokens))
        return compute(tokens, *rest, **named)

    monkeypatch.setattr(adapter, "logits", logits)
    pasts = [one.packed.prefix for one in (lesson(1), lesson(6), lesson(2))]  # the first two have a text of 2 tokens
    made = []
    for order in (pasts, pasts[::-1]):
        shared = BaseKVMemo(adapter, pasts)
        with torch.no_grad(), adapter.attention_hook():
            made.append([shared(one) for one in order])
    assert computed == [2, 5, 5, 7, 7, 2, 5, 5], "what two of them have by itself, then what is new in each"
    for one, other in zip(made[0], made[1][::-1], strict=True):
        assert all(torch.equal(a[n][i], b[n][i]) for a, b in zip(one, other, strict=True) for n in a for i in (0, 1))
    shared.clear()


def test_names_of_long_talks_stay_short():
    """Where every call sees all before it, a name that told all names in it would be as long as a power of two."""
    calls = [TracedCall("text", [1, 2], 0)]
    for n in range(1, 60):
        calls.append(TracedCall("text", [n, 3], 2 * n, tuple(TraceSlice(m, 0, 2, 2 * m) for m in range(n))))
    calls.append(TracedCall("answer", [4], 120, tuple(TraceSlice(m, 0, 2, 2 * m) for m in range(60)), [5]))
    adapter = inspect(Engine.from_pretrained(tiny_models.build())).hf_model
    packed = pack_adapter_stages(calls)
    shared = BaseKVMemo(adapter, [packed.prefix, packed.prefix])
    with torch.no_grad(), adapter.attention_hook():
        result, alone = forward(adapter, packed, base_kv_provider=shared), forward(adapter, packed)
    torch.testing.assert_close(result, alone, atol=1e-5, rtol=1e-5)


def _rows(lesson):
    return sum(len(call.tokens) for call in lesson.calls)


def text(number):
    """Two texts over each other, a decode of the base, and a reader of all three whose answer follows a rule."""
    a = TracedCall("text", [number % 7 + 1, 2, 3], 0)
    b = TracedCall("text", [number % 5 + 10, 12], 0)
    base = TracedCall("thought", [15], 3, (TraceSlice(0, 0, 3, 0),), [number % 5 + 50])
    said = TracedCall(
        "answer",
        [20],
        5,
        (TraceSlice(0, 0, 3, 0), TraceSlice(1, 0, 2, 0), TraceSlice(2, 0, 2, 3)),
        [number % 7 + 30, 41, 42],
    )
    return [a, b, base, said]


def lesson(number):
    return TrainingExample(str(number), tuple(split_adapter_stages(text(number), ["answer"])), True)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_reader_is_served_as_it_was_trained(tmp_path, checkpointing):
    adapter = inspect(Engine.from_pretrained(tiny_models.build())).hf_model
    learn, check = [lesson(i) for i in range(12)], [lesson(i) for i in range(12, 16)]
    before = example_losses(adapter, check)
    config = TrainConfig(
        lora_rank=4,
        lora_alpha=8,
        learning_rate=1e-2,
        batch_size=2,
        dropout=0.0,
        epochs=5,
        evals_per_epoch=2,
        gradient_checkpointing=checkpointing,
    )
    report = train(adapter, learn, check, tmp_path, config)
    assert report.loss_after < report.loss_before - 0.5
    assert example_losses(adapter, check) == before, "the model is as it was"
    engine = Engine(adapter, adapters={"FT": tmp_path})
    lost = []
    for number in range(12, 16):
        a, b, base, said = text(number)
        with engine.session() as session:
            texts = [session.prefill(x.prompt, new_offset=0) for x in (a, b)]
            thought = session.decode(base.prompt, [texts[0]], forced_tokens=base.generated)
            answer = session.decode(
                said.prompt,
                [*texts, thought],
                offsets=[0, 0, 3],
                new_offset=5,
                forced_tokens=said.generated,
                sampling=WITH_LOGPROBS,
                model="FT",
                kv_reuse="reuse",
            )
            lost += [-one.logprob for one in answer.logprobs]
    assert sum(lost) / len(lost) == pytest.approx(report.loss_after, abs=1e-4)


def test_validation_of_readers_knows_no_dropout(tmp_path):
    adapter = inspect(Engine.from_pretrained(tiny_models.build())).hf_model
    learn, check = [lesson(i) for i in range(6)], [lesson(i) for i in range(6, 8)]
    report = train(
        adapter,
        learn,
        check,
        tmp_path,
        TrainConfig(lora_rank=4, learning_rate=1e-2, batch_size=2, dropout=0.5, epochs=1),
    )
    engine = Engine(adapter, adapters={"FT": tmp_path})
    served = sum(example_losses(inspect(engine).hf_model, check, "FT")) / len(check)
    assert served == pytest.approx(report.loss_after, abs=1e-5)


def test_a_reader_need_not_speak_in_every_run(talker, tmp_path):
    """Of six runs two have it: whichever they are, one is learned from and one validates."""
    file = tmp_path / "some.py"
    file.write_text(
        "def run(p, task):\n"
        "    draft = p.decode('draft', p.assistant(), [p.prefill('task', p.user(task))])\n"
        "    return p.decode('answer', p.assistant(), [draft]) if task[0] in '25' else draft\n"
    )
    tasks = [Example(f"t{i}", "text", f"{i} or so") for i in range(6)]
    collect_traces(talker, str(file), find(str(file)), tasks, tmp_path / "traces", sampling=SHORT)
    config = TrainConfig(lora_rank=2, batch_size=1, epochs=1)
    for named in ("adapter_stages", "stages"):
        asked = {named: ["answer"], "workflow": str(file)}
        report = train_from_traces(inspect(talker).hf_model, tmp_path / "traces", tmp_path / named, config, **asked)
        assert report.updates == 1
    with pytest.raises(ConfigError, match="anser"):
        train_from_traces(
            inspect(talker).hf_model, tmp_path / "traces", tmp_path / "x", workflow=str(file), adapter_stages=["anser"]
        )


def test_in_bfloat16_a_stopped_training_goes_on_as_if_it_had_not_been(tmp_path):
    adapter = inspect(Engine.from_pretrained(tiny_models.build())).hf_model
    learn, check = [lesson(i) for i in range(6)], [lesson(i) for i in range(6, 8)]
    config = TrainConfig(lora_rank=2, learning_rate=1e-2, batch_size=2, dropout=0.3, epochs=3, bf16=True)

    def stop(done, most):
        if done == 5:  # of nine, behind the checkpoint of update 3
            raise InterruptedError

    whole = train(adapter, learn, check, tmp_path / "whole", config)
    assert whole.loss_after < whole.loss_before
    with pytest.raises(InterruptedError):
        train(adapter, learn, check, tmp_path / "parts", config, on_update=stop)
    train(adapter, learn, check, tmp_path / "parts", config)
    one, other = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("whole", "parts"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_base_sees_no_reader():
    late = TracedCall("late", [1], 9, (TraceSlice(3, 0, 4, 5),), [2])
    with pytest.raises(DataError, match="'late' attends to 'answer' of the adapter: name 'late' too"):
        split_adapter_stages([*text(0), late], ["answer"])
    assert [call.stage for call in split_adapter_stages([*text(0), late], ["answer", "late"])][-2:] == [
        "answer",
        "late",
    ]
    prefilled = split_adapter_stages([*text(0), replace(late, generated=None)], ["answer"])
    assert [call.stage for call in prefilled][-2:] == ["answer", "late"], "what sees a reader is read too"
    assert pack_adapter_stages(prefilled).num_prefix_tokens == sum(len(call.tokens) for call in prefilled[:-2])


def test_what_sees_a_reader_is_prefilled_by_it(tmp_path):
    """A question behind an answer, and an answer to it: served as one pass computes it, and as the base where nobody
    reads."""
    file = tmp_path / "asked.py"
    file.write_text(
        "def run(p, task):\n"
        "    text = p.prefill('text', [1, 2, 3])\n"
        "    said = p.decode('answer', [4], [text])\n"
        "    more = p.prefill('more', [5, 6], [text, said])\n"
        "    part = p.prefill('part', [7], (m[0:1] for m in [more]))\n"
        "    other = p.prefill('other', [8], [text])\n"
        "    return p.decode('again', [9], [text, said, more, part, other])\n"
    )
    torch.manual_seed(2)
    asked = LoraConfig(r=4, lora_alpha=64, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    get_peft_model(tiny_models.build(), asked).save_pretrained(str(tmp_path / "FT"))
    engine = Engine.from_pretrained(tiny_models.build(), adapters={"FT": tmp_path / "FT"})
    run, readers, content = find(str(file)), ("answer", "again"), {"answer": [[10, 11]], "again": [[12, 13]]}
    heard = {}
    for name, reading in (("base", {}), ("FT", {"model": "FT", "adapter_stages": readers})):
        with engine.session() as session:
            p = WorkflowRun(session, sampling=WITH_LOGPROBS, replay=content, **reading)
            run(p, "").result()
            calls = trace_calls(p.calls) if name == "base" else []
            made = {step.stage: step.message.model for step in p.calls}
            heard[name] = [o.logprob for s in p.calls for o in (s.message.logprobs or ())], made, calls
    assert set(heard["base"][1].values()) == {"base"}
    assert {stage for stage, model in heard["FT"][1].items() if model == "base"} == {"text", "other"}
    packed = pack_adapter_stages(split_adapter_stages(heard["base"][2], readers))
    assert packed.num_prefix_tokens == 3 + 1, "the text, and what sees nothing else"
    said = log_likelihood(forward_no_grad(inspect(engine).hf_model, packed, "FT"), packed.targets).tolist()
    assert said == pytest.approx(heard["FT"][0], abs=1e-4)
    assert said != pytest.approx(heard["base"][0], abs=1e-2)


def test_readers_are_named_where_something_can_be_read():
    with pytest.raises(ConfigError, match="prefix mode"):
        Condition("prefix", adapter_stages=("answer",))
    with pytest.raises(ConfigError, match=r"\['merg'\]: use stages that decode, \['merge', 'solve'\]"):
        Condition("choreographed", adapter_stages=("merg",)).check_adapter_stages(["solve", "merge", "solve"])


def test_a_reader_is_no_plain_training(tmp_path):
    """Where only readers decode, their lessons are the same calls."""
    adapter = inspect(Engine.from_pretrained(tiny_models.build())).hf_model
    calls = (*text(0)[:2], replace(text(0)[3], parents=text(0)[3].parents[:2]))
    config = TrainConfig(lora_rank=2, epochs=1)
    train(adapter, [TrainingExample("a", calls)], [TrainingExample("a", calls)], tmp_path, config)
    with pytest.raises(ConfigError, match="another setting"):
        train(adapter, [TrainingExample("a", calls, True)], [TrainingExample("a", calls, True)], tmp_path, config)


def test_what_the_base_encodes_knows_no_dropout(tmp_path):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS["gpt2"])
    adapter = inspect(Engine.from_pretrained(model.eval())).hf_model
    trained = get_peft_model(adapter.model, LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False))
    adapter.training_model = trained
    packed = lesson(3).packed
    result = []
    for training in (False, True):
        trained.train(training)
        with adapter.attention_hook():
            result.append(compute_kv(adapter, packed.prefix))
        assert trained.training == training
        assert all(p.requires_grad == ("lora_" in name) for name, p in trained.named_parameters())
    assert all(
        torch.equal(a, b) for layer in result[0] for a, b in zip(result[0][layer], result[1][layer], strict=True)
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_reads_in_one_pass(name):
    """By the base model itself, so that one pass in two parts is one pass."""
    torch.manual_seed(0)
    adapter = inspect(Engine.from_pretrained(AutoModelForCausalLM.from_config(CONFIGS[name]).eval())).hf_model
    places = (
        (TraceSlice(0, 0, 4, 0), TraceSlice(1, 0, 3, 2))
        if adapter.model_info.supports_shift
        else (TraceSlice(0, 0, 4, 0), TraceSlice(1, 0, 3, 4))
    )
    calls = [
        TracedCall("text", [1, 2, 3, 4], 0),
        TracedCall("thought", [5], 4, (TraceSlice(0, 0, 4, 0),), [6, 7]),
        TracedCall("answer", [8], 7, places, [9, 10, 11]),
    ]
    whole = log_likelihood(forward_no_grad(adapter, pack(calls)), [6, 7, 9, 10, 11]).tolist()
    reading = pack_adapter_stages(split_adapter_stages(calls, ["answer"]))
    assert log_likelihood(forward_no_grad(adapter, reading), [9, 10, 11]).tolist() == pytest.approx(whole[2:], abs=1e-4)
    shared = BaseKVMemo(adapter, [reading.prefix, pack(calls[:1])])  # which have the text
    with torch.no_grad(), adapter.attention_hook():
        result = log_likelihood(forward(adapter, reading, base_kv_provider=shared), [9, 10, 11]).tolist()
    assert result == pytest.approx(whole[2:], abs=1e-4)


@pytest.fixture(scope="module")
def traces(talker, tmp_path_factory):
    out = tmp_path_factory.mktemp("traces")
    workflow = find("branch_solve_merge")
    return out, collect_traces(talker, "branch_solve_merge", workflow, LISTS, out, sampling=SHORT, top=3)


def test_lessons_of_readers_are_what_they_said(talker, traces):
    condition = Condition("choreographed", model="FT", adapter_stages=("merge",))
    for trace, one in zip(
        traces[1],
        make_examples(inspect(talker).hf_model, find("branch_solve_merge"), traces[1], condition, sampling=SHORT),
        strict=True,
    ):
        assert [call.stage for call in one.calls if call.generated] == ["merge"]
        assert [call.generated for call in one.calls if call.generated] == trace.transcript["merge"]
        (baseline,) = baseline_examples([trace], ["merge"])
        assert baseline.num_targets == one.num_targets


def test_stages_that_are_not_learned_are_left_out(talker, traces):
    """But not what learned ones see: a merge sees what solved it, and nobody how the task was branched."""
    adapter, workflow, condition = inspect(talker).hf_model, find("branch_solve_merge"), Condition("choreographed")
    asked = [adapter, workflow, traces[1], condition]
    whole = make_examples(*asked, sampling=SHORT)
    for named, learned in ((["solve"], {"solve"}), (["merge"], {"solve", "merge"})):
        for one, other in zip(make_examples(*asked, sampling=SHORT, stages=named), whole, strict=True):
            assert {call.stage for call in one.calls if call.generated} == learned
            expected = [p for stage, p in _said(adapter, other) if stage in learned]
            assert [p for _, p in _said(adapter, one)] == pytest.approx(expected, abs=1e-4)
            assert len(one.packed.tokens) < len(other.packed.tokens)
    reading = [*asked[:3], replace(condition, adapter_stages=("merge",))]
    for one in make_examples(*reading, sampling=SHORT, stages=["merge"]):
        assert [call.stage for call in one.calls if call.generated] == ["merge"]
        assert not [call for call in one.calls if call.stage == "branch"]
    for them, stages in ((asked, ["mergers"]), (reading, ["solve", "merge"])):
        with pytest.raises(ConfigError, match=re.escape(f"stages ['{stages[0]}']")):
            make_examples(*them, sampling=SHORT, stages=stages)


def _said(adapter, lesson):
    stages = [call.stage for call in lesson.calls for _ in call.generated or ()]
    result = log_likelihood(forward_no_grad(adapter, lesson.packed), lesson.packed.targets)
    return list(zip(stages, result.tolist(), strict=True))


def test_an_adapter_for_one_stage_from_traces_to_answers(talker, talker_folder, traces, tmp_path):
    out, found = traces
    command = ["train", str(out), "--out", str(tmp_path / "FT"), "--model", talker_folder, "--condition", "serial"]
    result = CliRunner().invoke(
        app,
        [
            *command,
            "--adapter-stage",
            "merge",
            "--stage",
            "merge",
            "--rank",
            "2",
            "--learning-rate",
            "0.01",
            "--batch-size",
            "1",
            "--kl",
            "1",
            "--encodings",
            "1",
        ],
    )
    assert result.exit_code == 0, result.output
    command = ["run", "branch_solve_merge", "--task", "dog, ball, cat, tree", "--model", talker_folder, "--adapter"]
    command += [str(tmp_path / "FT"), "--max-tokens", "5", "--json"]
    result = CliRunner().invoke(app, [*command, "--adapter-stage", "merge"])
    assert result.exit_code == 0 and json.loads(result.output)["answer"], result.output
    for more in ([], ["--adapter-stage", "merge", "--adapter-stage", "solve"]):
        refused = CliRunner().invoke(app, [*command, *more])
        assert 'give --adapter-stage "merge"' in str(refused.exception)
    for note in ("{", "[1]", '{"version": 2, "adapter_stages": 3}', '{"version": 1}'):
        (tmp_path / "broken").mkdir(exist_ok=True)
        (tmp_path / "broken" / "adapter_usage.json").write_text(note)
        with pytest.raises(ConfigError, match=r"broken.adapter_usage\.json.*train"):
            check_adapter_usage(str(tmp_path / "broken"), [], inspect(talker).hf_model)
    check_adapter_usage("somebody/adapter", ["merge"], inspect(talker).hf_model)
    (tmp_path / "broken" / "adapter_usage.json").rename(tmp_path / "broken" / "learned.json")  # of an earlier version
    with pytest.raises(ConfigError, match=r"adapter_usage\.json.*another version"):
        check_adapter_usage(str(tmp_path / "broken"), ["merge"], inspect(talker).hf_model)
    others = inspect(Engine.from_pretrained(tiny_models.build(vocabulary=61))).hf_model
    with pytest.raises(ConfigError, match="other weights"):
        check_adapter_usage(str(tmp_path / "FT"), ["merge"], others)
    engine = Engine.from_pretrained(talker_folder, dtype="float32", adapters={"FT": tmp_path / "FT"})
    workflow = find("branch_solve_merge")
    conditions = add_adapter_conditions(conditions_of(workflow), "FT", ["merge"])
    asked = {"sampling": SHORT, "options": {}}
    experiment = Experiment("branch_solve_merge", workflow, conditions, **asked)
    settings = experiment.settings(engine, LISTS)
    assert settings["conditions"]["serial + FT"]["adapter_stages"] == ("merge",)
    assert "adapter_stages" not in settings["conditions"]["serial"]
    records = evaluate_conditions(engine, experiment, LISTS, RunDirectory(tmp_path / "run", settings))
    unknown = {"baseline": conditions["baseline"], "x": replace(conditions["serial + FT"], adapter_stages=("merg",))}
    unknown_stage = replace(experiment, conditions=unknown)
    with pytest.raises(ConfigError, match="merg"):
        evaluate_conditions(engine, unknown_stage, LISTS[:1], RunDirectory(tmp_path / "unknown", {}))
    for plain, adapted in zip(records["serial"], records["serial + FT"], strict=True):
        assert not adapted.get("error")
        assert adapted["tokens"]["solve"] == plain["tokens"]["solve"], "what the base decodes is its own"
    known = {name: conditions[name] for name in ("baseline", "serial", "serial + FT")}
    for _, drift in measure_divergence(engine, workflow, [t.task_transcript for t in found], known, sampling=SHORT):
        for plain, adapted in zip(drift["serial"], drift["serial + FT"], strict=True):
            assert plain.stage == adapted.stage
            assert (plain.after == adapted.after) == (plain.stage != "merge")


@pytest.mark.parametrize(
    "command", [["run", "single_call", "--task", "x"], ["eval", "single_call", "--data", "x.jsonl"]]
)
def test_readers_need_an_adapter(command):
    result = CliRunner().invoke(app, [*command, "--adapter-stage", "answer"])
    assert result.exit_code == 2 and "--adapter" in result.output


def test_final_answers_have_no_readers(talker, traces, tmp_path):
    with pytest.raises(ConfigError, match="answer_workflow"):
        train_from_traces(
            inspect(talker).hf_model, traces[0], tmp_path, answer_workflow="multi_qa", adapter_stages=["merge"]
        )
