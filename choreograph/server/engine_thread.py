"""Engine thread, and its connection to the event loop.

Requests enter by a queue that is read between steps. After each step, all new text is handed to the
event loop in one call, so the loop wakes up once a step however many requests run.
"""

import asyncio
import gc
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from ..api.engine import Engine
from ..api.message import Message
from ..errors import RequestFailedError, SessionClosedError
from ..kv_cache.manager import POLL_SECONDS
from ..outputs import FinishReason, Timing, TokenLogprob
from ..request.request import RequestState
from ..utils import as_exception, call_all, freeze_objects

T = TypeVar("T")

QUIET_TURNS = 8  # of the event loop without a request, more than it needs to read and submit one
GATHER_SECONDS = 0.05  # limit of these turns

CPU_PREFILL_TOKENS = 192  # of a step that also decodes, which delays streams by a quarter of a second

LINGER_SECONDS = 0.05  # that the KV of the last tokens of answers may wait for a next request


@dataclass(slots=True)
class ChoiceUpdate:
    """What a step added to one answer."""

    index: int  # of the answer in its request
    text: str  # new text
    token_ids: list[int]  # new tokens
    logprobs: list[TokenLogprob]  # of these tokens, if requested
    finish_reason: FinishReason | None = None  # set in the last update
    timing: Timing | None = None  # set in the last update
    # of the prompt's tokens, in the first update, if requested; the first one is None
    prompt_logprobs: list[TokenLogprob | None] | None = None


class UpdateQueue:
    """Updates of one request for one reader, in the event loop.

    Cheaper than `asyncio.Queue`: every token passes it.
    """

    def __init__(self) -> None:
        self._items: deque[list[ChoiceUpdate] | Exception] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put_nowait(self, updates: list[ChoiceUpdate] | Exception) -> None:
        self._items.append(updates)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> list[ChoiceUpdate] | Exception:
        """Return all updates that wait, before an error, or wait for some."""
        items = self._items
        if not items:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        result = items.popleft()
        if not isinstance(result, Exception):
            while items and not isinstance(following := items[0], Exception):  # the client reads slowly
                result = result + following
                items.popleft()
        return result


@dataclass(eq=False)
class Generation:
    """Answers of one request, and their updates for the event loop."""

    submit: Callable[[], Sequence[Message]]  # runs in the engine's thread; returns one decode an answer
    close: Callable[[bool], object]  # runs there at the end, with whether all answers are complete
    updates: UpdateQueue = field(default_factory=UpdateQueue)
    messages: Sequence[Message] = ()
    num_sent: list[tuple[int, int]] = field(default_factory=list)  # (characters, tokens) of every answer
    open_choices: set[int] = field(default_factory=set)  # answers that are not complete

    def collect(self) -> list[ChoiceUpdate]:
        """Return what was generated since the last call; raise an answer's error."""
        updates = []
        for index in sorted(self.open_choices):
            message = self.messages[index]
            if message.error is not None:
                raise message.error
            num_chars, num_tokens = self.num_sent[index]
            text, token_ids, logprobs, is_final = message.progress(num_chars, num_tokens)
            self.num_sent[index] = num_chars + len(text), num_tokens + len(token_ids)
            if is_final:
                self.open_choices.discard(index)
                updates.append(ChoiceUpdate(index, text, token_ids, logprobs, message.finish_reason, message.timing))
            elif token_ids:
                updates.append(ChoiceUpdate(index, text, token_ids, logprobs))
            if not num_tokens and (is_final or token_ids):
                updates[-1].prompt_logprobs = message.prompt_logprobs
        return updates


def load_engine(open_engine: Callable[[], Engine]) -> Engine:
    """Load an engine and capture its CUDA graphs, in a thread that ends.

    The OpenMP threads of the loading thread end with it. Otherwise there would be more of them than cores, and
    libgomp would let those of the engine's thread sleep after every kernel. What was loaded stays: garbage collections
    that scanned it would stop all threads for a quarter of a second.
    """
    with ThreadPoolExecutor(1) as loader:
        engine = loader.submit(open_engine).result()
        loader.submit(engine.warm_up).result()
    gc.collect()
    freeze_objects()
    return engine


class EngineThread:
    """Owner of an engine: the only thread that steps it.

    Args:
        max_prefill_tokens: of a step that also decodes; None: as the engine's configuration says, on a CPU few.
    """

    def __init__(self, engine: Engine, max_prefill_tokens: int | None = None) -> None:
        self.engine, self._max_prefill_tokens = engine, max_prefill_tokens
        self.num_generations = 0  # submitted and not ended, as the event loop knows
        self._inbox: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._active: dict[Generation, None] = {}  # in order of submission
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._is_stopping = False
        self._has_caller = False  # that goes on before the next step; set and read in the engine's thread

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive() and not self._is_stopping

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start stepping; updates are delivered in `loop`."""
        self._loop = loop
        self._limit_prefills()
        self._thread.start()

    def _limit_prefills(self) -> None:
        """Bound the delay of streams by the prompts of others."""
        scheduler, limit = self.engine.core.scheduler, self._max_prefill_tokens
        if limit is None and scheduler.max_num_prefill_tokens is None and self.engine.model_info.device.type == "cpu":
            limit = CPU_PREFILL_TOKENS
        if limit is not None:
            scheduler.max_num_prefill_tokens = limit

    async def stop(self) -> None:
        """End all generations and the thread."""
        self._is_stopping = True
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)

    # -- for the event loop ---------------------------------------------------------------------------------

    def submit(self, generation: Generation) -> None:
        """Start a generation before the next step."""
        if not self.is_running:
            raise SessionClosedError("the server is shutting down: send the request to another one")
        self.num_generations += 1
        self._inbox.put(lambda: self._submit(generation))

    def cancel(self, generation: Generation) -> None:
        """End a generation before the next step, unless it has ended."""
        self._inbox.put(lambda: self._end(generation, RequestFailedError("the request was cancelled")))

    def defer(self, function: Callable[[], object]) -> None:
        """Run a function before the next step; its errors are dropped."""
        self._inbox.put(partial(call_all, [function]))

    async def call(self, function: Callable[[], T], *, gather: bool = False) -> T:
        """Run a function between two steps and return its result.

        Args:
            gather: let the caller go on before the next step, so that what it submits shares that.
        """
        if not self.is_running:
            raise SessionClosedError("the server is shutting down: send the request to another one")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def finish(result: T | None, exc: Exception | None) -> None:
            if future.done():  # the caller was cancelled
                return
            if exc is not None:
                future.set_exception(exc)
            else:
                future.set_result(result)  # type: ignore[arg-type]

        def run() -> None:
            self._has_caller |= gather
            try:
                result = function()
            except BaseException as exc:
                loop.call_soon_threadsafe(finish, None, as_exception(exc))
            else:
                loop.call_soon_threadsafe(finish, result, None)

        self._inbox.put(run)
        return await future

    # -- the engine's thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        core, timeout, has_first_text = self.engine.core, 0.0, False
        while True:
            is_idle = not self._active and not core.scheduler.num_unfinished
            linger = self._linger_seconds()
            if not self._handle_inbox(None if is_idle else max(timeout, linger)):
                break
            if (is_idle or linger or has_first_text or self._has_caller) and not self._gather():
                break
            had_pending = core.cache_manager.has_pending  # before the step, which polls transfers and may start others
            try:
                has_stepped = core.step(wait=False)
            except BaseException as exc:  # no request's fault: all of them end with it
                for generation in list(self._active):
                    self._end(generation, as_exception(exc))
                timeout, has_first_text = POLL_SECONDS, False  # it may raise again
                continue
            timeout = 0.0 if has_stepped else POLL_SECONDS
            has_first_text = self._deliver()
            if not (has_stepped or had_pending or core.cache_manager.has_pending):
                for generation in list(self._active):
                    self._end(
                        generation, RequestFailedError("the request cannot run: nothing can be computed any more")
                    )
        for generation in list(self._active):
            self._end(generation, SessionClosedError("the server is shutting down: send the request to another one"))

    def _gather(self) -> bool:
        """Let the event loop finish what it is doing.

        Before a first step, it reads what arrives together with the first request, to share that step; after the first
        text of an answer, it sends that; after a call with `gather`, it submits what follows. Waits in turns of the
        loop; an idle loop's take microseconds.

        Returns:
            False if the thread has to end.
        """
        self._has_caller, num_quiet, end = False, 0, time.monotonic() + GATHER_SECONDS
        while num_quiet < QUIET_TURNS and (left := end - time.monotonic()) > 0:
            turn = threading.Event()
            self._post(turn.set)
            turn.wait(left)
            num_quiet = num_quiet + 1 if self._inbox.empty() else 0
            if not self._handle_inbox(0):
                return False
        return True

    def _linger_seconds(self) -> float:
        """Seconds to wait for a request that shares the next step.

        Not zero if only KV of complete answers is left to compute: a next request would wait for this step.
        """
        scheduler = self.engine.core.scheduler
        if self._active or scheduler.waiting:
            return 0.0
        is_rest = all(request.state is RequestState.TOKENS_FINAL for request in scheduler.running)
        return LINGER_SECONDS if is_rest else 0.0

    def _handle_inbox(self, timeout: float | None) -> bool:
        """Run what was queued; False if the thread has to end.

        Args:
            timeout: seconds to wait for something; None: until something comes.
        """
        try:
            command = self._inbox.get(timeout is None or timeout > 0, timeout)
            while command is not None:
                command()
                command = self._inbox.get_nowait()
        except queue.Empty:
            return True
        return False

    def _submit(self, generation: Generation) -> None:
        try:
            generation.messages = generation.submit()
        except BaseException as exc:
            self._end(generation, as_exception(exc), is_submitted=False)
            return
        generation.num_sent = generation.num_sent or [(0, 0)] * len(generation.messages)
        generation.open_choices = set(range(len(generation.messages)))
        self._active[generation] = None

    def _deliver(self) -> bool:
        """Hand what the last step generated to the event loop.

        Returns:
            True if it contains the first text of an answer that goes on.
        """
        has_first_text = False
        batch: list[tuple[Generation, list[ChoiceUpdate]]] = []
        for generation in list(self._active):
            try:
                updates = generation.collect()
            except BaseException as exc:
                self._end(generation, as_exception(exc))
                continue
            if not generation.open_choices:
                del self._active[generation]
                errors = call_all([partial(generation.close, True)])
                self._post(self._put, [(generation, errors[0] if errors else updates)], 1)
            elif updates:
                has_first_text |= any(
                    len(update.token_ids) == generation.num_sent[update.index][1] for update in updates
                )
                batch.append((generation, updates))
        if batch:
            self._post(self._put, batch, 0)
        return has_first_text

    def _end(self, generation: Generation, exc: Exception, *, is_submitted: bool = True) -> None:
        """End a generation with an error."""
        if is_submitted and generation not in self._active:
            return
        self._active.pop(generation, None)
        call_all([partial(generation.close, False)])
        self._post(self._put, [(generation, exc)], 1)

    def _post(self, function: Callable[..., object], *args: Any) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)

    def _put(self, batch: list[tuple[Generation, Any]], num_ended: int) -> None:
        """Queue updates; runs in the event loop."""
        self.num_generations -= num_ended
        for generation, updates in batch:
            generation.updates.put_nowait(updates)
