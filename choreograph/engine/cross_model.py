"""Layer reuse between models: which layers a receiver recomputes (DroidSpeak §4.2)."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import ConfigError
from ..events import EventBus
from ..kv_cache.manager import KVCacheManager
from ..models.model_set import ModelSet
from ..outputs import BASE_MODEL
from .request import Request
from .scheduler import Scheduler


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


class EngineLoad(NamedTuple):
    """Work queued in the engine.

    A request that computes only some layers counts by their share of all layers.
    """

    waiting: int  # requests
    running: int  # requests
    tokens: float  # not computed yet, as far as they are final
    message_tokens: int = 0  # length of the message to be reused


PatternSelector = Callable[[EngineLoad], LayerPattern]


class CrossModelReuse:
    """Model pairs with layer reuse enabled in one engine."""

    def __init__(
        self, cache_manager: KVCacheManager, model_set: ModelSet, scheduler: Scheduler, events: EventBus
    ) -> None:
        self._cache_manager = cache_manager
        self._model_set = model_set
        self._scheduler = scheduler
        self._events = events
        self._selectors: dict[tuple[str, str], PatternSelector] = {}

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Enabled (receiver, sender) pairs."""
        return tuple(self._selectors)

    def add(
        self,
        receiver: str,
        sender: str,
        patterns: Iterable[LayerPattern],
        selector: PatternSelector,
        capacity: int | None,
    ) -> None:
        """Enable layer reuse for a pair of models.

        Args:
            patterns: all patterns that `selector` may return.
            capacity: size in tokens of the partial-layer pool; None: as many pages as the full
                pool.
        """
        model_set, pool = self._model_set, self._cache_manager.pool
        if self._check_model("receiver", receiver) == self._check_model("sender", sender):
            raise ConfigError(f"receiver={receiver!r} is also the sender: use two models")
        patterns = [pattern.check(len(pool.keys)) for pattern in patterns]
        if not callable(selector):
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
        self._selectors[receiver, sender] = selector

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

    def select_pattern(self, receiver: str, sender: str, request: Request) -> LayerPattern:
        """Select the layers to recompute for one message, given the current load."""
        self.check_pair(receiver, sender)
        load = self.load._replace(message_tokens=len(request.tokens))
        pattern = parse_layer_pattern(self._selectors[receiver, sender](load)).check(len(self._cache_manager.pool.keys))
        self._events.emit("layers_reused", request=request.id, receiver=receiver, sender=sender, pattern=str(pattern))
        return pattern

    @property
    def load(self) -> EngineLoad:
        waiting, running = self._scheduler.waiting, self._scheduler.running
        num_layers = len(self._cache_manager.pool.keys)

        def weighted(tokens: int, request: Request) -> float:
            return tokens if request.computed_layers is None else tokens * len(request.computed_layers) / num_layers

        num_tokens = sum(weighted(len(c.tokens), c) for c in waiting)
        num_tokens += sum(weighted(len(c.entry.tokens) - c.entry.num_computed_tokens, c) for c in running)
        return EngineLoad(len(waiting), len(running), num_tokens)

    def resolve(self, request: Request) -> None:
        """Fall back to all layers if the requested partial prefill is impossible."""
        if request.computed_layers is None or request.source is None:
            return
        source_entry = request.source.entry
        missing = LayerPattern.from_layers(request.computed_layers).entry_layers - source_entry.cached_hidden_layers
        reason = f"inputs of layers {sorted(missing)} are not cached" if missing else ""
        if source_entry.missing_layers - request.computed_layers:
            reason = f"layers {sorted(source_entry.missing_layers - request.computed_layers)} were not sent"
        if source_entry.is_lost:
            reason = "the sender's KV is lost"
        if request.source.computed_layers is not None:
            reason = "its source was computed in some layers only"
        pool = self._cache_manager.pool
        lengths = [
            len(request.prompt),
            *(len(p.entry.tokens) for p in request.parents if p.entry.computed_layers is not None),
        ]
        if not request.computed_layers <= pool.partial_layers or sum(map(pool.num_pages_for, lengths)) > pool.num_pages(
            partial=True
        ):
            reason = "the partial-layer pool is too small"
        if reason:
            self._fall_back_to_full(request, reason)

    def recompute_lost(self, requests: Sequence[Request]) -> None:
        """Requeue parents whose KV is lost, to be computed in all layers."""
        if not self._model_set.remote:  # only remote entries can be lost
            return
        for parent in {id(p): p for request in requests for p in request.parents}.values():
            if any(source.entry is not None and source.entry.is_lost for source in parent.source_chain):
                if parent.entry is None:  # already queued
                    continue
                self._cache_manager.release(parent.entry, parent.message_owner)
                self._scheduler.requeue(parent)
                if parent.model in self._model_set.remote:
                    client_id = parent.cache_salt.partition("\0")[2]
                    parent.model = parent.weights_group = BASE_MODEL
                    parent.cache_salt = f"{self._model_set.fingerprint(BASE_MODEL)}\0{client_id}"
                self._fall_back_to_full(parent, "the sender's KV is lost")

    def _fall_back_to_full(self, request: Request, reason: str) -> None:
        request.computed_layers = None
        self._events.emit("recomputed", request=request.id, why=reason)
