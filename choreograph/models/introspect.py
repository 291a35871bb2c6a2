"""Probe a model's attention, and verify logits computed from cached KV.

The probe is a forward pass of a few equal tokens at different positions in which attention returns
zeros. Equal tokens then stay equal through all layers unless positions enter outside of attention, so
the keys of a layer differ only by how positions rotate them. The result is measured, so it does not depend
on what the configuration says.
"""

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
from .info import ModelInfo, fingerprint
from .tensor_parallel import local_shard

if TYPE_CHECKING:
    from .hf_model import HFModel

PROBE_POSITIONS = (0, 1, 5, 23)


@dataclass
class LayerRecord:
    """Arguments of one layer's attention."""

    query: Tensor  # (H, N, D)
    key: Tensor  # (G, N, D)
    value: Tensor  # (G, N, D)
    sliding_window: int | None = None  # tokens
    logit_softcap: float | None = None


@dataclass
class AttentionProbe:
    """Forward context that records the arguments of every layer and returns zeros."""

    layers: dict[int, LayerRecord] = field(default_factory=dict)
    _options: dict[int, tuple[int | None, float | None]] = field(default_factory=dict)

    def record_options(
        self, module: Any, mask: Tensor | None, sliding_window: int | None, logit_softcap: float | None
    ) -> None:
        """Record a layer's window and soft cap; refuse masks and bidirectional attention."""
        if mask is not None:  # the engine passes no mask to the model
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


def analyze(model: PreTrainedModel, probe: AttentionProbe, name: str, max_positions: int) -> ModelInfo:
    """Derive the model's properties from a probe at `PROBE_POSITIONS`.

    Raises:
        ModelError: if the layers compute something that the engine does not support.
    """
    config = model.config.get_text_config()
    layers = [probe.layers[index] for index in range(config.num_hidden_layers) if index in probe.layers]
    if not len(layers) == len(probe.layers) == config.num_hidden_layers:
        raise ModelError(
            f"{len(probe.layers)} of its {config.num_hidden_layers} layers compute attention through transformers' "
            "interface; what has none, or its own, needs a bridge (docs/models.md)"
        )
    shapes = {(len(layer.query), *layer.key.shape, *layer.value.shape) for layer in layers}
    if len(shapes) > 1 or layers[0].key.shape != layers[0].value.shape:
        raise ModelError(f"layers, or keys and values, differ in heads or head size: {sorted(shapes)}")
    if not all(tensor.isfinite().all() for layer in layers for tensor in (layer.key, layer.value)):
        raise ModelError("it computes keys or values that are not finite: get its files again")
    values = [layer.value for layer in layers]  # of equal tokens: equal unless positions enter outside of attention
    supports_shift = all(
        _max_rel_error(value, value[:, :1].expand_as(value), None) < _tolerance(value.dtype) for value in values
    )
    candidates, slopes = _rope_candidates(model), alibi_slopes(model)
    positions = [position for position in PROBE_POSITIONS if position < max_positions]
    unique_specs: dict[AttentionSpec, AttentionSpec] = {}  # equal specs share one object, and data cached for it
    specs = []
    for index, layer in enumerate(layers):
        rope = _find_rope(layer.key, candidates, positions, f"layer {index}") if supports_shift else None
        window = layer.sliding_window
        if window is not None and window >= max_positions:
            window = None
        spec = AttentionSpec(rope, window, layer.logit_softcap, slopes)
        specs.append(unique_specs.setdefault(spec, spec))
    embedding: Any = model.get_input_embeddings()
    weight = next(embedding.parameters())
    return ModelInfo(
        name=name,
        layers=len(layers),
        query_heads=len(layers[0].query),
        kv_heads=layers[0].key.shape[0],
        head_dim=layers[0].key.shape[2],
        max_positions=max_positions,
        vocab_size=getattr(embedding, "num_embeddings", config.vocab_size),
        attention_specs=tuple(specs),
        supports_shift=supports_shift,
        dtype=weight.dtype,
        device=weight.device,
        fingerprint=fingerprint(model, tuple(specs)),
        parameters=sum(local_shard(parameter).numel() for parameter in model.parameters()),
    )


def check_no_token_mixing(forward_probe: AttentionProbe, reversed_probe: AttentionProbe) -> None:
    """Compare two probes of the same positions in opposite order.

    Raises:
        ModelError: if a token's query, key or value depends on its neighbors.
    """
    for index, layer in forward_probe.layers.items():
        other = reversed_probe.layers[index]
        for forward, backward in ((layer.query, other.query), (layer.key, other.key), (layer.value, other.value)):
            if not _max_rel_error(forward, backward.flip(1), None) < _tolerance(forward.dtype):
                raise ModelError(
                    f"layer {index}: a token depends on its neighbors in other ways than through attention, "
                    "as with convolutions and states"
                )


def _find_rope(keys: Tensor, candidates: list[Rope], positions: list[int], label: str) -> Rope | None:
    """Return the RoPE that best explains the keys of equal tokens.

    `keys` are (G, N, D), of tokens at `positions`. Return None if they are not rotated.
    """
    if len(positions) == 1:
        return None
    first, best = keys[:, :1].float().expand(keys.shape), None
    min_error = _max_rel_error(keys, first, None)
    for rope in candidates:
        cos, sin = (torch.from_numpy(table) for table in rope.cos_sin(positions))
        error = _max_rel_error(keys, rotate(first, cos, sin, rope.interleaved), rope)
        if error < min_error:
            best, min_error = rope, error
    if not min_error < _tolerance(keys.dtype):
        raise ModelError(f"{label}: positions change its keys in a way that is not known (off by {min_error:.2g})")
    return best


def _rope_candidates(model: PreTrainedModel) -> list[Rope]:
    """Return all RoPE tables of the model, each in both rotation layouts."""
    tables = {
        tuple(buffer.double().tolist()): None
        for path, buffer in model.named_buffers()
        if path.endswith("inv_freq") and "original" not in path
    }
    return [Rope(table, interleaved) for table in tables for interleaved in (False, True)]


def _max_rel_error(actual: Tensor, expected: Tensor, rope: Rope | None) -> float:
    """Return the largest error, relative to the magnitude of each dimension.

    Biases can make some dimensions a thousand times larger than others. With `rope`, the two
    dimensions of a rotated pair share the larger magnitude.
    """
    size = actual.float().abs().amax(dim=(0, 1))
    if rope is not None:
        half, rotated = rope.half_dim, 2 * rope.half_dim
        pairs = size[:rotated].view(half, 2) if rope.interleaved else size[:rotated].view(2, half).T
        largest = pairs.amax(1, keepdim=True).expand(-1, 2)
        size = torch.cat([(largest if rope.interleaved else largest.T).reshape(-1), size[rotated:]])
    error = (actual.float() - expected.float()).abs().amax(dim=(0, 1)) / size.clamp(min=1e-20)
    return float(error[size > 0].max()) if (size > 0).any() else 0.0


def _tolerance(dtype: torch.dtype) -> float:
    return {torch.float32: 1e-3, torch.float64: 1e-6}.get(dtype, 0.04)


MESSAGE_LEN, NUM_MESSAGES, SHIFT = 12, 3, 17  # tokens, messages, positions


def verify_cache_reuse(hf_model: "HFModel") -> None:
    """Compare logits from cached KV with the model's own forward pass.

    Messages attend to KV of earlier ones, first as it was computed, then with keys moved to other positions.

    Raises:
        ModelError: if they differ, or the model limits attention in a way that layers do not pass on.
    """
    model_info, config = hf_model.model_info, hf_model.model.config.get_text_config()
    unproved = "" if hf_model.architecture is not None else " is not proved, and"
    prefix = f"{model_info.name}: architecture {config.model_type!r}{unproved} "
    windows = {spec.sliding_window for spec in model_info.attention_specs}
    for option in ("sliding_window", "attention_chunk_size"):
        limit = _active_limit(config, option, model_info.max_positions)
        if limit is not None and limit not in windows:
            hint = f"use max_model_len={limit} or fewer"
            raise ModelError(f"{prefix}its layers do not hand its {option} of {limit} to attention; {hint}")
    if getattr(config, "attn_temperature_tuning", False) and config.floor_scale <= model_info.max_positions:
        raise ModelError(
            f"{prefix}its scores grow with a token's place in a pass, from {config.floor_scale} on; "
            f"use max_model_len={config.floor_scale - 1} or fewer"
        )
    count = min(MESSAGE_LEN * NUM_MESSAGES, model_info.max_positions // 2)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, model_info.vocab_size, (count,), generator=generator).tolist()
    with torch.no_grad(), hf_model.static_rope.applied():
        ids = torch.tensor([tokens], device=model_info.device)
        try:
            expected = hf_model.model(input_ids=ids, use_cache=False).logits[0].float()
        except Exception as exc:  # the model's own code can raise anything
            reason = f"{type(exc).__name__}: {exc}".splitlines()[0][:200]
            raise ModelError(f"{prefix}its own forward pass fails: {reason}") from exc
    placements = [("chained messages", 0)]
    if model_info.supports_shift and model_info.max_positions > count + SHIFT:
        placements.append(("messages that were encoded elsewhere", SHIFT))
    tolerance = 1e-3 if model_info.dtype in (torch.float32, torch.float64) else 0.08  # the reference is float32
    for description, shift in placements:
        # Three rows in four: in low precision a few may be routed to other experts. A model that is not
        # supported differs in two rows of three, in all messages but the first.
        differences = (_message_logits(hf_model, tokens, shift) - expected).abs().amax(-1)
        error = float(differences.quantile(0.75) / expected.abs().max())
        if not error <= tolerance:  # NaN fails too
            raise ModelError(
                f"{prefix}fails the check: {description} differ from its own forward pass by {error:.2g} of its "
                "largest logit; served for sure: `choreograph models`"
            )


def _active_limit(config: Any, option: str, max_positions: int) -> int | None:
    """Return an attention limit in tokens; None if no layer uses it."""
    limit, layer_types = getattr(config, option, None), getattr(config, "layer_types", None)
    if not isinstance(limit, int) or limit >= max_positions or getattr(config, "use_sliding_window", True) is False:
        return None
    uses_limit = not layer_types or any("sliding" in kind or "chunk" in kind for kind in layer_types)
    return limit if uses_limit else None


def _message_logits(hf_model: "HFModel", tokens: list[int], shift: int) -> Tensor:
    """Return logits (N, V) of messages, each attending to all earlier ones.

    Every second message is computed `shift` positions later than its place in `tokens`.
    """
    model_info, count = hf_model.model_info, len(tokens)
    size = -(-count // NUM_MESSAGES)
    messages = [(start, min(start + size, count)) for start in range(0, count, size)]
    shape = (model_info.layers, count, model_info.kv_heads, model_info.head_dim)
    keys, values = (list(torch.zeros(shape, dtype=model_info.dtype, device=model_info.device)) for _ in range(2))
    logits = []
    for number, (start, end) in enumerate(messages):
        own_shift, rows = shift if number % 2 else 0, end - start
        reads = [KVRead(start, 0, rows, 0, 1, 1, start + own_shift)]
        for earlier, (lo, hi) in enumerate(messages[:number]):
            their_shift = shift if earlier % 2 else 0
            reads.append(KVRead(lo, 0, rows, own_shift - their_shift, hi - lo, 0, lo + own_shift))
        positions = list(range(start + own_shift, end + own_shift))
        metadata = build_metadata(list(range(start, end)), reads, positions)
        backend = FunctionBackend("reference", attend)
        context = ForwardContext(metadata, keys, values, model_info.attention_specs, backend)
        logits.append(hf_model.forward(tokens[start:end], positions, context, list(range(rows))))
    return torch.cat(logits)
