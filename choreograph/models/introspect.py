"""Measures what a model's layers do with attention: one pass of a few equal tokens at different places.

Attention gives zeros in that pass, so that equal tokens stay equal through all layers unless positions enter elsewhere:
how the keys of a layer differ is how positions turn them. Facts that are measured hold for the model at hand, whatever
its configuration calls them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..attention.backend import ForwardContext, FunctionBackend
from ..attention.metadata import AttentionSpec, KVRead, build_metadata
from ..attention.reference import attend
from ..attention.rope import Rope, rotate
from ..errors import ModelError
from .architectures import alibi_slopes

if TYPE_CHECKING:
    from .hf_model import HFModel

PROBE_POSITIONS = (0, 1, 5, 23)


@dataclass
class LayerRecord:
    """What one layer handed to attention."""

    query: Tensor
    key: Tensor
    value: Tensor
    sliding_window: int | None = None
    logit_softcap: float | None = None


@dataclass
class AttentionProbe:
    """Stands in for a step."""

    layers: dict[int, LayerRecord] = field(default_factory=dict)
    _options: dict[int, tuple[int | None, float | None]] = field(default_factory=dict)

    def record_options(
        self, module: Any, mask: Tensor | None, sliding_window: int | None, logit_softcap: float | None
    ) -> None:
        """What a layer asks of attention besides its product."""
        if mask is not None:  # nobody gave it one
            raise ModelError("its layers work out masks of their own")
        if getattr(module, "is_causal", True) is False:
            raise ModelError("its tokens look at later ones too")
        self._options[module.layer_idx] = (sliding_window, logit_softcap)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        if layer in self.layers:
            raise ModelError(f"layer {layer} computes attention several times")
        self.layers[layer] = LayerRecord(query[0].cpu(), key[0].cpu(), value[0].cpu(), *self._options.get(layer, ()))
        return torch.zeros_like(query).transpose(1, 2)


@dataclass(frozen=True)
class ProbeResult:
    """What was measured. movable: whether encodings can be seen anywhere else than where they were made."""

    query_heads: int
    kv_heads: int
    head_dim: int
    attention_specs: tuple[AttentionSpec, ...]
    supports_shift: bool


def probe_positions(max_positions: int) -> list[int]:
    return [place for place in PROBE_POSITIONS if place < max_positions]


def analyze(model: PreTrainedModel, probe: AttentionProbe, max_positions: int) -> ProbeResult:
    """Reads the notes of a pass over equal tokens at `places(positions)`; what cannot be served is a ModelError."""
    config = model.config.get_text_config()
    layers = [probe.layers.get(index) for index in range(config.num_hidden_layers)]
    if None in layers or len(probe.layers) != len(layers):
        raise ModelError(
            f"{len(probe.layers)} of its {len(layers)} layers compute attention through transformers' interface; "
            "what has none, or its own, needs a bridge (docs/models.md)"
        )
    known = [layer for layer in layers if layer is not None]
    shapes = {(len(x.query), *x.key.shape, *x.value.shape) for x in known}
    if len(shapes) > 1 or known[0].key.shape != known[0].value.shape:
        raise ModelError(f"layers, or keys and values, differ in heads or head size: {sorted(shapes)}")
    if not all(x.isfinite().all() for layer in known for x in (layer.key, layer.value)):
        raise ModelError("it computes keys or values that are not finite")
    movable = all(_all_equal(layer.value) for layer in known)
    turnings, slopes = _rope_candidates(model), alibi_slopes(model)
    by_value: dict[
        AttentionSpec, AttentionSpec
    ] = {}  # layers of one kind share the object, and what is worked out for it
    kinds = []
    for index, layer in enumerate(known):
        rotary = _find_rope(layer.key, turnings, probe_positions(max_positions), f"layer {index}") if movable else None
        window = (
            layer.sliding_window if layer.sliding_window is not None and layer.sliding_window < max_positions else None
        )
        kind = AttentionSpec(rotary, window, layer.logit_softcap, slopes)
        kinds.append(by_value.setdefault(kind, kind))
    heads, (groups, _, width) = len(known[0].query), known[0].key.shape
    return ProbeResult(heads, groups, width, tuple(kinds), movable)


def check_no_token_mixing(forward_probe: AttentionProbe, reversed_probe: AttentionProbe) -> None:
    """Two passes over the same places, in opposite order: raises ModelError where what attention gets of a token is not
    the same, since more than attention brings it what its neighbours are."""
    for index, layer in forward_probe.layers.items():
        again = reversed_probe.layers[index]
        for mine, theirs in ((layer.query, again.query), (layer.key, again.key), (layer.value, again.value)):
            if not _max_rel_error(mine, theirs.flip(1), None) < _tolerance(mine.dtype):
                raise ModelError(
                    f"layer {index}: a token depends on those beside it in other ways than through attention, "
                    "as with convolutions and states"
                )


def _all_equal(tensor: Tensor) -> bool:
    """Whether all rows (G, N, D) are the first one, but for rounding."""
    return _max_rel_error(tensor, tensor[:, :1].expand_as(tensor), None) < _tolerance(tensor.dtype)


def _find_rope(keys: Tensor, candidates: list[Rope], positions: list[int], label: str) -> Rope | None:
    """How the keys (G, N, D) of equal tokens at some places were turned: the table that explains them best."""
    first, best = keys[:, :1].float(), None
    least = _max_rel_error(keys, first.expand(keys.shape), None)
    if len(positions) == 1:
        return None
    for rotary in candidates:
        cos, sin = (torch.from_numpy(table) for table in rotary.cos_sin(positions))
        off = _max_rel_error(keys, rotate(first.expand(keys.shape), cos, sin, rotary.interleaved), rotary)
        if off < least:
            best, least = rotary, off
    if not least < _tolerance(keys.dtype):
        raise ModelError(f"{label}: positions change its keys in a way that is not known (off by {least:.2g})")
    return best


def _rope_candidates(model: PreTrainedModel) -> list[Rope]:
    """Every table of frequencies that the model holds, of either layout."""
    result: dict[tuple[float, ...], None] = {}
    for path, buffer in model.named_buffers():
        if path.endswith("inv_freq") and "original" not in path:
            result[tuple(buffer.double().tolist())] = None
    return [Rope(inverse, interleaved) for inverse in result for interleaved in (False, True)]


def _max_rel_error(actual: Tensor, expected: Tensor, rope: Rope | None) -> float:
    """The largest difference, every dimension in terms of its own size, or of the pair that turns together: biases may
    make some dimensions a thousand times as large as others."""
    size = actual.float().abs().amax(dim=(0, 1))
    if rope is not None:
        half, turning = rope.half_dim, 2 * rope.half_dim
        pairs = size[:turning].view(half, 2) if rope.interleaved else size[:turning].view(2, half).T
        largest = pairs.amax(1, keepdim=True).expand(-1, 2)
        size = torch.cat([(largest if rope.interleaved else largest.T).reshape(-1), size[turning:]])
    off = (actual.float() - expected.float()).abs().amax(dim=(0, 1)) / size.clamp(min=1e-20)
    return float(off[size > 0].max()) if (size > 0).any() else 0.0


def _tolerance(dtype: torch.dtype) -> float:
    return {torch.float32: 1e-3, torch.float64: 1e-6}.get(dtype, 0.04)


MESSAGE_LEN, NUM_MESSAGES, SHIFT = 12, 3, 17


def verify_cache_reuse(hf_model: "HFModel") -> None:
    """Raises ModelError with the difference where chained or moved messages are not what the model computes."""
    model_info, config = hf_model.model_info, hf_model.model.config.get_text_config()
    proved = "" if hf_model.architecture is not None else " is not proved, and"
    refusal = f"{model_info.name}: architecture {config.model_type!r}{proved} "
    for name in ("sliding_window", "attention_chunk_size"):
        if _active_limit(config, name, model_info.max_positions) not in (
            None,
            *(kind.sliding_window for kind in model_info.attention_specs),
        ):
            limit = getattr(config, name)
            hint = f"use max_model_len={limit} or fewer"
            raise ModelError(f"{refusal}its layers do not hand its {name} of {limit} to attention; {hint}")
    if getattr(config, "attn_temperature_tuning", False) and config.floor_scale <= model_info.max_positions:
        raise ModelError(
            f"{refusal}its scores grow with a token's place in a pass, from {config.floor_scale} on; "
            f"use max_model_len={config.floor_scale - 1} or fewer"
        )
    count = min(MESSAGE_LEN * NUM_MESSAGES, model_info.max_positions // 2)
    noise = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, model_info.vocab_size, (count,), generator=noise).tolist()
    with torch.no_grad(), hf_model.static_rope.applied():
        expected = _reference_logits(hf_model, tokens, refusal)
    for what, home in _placements(count, model_info.supports_shift, model_info.max_positions):
        off = _max_logit_error(_message_logits(hf_model, tokens, home), expected)
        if not off <= _logit_tolerance(model_info.dtype):  # nor NaN
            raise ModelError(
                f"{refusal}fails the check: {what} differ from its own forward pass by {off:.2g} of its largest logit; "
                "served for sure: `choreograph models`"
            )


def _reference_logits(hf_model: "HFModel", tokens: list[int], error_prefix: str) -> Tensor:
    """Logits of the model's own forward pass."""
    ids = torch.tensor([tokens], device=hf_model.model_info.device)
    try:
        logits: Tensor = hf_model.model(input_ids=ids, use_cache=False).logits[0]
    except Exception as exc:  # whatever its code raises
        said = f"{type(exc).__name__}: {exc}".splitlines()[0][:200]
        raise ModelError(f"{error_prefix}its own forward pass fails: {said}") from exc
    return logits.float()


def _active_limit(config: Any, name: str, max_positions: int) -> int | None:
    """A limit of what layers see that the configuration names, if it means anything."""
    limit, kinds = getattr(config, name, None), getattr(config, "layer_types", None)
    if not isinstance(limit, int) or limit >= max_positions or getattr(config, "use_sliding_window", True) is False:
        return None
    return None if kinds and not any("sliding" in kind or "chunk" in kind for kind in kinds) else limit


def _placements(num_tokens: int, supports_shift: bool, max_positions: int) -> Iterator[tuple[str, int]]:
    yield "chained messages", 0
    if supports_shift and max_positions > num_tokens + SHIFT:
        yield "messages that were encoded elsewhere", SHIFT


def _message_logits(hf_model: "HFModel", tokens: list[int], shift: int) -> Tensor:
    """Logits of a chain of messages, each of which sees all before it; every other one stands `home` positions behind
    where it is seen."""
    model_info, count = hf_model.model_info, len(tokens)
    size = -(-count // NUM_MESSAGES)
    messages = [(first, min(first + size, count)) for first in range(0, count, size)]
    shape = (model_info.layers, count, model_info.kv_heads, model_info.head_dim)
    keys, values = (list(torch.zeros(shape, dtype=model_info.dtype, device=model_info.device)) for _ in range(2))
    result = []
    for number, (first, end) in enumerate(messages):
        mine, rows = shift if number % 2 else 0, end - first
        reads = [KVRead(first, 0, rows, 0, 1, 1, first + mine)]
        for earlier, (lo, hi) in enumerate(messages[:number]):
            theirs = shift if earlier % 2 else 0
            reads.append(KVRead(lo, 0, rows, mine - theirs, hi - lo, 0, lo + mine))
        positions = list(range(first + mine, end + mine))
        metadata = build_metadata(list(range(first, end)), reads, positions)
        step = ForwardContext(metadata, keys, values, model_info.attention_specs, FunctionBackend("reference", attend))
        result.append(hf_model.forward(tokens[first:end], positions, step, list(range(rows))))
    return torch.cat(result)


def _max_logit_error(actual: Tensor, expected: Tensor) -> float:
    """Of three rows in four: in low precision a few may choose other experts. A wrong model is wrong in two of three,
    in all messages but the first."""
    return float((actual - expected).abs().amax(-1).quantile(0.75) / expected.abs().max())


def _logit_tolerance(dtype: torch.dtype) -> float:
    return 1e-3 if dtype in (torch.float32, torch.float64) else 0.08  # the reference computes in float32
