"""`choreograph graph`: step graphs from the command line. Owns options and printing."""

import json
import re
from pathlib import Path
from typing import Annotated

import typer

from ..console import make_console
from .common import JsonOption

app = typer.Typer(name="graph", help="KVFlow: step graphs of agents, and how soon each runs.", no_args_is_help=True)

GraphFile = Annotated[Path, typer.Argument(help="A step graph in YAML or JSON.", show_default=False)]


@app.callback()
def _group() -> None:
    """KVFlow: step graphs of agents, and how soon each runs."""


@app.command()
def show(
    graph: GraphFile,
    events: Annotated[
        str, typer.Option("--after", help="What happened so far: +a when agent a started, -a when it ended: +a,-a,+b")
    ] = "",
    svg: Annotated[Path | None, typer.Option(help="Write the graph as SVG.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show who waits for whom, and how many steps away each agent is."""
    from ..agents.step_graph import Progress, StepGraph
    from ..console import print_table
    from ..utils import atomic_write_text, ensure_writable
    from ..viz.step_chart import step_graph_to_svg, step_table_rows

    ensure_writable(svg)
    result = StepGraph.read(graph)
    happened = re.split(r"[,\s]+(?=[+-])", events.strip()) if events.strip() else []  # names may hold commas and spaces
    steps = result.steps(Progress.from_events(happened, result.agents))
    if svg is not None:
        atomic_write_text(svg, step_graph_to_svg(result, steps))
    if as_json:
        print(json.dumps({agent: None if value == float("inf") else value for agent, value in steps.items()}))
        return
    print_table(
        make_console(), result.name, ("agent", "waits for", "steps"), step_table_rows(result, steps), num_text_columns=2
    )
