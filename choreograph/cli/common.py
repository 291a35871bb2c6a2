"""Options that several commands share, and what they open."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..errors import ConfigError
from ..outputs import BASE_MODEL, Mode
from ..remote.remote_session import connect
from ..utils import check_on_hub, importing_torch, require

DEFAULT_MODEL = "smollm2-135m-instruct"
ADAPTER_NAME = "FT"  # name under which a command serves its --adapter
DIRECT_ADAPTER_NAME = "direct FT"  # and its --direct

Dtype = Literal["auto", "bfloat16", "float32", "float16"]

ModelOption = Annotated[str, typer.Option(help="A name, a Hub id, a model folder or a .gguf file.")]
DtypeOption = Annotated[Dtype, typer.Option(help="The type to compute in; auto is what suits the machine.")]
DeviceOption = Annotated[str, typer.Option(help="Where to compute: cpu, cuda.")]
CompileOption = Annotated[
    bool, typer.Option("--compile", help="Compile small steps; the first run waits for the compiler.")
]
AdapterOption = Annotated[str | None, typer.Option(help="A LoRA adapter to compute with: a folder or a Hub id.")]
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
ModeOption = Annotated[Mode, typer.Option(help="choreographed reuses messages anywhere, prefix only prefixes.")]
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

MaxTokensOption = Annotated[int, typer.Option(min=1, help="Most tokens of one message.")]
TemperatureOption = Annotated[float, typer.Option(min=0.0, help="0 is greedy.")]
SeedOption = Annotated[int, typer.Option(help="Seed of all sampling.")]

OutOption = Annotated[Path | None, typer.Option(help="The folder of the run; a stopped run continues there.")]
RayOption = Annotated[
    str | None, typer.Option("--ray", help="Run the examples on Ray: an address, as auto, or local to start one.")
]
RayWorkersOption = Annotated[
    int | None, typer.Option(min=1, help="Engines on Ray; one per CPU, or GPU, by default.", show_default=False)
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def quiet_transformers() -> None:
    """Hide the progress bars and warnings of transformers and the Hub client."""
    from huggingface_hub.utils import disable_progress_bars
    from transformers.utils import logging

    disable_progress_bars()
    logging.disable_progress_bar()
    logging.set_verbosity_error()


def open_engine(
    model: str,
    dtype: str,
    compile: bool = False,
    adapter: str | None = None,
    device: str | None = None,
    adapter_stages: list[str] | None = None,
    direct: str | None = None,
    vllm: str | None = None,
) -> Any:
    """Return an engine over a model and adapters, or on vLLM.

    `adapter` is served as `FT`, `direct`, of a single call, as `direct FT`.
    Raises ConfigError if an adapter was trained for other stages, another workflow or other weights.
    """
    if vllm is not None:
        if adapter is not None or direct is not None:
            raise ConfigError("--adapter with --vllm: the server computes: load adapters there, or leave out --vllm")
        with importing_torch():
            return connect(vllm, engine="vllm", tokenizer=None if model == DEFAULT_MODEL else model)
    if model.lower() != DEFAULT_MODEL:
        check_on_hub(model)
    from ..config import EngineConfig

    with importing_torch():
        from ..api.engine import Engine

        quiet_transformers()
    engine = Engine.from_pretrained(model, dtype=dtype, device=device, config=EngineConfig(compile=compile))
    if adapter is not None or direct is not None:
        from ..lab.training.train import check_adapter_usage

        if adapter is not None:
            check_adapter_usage(adapter, adapter_stages or [], engine.core.hf_model)
            engine.add_adapter(ADAPTER_NAME, adapter)
        if direct is not None:
            check_adapter_usage(direct, [], engine.core.hf_model, workflow="single_call")
            engine.add_adapter(DIRECT_ADAPTER_NAME, direct)
    return engine


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
    from ..lab.evaluation.ray_workers import RayWorkers

    return RayWorkers(load_engine, engine, address=address, num_workers=num_workers)


def adapter_name(adapter: str | None, adapter_stages: list[str] | None) -> str:
    """Return the model to run; adapter stages require an adapter."""
    if adapter is None and adapter_stages:
        raise typer.BadParameter("--adapter-stage: give the --adapter that computes it")
    return BASE_MODEL if adapter is None else ADAPTER_NAME


def parse_options(pairs: list[str] | None) -> dict[str, Any]:
    """Parse name=value pairs; JSON values are decoded."""
    options = {}
    for pair in pairs or []:
        name, equals, value = pair.partition("=")
        if not equals:
            raise typer.BadParameter(f"--option {pair!r}: write name=value")
        try:
            options[name] = json.loads(value)
        except json.JSONDecodeError:
            options[name] = value
    return options
