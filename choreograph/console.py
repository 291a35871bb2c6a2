"""Tables, text and progress for terminals and pipes (extra `cli`)."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .utils import require

if TYPE_CHECKING:
    from rich.console import Console


def make_console(*, quiet: bool = False, stderr: bool = False) -> "Console":
    """Return a console that does not replace `:name:` by emoji."""
    require("rich", "cli")
    from rich.console import Console

    return Console(quiet=quiet, stderr=stderr, emoji=False)


def print_text(console: "Console", text: str, end: str = "\n") -> None:
    """Print text as it is, without markup, colors and wrapping."""
    console.print(text, end=end, markup=False, highlight=False, soft_wrap=True)


def print_table(
    console: "Console", title: str, header: Sequence[str], rows: Sequence[Sequence[str]], *, num_text_columns: int = 1
) -> None:
    """Print a table whose first columns are text and the others numbers.

    On a narrow terminal text folds, except in the first column, which names the row. In a pipe columns are aligned.
    """
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title, style="italic"), title_justify="left")
    name_width = max(cell_len(row[0]) for row in (header, *rows))
    for index, name in enumerate(header):
        is_text, is_name = index < num_text_columns, index == 0 and name_width <= console.width // 2
        no_wrap = is_name or not is_text
        table.add_column(
            Text(name),
            justify="left" if is_text else "right",
            no_wrap=no_wrap,
            overflow="ellipsis" if no_wrap else "fold",
            min_width=name_width if is_name else None,
        )
    for row in rows:
        table.add_row(*map(Text, row))
    if not console.is_terminal:
        table.title, table.box, table.padding, table.pad_edge = None, None, (0, 2, 0, 0), False
        table.width = console.measure(table, options=console.options.update(width=100_000)).maximum
        print_text(console, title)
    console.print(table, soft_wrap=not console.is_terminal)


@contextmanager
def progress(console: "Console", label: str, total: int, done: int = 0) -> Iterator[Callable[[], None]]:
    """Yield a function that advances a bar, or lines in a pipe."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=console, transient=True) as bar:
            task = bar.add_task(label, total=total, completed=done)
            yield lambda: bar.advance(task)
        return
    count = done

    def tick() -> None:
        nonlocal count
        count += 1
        if count * 10 // total > (count - 1) * 10 // total:
            console.print(f"... {label}: {count} of {total}", highlight=False)

    yield tick


def format_ms(seconds: float | None) -> str:
    """Return seconds as whole milliseconds; `-` for None."""
    return "-" if seconds is None else f"{seconds * 1e3:.0f} ms"


def format_ratio(numerator: float | None, denominator: float | None) -> str:
    """Return `1.23x`; `-` if either number is missing or zero."""
    return f"{numerator / denominator:.2f}x" if numerator and denominator else "-"
