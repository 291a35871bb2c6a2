"""Playground of the dashboard: one workflow in prefix and choreographed mode."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from ...errors import RequestFailedError
from ...lab.workflows import find
from ...lab.workflows.run import StageCall, WorkflowRun, call_workflow
from ...namespace import Client
from ...outputs import Mode
from ...sampling_params import SamplingParams
from ..service import InferenceService
from .request_log import RequestLog

TIME_LIMIT = 300.0  # seconds of one run

PASSAGE = (
    "The mill on the Arn was built in 1711 and ground rye until the flood of 1954. The stone bridge beside it has five "
    "arches and was rebuilt after the flood, with steel inside. When was the mill built?"
)


@dataclass(frozen=True)
class PlaygroundWorkflow:
    """A workflow that the playground offers."""

    title: str
    task: str  # example
    options: Mapping[str, Any]


WORKFLOWS = {
    "tree_of_thoughts": PlaygroundWorkflow(
        "Tree of Thoughts: 4 branches, 3 votes",
        PASSAGE,
        {"branches": 4, "voters": 3, "prompt": "text", "form": "short"},
    ),
    "debate_parallel": PlaygroundWorkflow(
        "Debate: 3 agents, 2 rounds",
        "Mia buys 3 boxes of 12 pens and gives 8 pens away. How many pens are left?",
        {"agents": 3, "rounds": 2},
    ),
    "branch_solve_merge": PlaygroundWorkflow(
        "Branch-Solve-Merge: a story from concepts", "river, lantern, dog, bridge, winter, letter", {}
    ),
}


@dataclass(frozen=True)
class ModeResult:
    """One run of a workflow in one mode."""

    mode: Mode
    answer: str
    ttft: float | None  # mean seconds of all decodes
    seconds: float  # end to end
    computed: int  # prompt tokens
    reused: int  # prompt tokens from the cache
    generated: int  # tokens


class Playground:
    """Runs workflows in a thread of their own; the engine's thread computes."""

    def __init__(self, service: InferenceService, log: RequestLog) -> None:
        self._service, self._log = service, log
        self._num_runs: Counter[str] = Counter()  # of each tenant
        self.is_running = False

    async def run(self, tenant: str, name: str, task: str, max_tokens: int, mode: Mode) -> ModeResult:
        """Run a workflow once, with an empty cache.

        Raises:
            RequestFailedError: if another run is in progress.
        """
        if self.is_running:
            raise RequestFailedError("the playground is in use: wait until its run has ended")
        self.is_running = True
        self._num_runs[tenant] += 1
        try:
            number = self._num_runs[tenant]
            label = f"playground {number}, {mode}"
            loop = asyncio.get_running_loop()
            result, calls = await asyncio.to_thread(
                self._run,
                Client(tenant, ("playground", str(number), mode)),
                name,
                task,
                SamplingParams(temperature=0, max_tokens=max_tokens),
                mode,
                loop,
            )
            add = [(stage, message) for stage, message in calls if mode == "choreographed" or message.kind == "decode"]
            await self._service.thread.call(lambda: self._log.add_calls(tenant, label, add))
            return result
        finally:
            self.is_running = False

    def _run(
        self,
        client: Client,
        name: str,
        task: str,
        sampling: SamplingParams,
        mode: Mode,
        loop: asyncio.AbstractEventLoop,
    ) -> tuple[ModeResult, list[StageCall]]:
        """Run a workflow in this thread."""
        engine, workflow = self._service.engine, find(name)
        with self._engine_thread_steps(loop), engine.session(mode=mode, seed=0, client_id=client) as session:
            run = WorkflowRun(session, sampling=sampling)
            start = time.perf_counter()
            answer = call_workflow(workflow, run, task, WORKFLOWS[name].options)
            text = answer.text
            seconds = time.perf_counter() - start
            messages = [call.message.result() for call in run.calls]
        times = [message.timing.ttft for message in messages if message.timing.ttft is not None]
        usages = [message.usage for message in messages]
        result = ModeResult(
            mode,
            text.strip(),
            fmean(times) if times else None,
            seconds,
            sum(usage.computed_tokens for usage in usages),
            sum(usage.cached_tokens for usage in usages),
            sum(usage.completion_tokens for usage in usages),
        )
        return result, run.calls

    @contextmanager
    def _engine_thread_steps(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """Let this thread wait where a message would step the engine itself.

        Other requests are then served as always, and their text is delivered after each step.
        """
        core, thread, owner = self._service.engine.core, self._service.thread, threading.current_thread()
        deadline = time.monotonic() + TIME_LIMIT

        def wait_for_step() -> bool:
            if threading.current_thread() is not owner:
                return core.step()
            if time.monotonic() > deadline:
                raise RequestFailedError(f"the run took longer than {TIME_LIMIT:g} s: use fewer tokens")
            asyncio.run_coroutine_threadsafe(thread.call(lambda: None), loop).result()
            return True

        core.yield_hook = wait_for_step
        try:
            yield
        finally:
            core.yield_hook = None
