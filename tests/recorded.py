"""Engines whose small steps are graphs, without a GPU. Recording is stood in for by doing the work again: the memory is
the same, only CUDA's part is missing. Kernels, which have tests of their own, are played in plain tensors."""

import played
import pytest

from choreograph import CacheConfig, Engine, EngineConfig
from choreograph.models import graphed
from choreograph.ops import attend, fixed, triton


@pytest.fixture
def boards(monkeypatch):
    """Small ones, so that tests come to several sizes of them."""
    for name, count in {"ITEMS": 2, "PIECES": 8, "READS": 16, "PARTIALS": 3, "SHIFTS": 4}.items():
        monkeypatch.setattr(fixed, name, count)
    monkeypatch.setattr(triton, "run", played.run)
    monkeypatch.setattr(triton, "write", attend.write)


def again(work):
    """In place of a recording."""
    work()
    return work


def engine_with(
    model, *, recorded: bool, ahead: bool = False, buckets=(2, 4, 8), compiler=False, tokens: int = 1024
) -> Engine:
    config = EngineConfig(backend="triton", cache=CacheConfig(tokens=tokens, page_size=4, poison=True))
    engine = Engine.from_pretrained(model, config=config)
    if recorded:
        adapter = engine.runner.adapter
        adapter.compiled = graphed.GraphedForward(adapter, buckets, record=again, through_compiler=compiler)
    engine.runner.computer.goes_ahead = ahead
    return engine
