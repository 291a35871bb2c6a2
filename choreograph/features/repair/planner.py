"""Replacement of a request's parents by repaired ones.

The selected tokens of a parent are one prefill, whose tokens are scattered (`TokenRuns`): each attends to what
precedes it in the call. The call then attends to the unchanged ranges of its parents and to these prefills, at the
positions of prefix mode. Prefills of equal content share one KV entry, so calls with the same first parents share
their repair, and eviction, recomputation and adapters treat it like every other entry.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from ...attention.metadata import Alignment
from ...context.feature import READY, ContextFeature, Outcome, Parser, Prefills, RequestDraft, Wait
from ...context.placement import namespace_of, parent_slices
from ...core.core import EngineCore
from ...errors import InvalidPositionError, RequestFailedError
from ...kv_cache.entry import KVEntry, KVSlice, TokenRuns
from ...kv_cache.hashing import content_hash
from ...request.request import Request, RequestState
from ..agent_tags import AgentKey
from ..variants import TextOrigin
from .align import find_alignment
from .options import Repair
from .probe import AttentionObserver
from .strategy import ContextView, ParentView, TokenRanges

NEUTRAL = Alignment(1.0, 1.0)  # ordinary attention

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

    @property
    def offsets(self) -> tuple[int, ...]:
        return tuple(s.position for s in self.hashes)

    @property
    def alignments(self) -> tuple[Alignment | None, ...]:
        return tuple(s.alignment for s in self.hashes)

    def append(
        self,
        request: Request,
        hash_: bytes,
        start: int,
        end: int,
        position: int | None = None,
        alignment: Alignment | None = None,
    ) -> None:
        """Append tokens [start, end) of a request, by default after the last piece."""
        position, num_tokens = self.num_tokens if position is None else position, end - start
        last = self.hashes[-1] if self.hashes else None
        continues = last is not None and self.requests[-1] is request and last.token_start + last.num_tokens == start
        if last is not None and continues and last.alignment == alignment:
            self.hashes[-1] = last._replace(num_tokens=last.num_tokens + num_tokens)
        else:
            self.requests.append(request)
            source: Any = _Source(hash_)
            self.hashes.append(KVSlice(source, start, num_tokens, position, alignment=alignment))
        self.num_tokens += num_tokens

    def is_context_of(self, parent: Request, start: int, reader: Request) -> bool:
        """True if the parent's tokens saw exactly these pieces before them.

        Computing any of them behind these pieces would not change its KV.
        """
        if start or parent.layers is not None or parent.model != reader.model:
            return False
        shift = self.num_tokens - parent.entry.base_position
        other = [
            (s.entry.content_hash, s.token_start, s.num_tokens, s.position + shift, s.layers, s.alignment)
            for s in parent.entry.context
        ]
        return other == [
            (s.entry.content_hash, s.token_start, s.num_tokens, s.position, None, s.alignment) for s in self.hashes
        ]


@dataclass
class RepairState:
    """Repair of one request's context that is still to be planned."""

    repair: Repair
    alignment: Alignment | None  # that of the repair, or the model's
    scoring: Request | None = None  # computes the prompt to score the context


def repair_of(request: Request) -> Repair | None:
    """Return the repair of a request that is not planned yet."""
    state = request.extension(RepairState)
    return None if state is None else state.repair


class ContextRepair(ContextFeature):
    """Planner of the repair of waiting requests."""

    keeps_options, needs_options = False, True
    options: ClassVar[Mapping[str, Parser]] = {"repair": Repair.parse}

    def attach(self, core: EngineCore) -> None:
        self._core = core
        self._selections: dict[object, list[TokenRanges]] = {}
        self._scorings: dict[object, Request] = {}  # in progress, or complete and not used yet

    def prepare(self, draft: RequestDraft) -> None:
        """Note the share of a context that is computed again."""
        repair: Repair | None = draft.options.get("repair")
        request = draft.request
        if repair is not None and request.parents and request.mode == "choreographed":
            self.repair(request, repair)

    def repair(self, request: Request, repair: Repair) -> None:
        """Repair the context of a request that is not admitted yet.

        Raises:
            ConfigError: if the repair needs a calibration, and the model has none.
        """
        alignment: Alignment | None = None
        if repair.alignment == "calibrated":
            hf_model = self._core.model_set.get(request.model)
            alignment = find_alignment(hf_model.sampled_weights_hash, hf_model.model_info.name)
        elif repair.alignment is not None:
            alignment = Alignment(*repair.alignment)
        if alignment == NEUTRAL:
            alignment = None
        if repair.share > 0 or alignment is not None:
            request.extend(RepairState(repair, alignment))

    def rewrite(self, request: Request, *, may_load: bool) -> Outcome:
        """Replace the parents by unchanged ranges and prefills of selected ones."""
        state = request.extension(RepairState)
        if state is None:
            return READY
        strategy, share = state.repair.selection, state.repair.share
        if share > 0 and not may_load:
            return Wait()
        parents = list(self._views(request))
        if share == 0:  # nothing is computed
            request.alignments = tuple(None if parent.is_exact else state.alignment for parent in parents)
            del request.extensions[RepairState]
            return READY
        if share == 1 or all(parent.is_exact for parent in parents):  # nothing to select
            ranges: list[TokenRanges] = [[] if p.is_exact else [(0, len(p.tokens))] for p in parents]
            return self._replace_parents(request, state, parents, ranges)
        key = self._selection_key(request, state.repair, parents)
        selected = self._selections.get(key)
        if selected is None:
            view = ContextView(self._core, request, parents, share)
            if strategy.reads_kv and not self._is_loaded(request, parents):
                return Wait()
            if strategy.reads_prompt:
                if state.scoring is None:
                    shared = self._scorings.get(key)
                    if shared is None or shared.error is not None:
                        return Prefills([self._score(key, view, state)])
                    state.scoring = shared
                if not state.scoring.is_finished:
                    return Wait(for_capacity=False)
                view = view._replace(attention=_attention_of(state.scoring))
                self._scorings.pop(key, None)
            selected = strategy.select(view)
            if len(self._selections) >= MAX_SELECTIONS:
                del self._selections[next(iter(self._selections))]  # the oldest
            self._selections[key] = selected
        return self._replace_parents(request, state, parents, selected)

    def _score(self, key: object, view: ContextView, state: RepairState) -> Request:
        """Return a prefill of the prompt over the reused context, once for equal keys."""
        request = view.request
        scoring = self._build_request(request, list(request.prompt), request.parents, request.parent_slices)
        scoring.hook = AttentionObserver(view, scoring, state.repair.selection.observed_layers)
        scoring.scheduling.num_skipped_steps = 1 << 30  # a call waits for it
        if len(self._scorings) >= MAX_SELECTIONS:
            del self._scorings[next(iter(self._scorings))]  # its call was cancelled
        self._scorings[key] = state.scoring = scoring
        return scoring

    def _selection_key(self, request: Request, repair: Repair, parents: list[ParentView]) -> object:
        """Return what a selection depends on: calls with equal keys share it."""
        reads_prompt = repair.selection.reads_prompt
        context = tuple(
            (
                parent.position,
                len(parent.tokens),
                parent.is_exact,
                *((_entry_hash(s.entry), s.token_start, s.num_tokens, s.position, s.layers) for s in parent.slices),
            )
            for parent in parents
        )
        return repair, request.model, request.namespace, context, tuple(request.prompt if reads_prompt else ())

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

    def _replace_parents(
        self, request: Request, state: RepairState, parents: list[ParentView], ranges: list[TokenRanges]
    ) -> Outcome:
        """Replace the parents by unchanged ranges and prefills of the selected ones."""
        context, prefills = _RepairedContext(), list[Request]()
        for (parent, start, end), view, selected in zip(_visible(request), parents, ranges, strict=True):
            alignment = None if view.is_exact else state.alignment
            if not selected or context.is_context_of(parent, start, request):
                context.append(parent, _hash_of(parent), start, end, alignment=alignment)
                continue
            kept = 0
            for first, last in selected:
                if kept < first:
                    place = start + kept, start + first, view.position + kept
                    context.append(parent, _hash_of(parent), *place, alignment)
                kept = last
            prefills.append(self._build_prefill(request, view, selected, context))
            prefills[-1].extend(TextOrigin(parent, start + selected[0][0], prefills[-1].runs))
            if start + kept < end:
                context.append(parent, _hash_of(parent), start + kept, end, alignment=alignment)
        request.parents, request.parent_slices, request.offsets = (
            tuple(context.requests),
            context.slices,
            context.offsets,
        )
        request.alignments = context.alignments
        request.new_offset = context.num_tokens
        request.parent_positions = request.parent_positions or tuple(view.position for view in parents)
        del request.extensions[RepairState]
        return Prefills(prefills) if prefills else READY

    def _build_prefill(
        self, request: Request, view: ParentView, selected: TokenRanges, context: _RepairedContext
    ) -> Request:
        """Append the prefill of the selected ranges of a parent to what precedes it."""
        tokens = [token for first, last in selected for token in view.tokens[first:last]]
        prefill = self._build_request(request, tokens, tuple(context.requests), context.slices)
        prefill.offsets, position = context.offsets, view.position + selected[0][0]
        prefill.alignments = context.alignments
        prefill.position = prefill.new_offset = position
        if len(selected) > 1:
            starts = accumulate((last - first for first, last in selected[:-1]), initial=0)
            positions = tuple(view.position + first for first, _ in selected)
            reads_apart = not all(spec.is_plain for spec in self._core.hf_model.model_info.attention_specs)
            prefill.runs = TokenRuns(tuple(starts), positions, reads_apart)
        namespace = namespace_of(prefill, self._core.hf_model.model_info)
        hash_ = content_hash(namespace, tokens, position, context.hashes, runs=prefill.runs)
        context.append(prefill, hash_, 0, len(tokens), position)
        return prefill

    def _build_request(
        self,
        request: Request,
        tokens: list[int],
        parents: tuple[Request, ...],
        parent_slices: tuple[tuple[int, int] | None, ...],
    ) -> Request:
        """Return a prefill for a request, at the position of prefix mode."""
        prefill = request.for_context(self._core.new_id(), tokens, parents, parent_slices)
        if (agent := request.extension(AgentKey)) is not None:
            prefill.extend(agent)
        return prefill


def _attention_of(scoring: Request) -> Tensor:
    """Return the attention that a finished request has observed, or raise."""
    if scoring.state is not RequestState.DONE:
        reason = scoring.error or scoring.state.value
        raise RequestFailedError(f"computing its prompt to score the context failed: {reason}") from scoring.error
    assert isinstance(scoring.hook, AttentionObserver)
    return scoring.hook.attention


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
