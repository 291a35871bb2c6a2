"""Plan of one request: reused tokens, and the salt of blocks.

All reused tokens of a call are earlier in its prompt than what is computed, so vLLM's own positions and causal
attention give the semantics of any placement: only the rotation of a key relative to its reader counts.
"""

import hashlib
import math
import secrets
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .entry_index import EntryIndex, EntryScope, KVRecord, pack_tokens
from .reuse_params import RefusedRequestError, ReuseParams

_JUMP = b"\xff\xff\xff\xff"  # no token; starts the description of a placement
MAX_HOLES = 64  # in one request; each costs a step
_SECRET = secrets.token_bytes(16)  # clients must not be able to write the salt of others' blocks


class ReusedRun(NamedTuple):
    """Prompt tokens whose keys and values come from one entry."""

    at: int  # index of the first token in the prompt
    length: int
    record: KVRecord
    source: int  # first token of the entry
    position: int  # of the first key

    @property
    def stop(self) -> int:
        return self.at + self.length

    @property
    def shift(self) -> int:
        """Positions by which stored keys are rotated."""
        return self.position - self.source - self.record.home


@dataclass
class PlannedSave:
    """Tokens that become an entry once they are computed."""

    start: int
    stop: int | None  # None: all that have keys and values when the request ends
    name: str | None  # None: found by its content
    context: Any  # running hash before its first token
    replaces: KVRecord | None = None  # entry of the same turn, without its end


@dataclass
class ReusePlan:
    """Reused runs in prompt order, and entries to store."""

    runs: list[ReusedRun] = field(default_factory=list)
    saves: list[PlannedSave] = field(default_factory=list)
    places: str | None = None  # digest of the jumps; None: all blocks are exact, and belong into the prefix cache
    has_holes: bool = False  # tokens before a reused run are computed, those of the run are not
    missing: list[str] = field(default_factory=list)

    @property
    def num_reused(self) -> int:
        return sum(run.length for run in self.runs)

    def salt(self, cache_salt: str | None) -> str | None:
        """Return the salt of the request's blocks.

        Blocks are registered before the holes in them are filled, so no other request may find those of a plan with
        holes: its salt is new every time.
        """
        if self.places is None:
            return cache_salt
        nonce = secrets.token_hex(8) if self.has_holes else ""
        return f"choreograph:{self.places}:{nonce}:{cache_salt or ''}"

    def covered(self, start: int) -> int:
        """Return the end of the reused tokens from `start` on."""
        for run in self.runs:
            if run.at <= start < run.stop:
                start = run.stop
        return start

    def next_run(self, start: int) -> int | None:
        """Return where the first run from `start` on begins."""
        return next((run.at for run in self.runs if run.at >= start), None)


class PlanBuilder:
    """Plan of a prompt, built from its first token to its last.

    The context of a token is a hash of everything that it attends to: tokens that were computed in order, and
    placements of entries. An entry whose own context equals it continues the prompt exactly, as a prefix cache hit.
    Any other entry is a jump, and the blocks of a prompt with jumps get a salt of their own: they never enter the
    prefix cache of exact requests, and serve only requests with the same entries at the same places.

    Args:
        repair: share of every jump, its first tokens, that is computed in this context.
        can_compute_holes: whether tokens between two reused runs can be computed.
    """

    def __init__(self, tokens: Sequence[int], scope: EntryScope, *, repair: float, can_compute_holes: bool) -> None:
        self.plan = ReusePlan()
        self.end = 0  # of the tokens that are planned
        self._tokens, self._repair = tokens, repair
        self._can_compute_holes = can_compute_holes
        self._context = hashlib.sha256(repr(scope).encode())
        self._jumps: list[ReusedRun] = []
        self.num_holes = 0  # before reused runs
        self._is_cut = False  # nothing more is reused

    @property
    def context(self) -> Any:
        """Running hash before the next token."""
        return self._context.copy()

    def compute(self, stop: int) -> None:
        """Compute the tokens up to `stop` in this context."""
        self._context.update(pack_tokens(self._tokens[self.end : stop]))
        self.end = stop

    def reuse(self, record: KVRecord, source: int, length: int, position: int) -> None:
        """Reuse tokens of an entry from here on."""
        run = ReusedRun(self.end, length, record, source, position)
        if not self._is_continuation(run):
            num_repaired = math.ceil(self._repair * length)
            self.compute(self.end + num_repaired)
            rest = length - num_repaired
            run = ReusedRun(self.end, rest, record, source + num_repaired, position + num_repaired)
        reused_end = self.plan.runs[-1].stop if self.plan.runs else 0
        self.num_holes += run.length > 0 and run.at != reused_end
        self._is_cut |= self.num_holes > (MAX_HOLES if self._can_compute_holes else 0)
        if self._is_cut or not run.length:
            self.compute(run.stop)
            return
        self.plan.has_holes |= run.at != reused_end
        self.plan.runs.append(run)
        if self._is_continuation(run):
            self.compute(run.stop)
            return
        self._jumps.append(run)
        self._context.update(_JUMP + _place(run))
        self.end = run.stop

    def continues(self, record: KVRecord, position: int) -> bool:
        """Return whether an entry is what computing its tokens here would give."""
        return self._is_continuation(ReusedRun(self.end, len(record), record, 0, position))

    def _is_continuation(self, run: ReusedRun) -> bool:
        if run.position != run.at or run.shift != 0:
            return False
        context = run.record.context.copy()
        context.update(pack_tokens(run.record.tokens[: run.source]))
        equal: bool = context.digest() == self._context.digest()
        return equal

    def save(self, start: int, stop: int | None, name: str | None, context: Any) -> PlannedSave:
        """Store tokens [start, stop), whose first one has this context."""
        self.plan.saves.append(PlannedSave(start, stop, name, context))
        return self.plan.saves[-1]

    def finish(self) -> ReusePlan:
        """Return the plan of the whole prompt."""
        self.compute(len(self._tokens))
        for save in self.plan.saves:
            stop = len(self._tokens) if save.stop is None else save.stop
            if any(save.start < jump.stop and jump.at < stop for jump in self._jumps):
                save.context = hashlib.sha256(secrets.token_bytes(16))  # computing would give other values
        self.plan.has_holes &= bool(self._jumps)  # without jumps vLLM computes the holes and all behind them
        if self._jumps:
            self.plan.places = hashlib.sha256(_SECRET + b"".join(map(_place, self._jumps))).hexdigest()
        return self.plan


def _place(run: ReusedRun) -> bytes:
    return struct.pack("<5q", run.at, run.length, run.record.uid, run.source, run.position)


def plan_spans(
    tokens: Sequence[int], params: ReuseParams, scope: EntryScope, index: EntryIndex, builder: PlanBuilder
) -> None:
    """Plan the spans and stores that a client names.

    Raises:
        RefusedRequestError: if spans overlap, leave the prompt or lie shifted in a store.
    """
    stores = sorted(params.store, key=lambda store: store.start)

    def advance(stop: int, record: KVRecord | None = None, source: int = 0, position: int = 0) -> None:
        """Plan the tokens up to `stop`, and stores that begin there."""
        first = builder.end
        for cut in [*(store.start for store in stores if first < store.start < stop), stop]:
            done = builder.end - first
            if record is None:
                builder.compute(cut)
            elif cut > builder.end:
                builder.reuse(record, source + done, cut - builder.end, position + done)
            while stores and stores[0].start == builder.end < len(tokens):
                store = stores.pop(0)
                builder.save(store.start, store.stop, store.entry, builder.context)

    advance(0)
    for span in params.spans:
        end = span.at + span.stop - span.start
        if end >= len(tokens):
            raise RefusedRequestError(
                f"span of {span.entry!r}, prompt tokens {span.at}:{end}: the last of {len(tokens)} tokens is computed"
            )
        record = index.find_name(scope, span.entry)
        if record is None or record.tokens[span.start : span.stop] != tuple(tokens[span.at : end]):
            if span.entry not in builder.plan.missing:  # never stored, evicted, or of other tokens
                builder.plan.missing.append(span.entry)
            continue
        position = span.at if span.position is None else span.position
        for store in params.store:
            if position != span.at and store.start < end and (store.stop is None or span.at < store.stop):
                raise RefusedRequestError(f"store of {store.entry!r}: {span.entry!r} in it is placed at {position}")
        advance(span.at)
        advance(end, record, span.start, position)
    if builder.num_holes > MAX_HOLES:
        raise RefusedRequestError(
            f"spans: {builder.num_holes} holes before spans, at most {MAX_HOLES}: store their tokens"
        )
    advance(len(tokens))
    for store in stores:  # they begin in the answer
        builder.save(store.start, store.stop, store.entry, hashlib.sha256(secrets.token_bytes(16)))


def plan_messages(
    tokens: Sequence[int],
    bounds: Sequence[int],
    scope: EntryScope,
    index: EntryIndex,
    builder: PlanBuilder,
    min_tokens: int,
    min_moved: int,
) -> None:
    """Plan a chat whose turns are found by their content.

    Args:
        bounds: index of the first token of each turn, in order; the last turn is the header of the answer.
        min_tokens: shorter turns are computed, and not stored.
        min_moved: shorter turns are moved only before longer ones, where computing them would cost a step.
    """
    ranges = list(zip(bounds, [*bounds[1:], len(tokens)], strict=True))
    found = [
        index.find_turn(scope, tokens[start:stop]) if min_tokens <= stop - start and stop < len(tokens) else []
        for start, stop in ranges
    ]
    last_exact, computed = -1, builder.context  # a chat that goes on is not moved onto turns of other chats
    for i, (start, stop) in enumerate(ranges):
        if any(record.home == start and record.context.digest() == computed.digest() for record in found[i]):
            last_exact = i
        computed.update(pack_tokens(tokens[start:stop]))
    is_long = [
        bool(records) and stop - start >= min_moved for records, (start, stop) in zip(found, ranges, strict=True)
    ]
    last_long = max((i for i, long in enumerate(is_long) if long), default=-1)
    for i, (start, stop) in enumerate(ranges):
        context, records = builder.context, found[i]
        record = next((record for record in records if builder.continues(record, start)), None)
        moved = records[0] if records and record is None and last_exact < i <= last_long else None
        reused = moved if record is None else record
        if reused is not None:
            builder.reuse(reused, 0, len(reused), start)
        if stop == len(tokens):
            builder.save(start, None, None, context)
        elif moved is None and stop - start >= min_tokens and (record is None or len(record) < stop - start):
            builder.save(start, stop, None, context).replaces = record
        builder.compute(stop)
