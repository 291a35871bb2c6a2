"""Engines on Ray that run the examples of an evaluation."""

import logging
import socket
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ...api.engine import Engine
from ...errors import ConfigError, RequestFailedError
from ...utils import connect_to_ray, require
from .datasets import Example
from .experiment import RunFunction, describe_engine
from .run_dir import RunRecord


class EngineWorker:
    """Actor that owns an engine with one thread.

    Args:
        load_engine: called with the first examples, in the actor's process.
        expected: `describe_engine` of the engine that made the settings of the run.
    """

    def __init__(self, load_engine: Callable[[], Engine], expected: Mapping[str, Any]) -> None:
        self._load_engine, self._expected = load_engine, expected
        self._engine: Engine | None = None

    def run(
        self, function: RunFunction, examples: Sequence[Example], baseline: Mapping[str, RunRecord] | None
    ) -> Iterator[RunRecord]:
        """Yield a record of each example as it ends."""
        if self._engine is None:
            self._engine = self._open()
        yield from function(self._engine, examples, baseline)

    def _open(self) -> Engine:
        import torch

        torch.set_num_threads(1)
        engine = self._load_engine()
        facts = describe_engine(engine)
        if different := {key: value for key, value in facts.items() if value != self._expected[key]}:
            raise ConfigError(
                f"the engine on {socket.gethostname()} has {different}, the first one "
                f"{ {key: self._expected[key] for key in different} }: use one model and kind of machine"
            )
        return engine


@dataclass
class _Task:
    """Examples that a worker runs."""

    worker: Any
    examples: dict[str, Example]  # by id, without those that have a record
    kind: Literal["load", "run", "alone"]  # load: no examples; alone: one, whose worker has ended before


class RayWorkers:
    """Engines on Ray that run examples instead of one engine.

    A worker that ends is replaced. Its examples run again, each by itself; if a worker ends with one of these, it gets a
    record with an error. A context manager: it ends the workers, and a local Ray that it has started.

    Args:
        load_engine: makes an engine like `engine`; has to be picklable.
        address: of a running Ray, such as "auto"; "local": one is started.
        num_workers: as many as Ray has CPUs, or GPUs if the engine is on one, by default.
    """

    def __init__(
        self,
        load_engine: Callable[[], Engine],
        engine: Engine,
        *,
        address: str = "auto",
        num_workers: int | None = None,
    ) -> None:
        self._ray: Any = require("ray", "ray")
        self._owns_ray = connect_to_ray(address, log_to_driver=False, logging_level=logging.WARNING)
        resource = "CPU" if engine.model_info.device.type == "cpu" else "GPU"
        self.num_workers = num_workers or max(1, int(self._ray.cluster_resources().get(resource, 0)))
        options = {"num_cpus": 1, "num_gpus": int(resource == "GPU"), "max_restarts": 0}
        actor = self._ray.remote(EngineWorker).options(**options)
        self._create = lambda: actor.remote(load_engine, describe_engine(engine))
        self._workers: list[Any] = []
        self._idle: list[Any] = []
        self._tasks: dict[Any, _Task] = {}  # by the generator of records

    def __enter__(self) -> "RayWorkers":
        return self

    def __exit__(self, *exc_info: object) -> None:
        for worker in self._workers:
            self._ray.kill(worker)
        if self._owns_ray:
            self._ray.shutdown()

    def run(
        self,
        function: RunFunction,
        examples: Sequence[Example],
        baseline: Mapping[str, RunRecord] | None,
        *,
        max_examples: int,
    ) -> Iterator[RunRecord]:
        """Yield a record of each example as it ends.

        Args:
            function: has to be picklable.
            max_examples: that a worker gets at once.
        """
        queue, alone, num_left = deque(examples), deque[Example](), len(examples)

        def assign(worker: Any, kind: Literal["load", "run", "alone"], chunk: Sequence[Example]) -> None:
            needed = None if baseline is None else {e.id: baseline[e.id] for e in chunk}
            generator = worker.run.options(num_returns="streaming").remote(function, chunk, needed)
            self._tasks[generator] = _Task(worker, {e.id: e for e in chunk}, kind)

        try:
            while num_left:
                while len(self._workers) < self.num_workers:
                    self._workers.append(self._create())
                    assign(self._workers[-1], "load", [])  # a worker that Ray has no room for gets no examples
                while self._idle and (queue or alone):
                    if queue:
                        size = max(1, min(max_examples, len(queue) // (2 * self.num_workers)))
                        assign(self._idle.pop(), "run", [queue.popleft() for _ in range(size)])
                    else:
                        assign(self._idle.pop(), "alone", [alone.popleft()])
                (generator,), _ = self._ray.wait(list(self._tasks), num_returns=1)
                for record in self._take(generator, alone):
                    num_left -= 1
                    yield record
        finally:
            for generator in [generator for generator, task in self._tasks.items() if task.examples]:
                self._end_worker(generator)

    def _take(self, generator: Any, alone: deque[Example]) -> Iterator[RunRecord]:
        """Take the next record of a task.

        If its worker has ended, its examples are added to `alone`.
        """
        task, exceptions = self._tasks[generator], self._ray.exceptions
        try:
            record = self._ray.get(next(generator))
        except StopIteration:
            del self._tasks[generator]
            self._idle.append(task.worker)
        except exceptions.RayTaskError as exc:
            raise exc.cause from None
        except exceptions.RayError as exc:
            self._end_worker(generator)  # it may run still, where what it has computed is lost
            if task.kind == "load":
                raise RequestFailedError(f"a worker ended while it loaded its engine: {exc}") from None
            if task.kind == "run":
                alone.extend(task.examples.values())
            else:
                yield from (
                    {"id": id, "error": f"{type(exc).__name__}: its worker ended twice"} for id in task.examples
                )
        else:
            del task.examples[record["id"]]
            yield record

    def _end_worker(self, generator: Any) -> None:
        worker = self._tasks.pop(generator).worker
        self._workers.remove(worker)
        self._ray.kill(worker)
