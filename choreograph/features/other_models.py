"""Parents that other models computed: encoded again, in all layers or some (DroidSpeak §4.2)."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, ClassVar, NamedTuple, Protocol

from ..context.feature import READY, ContextFeature, Outcome, Parser, Prefills, Ready, RequestDraft, Wait
from ..core.core import EngineCore
from ..errors import ConfigError
from ..layer_pattern import LayerPattern, parse_layer_pattern
from ..messages.handle import MessageHandle, Parent, unwrap_slice
from ..outputs import KV_REUSE, KVReuse
from ..request.request import Reencoding, Request, RequestState
from .variants import VariantRule, is_usable, parents_of


class TransferLoad(NamedTuple):
    """Link to the process that has a message's KV."""

    queued_bytes: int  # of earlier contexts that are still to arrive
    bytes_per_second: float  # measured so far; infinite before the first transfer
    kv_bytes: int  # keys and values of the message in one layer
    hidden_bytes: int  # input hidden states of the message in one layer
    layers: int  # of the model


class EngineLoad(NamedTuple):
    """Work of the engine when a partial prefill is admitted.

    Work ahead of it belongs to running requests and to those that wait before it.
    A request that computes only some layers counts by their share of all layers.
    """

    waiting: int  # other requests that wait
    running: int  # requests
    tokens: float  # ahead of the message and not computed yet
    message_tokens: int = 0  # length of the message to be reused
    pairs: float = 0.0  # (query, key) pairs of attention that `tokens` need
    message_pairs: float = 0.0  # the same for the message in all layers
    steps: int = 0  # batches that `tokens` need
    decodes: int = 0  # running requests that generate: each batch of another request takes turns with theirs
    waited: float = 0.0  # seconds since the message could have been admitted
    transfer: TransferLoad | None = None  # None: the sender's KV is in this process


PatternSelector = Callable[[EngineLoad], LayerPattern]


class RemoteContext(Protocol):
    """Message whose KV a model in another process has."""

    @property
    def load(self) -> TransferLoad:
        """Bytes to transfer and the state of the link."""

    def fetch(self, pattern: LayerPattern) -> str:
        """Start loading what a pattern reuses.

        Returns why it cannot be loaded, else "".
        """


class ModelVariant(NamedTuple):
    """Key of a variant that another model encodes."""

    model: str
    kind: "KVReuse | LayerPattern"  # all layers ("recompute"), those selected for the pair ("partial"), or these


@dataclass
class ParentReuse:
    """How a request reads parents of other models."""

    kv_reuse: KVReuse


@dataclass
class LayerSelection:
    """The layers of a re-encoding are selected when it is admitted."""

    sender: str  # its pair with the request's model has a selector


@dataclass
class RemoteSource:
    """Loads the KV of a message that another process computed."""

    context: RemoteContext


def _parse_kv_reuse(kv_reuse: KVReuse) -> KVReuse:
    if kv_reuse not in KV_REUSE:
        raise ConfigError(f"kv_reuse={kv_reuse!r}: use one of {KV_REUSE}")
    return kv_reuse


def kv_reuse_of(request: Request) -> KVReuse:
    """Return how a request reads parents of other models."""
    option = request.extension(ParentReuse)
    return "recompute" if option is None else option.kv_reuse


def remote_of(source: Request | None) -> RemoteContext | None:
    """Return what loads a message of another process; None for others."""
    remote = None if source is None else source.extension(RemoteSource)
    return None if remote is None else remote.context


class OtherModels(ContextFeature):
    """Reuse of messages that other models computed, and the pairs of models with layer reuse."""

    keeps_options, needs_options, rewrites_again = False, True, True
    options: ClassVar[Mapping[str, Parser]] = {"kv_reuse": _parse_kv_reuse}

    def attach(self, core: EngineCore) -> None:
        self._core = core
        self._selectors: dict[tuple[str, str], PatternSelector | LayerPattern] = {}
        self._last_selection: tuple[int, LayerPattern] | None = None  # request id and its pattern

    # -- submission -----------------------------------------------------------------------------------------

    def prepare(self, draft: RequestDraft) -> None:
        """Note how parents of other models are read."""
        kv_reuse: KVReuse = draft.options.get("kv_reuse", "recompute")
        if kv_reuse != "recompute":
            draft.request.extend(ParentReuse(kv_reuse))

    def submit(self, draft: RequestDraft) -> None:
        """Replace parents of other models by their variants for the request's model.

        The parents of the handle are unchanged. With kv_reuse="reuse" no parent is replaced.
        """
        for parent in draft.request.parents:
            if parent.model != draft.request.model:
                self.resolve_parents(draft)
                return

    def resolve_parents(self, draft: RequestDraft) -> tuple[Parent, ...]:
        """Return the parents to attend to; see `submit`."""
        message, request, kv_reuse = draft.message, draft.request, kv_reuse_of(draft.request)
        parents: tuple[Parent, ...] = message.parents
        if kv_reuse == "reuse" or request.mode != "choreographed":
            return parents
        model = request.model
        rule = self.rule(draft.session, model, kv_reuse)
        if kv_reuse == "partial":
            self._check_pairs(parents, model, rule)
        resolved = tuple(p if p.model == model else rule.ensure(p) for p in parents)
        request.parents = tuple(unwrap_slice(parent)._request for parent in resolved)
        return resolved

    def rule(self, session: Any, model: str, kind: KVReuse | LayerPattern) -> VariantRule:
        """Return the rule of variants that a model encodes.

        The model's own messages are their own variants.
        """

        def find(message: MessageHandle) -> MessageHandle | None:
            # one with all layers recomputed is preferred to a partial one
            kinds: tuple[KVReuse | LayerPattern, ...] = ("recompute", kind) if kind == "partial" else (kind,)
            candidates = [message] if message.model == model else []
            candidates += [v for k in kinds if (v := message.variants.get(ModelVariant(model, k))) is not None]
            return next(filter(is_usable, candidates), None)

        def reencode(message: MessageHandle, parents: tuple[Parent, ...]) -> MessageHandle:
            draft = session.draft_copy(message, parents, model=model, kv_reuse="reuse")  # its parents are resolved
            if kind != "recompute":
                pattern = (
                    kind
                    if isinstance(kind, LayerPattern)
                    else self.fixed_pattern(model, message.model, message._request)
                )
                if pattern is not None and not pattern.layers:
                    return message
                self.set_pattern(draft.request, message.model, pattern)
            (variant,) = session.submit([draft])
            assert isinstance(variant, MessageHandle)
            return variant

        return VariantRule(find, lambda message: ModelVariant(model, kind), reencode)

    def _check_pairs(self, parents: Iterable[Parent], model: str, rule: VariantRule) -> None:
        """Check that layer reuse is enabled for all ancestors, before submitting any."""
        queue, checked = [unwrap_slice(p) for p in parents], set[int]()
        while queue:
            parent = queue.pop()
            if parent.id in checked or rule.find(parent) is not None:
                continue
            checked.add(parent.id)
            self.check_pair(model, parent.model)
            queue += [unwrap_slice(p) for p in parents_of(parent)]

    def set_pattern(self, request: Request, sender: str, pattern: LayerPattern | None) -> None:
        """Set the layers that a re-encoding computes.

        Args:
            pattern: None to select it when the request is admitted.
        """
        assert request.reencoding is not None
        if pattern is None:
            request.extend(LayerSelection(sender))
        elif len(pattern.layers) < self._core.hf_model.model_info.layers:
            request.reencoding.layers = pattern.layers
        else:
            return
        request.reencoding.needs_entry = remote_of(request.reencoding.source) is None

    # -- pairs of models ------------------------------------------------------------------------------------

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Enabled (receiver, sender) pairs."""
        return tuple(self._selectors)

    def senders_of(self, receiver: str) -> tuple[str, ...]:
        """Return the models whose layers a model reuses."""
        return tuple(sender for other, sender in self._selectors if other == receiver)

    def add(
        self,
        receiver: str,
        sender: str,
        patterns: Iterable[LayerPattern],
        selector: PatternSelector | None,
        capacity: int | None,
    ) -> None:
        """Enable layer reuse for a pair of models.

        Args:
            patterns: all patterns that `selector` may return; without one, the only pattern.
            capacity: size in tokens of the partial-layer pool; None: as many pages as the full
                pool.
        """
        model_set, cache = self._core.model_set, self._core.cache_manager
        pool = cache.pool
        if self._check_model("receiver", receiver) == self._check_model("sender", sender):
            raise ConfigError(f"receiver={receiver!r} is also the sender: use two models")
        patterns = [pattern.check(len(pool.keys)) for pattern in patterns]
        if not (selector is None or callable(selector)):
            raise ConfigError(f"selector={selector!r}: use a function from EngineLoad to LayerPattern")
        if capacity is not None and (isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 1):
            raise ConfigError(f"capacity={capacity!r}: use a positive number or None")
        entry_layers = frozenset[int]().union(*(pattern.entry_layers for pattern in patterns))
        hidden_size = model_set.base.model.config.get_text_config().hidden_size
        decoders = [model_set.get(name).decoder_layers for name in {receiver, sender} - model_set.remote.keys()]
        computed = frozenset[int]().union(*(p.layers for p in patterns if len(p.layers) < len(pool.keys)))
        try:
            if computed:
                pool.grow_partial_pool(computed, pool.pages if capacity is None else pool.num_pages_for(capacity))
            cache.offload_manager.enable_hidden_cache(entry_layers, hidden_size, model_set.base.model_info.dtype)
        except RuntimeError as exc:  # torch raises nothing narrower
            raise ConfigError(f"capacity={capacity!r}: not enough memory ({exc}); use less") from None
        for decoder in decoders:
            decoder.capture(entry_layers)
        self._selectors = self._selectors | {(receiver, sender): selector or patterns[0]}  # other threads iterate it

    def remove_model(self, model: str) -> None:
        """Disable every pair that includes the model."""
        self._selectors = {pair: choose for pair, choose in self._selectors.items() if model not in pair}

    def _check_model(self, role: str, name: str) -> str:
        model_set = self._core.model_set
        names = (*model_set.names, *(model_set.remote if role == "sender" else ()))
        if name not in names:
            raise ConfigError(f"{role}={name!r}: use one of {list(names)}")
        return name

    def check_pair(self, receiver: str, sender: str) -> None:
        if (receiver, sender) not in self._selectors:
            pairs = [f"{r!r} from {s!r}" for r, s in self._selectors] or "no pairs"
            raise ConfigError(
                f"kv_reuse='partial': {receiver!r} has no layer reuse with {sender!r} ({pairs}): "
                f"call engine.enable_layer_reuse({receiver!r}, {sender!r}, ...) first"
            )

    def fixed_pattern(self, receiver: str, sender: str, request: Request) -> LayerPattern | None:
        """Return the pattern of a pair.

        None if a selector chooses it when the prefill is admitted.
        """
        self.check_pair(receiver, sender)
        pattern = self._selectors[receiver, sender]
        if not isinstance(pattern, LayerPattern):
            return None
        self._emit_selection(receiver, sender, request, pattern)
        return pattern

    def _emit_selection(self, receiver: str, sender: str, request: Request, pattern: LayerPattern) -> None:
        self._core.events.emit(
            "layers_reused", request=request.id, receiver=receiver, sender=sender, pattern=str(pattern)
        )

    # -- admission ------------------------------------------------------------------------------------------

    def rewrite(self, request: Request, *, may_load: bool) -> Outcome:
        """Select the layers of a partial prefill and load what it needs.

        Falls back to all layers if it is impossible.

        Raises:
            CacheBusyError: if there is capacity for the sender's KV when a transfer completes.
        """
        copy = request.reencoding
        if copy is None:
            return READY
        if not may_load and copy.source.entry is None and remote_of(copy.source) is not None:
            return Wait()
        return self._resolve(request, copy)

    def _resolve(self, request: Request, copy: Reencoding) -> Ready:
        source, remote = copy.source, remote_of(copy.source)
        selection = request.extension(LayerSelection)
        if selection is not None and not (remote is not None and source.entry is not None):
            self._select(request, copy, selection.sender)
        if copy.layers is None:
            return READY
        reason = ""
        if remote is not None and source.entry is None:
            source.parents = request.parents
            reason = remote.fetch(LayerPattern.from_layers(copy.layers))
        reason = reason or self._why_impossible(request, copy.layers, source)
        if reason:
            self._fall_back_to_full(request, reason)
        return READY

    def _select(self, request: Request, copy: Reencoding, sender: str) -> None:
        """Set the layers to recompute by the current load."""
        selector = self._selectors[request.model, sender]
        pattern = selector if isinstance(selector, LayerPattern) else parse_layer_pattern(selector(self.load(request)))
        num_layers = len(self._core.cache_manager.pool.keys)
        pattern.check(num_layers)
        copy.layers = pattern.layers if len(pattern.layers) < num_layers else None
        if self._last_selection != (request.id, pattern):  # admission is retried until there is capacity
            self._last_selection = (request.id, pattern)
            self._emit_selection(request.model, sender, copy.source, pattern)

    def load(self, request: Request) -> EngineLoad:
        """Return the work ahead of a partial prefill that can be admitted."""
        scheduler, num_layers = self._core.scheduler, len(self._core.cache_manager.pool.keys)
        ahead = takewhile(lambda other: other is not request, scheduler.waiting)
        tokens, pairs, batch_tokens = 0.0, 0.0, defaultdict[object, int](int)
        for other in (*scheduler.running, *ahead):
            layers = other.layers if other.state is RequestState.WAITING else other.entry.layers.computed
            pending, num_pairs = _pending_work(other, layers)
            share = 1.0 if layers is None else len(layers) / num_layers
            tokens, pairs = tokens + share * pending, pairs + share * num_pairs
            if not _is_generating(other):
                batch_tokens[other.weights_group, layers] += pending
        pending, num_pairs = _pending_work(request, request.layers)
        remote = None if request.reencoding is None else remote_of(request.reencoding.source)
        return EngineLoad(
            waiting=len(scheduler.waiting) - 1,
            running=len(scheduler.running),
            tokens=tokens,
            message_tokens=pending,
            pairs=pairs,
            message_pairs=num_pairs,
            steps=sum(-(-count // scheduler.max_num_batched_tokens) for count in batch_tokens.values()),
            decodes=sum(_is_generating(other) for other in scheduler.running),
            waited=max(0.0, time.perf_counter() - request.times.ready),
            transfer=None if remote is None else remote.load,
        )

    def _why_impossible(self, request: Request, computed_layers: frozenset[int], source: Request) -> str:
        """Return why a partial prefill cannot be computed, or ""."""
        if source.entry.is_lost:
            return _why_lost(source)
        if source.entry.error is not None:
            return f"its source failed: {source.entry.error}"
        if source.layers is not None:
            return "its source was computed in some layers only"
        if unsent := source.entry.layers.missing - computed_layers:
            return f"layers {sorted(unsent)} were not sent"
        if missing := LayerPattern.from_layers(computed_layers).entry_layers - source.entry.layers.hidden:
            return f"inputs of layers {sorted(missing)} are not cached"
        pool = self._core.cache_manager.pool
        partial = [len(p.entry.tokens) for p in request.parents if p.entry.is_partial]
        num_pages = sum(map(pool.num_pages_for, (*partial, len(request.prompt))))
        if computed_layers and (not computed_layers <= pool.partial_layers or num_pages > pool.num_pages(partial=True)):
            return "the partial-layer pool is too small"
        return ""

    def _fall_back_to_full(self, request: Request, reason: str) -> None:
        _compute_all_layers(request)
        self._core.events.emit("recomputed", request=request.id, why=reason)


class LostParents(ContextFeature):
    """Parents whose KV came from another process and is lost: computed again, in all layers."""

    rewrites_again = True

    def attach(self, core: EngineCore) -> None:
        self._core = core

    def rewrite(self, request: Request, *, may_load: bool) -> Outcome:
        """Let lost parents be computed first."""
        if not self._core.model_set.remote:  # only remote entries can be lost
            return READY
        lost_parents = []
        for parent in dict.fromkeys(request.parents):
            lost = [owner for owner in parent.source_chain if owner.entry is not None and owner.entry.is_lost]
            if lost:
                _compute_all_layers(parent)
                self._core.events.emit("recomputed", request=parent.id, why=_why_lost(lost[-1]))
                lost_parents.append(parent)
        return Prefills(lost_parents) if lost_parents else READY


def _compute_all_layers(request: Request) -> None:
    if request.reencoding is not None:
        request.reencoding.layers, request.reencoding.needs_entry = None, False
    request.extensions.pop(LayerSelection, None)


def _why_lost(source: Request) -> str:
    return f"sender {source.model!r}: {source.entry.storage.lost_reason or 'its KV is lost'}"


def _is_generating(request: Request) -> bool:
    return request.state is not RequestState.WAITING and request.is_decode and request.num_pending_tokens <= 1


def _pending_work(request: Request, layers: frozenset[int] | None) -> tuple[int, float]:
    """Return a request's known tokens to compute, and their attention work.

    The work is the number of (query, key) pairs in one layer.
    """
    if request.state is RequestState.WAITING:
        count, num_visible = len(request.tokens), 0
        for parent, token_range in zip(request.parents, request.parent_slices, strict=True):
            num_visible += len(parent.tokens) if token_range is None else token_range[1] - token_range[0]
    else:
        entry, layer = request.entry, min(layers or (0,))
        count = len(entry.tokens) - entry.num_computed_tokens
        num_visible = entry.num_computed_tokens + sum(s.num_tokens for s in request.context if s.visible_in(layer))
    return count, count * (num_visible + (count + 1) / 2)
