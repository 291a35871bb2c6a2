"""Forward pass that scores context tokens and writes no KV."""

from typing import TYPE_CHECKING, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...attention.backend import ForwardContext
from ...attention.reference import apply_softcap_alibi, outside_window
from ...attention.rope import rotate
from ...kv_cache.entry import KVSlice

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
        self._slots = {s: _slots(s, self._pool.keys[0].device) for s in self._slices}  # for all layers
        self._positions = torch.arange(position, position + num_tokens)
        self.saved_hidden: dict[int, Tensor] = {}  # as in `ForwardContext`: no layer inputs are cached
        self.keys: dict[int, Float[Tensor, "N G D"]] = {}  # of the probe tokens, by layer
        self.values: dict[int, Float[Tensor, "N G D"]] = {}  # likewise
        self.scores: list[Float[Tensor, " C"]] = []  # attention that each context token receives, by layer

    def on_layer_input(self, layer: int, hidden: Tensor) -> Tensor:
        return hidden

    def context_keys(self, layer: int) -> Float[Tensor, "C G D"]:
        """Return the context's keys, rotated to their positions in this call."""
        spec, parts = self._specs[layer], []
        for kv_slice in self._slices:
            if not kv_slice.visible_in(layer):
                continue
            keys = self._pool.keys[layer].index_select(0, self._slots[kv_slice])
            if spec.rope is not None and kv_slice.shift:
                cos, sin = (torch.from_numpy(table).to(keys.device) for table in spec.rope.cos_sin([kv_slice.shift]))
                keys = rotate(keys, cos[:, None], sin[:, None], spec.rope.interleaved).to(keys.dtype)
            parts.append(keys)
        return torch.cat(parts)

    def context_values(self, layer: int) -> Float[Tensor, "C G D"]:
        values = self._pool.values[layer]
        return torch.cat([values.index_select(0, self._slots[s]) for s in self._slices if s.visible_in(layer)])

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
        for start in range(0, len(rows), ROWS):
            grouped_query = query[0, :, start : start + ROWS].float().unflatten(0, (num_kv_heads, -1))  # G H/G N D
            logits = torch.einsum("ghnd,cgd->ghnc", grouped_query, keys) * scale
            distance = rows[start : start + ROWS, None] - positions
            logits = apply_softcap_alibi(logits.flatten(0, 1), distance, spec).view(logits.shape)
            hidden = distance < 0
            hidden[:, : len(positions) - len(rows)] = False  # all of the context is visible, wherever it is placed
            hidden |= outside_window(distance, spec)
            logits = logits.masked_fill(hidden, float("-inf"))
            if sinks is not None:
                sink = sinks.float().view(num_kv_heads, -1, 1, 1).expand(-1, -1, len(distance), 1)
                weights = torch.cat([logits, sink], dim=-1).softmax(-1)[..., :-1]
            else:
                weights = logits.softmax(-1)
            scores.append(weights[..., : len(self._context_positions)].sum(dim=(0, 1, 2)))
            outputs.append(torch.einsum("ghnc,cgd->nghd", weights, values).flatten(1, 2))
        if self._reads_context:
            self.scores.append(torch.stack(scores).sum(dim=0))
        return torch.cat(outputs)[None].to(query.dtype)


def _slots(kv_slice: KVSlice, device: torch.device) -> Int[Tensor, " C"]:
    first, end = kv_slice.token_start, kv_slice.token_start + kv_slice.num_tokens
    return torch.tensor([kv_slice.entry.slot(token) for token in range(first, end)], device=device)


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
