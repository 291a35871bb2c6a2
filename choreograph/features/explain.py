"""Explanation of a message: its context compared with prefix mode.

A parent's KV was encoded in the context of its author. In prefix mode at this place it would have seen
exactly the tokens before it. What it saw besides is a leak (Prompt Choreography, section 4.3); what it
did not see of them is a blockage.
"""

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ..core.core import EngineCore
from ..errors import CacheFullError, InvalidRequestError, MessageReleasedError
from ..kv_cache.entry import KVSlice
from ..messages.handle import MessageHandle
from ..outputs import Mode
from ..request.request import Purpose, Request, RequestState
from .blocked_turns import blocked_turn, list_names, name_of
from .guard import copy_labels
from .repair.options import Repair
from .repair.planner import ContextRepair
from .repair.probe import ProbeContext
from .repair.strategy import ContextView, ParentView, Strategy
from .variants import TextOrigin

TRIAL_SHARES = (0.1, 0.2, 0.4)  # of repair, tried when the divergence is measured
SMALL_KL = 0.005  # nats a token: less needs no remedy


class MessageTokens(NamedTuple):
    """Number of tokens of one message."""

    message: int  # id
    num_tokens: int


@dataclass(frozen=True)
class ParentExplanation:
    """One parent of a message, compared with prefix mode at this place."""

    message: int  # id of the parent
    num_tokens: int  # visible tokens
    leaked: tuple[MessageTokens, ...]  # seen by the reused tokens, directly or through others, but not before them here
    blocked: tuple[MessageTokens, ...]  # before the reused tokens here, but not seen by them
    shift: int  # positions that the reused tokens moved from where they were encoded
    reused: int  # tokens whose KV was taken as it is
    repaired: int  # tokens computed again with what precedes them here, by this call or another
    computed: int  # other tokens computed for this context: uncached ones of prefix mode, or another model's


@dataclass(frozen=True)
class RepairTrial:
    """Measured divergence of one share of repair."""

    share: float
    kl: float  # mean over the message's tokens, nats
    strategy: str | Strategy = "first"


@dataclass(frozen=True)
class Explanation:
    """Result of `Message.explain`."""

    message: int  # id
    mode: Mode
    parents: tuple[ParentExplanation, ...]
    # nats, KL(prefix mode || this context): of the distribution that each generated token was drawn from, or after
    # each token of a prefill; None if it was not measured
    divergence: tuple[float, ...] | None
    trials: tuple[RepairTrial, ...]  # repair shares that were measured
    recommendations: tuple[str, ...]  # sentences; their figures are measurements

    @property
    def kl(self) -> float | None:
        """Mean divergence in nats a token; None if it was not measured."""
        return fmean(self.divergence) if self.divergence else None


def explain(message: MessageHandle, *, measure: bool = False, names: Mapping[int, str] | None = None) -> Explanation:
    """Explain a message; see `Message.explain`.

    Args:
        names: what recommendations call the messages, by id; "message <id>" for others.
    """
    request = message.result()._request
    parents = tuple(_explain_parents(message))
    divergence: tuple[float, ...] | None = None
    trials: tuple[RepairTrial, ...] = ()
    if measure:
        divergence, trials = _measure(message)
    kl = fmean(divergence) if divergence else None
    recommendations = list(_recommend(request.id, parents, kl, trials, names or {}))
    is_faithful = kl is not None and kl < SMALL_KL
    found = None if is_faithful or any(parent.repaired for parent in parents) else blocked_turn(message)
    if found is not None:
        recommendations.insert(0, found.advice(names))
    return Explanation(request.id, request.mode, parents, divergence, trials, tuple(recommendations))


# -- what was seen --------------------------------------------------------------------------------------


class _TokenSets:
    """Sets of tokens by message; equal prefills are one message."""

    def __init__(self) -> None:
        self.tokens: dict[object, set[int]] = {}  # token indices by message
        self.ids: dict[object, int] = {}  # message id

    def add(self, request: Request, start: int, end: int) -> None:
        """Add tokens [start, end) of a request, or those they repeat."""
        while True:
            if (origin := request.extension(TextOrigin)) is not None:
                for first, last in origin.spans(start, end):
                    self.add(origin.request, first, last)
                return
            if request.reencoding is None:
                break
            request = request.reencoding.source
        key = request if request.entry is None or request.is_decode else request.entry
        self.tokens.setdefault(key, set()).update(range(start, end))
        self.ids.setdefault(key, request.id)

    def without(self, *others: "_TokenSets") -> tuple[MessageTokens, ...]:
        """Count the tokens of each message that no other set has."""
        counts = []
        for key, tokens in self.tokens.items():
            rest = tokens.difference(*(other.tokens.get(key, ()) for other in others))
            if rest:
                ids = [other.ids[key] for other in others if key in other.ids]
                counts.append(MessageTokens((ids or [self.ids[key]])[0], len(rest)))
        return tuple(sorted(counts))


def _context(request: Request) -> Iterator[tuple[Request, int, int]]:
    """Yield the parents of a request and their visible tokens [start, end)."""
    origin = request.extension(TextOrigin)
    if origin is not None and request.purpose is not Purpose.CONTEXT:  # imported: the original's KV
        request = origin.request
    yield from (piece[:3] for piece in request.pieces())


def _direct(request: Request) -> _TokenSets:
    """Return the tokens that a request attended to."""
    result = _TokenSets()
    for parent, start, end in _context(request):
        result.add(parent, start, end)
    return result


def _reachable(request: Request) -> _TokenSets:
    """Return the tokens that may have influenced a request, through others too."""
    result, queue, known = _TokenSets(), [request], {request.id}
    for reader in queue:  # grows during iteration
        for parent, _, end in _context(reader):
            result.add(parent, 0, end)
            if parent.id not in known:
                known.add(parent.id)
                queue.append(parent)
        if reader.layers is not None and reader.reencoding is not None:  # its other layers
            queue.append(reader.reencoding.source)
    return result


def _explain_parents(message: MessageHandle) -> Iterator[ParentExplanation]:
    request, num_cached = message._request, message.usage.cached_tokens
    pieces = _context(request)
    preceding = _TokenSets()
    for parent, position in zip(message.parents, message.offsets, strict=True):
        num_tokens, start = parent.length, getattr(parent, "start", 0)
        if request.mode != "choreographed":
            reused = min(num_cached, num_tokens)
            num_cached -= reused
            yield ParentExplanation(parent.id, num_tokens, (), (), 0, reused, 0, num_tokens - reused)
            continue
        own, author = _TokenSets(), None  # author: request of the reused tokens
        repaired = 0
        while num_tokens > sum(map(len, own.tokens.values())):
            piece, first, end = next(pieces, (None, 0, 0))
            if piece is None:
                raise InvalidRequestError(f"message {request.id}: a feature left out context: explain one without it")
            own.add(piece, first, end)
            if piece.purpose is Purpose.CONTEXT:
                repaired += end - first
            else:
                author = piece
        leaked: tuple[MessageTokens, ...] = ()
        blocked: tuple[MessageTokens, ...] = ()
        shift = 0
        if author is not None:
            seen = _reachable(author)
            seen.add(author, 0, start)
            leaked = seen.without(preceding, own)
            blocked = preceding.without(_direct(author))
            shift = position - start - author.entry.base_position
        is_recomputed = author is not None and _is_of_other_model(author)
        rest = num_tokens - repaired
        yield ParentExplanation(
            message=parent.id,
            num_tokens=num_tokens,
            leaked=leaked,
            blocked=blocked,
            shift=shift,
            reused=0 if is_recomputed else rest,
            repaired=repaired,
            computed=rest if is_recomputed else 0,
        )
        for key, tokens in own.tokens.items():
            preceding.tokens.setdefault(key, set()).update(tokens)
            preceding.ids.setdefault(key, parent.id)


def _is_of_other_model(request: Request) -> bool:
    """True for a message of another model that is encoded again in all layers."""
    copy = request.reencoding
    return copy is not None and copy.layers is None and copy.source.model != request.model


# -- divergence -----------------------------------------------------------------------------------------


class _Segment(NamedTuple):
    """Tokens that one pass scores."""

    tokens: list[int]
    position: int  # of the first one
    context: tuple[KVSlice, ...]  # KV that they attend to
    num_scored: int  # the last tokens, after which distributions are returned


class _SegmentedContext:
    """Attention of independent segments in one forward pass, which writes no KV."""

    def __init__(self, core: EngineCore, request: Request, segments: Sequence[_Segment]) -> None:
        self._lengths = [len(segment.tokens) for segment in segments]
        self.saved_hidden: dict[int, Tensor] = {}  # as in `ForwardContext`
        self._probes = [
            ProbeContext(
                ContextView(core, request, [ParentView([], 0, segment.context, True)], 0.0),
                position=segment.position,
                num_tokens=len(segment.tokens),
                reads_context=bool(segment.context),
            )
            for segment in segments
        ]

    def on_layer_input(self, layer: int, hidden: Tensor) -> Tensor:
        return hidden

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "1 H N D"],
        key: Float[Tensor, "1 G N D"],
        value: Float[Tensor, "1 G N D"],
        scale: float,
        sinks: Float[Tensor, "H"] | None = None,
    ) -> Float[Tensor, "1 N H D"]:
        parts = zip(self._probes, *(x.split(self._lengths, dim=2) for x in (query, key, value)), strict=True)
        outputs = []
        for probe, *rows in parts:
            outputs.append(probe.attend(layer, *rows, scale, sinks))
            probe.keys.clear()
            probe.values.clear()
        return torch.cat(outputs, dim=1)


def _score(core: EngineCore, request: Request, segments: Sequence[_Segment]) -> list[Float[Tensor, "R V"]]:
    """Return the log-probabilities after the scored tokens of each segment."""
    tokens = [token for segment in segments for token in segment.tokens]
    positions = [segment.position + index for segment in segments for index in range(len(segment.tokens))]
    rows, end = list[int](), 0
    for segment in segments:
        end += len(segment.tokens)
        rows += range(end - segment.num_scored, end)
    model = core.model_set.get(request.model)
    context = [kv_slice for segment in segments for kv_slice in segment.context]
    with (
        _resident(core, request, context),
        torch.no_grad(),
        model.attention_hook(),
        torch.autocast(model.model_info.device.type, enabled=False),
        model.lora_rows([request.model] * len(tokens)),
    ):
        logits = model.logits(tokens, positions, _SegmentedContext(core, request, segments), rows)
    return list(logits.float().log_softmax(-1).split([segment.num_scored for segment in segments]))


@contextmanager
def _resident(core: EngineCore, request: Request, context: Sequence[KVSlice]) -> Iterator[None]:
    """Keep a context on the device inside the block."""
    owner_id = -request.id
    with core.lock:
        try:
            while not all(s.entry.location == "device" and s.entry.is_complete for s in context):
                is_stuck = False
                try:
                    core.context_loader.ensure_resident(owner_id, [s.entry for s in context])
                except CacheFullError:
                    is_stuck = not core.cache_manager.has_pending  # before the step, which polls transfers
                    if is_stuck and not core.step(wait=False):
                        raise
                if not is_stuck and not core.step(wait=False):
                    core.cache_manager.wait_for_space()
                    core.poll_transfers()
            yield
        finally:
            core.context_loader.release(owner_id)


def _divergence(prefix: Float[Tensor, "R V"], other: Float[Tensor, "R V"]) -> tuple[float, ...]:
    """Return KL(prefix || other) of each row, in nats."""
    return tuple((prefix.exp() * (prefix - other)).sum(-1).clamp_min(0).tolist())


def _measure(message: MessageHandle) -> tuple[tuple[float, ...], tuple[RepairTrial, ...]]:
    """Compare with prefix mode in one pass; then try some repairs."""
    core, request, segment = message._core, message.wait_encoded()._request, _own_segment(message)
    if request.mode != "choreographed":
        return (0.0,) * segment.num_scored, ()
    prefix, actual = _score(core, request, [_prefix_segment(message), segment])
    divergence = _divergence(prefix, actual)
    shares = TRIAL_SHARES if request.parents and fmean(divergence) >= SMALL_KL else ()
    return divergence, tuple(_try_repairs(message, map(Repair, shares), prefix))


def measure_repairs(message: MessageHandle, repairs: Iterable[Repair]) -> list[RepairTrial]:
    """Return the divergence of a choreographed message for each repair that fits."""
    message.wait_encoded()
    prefix = _score(message._core, message._request, [_prefix_segment(message)])[0]
    return list(_try_repairs(message, repairs, prefix))


def _try_repairs(
    message: MessageHandle, repairs: Iterable[Repair], prefix: Float[Tensor, "R V"]
) -> Iterator[RepairTrial]:
    own = _own_segment(message)
    num_context = sum(parent.length for parent in message.parents)
    for repair in repairs:
        reads_prompt = repair.selection.reads_prompt
        tokens = list(message._request.prompt) if reads_prompt and repair.share else own.tokens[:1]
        with _repaired_context(message, tokens, repair) as context:
            if context is not None:
                segment = own._replace(position=num_context, context=context)
                rows = _score(message._core, message._request, [segment])[0]
                yield RepairTrial(repair.share, fmean(_divergence(prefix, rows)), repair.strategy)


def _prefix_segment(message: MessageHandle) -> _Segment:
    """Return the text of context and message, as prefix mode has it."""
    own, parents = _own_segment(message), _context(message._request)
    text = [token for piece, first, end in parents for token in piece.tokens[first:end]]
    return own._replace(tokens=text + own.tokens, position=0, context=())


def _own_segment(message: MessageHandle) -> _Segment:
    """Return the message's own tokens over the context that it has."""
    request, entry = message._request, message._request.entry
    if request.mode == "choreographed" and request.released:
        raise MessageReleasedError(f"message {message.id} was released: explain it before")
    if request.layers is not None:
        raise InvalidRequestError(f"message {message.id} has layers of two models: measure a message of one")
    if request.decode_state is None:
        tokens, num_scored = list(request.tokens), len(request.tokens)
    else:
        generated = request.decode_state.tokens
        tokens, num_scored = request.prompt + generated[:-1], len(generated)
    return _Segment(tokens, entry.base_position if entry else 0, entry.context if entry else (), num_scored)


@contextmanager
def _repaired_context(
    message: MessageHandle, tokens: list[int], repair: Repair
) -> Iterator[tuple[KVSlice, ...] | None]:
    """Yield the context of a repaired prefill of `tokens`; None without capacity."""
    core, original, parents = message._core, message._request, list[tuple[Request, int, int]]()
    for piece, first, end in _context(original):  # of a repaired message: the ranges that it replaced
        origin = piece.extension(TextOrigin)
        if piece.purpose is Purpose.CONTEXT and origin is not None:
            piece, ((first, end),) = origin.request, origin.spans(first, end)
        if parents and parents[-1][0] is piece and parents[-1][2] == first:
            parents[-1] = piece, parents[-1][1], end
        else:
            parents.append((piece, first, end))
    trial = Request(
        id=core.new_id(),
        session_id=original.session_id,
        mode="choreographed",
        namespace=original.namespace,
        prompt=tokens,
        parents=tuple(parent for parent, _, _ in parents),
        parent_slices=tuple((first, end) for _, first, end in parents),
        offsets=(None,) * len(parents),
        new_offset=None,
        model=original.model,
        weights_group=original.weights_group,
    )
    copy_labels(original, trial)
    core.features.get(ContextRepair).repair(trial, repair)
    core.add_requests([trial], random.Random(0))
    try:
        try:
            core.run_until(trial, lambda: trial.state is RequestState.DONE)
        except CacheFullError:
            yield None
        else:
            yield trial.entry.context
    finally:
        core.release(trial)
        core.events.dispatch()


# -- recommendations ---------------------------------------------------------------------------------------------


def _recommend(
    reader: int,
    parents: Sequence[ParentExplanation],
    kl: float | None,
    trials: Sequence[RepairTrial],
    names: Mapping[int, str],
) -> Iterator[str]:
    """Yield one sentence for each kind of finding."""
    if kl is not None and kl < SMALL_KL:
        yield f"{name_of(reader, names)} is within {SMALL_KL} nats a token of prefix mode: nothing to do"
        return
    remedy = "repair= computes a share of them again with it"
    if kl is not None and trials:
        best = next((t for t in trials if t.kl <= kl / 2), min(trials, key=lambda t: t.kl))
        if best.kl <= 0.9 * kl:
            remedy = f"repair={best.share:g} brings KL from {kl:.2g} to {best.kl:.2g}"
        else:
            remedy = f"repair up to {trials[-1].share:g} leaves KL at {kl:.2g}, so use repair=1 or prefix mode"
    if blocked := [parent for parent in parents if parent.blocked]:
        missed = list_names((m.message for parent in blocked for m in parent.blocked), names)
        yield (
            f"{name_of(reader, names)} reads {list_names((p.message for p in blocked), names)} that did not see {missed}: "
            f"{remedy}; or encode them with it as a parent"
        )
    if leaking := [parent for parent in parents if parent.leaked]:
        seen = list_names((m.message for parent in leaking for m in parent.leaked), names)
        yield (
            f"{name_of(reader, names)} reads {list_names((p.message for p in leaking), names)} that saw {seen}, "
            f"outside of its context: {'' if blocked else f'{remedy}; or '}add it as a parent"
        )
