"""Forward pass that scores context tokens and writes no KV."""

from typing import TYPE_CHECKING, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...attention.backend import ForwardContext
from ...attention.reference import apply_softcap_alibi, outside_window
from ...attention.rope import rotate

if TYPE_CHECKING:
    from .strategy import ContextView


ROWS = 256  # query tokens whose attention weights are in memory at once


class ProbeContext:
    """Dense attention of probe tokens, in float32, recording keys, values and attention.

    Takes the place of `ForwardContext` in a forward pass. The probe tokens attend causally to
    themselves and, with `reads_context`, to all of the call's context.
    """

    def __init__(self, view: "ContextView", *, position: int, num_tokens: int, reads_context: bool) -> None:
        self._pool, self._specs = view.core.cache_manager.pool, view.core.hf_model.model_info.attention_specs
        self._reads_context = reads_context
        self._slices = [kv_slice for parent in view.parents for kv_slice in parent.slices]
        self._context_positions = torch.tensor(
            [s.position + token for s in self._slices for token in range(s.num_tokens) if s.visible_in(0)]
        )
        self._gathered: dict[object, tuple[Tensor, list[int]]] = {}  # slots and shifts of visible tokens, by slices
        self._rotations: dict[object, tuple[Tensor, Tensor]] = {}  # cos and sin of those shifts
        self._positions = torch.arange(position, position + num_tokens)
        self.saved_hidden: dict[int, Tensor] = {}  # as in `ForwardContext`: no layer inputs are cached
        self.keys: dict[int, Float[Tensor, "N G D"]] = {}  # of the probe tokens, by layer
        self.values: dict[int, Float[Tensor, "N G D"]] = {}  # likewise
        self.scores: list[Float[Tensor, " C"]] = []  # attention that each context token receives, by layer

    def on_layer_input(self, layer: int, hidden: Tensor) -> Tensor:
        return hidden

    def _visible(self, layer: int) -> tuple[bool, ...]:
        return tuple(kv_slice.visible_in(layer) for kv_slice in self._slices)

    def _tokens(self, visible: tuple[bool, ...]) -> tuple[Int[Tensor, " C"], list[int]]:
        """Return slots and shifts of the visible tokens."""
        if visible not in self._gathered:
            slices = [kv_slice for kv_slice, is_visible in zip(self._slices, visible, strict=True) if is_visible]
            slots = [s.entry.slot(t) for s in slices for t in range(s.token_start, s.token_start + s.num_tokens)]
            shifts = [kv_slice.shift for kv_slice in slices for _ in range(kv_slice.num_tokens)]
            self._gathered[visible] = torch.tensor(slots, device=self._pool.keys[0].device), shifts
        return self._gathered[visible]

    def context_keys(self, layer: int) -> Float[Tensor, "C G D"]:
        """Return the context's keys, rotated to their positions in this call."""
        visible, rope = self._visible(layer), self._specs[layer].rope
        slots, shifts = self._tokens(visible)
        keys = self._pool.keys[layer].index_select(0, slots)
        if rope is None or not any(shifts):
            return keys
        if (rope, visible) not in self._rotations:
            cos, sin = (torch.from_numpy(table).to(keys.device)[:, None] for table in rope.cos_sin(shifts))
            self._rotations[rope, visible] = cos, sin
        return rotate(keys, *self._rotations[rope, visible], rope.interleaved).to(keys.dtype)

    def context_values(self, layer: int) -> Float[Tensor, "C G D"]:
        return self._pool.values[layer].index_select(0, self._tokens(self._visible(layer))[0])

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "1 H N D"],
        key: Float[Tensor, "1 G N D"],
        value: Float[Tensor, "1 G N D"],
        scale: float,
        sinks: Float[Tensor, "H"] | None = None,
    ) -> Float[Tensor, "1 N H D"]:
        """Attend densely; see `ForwardContext.attend`."""
        spec, num_kv_heads = self._specs[layer], key.shape[1]
        own_keys, own_values = key[0].transpose(0, 1), value[0].transpose(0, 1)
        self.keys[layer], self.values[layer] = own_keys, own_values
        keys, values, positions = own_keys, own_values, self._positions
        if self._reads_context:
            keys = torch.cat([self.context_keys(layer), keys])
            values = torch.cat([self.context_values(layer), values])
            positions = torch.cat([self._context_positions, positions])
        positions, rows = positions.to(key.device), self._positions.to(key.device)
        keys, values, scores, outputs = keys.float(), values.float(), [], []
        num_context = len(positions) - len(rows)
        for start in range(0, len(rows), ROWS):
            end = num_context + start + ROWS  # later tokens are hidden from these rows
            grouped_query = query[0, :, start : start + ROWS].float().unflatten(0, (num_kv_heads, -1))  # G H/G N D
            logits = torch.einsum("ghnd,cgd->ghnc", grouped_query, keys[:end]) * scale
            distance = rows[start : start + ROWS, None] - positions[:end]
            logits = apply_softcap_alibi(logits.flatten(0, 1), distance, spec).view(logits.shape)
            hidden = distance < 0
            hidden[:, :num_context] = False  # all of the context is visible, wherever it is placed
            hidden |= outside_window(distance, spec)
            logits = logits.masked_fill(hidden, float("-inf"))
            if sinks is not None:
                sink = sinks.float().view(num_kv_heads, -1, 1, 1).expand(-1, -1, len(distance), 1)
                weights = torch.cat([logits, sink], dim=-1).softmax(-1)[..., :-1]
            else:
                weights = logits.softmax(-1)
            scores.append(weights[..., :num_context].sum(dim=(0, 1, 2)))
            outputs.append(torch.einsum("ghnc,cgd->nghd", weights, values[:end]).flatten(1, 2))
        if self._reads_context:
            self.scores.append(torch.stack(scores).sum(dim=0))
        return torch.cat(outputs)[None].to(query.dtype)


def probe_context(
    view: "ContextView", tokens: list[int], *, position: int, num_layers: int, reads_context: bool
) -> ProbeContext:
    """Run the first layers on `tokens` from `position` on.

    Raises:
        ModelError: if the layers of this family do not run one by one.
    """
    context = ProbeContext(view, position=position, num_tokens=len(tokens), reads_context=reads_context)
    request = view.request
    view.core.model_set.get(request.model).forward_layers(
        0,
        num_layers,
        tokens,
        list(range(position, position + len(tokens))),
        cast(ForwardContext, context),
        [request.model] * len(tokens),
    )
    return context
