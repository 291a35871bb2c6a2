"""Finds the longest encoded prefix of a prompt, token by token. Owns where encodings hang; knows no pages.

The baseline of Prompt Choreography (section 3.1): text is concatenated and the longest cached prefix is used
again. An encoding hangs on another one at the token where the two part ways, so no encoding is ever split.
"""

from collections.abc import Iterator
from typing import NamedTuple

from .encoding import Encoding, Sight, common


class _Place(NamedTuple):
    """Right behind token `offset` - 1 of an encoding; the root is (None, 0)."""

    parent: Encoding | None
    offset: int


class _Way(NamedTuple):
    """A walk to a place, where `known` tokens are known; its last sight, and the walk up to there."""

    place: _Place
    known: int
    last: Sight | None
    before: "_Way | None"

    @property
    def sights(self) -> list[Sight]:
        found, way = [], self
        while way.last is not None and way.before is not None:
            found.append(way.last)
            way = way.before
        return found[::-1]


class PrefixTree:
    """All prefixes of one client. Encodings may still be growing: only promised tokens are matched."""

    def __init__(self, salt: str = "") -> None:
        self.salt = salt
        self._children: dict[tuple[int | None, int], dict[int, tuple[Encoding, int]]] = {}
        self._hangs: dict[int, tuple[_Place, int]] = {}
        self._offsets: dict[int, dict[int, int]] = {}  # encoding -> offset -> how many hang there

    @property
    def empty(self) -> bool:
        return not self._hangs

    def match(self, tokens: list[int], limit: int | None = None) -> list[Sight]:
        """What is known of the longest prefix of `tokens`, at most `limit` tokens of it."""
        return self._walk(_Place(None, 0), 0, tokens, len(tokens) if limit is None else limit)[0]

    def _walk(self, place: _Place, at: int, tokens: list[int], limit: int) -> tuple[list[Sight], _Place, int]:
        """The longest way on from a place: (sights, where it ends, how many tokens are known there).

        Ways are followed with an explicit stack: encodings hang on each other as deep as a conversation is long.
        """
        best = _Way(place, at, None, None)
        ways = [best]
        while ways:
            way = ways.pop()
            if way.known > best.known:
                best = way
            ways += reversed(self._onward(way, tokens, limit))  # of equally long ways the first one counts
        return best.sights, best.place, best.known

    def _onward(self, way: "_Way", tokens: list[int], limit: int) -> list["_Way"]:
        """The ways that lead through one encoding more."""
        at = way.known
        if at >= limit:
            return []
        encoding, first = self._children.get(self._name(way.place), {}).get(tokens[at], (None, 0))
        if encoding is None:
            return []
        count = common(encoding.tokens, first, max(encoding.promised, encoding.encoded), tokens, at, limit)
        return [
            _Way(_Place(encoding, offset), at + offset - first, Sight(encoding, first, offset - first, at), way)
            for offset in self._turnings(encoding, first, count)
        ]

    def _turnings(self, encoding: Encoding, first: int, count: int) -> list[int]:
        """Offsets at which a walk may leave an encoding: where its match ends, and, since it may have grown past
        others that had hung on its end, wherever something hangs on the way."""
        if not count:
            return []
        last = first + count
        hung = self._offsets.get(encoding.id, {})
        return [last, *(offset for offset in hung if first < offset < last)]

    def insert(self, encoding: Encoding, prefix: list[int]) -> bool:
        """Hangs an encoding that continues `prefix` where it leaves what is known; False if it adds nothing."""
        tokens = prefix + encoding.tokens
        _, place, known = self._walk(_Place(None, 0), 0, tokens, len(tokens))
        if not len(prefix) <= known < len(tokens) or encoding.id in self._hangs:
            return False
        siblings = self._children.setdefault(self._name(place), {})
        if tokens[known] in siblings:
            return False
        siblings[tokens[known]] = (encoding, known - encoding.start)
        self._hangs[encoding.id] = (place, tokens[known])
        encoding.tree = self
        if place.parent is not None:
            place.parent.children += 1
            offsets = self._offsets.setdefault(place.parent.id, {})
            offsets[place.offset] = offsets.get(place.offset, 0) + 1
        return True

    def hanging(self, encoding: Encoding) -> list[Encoding]:
        """What hangs directly on an encoding."""
        places = [(encoding.id, offset) for offset in self._offsets.get(encoding.id, {})]
        return [child for place in places for child, _ in self._children[place].values()]

    def below(self, encoding: Encoding) -> Iterator[Encoding]:
        """Everything that hangs on an encoding, each after what it hangs on."""
        found = [encoding]
        for one in found:  # which grows meanwhile
            hanging = self.hanging(one)
            found += hanging
            yield from hanging

    def forget(self, encoding: Encoding) -> None:
        """Takes off an encoding that nothing hangs on."""
        hang = self._hangs.pop(encoding.id, None)
        if hang is None:
            return
        assert not encoding.children, "something hangs on this encoding"
        place, token = hang
        siblings = self._children[self._name(place)]
        del siblings[token]
        if not siblings:
            del self._children[self._name(place)]
        encoding.tree = None
        if place.parent is not None:
            place.parent.children -= 1
            offsets = self._offsets[place.parent.id]
            offsets[place.offset] -= 1
            if not offsets[place.offset]:
                del offsets[place.offset]
            if not offsets:
                del self._offsets[place.parent.id]

    @staticmethod
    def _name(place: _Place) -> tuple[int | None, int]:
        return (place.parent.id if place.parent else None, place.offset)

    def check(self) -> None:
        """Every encoding hangs once, and child counts are right."""
        hung = [pair[0].id for siblings in self._children.values() for pair in siblings.values()]
        assert sorted(hung) == sorted(self._hangs), "an encoding hangs twice or nowhere"
        counts: dict[int, int] = {}
        for place, _ in self._hangs.values():
            if place.parent is not None:
                counts[place.parent.id] = counts.get(place.parent.id, 0) + 1
                assert place.parent.id in self._hangs, "an encoding hangs on one that is gone"
        for siblings in self._children.values():
            for encoding, _ in siblings.values():
                assert encoding.children == counts.get(encoding.id, 0), "child count is off"
