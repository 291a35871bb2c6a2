"""Worker threads that prepare requests, with turns among tenants.

Neither the event loop nor the engine's thread renders, tokenizes or compiles: both would stop for all clients.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from ..utils import as_exception

T = TypeVar("T")

SMALL_BYTES = 1 << 15  # larger requests wait for a thread of their own, so that no small one waits for them

NUM_SMALL_THREADS = 2


class WorkPool:
    """Threads that prepare requests.

    Small requests and large ones have separate threads. Tenants take turns: one with many requests delays the
    requests of others by at most one piece of work.
    """

    def __init__(self) -> None:
        self._small = _ThreadGroup("prepare", NUM_SMALL_THREADS)
        self._large = _ThreadGroup("prepare-large", 1)

    async def run(self, tenant: str, num_bytes: int, function: Callable[[], T]) -> T:
        """Run a function in a thread and return its result.

        Args:
            num_bytes: size of the request, which decides on the thread.
        """
        lane = self._small if num_bytes <= SMALL_BYTES else self._large
        return await lane.run(tenant, function)

    def close(self) -> None:
        """End the threads; work that has not started is cancelled."""
        self._small.close()
        self._large.close()


class _ThreadGroup:
    """Threads of equal purpose, and who waits for them."""

    def __init__(self, name: str, num_threads: int) -> None:
        self._executor = ThreadPoolExecutor(num_threads, name)
        self._num_free = num_threads
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # by tenant, next turn first

    async def run(self, tenant: str, function: Callable[[], T]) -> T:
        await self._wait_for_turn(tenant)
        loop = asyncio.get_running_loop()
        try:
            future = self._executor.submit(_call, function)
        except BaseException:
            self._free_thread()
            raise

        def end(_: Future[T]) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._free_thread)

        future.add_done_callback(end)  # a caller that is cancelled frees no thread
        return await asyncio.wrap_future(future)

    async def _wait_for_turn(self, tenant: str) -> None:
        if self._num_free:
            self._num_free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it had come
                self._free_thread()
            raise

    def _free_thread(self) -> None:
        """Give a thread to the next tenant that waits."""
        while self._waiting:
            tenant, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[tenant] = turns  # behind the others
            if not turn.done():
                turn.set_result(None)
                return
        self._num_free += 1

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
        for turns in self._waiting.values():
            for turn in turns:
                turn.cancel()
        self._waiting.clear()


def _call(function: Callable[[], T]) -> T:
    try:
        return function()
    except Exception:
        raise
    except BaseException as exc:
        raise as_exception(exc) from None
