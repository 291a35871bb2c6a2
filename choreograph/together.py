"""Runs many programs on one engine at once, each written as if it were alone. Owns whose turn it is.

A program that reads a value which is not known yet gives its turn away instead of driving the engine. When all
have, one step computes what they wait for, packed together, and the turns go round again in order: which calls
share a step never depends on threads or clocks.
"""

from asyncio import AbstractEventLoop, _get_running_loop
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack
from contextvars import copy_context
from dataclasses import dataclass
from threading import Thread, current_thread
from typing import Any

from greenlet import getcurrent, greenlet

from .core import Engine
from .errors import ConfigError


@dataclass(frozen=True)
class Outcome:
    """What the program number `index` returned, or the error that ended it."""

    index: int
    value: Any = None
    error: Exception | None = None


class _InOneThread(Generator[Outcome, None, None]):
    """Outcomes for the thread that took the first: its programs cannot go on in another, nor end there."""

    def __init__(self, outcomes: Generator[Outcome, None, None]) -> None:
        self._outcomes = outcomes
        self._thread: Thread | None = None

    def send(self, value: None) -> Outcome:
        return self._here().send(value)

    def throw(self, *problem: Any) -> Outcome:
        return self._here().throw(*problem)

    def close(self) -> None:
        self._here().close()

    def _here(self) -> Generator[Outcome, None, None]:
        here = current_thread()
        self._thread = self._thread or here
        if self._thread is not here and self._thread.is_alive():
            raise ConfigError(f"these programs run in thread {self._thread.name!r}: take outcomes and close there")
        return self._outcomes


def together(
    engine: Engine, programs: Iterable[Callable[[], Any]], *, at_once: int = 32, calls: int = 128
) -> Generator[Outcome, None, None]:
    """Yields outcomes as programs end, all in one thread. At most `at_once` run; one more starts while fewer than
    `calls` calls could compute: those that wait for what others have yet to say do not count.

    Closed early, it ends every program where it stands. Anybody else may read messages of the engine meanwhile."""
    return _InOneThread(_outcomes(engine, programs, at_once, calls))


def _outcomes(
    engine: Engine, programs: Iterable[Callable[[], Any]], at_once: int, calls: int
) -> Generator[Outcome, None, None]:
    if at_once < 1 or calls < 1:
        raise ConfigError(f"at_once={at_once}, calls={calls}: use 1 or more")
    runner = engine.runner
    if runner.give_turn is not None:
        raise ConfigError("programs already run together on this engine: finish those first")
    queue = enumerate(programs)
    live: dict[int, greenlet] = {}
    hub, moved = getcurrent(), True
    program: greenlet | None = None  # whose turn it is
    loop: AbstractEventLoop | None = None  # that runs around all of them, as in a notebook

    def give_turn() -> bool:
        """Until others have had theirs. Who is no program (a caller, a listener, another thread) steps itself, and so
        does a program inside an event loop of its own: a thread runs one loop at a time."""
        if getcurrent() is not program or _get_running_loop() is not loop:
            return runner.step()
        hub.switch()
        return moved

    def turn(index: int) -> Outcome | None:
        """Lets a program run until it waits again or ends."""
        nonlocal hub, program, loop
        hub, program, loop = getcurrent(), live[index], _get_running_loop()
        program.parent = hub
        try:
            value = program.switch()
        except Exception as problem:
            del live[index]
            return Outcome(index, error=problem)
        if not program.dead:
            return None
        del live[index]
        return Outcome(index, value)

    def end(one: greenlet) -> None:
        """Ends a program where it stands; its session closes."""
        one.parent = getcurrent()
        one.throw()

    runner.give_turn = give_turn
    try:
        more = True
        while more or live:
            for index in list(live):
                if ended := turn(index):
                    yield ended
            while more and len(live) < at_once and runner.scheduler.able < calls:
                index, job = next(queue, (-1, None))
                more = job is not None
                if job is not None:
                    live[index] = greenlet(job)
                    live[index].gr_context = copy_context()  # an agent's block around all of them is around each
                    if ended := turn(index):
                        yield ended
            moved = runner.step()
    finally:
        runner.give_turn = None  # a program that reads while it ends steps itself
        with ExitStack() as endings:  # each is ended, whatever others raise
            for one in reversed(live.values()):
                endings.callback(end, one)
