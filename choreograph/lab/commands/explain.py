"""`choreograph explain`: what reuse did to the messages of a run."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ...cli import common
from ...console import make_console, print_table, print_text
from ...errors import DataError
from ...utils import atomic_write_text


def explain(
    run: Annotated[Path, typer.Argument(help="A folder that `trace` or `eval` wrote.", show_default=False)],
    example: Annotated[str | None, typer.Option(help="The id of the example; the first by default.")] = None,
    condition: Annotated[
        str | None, typer.Option(help="A condition of the workflow; the first choreographed one by default.")
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Compute the divergence from prefix mode.")] = False,
    html: Annotated[Path | None, typer.Option(help="Where a page of one file goes.", show_default=False)] = None,
    workflow: Annotated[
        str | None, typer.Option(help="The workflow, if its file has moved.", show_default=False)
    ] = None,
    model: common.ModelOption = common.DEFAULT_MODEL,
    dtype: common.DtypeOption = "float32",
    device: common.DeviceOption = "cpu",
    as_json: common.JsonOption = False,
) -> None:
    """Show what the messages of a run saw, missed and moved."""
    from ..evaluation.explain_page import render_page
    from ..evaluation.explain_run import explain_run, load_run
    from ..workflows import find

    settings, transcripts = load_run(run)
    chosen = next((t for t in transcripts if example in (None, t.id)), None)
    if chosen is None:
        raise DataError(f"{run}: no example {example!r}; it has {[t.id for t in transcripts[:5]]}")
    name = workflow or settings["workflow"]
    engine = common.open_engine(model, dtype, device=device)
    messages = explain_run(
        engine, find(name), chosen, options=settings.get("options"), condition=condition, measure=measure
    )
    title = f"{Path(name).stem}: {chosen.id}"
    if html is not None:
        atomic_write_text(html, render_page(messages, title, f"{engine.model_info.name}, {run}"))
    if as_json:
        print(json.dumps([{"name": m.name, "parents": m.parents, **asdict(m.explanation)} for m in messages]))
        return
    console = make_console()
    rows = []
    for message in messages:
        kl = message.explanation.kl
        for number, (parent, p) in enumerate(message.rows or [("", None)]):
            first = (message.name, "" if kl is None else f"{kl:.3f}") if not number else ("", "")
            seen: tuple[str, ...] = ("",) * 7
            if p is not None:
                counts = (f"{p.shift:+d}", *map(str, (p.reused, p.repaired, p.computed)))
                seen = (parent, message.describe(p.leaked), message.describe(p.blocked), *counts)
            rows.append((first[0], *seen, first[1]))
    header = ("message", "parent", "saw besides", "did not see", "moved", "reused", "repaired", "computed", "KL")
    print_table(console, title, header, rows, num_text_columns=4)
    for message in messages:
        for sentence in message.explanation.recommendations:
            print_text(console, sentence)
