"""Agent tracking for eviction hints and prefetch (KVFlow §3.1 to §3.3).

The KV cache gets only numbers: the steps to the next use of each fixed entry, and the agents whose
other entries vary. Hints change which entries are in memory, never a result.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from ..api.call import PromptInput
from ..api.message import Message
from ..api.session import Session
from ..config import check_count
from ..errors import ConfigError, GraphError, InvalidRequestError, NotAMessageError
from ..events import Event
from ..features.agent_tags import RequestTag, tag_requests
from ..kv_cache.hints import EvictionHints
from ..messages.handle import MessageSlice, unwrap_slice
from ..namespace import Client
from ..request.request import Request
from .fixed_prefix import FixedPrefix, content_hashes
from .step_graph import UNREACHABLE, Progress, StepGraph, TransitionStats


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
    observed: set[int] = field(default_factory=set)  # ids of prefix-mode decodes whose fixed part was looked for

    @property
    def decodes(self) -> list[Request]:
        return [message._request for message in self.messages.values() if message.kind == "decode"]

    def context_hashes(self) -> dict[bytes, None]:
        """Return the content hashes of all parents of the decodes."""
        return content_hashes(parent for request in self.decodes for parent in request.parents)


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
        graph: declared dependencies of the agents; None: steps are learned from the turns. May be replaced
            at any time; what has run counts by the agents' names.
        learned: statistics to continue, which several workflows may share; None: new ones.
        prefetch: maximum concurrent loads for agents that may run next; 0: none.
        infer_fixed_prefix: if nothing is marked, treat content that an agent attended to in two
            consecutive turns as fixed.
        keep_varying: keep varying content that the next turns may read like a fixed part; without it, all varying
            content is evicted first (KVFlow §3.1), as always in prefix mode.
    """

    def __init__(
        self,
        session: Session,
        graph: StepGraph | None = None,
        *,
        learned: TransitionStats | None = None,
        prefetch: int = 4,
        infer_fixed_prefix: bool = True,
        keep_varying: bool = True,
    ) -> None:
        check_count(prefetch, "prefetch", 0)
        if learned is not None and not isinstance(learned, TransitionStats):
            raise ConfigError(f"learned={learned!r}: use TransitionStats()")
        session._check_open()
        self.session = session
        self._graph = _check_graph(graph)
        self.learned = TransitionStats() if learned is None else learned
        self.progress = Progress()
        self._max_prefetch = prefetch
        self._infer_fixed_prefix = infer_fixed_prefix
        self._keep_varying = keep_varying
        self._core = session.core
        self._turns: list[AgentTurn] = []
        self._num_finished_turns = 0
        self._fixed: dict[str, FixedPrefix] = {}  # by agent
        self._last_context: dict[bytes, None] = {}  # content hashes that the last finished turn attended to
        self._unread: dict[bytes, int] = {}  # content hashes that no later turn attended to; number of their turn
        self._client_steps: dict[str, float] | None = None  # as the client of the last turn gave them
        self._cached_steps: tuple[object, dict[str, float]] = None, {}  # what they were computed from
        self._agent_keys: dict[str, tuple[Client, str]] = {}  # of the agents with a fixed part
        self._closed = False
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
            self._core.prefetcher.update(self, (), 0)
            for turn in self._turns:
                for message_id in turn.unfinished:
                    self._core.events.unwatch(message_id)
        if self.close in self.session.on_close:
            self.session.on_close.remove(self.close)

    @property
    def graph(self) -> StepGraph | None:
        return self._graph

    @graph.setter
    def graph(self, graph: StepGraph | None) -> None:
        self._graph = _check_graph(graph)
        self._client_steps = None
        self._update_hints()

    @contextmanager
    def agent(self, name: str, *, steps: Mapping[str, float | None] | None = None) -> Iterator[Agent]:
        """Attribute the session's requests inside the block to an agent.

        Covers the block's own task or thread, and the tasks that it starts.

        Args:
            steps: steps to the next execution of every agent, None for never, as a client of a server
                sends them with a request (KVFlow §3.3). They replace those of the graph until a
                later turn brings others, or the graph is replaced.
        """
        if steps is not None:
            self._client_steps = _check_steps(steps)
        else:
            self._check_declared(name)
        turn = AgentTurn(name)
        self._turns.append(turn)
        if not self.progress.running or steps is not None:
            self._update_hints()

        def add_message(message: Message) -> None:
            request = message._request
            turn.messages[request.id] = message
            turn.unfinished.add(request.id)
            self._core.events.watch(request.id, partial(self._on_event, turn, request))
            if request.is_finished or self._closed:  # perhaps in another thread, before it was watched
                self._core.events.unwatch(request.id)
                turn.unfinished.discard(request.id)

        try:
            with tag_requests(RequestTag(self.session, (self.session._client, name), add_message)):
                yield Agent(self, name)
        finally:
            turn.is_open = False
            with self._core.lock:
                self._finish_turn(turn)
                self._update_hints()

    def set_steps(self, steps: Mapping[str, float | None]) -> None:
        """Replace the steps to the next execution of every agent."""
        self._client_steps = _check_steps(steps)
        self._update_hints()

    def mark_fixed(self, agent: str, messages: Iterable[Message | MessageSlice]) -> None:
        """Mark messages as the fixed part of an agent's prompt.

        The fixed part of a message of which a slice is marked ends with the slice.
        """
        self._check_declared(agent)
        if isinstance(messages, (Message, MessageSlice)):
            raise InvalidRequestError("messages is one message: put it into a list")
        marks = []
        for message in messages:
            if not isinstance(message, (Message, MessageSlice)):
                raise NotAMessageError(f"{message!r} is not a message: mark what prefill or decode returned")
            end = message.stop if isinstance(message, MessageSlice) else None
            marks.append((unwrap_slice(message)._request, end))
        with self._core.lock:
            for request, end in marks:
                self._fixed_prefix(agent).mark(request, end)

    def _fixed_prefix(self, agent: str) -> FixedPrefix:
        return self._fixed.setdefault(agent, FixedPrefix(self.session))

    def _check_declared(self, agent: str) -> None:
        if self.graph is not None and agent not in self.graph.dependencies:
            raise GraphError(f"agent {agent!r} is not declared; declared: {list(self.graph.agents)}")

    # -- progress -----------------------------------------------------------------------------------------

    def _on_event(self, turn: AgentTurn, request: Request, event: Event) -> None:
        """Process the admission or the end of a request of a turn."""
        if event.kind == "admitted":
            if not request.is_decode or turn.has_started:
                return
            with self._core.lock:
                self._start_turn(turn)
                self._update_hints()
            return
        self._core.events.unwatch(request.id)
        with self._core.lock:
            turn.unfinished.discard(request.id)
            self._observe_prompt(turn, request)
            if turn.is_open or turn.unfinished:
                entry = request.entry
                if entry is not None and entry.content_hash is not None and self._keep_varying and not self._closed:
                    self._core.cache_manager.hints.add_referenced(self, entry.content_hash, 1.0)
                return
            self._finish_turn(turn)
            self._update_hints()

    def _observe_prompt(self, turn: AgentTurn, request: Request) -> None:
        """Find the fixed part of a prefix-mode prompt in the prefix tree."""
        if request.mode == "prefix" and request.is_decode and request.id not in turn.observed:
            turn.observed.add(request.id)
            self._fixed_prefix(turn.agent).observe_prompt(request, infer=self._infer_fixed_prefix)

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
        for request in turn.decodes:
            self._observe_prompt(turn, request)
        self._start_turn(turn)
        self.progress.end(turn.agent)
        self._num_finished_turns += 1
        self._last_context = turn.context_hashes()
        made = content_hashes(message._request for message in turn.messages.values())
        self._unread |= dict.fromkeys(made, self._num_finished_turns)
        self._unread = {key: number for key, number in self._unread.items() if key not in self._last_context}
        self._fixed_prefix(turn.agent).finish_turn(turn.decodes, infer=self._infer_fixed_prefix)

    # -- hints --------------------------------------------------------------------------------------------

    @property
    def steps(self) -> dict[str, float]:
        """Steps to the next execution of every agent."""
        if self._client_steps is not None:
            return self._client_steps | {turn.agent: 0.0 for turn in self._turns}
        predictor = self._graph or self.learned
        version = predictor, self.learned.num_observed, self.progress.now
        if self._cached_steps[0] != version:
            self._cached_steps = version, predictor.steps(self.progress)
        steps = dict(self._cached_steps[1])
        if not self.progress.running:  # an open turn runs next
            for turn in self._turns:
                steps[turn.agent] = min(1.0, steps.get(turn.agent, UNREACHABLE))
        return steps

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of last prompts, from which fixed parts are inferred."""
        return sum(prefix.num_prompt_tokens for prefix in self._fixed.values())

    def _update_hints(self) -> None:
        if self._closed:
            return
        with self._core.lock:
            steps, expected = self.steps, dict[bytes, float]()
            for agent, prefix in self._fixed.items():
                keys = prefix.resolve() if prefix.keys is None else prefix.keys
                if keys and agent in steps:
                    self._agent_keys[agent] = self.session._client, agent
                    for key in keys:
                        expected[key] = min(steps[agent], expected.get(key, UNREACHABLE))
                else:
                    self._agent_keys.pop(agent, None)
            varying = self._ephemeral_hints() if self._keep_varying else {}
            hints = EvictionHints(expected, varying, frozenset(self._agent_keys.values()))
            manager = self._core.cache_manager
            manager.hints.update(self, hints)
            if self._max_prefetch and manager.offload_manager.tiers:
                next_keys = [key for key in expected if expected[key] <= 1]
                next_keys.sort(key=expected.__getitem__)  # those of running agents first
                self._core.prefetcher.update(self, next_keys, self._max_prefetch)
                if self._core.prefetcher.missing:
                    self._core.prefetch()

    def _ephemeral_hints(self) -> dict[bytes, float]:
        """Return the expected steps to the use of varying content.

        1 for content of open turns and of the last context. Content that no turn has attended to
        yet gets the number of turns it has waited, plus 1; it is removed when every agent could
        have had a turn.
        """
        hints, oldest = {}, self._num_finished_turns - len(self.progress.started) + 1
        for key, number in list(self._unread.items()):
            if number < oldest:
                del self._unread[key]
            else:
                hints[key] = self._num_finished_turns - number + 1.0
        for key in self._last_context:
            hints[key] = 1.0
        for turn in self._turns:
            for key in content_hashes(message._request for message in turn.messages.values()):
                hints[key] = 1.0
        return hints


def _check_graph(graph: StepGraph | None) -> StepGraph | None:
    if graph is not None and not isinstance(graph, StepGraph):
        raise GraphError(f"graph={graph!r}: use a StepGraph; StepGraph.read makes one of a dict or a YAML file")
    return graph


def _check_steps(steps: Mapping[str, float | None]) -> dict[str, float]:
    """Return steps as sent by a client, with infinity for None."""
    if not isinstance(steps, Mapping):
        raise GraphError(f"steps={steps!r}: map agents to steps")
    result = {}
    for agent, value in steps.items():
        number = UNREACHABLE if value is None else value
        if (
            not isinstance(agent, str)
            or isinstance(number, bool)
            or not isinstance(number, (int, float))
            or not number >= 0
        ):
            raise GraphError(
                f"steps of agent {agent!r}: {value!r}: use a name and a number from 0 on, or None for never"
            )
        result[agent] = float(number)
    return result
