"""The three execution modes as three ways to place a call: what it encodes, where, and what it sees.

choreographed: Prompt Choreography, section 2.3. prefix: its baseline method, section 3.1, with the longest
cached prefix token by token. naive: section 3.1 without any cache.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from ..errors import BadPosition, CallError
from ..kv.encoding import Encoding, Sight, content_key
from ..kv.store import Store
from ..models.facts import ModelFacts
from .call import Call


class Placement(NamedTuple):
    """tokens to encode from `start` on, seeing `sights`. ready: an encoding that already is this very work."""

    tokens: list[int]
    start: int
    sights: tuple[Sight, ...]
    key: bytes | None = None
    ready: Encoding | None = None


def resolve_offsets(
    lengths: list[int], offsets: tuple[int | None, ...], new_offset: int | None
) -> tuple[tuple[int, ...], int]:
    """Contract, point 3: the first parent starts at 0, each next one and the message right after the one before."""
    placed, end = [], 0
    for length, offset in zip(lengths, offsets, strict=True):
        at = end if offset is None else offset
        placed.append(at)
        end = at + length
    return tuple(placed), end if new_offset is None else new_offset


def check_positions(call: Call, lengths: list[int], most: int) -> None:
    """Every parent, the prompt, what must be generated, and the footer stand below the model's limit of positions."""
    placed, start = resolve_offsets(lengths, call.offsets, call.new_offset)
    for index, (offset, length) in enumerate(zip(placed, lengths, strict=True)):
        _check_position(
            f"parents[{index}] (message {call.parents[index].id}) from offset {offset}", offset + length, most
        )
    least = len(call.prompt) + _least_generated(call) + len(call.footer)
    _check_position(f"the message from offset {start}", start + least, most)


def _least_generated(call: Call) -> int:
    if call.generation is None:
        return 0
    return len(call.generation.forced or [0])


def _check_position(what: str, end: int, most: int) -> None:
    if end > most:
        raise BadPosition(f"{what} would reach position {end - 1}, past the model's last one, {most - 1}")


def choreographed(call: Call, store: Store, facts: ModelFacts) -> Placement:
    lengths = _lengths(call)
    check_positions(call, lengths, facts.max_positions)
    call.placed, call.start = resolve_offsets(lengths, call.offsets, call.new_offset)
    firsts = [cut[0] if cut else 0 for cut in call.cuts]
    layers = len(store.arena.keys)
    sights = tuple(
        sight
        for p, first, n, offset in zip(call.parents, firsts, lengths, call.placed, strict=True)
        for sight in _sights(p, first, n, offset, layers)
    )
    if not facts.movable:
        _check_at_home(sights, facts.name)
    if call.is_decode:
        return Placement(list(call.prompt), call.start, sights)
    salt = salt_of(call, facts)
    if call.layers is not None and call.source is not None:
        sights += (Sight(call.source.work, 0, 0, call.start, frozenset()),)  # where it begins from
        salt = f"{salt}\0{sorted(call.layers)}"
    key = content_key(salt, call.prompt, call.start, sights)
    return Placement(list(call.prompt), call.start, sights, key, store.find(key))


def salt_of(call: Call, facts: ModelFacts) -> str:
    """Where encodings cannot move, the same text elsewhere is another one."""
    return call.salt if facts.movable else f"{call.salt}\0at {call.start}"


def _check_at_home(sights: tuple[Sight, ...], name: str) -> None:
    for index, sight in enumerate(sights):
        if sight.shift:
            home = sight.start - sight.shift
            raise BadPosition(
                f"parent {index} was encoded at {home} and is placed at {sight.start}: {name} has learned positions, "
                'so encodings cannot move; give it that new_offset when it is encoded, or use mode="prefix"'
            )


def _sights(parent: Call, first: int, count: int, start: int, layers: int) -> Iterator[Sight]:
    """What a reader sees of a parent: of one that was computed in some layers, the other model's in the others."""
    if parent.layers is None or parent.source is None:
        assert parent.work.layers is None, "an encoding of some layers is seen in all of them"
        if parent.work.absent:
            raise CallError(f"parent {parent.id} came without layers {sorted(parent.work.absent)}: see a version of it")
        yield Sight(parent.work, first, count, start)
        return
    yield Sight(parent.work, first, count, start, parent.layers)
    yield Sight(parent.source.work, first, count, start, frozenset(range(layers)) - parent.layers)


def _lengths(call: Call) -> list[int]:
    """How many tokens are seen of each parent; a part that reaches past its message is an error."""
    for parent, cut in zip(call.parents, call.cuts, strict=True):
        if cut is not None and cut[1] > len(parent.tokens):
            raise BadPosition(f"part {cut[0]}:{cut[1]} of message {parent.id}, which has {len(parent.tokens)} tokens")
    return [len(tokens) for tokens in call.seen_tokens()]


def _concatenated(call: Call, most: int) -> list[int]:
    lengths = _lengths(call)
    tokens = [token for seen in call.seen_tokens() for token in seen]
    call.placed, call.start = resolve_offsets(lengths, (None,) * len(lengths), None)
    _check_position("the concatenated prompt", len(tokens) + len(call.prompt) + _least_generated(call), most)
    return tokens + call.prompt


def prefix(call: Call, store: Store, facts: ModelFacts) -> Placement:
    tokens = _concatenated(call, facts.max_positions)
    sights = tuple(store.tree(call.salt).match(tokens, limit=len(tokens) - 1))
    known = sum(sight.count for sight in sights)
    return Placement(tokens[known:], known, sights)


def hang(call: Call, store: Store) -> None:
    """Makes a prefix-mode encoding known to later prompts."""
    encoding = call.work
    before = [t for s in encoding.context for t in s.encoding.tokens[s.first : s.first + s.count]]
    if store.tree(call.salt, grow=True).insert(encoding, before):
        encoding.reusable = True


def naive(call: Call, store: Store, facts: ModelFacts) -> Placement:
    return Placement(_concatenated(call, facts.max_positions), 0, ())


PLACE: dict[str, Callable[[Call, Store, ModelFacts], Placement]] = {
    "choreographed": choreographed,
    "prefix": prefix,
    "naive": naive,
}
