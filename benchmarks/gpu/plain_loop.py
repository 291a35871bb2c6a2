"""Decode steps without an engine: the model's layers in a plain loop, with FlashAttention over contiguous caches."""

from contextlib import nullcontext
from statistics import median

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from .bench import Bench, as_cuda_graph, device_seconds
from .kernels import FLASH

Cache = list[tuple[Tensor, Tensor]]  # keys and values of every layer, (B, G, n, D)


@torch.inference_mode()
def decode_seconds(bench: Bench, batch: int) -> float:
    """Median seconds of a step of `batch` requests behind contexts of their own, in one CUDA graph.

    Sampling is an argmax. As in the engine's steps, logits are computed for every request.
    """
    shape, config = bench.shape, bench.shape.config
    size = (batch, config.num_key_value_heads, shape.context, shape.head_dim)
    cache = [(bench.noise(*size), bench.noise(*size)) for _ in range(config.num_hidden_layers)]
    ids = torch.full((batch, 1), 5, device=bench.device)
    positions = torch.full((batch, 1), shape.context - 1, device=bench.device)
    step = as_cuda_graph(lambda: decode_step(bench, ids, positions, cache))
    for _ in range(2):
        step()
    return median(device_seconds(step) for _ in range(1 if bench.trial else 20))


def decode_step(bench: Bench, ids: Tensor, positions: Tensor, cache: Cache) -> Tensor:
    """Return the next token of every request, (B, 1)."""
    model = bench.model.model
    hidden = model.embed_tokens(ids)
    cos, sin = model.rotary_emb(hidden, positions)
    flash = sdpa_kernel(FLASH, set_priority=True) if bench.device.type == "cuda" else nullcontext()
    with flash:
        for layer, (keys, values) in zip(model.layers, cache, strict=True):
            attention, input = layer.self_attn, layer.input_layernorm(hidden)
            projections = (attention.q_proj, attention.k_proj, attention.v_proj)
            query, key, value = (
                projection(input).view(len(ids), 1, -1, bench.shape.head_dim).transpose(1, 2)
                for projection in projections
            )
            query, key = apply_rotary_pos_emb(query, key, cos, sin)
            keys[:, :, -1:], values[:, :, -1:] = key, value
            result = scaled_dot_product_attention(query, keys, values, enable_gqa=True)
            hidden = hidden + attention.o_proj(result.transpose(1, 2).flatten(2))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    logits: Tensor = bench.model.lm_head(model.norm(hidden))
    return logits.argmax(-1)
