"""Playground of the dashboard: one workflow in prefix and choreographed mode.

A tab of `server/dashboard`, which `choreograph.__main__` passes to the server.
"""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from statistics import fmean
from typing import Any

from ..errors import ChoreographError, RequestFailedError
from ..namespace import Client
from ..outputs import Mode
from ..sampling_params import SamplingParams
from ..server.dashboard.dashboard_page import DashboardPage
from ..server.dashboard.dashboard_panels import count, empty, seconds
from ..server.service import InferenceService
from .workflows import find
from .workflows.run import StageCall, WorkflowRun, call_workflow

TIME_LIMIT = 300.0  # seconds of one run
MODES: tuple[Mode, ...] = ("prefix", "choreographed")
MAX_TOKENS = 256  # of a message

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

    def __init__(self, service: InferenceService) -> None:
        assert service.log is not None
        self._service, self._log = service, service.log
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


class PlaygroundTab:
    """The playground in the page of one browser."""

    def __init__(self, playground: Playground, page: DashboardPage) -> None:
        self._playground, self._page = playground, page
        self._results: dict[Mode, ModeResult] = {}
        ui = page.ui
        titles = {name: workflow.title for name, workflow in WORKFLOWS.items()}
        first = next(iter(titles))
        with ui.element("section").classes("card"):
            page.html(
                "<h2>Playground</h2><p>Runs one workflow twice, each time with an empty cache: in prefix mode, as other "
                "servers cache, then in choreographed mode, which reuses messages at any position.</p>"
            )
            with ui.element("div").classes("form"):
                choice = ui.select(titles, value=first, label="Workflow").props("outlined dense")
                limit = ui.number("Tokens per message", value=48, min=1, max=MAX_TOKENS, precision=0).props(
                    "outlined dense"
                )
                task = ui.textarea("Task", value=WORKFLOWS[first].task).classes("wide").props("outlined rows=2")
                choice.on_value_change(lambda event: task.set_value(WORKFLOWS[event.value].task))
                button = ui.button("Run both modes").props("no-caps unelevated")
            self._status = ui.label("").classes("status").props('role=status aria-live="polite"')
        button.on_click(lambda: self._run(button, choice.value, task.value or "", limit.value))
        with ui.element("div").classes("columns"):
            for mode in MODES:
                page.card(
                    f"{mode.capitalize()} mode", "One run. The time to first token is the mean of its calls.", mode
                )
                page.panels[mode].set_content(empty("No run yet", "Choose a workflow and run both modes."))

    async def _run(self, button: Any, name: str, task: str, max_tokens: float | None) -> None:
        page = self._page
        button.disable()
        limit = min(max(int(max_tokens or 48), 1), MAX_TOKENS)
        self._results.clear()
        try:
            for mode in MODES:
                self._status.set_text(f"Running in {mode} mode…")
                page.panels[mode].set_content(empty("Running", "The answer appears when the run has ended."))
                self._results[mode] = await self._playground.run(page.tenant, name, task, limit, mode)
                self._show_results()
            await page.refresh(select_latest=True)
            self._status.set_text("Both runs have ended. The tab Messages shows what each message attended to.")
        except ChoreographError as exc:
            self._status.set_text(f"The run failed: {exc}")
            for mode in MODES:
                if mode not in self._results:
                    page.panels[mode].set_content(empty("No result", "The run failed."))
        finally:
            button.enable()

    def _show_results(self) -> None:
        for mode, other in (MODES, MODES[::-1]):
            if mode in self._results:
                panel = result_panel(self._results[mode], self._results.get(other))
                self._page.panels[mode].set_content(panel)


def open_playground(service: InferenceService) -> Callable[[DashboardPage], None]:
    """Return what adds the playground of a server to a page."""
    playground = Playground(service)

    def add_tab(page: DashboardPage) -> None:
        PlaygroundTab(playground, page)

    return add_tab


def result_panel(result: ModeResult, other: ModeResult | None) -> str:
    """Return a run's answer and numbers, compared with the other mode's."""

    def ratio(own: float | None, others: float | None) -> str:
        return f"<small>{others / own:.1f}× lower</small>" if own and others and others > own else ""

    values = [
        ("Time to first token", seconds(result.ttft), ratio(result.ttft, other.ttft if other else None)),
        ("Tokens computed", count(result.computed), ratio(result.computed, other.computed if other else None)),
        ("End to end", seconds(result.seconds), ratio(result.seconds, other.seconds if other else None)),
        ("Tokens reused", count(result.reused), ""),
    ]
    numbers = "".join(
        f'<div class="tile"><span>{name}</span><b>{value}</b>{note}</div>' for name, value, note in values
    )
    answer = escape(result.answer) or "<i>The model ended the answer at once.</i>"
    return f'<div class="tiles two">{numbers}</div><div class="answer">{answer}</div>'
