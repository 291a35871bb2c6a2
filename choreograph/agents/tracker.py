"""Agent tracking for eviction hints and prefetch (KVFlow §3.1 to §3.3).

The KV cache gets only numbers: the steps to the next use of each fixed entry, and the agents whose
other entries vary. Hints change which entries are in memory, never a result.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ..config import check_count
from ..engine.message import Message, MessageSlice, unwrap_slice
from ..engine.request import Request, RequestTag, tag_requests
from ..engine.session import PromptInput, Session
from ..errors import ConfigError, GraphError, InvalidRequestError, NotAMessageError
from ..events import Event
from ..kv_cache.eviction import EvictionHints
from .step_graph import UNREACHABLE, Progress, StepGraph, TransitionStats

SPACE_EVENTS = {"loaded", "offloaded", "admitted", "finished", "failed", "cancelled", "released"}  # may free capacity
FINISH_EVENTS = {"generated", "finished", "failed", "cancelled"}  # a decode ends with its last token


@dataclass(eq=False)
class AgentTurn:
    """One turn of an agent: the messages submitted in its block.

    A turn starts when its first decode is admitted, since prefills of fixed messages do not depend
    on other agents. It ends with its last request.
    """

    agent: str
    messages: dict[int, Message] = field(default_factory=dict)  # by id
    unfinished: set[int] = field(default_factory=set)  # ids of messages
    is_open: bool = True  # the block is still running
    has_started: bool = False

    @property
    def decodes(self) -> list[Request]:
        return [message._request for message in self.messages.values() if message.kind == "decode"]

    def context_hashes(self) -> dict[bytes, None]:
        """Return the content hashes of all parents of the decodes."""
        return _content_hashes(parent for request in self.decodes for parent in request.parents)


@dataclass
class FixedPrefix:
    """Content of an agent's prompt that is the same in every turn."""

    marked: dict[int, Message] = field(default_factory=dict)  # marked since the last turn, by id
    hashes: dict[bytes, None] = field(default_factory=dict)  # content hashes, which outlive the messages
    is_explicit: bool = False  # messages were marked, so nothing is inferred
    last_context: dict[bytes, None] = field(default_factory=dict)  # content hashes of the last turn's context

    def all_hashes(self) -> dict[bytes, None]:
        return self.hashes | _content_hashes(message._request for message in self.marked.values())

    def update(self, turn: AgentTurn, infer: bool) -> None:
        """Update the fixed content after a turn.

        Adds marked content. If nothing was ever marked and `infer` is set, adds content that this
        turn and the previous one attended to. A turn with decodes removes older content that it did
        not attend to.
        """
        context = turn.context_hashes()
        marked = _content_hashes(message._request for message in self.marked.values())
        self.marked, self.is_explicit = {}, self.is_explicit or bool(marked)
        self.hashes |= marked
        if infer and not self.is_explicit:
            self.hashes |= {key: None for key in context if key in self.last_context}
        if turn.decodes:
            self.hashes = {key: None for key in self.hashes if key in context or key in marked}
            self.last_context = context


class Agent:
    """Handle of one agent's turn: `with workflow.agent("planner") as planner`."""

    def __init__(self, workflow: "Workflow", name: str) -> None:
        self._workflow = workflow
        self.name = name

    def prefill_fixed(self, tokens: PromptInput, parents: Iterable[Message | MessageSlice] = ()) -> Message:
        """Prefill a fixed part of the agent's prompt, as `Session.prefill`."""
        message = self._workflow.session.prefill(tokens, parents)
        self.mark_fixed(message)
        return message

    def mark_fixed(self, *messages: Message | MessageSlice) -> None:
        """Mark messages as the fixed part of the agent's prompt."""
        self._workflow.mark_fixed(self.name, messages)


class Workflow:
    """The agents of one session.

    Args:
        graph: declared dependencies of the agents; None: steps are learned from the turns.
        learned: statistics to continue, which several workflows may share; None: new ones.
        prefetch: maximum concurrent loads for agents that may run next; 0: none.
        infer_fixed_prefix: if nothing is marked, treat content that an agent attended to in two
            consecutive turns as fixed.
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
        if graph is not None and not isinstance(graph, StepGraph):
            raise GraphError(f"graph={graph!r}: use a StepGraph; StepGraph.read makes one of a dict or a YAML file")
        if learned is not None and not isinstance(learned, TransitionStats):
            raise ConfigError(f"learned={learned!r}: use TransitionStats()")
        session._check_open()
        self.session = session
        self.graph = graph
        self.learned = TransitionStats() if learned is None else learned
        self.progress = Progress()
        self._max_prefetch = prefetch
        self._infer_fixed_prefix = infer_fixed_prefix
        self._core = session._core
        self._turns: list[AgentTurn] = []
        self._num_finished_turns = 0
        self._fixed: defaultdict[str, FixedPrefix] = defaultdict(FixedPrefix)  # by agent
        self._last_context: dict[bytes, None] = {}  # content hashes that the last finished turn attended to
        self._unread: dict[bytes, int] = {}  # content hashes that no later turn attended to; number of their turn
        self._prefetch_queue: list[bytes] = []  # fixed content of agents at most one step away, the nearest first
        self._closed = False
        self._unsubscribe = session.engine.events.subscribe(self._on_event)
        session.on_close.append(self.close)
        self._update_hints()

    def __enter__(self) -> "Workflow":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the workflow's eviction hints and stop tracking its requests."""
        with self._core.lock:
            self._closed = True
            self._core.cache_manager.hints.update(self, None)
        self._unsubscribe()
        self._unsubscribe = lambda: None
        if self.close in self.session.on_close:
            self.session.on_close.remove(self.close)

    @contextmanager
    def agent(self, name: str) -> Iterator[Agent]:
        """Attribute the session's requests inside the block to an agent.

        Covers the block's own task or thread, and the tasks that it starts.
        """
        self._check_declared(name)
        turn = AgentTurn(name)
        self._turns.append(turn)
        self._update_hints()

        def add_message(message: Message) -> None:
            with self._core.lock:  # the request may end in another thread
                turn.messages[message.id] = message
                if not message._request.is_finished:
                    turn.unfinished.add(message.id)

        try:
            with tag_requests(RequestTag(self.session, (self.session.client_id, name), add_message)):
                yield Agent(self, name)
        finally:
            turn.is_open = False
            with self._core.lock:
                self._finish_turn(turn)
            self._update_hints()

    def mark_fixed(self, agent: str, messages: Iterable[Message | MessageSlice]) -> None:
        """Mark messages as the fixed part of an agent's prompt.

        A slice marks its whole message.
        """
        self._check_declared(agent)
        if isinstance(messages, (Message, MessageSlice)):
            raise InvalidRequestError("messages is one message: put it into a list")
        fixed = [unwrap_slice(message) for message in messages]
        for message in fixed:
            if not isinstance(message, Message):
                raise NotAMessageError(f"{message!r} is not a message: mark what prefill or decode returned")
        with self._core.lock:
            self._fixed[agent].marked |= {message.id: message for message in fixed}

    def _check_declared(self, agent: str) -> None:
        if self.graph is not None and agent not in self.graph.dependencies:
            raise GraphError(f"agent {agent!r} is not declared; declared: {list(self.graph.agents)}")

    # -- progress -----------------------------------------------------------------------------------------

    def _on_event(self, event: Event) -> None:
        request: Any = event.data.get("request")
        with self._core.lock:
            turn = next((turn for turn in self._turns if request in turn.unfinished), None)
            if turn is None or event.kind not in {"admitted", *FINISH_EVENTS}:
                if event.kind in SPACE_EVENTS:
                    self._prefetch()
                return
            if event.kind in FINISH_EVENTS:
                turn.unfinished.discard(request)
                self._finish_turn(turn)
            elif turn.messages[request].kind == "decode":
                self._start_turn(turn)
        self._update_hints()

    def _start_turn(self, turn: AgentTurn) -> None:
        if not turn.has_started:
            turn.has_started = True
            self.learned.observe(self.progress.last_started, turn.agent)
            self.progress.start(turn.agent)

    def _finish_turn(self, turn: AgentTurn) -> None:
        """Record the end of a turn once block and requests have ended."""
        if turn.is_open or turn.unfinished or turn not in self._turns:
            return
        self._turns.remove(turn)
        self._start_turn(turn)
        self.progress.end(turn.agent)
        self._num_finished_turns += 1
        self._last_context = turn.context_hashes()
        made = _content_hashes(message._request for message in turn.messages.values())
        self._unread |= dict.fromkeys(made, self._num_finished_turns)
        self._unread = {key: number for key, number in self._unread.items() if key not in self._last_context}
        self._fixed[turn.agent].update(turn, self._infer_fixed_prefix)

    # -- hints --------------------------------------------------------------------------------------------

    @property
    def steps(self) -> dict[str, float]:
        """Steps to the next execution of every agent."""
        source = self.graph or self.learned
        steps = source.steps(self.progress)
        if not self.progress.running:  # an open turn runs next
            for turn in self._turns:
                steps[turn.agent] = min(1.0, steps.get(turn.agent, UNREACHABLE))
        return steps

    def fixed_prefix_hashes(self, agent: str) -> list[bytes]:
        """Content hashes of an agent's fixed entries."""
        return list(self._fixed[agent].all_hashes())

    def _update_hints(self) -> None:
        if self._closed:
            return
        with self._core.lock:
            expected: dict[bytes, float] = {}
            agents = set()
            for agent, steps in self.steps.items():
                for key in self.fixed_prefix_hashes(agent):
                    expected[key] = min(steps, expected.get(key, UNREACHABLE))
                    agents.add((self.session.client_id, agent))
            self._prefetch_queue = sorted(
                (key for key in expected if expected[key] <= 1), key=lambda key: expected[key]
            )
            hints = EvictionHints(expected, self._ephemeral_hints(), frozenset(agents))
            self._core.cache_manager.hints.update(self, hints)
        self._prefetch()

    def _ephemeral_hints(self) -> dict[bytes, float]:
        """Return the expected steps to the use of varying content.

        1 for content of open turns and of the last context. Content that no turn has attended to
        yet gets the number of turns it has waited, plus 1; it is removed when every agent could
        have had a turn.
        """
        ages = {key: self._num_finished_turns - number + 1.0 for key, number in self._unread.items()}
        self._unread = {key: n for key, n in self._unread.items() if ages[key] <= len(self.progress.started)}
        messages = (message for turn in self._turns for message in turn.messages.values())
        next_used = self._last_context | _content_hashes(message._request for message in messages)
        return {key: ages[key] for key in self._unread} | dict.fromkeys(next_used, 1.0)

    def _prefetch(self) -> None:
        """Load fixed content of agents that may run next.

        Does nothing while a request waits for capacity.
        """
        with self._core.lock:
            if self._closed or not self._max_prefetch or self._core.scheduler.blocked_on_memory:
                return
            for key in self._prefetch_queue:
                self._core.cache_manager.prefetch(key, self._max_prefetch)


def _content_hashes(requests: Iterable[Request]) -> dict[bytes, None]:
    """Return the unique content hashes of admitted requests, in order."""
    entries = (request.entry for request in requests)
    return {e.content_hash: None for e in entries if e is not None and e.content_hash is not None}
