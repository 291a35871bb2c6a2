"""What the calls of a workflow were, token by token: enough to compute them again, all at once. Owns the schema.

A call names no messages: it points to its parents by their number among the calls, with what it saw of them and where.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from ..engine.message import Message, MessageSlice
from ..errors import DataError
from ..outputs import BASE_MODEL
from ..workflows.run import StageCall

if TYPE_CHECKING:
    from .packed_forward import PackedTrace

VERSION = 1


class TraceSlice(NamedTuple):
    """Tokens first <= k < last of call number `call`, the first of them seen at position `offset`."""

    call: int
    first: int
    last: int
    offset: int


@dataclass(frozen=True)
class TracedCall:
    """prompt: the tokens of a prefill, or the header of a decode. generated: None for a prefill. logprobs: what the
    model gave to each generated token; top: to its likeliest ones there, as pairs of token and log-probability."""

    stage: str
    prompt: list[int]
    start: int
    parents: tuple[TraceSlice, ...] = ()
    generated: list[int] | None = None
    footer: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    top: tuple[tuple[tuple[int, float], ...], ...] = ()

    @property
    def tokens(self) -> list[int]:
        """What others see."""
        return [*self.prompt, *(self.generated or ()), *self.footer]


def trace_calls(steps: Iterable[StageCall]) -> list[TracedCall]:
    """The calls of a finished performance, in order. Equal prefills are one call, as they are one encoding."""
    result: list[TracedCall] = []
    numbers: dict[int, int] = {}
    known: dict[object, int] = {}
    for stage, message in steps:
        call = _trace_call(stage, message.result(), numbers)
        places = tuple((*seen[:3], seen.offset - call.start) for seen in call.parents)
        name = (tuple(call.prompt), places) if call.generated is None else message.id
        if name not in known:
            known[name] = len(result)
            result.append(call)
        numbers[message.id] = known[name]
    return result


def iter_decodes(calls: Iterable[TracedCall]) -> Iterator[tuple[tuple[str, int], TracedCall]]:
    """The decodes in order, each by the name of its stage and its number there: the same in every condition."""
    count: Counter[str] = Counter()
    for call in calls:
        if call.generated is not None:
            yield (call.stage, count[call.stage]), call
            count[call.stage] += 1


def first_decode_index(calls: Sequence[TracedCall]) -> int:
    """The number of the first decode, or of calls: where readers' own begin, in the order of `for_readers`."""
    return next((number for number, call in enumerate(calls) if call.generated is not None), len(calls))


def _trace_call(stage: str, message: Message, call_indices: Mapping[int, int]) -> TracedCall:
    if message.model != BASE_MODEL:
        raise DataError(f"stage {stage!r} runs on {message.model!r}: only what the base model does can be traced")
    decoded, call = message.kind == "decode", message._request
    logprobs = message.logprobs or ()
    return TracedCall(
        stage,
        list(call.prompt),
        message.position,
        tuple(_trace_slice(p, at, call_indices) for p, at in zip(message.parents, message.offsets, strict=True)),
        message.output_token_ids if decoded else None,
        tuple(call.footer) if decoded else (),
        tuple(one.logprob for one in logprobs),
        tuple(tuple(one.top.items()) for one in logprobs),
    )


def _trace_slice(parent: Message | MessageSlice, offset: int, call_indices: Mapping[int, int]) -> TraceSlice:
    if parent.id not in call_indices:
        raise DataError(f"message {parent.id} was not made through the performance: a trace cannot say what it is")
    first = parent.start if isinstance(parent, MessageSlice) else 0
    return TraceSlice(call_indices[parent.id], first, first + parent.length, offset)


def as_full_prompts(calls: Sequence[TracedCall]) -> list[TracedCall]:
    """The decodes alone, as prefix mode computes them: each behind its whole prompt, of which it shares the longest
    beginning that an earlier one has."""
    result: list[TracedCall] = []
    texts: list[list[int]] = []
    homes: list[list[tuple[int, int]]] = []  # of every token of a text: the call that computes it, and its place there
    for call in calls:
        if call.generated is None:
            continue
        prompt = [t for s in call.parents for t in calls[s.call].tokens[s.first : s.last]] + call.prompt
        shared, behind = max(
            ((_common_prefix_len(text, prompt[:-1]), n) for n, text in enumerate(texts)), default=(0, 0)
        )
        before = homes[behind][:shared] if shared else []
        number, own = len(result), len(prompt) - shared + len(call.generated)
        result.append(
            TracedCall(
                call.stage, prompt[shared:], shared, _group_slices(before), call.generated, (), call.logprobs, call.top
            )
        )
        texts.append(prompt + call.generated)
        homes.append([*before, *((number, k) for k in range(own))])
    return result


def _common_prefix_len(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _group_slices(locations: Sequence[tuple[int, int]]) -> tuple[TraceSlice, ...]:
    """Consecutive tokens of one call as one sight of it; the first token of all stands at position 0."""
    runs, at = [], 0
    for number, group in groupby(locations, key=lambda home: home[0]):
        places = [place for _, place in group]
        runs.append(TraceSlice(number, places[0], places[-1] + 1, at))
        at += len(places)
    return tuple(runs)


def split_adapter_stages(calls: Sequence[TracedCall], adapter_stages: Collection[str]) -> list[TracedCall]:
    """What the base model encodes, as text that is given, and behind it the decodes of the readers' stages, with the
    prefills that see what these said.

    Raises DataError where the base would decode behind what a reader said: it would have to encode that once more.
    """
    reads: list[bool] = []
    for call in calls:
        behind = any(reads[seen.call] for seen in call.parents)
        reads.append(behind if call.generated is None else call.stage in adapter_stages)
    for number, call in enumerate(calls):
        for seen in () if reads[number] else call.parents:
            if reads[seen.call]:
                said = calls[seen.call].stage
                raise DataError(
                    f"adapter_stages: stage {call.stage!r} sees what {said!r} says: name {call.stage!r} too"
                )
    order = sorted(range(len(calls)), key=lambda number: reads[number])
    return [
        call if reads[number] else TracedCall(call.stage, call.tokens, call.start, call.parents)
        for number, call in zip(order, _reorder_calls(calls, order), strict=True)
    ]


def with_ancestors(calls: Sequence[TracedCall], stages: Collection[str]) -> list[TracedCall]:
    """The decodes of some stages, and all that they see."""
    needed: set[int] = set()
    for number, call in reversed(list(enumerate(calls))):
        if number in needed or (call.generated is not None and call.stage in stages):
            needed |= {number, *(seen.call for seen in call.parents)}
    return _reorder_calls(calls, sorted(needed))


def _reorder_calls(calls: Sequence[TracedCall], order: Sequence[int]) -> list[TracedCall]:
    """The calls of some numbers; what they see is among them."""
    numbers = {number: place for place, number in enumerate(order)}
    return [
        replace(calls[n], parents=tuple(seen._replace(call=numbers[seen.call]) for seen in calls[n].parents))
        for n in order
    ]


# -- JSON -------------------------------------------------------------------------------------------------


def to_json(calls: Sequence[TracedCall]) -> list[dict[str, Any]]:
    return [{**asdict(call), "parents": [seen._asdict() for seen in call.parents]} for call in calls]


def from_json(version: object, calls: Sequence[Mapping[str, Any]]) -> list[TracedCall]:
    """Raises DataError for another version, and for what is no trace."""
    if version != VERSION:
        raise DataError(f"a trace of version {version!r}; this package reads version {VERSION}: make it again")
    result: list[TracedCall] = []
    for number, call in enumerate(calls):
        try:
            top = tuple(tuple((int(t), float(p)) for t, p in one) for one in call["top"])
            parents = tuple(TraceSlice(**seen) for seen in call["parents"])
            changed = {"parents": parents, "footer": tuple(call["footer"]), "logprobs": tuple(call["logprobs"])}
            result.append(TracedCall(**{**call, **changed, "top": top}))
        except (KeyError, TypeError, ValueError) as exc:
            raise DataError(f"call {number} of a trace: {exc!r}") from None
        for seen in parents:
            if not (0 <= seen.call < number and 0 <= seen.first <= seen.last <= len(result[seen.call].tokens)):
                raise DataError(f"call {number} of a trace sees {seen}, which is not there")
    return result


@dataclass(frozen=True)
class TokenAlignment:
    """One decode. rows: where what it sees stands in the pass under reuse; homes: in that of whole prompts; places: the
    positions that it is seen at; stages: who wrote it."""

    call: TracedCall
    rows: list[int]
    baseline_rows: list[int]
    positions: list[int]
    stages: list[str]


def align_decodes(
    calls: Sequence[TracedCall],
    packed_calls: "PackedTrace",
    prompts: Sequence[TracedCall],
    packed_prompts: "PackedTrace",
) -> Iterator[TokenAlignment]:
    """The decodes in the order of their logits. reused, whole: the calls, and the prompts, in one sequence each."""
    homes = baseline_rows(prompts, packed_prompts)
    for name, call in iter_decodes(calls):
        rows = [packed_calls.own_calls[s.call].lo + k for s in call.parents for k in range(s.first, s.last)]
        places = [s.offset + k - s.first for s in call.parents for k in range(s.first, s.last)]
        stages = [calls[s.call].stage for s in call.parents for _ in range(s.first, s.last)]
        home = homes[name][: len(rows)]
        assert [packed_calls.tokens[r] for r in rows] == [packed_prompts.tokens[r] for r in home], (
            f"{name}: another prompt"
        )
        yield TokenAlignment(call, rows, home, places, stages)


def baseline_rows(prompts: Sequence[TracedCall], packed_prompts: "PackedTrace") -> dict[tuple[str, int], list[int]]:
    """Where the tokens of each decode, its prompt and what it says, stand in the pass of whole prompts."""
    return {
        name: [*(r for run in span.visible_ranges for r in range(run.lo, run.hi)), *range(span.lo, span.hi)]
        for (name, _), span in zip(iter_decodes(prompts), packed_prompts.own_calls, strict=True)
    }
