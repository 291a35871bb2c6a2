"""Measures what a model's layers do with attention: one pass of a few equal tokens at different places.

Attention gives zeros in that pass, so that equal tokens stay equal through all layers unless positions enter elsewhere:
how the keys of a layer differ is how positions turn them. Facts that are measured hold for the model at hand, whatever
its configuration calls them.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import ModelError
from ..ops.kind import Kind
from ..ops.rope import Rotary, turn
from .bridges import slopes_of

PLACES = (0, 1, 5, 23)


@dataclass
class Layer:
    """What one layer handed to attention."""

    query: Tensor
    key: Tensor
    value: Tensor
    window: int | None = None
    softcap: float | None = None


@dataclass
class Probe:
    """Stands in for a step."""

    layers: dict[int, Layer] = field(default_factory=dict)
    _options: dict[int, tuple[int | None, float | None]] = field(default_factory=dict)

    def note(self, module: Any, mask: Tensor | None, window: int | None, softcap: float | None) -> None:
        """What a layer asks of attention besides its product."""
        if mask is not None:  # nobody gave it one
            raise ModelError("its layers work out masks of their own")
        if getattr(module, "is_causal", True) is False:
            raise ModelError("its tokens look at later ones too")
        self._options[module.layer_idx] = (window, softcap)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        if layer in self.layers:
            raise ModelError(f"layer {layer} computes attention several times")
        self.layers[layer] = Layer(query[0].cpu(), key[0].cpu(), value[0].cpu(), *self._options.get(layer, ()))
        return torch.zeros_like(query).transpose(1, 2)


@dataclass(frozen=True)
class Shape:
    """What was measured. movable: whether encodings can be seen anywhere else than where they were made."""

    query_heads: int
    kv_heads: int
    head_dim: int
    kinds: tuple[Kind, ...]
    movable: bool


def places(positions: int) -> list[int]:
    return [place for place in PLACES if place < positions]


def measured(model: PreTrainedModel, probe: Probe, positions: int) -> Shape:
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
    movable = all(_equal(layer.value) for layer in known)
    turnings, slopes = _rotaries(model), slopes_of(model)
    by_value: dict[Kind, Kind] = {}  # layers of one kind share the object, and what is worked out for it
    kinds = []
    for index, layer in enumerate(known):
        rotary = _rotary(layer.key, turnings, places(positions), f"layer {index}") if movable else None
        window = layer.window if layer.window is not None and layer.window < positions else None
        kind = Kind(rotary, window, layer.softcap, slopes)
        kinds.append(by_value.setdefault(kind, kind))
    heads, (groups, _, width) = len(known[0].query), known[0].key.shape
    return Shape(heads, groups, width, tuple(kinds), movable)


def check_alone(one: Probe, other: Probe) -> None:
    """Two passes over the same places, in opposite order: raises ModelError where what attention gets of a token is not
    the same, since more than attention brings it what its neighbours are."""
    for index, layer in one.layers.items():
        again = other.layers[index]
        for mine, theirs in ((layer.query, again.query), (layer.key, again.key), (layer.value, again.value)):
            if not _distance(mine, theirs.flip(1), None) < _tolerance(mine.dtype):
                raise ModelError(
                    f"layer {index}: a token depends on those beside it in other ways than through attention, "
                    "as with convolutions and states"
                )


def _equal(rows: Tensor) -> bool:
    """Whether all rows (G, N, D) are the first one, but for rounding."""
    return _distance(rows, rows[:, :1].expand_as(rows), None) < _tolerance(rows.dtype)


def _rotary(keys: Tensor, candidates: list[Rotary], at: list[int], where: str) -> Rotary | None:
    """How the keys (G, N, D) of equal tokens at some places were turned: the table that explains them best."""
    first, best = keys[:, :1].float(), None
    least = _distance(keys, first.expand(keys.shape), None)
    if len(at) == 1:
        return None
    for rotary in candidates:
        cos, sin = (torch.from_numpy(table) for table in rotary.table(at))
        off = _distance(keys, turn(first.expand(keys.shape), cos, sin, rotary.interleaved), rotary)
        if off < least:
            best, least = rotary, off
    if not least < _tolerance(keys.dtype):
        raise ModelError(f"{where}: positions change its keys in a way that is not known (off by {least:.2g})")
    return best


def _rotaries(model: PreTrainedModel) -> list[Rotary]:
    """Every table of frequencies that the model holds, of either layout."""
    found: dict[tuple[float, ...], None] = {}
    for path, buffer in model.named_buffers():
        if path.endswith("inv_freq") and "original" not in path:
            found[tuple(buffer.double().tolist())] = None
    return [Rotary(inverse, interleaved) for inverse in found for interleaved in (False, True)]


def _distance(rows: Tensor, wanted: Tensor, rotary: Rotary | None) -> float:
    """The largest difference, every dimension in terms of its own size, or of the pair that turns together: biases may
    make some dimensions a thousand times as large as others."""
    size = rows.float().abs().amax(dim=(0, 1))
    if rotary is not None:
        half, turning = rotary.half, 2 * rotary.half
        pairs = size[:turning].view(half, 2) if rotary.interleaved else size[:turning].view(2, half).T
        largest = pairs.amax(1, keepdim=True).expand(-1, 2)
        size = torch.cat([(largest if rotary.interleaved else largest.T).reshape(-1), size[turning:]])
    off = (rows.float() - wanted.float()).abs().amax(dim=(0, 1)) / size.clamp(min=1e-20)
    return float(off[size > 0].max()) if (size > 0).any() else 0.0


def _tolerance(dtype: torch.dtype) -> float:
    return {torch.float32: 1e-3, torch.float64: 1e-6}.get(dtype, 0.04)
