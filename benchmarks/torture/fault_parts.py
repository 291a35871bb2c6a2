"""Faults of transfers, the model, callbacks, listeners, consumers, signals and clocks, in one process."""

import asyncio
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from choreograph import Engine, Message
from choreograph.api.concurrency import run_concurrently
from choreograph.events import Event
from choreograph.kv_cache.transfer import Transfer

from .fault_case import NO_FAMILY, Case, Injected, Node, Result, expect, hf_model_of, run_graph
from .soak_programs import KINDS, Program
from .tiny_family import tokenizer

TIERS: dict[str, Any] = {"host_capacity": 1024, "disk_capacity": 4096}
WAKE_SECONDS = 0.004  # at most between two signals
MAX_ATTEMPTS = 2000  # of a call that is interrupted

# -- transfers and the model ----------------------------------------------------------------------------------------


def _transfers(case: Case) -> None:
    """Copies between tiers fail at a layer, stall, or copy a layer twice."""
    rng, number, run = random.Random(case.rng.random()), 0, Transfer.run

    def faulty_run(transfer: Transfer, *args: Any) -> None:
        nonlocal number
        kind = rng.choice(("fail", "stall", "twice", "", ""))
        copy_layer, place = transfer.copy_layer, rng.randrange(transfer.layers)

        def faulty_copy(layer: int) -> None:
            if kind == "fail" and layer == place:
                raise OSError("the link is down")
            if kind == "stall":
                time.sleep(rng.random() * 0.03)
            copy_layer(layer)
            if kind == "twice":
                copy_layer(layer)

        if kind:
            number += 1
            transfer.copy_layer = faulty_copy
        run(transfer, *args)

    with mock.patch.object(Transfer, "run", faulty_run), case.engine(**TIERS, disk_dir=case.folder) as engine:
        for _ in range(3):
            case.run_programs(engine, "revisits")
            engine.check()
        case.inject("transfers that fail, stall or copy twice", number)


def _forward(case: Case, name: str, change: Callable[[Any, random.Random], Any], share: float) -> None:
    """Run a graph whose forward passes are changed now and then; at most that many requests fail.

    Args:
        change: gets the logits, or None before a pass; returns them, or raises.
    """
    graph, rng, number = case.draw_graph(20), random.Random(case.rng.random()), 0
    with case.engine() as engine:
        model = hf_model_of(engine)
        forward = model.forward

        def faulty_forward(*args: Any, **options: Any) -> Any:
            nonlocal number
            is_faulty = rng.random() < share
            number += is_faulty
            return change(forward(*args, **options), rng) if is_faulty else forward(*args, **options)

        with mock.patch.object(model, "forward", faulty_forward):
            results = run_graph(engine, graph)
        engine.check()
        roots = case.check_graph(graph, results)
        expect(len(roots) <= number, f"{len(roots)} requests failed of {number} faults")
        case.inject(name, number)
        expect(not case.check_graph(graph, run_graph(engine, graph)), "a request fails after the faults")


def _nan(case: Case) -> None:
    """One row of logits is NaN."""

    def change(logits: Any, rng: random.Random) -> Any:
        if logits is not None and len(logits):
            logits = logits.clone()
            logits[rng.randrange(len(logits))] = float("nan")
        return logits

    _forward(case, "rows of NaN", change, 0.1)


def _memory(case: Case) -> None:
    """Memory cannot be had in a forward pass."""

    def change(logits: Any, rng: random.Random) -> Any:
        raise rng.choice((torch.OutOfMemoryError("injected"), MemoryError("injected"), RuntimeError("injected")))

    _forward(case, "passes without memory", change, 0.08)


# -- code of the caller ---------------------------------------------------------------------------------------------


def _callbacks(case: Case) -> None:
    """Log-probability hooks and token masks raise, block, or call back."""
    graph, rng, bad = case.draw_graph(), case.rng, set[int]()
    with case.engine() as engine:

        def prepare(index: int, message: Message) -> None:
            kind, place = rng.choice(("raise", "block", "check", "mask", "")), rng.randrange(3)
            count = 0

            def hook(row: torch.Tensor) -> None:
                nonlocal count
                count += 1
                if kind == "raise" and count > place:
                    bad.add(index)
                    raise Injected("hook")
                if kind == "block":
                    time.sleep(0.002)
                if kind == "check":
                    engine.check()
                    engine.stats()
                    message.progress()

            class Mask:
                """Mask that allows everything, and raises."""

                def allowed(self) -> torch.Tensor:
                    return torch.ones(len(tokenizer()), dtype=torch.bool)

                def advance(self, token: int) -> None:
                    nonlocal count
                    count += 1
                    if count > place:
                        bad.add(index)
                        raise Injected("mask")

            if kind == "mask":
                message.constrain(Mask())
            elif kind:
                message.on_logprobs(hook)

        results = run_graph(engine, graph, prepare=prepare)
        roots = case.check_graph(graph, results)
        expect(roots <= bad, f"messages {sorted(roots - bad)} failed without a fault")
        for index in roots:
            cause = getattr(results[index], "__cause__", None)
            expect(isinstance(cause, Injected), f"message {index} failed with {results[index]!r}, caused by {cause!r}")
        case.inject("hooks and masks", len(bad))


def _listeners(case: Case) -> None:
    """Listeners of events raise, block, or use the engine."""
    graph, rng, number, depth = case.draw_graph(), random.Random(case.rng.random()), 0, 0

    def attempt(function: Callable[[], Any]) -> Any:
        for _ in range(MAX_ATTEMPTS):
            try:
                return function()
            except Injected:
                continue
        raise AssertionError("a call does not come to an end")

    with case.engine(**TIERS, disk_dir=case.folder) as engine:

        def listen(event: Event) -> None:
            nonlocal number, depth
            kind = rng.choice(("raise", "block", "step", "check", "decode", *[""] * 25))
            if not kind or depth:
                return
            number += 1
            depth += 1
            try:
                if kind == "raise":
                    raise Injected("listener")
                if kind == "block":
                    time.sleep(0.002)
                elif kind == "step":
                    engine.step()
                elif kind == "check":
                    engine.check()
                else:
                    with engine.session(seed=0) as session:
                        session.decode([9, 10], max_tokens=2).result()
            finally:
                depth -= 1

        unsubscribe = engine.events.subscribe(listen)
        results = run_graph(engine, graph, attempt=attempt)
        unsubscribe()
        expect(not case.check_graph(graph, results), "a request fails because of a listener")
        case.inject("listeners", number)


def _dropped_generators(case: Case) -> None:
    """Streams and groups of programs whose reader leaves half-way."""
    rng = case.rng
    with case.engine(**TIERS, disk_dir=case.folder) as engine:
        for _ in range(4):
            session = engine.session(seed=1)
            root = session.prefill([rng.randrange(7, 90) for _ in range(60)])
            streams = [session.decode([10 + i], [root], max_tokens=30, ignore_eos=True).stream() for i in range(3)]
            for stream in streams:
                for _ in range(rng.randrange(4)):
                    next(stream, None)
            if rng.random() < 0.5:
                session.close()
            for stream in streams:
                stream.close()  # type: ignore[attr-defined]
            del streams
            session.close()
            parts = [Program(engine, NO_FAMILY, random.Random(rng.random()), "0", False) for _ in range(4)]
            results = run_concurrently(engine, [lambda part=part: KINDS["graph"][0](part) for part in parts])
            for _ in range(rng.randrange(3)):
                next(results, None)
            results.close()
            engine.check()
            case.inject("readers that leave", 4)
        case.run_programs(engine)


def _cancelled_tasks(case: Case) -> None:
    """Tasks that wait for messages are cancelled at random moments, and others wait again."""
    rng, number = case.rng, 0

    async def main(engine: Engine, graph: list[Node]) -> list[Result]:
        nonlocal number
        results: list[Result] = [[] for _ in graph]
        with engine.session(seed=1) as session:
            messages: list[Message] = []
            for node in graph:
                parents = [messages[parent] for parent in node.parents]
                if node.sampling is None:
                    messages.append(session.prefill(node.tokens, parents))
                else:
                    messages.append(session.decode(node.tokens, parents, sampling=node.sampling))

            async def wait(message: Message) -> Message:
                return await message

            while not all(message.done for message in messages):
                tasks = [asyncio.create_task(wait(message)) for message in rng.sample(messages, min(3, len(messages)))]
                for _ in range(rng.randrange(4)):
                    await asyncio.sleep(0)
                for task in tasks:
                    number += not task.done()
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            for index, message in enumerate(messages):
                results[index] = (await message).output_token_ids
        return results

    with case.engine(**TIERS, disk_dir=case.folder) as engine:
        for _ in range(8):
            graph = case.draw_graph(20)
            results = asyncio.run(main(engine, graph))
            expect(not case.check_graph(graph, results), "a request fails because of a cancelled task")
        case.inject("cancelled tasks", number)


# -- signals and clocks ---------------------------------------------------------------------------------------------


class _Interrupts:
    """Thread that sends SIGINT to the main thread at random moments, while it calls a function by `attempt`."""

    def __init__(self, rng: random.Random) -> None:
        self.count = 0
        self._rng, self._armed, self._end = rng, False, threading.Event()

    @contextmanager
    def running(self) -> Iterator[None]:
        before = signal.signal(signal.SIGINT, self._handle)
        thread = threading.Thread(target=self._send)
        thread.start()
        try:
            yield
        finally:
            self._end.set()
            thread.join()
            signal.signal(signal.SIGINT, before)

    def _send(self) -> None:
        main = threading.main_thread().ident
        assert main is not None
        while not self._end.wait(self._rng.random() * WAKE_SECONDS):
            if self._armed:
                signal.pthread_kill(main, signal.SIGINT)

    def _handle(self, *_: object) -> None:
        if self._armed:
            self._armed = False
            self.count += 1
            raise KeyboardInterrupt

    def attempt(self, function: Callable[[], Any]) -> Any:
        """Call a function until it returns without an interrupt."""
        for _ in range(MAX_ATTEMPTS):
            try:
                try:
                    self._armed = True
                    return function()
                finally:
                    self._armed = False
            except KeyboardInterrupt:
                continue
        raise AssertionError("a call does not come to an end between interrupts")


def _interrupts(case: Case) -> None:
    """SIGINT at random moments of calls, steps and closing."""
    if threading.current_thread() is not threading.main_thread():
        return
    with case.engine(**TIERS, disk_dir=case.folder) as engine:
        for _ in range(8):
            graph, interrupts = case.draw_graph(20), _Interrupts(random.Random(case.rng.random()))
            with interrupts.running():
                results = run_graph(engine, graph, attempt=interrupts.attempt)
            engine.check()
            expect(not case.check_graph(graph, results), "a request fails because of an interrupt")
            case.inject("interrupts", interrupts.count)


def _clocks(case: Case) -> None:
    """The wall clock jumps both ways, the other clocks forwards."""
    rng, number = random.Random(case.rng.random()), 0
    clocks = {name: getattr(time, name) for name in ("time", "monotonic", "perf_counter")}
    offsets = dict.fromkeys(clocks, 0.0)

    def jumping(name: str) -> Callable[[], float]:
        def now() -> float:
            nonlocal number
            if rng.random() < 0.01:
                number += 1
                offsets[name] += rng.choice((1.0, 3600.0, 1e7)) * (rng.choice((-1, 1)) if name == "time" else 1)
            return float(clocks[name]() + offsets[name])

        return now

    patches = mock.patch.multiple(time, **{name: jumping(name) for name in clocks})
    with patches, case.engine(**TIERS, disk_dir=case.folder) as engine:
        for _ in range(2):
            case.run_programs(engine)
            graph = case.draw_graph()
            with engine.session(seed=1) as session:
                pinned = session.prefill(graph[0].tokens).pin(seconds=5.0)
                session.decode([8, 9], [pinned], max_tokens=4).result()
            expect(not case.check_graph(graph, run_graph(engine, graph)), "a request fails because of a clock")
    case.inject("jumps of clocks", number)


PART_FAULTS = {
    "transfers": _transfers,
    "rows of NaN": _nan,
    "memory": _memory,
    "callbacks": _callbacks,
    "listeners": _listeners,
    "dropped generators": _dropped_generators,
    "cancelled tasks": _cancelled_tasks,
    "interrupts": _interrupts,
    "clocks": _clocks,
}
