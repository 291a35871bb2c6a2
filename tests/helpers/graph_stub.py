"""Engines whose small steps are graphs, without a GPU. Recording is stood in for by doing the work again: the memory is
the same, only CUDA's part is missing. Kernels, which have tests of their own, are played in plain tensors."""

import pytest

from choreograph import CacheConfig, Engine, EngineConfig
from choreograph.attention import backend as attend
from choreograph.attention import triton_backend as triton
from choreograph.models.compilation import cuda_graph as fixed
from choreograph.models.compilation import cuda_graph as graphed
from helpers import triton_reference

from .inspect_engine import inspect


@pytest.fixture
def boards(monkeypatch):
    """Small ones, so that tests come to several sizes of them."""
    for name, count in {
        "BASE_WORK_ITEMS": 2,
        "BASE_KV_CHUNKS": 8,
        "BASE_ROW_PARAMS": 16,
        "BASE_PARTIAL_ROWS": 3,
        "BASE_SHIFTS": 4,
    }.items():
        monkeypatch.setattr(fixed, name, count)
    monkeypatch.setattr(triton, "run", triton_reference.run)
    monkeypatch.setattr(triton, "write", attend.write)


def run_again(work):
    """In place of a recording."""
    work()
    return work


def engine_with(
    model, *, use_graphs: bool, overlap: bool = False, sizes=(2, 4, 8), through_compiler=False, tokens: int = 1024
) -> Engine:
    config = EngineConfig(backend="triton", cache=CacheConfig(capacity=tokens, page_size=4, poison_freed_pages=True))
    engine = Engine.from_pretrained(model, config=config)
    if use_graphs:
        adapter = inspect(engine).hf_model
        adapter.compiled = graphed.CudaGraphForward(adapter, sizes, capturer=run_again, use_compiler=through_compiler)
    inspect(engine).runner.overlaps = overlap
    return engine
