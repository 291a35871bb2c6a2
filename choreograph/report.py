"""Tables and numbers for people: rich on a terminal, aligned plain text in a pipe. Knows no engine."""

import json
from collections.abc import Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text


def console_of(*, quiet: bool = False, stderr: bool = False) -> Console:
    """A console that shows texts as they are: `:key:` is what somebody said, no picture of a key."""
    return Console(quiet=quiet, stderr=stderr, emoji=False)


def show_table(
    console: Console, title: str, head: Sequence[str], lines: Sequence[Sequence[str]], *, texts: int = 1
) -> None:
    """The first columns, `texts` of them, are text, the others are numbers. On a narrow terminal texts fold, but for
    the first one of a line, which names it."""
    if console.is_terminal:
        console.print(_table(console.width, title, head, lines, texts))
        return
    widths = [max(cell_len(line[i]) for line in (head, *lines)) for i in range(len(head))]
    console.print(title, markup=False, highlight=False, soft_wrap=True)
    for line in (head, *lines):
        gaps = [" " * (w - cell_len(c)) for c, w in zip(line, widths, strict=True)]
        cells = [c + gap if i < texts else gap + c for i, (c, gap) in enumerate(zip(line, gaps, strict=True))]
        console.print("  ".join(cells).rstrip(), markup=False, highlight=False, soft_wrap=True)


def _table(width: int, title: str, head: Sequence[str], lines: Sequence[Sequence[str]], texts: int) -> Table:
    table = Table(title=Text(title, style="italic"), title_justify="left")
    names = max(cell_len(line[0]) for line in (head, *lines))
    for index, name in enumerate(head):
        first = index == 0 and names <= width // 2
        whole = first or index >= texts
        table.add_column(
            Text(name),
            justify="left" if index < texts else "right",
            no_wrap=whole,
            overflow="ellipsis" if whole else "fold",
            min_width=names if first else None,
        )
    for line in lines:
        table.add_row(*map(Text, line))
    return table


def show_run(console: Console, title: str, done: Any) -> None:
    """What one run of a workflow cost, stage by stage, what it found out besides its answer, and what went unread."""
    lines = [
        (s.stage, str(s.calls), milliseconds(s.ttft), str(s.encoded), str(s.cached), str(s.generated))
        for s in done.cost.stages
    ]
    show_table(console, title, ("stage", "calls", "TTFT", "encoded", "reused", "generated"), lines)
    told = (("found out", done.performance.findings), ("could not be parsed", dict(done.performance.unparseable)))
    for what, found in told:
        if found:
            line = f"{what}: {json.dumps(found, ensure_ascii=False)}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)


def milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.0f} ms"


def ratio(above: float | None, below: float | None) -> str:
    return f"{above / below:.2f}x" if above and below else "-"
