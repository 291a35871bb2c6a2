"""Attention over a context, of a dense pass or observed in steps."""

from collections.abc import Iterator
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...attention.backend import ForwardContext
from ...attention.int8_rows import to_float
from ...attention.reference import apply_softcap_alibi, outside_window
from ...attention.rope import rotate
from ...request.request import Request
from .strategy import ContextView

ROWS = 256  # query tokens whose attention weights are in memory at once
LATE_LAYERS = 0.6  # share of the layers before those whose attention counts, as in InfoFlow KV (arXiv:2603.05353)


class ProbeContext:
    """Dense attention of probe tokens, in float32, recording keys and values.

    Takes the place of `ForwardContext` in a forward pass. The probe tokens attend causally to
    themselves and, with `reads_context`, to all of the call's context.
    """

    def __init__(self, view: ContextView, *, position: int, num_tokens: int, reads_context: bool) -> None:
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
        keys = to_float(self._pool.keys[layer].index_select(0, slots))
        if rope is None or not any(shifts):
            return keys
        if (rope, visible) not in self._rotations:
            cos, sin = (torch.from_numpy(table).to(keys.device)[:, None] for table in rope.cos_sin(shifts))
            self._rotations[rope, visible] = cos, sin
        return rotate(keys, *self._rotations[rope, visible], rope.interleaved).to(keys.dtype)

    def context_values(self, layer: int) -> Float[Tensor, "C G D"]:
        return to_float(self._pool.values[layer].index_select(0, self._tokens(self._visible(layer))[0]))

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
        own_keys, own_values = key[0].transpose(0, 1), value[0].transpose(0, 1)
        self.keys[layer], self.values[layer] = own_keys, own_values
        keys, values = own_keys, own_values
        if self._reads_context:
            keys = torch.cat([self.context_keys(layer), keys])
            values = torch.cat([self.context_values(layer), values])
        keys, values = keys.float(), values.float()
        outputs = [
            torch.einsum("ghnc,cgd->nghd", weights, values[: weights.shape[-1]]).flatten(1, 2)
            for weights in self.attention_weights(layer, query[0], keys, scale, sinks)
        ]
        return torch.cat(outputs)[None].to(query.dtype)

    def attention_weights(
        self,
        layer: int,
        query: Float[Tensor, "H N D"],
        keys: Float[Tensor, "K G D"],
        scale: float,
        sinks: Float[Tensor, "H"] | None = None,
    ) -> Iterator[Float[Tensor, "G H/G B K"]]:
        """Yield the attention of the last probe tokens, in blocks.

        Args:
            keys: float32, of the context, if any, and of all probe tokens. Those that a block does not see are
                missing at the end of its result.
        """
        spec, num_own = self._specs[layer], len(self._positions)
        num_context = len(keys) - num_own
        rows = self._positions.to(keys.device)
        positions = torch.cat([self._context_positions.to(keys.device), rows]) if num_context else rows
        num_tokens = query.shape[1]
        for start in range(num_own - num_tokens, num_own, ROWS):
            end = min(start + ROWS, num_own)
            block = query[:, start - num_own + num_tokens : end - num_own + num_tokens].float()
            grouped_query = block.unflatten(0, (keys.shape[1], -1))  # G H/G B D
            logits = torch.einsum("ghnd,cgd->ghnc", grouped_query, keys[: num_context + end]) * scale
            distance = rows[start:end, None] - positions[: num_context + end]
            logits = apply_softcap_alibi(logits.flatten(0, 1), distance, spec).view(logits.shape)
            hidden = distance < 0
            hidden[:, :num_context] = False  # all of the context is visible, wherever it is placed
            hidden |= outside_window(distance, spec)
            logits = logits.masked_fill(hidden, float("-inf"))
            if sinks is not None:
                sink = sinks.float().view(keys.shape[1], -1, 1, 1).expand(-1, -1, len(distance), 1)
                yield torch.cat([logits, sink], dim=-1).softmax(-1)[..., :-1]
            else:
                yield logits.softmax(-1)


class AttentionObserver:
    """Attention that each context token receives from a prompt in steps."""

    def __init__(self, view: ContextView, request: Request) -> None:
        """Observe a request that computes the call's prompt over the context."""
        self._view, self._request = view, request
        self._first_layer = int(LATE_LAYERS * len(view.core.cache_manager.pool.keys))
        self._context: ProbeContext | None = None  # of the current step: entries may move between steps
        self._own_slots: Int[Tensor, " N"] | None = None  # likewise, of the request's tokens up to this step's last
        self._scores: dict[tuple[int, int], Float[Tensor, " C"]] = {}  # by layer and first position

    def __call__(
        self,
        layer: int,
        query: Float[Tensor, "H N D"],
        position: int,
        scale: float,
        sinks: Float[Tensor, "H"] | None,
    ) -> None:
        """Add the attention of consecutive tokens in one layer; see `AttentionHook`."""
        if layer < self._first_layer:
            return
        pool, entry = self._view.core.cache_manager.pool, self._request.entry
        if layer == self._first_layer:
            if position == entry.base_position:
                self._scores.clear()  # of a computation that was preempted
            num_own = position + query.shape[1] - entry.base_position
            self._context = ProbeContext(
                self._view, position=entry.base_position, num_tokens=num_own, reads_context=True
            )
            self._own_slots = torch.tensor([entry.slot(token) for token in range(num_own)], device=query.device)
        assert self._context is not None and self._own_slots is not None
        context_keys = self._context.context_keys(layer)
        keys = torch.cat([context_keys, to_float(pool.keys[layer].index_select(0, self._own_slots))]).float()
        weights = self._context.attention_weights(layer, query, keys, scale, sinks)
        scores = [block[..., : len(context_keys)].sum(dim=(0, 1, 2)) for block in weights]
        self._scores[layer, position] = torch.stack(scores).sum(dim=0)

    @property
    def attention(self) -> Float[Tensor, " C"]:
        """Attention that each context token received, summed over tokens and layers."""
        return torch.stack(list(self._scores.values())).sum(dim=0).cpu()


def probe_context(view: ContextView, tokens: list[int], *, num_layers: int) -> ProbeContext:
    """Run the first layers on `tokens` from position 0 on.

    Raises:
        ModelError: if the layers of this family do not run one by one.
    """
    context = ProbeContext(view, position=0, num_tokens=len(tokens), reads_context=False)
    request = view.request
    view.core.model_set.get(request.model).forward_layers(
        0,
        num_layers,
        tokens,
        list(range(len(tokens))),
        cast(ForwardContext, context),
        [request.model] * len(tokens),
    )
    return context
