"""Options that several commands of the lab share, and what they open."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from ...cli.common import ADAPTER_NAME
from ...outputs import BASE_MODEL
from ...utils import require

AdapterStagesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter-stage", help="A stage whose decodes alone use the adapter, over the base model's KV cache."
    ),
]

VllmOption = Annotated[
    str | None,
    typer.Option(
        "--vllm",
        metavar="URL",
        help="Compute on a vLLM server with the connector of choreograph.vllm; --model names its tokenizer.",
    ),
]

WorkflowArgument = Annotated[str, typer.Argument(help="A workflow of the package, or the path of a Python file.")]
WorkflowOptions = Annotated[
    list[str] | None, typer.Option("--option", help="An option of the workflow, as name=value.")
]
ConditionsOption = Annotated[
    list[str] | None, typer.Option("--condition", help="Only these conditions (and the baseline).")
]
ConcurrencyOption = Annotated[int, typer.Option(min=1, help="Examples that run at once, packed into the same steps.")]

DataOption = Annotated[
    str, typer.Option(help="A .jsonl file, a Hub dataset (name or name:configuration), games or games:N.")
]
LimitOption = Annotated[int | None, typer.Option(min=1, help="Only so many examples.")]
SplitOption = Annotated[
    str,
    typer.Option(
        help="train, validation, test: a part that shares no question or game with the others; all; or a Hub dataset's."
    ),
]
SplitSeedOption = Annotated[int, typer.Option(help="Seed of the splits of a file.")]
ShuffleSeedOption = Annotated[
    int | None, typer.Option(help="Seed to shuffle the examples with; unshuffled without one.")
]

OutOption = Annotated[Path | None, typer.Option(help="The folder of the run; a stopped run continues there.")]
RayOption = Annotated[
    str | None, typer.Option("--ray", help="Run the examples on Ray: an address, as auto, or local to start one.")
]
RayWorkersOption = Annotated[
    int | None, typer.Option(min=1, help="Engines on Ray; one per CPU, or GPU, by default.", show_default=False)
]


def check_ray_options(address: str | None, num_workers: int | None) -> None:
    """Refuse workers without `--ray`, and `--ray` without its extra."""
    if address is not None:
        require("ray", "ray")
    elif num_workers is not None:
        raise typer.BadParameter("--ray-workers: give --ray too")


def open_ray_workers(
    address: str | None, num_workers: int | None, load_engine: Callable[[], Any], engine: Any
) -> AbstractContextManager[Any]:
    """Return the workers of `--ray`; None without it.

    Args:
        load_engine: makes an engine like `engine` in the process of a worker.
    """
    if address is None:
        return nullcontext()
    from ..evaluation.ray_workers import RayWorkers

    return RayWorkers(load_engine, engine, address=address, num_workers=num_workers)


def adapter_name(adapter: str | None, adapter_stages: list[str] | None) -> str:
    """Return the model to run; adapter stages require an adapter."""
    if adapter is None and adapter_stages:
        raise typer.BadParameter("--adapter-stage: give the --adapter that computes it")
    return BASE_MODEL if adapter is None else ADAPTER_NAME
