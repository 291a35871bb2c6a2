"""Compiled steps give what eager steps give, padding included. One small graph: compiling takes a while."""

import sys

import pytest
import torch
from helpers import tiny_models
from helpers.inspect_engine import inspect

from choreograph import CacheConfig, Engine, EngineConfig, SamplingParams
from choreograph.models.compilation import torch_compile
from choreograph.models.compilation.torch_compile import CompiledForward


def run(compile: bool) -> list[list[int]]:
    config = EngineConfig(
        cache=CacheConfig(capacity=1024, poison_freed_pages=True), compile=compile, compile_sizes=(4,)
    )
    return talk(Engine.from_pretrained(tiny_models.model(), config=config))


def talk(engine: Engine) -> list[list[int]]:
    with engine.session(seed=3) as session:
        root = session.prefill(list(range(20)))
        branches = [session.decode([30 + i], [root], sampling=SamplingParams(max_tokens=4 + i)) for i in range(3)]
        last = session.decode([9], branches, sampling=SamplingParams(temperature=0, max_tokens=5))
        engine.run_until_idle()
        engine.check()
        return [message.tokens for message in (*branches, last)]


def test_compiled_steps_equal_eager_ones():
    assert run(compile=True) == run(compile=False)


def test_compiled_steps_without_inductors_private_options(monkeypatch):
    engine = Engine.from_pretrained(tiny_models.model(), config=EngineConfig(cache=CacheConfig(capacity=1024)))
    hf_model = inspect(engine).hf_model
    with monkeypatch.context() as patch:
        if hasattr(torch, "_inductor"):
            patch.delattr("torch._inductor.config", raising=False)
        patch.setitem(sys.modules, "torch._inductor.config", None)
        hf_model.compiled = CompiledForward(hf_model, (4,))
    with hf_model.compiled._tracing_options() as options:
        assert options is None
    assert talk(engine) == run(compile=False)
    assert list(hf_model.compiled._graphs) == [4]


def test_one_graph_serves_larger_batches_of_any_size():
    """It is traced with as many logits as tokens, which it must not take as one size."""
    config = EngineConfig(cache=CacheConfig(capacity=1024, poison_freed_pages=True))
    engine, eager = (Engine.from_pretrained(tiny_models.model(), config=config) for _ in range(2))
    compiled = inspect(engine).hf_model.compiled = CompiledForward(inspect(engine).hf_model, (2,), compiles_larger=True)
    results = []
    for each in (engine, eager):
        with each.session(seed=0) as session:
            asked = [session.decode([5 + i], sampling=SamplingParams(max_tokens=3)) for i in range(3)]
            tokens = [message.tokens for message in asked]
        results.append([*tokens, *talk(each)])
    assert results[0] == results[1]
    assert set(compiled._graphs) == {2, None}


def test_larger_steps_stay_eager_where_no_graph_of_any_size_can_be_traced(monkeypatch):
    def fail(*_, **options):
        raise RuntimeError("specialized")

    config = EngineConfig(cache=CacheConfig(capacity=1024))
    engine = Engine.from_pretrained(tiny_models.model(), config=config)
    hf_model = inspect(engine).hf_model
    hf_model.compiled = CompiledForward(hf_model, (1,), compiles_larger=True)
    monkeypatch.setattr(torch_compile, "compile_model", lambda *_, **__: fail)
    with engine.session() as session:
        with pytest.warns(UserWarning, match="more than 1 tokens stay eager: specialized"):
            session.prefill(list(range(30))).result()
        session.prefill(list(range(20, 60))).result()
    assert engine.stats().num_batched_tokens == 70
