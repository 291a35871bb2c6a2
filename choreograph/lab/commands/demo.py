"""`choreograph demo`: questions over notes, or Tree of Thoughts, in prefix and choreographed mode."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ...cli import common
from ...console import format_ms, format_ratio, make_console, print_table, print_text
from ...events import Event
from ...outputs import Mode
from ...sampling_params import SamplingParams
from ...utils import ensure_writable, require
from ...viz import draw_message_graph
from .retrieval_demo import run_retrieval_demo

if TYPE_CHECKING:
    from rich.console import Console

    from ...api.engine import Engine
    from ..workflows.run import WorkflowResult

Workflow = Literal["retrieval", "tree_of_thoughts"]

TASK = (
    "The mill on the Arn was built in 1711 and ground rye until the flood of 1954. The stone bridge beside it has five "
    "arches and was rebuilt after the flood, with steel inside. The school opened in the old customs house; its first "
    "teacher was also the ferryman. Retell in several sentences what the text says about the mill, the bridge and the "
    "school. When was the mill built?"
)

SAMPLING = SamplingParams(temperature=0.4, top_p=0.95, max_tokens=160)


def run_demo(
    engine: "Engine",
    console: "Console",
    *,
    task: str = TASK,
    branches: int = 8,
    voters: int = 4,
    pairs: int = 3,
    svg_path: Path | None = None,
    seed: int = 0,
    sampling: SamplingParams = SAMPLING,
) -> dict[str, Any]:
    """Generate in prefix mode, then time both modes on these tokens.

    Returns the numbers of the pair with the median speedup, so a single disturbed run has no
    effect.
    """
    from ..workflows import find
    from ..workflows.run import run_workflow

    ensure_writable(svg_path)
    if svg_path is not None:
        require("matplotlib", "viz")
    workflow, options = (
        find("tree_of_thoughts"),
        {"branches": branches, "voters": voters, "prompt": "text", "form": "short"},
    )

    def run_once(mode: Mode, **kwargs: Any) -> "WorkflowResult":
        engine.clear_cache()
        return run_workflow(engine, workflow, task, mode=mode, seed=seed, sampling=sampling, options=options, **kwargs)

    with _progress(engine, console, "warming up"):
        short = SamplingParams(max_tokens=4)
        warm = run_workflow(engine, workflow, "1 + 1", mode="prefix", sampling=short, options=options)
        run_workflow(engine, workflow, "1 + 1", mode="choreographed", replay=warm.run.transcript(), options=options)
    console.print(f"[b]Question[/b] {task}", highlight=False)
    with _progress(engine, console, f"prefix mode: {branches} branches, {voters} votes, the answer"):
        transcript = run_once("prefix").run.transcript()
    label = ["[b]Final answer[/b]"]
    with _progress(engine, console, "choreographed mode, forced to the same tokens") as stop:

        def on_text(piece: str) -> None:
            stop()
            if label:
                console.print(label.pop(), end="", highlight=False)
            print_text(console, piece, end="")

        def on_finish(steps: Any) -> None:
            if svg_path is not None:
                draw_message_graph(steps, svg_path, "Tree of Thoughts, choreographed: the context of every message")

        shown = run_once("choreographed", replay=transcript, on_text=on_text, on_finish=on_finish)
    if not shown.answer.text.strip():
        print_text(console, "the answer is empty: the model ended it at once")
    for stage, count in shown.run.parse_failures.items():
        print_text(console, f"\ncould not be parsed: {count} calls of stage {stage!r}", end="")
    console.print("\n")
    measured = []
    for number in range(1, pairs + 1):
        with _progress(engine, console, f"both forced to these tokens, to time them: {number} of {pairs}"):
            measured.append((run_once("prefix", replay=transcript), run_once("choreographed", replay=transcript)))
    console.print()
    prefix, choreographed = sorted(measured, key=_speedup)[(len(measured) - 1) // 2]
    _print_comparison(console, prefix, choreographed)
    if pairs > 1:
        speedups = ", ".join(f"{_speedup(pair):.2f}x" for pair in measured)
        console.print(f"The median pair of {pairs}; end to end they are {speedups}.", highlight=False)
    if svg_path is not None:
        print_text(console, f"\nThe context of every message: {svg_path}")
    return {
        "task": task,
        "answer": choreographed.answer.text,
        "same_tokens": prefix.run.transcript() == choreographed.run.transcript(),
        "prefix": prefix.metrics.as_dict(),
        "choreographed": choreographed.metrics.as_dict(),
        "ttft_ratio": (prefix.metrics.ttft or 0.0) / (choreographed.metrics.ttft or 1.0),
        "e2e_ratio": _speedup((prefix, choreographed)),
        "unparseable": dict(prefix.run.parse_failures),
        "e2e_ratios": [_speedup(pair) for pair in measured],
    }


def _speedup(pair: "tuple[WorkflowResult, WorkflowResult]") -> float:
    return pair[0].metrics.seconds / pair[1].metrics.seconds


@contextmanager
def _progress(engine: "Engine", console: "Console", label: str) -> Iterator[Callable[[], None]]:
    """Show a live count of tokens; yield a function that hides it."""
    if not console.is_terminal:
        console.print(f"... {label}", highlight=False)
        yield lambda: None
        return
    status, count = console.status(label), 0

    def on_event(event: Event) -> None:
        nonlocal count
        count += event.kind == "token"
        if event.kind == "step":
            status.update(f"{label}: {count} tokens")

    status.start()
    unsubscribe = engine.events.subscribe(on_event)
    try:
        yield status.stop
    finally:
        unsubscribe()
        status.stop()


def _print_comparison(
    console: "Console", prefix_result: "WorkflowResult", choreographed_result: "WorkflowResult"
) -> None:
    """Print two narrow tables that fit an 80-column terminal."""
    prefix, choreographed = prefix_result.metrics, choreographed_result.metrics
    pairs = list(zip(prefix.stages, choreographed.stages, strict=True))
    decodes = [(old, new) for old, new in pairs if old.ttft is not None]
    calls = sum(old.calls for old, _ in decodes)
    times = [(old.stage, old.calls, old.ttft, new.ttft) for old, new in decodes]
    times.append(("all decodes", calls, prefix.ttft, choreographed.ttft))
    rows = [(stage, str(n), format_ms(a), format_ms(b), format_ratio(a, b)) for stage, n, a, b in times]
    header: tuple[str, ...] = ("stage", "calls", "prefix", "choreographed", "ratio")
    print_table(console, "Time to first token, mean per call", header, rows)
    counts = [(old.stage, *map(str, (old.encoded, new.encoded, old.cached, new.cached))) for old, new in pairs]
    counts.append(("all", *map(str, (prefix.encoded, choreographed.encoded, prefix.cached, choreographed.cached))))
    header = ("stage", "encoded: prefix", "choreogr.", "reused: prefix", "choreogr.")
    console.print()
    print_table(console, "Prompt tokens encoded, and reused", header, counts)
    seconds = f"prefix {prefix.seconds:.2f} s, choreographed {choreographed.seconds:.2f} s"
    ratio = format_ratio(prefix.seconds, choreographed.seconds)
    console.print(f"\nEnd to end: {seconds}, ratio {ratio}", highlight=False)


def demo(
    model: common.ModelOption = common.DEFAULT_MODEL,
    dtype: common.DtypeOption = "auto",
    workflow: Annotated[Workflow, typer.Option(help="What to run.")] = "retrieval",
    branches: Annotated[int, typer.Option(min=1, help="Tree of Thoughts: solutions to branch into.")] = 8,
    voters: Annotated[int, typer.Option(min=1, help="Tree of Thoughts: votes on the best solution.")] = 4,
    pairs: Annotated[int, typer.Option(min=1, help="Tree of Thoughts: how often to time both modes.")] = 3,
    svg: Annotated[Path, typer.Option(help="Where the picture goes (SVG).")] = Path("out/demo.svg"),
    seed: common.SeedOption = 0,
    as_json: common.JsonOption = False,
) -> None:
    """Compare prefix caching and reuse: eight questions over notes, or Tree of Thoughts on equal tokens."""
    console = make_console(quiet=as_json)
    with console.status("loading the model") if console.is_terminal else nullcontext():
        engine = common.open_engine(model, dtype)
    if workflow == "retrieval":
        numbers = run_retrieval_demo(engine, console, svg_path=svg)
    else:
        numbers = run_demo(engine, console, branches=branches, voters=voters, pairs=pairs, svg_path=svg, seed=seed)
    if as_json:
        print(json.dumps(numbers))
