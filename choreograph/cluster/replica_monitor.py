"""Which replicas answer the gateway, and what all have counted."""

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from ..outputs import EngineStats
from .replica import ReplicaLoad

PROBE_SECONDS = 1.0  # between two probes of all replicas

MAX_PROBES = 100  # replicas that are probed in a second

ANSWER_SECONDS = 5.0  # that a replica has to answer a probe

LATE_SECONDS = 15.0  # since the last answer of a replica that may still be alive

MAX_GONE = 1024  # replicas that went away whose counters are kept by name, in case they answer late

COUNTERS = ("num_steps", "num_batched_tokens", "num_drafted_tokens", "num_accepted_tokens")  # and all events

ReplicaId = tuple[str, int]  # name and process

logger = logging.getLogger(__name__)


class ReplicaReports:
    """States of replicas, summed so that counters never fall.

    Counters of a replica that went away stay in the sum, gauges do not. Reports may arrive late and in any order.
    """

    def __init__(self) -> None:
        self._states: dict[ReplicaId, EngineStats] = {}  # last ones of the replicas that are there
        self._counters: OrderedDict[ReplicaId, Counter[str]] = OrderedDict()  # highest ones, last reported last
        self._folded: Counter[str] = Counter()  # of the replicas that went away first

    def add(self, load: ReplicaLoad) -> None:
        """Add the report of a replica, which is there."""
        replica = load.name, load.process_id
        self._states[replica] = load.stats
        self._counters[replica] = self._counters.pop(replica, Counter()) | _counters_of(load.stats)

    def keep(self, replicas: Collection[ReplicaId]) -> None:
        """Drop the gauges of all other replicas."""
        self._states = {replica: stats for replica, stats in self._states.items() if replica in replicas}
        gone = [replica for replica in self._counters if replica not in self._states]
        for replica in gone[: max(0, len(gone) - MAX_GONE)]:
            self._folded += self._counters.pop(replica)

    @property
    def total(self) -> EngineStats:
        """Sum of all counters, and of the gauges of present replicas."""
        result = sum_stats(list(self._states.values()))
        counters = sum(self._counters.values(), self._folded)
        events = {kind.removeprefix("events."): count for kind, count in counters.items() if kind.startswith("events.")}
        values = {name: counters[name] for name in COUNTERS} | {"events": events}
        return EngineStats(**vars(result) | values)


def _counters_of(stats: EngineStats) -> Counter[str]:
    counters = {name: getattr(stats, name) for name in COUNTERS}
    return Counter(counters | {f"events.{kind}": count for kind, count in stats.events.items()})


def sum_stats(stats: Sequence[EngineStats]) -> EngineStats:
    """Return the sum of every count."""
    totals: dict[str, Any] = {}
    for name in EngineStats.__dataclass_fields__:
        values = [getattr(item, name) for item in stats]
        if name in ("tier_tokens", "events"):
            totals[name] = {key: sum(value.get(key, 0) for value in values) for value in values for key in value}
        else:
            totals[name] = sum(values)
    return EngineStats(**totals)


class ReplicaMonitor:
    """Probes replicas in the background, so that reading their state asks none.

    Args:
        handle: of their deployment.
        clock: monotonic seconds.
    """

    def __init__(self, handle: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._handle, self._clock = handle, clock
        self.reports = ReplicaReports()
        self._answered: dict[str, float] = {}  # when each replica answered last, by name
        self._last_answer = clock()  # of any replica
        self._processes: dict[str, ReplicaId] = {}  # of the replicas that have reported, by name
        self._task: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()
        self._num_rounds = 0  # probes of all replicas that were started

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    def note_answer(self, name: str) -> None:
        """Note that a replica has answered anything."""
        self._answered[name] = self._last_answer = self._clock()

    def note_failure(self, name: str) -> None:
        """Note that a replica has ended, or cannot be reached."""
        self._answered.pop(name, None)

    @property
    def is_answering(self) -> bool:
        """True if any replica answered lately, and has not failed since."""
        oldest = self._clock() - LATE_SECONDS
        return any(answered >= oldest for answered in self._answered.values())

    @property
    def silent_seconds(self) -> float:
        """Time since the last answer; 0 while any replica answers."""
        return 0.0 if self.is_answering else self._clock() - self._last_answer

    async def refresh(self) -> None:
        """Probe all replicas, unless another call does so from now on."""
        number = self._num_rounds + 1
        async with self._lock:
            if self._num_rounds < number:
                self._num_rounds = number
                await self._probe()

    async def _run(self) -> None:
        while True:
            await self.refresh()
            await asyncio.sleep(max(PROBE_SECONDS, len(self._answered) / MAX_PROBES))

    async def _probe(self) -> None:
        loads, num_late = await self._ask_all()
        for load in loads:
            self.note_answer(load.name)
            self._processes[load.name] = load.name, load.process_id
            self.reports.add(load)
        oldest = self._clock() - LATE_SECONDS
        names = {load.name for load in loads}
        if num_late:  # those that did not answer yet may be among the others
            names |= {name for name, answered in self._answered.items() if answered >= oldest}
        self._answered = {name: answered for name, answered in self._answered.items() if name in names}
        self._processes = {name: replica for name, replica in self._processes.items() if name in names}
        self.reports.keep(self._processes.values())

    async def _ask_all(self) -> tuple[list[ReplicaLoad], int]:
        """Return the states of answering replicas, and the number of others."""
        try:
            # one replica that hangs must not hide the others, as it does in `results_async`
            response = self._handle.broadcast("load")
            results = await asyncio.wait_for(response._fetch_replica_results_async(), ANSWER_SECONDS)
        except TimeoutError:
            return [], 1
        except Exception as exc:  # whatever it is, no replica has answered
            if not isinstance(exc, (RayError, RayServeException)):  # those say that none runs
                logger.warning("replicas cannot be probed: %s", str(exc) or type(exc).__name__)
            return [], 0
        tasks = {asyncio.ensure_future(result.get_async()): result for result in results}
        done, late = await asyncio.wait(tasks, timeout=ANSWER_SECONDS) if tasks else (set(), set())
        for task in late:
            task.cancel()
            tasks[task].cancel()
        return _loads_of(done), len(late)


def _loads_of(tasks: Iterable[asyncio.Task[Any]]) -> list[ReplicaLoad]:
    """Return the reports among answers and errors."""
    answers = (task.result() for task in tasks if not task.cancelled() and task.exception() is None)
    return [answer for answer in answers if isinstance(answer, ReplicaLoad)]
