"""Replacement of a request's parents by repaired ones.

A repaired range is an ordinary prefill whose context is what precedes it in the call. The call then
attends to the unchanged ranges of its parents and to these prefills, in order and at the positions
of prefix mode. Prefills of equal content share one KV entry, so calls with the same context share
its repair, and eviction, recomputation and adapters treat it like every other entry.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ...context.placement import namespace_of, parent_slices
from ...errors import (
    CacheFullError,
    ChoreographError,
    InvalidPositionError,
    RequestFailedError,
    RequestTooLargeError,
)
from ...kv_cache.entry import KVEntry, KVSlice
from ...kv_cache.hashing import content_hash
from ...request.request import Request, RequestState, wrap_error
from . import REPAIR_STRATEGIES
from .probe import AttentionObserver
from .strategy import ContextView, ParentView, TokenRanges

if TYPE_CHECKING:
    from torch import Tensor

    from ...core.core import EngineCore

MAX_SELECTIONS = 256  # selections that are kept for other readers of a context


class _Source(NamedTuple):
    """Content hash of an entry that may not exist yet."""

    content_hash: bytes


@dataclass
class _RepairedContext:
    """Pieces of a repaired context, in order."""

    requests: list[Request] = field(default_factory=list)  # request of each piece
    hashes: list[KVSlice] = field(default_factory=list)  # visible tokens of each piece; the entry is a `_Source`
    num_tokens: int = 0  # length of all pieces

    @property
    def slices(self) -> tuple[tuple[int, int], ...]:
        """Visible tokens [start, end) of each piece's request."""
        return tuple((s.token_start, s.token_start + s.num_tokens) for s in self.hashes)

    def append(self, request: Request, hash_: bytes, start: int, end: int) -> None:
        """Append tokens [start, end) of a request."""
        last = self.hashes[-1] if self.hashes else None
        if last is not None and self.requests[-1] is request and last.token_start + last.num_tokens == start:
            self.hashes[-1] = last._replace(num_tokens=end - last.token_start)
        else:
            self.requests.append(request)
            self.hashes.append(KVSlice(_Source(hash_), start, end - start, self.num_tokens))  # type: ignore[arg-type]
        self.num_tokens += end - start

    def is_context_of(self, parent: Request, start: int, reader: Request) -> bool:
        """True if the parent's tokens saw exactly these pieces before them.

        Computing any of them behind these pieces would not change its KV.
        """
        if start or parent.computed_layers is not None or parent.model != reader.model:
            return False
        shift = self.num_tokens - parent.entry.base_position
        other = [
            (s.entry.content_hash, s.token_start, s.num_tokens, s.position + shift, s.layers)
            for s in parent.entry.context
        ]
        return other == [(s.entry.content_hash, s.token_start, s.num_tokens, s.position, None) for s in self.hashes]


class RepairPlanner:
    """Planner of the repair of waiting requests."""

    def __init__(self, core: "EngineCore") -> None:
        self._core = core
        self._selections: dict[object, list[TokenRanges]] = {}
        self._scorings: dict[object, Request] = {}  # in progress, or complete and not used yet

    def expand(self, request: Request) -> list[Request] | None:
        """Replace the parents of a request whose parents are final.

        Returns the requests to admit, in order: new prefills, which enter the waiting queue before
        the request, and the request. It is not among them while its prompt is computed to score
        the context. None while the context is loaded for that. Fails the request if its context
        cannot be repaired.
        """
        try:
            return self._expand(request)
        except CacheFullError as exc:
            if isinstance(exc, RequestTooLargeError):
                self._core.fail(request, exc)
            else:
                return None
        except ChoreographError as exc:
            self._core.fail(request, exc)
        except Exception as exc:
            self._core.fail(request, wrap_error(request, "repairing its context raised", exc))
        return []

    def _expand(self, request: Request) -> list[Request] | None:
        assert request.repair is not None
        strategy, share = REPAIR_STRATEGIES[request.repair.strategy], request.repair.share
        parents = list(self._views(request))
        if share == 1 or all(parent.is_exact for parent in parents):  # nothing to select
            ranges: list[TokenRanges] = [[] if p.is_exact else [(0, len(p.tokens))] for p in parents]
            return self._replace_parents(request, parents, ranges)
        key = self._selection_key(request, parents)
        selected = self._selections.get(key)
        if selected is None:
            view = ContextView(self._core, request, parents, share)
            if strategy.reads_kv and not self._is_loaded(request, parents):
                return None
            if strategy.reads_prompt:
                if request.scoring is None or not request.scoring.is_finished:
                    return self._score(key, view)
                view = view._replace(attention=_attention_of(request.scoring))
                self._scorings.pop(key, None)
            selected = strategy.select(view)
            if len(self._selections) >= MAX_SELECTIONS:
                del self._selections[next(iter(self._selections))]  # the oldest
            self._selections[key] = selected
        return self._replace_parents(request, parents, selected)

    def _score(self, key: object, view: ContextView) -> list[Request]:
        """Compute the prompt over the reused context, once for equal keys."""
        request = view.request
        scoring = request.scoring or self._scorings.get(key)
        if scoring is not None and scoring.error is None:
            request.scoring = scoring
            return self._expand(request) or [] if scoring.is_finished else []
        scoring = self._build_request(request, list(request.prompt), request.parents, request.parent_slices)
        scoring.observer, scoring.num_skipped_steps = AttentionObserver(view, scoring), 1 << 30  # a call waits for it
        for dependency in scoring.dependencies:
            dependency.num_waiting_dependents += 1
        if len(self._scorings) >= MAX_SELECTIONS:
            del self._scorings[next(iter(self._scorings))]  # its call was cancelled
        self._scorings[key] = request.scoring = scoring
        self._core.scheduler.waiting.add(scoring)
        return [scoring]

    def _selection_key(self, request: Request, parents: list[ParentView]) -> object:
        """Return what a selection depends on: calls with equal keys share it."""
        assert request.repair is not None
        reads_prompt = REPAIR_STRATEGIES[request.repair.strategy].reads_prompt
        context = tuple(
            (
                parent.position,
                len(parent.tokens),
                parent.is_exact,
                *((_entry_hash(s.entry), s.token_start, s.num_tokens, s.position, s.layers) for s in parent.slices),
            )
            for parent in parents
        )
        return request.repair, request.model, request.namespace, context, tuple(request.prompt if reads_prompt else ())

    def _views(self, request: Request) -> Iterator[ParentView]:
        """Yield the parents at the positions of prefix mode."""
        num_layers = len(self._core.cache_manager.pool.keys)
        unchanged = _RepairedContext()
        is_prefix = True  # all parents so far are exact
        for parent, start, end in _visible(request):
            is_exact = is_prefix = is_prefix and unchanged.is_context_of(parent, start, request)
            slices = tuple(parent_slices(parent, start, end - start, unchanged.num_tokens, num_layers))
            yield ParentView(parent.tokens[start:end], unchanged.num_tokens, slices, is_exact)
            unchanged.append(parent, _hash_of(parent), start, end)

    def _is_loaded(self, request: Request, parents: list[ParentView]) -> bool:
        """Start loading the context; return True if it is loaded."""
        entries = [kv_slice.entry for parent in parents for kv_slice in parent.slices]
        if any(entry.location == "device" and not entry.is_complete for entry in entries):
            return False  # being computed
        self._core.context_loader.ensure_resident(request.id, entries)
        return all(entry.location == "device" and entry.is_complete for entry in entries)

    def _replace_parents(self, request: Request, parents: list[ParentView], ranges: list[TokenRanges]) -> list[Request]:
        """Replace the parents by unchanged ranges and prefills of the selected ones."""
        context, prefills = _RepairedContext(), list[Request]()
        request.resolve_dependencies()  # TTFT starts when the parents that are replaced have ended
        for (parent, start, end), view, selected in zip(_visible(request), parents, ranges, strict=True):
            kept = start
            for first, last in () if context.is_context_of(parent, start, request) else selected:
                if kept < start + first:
                    context.append(parent, _hash_of(parent), kept, start + first)
                prefills.append(self._build_prefill(request, view.tokens[first:last], context))
                prefills[-1].origin = parent, start + first
                kept = start + last
            if kept < end:
                context.append(parent, _hash_of(parent), kept, end)
        for prefill in prefills:
            for dependency in prefill.dependencies:
                dependency.num_waiting_dependents += 1
        previous = request.dependencies
        request.parents, request.parent_slices = tuple(context.requests), context.slices
        for dependency in request.dependencies:  # sources of the new parents too
            dependency.num_waiting_dependents += 1
        self._core.release_dependencies(previous)
        request.offsets, request.new_offset = (None,) * len(context.requests), None
        request.repair, request.repaired_positions = None, tuple(view.position for view in parents)
        request.scoring = None
        for prefill in prefills:
            self._core.scheduler.waiting.add(prefill)
        return [*prefills, request]

    def _build_prefill(self, request: Request, tokens: list[int], context: _RepairedContext) -> Request:
        """Append the prefill of a range to the context."""
        prefill = self._build_request(request, tokens, tuple(context.requests), context.slices)
        prefill.position = context.num_tokens
        namespace = namespace_of(prefill, self._core.hf_model.model_info)
        context.append(prefill, content_hash(namespace, tokens, prefill.position, context.hashes), 0, len(tokens))
        return prefill

    def _build_request(
        self,
        request: Request,
        tokens: list[int],
        parents: tuple[Request, ...],
        parent_slices: tuple[tuple[int, int] | None, ...],
    ) -> Request:
        """Return a prefill for a request, at the position of prefix mode."""
        return Request(
            id=self._core.new_id(),
            session_id=request.session_id,
            mode="choreographed",
            namespace=request.namespace,
            prompt=tokens,
            parents=parents,
            parent_slices=parent_slices,
            offsets=(None,) * len(parents),
            new_offset=None,
            model=request.model,
            weights_group=request.weights_group,
            agent_key=request.agent_key,
            is_repair=True,
            priority=request.priority,
            sequence=request.sequence,
            submit_time=request.submit_time,
            released=True,  # kept for its readers only
        )


def _attention_of(scoring: Request) -> "Tensor":
    """Return the attention that a finished request has observed, or raise."""
    if scoring.state is not RequestState.DONE:
        reason = scoring.error or scoring.state.value
        raise RequestFailedError(f"computing its prompt to score the context failed: {reason}") from scoring.error
    assert isinstance(scoring.observer, AttentionObserver)
    return scoring.observer.attention


def _visible(request: Request) -> Iterator[tuple[Request, int, int]]:
    """Yield the parents and their visible tokens [start, end)."""
    for parent, token_range in zip(request.parents, request.parent_slices, strict=True):
        start, end = token_range or (0, len(parent.tokens))
        if end > len(parent.tokens):
            raise InvalidPositionError(
                f"part {start}:{end} of message {parent.id}, which has {len(parent.tokens)} tokens"
            )
        yield parent, start, end


def _hash_of(parent: Request) -> bytes:
    """Return a parent's content hash; a unique one if none."""
    return _entry_hash(parent.entry)


def _entry_hash(entry: KVEntry) -> bytes:
    return entry.content_hash or f"entry {entry.id}".encode()
