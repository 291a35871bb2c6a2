"""The contract against the float64 oracle: random message graphs, every shape of head and rotary, all at once."""

import numpy as np
import pytest
import torch
from helpers.hypothesis_profile import many
from helpers.inspect_engine import inspect
from helpers.message_graphs import POSITIONS, VOCABULARY, Node, default_placements, graphs
from helpers.oracle import Oracle, OracleMessage
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from choreograph import CacheConfig, Engine, EngineConfig, SamplingParams, SchedulerConfig

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SHAPES = {
    "gqa": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    "mha": {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16},
    "mqa-odd-head": {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 10},
    "llama3-rope": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rope_parameters": LLAMA3},
}


def build(shape: str) -> LlamaForCausalLM:
    torch.manual_seed(sum(map(ord, shape)))
    options = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, **SHAPES[shape]}
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        max_position_embeddings=POSITIONS,
        initializer_range=0.3,
        eos_token_id=None,
        bos_token_id=None,
        tie_word_embeddings=False,
        **options,
    )
    return LlamaForCausalLM(config).eval()


MODELS = {shape: build(shape) for shape in SHAPES}
ORACLES = {shape: Oracle(model) for shape, model in MODELS.items()}


def make_engine(shape: str, backend: str, step_tokens: int) -> Engine:
    config = EngineConfig(
        backend=backend,
        cache=CacheConfig(capacity=1024, page_size=4, poison_freed_pages=True),
        scheduler=SchedulerConfig(max_num_batched_tokens=step_tokens),
    )
    return Engine.from_pretrained(MODELS[shape], config=config)


def submit(session, nodes: list[Node]) -> list:
    """All calls at once; nothing runs yet, so calls that place one parent differently are in flight together."""
    messages = []
    everything = SamplingParams(logprobs=VOCABULARY)
    for node in nodes:
        place = {
            "parents": [messages[p] for p in node.parents],
            "offsets": node.offsets,
            "new_offset": node.position,
        }
        if node.generated is None:
            messages.append(session.prefill(node.tokens, **place))
        else:
            messages.append(
                session.decode(
                    node.tokens, **place, sampling=everything, footer=node.footer, forced_tokens=node.generated
                )
            )
    return messages


def expected(shape: str, nodes: list[Node]) -> list[OracleMessage]:
    computed: list[OracleMessage] = []
    for node, (offsets, start) in zip(nodes, default_placements(nodes), strict=True):
        parents = [(computed[p], o) for p, o in zip(node.parents, offsets, strict=True)]
        computed.append(ORACLES[shape].compute(OracleMessage(node.all_tokens, start, parents)))
    return computed


def assert_same(engine: Engine, nodes: list[Node], messages: list, wanted: list[OracleMessage]) -> None:
    for node, message, truth in zip(nodes, messages, wanted, strict=True):
        assert message.tokens == node.all_tokens
        assert message.position == truth.position
        for i, got in enumerate(message.logprobs or []):
            row = np.array([got.top[token] for token in range(VOCABULARY)])
            np.testing.assert_allclose(row, truth.logprobs[len(node.tokens) + i - 1], atol=1e-4)
        assert_slots(engine, message, truth)


def assert_slots(engine: Engine, message, truth: OracleMessage) -> None:
    """For every stored slot, the recorded position is the rotation that its key has; values never move."""
    entry, arena = inspect(message).entry, inspect(engine).pool
    rotate = ORACLES[next(s for s, m in MODELS.items() if m is inspect(engine).model)].rotate
    assert entry.is_complete
    for layer in range(len(arena.keys)):
        for j in range(len(truth.tokens)):
            home = rotate(truth.keys[layer][j], entry.base_position + j)
            np.testing.assert_allclose(arena.keys[layer][entry.slot(j)].numpy(), home, atol=2e-4)
            np.testing.assert_allclose(arena.values[layer][entry.slot(j)].numpy(), truth.values[layer][j], atol=2e-4)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("backend", ["auto", "sdpa"])
@settings(max_examples=many(60), deadline=None)
@given(nodes=graphs(), step_tokens=st.sampled_from([3, 16, 1024]))
def test_random_graphs_equal_the_oracle(shape, backend, nodes, step_tokens):
    engine = make_engine(shape, backend, step_tokens)
    with engine.session(seed=0) as session:
        messages = submit(session, nodes)
        engine.run_until_idle()
        engine.check()
        assert_same(engine, nodes, messages, expected(shape, nodes))
    engine.check()


@pytest.mark.parametrize("backend", ["auto", "sdpa", "reference"])
def test_every_irregular_placement_in_one_graph(backend):
    """Gaps, overlaps, reordering, a parent behind its reader, one parent at two offsets in flight together."""
    nodes = [
        Node([1, 2, 3, 4, 5]),
        Node([7], parents=[0], offsets=[None]),
        Node([8, 9], parents=[1, 0], offsets=[40, 0], position=20, generated=[3, 4, 5, 6, 7, 8], footer=[2]),
        Node([8, 9], parents=[1, 0], offsets=[3, 5], position=4, generated=[3, 4], footer=[]),
        Node([5, 6], parents=[2, 3, 0], offsets=[100, 100, 100], position=0, generated=[1], footer=[9, 9]),
    ]
    engine = make_engine("gqa", backend, 1024)
    with engine.session() as session:
        messages = submit(session, nodes)
        engine.run_until_idle()
        assert_same(engine, nodes, messages, expected("gqa", nodes))
        assert messages[4].usage.cached_tokens == sum(m.length for m in (messages[2], messages[3], messages[0]))


def test_the_second_generated_token_has_no_gap_behind_the_header():
    """Contract, point 4: the first generated token stands right behind the header and is encoded there."""
    nodes = [Node([1, 2, 3]), Node([4, 5], parents=[0], offsets=[None], generated=[6, 7, 8], footer=[9])]
    engine = make_engine("gqa", "auto", 1024)
    with engine.session() as session:
        messages = submit(session, nodes)
        engine.run_until_idle()
        entry = inspect(messages[1]).entry
        assert (entry.base_position, entry.num_computed_tokens) == (3, 6)
        assert_same(engine, nodes, messages, expected("gqa", nodes))


def test_content_found_again_at_another_place_gives_the_same_views():
    """Equal work is named by relative placement: the second message uses the first one's encoding, moved."""
    nodes = [
        Node([1, 2, 3]),
        Node([4, 5], parents=[0], offsets=[10], position=20),
        Node([4, 5], parents=[0], offsets=[40], position=50),
        Node([6], parents=[2, 0], offsets=[50, 3], position=60, generated=[7, 8]),
    ]
    engine = make_engine("gqa", "auto", 1024)
    with engine.session() as session:
        messages = submit(session, nodes)
        engine.run_until_idle()
        assert inspect(messages[2]).entry is inspect(messages[1]).entry
        assert messages[2].finish_reason == "cached"
        assert_same(engine, [nodes[3]], [messages[3]], [expected("gqa", nodes)[3]])
