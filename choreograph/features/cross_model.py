"""Layer reuse between models: which layers a receiver recomputes (DroidSpeak §4.2)."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ..errors import ConfigError
from ..events import EventBus
from ..kv_cache.manager import KVCacheManager
from ..models.model_set import ModelSet
from ..request.request import Request, RequestState

if TYPE_CHECKING:
    from ..core.scheduler import Scheduler


@dataclass(frozen=True)
class LayerPattern:
    """Ranges of layers that the receiver recomputes.

    All other layers are reused from the sender. A range that starts at layer 0 is computed from the
    tokens, any other from the sender's hidden states at its first layer (the E cache at a
    *transition*). `LayerPattern.from_triplet` takes the paper's three integers.
    """

    ranges: tuple[tuple[int, int], ...] = ()  # [first, end), ascending

    def __post_init__(self) -> None:
        end = -1
        for first, last in self.ranges:
            if not 0 <= first < last or first <= end:
                raise ConfigError(f"ranges={self.ranges!r}: use ascending ranges [first, end) with gaps between them")
            end = last

    @classmethod
    def from_triplet(cls, head: int, start: int, end: int) -> "LayerPattern":
        """Recompute [0, head), reuse [head, start), recompute [start, end), reuse the rest."""
        if not 0 <= head <= start <= end:
            raise ConfigError(f"pattern {head}, {start}, {end}: use 0 <= head <= start <= end")
        return cls.from_layers({*range(head), *range(start, end)})

    @classmethod
    def from_layers(cls, layers: Iterable[int]) -> "LayerPattern":
        """Create a pattern from the recomputed layers, in any order."""
        ranges: list[tuple[int, int]] = []
        for layer in sorted(set(layers)):
            if ranges and ranges[-1][1] == layer:
                ranges[-1] = (ranges[-1][0], layer + 1)
            else:
                ranges.append((layer, layer + 1))
        return cls(tuple(ranges))

    @property
    def layers(self) -> frozenset[int]:
        """Layers that are recomputed."""
        return frozenset(layer for first, end in self.ranges for layer in range(first, end))

    @property
    def entry_layers(self) -> frozenset[int]:
        """Layers whose input hidden states the sender has to cache."""
        return frozenset(first for first, _ in self.ranges if first)

    def check(self, num_layers: int) -> "LayerPattern":
        """Return the pattern if the model has all its layers.

        Raises:
            ConfigError: if the model has fewer layers.
        """
        if self.ranges and self.ranges[-1][1] > num_layers:
            raise ConfigError(f"pattern {self}: the model has layers 0 to {num_layers - 1}")
        return self

    def __str__(self) -> str:
        return ",".join(f"{first}-{end}" for first, end in self.ranges) or "none"


def parse_layer_pattern(pattern: "LayerPattern | Sequence[int]") -> LayerPattern:
    """Convert three integers to a pattern; return a pattern unchanged."""
    if isinstance(pattern, LayerPattern):
        return pattern
    numbers = tuple(pattern) if isinstance(pattern, Sequence) and not isinstance(pattern, str) else ()
    if len(numbers) != 3 or any(isinstance(n, bool) or not isinstance(n, int) for n in numbers):
        raise ConfigError(f"pattern={pattern!r}: use a LayerPattern, or three integers: head, start, end")
    return LayerPattern.from_triplet(*numbers)


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


class CrossModelReuse:
    """Model pairs with layer reuse enabled in one engine."""

    def __init__(
        self, cache_manager: KVCacheManager, model_set: ModelSet, scheduler: "Scheduler", events: EventBus
    ) -> None:
        self._cache_manager = cache_manager
        self._model_set = model_set
        self._scheduler = scheduler
        self._events = events
        self._selectors: dict[tuple[str, str], PatternSelector | LayerPattern] = {}
        self._last_selection: tuple[int, LayerPattern] | None = None  # request id and its pattern

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
        model_set, pool = self._model_set, self._cache_manager.pool
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
            self._cache_manager.offload_manager.enable_hidden_cache(entry_layers, hidden_size)
        except RuntimeError as exc:  # torch raises nothing narrower
            raise ConfigError(f"capacity={capacity!r}: not enough memory ({exc}); use less") from None
        for decoder in decoders:
            decoder.capture(entry_layers)
        self._selectors = self._selectors | {(receiver, sender): selector or patterns[0]}  # other threads iterate it

    def remove_model(self, model: str) -> None:
        """Disable every pair that includes the model."""
        self._selectors = {pair: choose for pair, choose in self._selectors.items() if model not in pair}

    def _check_model(self, role: str, name: str) -> str:
        names = (*self._model_set.names, *(self._model_set.remote if role == "sender" else ()))
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

    def _select(self, request: Request, source: Request) -> None:
        """Set the layers to recompute by the current load."""
        assert request.selects_from is not None
        selector = self._selectors[request.model, request.selects_from]
        pattern = selector if isinstance(selector, LayerPattern) else parse_layer_pattern(selector(self.load(request)))
        num_layers = len(self._cache_manager.pool.keys)
        pattern.check(num_layers)
        request.computed_layers = pattern.layers if len(pattern.layers) < num_layers else None
        if self._last_selection != (request.id, pattern):  # admission is retried until there is capacity
            self._last_selection = (request.id, pattern)
            self._emit_selection(request.model, request.selects_from, source, pattern)

    def _emit_selection(self, receiver: str, sender: str, request: Request, pattern: LayerPattern) -> None:
        self._events.emit("layers_reused", request=request.id, receiver=receiver, sender=sender, pattern=str(pattern))

    def load(self, request: Request) -> EngineLoad:
        """Return the work ahead of a partial prefill that can be admitted."""
        scheduler, num_layers = self._scheduler, len(self._cache_manager.pool.keys)
        ahead = takewhile(lambda other: other is not request, scheduler.waiting)
        tokens, pairs, batch_tokens = 0.0, 0.0, defaultdict[object, int](int)
        for other in (*scheduler.running, *ahead):
            layers = other.computed_layers
            pending, num_pairs = _pending_work(other)
            share = 1.0 if layers is None else len(layers) / num_layers
            tokens, pairs = tokens + share * pending, pairs + share * num_pairs
            if not _is_generating(other):
                batch_tokens[other.weights_group, layers] += pending
        pending, num_pairs = _pending_work(request)
        return EngineLoad(
            waiting=len(scheduler.waiting) - 1,
            running=len(scheduler.running),
            tokens=tokens,
            message_tokens=pending,
            pairs=pairs,
            message_pairs=num_pairs,
            steps=sum(-(-count // scheduler.max_num_batched_tokens) for count in batch_tokens.values()),
            decodes=sum(_is_generating(other) for other in scheduler.running),
            waited=max(0.0, time.perf_counter() - request.ready_time),
            transfer=None if request.source is None or request.source.remote is None else request.source.remote.load,
        )

    def resolve(self, request: Request) -> None:
        """Select the layers of a partial prefill and load what it needs.

        Falls back to all layers if it is impossible.

        Raises:
            CacheBusyError: if there is capacity for the sender's KV when a transfer completes.
        """
        source = request.source
        if source is None:
            return
        if request.selects_from is not None and not (source.remote is not None and source.entry is not None):
            self._select(request, source)
        if request.computed_layers is None:
            return
        reason = ""
        if source.remote is not None and source.entry is None:
            source.parents = request.parents
            reason = source.remote.fetch(LayerPattern.from_layers(request.computed_layers))
        reason = reason or self._why_impossible(request, request.computed_layers, source)
        if reason:
            self._fall_back_to_full(request, reason)

    def _why_impossible(self, request: Request, computed_layers: frozenset[int], source: Request) -> str:
        """Return why a partial prefill cannot be computed, or ""."""
        if source.entry.is_lost:
            return _why_lost(source)
        if source.entry.error is not None:
            return f"its source failed: {source.entry.error}"
        if source.computed_layers is not None:
            return "its source was computed in some layers only"
        if unsent := source.entry.layers.missing - computed_layers:
            return f"layers {sorted(unsent)} were not sent"
        if missing := LayerPattern.from_layers(computed_layers).entry_layers - source.entry.layers.hidden:
            return f"inputs of layers {sorted(missing)} are not cached"
        pool = self._cache_manager.pool
        partial = [len(p.entry.tokens) for p in request.parents if p.entry.is_partial]
        num_pages = sum(map(pool.num_pages_for, (*partial, len(request.prompt))))
        if computed_layers and (not computed_layers <= pool.partial_layers or num_pages > pool.num_pages(partial=True)):
            return "the partial-layer pool is too small"
        return ""

    def recompute_lost(self, requests: Iterable[Request]) -> None:
        """Requeue parents whose KV is lost, to be computed in all layers."""
        if not self._model_set.remote:  # only remote entries can be lost
            return
        for parent in {id(p): p for request in requests for p in request.parents}.values():
            lost = [owner for owner in parent.source_chain if owner.entry is not None and owner.entry.is_lost]
            if not lost or parent.entry is None:  # the latter is queued already
                continue
            self._cache_manager.release(parent.entry, parent.message_owner)
            self._scheduler.preemptor.requeue(parent)
            self._fall_back_to_full(parent, _why_lost(lost[-1]))

    def _fall_back_to_full(self, request: Request, reason: str) -> None:
        request.computed_layers = request.selects_from = None
        self._events.emit("recomputed", request=request.id, why=reason)


def _why_lost(source: Request) -> str:
    return f"sender {source.model!r}: {source.entry.storage.lost_reason or 'its KV is lost'}"


def _is_generating(request: Request) -> bool:
    return request.state is not RequestState.WAITING and request.is_decode and request.num_pending_tokens <= 1


def _pending_work(request: Request) -> tuple[int, float]:
    """Return a request's known tokens to compute, and their attention work.

    The work is the number of (query, key) pairs in one layer.
    """
    if request.state is RequestState.WAITING:
        count, num_visible = len(request.tokens), 0
        for parent, token_range in zip(request.parents, request.parent_slices, strict=True):
            num_visible += len(parent.tokens) if token_range is None else token_range[1] - token_range[0]
    else:
        entry, layer = request.entry, min(request.computed_layers or (0,))
        count = len(entry.tokens) - entry.num_computed_tokens
        num_visible = entry.num_computed_tokens + sum(s.num_tokens for s in request.context if s.visible_in(layer))
    return count, count * (num_visible + (count + 1) / 2)
