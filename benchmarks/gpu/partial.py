"""Prefill of a context that another model has encoded, computed in a quarter of the layers (DroidSpeak, section 4).
Times depend on shapes alone: the receiver's weights are the sender's."""

import copy

import torch
from transformers import LlamaForCausalLM

from choreograph import CacheConfig, EngineConfig
from choreograph.lab.profiling.profiler import time_patterns
from choreograph.layer_pattern import LayerPattern

from .bench import Bench, PartResult, now
from .budget import Allowance

TWIN = "twin"


def twin_of(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Another model to the cache, which must not find one's encodings for the other's; of the same memory but for one
    vector."""
    twin = copy.deepcopy(model, {id(p): p for p in model.parameters()})
    twin.model.norm.weight = torch.nn.Parameter(2 * model.model.norm.weight)
    return twin


def measure(bench: Bench, allowance: Allowance) -> PartResult:
    length = bench.shape.num_cached_tokens
    with bench.new_engine(EngineConfig(CacheConfig(capacity=4 * length + 1024)), max_graph_rows=0) as engine:
        layers = engine.model_info.layers
        engine.add_model(TWIN, twin_of(bench.model))
        some, whole = (
            LayerPattern.from_triplet(0, layers // 2, layers // 2 + max(1, layers // 4)),
            LayerPattern.from_triplet(0, 0, layers),
        )
        engine.enable_layer_reuse(TWIN, pattern=some)
        taken = time_patterns(engine, TWIN, [whole, some], length, rounds=min(5, bench.shape.max_rounds), clock=now)
    pairs = zip(taken[str(whole)], taken[str(some)], strict=True)
    return {"DroidSpeak: prefill, all layers over a quarter": [a / b for a, b in pairs]}
