"""Follows a workflow while it runs and tells the cache what is wanted soon. Owns the progress of one session's agents.

KVFlow, sections 3.1 to 3.3. The cache hears numbers only: how many steps away each fixed encoding is, and which groups
of encodings vary. What it is told never changes a result, only what is in memory when it is wanted.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ..config import check_count
from ..engine.call import Call
from ..errors import CallError, ConfigError, GraphError, UnknownMessage
from ..events import Event
from ..kv.advice import Advice
from ..makers import Maker, making
from ..message import Message, Part, whole
from ..session import Session, Text
from .graph import NEVER, Progress, StepGraph
from .learned import LearnedSteps

ROOM = ("loaded", "offloaded", "admitted", "finished", "failed", "cancelled", "released")  # there may be room now
ENDS = ("known", "finished", "failed", "cancelled")  # a decode is over with its last token


@dataclass(eq=False)
class Activation:
    """One turn of an agent: the messages made in its block. It runs from its first admitted decode, since prefills of
    what is fixed wait for nobody, to the end of its last call."""

    agent: str
    messages: dict[int, Message] = field(default_factory=dict)
    unfinished: set[int] = field(default_factory=set)
    open: bool = True
    started: bool = False


class Agent:
    """One agent's turn: `with workflow.agent("planner") as planner`."""

    def __init__(self, workflow: "Workflow", name: str) -> None:
        self._workflow = workflow
        self.name = name

    def fixed(self, tokens: Text, parents: Iterable[Message | Part] = ()) -> Message:
        """`Session.prefill` of a part of the agent's prompt that is the same every time."""
        message = self._workflow.session.prefill(tokens, parents)
        self.mark(message)
        return message

    def mark(self, *messages: Message | Part) -> None:
        """Says that messages are the fixed part of the agent's prompt."""
        self._workflow.mark(self.name, messages)


class Workflow:
    """The agents of one session. graph: declared; without one, steps are learned from what runs.

    prefetch: how many loads for agents that may run next go on at once; 0: none. guess_fixed: take what an agent saw in
    two turns in a row for its fixed part where nothing is marked.
    """

    def __init__(
        self,
        session: Session,
        graph: StepGraph | None = None,
        *,
        learned: LearnedSteps | None = None,
        prefetch: int = 4,
        guess_fixed: bool = True,
    ) -> None:
        check_count(prefetch, "prefetch", 0)
        _check_sources(graph, learned)
        session._check_open()
        self.session = session
        self.graph = graph
        self.learned = LearnedSteps() if learned is None else learned
        self.progress = Progress()
        self._limit = prefetch
        self._guess = guess_fixed
        self._runner = session._runner
        self._store = self._runner.store
        self._marked: dict[str, dict[int, Message]] = {}
        self._fixed: dict[str, dict[bytes, None]] = {}
        self._told: set[str] = set()  # agents whose fixed parts are marked
        self._seen: dict[str, dict[bytes, None]] = {}  # by an agent in its last turn
        self._just_seen: dict[bytes, None] = {}  # in the turn that ended last
        self._unread: dict[bytes, int] = {}  # what was made and not seen yet, and in which turn
        self._ended = 0
        self._next: list[bytes] = []  # fixed parts of agents one step away, the nearest first
        self._closed = False
        self._turns: list[Activation] = []
        self._stop_listening = session.engine.events.listen(self._hear)
        session.on_close.append(self.close)
        self._refresh()

    def __enter__(self) -> "Workflow":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Takes back what the cache was told."""
        with self._runner.lock:
            self._closed = True
            self._store.counsel.take(self, None)
        self._stop_listening()
        self._stop_listening = lambda: None
        if self.close in self.session.on_close:
            self.session.on_close.remove(self.close)

    @contextmanager
    def agent(self, name: str) -> Iterator[Agent]:
        """Calls of the session inside the block are this agent's: those of the same task or thread, and of the tasks
        that it starts."""
        self._check_declared(name)
        turn = Activation(name)
        self._turns.append(turn)
        self._refresh()
        try:
            with making(self._maker(turn)):
                yield Agent(self, name)
        finally:
            turn.open = False
            with self._runner.lock:
                self._end_if_over(turn)
            self._refresh()

    def _maker(self, turn: Activation) -> Maker:
        def made(message: Message) -> None:
            with self._runner.lock:  # its call may end in another thread
                turn.messages[message.id] = message
                if not message._call.ended:
                    turn.unfinished.add(message.id)

        return Maker(self.session, (self.session.client_id, turn.agent), made)

    def _check_declared(self, agent: str) -> None:
        if self.graph is not None and agent not in self.graph.waits:
            raise GraphError(f"agent {agent!r} is not declared; declared: {list(self.graph.agents)}")

    def mark(self, agent: str, messages: Iterable[Message | Part]) -> None:
        """Says that messages, of which a part means all, are the fixed part of an agent's prompt."""
        self._check_declared(agent)
        fixed = _whole_messages(messages)
        with self._runner.lock:
            for message in fixed:
                self._marked.setdefault(agent, {})[message.id] = message

    # -- what runs ----------------------------------------------------------------------------------------

    def _hear(self, event: Event) -> None:
        call: Any = event.facts.get("call")
        with self._runner.lock:
            turn = next((t for t in self._turns if call in t.unfinished), None)
            if turn is None or event.kind not in ("admitted", *ENDS):
                if event.kind in ROOM:
                    self._prefetch()
                return
            if event.kind == "admitted":
                if turn.messages[call].kind == "decode":
                    self._start(turn)
            else:
                turn.unfinished.discard(call)
                self._end_if_over(turn)
        self._refresh()

    def _start(self, turn: Activation) -> None:
        if turn.started:
            return
        turn.started = True
        self.learned.saw(self.progress.last, turn.agent)
        self.progress.start(turn.agent)

    def _end_if_over(self, turn: Activation) -> None:
        if turn.open or turn.unfinished or turn not in self._turns:
            return
        self._turns.remove(turn)
        self._start(turn)
        self.progress.end(turn.agent)
        self._ended += 1
        self._just_seen = _seen_in(turn)
        self._unread |= dict.fromkeys(_keys(turn.messages.values()), self._ended)
        self._unread = {key: made for key, made in self._unread.items() if key not in self._just_seen}
        self._learn_fixed(turn)

    def _learn_fixed(self, turn: Activation) -> None:
        """Keeps what is fixed by name, since messages go: what was marked, or what was seen twice in a row, as long as
        the agent goes on to see it."""
        marked = _keys(self._marked.pop(turn.agent, {}).values())
        seen = _seen_in(turn)
        known = {**self._fixed.get(turn.agent, {}), **marked}
        if marked:
            self._told.add(turn.agent)
        if self._guess and turn.agent not in self._told:
            known |= {k: None for k in seen if k in self._seen.get(turn.agent, {})}
        if any(m.kind == "decode" for m in turn.messages.values()):
            known = {k: None for k in known if k in seen or k in marked}
            self._seen[turn.agent] = seen
        self._fixed[turn.agent] = known

    # -- what the cache is told ---------------------------------------------------------------------------

    @property
    def steps(self) -> dict[str, float]:
        """Steps to the next execution of every agent, as known now."""
        source: Any = self.graph or self.learned
        steps = source.steps(self.progress)
        if not self.progress.running:  # a turn that was begun is what comes next
            for turn in self._turns:
                steps[turn.agent] = min(1.0, steps.get(turn.agent, NEVER))
        return steps

    def fixed_of(self, agent: str) -> list[bytes]:
        """Names of the encodings that are an agent's fixed part."""
        return list({**self._fixed.get(agent, {}), **_keys(self._marked.get(agent, {}).values())})

    def _refresh(self) -> None:
        if self._closed:
            return
        with self._runner.lock:
            steps = self.steps
            wanted: dict[bytes, float] = {}
            groups = set()
            for agent, value in steps.items():
                for key in self.fixed_of(agent):
                    wanted[key] = min(value, wanted.get(key, NEVER))
                    groups.add((self.session.client_id, agent))
            self._next = sorted((key for key, value in wanted.items() if value <= 1), key=lambda key: wanted[key])
            self._store.counsel.take(self, Advice(wanted, self._likely(), frozenset(groups)))
        self._prefetch()

    def _likely(self) -> dict[bytes, float]:
        """Of what varies: what a turn makes it will read, what was just seen may be seen again, and what was made and
        not read yet will be, the less likely the longer that has been so."""
        ages = {key: self._ended - made + 1.0 for key, made in self._unread.items()}
        self._unread = {key: made for key, made in self._unread.items() if ages[key] <= len(self.progress.started)}
        made = (key for turn in self._turns for key in _keys(turn.messages.values()))
        return {key: ages[key] for key in self._unread} | dict.fromkeys((*self._just_seen, *made), 1.0)

    def _prefetch(self) -> None:
        """Loads for every agent that may run next, the nearest first; nothing while a call waits for room."""
        with self._runner.lock:
            if self._closed or not self._limit or self._runner.scheduler.short:
                return
            for key in self._next:
                self._store.prefetch(key, self._limit)


def _check_sources(graph: object, learned: object) -> None:
    if graph is not None and not isinstance(graph, StepGraph):
        raise GraphError(f"graph={graph!r}: use a StepGraph; StepGraph.read makes one of a dict or a YAML file")
    if learned is not None and not isinstance(learned, LearnedSteps):
        raise ConfigError(f"learned={learned!r}: use LearnedSteps()")


def _whole_messages(given: Iterable[Message | Part]) -> list[Message]:
    if isinstance(given, (Message, Part)):
        raise CallError("messages is one message: put it into a list")
    found = [whole(one) for one in given]
    for one in found:
        if not isinstance(one, Message):
            raise UnknownMessage(f"{one!r} is not a message: mark what prefill or decode gave")
    return found


def _seen_in(turn: Activation) -> dict[bytes, None]:
    """What the decodes of a turn saw."""
    decodes = (m for m in turn.messages.values() if m.kind == "decode")
    return _names(parent for m in decodes for parent in m._call.parents)


def _keys(messages: Iterable[Message]) -> dict[bytes, None]:
    return _names(message._call for message in messages)


def _names(calls: Iterable[Call]) -> dict[bytes, None]:
    """Names of encodings, in order; what was not admitted has none."""
    encodings = (call.encoding for call in calls)
    return {e.key: None for e in encodings if e is not None and e.key is not None}
