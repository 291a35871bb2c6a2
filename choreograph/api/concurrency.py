"""Run many programs on one engine in one thread.

Each program is written as if it ran alone. It yields when it reads a value that is not final. When
all programs have yielded, one step computes the requests they wait for, and the programs resume in
order: which requests share a step never depends on threads or clocks.
"""

from asyncio import AbstractEventLoop, _get_running_loop
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack
from contextvars import copy_context
from dataclasses import dataclass
from threading import Thread, current_thread
from typing import Any

from greenlet import getcurrent, greenlet

from ..errors import ConfigError
from .engine import Engine


@dataclass(frozen=True)
class ProgramResult:
    """Return value of one program, or the error that ended it."""

    index: int  # position in `programs`
    value: Any = None
    error: Exception | None = None


class _SingleThreadGenerator(Generator[ProgramResult, None, None]):
    """Generator bound to the thread that takes its first result.

    Its programs are greenlets, which cannot be resumed or closed in another thread.
    """

    def __init__(self, results: Generator[ProgramResult, None, None]) -> None:
        self._results = results
        self._thread: Thread | None = None

    def send(self, value: None) -> ProgramResult:
        return self._check_thread().send(value)

    def throw(self, *exc_info: Any) -> ProgramResult:
        return self._check_thread().throw(*exc_info)

    def close(self) -> None:
        self._check_thread().close()

    def _check_thread(self) -> Generator[ProgramResult, None, None]:
        current = current_thread()
        self._thread = self._thread or current
        if self._thread is not current and self._thread.is_alive():
            raise ConfigError(f"these programs run in thread {self._thread.name!r}: take outcomes and close there")
        return self._results


def run_concurrently(
    engine: Engine, programs: Iterable[Callable[[], Any]], *, max_programs: int = 32, max_requests: int = 128
) -> Generator[ProgramResult, None, None]:
    """Run programs in one thread and yield their results as they end.

    Closing the generator ends every running program. Other threads may read messages of the engine
    meanwhile.

    Args:
        max_programs: maximum number of programs that run at once.
        max_requests: start further programs only while fewer requests could compute; requests that
            wait for parents do not count.
    """
    return _SingleThreadGenerator(_run_programs(engine, programs, max_programs, max_requests))


def _run_programs(
    engine: Engine, programs: Iterable[Callable[[], Any]], max_programs: int, max_requests: int
) -> Generator[ProgramResult, None, None]:
    if max_programs < 1 or max_requests < 1:
        raise ConfigError(f"max_programs={max_programs}, max_requests={max_requests}: use 1 or more")
    core = engine.core
    if core.yield_hook is not None:
        raise ConfigError("programs already run together on this engine: finish those first")
    queue = enumerate(programs)
    live: dict[int, greenlet] = {}
    hub, has_stepped = getcurrent(), True
    program: greenlet | None = None  # the program that is running
    loop: AbstractEventLoop | None = None  # enclosing event loop, as in a notebook

    def give_turn() -> bool:
        """Yield until the other programs have run.

        Callers outside of a program (a callback, another thread) step the engine themselves, as
        does a program inside an event loop of its own: a thread runs one loop at a time.
        """
        if getcurrent() is not program or _get_running_loop() is not loop:
            return core.step()
        hub.switch()
        return has_stepped

    def turn(index: int) -> ProgramResult | None:
        """Resume a program until it yields again or ends."""
        nonlocal hub, program, loop
        hub, program, loop = getcurrent(), live[index], _get_running_loop()
        program.parent = hub
        try:
            value = program.switch()
        except Exception as exc:
            del live[index]
            return ProgramResult(index, error=exc)
        if not program.dead:
            return None
        del live[index]
        return ProgramResult(index, value)

    def end(one: greenlet) -> None:
        """End a program at its current point, which closes its session."""
        one.parent = getcurrent()
        one.throw()

    core.yield_hook = give_turn
    try:
        has_more = True
        while has_more or live:
            for index in list(live):
                if result := turn(index):
                    yield result
            while has_more and len(live) < max_programs and core.scheduler.num_runnable < max_requests:
                index, function = next(queue, (-1, None))
                has_more = function is not None
                if function is not None:
                    live[index] = greenlet(function)
                    live[index].gr_context = copy_context()  # request tags of the caller apply to each program
                    if result := turn(index):
                        yield result
            has_stepped = core.step()
    finally:
        core.yield_hook = None  # a program that reads while it ends steps the engine
        with ExitStack() as endings:  # ends every program even if others raise
            for one in reversed(live.values()):
                endings.callback(end, one)
