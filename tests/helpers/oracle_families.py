"""Brute force for every family: all messages of a graph in one float64 pass, one query at a time, over what it may see.

Around attention the model's own modules work; attention is written anew here, with keys turned afresh for every view.
What a family does there (tables of frequencies, windows, caps, slopes, sinks) is worked out from its configuration.
"""

import copy
import math
from dataclasses import dataclass, field
from types import MethodType

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.models.falcon.modeling_falcon import FalconAttention

from helpers.message_graphs import Node


@dataclass
class Graph:
    """Rows of all messages, one behind the other; sees[r]: (row, logical position) of all that row r sees."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    visible: list[list[tuple[int, int]]] = field(default_factory=list)


def graph_rows(nodes: list[Node], placements: list[tuple[list[int], int]]) -> tuple[Graph, list[int]]:
    """The rows of messages, and the first one of each."""
    graph, firsts = Graph(), []
    for node, (offsets, start) in zip(nodes, placements, strict=True):
        before = [
            (firsts[p] + j, offset + j)
            for p, offset in zip(node.parents, offsets, strict=True)
            for j in range(len(nodes[p].all_tokens))
        ]
        firsts.append(len(graph.tokens))
        for j, token in enumerate(node.all_tokens):
            graph.tokens.append(token)
            graph.positions.append(start + j)
            graph.visible.append(before + [(firsts[-1] + i, start + i) for i in range(j + 1)])
    return graph, firsts


def inv_freq(config, layer: int) -> np.ndarray | None:
    """Of one layer, by the published formulas; None where nothing turns."""
    kind = config.model_type
    if kind in ("mpt", "bloom", "gpt2", "opt") or getattr(config, "alibi", False):
        return None
    if kind == "smollm3" and not config.no_rope_layers[layer]:
        return None
    rope = config.rope_parameters
    if kind == "gemma3_text":
        rope = rope[config.layer_types[layer]]
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    turning = int(width * rope.get("partial_rotary_factor", 1.0))
    plain = np.array([rope["rope_theta"] ** (-2 * i / turning) for i in range(turning // 2)])
    original = rope.get("original_max_position_embeddings")
    match rope["rope_type"]:
        case "default" | "dynamic":  # dynamic: as it is within the configured length
            return plain
        case "linear":
            return plain / rope["factor"]
        case "longrope":  # frozen at the configured length, which is past the original one
            return plain / np.array(rope["long_factor"])
        case "llama3":
            low, high = original / rope["low_freq_factor"], original / rope["high_freq_factor"]
            wave = 2 * math.pi / plain
            smooth = (original / wave - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
            mixed = (1 - smooth) * plain / rope["factor"] + smooth * plain
            return np.where(wave < high, plain, np.where(wave > low, plain / rope["factor"], mixed))
        case "yarn":

            def dimension(rotations: float) -> float:
                return turning * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope["rope_theta"]))

            least, most = max(math.floor(dimension(32)), 0), min(math.ceil(dimension(1)), turning - 1)
            if least == most:
                most += 0.001
            ramp = np.clip((np.arange(turning // 2) - least) / (most - least), 0, 1)
            return plain / rope["factor"] * ramp + plain * (1 - ramp)
    raise AssertionError(rope)


def sliding_window(config, layer: int) -> int | None:
    kind = config.model_type
    if kind in ("gemma2", "gemma3_text", "gpt_oss", "qwen2"):
        return config.sliding_window if config.layer_types[layer] == "sliding_attention" else None
    return config.sliding_window if kind in ("mistral", "mixtral", "phi3") else None


def alibi_slopes(config) -> np.ndarray | None:
    """ALiBi (Press et al.): a geometric sequence, every second one of the next longer sequence where heads are no power
    of two."""
    kind, heads = config.model_type, config.num_attention_heads
    if kind not in ("mpt", "bloom") and not getattr(config, "alibi", False):
        return None
    power = 2 ** math.floor(math.log2(heads))
    first = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    more = [2 ** (-8 * (i + 1) / (2 * power)) for i in range(0, 2 * power, 2)]
    result = np.array(first + more[: heads - power])
    return result * (config.hidden_size // heads) ** -0.5 if kind == "falcon" else result


def attend(graph: Graph, config, layer: int, query, key, value, scale: float, sinks=None) -> torch.Tensor:
    """(H, N, D) queries and (G, N, D) keys, both as the model turned them to their rows' own positions."""
    q, k, v = (x.detach().double().numpy() for x in (query, key, value))
    inverse, limit, bias = inv_freq(config, layer), sliding_window(config, layer), alibi_slopes(config)
    cap = config.attn_logit_softcapping if config.model_type == "gemma2" else None
    heads, rows, _ = q.shape
    share = heads // len(k)
    out = np.zeros((rows, heads, v.shape[-1]))
    for r in range(rows):
        seen = [(j, p) for j, p in graph.visible[r] if limit is None or abs(graph.positions[r] - p) < limit]
        for h in range(heads):
            turned = np.array([rotate(k[h // share, j], p - graph.positions[j], inverse) for j, p in seen])
            scores = turned @ q[h, r] * scale
            if cap:
                scores = cap * np.tanh(scores / cap)
            if bias is not None:
                scores = scores - bias[h] * np.array([graph.positions[r] - p for _, p in seen])
            if sinks is not None:
                scores = np.append(scores, float(sinks[h]))
            weights = np.exp(scores - scores.max())
            weights = (weights / weights.sum())[: len(seen)]
            out[r, h] = weights @ np.array([v[h // share, j] for j, _ in seen])
    return torch.from_numpy(out)[None].to(query.dtype)


def rotate(x: np.ndarray, distance: int, inv_freqs: np.ndarray | None) -> np.ndarray:
    if inv_freqs is None or not distance:
        return x
    half = len(inv_freqs)
    pairs = (x[:half] + 1j * x[half : 2 * half]) * np.exp(1j * distance * inv_freqs)
    return np.concatenate([pairs.real, pairs.imag, x[2 * half :]])


NAME = "brute-force"
AttentionMaskInterface.register(NAME, lambda *_, **__: None)


def _interface_forward(module, query, key, value, attention_mask, *, scaling=None, graph=None, s_aux=None, **_):
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    config = module.config.get_text_config()
    return attend(graph, config, module.layer_idx, query[0], key[0], value[0], scale, s_aux), None


AttentionInterface.register(NAME, _interface_forward)


def brute_force(
    model, nodes: list[Node], placements: list[tuple[list[int], int]], exact: bool = True
) -> list[np.ndarray]:
    """Log-probabilities behind every token of every message: (T, V) each."""
    graph, firsts = graph_rows(nodes, placements)
    rows = row_logprobs(model, graph, exact)
    return [rows[first : first + len(n.all_tokens)] for first, n in zip(firsts, nodes, strict=True)]


def row_logprobs(model, graph: Graph, exact: bool = True) -> np.ndarray:
    """Log-probabilities behind every row: (N, V)."""
    double = copy.deepcopy(model)
    double = double.double() if exact else double
    config = double.config
    config._experts_implementation = "eager"
    if config.model_type in PATCHES:
        PATCHES[config.model_type](double, graph)
    else:
        config._attn_implementation = NAME
    for module in double.modules():  # long factors, whatever the length of the prompt
        if getattr(module, "rope_type", None) == "longrope":
            module.rope_type = "default"
            module.inv_freq = torch.from_numpy(inv_freq(config, 0))
    with torch.no_grad():
        ids, at = torch.tensor([graph.tokens]), torch.tensor([graph.positions])
        logits = double(input_ids=ids, position_ids=at, use_cache=False, graph=graph).logits[0].double()
    return logits.log_softmax(-1).numpy()


# -- families whose attention is not behind the interface ------------------------------------------------------------


def _patch_falcon(model, graph: Graph) -> None:
    from transformers.models.falcon import modeling_falcon

    def forward(self: FalconAttention, hidden_states, alibi, attention_mask, position_embeddings=None, **_):
        q, k, v = (x.transpose(1, 2) for x in self._split_heads(self.query_key_value(hidden_states)))
        if alibi is None:
            q, k = modeling_falcon.apply_rotary_pos_emb(q, k, *position_embeddings)
        out = attend(graph, self.config, self.layer_idx, q[0], k[0], v[0], self.head_dim**-0.5)
        return self.dense(out.flatten(2)), None

    _replace(model, "FalconAttention", forward)


def _patch_mpt(model, graph: Graph) -> None:
    def forward(self, hidden_states, position_bias, **_):
        q, k, v = (x.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for x in self.Wqkv(hidden_states).chunk(3, -1))
        return self.out_proj(
            attend(graph, model.config, self.layer_idx, q[0], k[0], v[0], self.softmax_scale).flatten(2)
        ), None

    _replace(model, "MptAttention", forward)


def _patch_bloom(model, graph: Graph) -> None:
    def forward(self, hidden_states, residual, alibi, **_):
        q, k, v = self._reshape(self.query_key_value(hidden_states))
        out = attend(graph, model.config, self.layer_idx, q[0], k[0], v[0], self.head_dim**-0.5)
        return residual + self.dense(out.flatten(2)), None

    _replace(model, "BloomAttention", forward)


def _replace(model, name: str, forward) -> None:
    for module in model.modules():
        if type(module).__name__ == name:
            module.forward = MethodType(forward, module)


PATCHES = {"falcon": _patch_falcon, "mpt": _patch_mpt, "bloom": _patch_bloom}
