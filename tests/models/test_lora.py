"""Adapters beside the base model: merged and unmerged agree, several share a step, nothing is reused in silence."""

import json

import pytest
import torch
from helpers import tiny_models
from helpers.graph_stub import boards, engine_with  # noqa: F401
from helpers.hypothesis_profile import many
from helpers.inspect_engine import inspect
from helpers.message_graphs import graphs
from helpers.model_configs import CONFIGS
from helpers.recursion_limit import limit_recursion
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from choreograph import CacheConfig, Engine, EngineConfig, SamplingParams
from choreograph.errors import ConfigError, ModelError

HEARD = SamplingParams(logprobs=0)
GREEDY = SamplingParams(temperature=0, max_tokens=6, logprobs=0)
MODELS = ("base", "a", "b")


def save_adapter(folder, seed, **options):
    """A random adapter of the tiny model, strong enough to be seen."""
    torch.manual_seed(seed)
    given = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj", "down_proj"], "init_lora_weights": False}
    model = get_peft_model(tiny_models.build(), LoraConfig(**given | options))
    model.save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    return {
        "a": save_adapter(root / "a", 1),
        "b": save_adapter(root / "b", 2, target_modules=["k_proj", "gate_proj"], use_rslora=True),
    }


@pytest.fixture(scope="module")
def merged(folders):
    """An engine for each model, the adapter merged into the weights by peft."""
    engines = {"base": Engine.from_pretrained(tiny_models.build())}
    for name, folder in folders.items():
        model = PeftModel.from_pretrained(tiny_models.build(), str(folder)).merge_and_unload()
        engines[name] = Engine.from_pretrained(model)
    return engines


def serve(folders, tokens=2048, **options):
    config = EngineConfig(cache=CacheConfig(capacity=tokens, page_size=4, poison_freed_pages=True), **options)
    return Engine.from_pretrained(tiny_models.build(), config=config, adapters=folders)


@pytest.fixture(scope="module")
def engine(folders):
    return serve(folders)


def values(message):
    return [one.logprob for one in message.logprobs]


def debate(session, **given):
    """Two prompts, two answers side by side, and one who reads both."""
    asked = [session.prefill([1, 2, 3, 4, i], **given) for i in range(2)]
    said = [session.decode([10 + i], [p], sampling=GREEDY, **given) for i, p in enumerate(asked)]
    return [*said, session.decode([20], [*said, asked[0]], offsets=[9, 2, 30], sampling=GREEDY, **given)]


@pytest.mark.parametrize("mode", ["choreographed", "prefix", "naive"])
@pytest.mark.parametrize("name", MODELS)
def test_merged_and_unmerged_agree(engine, merged, mode, name):
    with engine.session(mode=mode, model=name) as ours, merged[name].session(mode=mode) as theirs:
        for one, other in zip(debate(ours), debate(theirs), strict=True):
            assert one.tokens == other.tokens
            assert values(one) == pytest.approx(values(other), abs=1e-4)
            assert one.model == name


def test_several_adapters_share_a_step(engine, merged):
    engine.clear_cache()
    before = engine.stats().num_steps
    with engine.session() as session:
        each = {name: debate(session, model=name) for name in (*MODELS, *MODELS[::-1])}
        engine.run_until_idle()
    alone = {}
    for name in MODELS:
        with merged[name].session() as session:
            alone[name] = debate(session)
            merged[name].run_until_idle()
    assert engine.stats().num_steps - before <= 20, "six debates in the steps of one"
    for name, messages in each.items():
        assert [m.tokens for m in messages] == [m.tokens for m in alone[name]]
    assert len({tuple(messages[-1].tokens) for messages in each.values()}) == 3, "the adapters differ"


@given(nodes=graphs(5), seeds=st.lists(st.sampled_from(MODELS), min_size=5, max_size=5))
@settings(max_examples=many(40), deadline=None)
def test_every_call_sees_what_its_own_model_would_have_made(engine, merged, nodes, seeds):
    """Whatever model encoded the parents: a call on a model is what it is where that model does everything."""
    models = seeds[: len(nodes)]

    def run(session, models):
        messages = []
        for node, name in zip(nodes, models, strict=True):
            parents = [messages[i] for i in node.parents]
            place = {"offsets": node.offsets, "new_offset": node.position, "model": name}
            if node.generated is None:
                messages.append(session.prefill(node.tokens, parents, **place))
            else:
                forced = {"forced_tokens": node.generated, "footer": node.footer, "sampling": HEARD}
                messages.append(session.decode(node.tokens, parents, **place, **forced))
        return [None if m.logprobs is None else values(m) for m in messages]

    with engine.session() as session:
        result = run(session, models)
    engine.check()
    for name in set(models):
        with merged[name].session() as session:
            expected = run(session, [None] * len(nodes))
        for index, model in enumerate(models):
            if model == name and result[index] is not None:
                assert result[index] == pytest.approx(expected[index], abs=1e-4)


def test_reuse_has_to_be_asked_for(engine, merged):
    engine.clear_cache()
    with engine.session() as session, merged["a"].session() as other:
        text = session.prefill([1, 2, 3, 4, 5, 6])
        again = session.decode([7], [text], sampling=GREEDY, model="a")
        reused = session.decode([7], [text], sampling=GREEDY, model="a", kv_reuse="reuse")
        expected = other.decode([7], [other.prefill([1, 2, 3, 4, 5, 6])], sampling=GREEDY)
        assert values(again) == pytest.approx(values(expected), abs=1e-4)
        assert values(reused)[0] != pytest.approx(values(expected)[0], abs=1e-4)
        assert text.variants["a", "recompute"].usage.computed_tokens == 6
        with pytest.raises(ConfigError, match="kv_reuse"):
            session.decode([7], [text], model="a", kv_reuse="some")


def test_equal_work_is_found_by_its_own_model_only(engine):
    engine.clear_cache()
    with engine.session() as session:
        first = {name: session.prefill([5, 5, 5, 6], model=name).result() for name in MODELS}
        again = {name: session.prefill([5, 5, 5, 6], model=name).result() for name in MODELS}
    assert [m.usage.computed_tokens for m in first.values()] == [4, 4, 4]
    assert [m.usage.computed_tokens for m in again.values()] == [0, 0, 0]


def test_two_names_of_one_adapter_share_what_they_encode(engine, folders):
    if "twin" not in engine.models:
        engine.add_adapter("twin", folders["a"])
    engine.clear_cache()
    with engine.session() as session:
        session.prefill([8, 8, 8], model="a").result()
        assert session.prefill([8, 8, 8], model="twin").result().usage.computed_tokens == 0


def test_calls_on_what_others_still_decode_run_together(engine, merged):
    """Eight drafts by one model, each read by another: nothing is waited for when it is submitted."""
    engine.clear_cache()
    before = engine.stats().num_steps
    with engine.session() as session, merged["b"].session() as other:
        drafts = [session.decode([i], sampling=GREEDY, model="a") for i in range(8)]
        notes = [session.decode([20], [d], sampling=GREEDY, model="b") for d in drafts]
        drafts[0].release()
        engine.run_until_idle()
        assert engine.stats().num_steps - before <= 20
        for draft, note in list(zip(drafts, notes, strict=True))[1:]:
            told = other.prefill(draft.tokens)
            expected = other.decode([20], [told], sampling=GREEDY)
            assert note.tokens == expected.tokens and values(note) == pytest.approx(values(expected), abs=1e-4)
    engine.check()


def test_a_version_of_what_fails_fails_too(engine):
    from choreograph.errors import ChoreographError, RequestFailedError

    with engine.session() as session:
        draft = session.decode([1], sampling=SamplingParams(max_tokens=200))
        late = session.decode([2] * 200, [draft], sampling=GREEDY)  # past the model's last position
        note = session.decode([3], [late], sampling=GREEDY, model="a")
        engine.run_until_idle()
        with pytest.raises((RequestFailedError, ChoreographError)):
            note.result()
    engine.check()


def test_bad_calls_leave_no_versions_behind(engine):
    from choreograph.errors import InvalidPositionError

    with engine.session() as session:
        text = session.prefill([1, 2, 3])
        for bad in ({"offsets": [-1]}, {"new_offset": 10_000}):
            with pytest.raises(InvalidPositionError):
                session.decode([4], [text], model="a", **bad)
        with pytest.raises(InvalidPositionError):
            session.decode([{"header": [4], "parents": [text], "model": "a"}, {"header": [4], "new_offset": -1}])
        assert not text.variants and len(session.messages) == 1


def test_an_adapter_can_be_replaced(folders):
    engine = serve({"x": folders["a"]})
    with engine.session(model="x") as session:
        first = session.decode([1, 2], sampling=GREEDY)
        with pytest.raises(ConfigError, match="in use"):
            engine.remove_adapter("x")
        before = first.tokens
        with pytest.raises(ConfigError, match="in use"):
            engine.remove_adapter("x")
    engine.remove_adapter("x")
    with pytest.raises(ConfigError, match="there are"):
        engine.remove_adapter("x")
    engine.add_adapter("x", folders["b"])
    with engine.session(model="x") as session:
        assert session.decode([1, 2], sampling=GREEDY).tokens != before


def test_of_an_adapter_on_the_hub_safetensors_alone_are_read(folders, monkeypatch):
    asked = []

    def download(repository, file):
        asked.append(f"{repository}/{file}")
        if repository == "somebody/pickled" and file.endswith("safetensors"):
            raise OSError(f"{repository} holds no {file}")
        return str(folders["a"] / file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    engine = serve({"x": "somebody/adapter", "a": folders["a"]})
    assert asked == ["somebody/adapter/adapter_config.json", "somebody/adapter/adapter_model.safetensors"]
    assert inspect(engine).model_set.fingerprint("x") == inspect(engine).model_set.fingerprint("a")
    with pytest.raises(ModelError, match=r"holds no adapter_model\.safetensors"):
        engine.add_adapter("y", "somebody/pickled")


def test_prefixes_of_models_are_apart(engine):
    engine.clear_cache()
    with engine.session(mode="prefix") as session:
        text = session.prefill(list(range(20)))
        session.decode([30], [text], sampling=GREEDY).result()
        other = session.decode([30], [text], sampling=GREEDY, model="b").result()
        again = session.decode([31], [text], sampling=GREEDY, model="b").result()
    assert other.usage.cached_tokens == 0
    assert again.usage.cached_tokens == 20


def test_an_evicted_entry_is_recomputed_by_its_adapter(folders):
    def run(tokens):
        engine, kinds = serve(folders, tokens), []
        engine.events.subscribe(lambda event: kinds.append(event.kind))
        with engine.session() as session:
            parts = [session.prefill([i] * 12, model=name).result() for i, name in enumerate(("a", "base", "b", "a"))]
            said = [session.decode([9], [p], sampling=GREEDY, model=p.model).result() for p in (*parts, *parts)]
            result = [(m.tokens, values(m)) for m in said]
        engine.check()
        return result, kinds

    (small, kinds), (large, _) = run(64), run(2048)
    assert "recomputing" in kinds, "in little room something has to be built again"
    for (tokens, heard), (wanted, expected) in zip(small, large, strict=True):
        assert tokens == wanted and heard == pytest.approx(expected, abs=1e-4)


def test_parts_borrowed_and_released_messages_have_versions(engine, merged):
    def run(engine, model):
        with engine.session() as outer, engine.session() as session:
            root = outer.prefill([1, 2, 3])
            text = outer.prefill([4, 5, 6, 7, 8], [root])
            mine = session.import_message(text)
            late = session.prefill([9, 9], [mine])
            mine.release()
            seen = [late, session.import_message(text)[1:4]]
            with engine.session() as third:
                twice = third.import_message(session.import_message(text))
                other = third.decode([10], [twice], sampling=GREEDY, model=model)
                said = session.decode([10], seen, sampling=GREEDY, model=model)
                return said.tokens + other.tokens, values(said) + values(other)

    tokens, heard = run(engine, "b")
    wanted, expected = run(merged["b"], None)
    assert tokens == wanted and heard == pytest.approx(expected, abs=1e-4)


@pytest.mark.usefixtures("boards")
def test_recorded_steps_are_of_the_base_model(folders, merged):
    engine = engine_with(tiny_models.build(), use_graphs=True, tokens=2048)
    engine.add_adapter("a", folders["a"])
    with engine.session() as session:
        plain, adapted = debate(session)[-1].tokens, debate(session, model="a")[-1].tokens
    for name, tokens in (("base", plain), ("a", adapted)):
        with merged[name].session() as session:
            assert debate(session)[-1].tokens == tokens


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"target_modules": ["embed_tokens", "q_proj"]}, "embed_tokens|linear"),
        ({"target_modules": ["lm_head"]}, "output layer"),
        ({"layer_replication": [(0, 2), (0, 2)]}, "layer_replication"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
    ],
)
def test_what_is_more_than_lora_of_linear_layers_is_refused(tmp_path, options, words):
    folder = save_adapter(tmp_path / "x", 3, **options)
    with pytest.raises(ModelError, match=words):
        serve({"x": folder})


@pytest.mark.parametrize(
    ("option", "value", "is_served"),
    [
        ("use_future_scaling", True, False),
        ("future_scaling", 0.5, False),
        ("future_config", {"kind": "x"}, False),
        ("use_future_scaling", False, True),
        ("future_config", None, True),
        ("future_modules", [], True),
        ("use_qalora", True, False),
        ("alora_invocation_tokens", [3, 4], False),
        ("fan_in_fan_out", True, False),
    ],
)
def test_options_of_another_peft_are_refused_by_name(tmp_path, recwarn, option, value, is_served):
    folder = save_adapter(tmp_path / "x", 3)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {option: value}))
    if is_served:
        assert "x" in inspect(serve({"x": folder})).hf_model.adapters
    else:
        with pytest.raises(ModelError, match=rf"{option}=.* is not served"):
            serve({"x": folder})
    assert not [warning for warning in recwarn if option in str(warning.message)]


def test_adapters_that_do_not_fit_are_refused(tmp_path, engine, folders):
    with pytest.raises(ModelError, match="no adapter_config"):
        engine.add_adapter("x", tmp_path)
    with pytest.raises(ConfigError, match="new name"):
        engine.add_adapter("a", folders["a"])
    with pytest.raises(ConfigError, match="new name"):
        engine.add_adapter("base", folders["a"])
    with pytest.raises(ConfigError, match="use one of"):
        engine.session(model="c")
    with engine.session() as session, pytest.raises(ConfigError, match="use one of"):
        session.prefill([1], model="c")
    other = tiny_models.build(vocabulary=61)
    wide = type(other)(type(other.config)(**{**other.config.to_dict(), "hidden_size": 64}))
    with pytest.raises(ModelError, match="this model's"):
        Engine.from_pretrained(wide, adapters={"a": folders["a"]})
    config = json.loads((folders["a"] / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"peft_type": "IA3"}))
    with pytest.raises(ModelError):
        engine.add_adapter("x", tmp_path)


def test_the_owner_s_model_is_not_changed(folders):
    model = tiny_models.build()
    ids = torch.arange(10)[None]
    before = model(ids).logits
    engine = Engine.from_pretrained(model, adapters=folders)
    with engine.session(model="a") as session:
        session.prefill([1, 2, 3]).result()
    torch.testing.assert_close(model(ids).logits, before)
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in tiny_models.build().named_parameters()]


def test_a_long_chain_is_encoded_again_without_recursion(engine):
    with engine.session() as session, limit_recursion(250):
        message = session.prefill([1])
        for _ in range(300):
            message = session.prefill([2], [message], offsets=[0], new_offset=1)
        said = session.decode([3], [message], sampling=SamplingParams(max_tokens=1), model="b")
        assert len(said.tokens) == 2
        assert session.mode == "choreographed" and message.variants["b", "recompute"].done


def test_a_copy_goes_back_to_the_model_that_made_it(engine):
    from choreograph.errors import InvalidRequestError

    with engine.session() as session:
        copy = session.prefill([4, 4, 4], model="a").export_kv()
        with pytest.raises(InvalidRequestError, match="another model"):
            session.import_kv([4, 4, 4], copy)
        assert session.import_kv([4, 4, 4], copy, model="a").usage.cached_tokens == 3


@pytest.mark.parametrize(("receiver", "sender"), [("a", "base"), ("base", "a"), ("b", "a")])
def test_an_adapter_shares_in_part_as_a_model_of_its_own_would(folders, merged, receiver, sender):
    models = {name: inspect(merged[name]).model for name in folders}
    result = []
    for engine in (serve(folders), Engine.from_pretrained(tiny_models.build(), models=models)):
        engine.enable_layer_reuse(receiver, sender, pattern=[0, 1, 2])
        with engine.session() as session:
            text = session.prefill([1, 2, 3, 4, 5, 6], model=sender)
            said = session.decode([7], [text], model=receiver, kv_reuse="partial", sampling=GREEDY)
            result.append(values(said))
            text = session.prefill([1, 2, 3, 4, 5, 6], model=receiver)
            own = session.decode([7], [text], model=receiver, sampling=GREEDY)
            assert values(own) != pytest.approx(values(said), abs=1e-4)
    assert result[0] == pytest.approx(result[1], abs=1e-4)


LAYERS = dict.fromkeys(
    ["llama", "qwen3", "gemma2", "phi", "phi3", "opt", "gpt_neox", "falcon", "bloom", "mpt"], "all-linear"
) | {"mixtral": ["q_proj", "v_proj"]}  # experts are no linear layers; of none of them, peft writes an empty list


@pytest.mark.parametrize("family", LAYERS)
def test_linear_layers_of_a_family_merged_and_unmerged(family, tmp_path):
    """Some hand their layers (N, E) instead of (1, N, E). The base's rows of the same step stay the base's."""

    def built():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(CONFIGS[family]).eval()

    asked = LoraConfig(r=4, lora_alpha=16, target_modules=LAYERS[family], init_lora_weights=False)
    get_peft_model(built(), asked).save_pretrained(str(tmp_path))
    merged = Engine.from_pretrained(PeftModel.from_pretrained(built(), str(tmp_path)).merge_and_unload())
    engine, plain = Engine.from_pretrained(built(), adapters={"a": tmp_path}), Engine.from_pretrained(built())
    once = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=0)

    def heard(engine, models):
        with engine.session() as session:
            texts = [session.prefill([n + 3] * 40, model=model) for n, model in enumerate(models)]
            said = [session.decode([5], [x], sampling=once, model=m) for x, m in zip(texts, models, strict=True)]
            return [values(message) for message in said]

    adapted, base = heard(engine, ["a", "base"])
    expected, _ = heard(merged, ["base", "base"])
    _, own = heard(plain, ["base", "base"])
    assert adapted == pytest.approx(expected, abs=1e-4)
    assert base == pytest.approx(own, abs=1e-4)
