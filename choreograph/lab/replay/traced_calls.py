"""Calls of a workflow run, token by token.

They suffice to recompute the run in one pass. A call refers to its parents by their index among the calls, with the
visible tokens and their position.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

from ...api.message import Message
from ...errors import DataError
from ...messages.handle import MessageSlice
from ...outputs import BASE_MODEL
from ..workflows.run import StageCall


class TraceSlice(NamedTuple):
    """Tokens [first, last) of an earlier call, visible from position `offset` on."""

    call: int  # index of the call
    first: int
    last: int  # exclusive
    offset: int  # position of token `first`


@dataclass(frozen=True)
class TracedCall:
    """Prefill or decode of a workflow run."""

    stage: str
    prompt: list[int]  # tokens of a prefill, or the header of a decode
    start: int  # base position of the first token
    parents: tuple[TraceSlice, ...] = ()  # context, in order
    generated: list[int] | None = None  # None for a prefill
    footer: tuple[int, ...] = ()  # tokens after the generated ones
    logprobs: tuple[float, ...] = ()  # log-probability of each generated token
    top: tuple[tuple[tuple[int, float], ...], ...] = ()  # likeliest (token, log-probability) at each generated token

    @property
    def tokens(self) -> list[int]:
        """All tokens that later calls may attend to."""
        return [*self.prompt, *(self.generated or ()), *self.footer]

    def as_prefill(self) -> "TracedCall":
        """Return a prefill of the same tokens."""
        return TracedCall(self.stage, self.tokens, self.start, self.parents)


def trace_calls(steps: Iterable[StageCall]) -> list[TracedCall]:
    """Return the calls of a finished run; equal prefills are one call."""
    result: list[TracedCall] = []
    indices: dict[int, int] = {}  # message id to call
    seen: dict[object, int] = {}  # identity of a call to its index
    for stage, message in steps:
        call = _trace_call(stage, message.result(), indices)
        key: object = message.id
        if call.generated is None:
            key = tuple(call.prompt), tuple(s._replace(offset=s.offset - call.start) for s in call.parents)
        if key not in seen:
            seen[key] = len(result)
            result.append(call)
        indices[message.id] = seen[key]
    return result


def _trace_call(stage: str, message: Message, call_indices: Mapping[int, int]) -> TracedCall:
    if message.model != BASE_MODEL:
        raise DataError(f"stage {stage!r} runs on {message.model!r}: trace calls of the base model only")
    parents = []
    for parent, offset in zip(message.parents, message.offsets, strict=True):
        if parent.id not in call_indices:
            raise DataError(f"message {parent.id} was not made through the workflow run: create parents with the run")
        first = parent.start if isinstance(parent, MessageSlice) else 0
        parents.append(TraceSlice(call_indices[parent.id], first, first + parent.length, offset))
    is_decode, request = message.kind == "decode", message._request
    logprobs = message.logprobs or ()
    return TracedCall(
        stage,
        list(request.prompt),
        message.position,
        tuple(parents),
        message.output_token_ids if is_decode else None,
        tuple(request.footer) if is_decode else (),
        tuple(token.logprob for token in logprobs),
        tuple(tuple(token.top.items()) for token in logprobs),
    )


def check_parents(calls: Sequence[TracedCall]) -> None:
    """Raise DataError unless every call attends to existing tokens of earlier calls."""
    for index, call in enumerate(calls):
        for s in call.parents:
            if not (0 <= s.call < index and 0 <= s.first <= s.last <= len(calls[s.call].tokens)):
                raise DataError(f"call {index} attends to {s}, which is not there: make the traces again")


def reused_parents(calls: Sequence[TracedCall]) -> list[list[bool]]:
    """Return which parents of each call were encoded without what precedes them in it, as `Repair(0, "align")` does.

    The others have the keys and values that prefix mode would compute.
    """
    result: list[list[bool]] = []
    for call in calls:
        flags: list[bool] = []
        place = 0  # of the parent in prefix mode
        before: list[TraceSlice] = []
        for s in call.parents:
            if s.first == s.last:
                flags.append(False)
                continue
            parent = calls[s.call]
            seen = [p._replace(offset=p.offset - parent.start) for p in parent.parents if p.first < p.last]
            is_exact = not any(flags) and not s.first and not any(result[s.call])
            flags.append(not (is_exact and seen == [p._replace(offset=p.offset - place) for p in before]))
            before.append(s._replace(offset=place))
            place += s.last - s.first
        result.append(flags)
    return result


def iter_decodes(calls: Iterable[TracedCall]) -> Iterator[tuple[tuple[str, int], TracedCall]]:
    """Yield ((stage, index within the stage), call) of every decode."""
    count: Counter[str] = Counter()
    for call in calls:
        if call.generated is not None:
            yield (call.stage, count[call.stage]), call
            count[call.stage] += 1


def first_decode_index(calls: Sequence[TracedCall]) -> int:
    """Return the index of the first decode, or the number of calls."""
    return next((index for index, call in enumerate(calls) if call.generated is not None), len(calls))


def as_full_prompts(calls: Sequence[TracedCall]) -> list[TracedCall]:
    """Return the decodes as in prefix mode, each after its full prompt.

    A prompt attends to the longest prefix that it shares with an earlier prompt and its output.
    """
    result: list[TracedCall] = []
    texts: list[list[int]] = []  # full prompt and output of each decode
    origins: list[list[tuple[int, int]]] = []  # call and index within it that compute each token of a text
    for call in calls:
        if call.generated is None:
            continue
        prompt = [t for s in call.parents for t in calls[s.call].tokens[s.first : s.last]] + call.prompt
        lengths = [_common_prefix_len(text, prompt[:-1]) for text in texts]
        shared = max(lengths, default=0)
        prefix = origins[lengths.index(shared)][:shared] if shared else []
        parents: list[TraceSlice] = []
        offset = 0
        for index, group in groupby(prefix, key=lambda origin: origin[0]):
            places = [place for _, place in group]
            parents.append(TraceSlice(index, places[0], places[-1] + 1, offset))
            offset += len(places)
        text = prompt + call.generated
        origins.append([*prefix, *((len(result), k) for k in range(len(text) - shared))])
        result.append(replace(call, prompt=prompt[shared:], start=shared, parents=tuple(parents), footer=()))
        texts.append(text)
    return result


def _common_prefix_len(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def split_adapter_stages(calls: Sequence[TracedCall], adapter_stages: Collection[str]) -> list[TracedCall]:
    """Reorder calls: base model's first, as prefills, then the adapter's.

    The adapter computes the decodes of its stages and the prefills that attend to adapter calls.

    Raises:
        DataError: if a decode of the base model attends to an adapter call.
    """
    by_adapter: list[bool] = []
    for call in calls:
        above = [calls[s.call].stage for s in call.parents if by_adapter[s.call]]
        by_adapter.append(bool(above) if call.generated is None else call.stage in adapter_stages)
        if above and not by_adapter[-1]:
            raise DataError(
                f"adapter_stages: stage {call.stage!r} attends to {above[0]!r} of the adapter: name {call.stage!r} too"
            )
    order = sorted(range(len(calls)), key=lambda index: by_adapter[index])
    return [
        call if by_adapter[index] else call.as_prefill()
        for index, call in zip(order, reorder_calls(calls, order), strict=True)
    ]


def with_ancestors(calls: Sequence[TracedCall], stages: Collection[str]) -> list[TracedCall]:
    """Return the decodes of some stages and all their ancestors."""
    needed: set[int] = set()
    for index, call in reversed(list(enumerate(calls))):
        if index in needed or (call.generated is not None and call.stage in stages):
            needed |= {index, *(s.call for s in call.parents)}
    return reorder_calls(calls, sorted(needed))


def reorder_calls(calls: Sequence[TracedCall], order: Sequence[int]) -> list[TracedCall]:
    """Select calls by index, and renumber their parents.

    The indices must include all parents.
    """
    places = {index: place for place, index in enumerate(order)}
    return [replace(calls[n], parents=tuple(s._replace(call=places[s.call]) for s in calls[n].parents)) for n in order]
