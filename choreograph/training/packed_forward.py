"""One differentiable forward pass over every call of a trace. Owns the packed layout and its attention.

The calls stand one behind the other in one sequence, each from its home position on. Attention shows a call its own
tokens causally and, whole, what it saw of its parents, their keys turned from where they stand to where it saw them
(Prompt Choreography, sections 2.2 to 2.4); gradients reach every parent. Knows no engine and no cache.

Where an adapter only reads what the base model encoded, the base's rows are a pass of their own before, without
gradients, and the adapter's rows see what it left.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from ..attention.metadata import AttentionSpec
from ..attention.reference import apply_softcap_alibi, outside_window
from ..attention.rope import Rope, rotate
from ..models.hf_model import HFModel
from ..outputs import BASE_MODEL
from .trace import TracedCall, first_decode_index

KeysValues = tuple[Tensor, Tensor]  # of one layer, (1, G, N, D) each

KVByLayer = dict[int, KeysValues]  # of some rows, layer by layer

BaseKVProvider = Callable[["PackedTrace"], list[KVByLayer]]  # what the base model makes of calls, one by one


class PackedRange(NamedTuple):
    """Rows lo <= r < hi of the sequence, seen `shift` positions behind where they stand."""

    lo: int
    hi: int
    shift: int


class PackedCall(NamedTuple):
    """One call: its own rows, and the runs that it sees whole."""

    lo: int
    hi: int
    visible_ranges: tuple[PackedRange, ...]


@dataclass(frozen=True)
class PackedTrace:
    """tokens and positions of every row; spans in order. Row rows[i] predicts targets[i], the first tokens of which are
    those of the first decode. past: what the base model encodes before; spans count its rows first."""

    tokens: list[int]
    positions: list[int]
    own_calls: tuple[PackedCall, ...]
    logits_indices: list[int]
    targets: list[int]
    prefix: "PackedTrace | None" = None

    @property
    def num_prefix_tokens(self) -> int:
        """How many rows were encoded before."""
        return 0 if self.prefix is None else len(self.prefix.tokens)

    @cached_property
    def calls(self) -> tuple[PackedCall, ...]:
        """Those that were encoded before, and the spans."""
        return self.own_calls if self.prefix is None else (*self.prefix.own_calls, *self.own_calls)

    def locate(self, packed_range: PackedRange) -> tuple[int, slice]:
        """The number of the call that a run is a part of, and which part."""
        number = bisect_right(self.calls, packed_range.lo, key=lambda span: span.lo) - 1
        call = self.calls[number]
        assert call.lo <= packed_range.lo <= packed_range.hi <= call.hi, f"{packed_range} is of several calls"
        return number, slice(packed_range.lo - call.lo, packed_range.hi - call.lo)

    def check(self) -> None:
        """Spans tile the sequence, and see only what stands before them."""
        if self.prefix is not None:
            self.prefix.check()
        assert [s.lo for s in self.own_calls] == [self.num_prefix_tokens, *(s.hi for s in self.own_calls)][:-1]
        assert (
            (self.own_calls[-1].hi if self.own_calls else self.num_prefix_tokens) - self.num_prefix_tokens
            == len(self.tokens)
            == len(self.positions)
        )
        assert all(
            0 <= run.lo <= run.hi <= span.lo and self.locate(run)
            for span in self.own_calls
            for run in span.visible_ranges
        )
        assert len(self.logits_indices) == len(self.targets)


def pack(calls: Sequence[TracedCall]) -> PackedTrace:
    """The calls of one trace in one sequence."""
    tokens: list[int] = []
    positions: list[int] = []
    rows: list[int] = []
    targets: list[int] = []
    spans: list[PackedCall] = []
    for call in calls:
        lo, header = len(tokens), len(call.prompt)
        spans.append(PackedCall(lo, lo + len(call.tokens), tuple(_visible_ranges(call, spans, calls))))
        tokens += call.tokens
        positions += range(call.start, call.start + len(call.tokens))
        if call.generated:
            rows += range(lo + header - 1, lo + header - 1 + len(call.generated))
            targets += call.generated
    return PackedTrace(tokens, positions, tuple(spans), rows, targets)


def pack_adapter_stages(calls: Sequence[TracedCall]) -> PackedTrace:
    """What a trace's readers compute, behind what the base model encodes, in the order of `for_readers`: the first that
    is decoded is theirs, and all behind it."""
    given = first_decode_index(calls)
    past, whole = pack(calls[:given]), pack(calls)
    past = replace(
        past, own_calls=tuple(span for span in past.own_calls if span.lo < span.hi)
    )  # nobody sees the others
    lo = len(past.tokens)
    rows = [row - lo for row in whole.logits_indices]
    return PackedTrace(whole.tokens[lo:], whole.positions[lo:], whole.own_calls[given:], rows, whole.targets, past)


def _visible_ranges(
    call: TracedCall, packed_calls: Sequence[PackedCall], calls: Sequence[TracedCall]
) -> Iterator[PackedRange]:
    for seen in call.parents:
        lo = packed_calls[seen.call].lo
        if seen.first < seen.last:
            yield PackedRange(lo + seen.first, lo + seen.last, seen.offset - seen.first - calls[seen.call].start)


class PackedForwardContext:
    """The attention of one pass, layer by layer; travels through the model as the engine's `Step` does. past: the calls
    that were encoded before. kept: where to leave its own rows."""

    def __init__(
        self,
        packed: PackedTrace,
        specs: Sequence[AttentionSpec],
        device: torch.device,
        prefix_kv: Sequence[KVByLayer] = (),
        kv_out: KVByLayer | None = None,
    ) -> None:
        self._calls, self._specs = packed.own_calls, specs
        before = [] if packed.prefix is None else packed.prefix.positions
        assert len(prefix_kv) == len(packed.calls) - len(packed.own_calls), "every call that was encoded before"
        self._prefix_kv, self._kv_out = prefix_kv, kv_out
        self._positions = torch.tensor(before + packed.positions, device=device)
        self._lengths = [span.hi - span.lo for span in packed.own_calls]
        runs = {run for span in packed.own_calls for run in span.visible_ranges}
        self._locations = {run: packed.locate(run) for run in runs}
        shifts = sorted({run.shift for run in runs})
        self._rope_tables: dict[tuple[Rope, int], tuple[Tensor, Tensor]] = {}
        for rotary in {kind.rope for kind in specs if kind.rope is not None}:
            cos, sin = (torch.from_numpy(table).to(device) for table in rotary.cos_sin(shifts))
            self._rope_tables |= {(rotary, shift): (cos[i], sin[i]) for i, shift in enumerate(shifts)}

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "1 H N D"],
        key: Float[Tensor, "1 G N D"],
        value: Float[Tensor, "1 G N D"],
        scale: float,
        sinks: Float[Tensor, "H"] | None = None,
    ) -> Float[Tensor, "1 N H D"]:
        kind = self._specs[layer]
        if self._kv_out is not None:
            self._kv_out[layer] = key, value
        # call by call: the gradient of a part is as large as what it was cut from, and what was encoded before has none
        before = [tuple(x.to(key.dtype) for x in one[layer]) for one in self._prefix_kv]
        keys = [*(k for k, _ in before), *key.split(self._lengths, dim=2)]
        values = [*(v for _, v in before), *value.split(self._lengths, dim=2)]
        turned: dict[PackedRange, Tensor] = {}  # several calls see the same thing at the same place
        outputs = []
        for number, (span, rows) in enumerate(zip(self._calls, query.split(self._lengths, dim=2), strict=True)):
            for run in span.visible_ranges:
                if run not in turned:
                    turned[run] = self._rotate_keys(self._slice_range(keys, run), run.shift, kind.rope)
            own = len(self._prefix_kv) + number
            seen = torch.cat([*(turned[run] for run in span.visible_ranges), keys[own]], dim=2)
            read = torch.cat([*(self._slice_range(values, run) for run in span.visible_ranges), values[own]], dim=2)
            if kind.is_plain and sinks is None:
                outputs.append(_attend(rows, seen, read, scale))
            else:
                outputs.append(_attend_unfused(rows, seen, read, scale, self._distance(span), kind, sinks))
        return torch.cat(outputs, dim=2).transpose(1, 2)

    def _slice_range(self, tensors: Sequence[Tensor], packed_range: PackedRange) -> Tensor:
        number, part = self._locations[packed_range]
        return (
            tensors[number]
            if packed_range.hi - packed_range.lo == tensors[number].shape[2]
            else tensors[number][:, :, part]
        )

    def _rotate_keys(self, keys: Float[Tensor, "1 G T D"], shift: int, rope: Rope | None) -> Float[Tensor, "1 G T D"]:
        if rope is None or not shift:
            return keys
        return rotate(keys, *self._rope_tables[rope, shift], rope.interleaved).to(keys.dtype)

    def _distance(self, call: PackedCall) -> Tensor:
        """(N, T): where each row of a call stands, minus where it sees each key."""
        seen = [self._positions[run.lo : run.hi] + run.shift for run in call.visible_ranges]
        own = self._positions[call.lo : call.hi]
        return own[:, None] - torch.cat([*seen, own])


def _attend(
    query: Float[Tensor, "1 H N D"], keys: Float[Tensor, "1 G T D"], values: Float[Tensor, "1 G T D"], scale: float
) -> Float[Tensor, "1 H N D"]:
    """The last N of T tokens see the ones before them whole, and each other causally. The heads that share a key are
    rows of one product, which is many times faster on a CPU than repeating the keys."""
    (_, heads, own, width), (_, groups, seen, _) = query.shape, keys.shape
    visible = torch.ones(own, seen, dtype=torch.bool, device=query.device).tril(seen - own)
    rows = query.reshape(1, groups, heads // groups * own, width)
    mask = visible.repeat(heads // groups, 1)
    return functional.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=scale).reshape(query.shape)


def _attend_unfused(
    query: Float[Tensor, "1 H N D"],
    keys: Float[Tensor, "1 G T D"],
    values: Float[Tensor, "1 G T D"],
    scale: float,
    distance: Tensor,
    spec: AttentionSpec,
    sinks: Float[Tensor, "H"] | None,
) -> Float[Tensor, "1 H N D"]:
    """As `_attend`, with all scores in memory: those of layers that cap, slope, hide or sink some."""
    share = query.shape[1] // keys.shape[1]
    own, seen = distance.shape
    k, v = (x[0].repeat_interleave(share, dim=0) for x in (keys, values))
    with torch.autocast(query.device.type, enabled=False):
        scores = apply_softcap_alibi(query[0].float() @ k.float().transpose(-1, -2) * scale, distance, spec)
    hidden = torch.ones(own, seen, dtype=torch.bool, device=query.device).triu(seen - own + 1) | outside_window(
        distance, spec
    )
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, own, 1)], dim=-1)
    return (scores.softmax(-1)[..., :seen].to(v.dtype) @ v)[None]


def forward(
    hf_model: HFModel,
    packed: PackedTrace,
    *,
    model: Any = None,
    base_kv_provider: BaseKVProvider | None = None,
    kv_out: KVByLayer | None = None,
) -> Float[Tensor, "R V"]:
    """The logits that predict the targets, with gradients if they are enabled. through: what wraps the model. by_base:
    what knows encodings by the base model that passes share. kept: where to leave the keys and values of every layer,
    those of the rows alone.

    To be called inside `adapter.hooked()`, and left only behind `backward`, which may compute layers again.
    """
    hf_model.ensure_single_process("one pass over a whole run")
    return _logits(hf_model, packed, _compute_prefix_kv(hf_model, packed, base_kv_provider), model, kv_out)


@torch.no_grad()
def forward_no_grad(
    hf_model: HFModel, packed: PackedTrace, model: str = BASE_MODEL, kv_out: KVByLayer | None = None
) -> Float[Tensor, "R V"]:
    """As `logits_of`, of the model or one of its adapters, without gradients."""
    hf_model.ensure_single_process("one pass over a whole run")
    with hf_model.attention_hook():
        past = _compute_prefix_kv(hf_model, packed)
        with hf_model.lora_rows([model] * len(packed.tokens)):
            return _logits(hf_model, packed, past, kv_out=kv_out)


def _logits(
    hf_model: HFModel,
    packed: PackedTrace,
    prefix_kv: Sequence[KVByLayer],
    model: Any = None,
    kv_out: KVByLayer | None = None,
) -> Tensor:
    facts = hf_model.model_info
    if not packed.logits_indices:
        return torch.zeros(0, facts.vocab_size, device=facts.device)
    step = PackedForwardContext(packed, facts.attention_specs, facts.device, prefix_kv, kv_out)
    return hf_model.logits(packed.tokens, packed.positions, step, packed.logits_indices, model=model)


def _compute_prefix_kv(
    hf_model: HFModel, packed: PackedTrace, base_kv_provider: BaseKVProvider | None = None
) -> list[KVByLayer]:
    """What the base model leaves of the rows before."""
    if packed.prefix is None or not packed.num_prefix_tokens or not packed.logits_indices:
        return []
    return (
        base_kv_provider(packed.prefix)
        if base_kv_provider is not None
        else compute_kv_per_call(hf_model, packed.prefix)
    )


def compute_kv_per_call(hf_model: HFModel, packed: PackedTrace, prefix_kv: Sequence[KVByLayer] = ()) -> list[KVByLayer]:
    """As `encoded`, call by call."""
    lengths = [span.hi - span.lo for span in packed.own_calls]
    made = compute_kv(hf_model, packed, prefix_kv).items()
    parts = {layer: [x.split(lengths, dim=2) for x in both] for layer, both in made}
    return [{layer: (keys[n], values[n]) for layer, (keys, values) in parts.items()} for n in range(len(lengths))]


@torch.no_grad()
def compute_kv(hf_model: HFModel, packed: PackedTrace, prefix_kv: Sequence[KVByLayer] = ()) -> KVByLayer:
    """The keys and values that the base model makes of all rows, layer by layer, whatever is being trained. To be
    called inside `adapter.hooked()`."""
    facts, rows = hf_model.model_info, len(packed.tokens)
    kept: KVByLayer = {}
    step = PackedForwardContext(packed, facts.attention_specs, facts.device, prefix_kv, kept)
    with hf_model.base_weights(), hf_model.lora_rows([BASE_MODEL] * rows):
        hf_model.logits(packed.tokens, packed.positions, step, [rows - 1])
    return kept
