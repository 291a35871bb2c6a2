"""The demo: Tree of Thoughts in prefix mode, then choreographed and forced to the same tokens, side by side."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from ..console import format_ms, format_ratio, print_table
from ..engine.engine import Engine
from ..events import Event
from ..outputs import Mode
from ..sampling_params import SamplingParams
from ..utils import atomic_write_text, ensure_writable
from ..viz.message_graph import message_graph_to_svg
from ..workflows import find
from ..workflows.run import RunMetrics, WorkflowResult, run_workflow

TASK = (
    "A baker fills 3 trays with 24 rolls each. She sells 2/3 of all rolls in the morning and half of the rest in "
    "the afternoon. How many rolls are left in the evening?"
)

SAMPLING = SamplingParams(temperature=0.7, top_p=0.95, max_tokens=160)


def run_demo(
    engine: Engine,
    console: Console,
    *,
    task: str = TASK,
    branches: int = 8,
    voters: int = 4,
    pairs: int = 3,
    svg_path: Path | None = None,
    seed: int = 0,
    sampling: SamplingParams = SAMPLING,
) -> dict[str, Any]:
    """Draws in prefix mode, says the same choreographed, then times both saying it, in turns; prints as it goes, and
    returns the numbers of the pair whose gain is the median, since a moment of another process spoils one."""
    ensure_writable(svg_path)
    workflow, options = find("tree_of_thoughts"), {"branches": branches, "voters": voters}

    def once(mode: Mode, **more: Any) -> WorkflowResult:
        engine.clear_cache()
        return run_workflow(engine, workflow, task, mode=mode, seed=seed, sampling=sampling, options=options, **more)

    with _progress(engine, console, "warming up"):
        few = SamplingParams(max_tokens=4)
        warm = run_workflow(engine, workflow, "1 + 1", mode="prefix", sampling=few, options=options)
        content = warm.run.transcript()
        run_workflow(engine, workflow, "1 + 1", mode="choreographed", replay=content, options=options)
    console.print(f"[b]Problem[/b] {task}", highlight=False)
    with _progress(engine, console, f"prefix mode: {branches} branches, {voters} votes, the answer"):
        content = once("prefix").run.transcript()
    with _progress(engine, console, "choreographed mode, forced to the same tokens") as stop:
        shown = once(
            "choreographed",
            replay=content,
            on_text=_make_answer_printer(console, stop),
            on_finish=lambda steps: message_graph_to_svg(
                steps, "Tree of Thoughts, choreographed: who saw whom, and where"
            ),
        )
    console.print("\n")
    measured = []
    for number in range(1, pairs + 1):
        with _progress(engine, console, f"both forced to these tokens, to time them: {number} of {pairs}"):
            measured.append((once("prefix", replay=content), once("choreographed", replay=content)))
    console.print()
    middle = sorted(measured, key=_speedup)[(len(measured) - 1) // 2]
    _print_comparison(console, middle[0].metrics, middle[1].metrics)
    if pairs > 1:
        gains = ", ".join(f"{_speedup(pair):.2f}x" for pair in measured)
        console.print(f"The pair in the middle of {pairs}; end to end they are {gains}.", highlight=False)
    if svg_path is not None:
        atomic_write_text(svg_path, shown.artifact)
        console.print(f"\nWho saw whom, and where: {svg_path}", markup=False, highlight=False, soft_wrap=True)
    return _summarize(task, *middle) | {"e2e_ratios": [_speedup(pair) for pair in measured]}


def _speedup(pair: tuple[WorkflowResult, WorkflowResult]) -> float:
    return pair[0].metrics.seconds / pair[1].metrics.seconds


def _make_answer_printer(console: Console, stop_progress: Callable[[], None]) -> Callable[[str], None]:
    """Prints the answer as it comes, behind a label."""
    label = ["[b]Final answer[/b]"]

    def say(piece: str) -> None:
        stop_progress()
        if label:
            console.print(label.pop(), end="", highlight=False)
        console.print(piece, end="", markup=False, highlight=False, soft_wrap=True)

    return say


@contextmanager
def _progress(engine: Engine, console: Console, label: str) -> Iterator[Callable[[], None]]:
    """A live count of tokens on a terminal, one line in a pipe. Yields a function that ends it early."""
    if not console.is_terminal:
        console.print(f"... {label}", highlight=False)
        yield lambda: None
        return
    status = console.status(label)
    count = 0

    def note(event: Event) -> None:
        nonlocal count
        count += event.kind == "token"
        if event.kind == "step":
            status.update(f"{label}: {count} tokens")

    status.start()
    forget = engine.events.subscribe(note)
    try:
        yield status.stop
    finally:
        forget()
        status.stop()


def _print_comparison(console: Console, prefix: RunMetrics, choreographed: RunMetrics) -> None:
    """Two narrow tables, which an 80-column terminal shows whole."""
    pairs = list(zip(prefix.stages, choreographed.stages, strict=True))
    times = [
        (old.stage, str(old.calls), format_ms(old.ttft), format_ms(new.ttft), format_ratio(old.ttft, new.ttft))
        for old, new in pairs
        if old.ttft is not None
    ]
    calls = sum(old.calls for old, _ in pairs if old.ttft is not None)
    total = (format_ms(prefix.ttft), format_ms(choreographed.ttft), format_ratio(prefix.ttft, choreographed.ttft))
    times.append(("all decodes", str(calls), *total))
    print_table(
        console, "Time to first token, mean per call", ("stage", "calls", "prefix", "choreographed", "ratio"), times
    )
    counts = [(old.stage, *map(str, (old.encoded, new.encoded, old.cached, new.cached))) for old, new in pairs]
    counts.append(("all", *map(str, (prefix.encoded, choreographed.encoded, prefix.cached, choreographed.cached))))
    head = ("stage", "encoded: prefix", "choreogr.", "reused: prefix", "choreogr.")
    console.print()
    print_table(console, "Prompt tokens encoded, and reused", head, counts)
    console.print(
        f"\nEnd to end: prefix {prefix.seconds:.2f} s, choreographed {choreographed.seconds:.2f} s, "
        f"ratio {format_ratio(prefix.seconds, choreographed.seconds)}",
        highlight=False,
    )


def _summarize(task: str, prefix: WorkflowResult, choreographed: WorkflowResult) -> dict[str, Any]:
    return {
        "task": task,
        "answer": choreographed.answer.text,
        "same_tokens": prefix.run.transcript() == choreographed.run.transcript(),
        "prefix": prefix.metrics.as_dict(),
        "choreographed": choreographed.metrics.as_dict(),
        "ttft_ratio": (prefix.metrics.ttft or 0.0) / (choreographed.metrics.ttft or 1.0),
        "e2e_ratio": _speedup((prefix, choreographed)),
        "unparseable": dict(prefix.run.parse_failures),
    }
