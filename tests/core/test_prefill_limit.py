"""Prompts beside decodes are limited in each step, and change no token."""

import pytest
from helpers import tiny_models
from helpers.inspect_engine import inspect

from choreograph import CacheConfig, Engine, EngineConfig, SamplingParams, SchedulerConfig

LIMIT = 8


def make_engine(limit):
    scheduler = SchedulerConfig(max_num_batched_tokens=64, max_num_prefill_tokens=limit)
    config = EngineConfig(cache=CacheConfig(capacity=2048, page_size=4), scheduler=scheduler, backend="reference")
    return Engine.from_pretrained(tiny_models.build(positions=512), config=config, dtype="float32", device="cpu")


def record_batches(engine, monkeypatch):
    """Return the list of (tokens of prompts, decoded tokens) of every step."""
    steps, forward = [], inspect(engine).runner.forward

    def recording(batch):
        decoded = sum(len(chunk[0].decode_state.tokens) > 0 for chunk in batch.chunks if chunk[0].is_decode)
        steps.append((len(batch.tokens) - decoded, decoded))
        return forward(batch)

    monkeypatch.setattr(inspect(engine).runner, "forward", recording)
    return steps


@pytest.mark.parametrize("mode", ["choreographed", "prefix"])
def test_a_long_prompt_is_read_in_parts_while_others_decode(monkeypatch, mode):
    results = {}
    for limit in (None, LIMIT):
        engine = make_engine(limit)
        steps = record_batches(engine, monkeypatch)
        greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        with engine.session(mode=mode, seed=0) as session:
            stream = session.decode([3, 4, 5], sampling=greedy)
            while engine.stats().events.get("token", 0) < 2:
                engine.step()
            del steps[:]
            long = session.decode(
                [1 + number % 60 for number in range(100)], sampling=SamplingParams(temperature=0, max_tokens=3)
            )
            results[limit] = [*stream.result().tokens], [*long.result().tokens]
        both = [num_prompt for num_prompt, num_decoded in steps if num_decoded]
        assert max(both) <= LIMIT if limit else max(both) > LIMIT
        engine.check()
    assert results[None] == results[LIMIT]


def test_a_prompt_alone_is_not_limited(monkeypatch):
    engine = make_engine(LIMIT)
    steps = record_batches(engine, monkeypatch)
    with engine.session(seed=0) as session:
        session.prefill(list(range(1, 61))).wait_encoded()
    assert max(num_prompt for num_prompt, _ in steps) == 60
    engine.check()
