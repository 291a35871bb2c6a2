"""Speculative decoding by prompt look-up, without a draft model.

Agents repeat each other: the last tokens of a decode often occur in the messages it reads, or in what it generated.
The tokens that followed there are drafted and computed in the same step as the request's next token. Each row is
sampled with the random number and the options that plain decoding would use at its place, and rows are accepted
while the sampled token equals the drafted one. So the tokens are those of plain decoding, up to the rounding of a
step of more rows. A rejected row leaves nothing: it is not part of the entry, and its slot is written again.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple
from weakref import WeakKeyDictionary

from ..config import SchedulerConfig
from ..request.decode_state import DecodeState
from ..request.request import Request, RequestState
from .batch import Batch

NGRAM_SIZES = (3, 2)  # tokens that must match, the first choice first
MAX_DRAFT_ROWS = 16  # drafted tokens of a step: a step of few rows costs little more than one row
MAX_PAUSE = 32  # tokens without a draft after repeated rejections


class NGramIndex:
    """Latest occurrence of every n-gram in a growing list of tokens.

    Each token is indexed once; a look-up takes constant time.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens: list[int] = []
        self._following: dict[tuple[int, ...], int] = {}  # index of the token after an n-gram
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            end = len(self.tokens)
            for size in NGRAM_SIZES:
                if end >= size:
                    self._following[tuple(self.tokens[end - size :])] = end
            self.tokens.append(token)

    def find(self, ngram: tuple[int, ...]) -> int | None:
        """Return the index of the token after its latest occurrence."""
        return self._following.get(ngram)


class VisibleMessage(NamedTuple):
    """Tokens [start, end) of a message that a request reads."""

    ngrams: NGramIndex
    start: int
    end: int


class Drafter:
    """Drafts for one decode; adapts their length to what is accepted."""

    def __init__(self, request: Request, messages: Sequence[VisibleMessage], max_tokens: int) -> None:
        self._messages = messages[::-1]  # the nearest one first
        self._own = NGramIndex(request.prompt)
        self._num_header, self._max_tokens = len(request.prompt), max_tokens
        self._length = max_tokens  # tokens to draft
        self._num_failures, self._resume_at = 0, 0  # drafts without an accepted token; generated tokens to wait for

    def propose(self, state: DecodeState, max_tokens: int) -> list[int]:
        """Return up to `max_tokens` tokens that may come next."""
        own = self._own
        own.extend(state.tokens[len(own.tokens) - self._num_header :])
        num_tokens = min(self._length, max_tokens)
        if num_tokens <= 0 or len(state.tokens) < self._resume_at:
            return []
        for size in NGRAM_SIZES:
            ngram = tuple(own.tokens[-size:])
            if (start := own.find(ngram)) is not None:
                period = own.tokens[start:]  # a repetition continues
                return (period * (num_tokens // len(period) + 1))[:num_tokens]
            for message in self._messages:
                start = message.ngrams.find(ngram)
                if start is not None and message.start + size <= start < message.end:
                    return message.ngrams.tokens[start : min(start + num_tokens, message.end)]
        return []

    def adapt(self, state: DecodeState, num_drafted: int, num_accepted: int) -> None:
        """Draft more after an accepted draft, less after a rejected one."""
        if num_accepted == num_drafted:
            self._length = min(2 * max(self._length, num_drafted), self._max_tokens)
        else:
            self._length = min(max(1, 2 * num_accepted), self._max_tokens)
        self._num_failures = 0 if num_accepted else self._num_failures + 1
        if self._num_failures > 1:
            self._resume_at = len(state.tokens) + min(1 << self._num_failures, MAX_PAUSE)


class Speculator:
    """Drafts of all running decodes, and their verification."""

    def __init__(self, max_tokens: int, config: SchedulerConfig) -> None:
        self.num_drafted = self.num_accepted = 0  # tokens
        self._max_tokens, self._config = max_tokens, config
        self._indexes: WeakKeyDictionary[Request, NGramIndex] = WeakKeyDictionary()  # by message, for all its readers
        self._drafters: WeakKeyDictionary[Request, Drafter] = WeakKeyDictionary()

    def propose(self, requests: Sequence[Request]) -> dict[int, list[int]]:
        """Return drafted tokens by request id.

        Every request still fits into the step. A draft takes no page: it ends where the request's pages do.
        """
        drafts = {}
        for request in requests:
            if draft := self._propose(request):
                drafts[request.id] = draft
        if not drafts:
            return drafts
        max_rows = min(MAX_DRAFT_ROWS, self._config.max_num_batched_tokens - len(requests))
        max_tokens = max_rows // len(drafts)
        return {id: draft[:max_tokens] for id, draft in drafts.items()} if max_tokens > 0 else {}

    def _propose(self, request: Request) -> list[int]:
        state, entry = request.decode_state, request.entry
        if state is None or request.state is not RequestState.RUNNING or request.cancel_when_computed:
            return []
        is_plain = state.forced_tokens is None and state.token_mask is None and request.entry.shared_header is None
        if not (is_plain and state.tokens and len(entry.tokens) == entry.num_scheduled_tokens + 1):
            return []
        drafter = self._drafters.get(request)
        if drafter is None:
            pairs = zip(request.parents, request.parent_slices, strict=True)
            messages = [self._message(parent, token_range) for parent, token_range in pairs]
            drafter = self._drafters[request] = Drafter(request, messages, self._max_tokens)
        num_slots = len(entry.pages) * entry.page_size - len(entry.tokens)
        num_left = state.max_new_tokens - len(state.tokens)
        return drafter.propose(state, min(num_slots - len(state.footer), num_left) - 1)

    def _message(self, request: Request, token_range: tuple[int, int] | None) -> VisibleMessage:
        index = self._indexes.get(request)
        if index is None:
            index = self._indexes[request] = NGramIndex(request.tokens)
        return VisibleMessage(index, *(token_range or (0, len(index.tokens))))

    def verify(
        self, batch: Batch, sampled: Iterable[tuple[Request, int | None]]
    ) -> Iterator[tuple[Request, int | None]]:
        """Yield the tokens to append; a draft ends where it differs.

        The caller appends each token before it takes the next one: the message may end with any.
        """
        rows = enumerate(sampled)
        for _, (request, token) in rows:
            yield request, token
            if (draft := batch.drafts.get(request.id)) is None:
                continue
            state, entry, num_accepted = request.decode_state, request.entry, 0
            assert state is not None
            for index, drafted in enumerate(draft):
                row, (_, next_token) = next(rows)
                if num_accepted < index or token != drafted or request.state is not RequestState.RUNNING:
                    continue
                num_accepted, token = num_accepted + 1, next_token
                entry.num_computed_tokens += 1
                entry.num_scheduled_tokens += 1
                state.next_logprob = batch.draft_states[row].next_logprob
                state.pending_logprobs = batch.draft_states[row].pending_logprobs
                yield request, token
            self._count(request, state, len(draft), num_accepted)

    def _count(self, request: Request, state: DecodeState, num_drafted: int, num_accepted: int) -> None:
        self._drafters[request].adapt(state, num_drafted, num_accepted)
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        usage = request.usage
        request.usage = replace(
            usage,
            drafted_tokens=usage.drafted_tokens + num_drafted,
            accepted_tokens=usage.accepted_tokens + num_accepted,
        )
