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

from ..models.adapter import Adapter
from ..ops.kind import Kind
from ..ops.reference import beyond, shaped
from ..ops.rope import Rotary, turn
from ..types import BASE
from .calls import TracedCall, first_decode

KeysValues = tuple[Tensor, Tensor]  # of one layer, (1, G, N, D) each
Encoding = dict[int, KeysValues]  # of some rows, layer by layer
ByBase = Callable[["Pack"], list[Encoding]]  # what the base model makes of calls, one by one


class Run(NamedTuple):
    """Rows lo <= r < hi of the sequence, seen `shift` positions behind where they stand."""

    lo: int
    hi: int
    shift: int


class Span(NamedTuple):
    """One call: its own rows, and the runs that it sees whole."""

    lo: int
    hi: int
    sees: tuple[Run, ...]


@dataclass(frozen=True)
class Pack:
    """tokens and positions of every row; spans in order. Row rows[i] predicts targets[i], the first tokens of which are
    those of the first decode. past: what the base model encodes before; spans count its rows first."""

    tokens: list[int]
    positions: list[int]
    spans: tuple[Span, ...]
    rows: list[int]
    targets: list[int]
    past: "Pack | None" = None

    @property
    def behind(self) -> int:
        """How many rows were encoded before."""
        return 0 if self.past is None else len(self.past.tokens)

    @cached_property
    def calls(self) -> tuple[Span, ...]:
        """Those that were encoded before, and the spans."""
        return self.spans if self.past is None else (*self.past.spans, *self.spans)

    def home(self, run: Run) -> tuple[int, slice]:
        """The number of the call that a run is a part of, and which part."""
        number = bisect_right(self.calls, run.lo, key=lambda span: span.lo) - 1
        call = self.calls[number]
        assert call.lo <= run.lo <= run.hi <= call.hi, f"{run} is of several calls"
        return number, slice(run.lo - call.lo, run.hi - call.lo)

    def check(self) -> None:
        """Spans tile the sequence, and see only what stands before them."""
        if self.past is not None:
            self.past.check()
        assert [s.lo for s in self.spans] == [self.behind, *(s.hi for s in self.spans)][:-1]
        assert (
            (self.spans[-1].hi if self.spans else self.behind) - self.behind == len(self.tokens) == len(self.positions)
        )
        assert all(0 <= run.lo <= run.hi <= span.lo and self.home(run) for span in self.spans for run in span.sees)
        assert len(self.rows) == len(self.targets)


def pack(calls: Sequence[TracedCall]) -> Pack:
    """The calls of one trace in one sequence."""
    tokens: list[int] = []
    positions: list[int] = []
    rows: list[int] = []
    targets: list[int] = []
    spans: list[Span] = []
    for call in calls:
        lo, header = len(tokens), len(call.prompt)
        spans.append(Span(lo, lo + len(call.tokens), tuple(_runs(call, spans, calls))))
        tokens += call.tokens
        positions += range(call.start, call.start + len(call.tokens))
        if call.generated:
            rows += range(lo + header - 1, lo + header - 1 + len(call.generated))
            targets += call.generated
    return Pack(tokens, positions, tuple(spans), rows, targets)


def pack_reading(calls: Sequence[TracedCall]) -> Pack:
    """What a trace's readers compute, behind what the base model encodes, in the order of `for_readers`: the first that
    is decoded is theirs, and all behind it."""
    given = first_decode(calls)
    past, whole = pack(calls[:given]), pack(calls)
    past = replace(past, spans=tuple(span for span in past.spans if span.lo < span.hi))  # nobody sees the others
    lo = len(past.tokens)
    rows = [row - lo for row in whole.rows]
    return Pack(whole.tokens[lo:], whole.positions[lo:], whole.spans[given:], rows, whole.targets, past)


def _runs(call: TracedCall, spans: Sequence[Span], calls: Sequence[TracedCall]) -> Iterator[Run]:
    for seen in call.parents:
        lo = spans[seen.call].lo
        if seen.first < seen.last:
            yield Run(lo + seen.first, lo + seen.last, seen.offset - seen.first - calls[seen.call].start)


class PackedStep:
    """The attention of one pass, layer by layer; travels through the model as the engine's `Step` does. past: the calls
    that were encoded before. kept: where to leave its own rows."""

    def __init__(
        self,
        packed: Pack,
        kinds: Sequence[Kind],
        device: torch.device,
        past: Sequence[Encoding] = (),
        kept: Encoding | None = None,
    ) -> None:
        self._spans, self._kinds = packed.spans, kinds
        before = [] if packed.past is None else packed.past.positions
        assert len(past) == len(packed.calls) - len(packed.spans), "every call that was encoded before"
        self._past, self._kept = past, kept
        self._positions = torch.tensor(before + packed.positions, device=device)
        self._lengths = [span.hi - span.lo for span in packed.spans]
        runs = {run for span in packed.spans for run in span.sees}
        self._homes = {run: packed.home(run) for run in runs}
        shifts = sorted({run.shift for run in runs})
        self._turns: dict[tuple[Rotary, int], tuple[Tensor, Tensor]] = {}
        for rotary in {kind.rotary for kind in kinds if kind.rotary is not None}:
            cos, sin = (torch.from_numpy(table).to(device) for table in rotary.table(shifts))
            self._turns |= {(rotary, shift): (cos[i], sin[i]) for i, shift in enumerate(shifts)}

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "1 H N D"],
        key: Float[Tensor, "1 G N D"],
        value: Float[Tensor, "1 G N D"],
        scale: float,
        sinks: Float[Tensor, "H"] | None = None,
    ) -> Float[Tensor, "1 N H D"]:
        kind = self._kinds[layer]
        if self._kept is not None:
            self._kept[layer] = key, value
        # call by call: the gradient of a part is as large as what it was cut from, and what was encoded before has none
        before = [tuple(x.to(key.dtype) for x in one[layer]) for one in self._past]
        keys = [*(k for k, _ in before), *key.split(self._lengths, dim=2)]
        values = [*(v for _, v in before), *value.split(self._lengths, dim=2)]
        turned: dict[Run, Tensor] = {}  # several calls see the same thing at the same place
        outputs = []
        for number, (span, rows) in enumerate(zip(self._spans, query.split(self._lengths, dim=2), strict=True)):
            for run in span.sees:
                if run not in turned:
                    turned[run] = self._turn(self._rows(keys, run), run.shift, kind.rotary)
            own = len(self._past) + number
            seen = torch.cat([*(turned[run] for run in span.sees), keys[own]], dim=2)
            read = torch.cat([*(self._rows(values, run) for run in span.sees), values[own]], dim=2)
            if kind.plain and sinks is None:
                outputs.append(_attend(rows, seen, read, scale))
            else:
                outputs.append(_attend_shaped(rows, seen, read, scale, self._distance(span), kind, sinks))
        return torch.cat(outputs, dim=2).transpose(1, 2)

    def _rows(self, calls: Sequence[Tensor], run: Run) -> Tensor:
        number, part = self._homes[run]
        return calls[number] if run.hi - run.lo == calls[number].shape[2] else calls[number][:, :, part]

    def _turn(self, keys: Float[Tensor, "1 G T D"], shift: int, rotary: Rotary | None) -> Float[Tensor, "1 G T D"]:
        if rotary is None or not shift:
            return keys
        return turn(keys, *self._turns[rotary, shift], rotary.interleaved).to(keys.dtype)

    def _distance(self, span: Span) -> Tensor:
        """(N, T): where each row of a call stands, minus where it sees each key."""
        seen = [self._positions[run.lo : run.hi] + run.shift for run in span.sees]
        own = self._positions[span.lo : span.hi]
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


def _attend_shaped(
    query: Float[Tensor, "1 H N D"],
    keys: Float[Tensor, "1 G T D"],
    values: Float[Tensor, "1 G T D"],
    scale: float,
    distance: Tensor,
    kind: Kind,
    sinks: Float[Tensor, "H"] | None,
) -> Float[Tensor, "1 H N D"]:
    """As `_attend`, with all scores in memory: those of layers that cap, slope, hide or sink some."""
    share = query.shape[1] // keys.shape[1]
    own, seen = distance.shape
    k, v = (x[0].repeat_interleave(share, dim=0) for x in (keys, values))
    with torch.autocast(query.device.type, enabled=False):
        scores = shaped(query[0].float() @ k.float().transpose(-1, -2) * scale, distance, kind)
    hidden = torch.ones(own, seen, dtype=torch.bool, device=query.device).triu(seen - own + 1) | beyond(distance, kind)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, own, 1)], dim=-1)
    return (scores.softmax(-1)[..., :seen].to(v.dtype) @ v)[None]


def logits_of(
    adapter: Adapter,
    packed: Pack,
    *,
    through: Any = None,
    by_base: ByBase | None = None,
    kept: Encoding | None = None,
) -> Float[Tensor, "R V"]:
    """The logits that predict the targets, with gradients if they are enabled. through: what wraps the model. by_base:
    what knows encodings by the base model that passes share. kept: where to leave the keys and values of every layer,
    those of the rows alone.

    To be called inside `adapter.hooked()`, and left only behind `backward`, which may compute layers again.
    """
    adapter.refuse_ranks("one pass over a whole run")
    return _logits(adapter, packed, _past(adapter, packed, by_base), through, kept)


@torch.no_grad()
def read_logits(
    adapter: Adapter, packed: Pack, model: str = BASE, kept: Encoding | None = None
) -> Float[Tensor, "R V"]:
    """As `logits_of`, of the model or one of its adapters, without gradients."""
    adapter.refuse_ranks("one pass over a whole run")
    with adapter.hooked():
        past = _past(adapter, packed)
        with adapter.adapted([model] * len(packed.tokens)):
            return _logits(adapter, packed, past, kept=kept)


def _logits(
    adapter: Adapter,
    packed: Pack,
    past: Sequence[Encoding],
    through: Any = None,
    kept: Encoding | None = None,
) -> Tensor:
    facts = adapter.facts
    if not packed.rows:
        return torch.zeros(0, facts.vocab_size, device=facts.device)
    step = PackedStep(packed, facts.kinds, facts.device, past, kept)
    return adapter.logits(packed.tokens, packed.positions, step, packed.rows, through=through)


def _past(adapter: Adapter, packed: Pack, by_base: ByBase | None = None) -> list[Encoding]:
    """What the base model leaves of the rows before."""
    if packed.past is None or not packed.behind or not packed.rows:
        return []
    return by_base(packed.past) if by_base is not None else encoded_apart(adapter, packed.past)


def encoded_apart(adapter: Adapter, packed: Pack, past: Sequence[Encoding] = ()) -> list[Encoding]:
    """As `encoded`, call by call."""
    lengths = [span.hi - span.lo for span in packed.spans]
    made = encoded(adapter, packed, past).items()
    parts = {layer: [x.split(lengths, dim=2) for x in both] for layer, both in made}
    return [{layer: (keys[n], values[n]) for layer, (keys, values) in parts.items()} for n in range(len(lengths))]


@torch.no_grad()
def encoded(adapter: Adapter, packed: Pack, past: Sequence[Encoding] = ()) -> Encoding:
    """The keys and values that the base model makes of all rows, layer by layer, whatever is being trained. To be
    called inside `adapter.hooked()`."""
    facts, rows = adapter.facts, len(packed.tokens)
    kept: Encoding = {}
    step = PackedStep(packed, facts.kinds, facts.device, past, kept)
    with adapter.untrained(), adapter.adapted([BASE] * rows):
        adapter.logits(packed.tokens, packed.positions, step, [rows - 1])
    return kept
