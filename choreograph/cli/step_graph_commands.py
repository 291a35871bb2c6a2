"""`choreograph step-graph`: step graphs of agents (KVFlow)."""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..console import make_console, print_table
from .common import JsonOption

if TYPE_CHECKING:
    from ..agents.step_graph import Dependency

app = typer.Typer(
    name="step-graph", help="KVFlow: step graphs of agents, and how soon each runs.", no_args_is_help=True
)

HOW_TO_WRITE = (
    "write one in YAML or JSON that names what each agent waits for: "
    "{agents: {planner: null, coder: planner, reviewer: {all_of: [planner, coder]}}} (docs/memory.md)"
)


@app.callback()
def _group() -> None:
    """KVFlow: step graphs of agents, and how soon each runs."""


@app.command()
def show(
    graph: Annotated[
        Path, typer.Argument(help="A step-graph file in YAML or JSON, not a workflow.", show_default=False)
    ],
    events: Annotated[
        str, typer.Option("--after", help="What happened so far: +a when agent a started, -a when it ended: +a,-a,+b")
    ] = "",
    svg: Annotated[Path | None, typer.Option(help="Write the graph as SVG.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the dependencies of agents and their steps to execution."""
    from ..agents.step_graph import Progress, StepGraph
    from ..errors import GraphError
    from ..utils import ensure_writable
    from ..viz import draw_step_graph, format_steps

    ensure_writable(svg)
    if not graph.is_file() or graph.suffix == ".py":
        raise GraphError(f"{graph}: {'not a' if graph.exists() else 'no such'} step-graph file; {HOW_TO_WRITE}")
    result = StepGraph.read(graph)
    happened = re.split(r"[,\s]+(?=[+-])", events.strip()) if events.strip() else []  # names may hold commas and spaces
    steps = result.steps(Progress.from_events(happened, result.agents))
    if svg is not None:
        draw_step_graph(result, steps, svg)
    if as_json:
        print(json.dumps({agent: None if value == float("inf") else value for agent, value in steps.items()}))
        return
    nearest = sorted(result.agents, key=lambda agent: steps[agent])
    rows = [(a, describe_dependency(result.dependencies[a]), format_steps(steps[a])) for a in nearest]
    print_table(make_console(), result.name, ("agent", "waits for", "steps"), rows, num_text_columns=2)


def describe_dependency(dependency: "Dependency | None") -> str:
    """Return a dependency in words: `all of coder, tester`."""
    if dependency is None:
        return "nothing"
    parts = [part if isinstance(part, str) else f"({describe_dependency(part)})" for part in dependency.operands]
    return parts[0] if len(parts) == 1 else f"{dependency.kind.replace('_', ' ')} {', '.join(parts)}"
