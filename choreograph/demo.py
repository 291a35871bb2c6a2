"""The demo: Tree of Thoughts in prefix mode, then choreographed and forced to the same tokens, side by side."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from .choreographies import find
from .core import Engine
from .events import Event
from .measure import Run, RunCost, perform
from .places import make_room, write_whole
from .report import milliseconds, ratio, show_table
from .types import Mode, SamplingParams
from .viz.graph import svg

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
    picture: Path | None = None,
    seed: int = 0,
    sampling: SamplingParams = SAMPLING,
) -> dict[str, Any]:
    """Draws in prefix mode, says the same choreographed, then times both saying it, in turns; prints as it goes, and
    returns the numbers of the pair whose gain is the median, since a moment of another process spoils one."""
    make_room(picture)
    workflow, options = find("tree_of_thoughts"), {"branches": branches, "voters": voters}

    def once(mode: Mode, **more: Any) -> Run:
        engine.clear_cache()
        return perform(engine, workflow, task, mode=mode, seed=seed, sampling=sampling, options=options, **more)

    with _progress(engine, console, "warming up"):
        few = SamplingParams(max_tokens=4)
        warm = perform(engine, workflow, "1 + 1", mode="prefix", sampling=few, options=options)
        content = warm.performance.content()
        perform(engine, workflow, "1 + 1", mode="choreographed", forced=content, options=options)
    console.print(f"[b]Problem[/b] {task}", highlight=False)
    with _progress(engine, console, f"prefix mode: {branches} branches, {voters} votes, the answer"):
        content = once("prefix").performance.content()
    with _progress(engine, console, "choreographed mode, forced to the same tokens") as stop:
        shown = once(
            "choreographed",
            forced=content,
            on_text=_speaker(console, stop),
            look=lambda steps: svg(steps, "Tree of Thoughts, choreographed: who saw whom, and where"),
        )
    console.print("\n")
    measured = []
    for number in range(1, pairs + 1):
        with _progress(engine, console, f"both forced to these tokens, to time them: {number} of {pairs}"):
            measured.append((once("prefix", forced=content), once("choreographed", forced=content)))
    console.print()
    middle = sorted(measured, key=_gain)[(len(measured) - 1) // 2]
    _show(console, middle[0].cost, middle[1].cost)
    if pairs > 1:
        gains = ", ".join(f"{_gain(pair):.2f}x" for pair in measured)
        console.print(f"The pair in the middle of {pairs}; end to end they are {gains}.", highlight=False)
    if picture is not None:
        write_whole(picture, shown.picture)
        console.print(f"\nWho saw whom, and where: {picture}", markup=False, highlight=False, soft_wrap=True)
    return _numbers(task, *middle) | {"e2e_ratios": [_gain(pair) for pair in measured]}


def _gain(pair: tuple[Run, Run]) -> float:
    return pair[0].cost.seconds / pair[1].cost.seconds


def _speaker(console: Console, stop_progress: Callable[[], None]) -> Callable[[str], None]:
    """Prints the answer as it comes, behind a label."""
    label = ["[b]Final answer[/b]"]

    def say(piece: str) -> None:
        stop_progress()
        if label:
            console.print(label.pop(), end="", highlight=False)
        console.print(piece, end="", markup=False, highlight=False, soft_wrap=True)

    return say


@contextmanager
def _progress(engine: Engine, console: Console, what: str) -> Iterator[Callable[[], None]]:
    """A live count of tokens on a terminal, one line in a pipe. Yields a function that ends it early."""
    if not console.is_terminal:
        console.print(f"... {what}", highlight=False)
        yield lambda: None
        return
    status = console.status(what)
    count = 0

    def note(event: Event) -> None:
        nonlocal count
        count += event.kind == "token"
        if event.kind == "step":
            status.update(f"{what}: {count} tokens")

    status.start()
    forget = engine.events.listen(note)
    try:
        yield status.stop
    finally:
        forget()
        status.stop()


def _show(console: Console, before: RunCost, after: RunCost) -> None:
    """Two narrow tables, which an 80-column terminal shows whole."""
    pairs = list(zip(before.stages, after.stages, strict=True))
    times = [
        (old.stage, str(old.calls), milliseconds(old.ttft), milliseconds(new.ttft), ratio(old.ttft, new.ttft))
        for old, new in pairs
        if old.ttft is not None
    ]
    calls = sum(old.calls for old, _ in pairs if old.ttft is not None)
    total = (milliseconds(before.ttft), milliseconds(after.ttft), ratio(before.ttft, after.ttft))
    times.append(("all decodes", str(calls), *total))
    show_table(
        console, "Time to first token, mean per call", ("stage", "calls", "prefix", "choreographed", "ratio"), times
    )
    counts = [(old.stage, *map(str, (old.encoded, new.encoded, old.cached, new.cached))) for old, new in pairs]
    counts.append(("all", *map(str, (before.encoded, after.encoded, before.cached, after.cached))))
    head = ("stage", "encoded: prefix", "choreogr.", "reused: prefix", "choreogr.")
    console.print()
    show_table(console, "Prompt tokens encoded, and reused", head, counts)
    console.print(
        f"\nEnd to end: prefix {before.seconds:.2f} s, choreographed {after.seconds:.2f} s, "
        f"ratio {ratio(before.seconds, after.seconds)}",
        highlight=False,
    )


def _numbers(task: str, before: Run, after: Run) -> dict[str, Any]:
    return {
        "task": task,
        "answer": after.answer.text,
        "same_tokens": before.performance.content() == after.performance.content(),
        "prefix": before.cost.as_dict(),
        "choreographed": after.cost.as_dict(),
        "ttft_ratio": (before.cost.ttft or 0.0) / (after.cost.ttft or 1.0),
        "e2e_ratio": _gain((before, after)),
        "unparseable": dict(before.performance.unparseable),
    }
