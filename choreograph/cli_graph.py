"""`choreograph graph`: step graphs from the command line. Owns options and printing."""

import json
import re
from pathlib import Path
from typing import Annotated

import typer

from .cli_options import Json
from .report import console_of

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
    picture: Annotated[Path | None, typer.Option(help="Write the graph as SVG.")] = None,
    as_json: Json = False,
) -> None:
    """Show who waits for whom, and how many steps away each agent is."""
    from .places import make_room, write_whole
    from .report import show_table
    from .viz.steps import lines, svg
    from .workflow import Progress, StepGraph

    make_room(picture)
    found = StepGraph.read(graph)
    happened = re.split(r"[,\s]+(?=[+-])", events.strip()) if events.strip() else []  # names may hold commas and spaces
    steps = found.steps(Progress.after(happened, found.agents))
    if picture is not None:
        write_whole(picture, svg(found, steps))
    if as_json:
        print(json.dumps({agent: None if value == float("inf") else value for agent, value in steps.items()}))
        return
    show_table(console_of(), found.name, ("agent", "waits for", "steps"), lines(found, steps), texts=2)
