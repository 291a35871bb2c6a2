"""Every row of the table of families: a tiny random model of it is Hugging Face's own, chained, moved, in all modes."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.hypothesis_profile import many
from helpers.inspect_engine import inspect
from helpers.message_graphs import Node, default_placements, graphs
from helpers.model_configs import BARE, CONFIGS, LONG, POSITIONS, SHAPE, VOCABULARY, WIDE
from helpers.oracle_families import brute_force
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    CohereConfig,
    DiffLlamaConfig,
    DogeConfig,
    FalconH1Config,
    Gemma3TextConfig,
    GlmConfig,
    GPTJConfig,
    JetMoeConfig,
    Llama4TextConfig,
    MambaConfig,
    MptConfig,
    Olmo3Config,
    PhimoeConfig,
    SeedOssConfig,
    StableLmConfig,
    Starcoder2Config,
)

from choreograph import CacheConfig, Engine, EngineConfig, SamplingParams, SchedulerConfig
from choreograph.errors import InvalidPositionError, ModelError
from choreograph.models import hf_model as adapter_module
from choreograph.models.architectures import SUPPORTED_ARCHITECTURES
from choreograph.models.hf_model import HFModel

GREEDY = SamplingParams(temperature=0, max_tokens=10)


def build(name: str):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[name]).eval()


MODELS = {name: build(name) for name in CONFIGS}
FIXED = ["gpt2", "opt"]  # learned positions
MOVABLE = [name for name in CONFIGS if name not in FIXED]


def make_engine(name: str, backend: str = "auto", step: int = 1024) -> Engine:
    config = EngineConfig(
        backend=backend,
        cache=CacheConfig(capacity=2048, page_size=4, poison_freed_pages=True),
        scheduler=SchedulerConfig(max_num_batched_tokens=step),
        max_model_len=POSITIONS if name == "llama, dynamic" else None,  # a longer one has another table
    )
    return Engine.from_pretrained(MODELS[name], config=config)


def prompt(length: int, seed: int = 5) -> list[int]:
    return torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def generated(name: str, tokens: list[int], count: int) -> list[int]:
    ids = torch.tensor([tokens])
    with torch.inference_mode():
        result = MODELS[name].generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
        )
    return result[0, len(tokens) :].tolist()


def test_every_family_is_proved_here():
    assert {name.split(",")[0] for name in CONFIGS} == set(SUPPORTED_ARCHITECTURES)


@pytest.mark.parametrize("backend", ["auto", "sdpa"])
@pytest.mark.parametrize("name", [n for n in CONFIGS if n != "phi3, longrope"])  # frozen: see below
def test_a_chain_is_the_models_own_generation_in_every_mode(name, backend):
    tokens = prompt(30)
    expected = generated(name, tokens, GREEDY.max_tokens)
    for mode in ("choreographed", "prefix", "naive"):
        engine = make_engine(name, backend, step=9)
        with engine.session(mode=mode) as session:
            first = session.prefill(tokens[:10])
            second = session.prefill(tokens[10:29], [first])
            assert session.decode(tokens[29:], [first, second], sampling=GREEDY).output_token_ids == expected
            engine.check()


@pytest.mark.parametrize("name", MOVABLE)
def test_everything_moved_by_one_distance_is_the_same_conversation(name):
    tokens, engine = prompt(30), make_engine(name)
    with engine.session() as session:
        first = session.prefill(tokens[:10])
        second = session.prefill(tokens[10:29], [first])
        here = session.decode(tokens[29:], [first, second], sampling=GREEDY)
        there = session.decode(tokens[29:], [first, second], offsets=[70, 80], new_offset=99, sampling=GREEDY)
        assert there.output_token_ids == here.output_token_ids


@pytest.mark.parametrize("name", MOVABLE)
@settings(max_examples=many(12), deadline=None)
@given(nodes=graphs(), step=st.sampled_from([3, 1024]), backend=st.sampled_from(["auto", "sdpa"]))
def test_random_graphs_equal_brute_force(name, nodes, step, backend):
    engine = make_engine(name, backend, step)
    last = list(range(len(nodes)))[-4:]  # whatever was encoded is heard of
    nodes = [*nodes, Node([1, 2], last, [None] * len(last), generated=[3, 4])]
    with engine.session(seed=0) as session:
        messages = submit(session, nodes)
        engine.run_until_idle()
        engine.check()
        expected = brute_force(MODELS[name], nodes, default_placements(nodes))
        for node, message, truth in zip(nodes, messages, expected, strict=True):
            for i, got in enumerate(message.logprobs or []):
                row = np.array([got.top[token] for token in range(VOCABULARY)])
                np.testing.assert_allclose(row, truth[len(node.tokens) + i - 1], atol=2e-4)


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=many(6, minimum=3), deadline=None)
@given(nodes=graphs(), step=st.sampled_from([3, 1024]))
def test_prefix_mode_says_what_naive_mode_says(name, nodes, step):
    """Both compute whole prompts, one of them what it has not seen before only."""
    heard = []
    for mode in ("prefix", "naive"):
        engine = make_engine(name, step=step)
        with engine.session(mode=mode, seed=0) as session:
            messages = submit(session, nodes)
            engine.run_until_idle()
            engine.check()
            heard.append([value for m in messages for one in m.logprobs or [] for value in sorted(one.top.items())])
    for (token, mine), (same, theirs) in zip(*heard, strict=True):
        assert token == same
        assert mine == pytest.approx(theirs, abs=2e-4)


def submit(session, nodes) -> list:
    messages: list = []
    for node in nodes:
        place = {
            "parents": [messages[p] for p in node.parents],
            "offsets": node.offsets,
            "new_offset": node.position,
        }
        if node.generated is None:
            messages.append(session.prefill(node.tokens, **place))
        else:
            more = {"sampling": SamplingParams(logprobs=VOCABULARY), "footer": node.footer}
            messages.append(session.decode(node.tokens, **place, **more, forced_tokens=node.generated))
    return messages


@pytest.mark.parametrize("name", CONFIGS)
def test_calls_in_parallel_equal_calls_one_by_one(name):
    def run(drain: bool) -> list[list[int]]:
        engine = make_engine(name)
        with engine.session(seed=3) as session:
            root, answers = session.prefill(prompt(12)), []
            for i in range(5):
                sampling = SamplingParams(temperature=0.8, max_tokens=8)
                answers.append(session.decode([i, 7], [root], sampling=sampling))
                if drain:
                    engine.run_until_idle()
            # every answer is encoded right behind the root, and seen there by one reader that stands behind them all
            last = session.decode([5], [root, answers[0]], sampling=replace(GREEDY, max_tokens=6))
            return [message.output_token_ids for message in (*answers, last)]

    assert run(False) == run(True)


# -- windows ---------------------------------------------------------------------------------------------------


def test_a_window_hides_by_logical_distance_not_by_order():
    """A context far away in logical positions is not seen; the same one placed near is."""
    engine, far = make_engine("mistral, window"), SamplingParams(temperature=0, max_tokens=1, logprobs=VOCABULARY)
    with engine.session() as session:
        context = session.prefill(prompt(5))
        alone = session.decode([3, 4], new_offset=100, sampling=far).logprobs[0].top
        hidden = session.decode([3, 4], [context], offsets=[10], new_offset=100, sampling=far).logprobs[0].top
        behind = session.decode([3, 4], [context], offsets=[150], new_offset=100, sampling=far).logprobs[0].top
        seen = session.decode([3, 4], [context], offsets=[95], new_offset=100, sampling=far).logprobs[0].top
    assert hidden == pytest.approx(alone, abs=1e-5)
    assert behind == pytest.approx(alone, abs=1e-5)
    assert seen != pytest.approx(alone, abs=1e-2)


# -- rotary tables that change with the length --------------------------------------------------------------------


@pytest.mark.parametrize(("positions", "short"), [(64, True), (None, False)])
def test_longrope_is_frozen_at_the_longest_context(positions, short):
    """With few positions a prompt is computed with the short factors, else with the long ones, whatever its length."""
    model, tokens = build("phi3, longrope"), prompt(30)
    engine = Engine.from_pretrained(model, config=EngineConfig(max_model_len=positions))
    with engine.session() as session:
        first = session.prefill(tokens[:20])
        got = session.decode(tokens[20:], [first], sampling=SamplingParams(logprobs=VOCABULARY), forced_tokens=[1, 2])
        rows = [[one.top[token] for token in range(VOCABULARY)] for one in got.logprobs]
    ids = torch.tensor([[*tokens, 1]])
    at = torch.arange(31)[None]
    if not short:  # transformers takes the long factors where any position is past the original limit
        ids = torch.cat([ids, torch.tensor([[0]])], dim=1)
        at = torch.cat([at, torch.tensor([[200]])], dim=1)
    with torch.inference_mode():
        expected = model(ids, position_ids=at).logits[0, 29:31].log_softmax(-1)
    torch.testing.assert_close(torch.tensor(rows), expected, atol=2e-4, rtol=1e-4)


# -- learned positions ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FIXED)
def test_learned_positions_stay_at_home_and_say_why(name):
    tokens, engine = prompt(30), make_engine(name)
    with engine.session() as session:
        first = session.prefill(tokens[:10])
        same = session.prefill(tokens[:10], new_offset=40)  # elsewhere: another encoding, never taken for the first
        moved = session.decode([1], [first], offsets=[5], sampling=GREEDY)
        with pytest.raises(InvalidPositionError, match=r"encoded at 0 and is placed at 5.*learned positions.*prefix"):
            moved.result()
        there = session.decode([1], [same], offsets=[40], new_offset=50, sampling=GREEDY).output_token_ids
        here = session.decode([1], [first], sampling=GREEDY).output_token_ids
        assert inspect(same).entry is not inspect(first).entry
        assert len(here) == len(there) == GREEDY.max_tokens
        copy = first.export_kv()
        with pytest.raises(InvalidPositionError, match=r"computed at position 0, not 60, and .* has learned positions"):
            session.import_kv(tokens[:10], copy, new_offset=60)
        engine.check()


# -- what is not in the table ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        CohereConfig(**WIDE),
        Cohere2Config(**WIDE, sliding_window=8),
        GlmConfig(**SHAPE),
        Starcoder2Config(**WIDE),
        Olmo3Config(**WIDE, sliding_window=8),
        JetMoeConfig(**WIDE | {"num_attention_heads": None}, kv_channels=16, num_local_experts=4),  # makes views
    ],
    ids=lambda config: config.model_type,
)
def test_an_unknown_architecture_is_served_if_it_passes_the_check(config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    engine = Engine.from_pretrained(model)
    ids = torch.tensor([prompt(20)])
    expected = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)[0, 20:].tolist()
    with engine.session() as session:
        first = session.prefill(prompt(20)[:12], new_offset=31)
        answer = session.decode(prompt(20)[12:], [first], offsets=[0], sampling=replace(GREEDY, max_tokens=8))
        assert answer.output_token_ids == expected


def test_an_unknown_architecture_in_double_precision_is_served():
    """It differs from its own pass by what the reference rounds, in float32."""
    torch.manual_seed(0)
    config = GlmConfig(**WIDE | {"num_hidden_layers": 4, "vocab_size": 97})
    assert Engine.from_pretrained(AutoModelForCausalLM.from_config(config).double()).model_info.dtype == torch.float64


def test_an_unknown_architecture_that_fails_the_check_is_refused(monkeypatch):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CohereConfig(**WIDE))
    original = HFModel.logits
    monkeypatch.setattr(HFModel, "logits", lambda self, *a, **k: original(self, *a, **k) * 1.5)
    with pytest.raises(ModelError, match=r"'cohere' is not proved, and fails the check: chained messages differ"):
        Engine.from_pretrained(model)


def test_a_wrong_rotary_layout_fails_the_check(monkeypatch):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CohereConfig(**WIDE)).eval()
    right = adapter_module.analyze

    def wrong(*given):
        shape = right(*given)
        kinds = tuple(replace(kind, rope=replace(kind.rope, interleaved=False)) for kind in shape.attention_specs)
        return replace(shape, attention_specs=kinds)

    monkeypatch.setattr(adapter_module, "analyze", wrong)
    with pytest.raises(ModelError, match="messages that were encoded elsewhere differ"):
        Engine.from_pretrained(model)


def test_numbers_that_are_none_fail_the_check():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CohereConfig(**WIDE)).eval()
    model.model.norm.weight.data.fill_(float("nan"))
    with pytest.raises(ModelError, match="fails the check"):
        Engine.from_pretrained(model)
    model = build("llama")
    model.model.layers[1].self_attn.v_proj.weight.data.fill_(float("nan"))
    with pytest.raises(ModelError, match="not finite"):
        Engine.from_pretrained(model)


def test_a_window_that_only_the_mask_knows_is_refused():
    config = PhimoeConfig(**WIDE, sliding_window=64, num_local_experts=2)
    with pytest.raises(ModelError, match=r"'phimoe' is not proved, .* sliding_window of 64"):
        Engine.from_pretrained(AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            FalconH1Config(**WIDE, mamba_d_ssm=16, mamba_n_heads=2, mamba_d_head=8, mamba_d_state=4),
            "layer 1: a token depends on its neighbors in other ways than through attention",
        ),
        (DiffLlamaConfig(**WIDE), "layer 0 computes attention several times"),
        (DogeConfig(**WIDE), "its layers work out masks of their own"),
        (
            Gemma3TextConfig(**SHAPE, sliding_window=8, use_bidirectional_attention=True),
            "'gemma3_text' cannot be served: its tokens look at later ones too",
        ),
        (
            Llama4TextConfig(**SHAPE, num_local_experts=2, attention_chunk_size=512, floor_scale=100),
            "its scores grow with a token's place in a pass, from 100 on; use max_model_len=99 or fewer",
        ),
        (
            MptConfig(**BARE, d_model=64, n_heads=4, n_layers=2, attn_config={"alibi_bias_max": 4}),  # not read
            "'mpt' fails the check: chained messages differ",
        ),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_what_would_be_computed_in_another_way_than_the_model_does_is_refused(config, reason):
    torch.manual_seed(0)
    with pytest.raises(ModelError, match=reason):
        Engine.from_pretrained(AutoModelForCausalLM.from_config(config))


def test_a_model_whose_own_pass_fails_is_refused_with_what_it_says(monkeypatch):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CohereConfig(**WIDE))
    original = type(model.model).forward

    def forward(self, *given, step=None, **named):
        if step is None:
            raise TypeError("no padding token")
        return original(self, *given, step=step, **named)

    monkeypatch.setattr(type(model.model), "forward", forward)
    with pytest.raises(ModelError, match="its own forward pass fails: TypeError: no padding token"):
        Engine.from_pretrained(model)


def test_longrope_of_an_unknown_architecture_is_checked_as_it_is_frozen():
    torch.manual_seed(0)
    config = SeedOssConfig(**SHAPE, rope_parameters=LONG)
    assert (
        Engine.from_pretrained(AutoModelForCausalLM.from_config(config).eval()).model_info.position_encoding == "rotary"
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_large_key_biases_hide_no_rotation(dtype):
    """As Qwen2.5 has them, in dimensions that turn slowly."""
    model = build("qwen2")
    for layer in model.model.layers:
        layer.self_attn.k_proj.bias.data[7] = 300.0
    facts = Engine.from_pretrained(model, dtype=dtype).model_info
    assert all(kind.rope is not None for kind in facts.attention_specs)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (  # transformers 5.24 has put it behind the interface
            GPTJConfig(vocab_size=61, n_embd=64, n_head=4, n_layer=2, rotary_dim=8),
            "0 of its 2 layers .* interface|positions change its keys in a way that is not known",
        ),
        (MambaConfig(vocab_size=61, hidden_size=32, num_hidden_layers=2), "0 of its 2 layers .* interface"),
        (StableLmConfig(**WIDE), "'stablelm' cannot be served: its layers pass no keyword arguments on to attention"),
    ],
    ids=["gptj", "mamba", "stablelm"],
)
def test_what_does_not_go_through_the_interface_is_refused_with_the_reason(config, reason):
    with pytest.raises(ModelError, match=reason):
        Engine.from_pretrained(AutoModelForCausalLM.from_config(config))


def test_a_family_that_is_computed_in_another_way_than_the_table_says_is_refused(monkeypatch):
    monkeypatch.setitem(
        SUPPORTED_ARCHITECTURES, "llama", SUPPORTED_ARCHITECTURES["llama"]._replace(position_encodings=("alibi",))
    )
    with pytest.raises(ModelError, match="measured to be 'rotary'"):
        Engine.from_pretrained(build("llama"))
