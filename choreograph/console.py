"""Tables and numbers for people: rich on a terminal, aligned plain text in a pipe. Knows no engine."""

import json
from collections.abc import Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text


def make_console(*, quiet: bool = False, stderr: bool = False) -> Console:
    """A console that shows texts as they are: `:key:` is what somebody said, no picture of a key."""
    return Console(quiet=quiet, stderr=stderr, emoji=False)


def print_table(
    console: Console, title: str, header: Sequence[str], rows: Sequence[Sequence[str]], *, num_text_columns: int = 1
) -> None:
    """The first columns, `texts` of them, are text, the others are numbers. On a narrow terminal texts fold, but for
    the first one of a line, which names it."""
    if console.is_terminal:
        console.print(_build_table(console.width, title, header, rows, num_text_columns))
        return
    widths = [max(cell_len(line[i]) for line in (header, *rows)) for i in range(len(header))]
    console.print(title, markup=False, highlight=False, soft_wrap=True)
    for line in (header, *rows):
        gaps = [" " * (w - cell_len(c)) for c, w in zip(line, widths, strict=True)]
        cells = [
            c + gap if i < num_text_columns else gap + c for i, (c, gap) in enumerate(zip(line, gaps, strict=True))
        ]
        console.print("  ".join(cells).rstrip(), markup=False, highlight=False, soft_wrap=True)


def _build_table(
    width: int, title: str, header: Sequence[str], rows: Sequence[Sequence[str]], num_text_columns: int
) -> Table:
    table = Table(title=Text(title, style="italic"), title_justify="left")
    names = max(cell_len(line[0]) for line in (header, *rows))
    for index, name in enumerate(header):
        first = index == 0 and names <= width // 2
        whole = first or index >= num_text_columns
        table.add_column(
            Text(name),
            justify="left" if index < num_text_columns else "right",
            no_wrap=whole,
            overflow="ellipsis" if whole else "fold",
            min_width=names if first else None,
        )
    for line in rows:
        table.add_row(*map(Text, line))
    return table


def print_run(console: Console, title: str, result: Any) -> None:
    """What one run of a workflow cost, stage by stage, what it found out besides its answer, and what went unread."""
    lines = [
        (s.stage, str(s.calls), format_ms(s.ttft), str(s.encoded), str(s.cached), str(s.generated))
        for s in result.metrics.stages
    ]
    print_table(console, title, ("stage", "calls", "TTFT", "encoded", "reused", "generated"), lines)
    host_tokens = (("found out", result.run.outputs), ("could not be parsed", dict(result.run.parse_failures)))
    for what, found in host_tokens:
        if found:
            line = f"{what}: {json.dumps(found, ensure_ascii=False)}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)


def format_ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.0f} ms"


def format_ratio(numerator: float | None, denominator: float | None) -> str:
    return f"{numerator / denominator:.2f}x" if numerator and denominator else "-"
