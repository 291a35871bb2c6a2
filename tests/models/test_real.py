"""Real weights: the embedded model, and what the folder that `CHOREOGRAPH_MODELS` names holds (.gguf, model folders).

Tier `slow`: `CHOREOGRAPH_MODELS=... pytest -m slow tests/models/test_real.py`. In float32, in which batches change
nothing.
"""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.inspect_engine import inspect
from helpers.message_graphs import Node, default_placements
from helpers.oracle_families import brute_force

from choreograph import CacheConfig, Engine, EngineConfig, SamplingParams
from choreograph.models.loader import DEFAULT_MODEL

pytestmark = pytest.mark.slow
TEXT = (
    "The harbour was quiet in the morning. Two boats had come in overnight, and their nets lay in heaps on the stones. "
    "An old man sat mending one of them, and did not look up when the bell rang for the first time. "
)


def sources() -> list[str]:
    folder = os.environ.get("CHOREOGRAPH_MODELS")
    result = sorted(p for p in Path(folder).iterdir() if p.suffix == ".gguf" or p.is_dir()) if folder else []
    return [DEFAULT_MODEL, *map(str, result)]


@pytest.fixture(scope="module", params=sources(), ids=lambda source: Path(source).stem)
def engine(request):
    return Engine.from_pretrained(
        request.param, dtype="float32", config=EngineConfig(cache=CacheConfig(capacity=4096, poison_freed_pages=True))
    )


def tokens_of(engine: Engine, count: int) -> list[int]:
    """Some text; plain numbers for a model without a tokenizer."""
    if engine.tokenizer is None:
        return torch.randint(3, 2000, (count,), generator=torch.Generator().manual_seed(1)).tolist()
    ids = engine.tokenizer(TEXT * (1 + count // 30))["input_ids"]
    return ids[:count]


def generated(engine: Engine, prompt: list[int], count: int) -> list[int]:
    model, ids = inspect(engine).model, torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            repetition_penalty=1.0,
            pad_token_id=0,
        )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("length", [24, 700])  # 700: past a window of 512
def test_greedy_decoding_is_generate(engine, length):
    length = min(length, engine.model_info.max_positions - 32)
    prompt = tokens_of(engine, length)
    expected = generated(engine, prompt, 24)
    for mode in ("choreographed", "prefix", "naive"):
        with engine.session(mode=mode) as session:
            first = session.prefill(prompt[: length // 3])
            second = session.prefill(prompt[length // 3 : -1], [first])
            got = session.decode(prompt[-1:], [first, second], sampling=SamplingParams(temperature=0, max_tokens=24))
            assert got.output_token_ids == expected[: len(got.output_token_ids)]
            assert len(got.output_token_ids) >= min(24, len(expected))
            engine.check()


def test_moved_reordered_and_overlapping_messages_equal_brute_force(engine):
    text = tokens_of(engine, 40)
    nodes = [
        Node(text[:8]),
        Node(text[8:18], parents=[0], offsets=[None]),
        Node(text[18:24], parents=[1, 0], offsets=[60, 0], position=30),
        Node(text[24:28], parents=[2, 1, 0], offsets=[5, 11, 90], position=44, generated=text[28:34]),
    ]
    with engine.session() as session:
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
                every = SamplingParams(logprobs=20)
                messages.append(session.decode(node.tokens, **place, sampling=every, forced_tokens=node.generated))
        got = messages[-1].logprobs
    truth = brute_force(inspect(engine).model, nodes, default_placements(nodes), exact=False)[-1]
    for i, one in enumerate(got):
        row = truth[len(nodes[-1].tokens) + i - 1]
        for token, value in one.top.items():
            np.testing.assert_allclose(value, row[token], atol=2e-3)


def test_branches_in_parallel_equal_branches_one_by_one(engine):
    prompt = tokens_of(engine, 30)

    def run(drain: bool) -> list[list[int]]:
        engine.clear_cache()
        with engine.session(seed=5) as session:
            root, result = session.prefill(prompt[:20]), []
            for i in range(4):
                sampling = SamplingParams(temperature=0.8, max_tokens=10)
                result.append(session.decode(prompt[20 + i : 24 + i], [root], sampling=sampling))
                if drain:
                    engine.run_until_idle()
            return [message.output_token_ids for message in result]

    assert run(False) == run(True)


def test_a_model_works_to_its_last_position(engine):
    """Small models only: minutes for large ones. A context that fills all positions but a few, and the end of them."""
    facts = engine.model_info
    if facts.parameters > 3e8:
        pytest.skip("its longest context takes too long here")
    prompt = tokens_of(engine, facts.max_positions - 6)
    config = EngineConfig(cache=CacheConfig(capacity=facts.max_positions + 64))
    long = Engine.from_pretrained(inspect(engine).model, config=config)
    with torch.inference_mode():
        ids = torch.tensor([prompt])
        expected = inspect(engine).model(ids, logits_to_keep=1, use_cache=False).logits[0, -1].log_softmax(-1)
    with long.session() as session:
        half = len(prompt) // 2
        first = session.prefill(prompt[:half])
        second = session.prefill(prompt[half:-1], [first])
        every = SamplingParams(temperature=0, max_tokens=50, logprobs=20, ignore_eos=True)
        got = session.decode(prompt[-1:], [first, second], sampling=every)
        for token, value in got.logprobs[0].top.items():
            assert value == pytest.approx(float(expected[token]), abs=5e-3)
        assert len(got.output_token_ids) == 6
        assert got.finish_reason == "length"
