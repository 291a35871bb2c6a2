"""Follows a workflow while it runs and tells the cache what is wanted soon. Owns the progress of one session's agents.

KVFlow, sections 3.1 to 3.3. The cache hears numbers only: how many steps away each fixed encoding is, and which groups
of encodings vary. What it is told never changes a result, only what is in memory when it is wanted.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ..config import check_count
from ..engine.message import Message, MessageSlice, unwrap_slice
from ..engine.request import Request
from ..engine.session import PromptInput, RequestTag, Session, tag_requests
from ..errors import ConfigError, GraphError, InvalidRequestError, NotAMessageError
from ..events import Event
from ..kv_cache.eviction import EvictionHints
from .step_graph import UNREACHABLE, Progress, StepGraph, TransitionStats

SPACE_EVENTS = (
    "loaded",
    "offloaded",
    "admitted",
    "finished",
    "failed",
    "cancelled",
    "released",
)  # there may be room now

FINISH_EVENTS = ("known", "finished", "failed", "cancelled")  # a decode is over with its last token


@dataclass(eq=False)
class AgentTurn:
    """One turn of an agent: the messages made in its block. It runs from its first admitted decode, since prefills of
    what is fixed wait for nobody, to the end of its last call."""

    agent: str
    messages: dict[int, Message] = field(default_factory=dict)
    unfinished: set[int] = field(default_factory=set)
    is_open: bool = True
    has_started: bool = False


class Agent:
    """One agent's turn: `with workflow.agent("planner") as planner`."""

    def __init__(self, workflow: "Workflow", name: str) -> None:
        self._workflow = workflow
        self.name = name

    def prefill_fixed(self, tokens: PromptInput, parents: Iterable[Message | MessageSlice] = ()) -> Message:
        """`Session.prefill` of a part of the agent's prompt that is the same every time."""
        message = self._workflow.session.prefill(tokens, parents)
        self.mark_fixed(message)
        return message

    def mark_fixed(self, *messages: Message | MessageSlice) -> None:
        """Says that messages are the fixed part of the agent's prompt."""
        self._workflow.mark_fixed(self.name, messages)


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
        learned: TransitionStats | None = None,
        prefetch: int = 4,
        infer_fixed_prefix: bool = True,
    ) -> None:
        check_count(prefetch, "prefetch", 0)
        _check_sources(graph, learned)
        session._check_open()
        self.session = session
        self.graph = graph
        self.learned = TransitionStats() if learned is None else learned
        self.progress = Progress()
        self._max_prefetch = prefetch
        self._infer_fixed_prefix = infer_fixed_prefix
        self._core = session._core
        self._kv_cache_manager = self._core.cache_manager
        self._marked_messages: dict[str, dict[int, Message]] = {}
        self._fixed_hashes: dict[str, dict[bytes, None]] = {}
        self._explicitly_marked: set[str] = set()  # agents whose fixed parts are marked
        self._previous_context: dict[str, dict[bytes, None]] = {}  # by an agent in its last turn
        self._last_context: dict[bytes, None] = {}  # in the turn that ended last
        self._not_yet_read: dict[bytes, int] = {}  # what was made and not seen yet, and in which turn
        self._num_finished_turns = 0
        self._prefetch_queue: list[bytes] = []  # fixed parts of agents one step away, the nearest first
        self._closed = False
        self._turns: list[AgentTurn] = []
        self._stop_listening = session.engine.events.subscribe(self._on_event)
        session.on_close.append(self.close)
        self._update_hints()

    def __enter__(self) -> "Workflow":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Takes back what the cache was told."""
        with self._core.lock:
            self._closed = True
            self._kv_cache_manager.hints.update(self, None)
        self._stop_listening()
        self._stop_listening = lambda: None
        if self.close in self.session.on_close:
            self.session.on_close.remove(self.close)

    @contextmanager
    def agent(self, name: str) -> Iterator[Agent]:
        """Calls of the session inside the block are this agent's: those of the same task or thread, and of the tasks
        that it starts."""
        self._check_declared(name)
        turn = AgentTurn(name)
        self._turns.append(turn)
        self._update_hints()
        try:
            with tag_requests(self._make_tag(turn)):
                yield Agent(self, name)
        finally:
            turn.is_open = False
            with self._core.lock:
                self._finish_turn(turn)
            self._update_hints()

    def _make_tag(self, turn: AgentTurn) -> RequestTag:
        def made(message: Message) -> None:
            with self._core.lock:  # its call may end in another thread
                turn.messages[message.id] = message
                if not message._request.is_finished:
                    turn.unfinished.add(message.id)

        return RequestTag(self.session, (self.session.client_id, turn.agent), made)

    def _check_declared(self, agent: str) -> None:
        if self.graph is not None and agent not in self.graph.dependencies:
            raise GraphError(f"agent {agent!r} is not declared; declared: {list(self.graph.agents)}")

    def mark_fixed(self, agent: str, messages: Iterable[Message | MessageSlice]) -> None:
        """Says that messages, of which a part means all, are the fixed part of an agent's prompt."""
        self._check_declared(agent)
        fixed = _unwrap_messages(messages)
        with self._core.lock:
            for message in fixed:
                self._marked_messages.setdefault(agent, {})[message.id] = message

    # -- what runs ----------------------------------------------------------------------------------------

    def _on_event(self, event: Event) -> None:
        request: Any = event.data.get("call")
        with self._core.lock:
            turn = next((t for t in self._turns if request in t.unfinished), None)
            if turn is None or event.kind not in ("admitted", *FINISH_EVENTS):
                if event.kind in SPACE_EVENTS:
                    self._prefetch()
                return
            if event.kind == "admitted":
                if turn.messages[request].kind == "decode":
                    self._start(turn)
            else:
                turn.unfinished.discard(request)
                self._finish_turn(turn)
        self._update_hints()

    def _start(self, turn: AgentTurn) -> None:
        if turn.has_started:
            return
        turn.has_started = True
        self.learned.observe(self.progress.last_started, turn.agent)
        self.progress.start(turn.agent)

    def _finish_turn(self, turn: AgentTurn) -> None:
        if turn.is_open or turn.unfinished or turn not in self._turns:
            return
        self._turns.remove(turn)
        self._start(turn)
        self.progress.end(turn.agent)
        self._num_finished_turns += 1
        self._last_context = _context_hashes(turn)
        self._not_yet_read |= dict.fromkeys(_content_hashes(turn.messages.values()), self._num_finished_turns)
        self._not_yet_read = {key: made for key, made in self._not_yet_read.items() if key not in self._last_context}
        self._update_fixed_prefix(turn)

    def _update_fixed_prefix(self, turn: AgentTurn) -> None:
        """Keeps what is fixed by name, since messages go: what was marked, or what was seen twice in a row, as long as
        the agent goes on to see it."""
        marked = _content_hashes(self._marked_messages.pop(turn.agent, {}).values())
        seen = _context_hashes(turn)
        known = {**self._fixed_hashes.get(turn.agent, {}), **marked}
        if marked:
            self._explicitly_marked.add(turn.agent)
        if self._infer_fixed_prefix and turn.agent not in self._explicitly_marked:
            known |= {k: None for k in seen if k in self._previous_context.get(turn.agent, {})}
        if any(m.kind == "decode" for m in turn.messages.values()):
            known = {k: None for k in known if k in seen or k in marked}
            self._previous_context[turn.agent] = seen
        self._fixed_hashes[turn.agent] = known

    # -- what the cache is told ---------------------------------------------------------------------------

    @property
    def steps(self) -> dict[str, float]:
        """Steps to the next execution of every agent, as known now."""
        source: Any = self.graph or self.learned
        steps = source.steps(self.progress)
        if not self.progress.running:  # a turn that was begun is what comes next
            for turn in self._turns:
                steps[turn.agent] = min(1.0, steps.get(turn.agent, UNREACHABLE))
        return steps

    def fixed_prefix_hashes(self, agent: str) -> list[bytes]:
        """Names of the encodings that are an agent's fixed part."""
        return list(
            {**self._fixed_hashes.get(agent, {}), **_content_hashes(self._marked_messages.get(agent, {}).values())}
        )

    def _update_hints(self) -> None:
        if self._closed:
            return
        with self._core.lock:
            steps = self.steps
            expected: dict[bytes, float] = {}
            groups = set()
            for agent, value in steps.items():
                for key in self.fixed_prefix_hashes(agent):
                    expected[key] = min(value, expected.get(key, UNREACHABLE))
                    groups.add((self.session.client_id, agent))
            self._prefetch_queue = sorted(
                (key for key, value in expected.items() if value <= 1), key=lambda key: expected[key]
            )
            self._kv_cache_manager.hints.update(
                self, EvictionHints(expected, self._ephemeral_hints(), frozenset(groups))
            )
        self._prefetch()

    def _ephemeral_hints(self) -> dict[bytes, float]:
        """Of what varies: what a turn makes it will read, what was just seen may be seen again, and what was made and
        not read yet will be, the less likely the longer that has been so."""
        ages = {key: self._num_finished_turns - made + 1.0 for key, made in self._not_yet_read.items()}
        self._not_yet_read = {
            key: made for key, made in self._not_yet_read.items() if ages[key] <= len(self.progress.started)
        }
        made = (key for turn in self._turns for key in _content_hashes(turn.messages.values()))
        return {key: ages[key] for key in self._not_yet_read} | dict.fromkeys((*self._last_context, *made), 1.0)

    def _prefetch(self) -> None:
        """Loads for every agent that may run next, the nearest first; nothing while a call waits for room."""
        with self._core.lock:
            if self._closed or not self._max_prefetch or self._core.scheduler.blocked_on_memory:
                return
            for key in self._prefetch_queue:
                self._kv_cache_manager.prefetch(key, self._max_prefetch)


def _check_sources(graph: object, learned: object) -> None:
    if graph is not None and not isinstance(graph, StepGraph):
        raise GraphError(f"graph={graph!r}: use a StepGraph; StepGraph.read makes one of a dict or a YAML file")
    if learned is not None and not isinstance(learned, TransitionStats):
        raise ConfigError(f"learned={learned!r}: use TransitionStats()")


def _unwrap_messages(messages: Iterable[Message | MessageSlice]) -> list[Message]:
    if isinstance(messages, (Message, MessageSlice)):
        raise InvalidRequestError("messages is one message: put it into a list")
    result = [unwrap_slice(one) for one in messages]
    for one in result:
        if not isinstance(one, Message):
            raise NotAMessageError(f"{one!r} is not a message: mark what prefill or decode gave")
    return result


def _context_hashes(turn: AgentTurn) -> dict[bytes, None]:
    """What the decodes of a turn saw."""
    decodes = (m for m in turn.messages.values() if m.kind == "decode")
    return _request_hashes(parent for m in decodes for parent in m._request.parents)


def _content_hashes(messages: Iterable[Message]) -> dict[bytes, None]:
    return _request_hashes(message._request for message in messages)


def _request_hashes(requests: Iterable[Request]) -> dict[bytes, None]:
    """Names of encodings, in order; what was not admitted has none."""
    entries = (request.entry for request in requests)
    return {e.content_hash: None for e in entries if e is not None and e.content_hash is not None}
