"""Index of token spans, which finds quotes of stored messages.

Every STRIDE-th window of WINDOW tokens of a stored message is indexed by a hash. All windows of a
prompt are hashed and looked up; a match is compared token by token and extended in both
directions. A quote of at least WINDOW + STRIDE - 1 tokens contains an indexed window, so none of
MIN_SPAN tokens is missed. Where a message repeats itself, its text matches at several shifts: the
first place is indexed, and the longest match near a position wins, so that a quote of the whole
message is one span. The time is linear in the prompt, the memory in the stored tokens.
"""

import random
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np

WINDOW = STRIDE = 8
MIN_SPAN = 16  # tokens of the shortest quote that is reused
MAX_CANDIDATES = 4  # stored windows of one hash; the oldest is dropped

Key = TypeVar("Key")


class Span(NamedTuple, Generic[Key]):
    """Tokens of a prompt that occur in a stored message."""

    start: int  # in the prompt
    stop: int
    key: Key  # of the stored message
    source_start: int  # in that message


class SpanIndex(Generic[Key]):
    """Windows of stored token sequences by hash."""

    def __init__(self) -> None:
        generator = random.SystemRandom()  # unknown to clients, who could construct collisions otherwise
        self._multipliers = np.array([generator.getrandbits(64) | 1 for _ in range(WINDOW)], dtype=np.uint64)
        self._tokens: dict[Key, list[int]] = {}
        self._windows: dict[int, list[tuple[Key, int]]] = {}  # (key, start) of stored windows by hash

    def __contains__(self, key: Key) -> bool:
        return key in self._tokens

    @property
    def num_windows(self) -> int:
        return sum(map(len, self._windows.values()))

    def _hashes(self, tokens: Sequence[int], stride: int = 1) -> list[int]:
        if len(tokens) < WINDOW:
            return []
        windows = np.lib.stride_tricks.sliding_window_view(np.asarray(tokens, dtype=np.uint64), WINDOW)[::stride]
        hashes: list[int] = (windows * self._multipliers).sum(-1, dtype=np.uint64).tolist()
        return hashes

    def add(self, key: Key, tokens: list[int]) -> None:
        """Index the tokens of a stored message."""
        self._tokens[key] = tokens
        for number, value in enumerate(self._hashes(tokens, STRIDE)):
            candidates = self._windows.setdefault(value, [])
            if not candidates or candidates[-1][0] != key:
                candidates.append((key, number * STRIDE))
                del candidates[:-MAX_CANDIDATES]

    def remove(self, key: Key) -> None:
        """Remove a stored message."""
        for value in self._hashes(self._tokens.pop(key), STRIDE):
            candidates = [entry for entry in self._windows.get(value, ()) if entry[0] != key]
            if candidates:
                self._windows[value] = candidates
            else:
                self._windows.pop(value, None)

    def find(
        self,
        tokens: list[int],
        start: int = 0,
        used: Sequence[tuple[Key, int, int]] = (),
        stop: int | None = None,
        is_usable: Callable[[Key], bool] = lambda key: True,
    ) -> list[Span[Key]]:
        """Return quotes in tokens[start:stop], in order and without overlaps.

        Args:
            used: (key, start, stop) of stored tokens that must not be used again: a message cannot be
                at two places of one context.
            is_usable: whether a message may be quoted.
        """
        stop = len(tokens) if stop is None else stop
        taken: dict[Key, list[tuple[int, int]]] = {}
        for key, source_start, source_stop in used:
            taken.setdefault(key, []).append((source_start, source_stop))
        spans: list[Span[Key]] = []
        position, hashes = start, self._hashes(tokens[start:stop])
        while position + WINDOW <= stop:
            if hashes[position - start] not in self._windows:
                position += 1
                continue
            first = spans[-1].stop if spans else start
            matches = (
                self._extend(tokens, place, first, stop, *candidate, taken)
                for place in range(position, min(position + STRIDE, stop - WINDOW + 1))
                for candidate in self._windows.get(hashes[place - start], ())
                if is_usable(candidate[0])
            )
            best = max(matches, key=lambda span: span.stop - span.start, default=None)
            if best is None or best.stop - best.start < MIN_SPAN:
                position += 1
                continue
            spans.append(best)
            taken.setdefault(best.key, []).append((best.source_start, best.source_start + best.stop - best.start))
            position = best.stop
        return spans

    def _extend(
        self,
        tokens: list[int],
        position: int,
        first: int,
        stop: int,
        key: Key,
        source: int,
        taken: dict[Key, list[tuple[int, int]]],
    ) -> Span[Key]:
        """Extend a window match; return an empty span for none."""
        stored = self._tokens[key]
        source_first, source_stop = 0, len(stored)
        for taken_start, taken_stop in taken.get(key, ()):
            if taken_start < source + WINDOW and source < taken_stop:
                return Span(position, position, key, source)
            if taken_stop <= source:
                source_first = max(source_first, taken_stop)
            else:
                source_stop = min(source_stop, taken_start)
        if stored[source : source + WINDOW] != tokens[position : position + WINDOW]:
            return Span(position, position, key, source)
        left, right = 0, WINDOW
        while position - left > first and source - left > source_first:
            if tokens[position - left - 1] != stored[source - left - 1]:
                break
            left += 1
        while position + right < stop and source + right < source_stop:
            if tokens[position + right] != stored[source + right]:
                break
            right += 1
        return Span(position - left, position + right, key, source - left)


def gaps_between(spans: Sequence[Span[Key]], start: int, stop: int) -> list[tuple[int, int]]:
    """Return the ranges of start:stop before, between and after sorted spans."""
    return list(zip([start, *(span.stop for span in spans)], [*(span.start for span in spans), stop], strict=True))


def find_spans(
    indexes: Sequence[SpanIndex[Key]],
    tokens: list[int],
    start: int,
    used: Sequence[tuple[Key, int, int]],
    stop: int,
    is_usable: Callable[[Key], bool] = lambda key: True,
) -> list[Span[Key]]:
    """Return quotes as `SpanIndex.find`, those of the first indexes first."""
    spans: list[Span[Key]] = []
    for index in indexes:
        for first, last in gaps_between(spans, start, stop):
            taken = [(span.key, span.source_start, span.source_start + span.stop - span.start) for span in spans]
            spans += index.find(tokens, first, [*used, *taken], last, is_usable)
        spans.sort(key=lambda span: span.start)
    return spans


def common_length(stored: list[int], tokens: list[int], position: int, limit: int) -> int:
    """Return how many tokens of `stored` equal tokens[position:limit]."""
    end = min(len(stored), limit - position)
    if stored[:end] == tokens[position : position + end]:
        return end
    return next(i for i in range(end) if stored[i] != tokens[position + i])
