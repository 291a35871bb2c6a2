"""Who may use whose encodings in part, and which layers are then computed again. Knows no weights and no text.

A *pair* is a receiver and a sender. What the sender computes keeps the inputs of the layers where the receiver may
begin (the E cache), and the layers that the receiver may compute get room of their own.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ..errors import ConfigError
from ..events import EventLog
from ..kv.store import Store
from ..models.family import Family
from ..pattern import Pattern, read_pattern
from ..types import BASE
from .call import Call
from .scheduler import Scheduler


class Load(NamedTuple):
    """What the engine has to do: calls that wait and run, and tokens that they have yet to encode, as far as those are
    known; one that is computed in some layers counts by their share. own: those of the message that is to be shared."""

    waiting: int
    running: int
    tokens: float
    own: int = 0


Choose = Callable[[Load], Pattern]


class Sharing:
    """The pairs of one engine."""

    def __init__(self, store: Store, family: Family, scheduler: Scheduler, events: EventLog) -> None:
        self._store = store
        self._family = family
        self._scheduler = scheduler
        self._events = events
        self._pairs: dict[tuple[str, str], Choose] = {}

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """(receiver, sender) of each."""
        return tuple(self._pairs)

    def add(self, receiver: str, sender: str, patterns: Iterable[Pattern], choose: Choose, tokens: int | None) -> None:
        """patterns: all that `choose` may answer. tokens: room for what receivers compute of others' encodings; None:
        as much as the cache has for all layers."""
        family, arena = self._family, self._store.arena
        if self._known("receiver", receiver) == self._known("sender", sender):
            raise ConfigError(f"receiver={receiver!r} is the sender too: a model sees its own encodings anyway")
        patterns = [pattern.check(len(arena.keys)) for pattern in patterns]
        if not callable(choose):
            raise ConfigError(f"choose={choose!r}: use a function of the load that answers a pattern")
        if tokens is not None and (isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1):
            raise ConfigError(f"tokens={tokens!r}: use a positive number or None")
        entered = frozenset[int]().union(*(pattern.transitions for pattern in patterns))
        width = family.base.model.config.get_text_config().hidden_size
        depths = [family.of(name).depth for name in {receiver, sender} - family.elsewhere.keys()]
        computed = frozenset[int]().union(*(p.layers for p in patterns if len(p.layers) < len(arena.keys)))
        try:
            if computed:
                arena.widen(computed, arena.pages if tokens is None else arena.pages_for(tokens))
            self._store.traffic.keep_inputs(entered, width)
        except RuntimeError as problem:  # the library raises nothing narrower
            raise ConfigError(f"tokens={tokens!r}: there is no memory for that ({problem}); use less") from None
        for depth in depths:
            depth.watch(entered)
        self._pairs[receiver, sender] = choose

    def forget(self, name: str) -> None:
        """Nobody shares with a model that is gone."""
        self._pairs = {pair: choose for pair, choose in self._pairs.items() if name not in pair}

    def _known(self, role: str, name: str) -> str:
        known = (*self._family.names, *(self._family.elsewhere if role == "sender" else ()))
        if name not in known:
            raise ConfigError(f"{role}={name!r}: use one of {list(known)}")
        return name

    def refuse_unknown(self, receiver: str, sender: str) -> None:
        if (receiver, sender) not in self._pairs:
            known = [f"{r!r} from {s!r}" for r, s in self._pairs] or "no pairs"
            raise ConfigError(
                f"share='partial': {receiver!r} does not share with {sender!r} ({known}): "
                f"call engine.share({receiver!r}, {sender!r}, ...) first"
            )

    def choose(self, receiver: str, sender: str, call: Call) -> Pattern:
        """Which layers a receiver computes of a message that a sender encoded, as things are now."""
        self.refuse_unknown(receiver, sender)
        load = self.load._replace(own=len(call.tokens))
        pattern = read_pattern(self._pairs[receiver, sender](load)).check(len(self._store.arena.keys))
        self._events.write("shared", call=call.id, receiver=receiver, sender=sender, pattern=str(pattern))
        return pattern

    @property
    def load(self) -> Load:
        waiting, running = self._scheduler.waiting, self._scheduler.running
        layers = len(self._store.arena.keys)

        def weighed(tokens: int, call: Call) -> float:
            return tokens if call.layers is None else tokens * len(call.layers) / layers

        left = sum(weighed(len(c.tokens), c) for c in waiting)
        left += sum(weighed(len(c.work.tokens) - c.work.encoded, c) for c in running)
        return Load(len(waiting), len(running), left)

    def prepare(self, call: Call) -> None:
        """A call that was to begin from what is not there is computed whole instead."""
        if call.layers is None or call.source is None:
            return
        sent = call.source.work
        missing = Pattern.of_layers(call.layers).transitions - sent.inputs
        why = f"no inputs of layers {sorted(missing)} were kept" if missing else ""
        if sent.absent - call.layers:
            why = f"layers {sorted(sent.absent - call.layers)} did not come"
        if sent.lost:
            why = "what the sender encoded is lost"
        if call.source.layers is not None:
            why = "what it begins from was computed in some layers only"
        arena = self._store.arena
        there = [len(call.prompt), *(len(p.work.tokens) for p in call.parents if p.work.layers is not None)]
        if not call.layers <= arena.band_layers or sum(map(arena.pages_for, there)) > arena.size(band=True):
            why = "there is no room for so much in these layers alone"
        if why:
            self._compute_whole(call, why)

    def mend(self, calls: Sequence[Call]) -> None:
        """What calls see in part of an encoding that is lost for good is computed whole, once more."""
        if not self._family.elsewhere:  # only what came from elsewhere can be lost
            return
        for parent in {id(p): p for call in calls for p in call.parents}.values():
            if any(view.encoding is not None and view.encoding.lost for view in parent.views):
                if parent.encoding is None:  # it waits already
                    continue
                self._store.let_go(parent.work, parent.message_holder)
                self._scheduler.wait_again(parent)
                if parent.model in self._family.elsewhere:
                    client = parent.salt.partition("\0")[2]
                    parent.model, parent.salt = BASE, f"{self._family.fingerprint(BASE)}\0{client}"
                self._compute_whole(parent, "what the sender encoded is lost")

    def _compute_whole(self, call: Call, why: str) -> None:
        call.layers = None
        self._events.write("recomputed", call=call.id, why=why)
