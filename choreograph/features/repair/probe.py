"""Attention over a context, of a dense pass or observed in steps."""

from collections.abc import Iterable
from typing import NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...attention.backend import ForwardContext
from ...attention.int8_rows import to_float
from ...attention.metadata import AttentionSpec
from ...attention.reference import apply_softcap_alibi, outside_window
from ...attention.rope import Rope, rotate
from ...kv_cache.entry import KVEntry, KVSlice, context_reads
from ...request.request import Request
from .strategy import ContextView

ROWS = 64  # query tokens whose attention weights are in memory at once


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
        spec, num_tokens = self._specs[layer], len(self._positions)
        num_context = len(keys) - num_tokens
        rows = self._positions.to(keys.device)
        positions = torch.cat([self._context_positions.to(keys.device), rows]) if num_context else rows
        outputs = []
        for start in range(0, num_tokens, ROWS):
            end = min(start + ROWS, num_tokens)
            num_keys = num_context + end  # later ones are hidden
            grouped_query = query[0, :, start:end].float().unflatten(0, (keys.shape[1], -1))  # G H/G B D
            logits = torch.einsum("ghnd,cgd->ghnc", grouped_query, keys[:num_keys]).flatten(0, 1)
            distance = rows[start:end, None] - positions[:num_keys]
            weights = _attention_weights(logits * scale, distance, num_context, spec, sinks)
            outputs.append(
                torch.einsum(
                    "ghnc,cgd->nghd", weights.view(grouped_query.shape[0], -1, *distance.shape), values[:num_keys]
                ).flatten(1, 2)
            )
        return torch.cat(outputs)[None].to(query.dtype)


def _attention_weights(
    scores: Float[Tensor, "H N K"],
    distance: Int[Tensor, "N K"],
    num_context: int,
    spec: AttentionSpec,
    sinks: Float[Tensor, "H"] | None,
) -> Float[Tensor, "H N K"]:
    """Return the attention of tokens to `num_context` tokens, wherever they are placed, and causally to the others.

    Args:
        distance: query position minus key position.
    """
    scores = apply_softcap_alibi(scores, distance, spec)
    hidden = distance < 0
    hidden[:, :num_context] = False
    scores.masked_fill_(hidden | outside_window(distance, spec), float("-inf"))
    if sinks is None:
        return scores.softmax(-1)
    return torch.cat([scores, sinks.float()[:, None, None].expand(-1, len(distance), 1)], dim=-1).softmax(-1)[..., :-1]


class AttentionObserver:
    """Attention that each context token receives from a prompt, computed in steps.

    Reads the queries of some layers after they have attended (`AttentionHook`).
    """

    def __init__(self, view: ContextView, request: Request, layers: tuple[float, float]) -> None:
        """Observe a request that computes the call's prompt over the context.

        Args:
            layers: first and end of those that count, as shares of all.
        """
        self._pool, self._specs = view.core.cache_manager.pool, view.core.hf_model.model_info.attention_specs
        self._slices = [kv_slice for parent in view.parents for kv_slice in parent.slices]
        self._request = request
        first, end = (round(share * len(self._pool.keys)) for share in layers)
        end = max(1, end)
        self._layers = range(min(first, end - 1), end)
        self.num_layers = self._layers.stop
        self._steps: dict[tuple[bool, ...], _ObservedStep] = {}  # the current one, by visible slices
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
        if layer not in self._layers:
            return
        if layer == self._layers.start:
            self._steps.clear()  # entries may have moved since
            if position == self._request.entry.base_position:
                self._scores.clear()  # of a computation that was preempted
        visible = tuple(kv_slice.visible_in(layer) for kv_slice in self._slices)
        if visible not in self._steps:
            slices = [kv_slice for kv_slice, is_visible in zip(self._slices, visible, strict=True) if is_visible]
            self._steps[visible] = _ObservedStep.of(slices, self._request.entry, position, query)
        step, spec = self._steps[visible], self._specs[layer]
        keys = to_float(self._pool.keys[layer].index_select(0, step.slots)).float().permute(1, 2, 0)  # G D K
        parts, scores = keys.split(step.lengths, dim=-1), torch.zeros(step.num_context, device=query.device)
        for rows, distance in zip(query.float().split(ROWS, dim=1), step.distance.split(ROWS), strict=True):
            grouped = rows.unflatten(0, (len(keys), -1))  # G H/G B D
            logits = [turned @ part for turned, part in zip(step.rotate(grouped, spec.rope), parts, strict=True)]
            weights = _attention_weights(
                torch.cat(logits, dim=-1).mul_(scale).view(len(query), *distance.shape),
                distance,
                step.num_context,
                spec,
                sinks,
            )
            scores += weights[..., : step.num_context].sum(dim=(0, 1))
        self._scores[layer, position] = scores

    @property
    def attention(self) -> Float[Tensor, " C"]:
        """Attention that each context token received, summed over tokens and layers."""
        return torch.stack(list(self._scores.values())).sum(dim=0).cpu()


class _ObservedStep(NamedTuple):
    """What the prompt's tokens of one step read: the context, then the prompt up to the last of them."""

    slots: Int[Tensor, " K"]
    shifts: list[int]  # of each slice
    lengths: list[int]  # tokens of each slice
    distance: Int[Tensor, "N K"]  # query position minus key position
    num_context: int  # tokens of the context

    @classmethod
    def of(cls, slices: list[KVSlice], entry: KVEntry, position: int, query: Float[Tensor, "H N D"]) -> "_ObservedStep":
        """Return what the entry's tokens from `position` on read."""
        num_rows = query.shape[1]
        num_own = position + num_rows - entry.base_position
        slices = [*slices, KVSlice(entry, 0, num_own, entry.base_position)]
        reads = context_reads([kv_slice._replace(layers=None) for kv_slice in slices], 0, num_rows)
        slots, positions = (
            torch.cat([torch.arange(first, first + read.kv_len) for first, read in zip(firsts, reads, strict=True)])
            for firsts in ([read.slot_start for read in reads], [read.position for read in reads])
        )
        distance = torch.arange(position, position + num_rows)[:, None] - positions
        return cls(
            slots.to(query.device),
            [kv_slice.shift for kv_slice in slices],
            [kv_slice.num_tokens for kv_slice in slices],
            distance.to(query.device),
            len(slots) - num_own,
        )

    def rotate(self, query: Float[Tensor, "G H/G B D"], rope: Rope | None) -> Iterable[Float[Tensor, "G M D"]]:
        """Rotate queries, for each slice, to where its keys were computed."""
        rows = query.flatten(1, 2)
        if rope is None or not any(self.shifts):
            return [rows] * len(self.shifts)
        cos, sin = (torch.from_numpy(table).to(query.device)[:, None, None] for table in rope.cos_sin(self.shifts))
        return rotate(rows.expand(len(cos), *rows.shape), cos, -sin, rope.interleaved)


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
