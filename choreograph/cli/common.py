"""Options that several commands share, and how they are read. Owns no command."""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

DEFAULT_MODEL = "smollm2-135m-instruct"

ADAPTER_NAME = "FT"  # the name of the adapter that a command is given


class ModeName(StrEnum):
    """The three execution modes."""

    choreographed = "choreographed"
    prefix = "prefix"
    naive = "naive"


class DtypeName(StrEnum):
    """Types a model can compute in; auto is what suits the machine."""

    auto = "auto"
    bfloat16 = "bfloat16"
    float32 = "float32"
    float16 = "float16"


ModelOption = Annotated[str, typer.Option(help="A name, a Hub id, a model folder or a .gguf file.")]

DtypeOption = Annotated[DtypeName, typer.Option(help="The type to compute in.")]

DeviceOption = Annotated[str, typer.Option(help="Where to compute: cpu, cuda.")]

CompileOption = Annotated[
    bool, typer.Option("--compile", help="Compile small steps; the first run waits for the compiler.")
]

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]

ModeOption = Annotated[ModeName, typer.Option(help="choreographed reuses messages anywhere, prefix only prefixes.")]

SeedOption = Annotated[int, typer.Option(help="Seed of all sampling.")]

AdapterOption = Annotated[str | None, typer.Option(help="A LoRA adapter to compute with: a folder or a Hub id.")]

WorkflowArgument = Annotated[str, typer.Argument(help="A workflow of the package, or the path of a Python file.")]

DataOption = Annotated[str, typer.Option(help="A .jsonl file, a Hub dataset (name or name:configuration), or games:N.")]

OutOption = Annotated[Path | None, typer.Option(help="The folder of the run; a run that was stopped goes on there.")]

LimitOption = Annotated[int | None, typer.Option(min=1, help="Only so many examples.")]

SplitOption = Annotated[str, typer.Option(help="The split of a Hub dataset.")]

ShuffleSeedOption = Annotated[
    int | None, typer.Option(help="Seed to shuffle the examples with; unshuffled without one.")
]

ConditionsOption = Annotated[
    list[str] | None, typer.Option("--condition", help="Only these conditions (and the baseline).")
]

AdapterStagesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter-stage", help="A stage whose decodes alone are the adapter's, over what the base model encoded."
    ),
]

WorkflowOptions = Annotated[
    list[str] | None, typer.Option("--option", help="An option of the workflow, as name=value.")
]

MaxTokensOption = Annotated[int, typer.Option(min=1, help="Most tokens of one message.")]

TemperatureOption = Annotated[float, typer.Option(min=0.0, help="0 is greedy.")]

ConcurrencyOption = Annotated[int, typer.Option(min=1, help="Examples that run at once, packed into the same steps.")]


def open_engine(
    model: str,
    dtype: str,
    compile: bool = False,
    adapter: str | None = None,
    device: str | None = None,
    adapter_stages: list[str] | None = None,
) -> Any:
    """An engine over a model; an adapter is served beside it as `FT`. Raises ConfigError for one that was trained for
    other readers or on other weights."""
    from ..config import EngineConfig
    from ..engine.engine import Engine

    config = EngineConfig(compile=compile)
    engine = Engine.from_pretrained(model, dtype=dtype, device=device, config=config)
    if adapter is not None:
        from ..training.train import check_adapter_usage

        check_adapter_usage(adapter, adapter_stages or [], engine.core.hf_model)
        engine.add_adapter(ADAPTER_NAME, adapter)
    return engine


def adapter_name(adapter: str | None, adapter_stages: list[str] | None) -> str:
    """The name of what computes, or reads. Raises BadParameter for readers without an adapter."""
    if adapter is None and adapter_stages:
        raise typer.BadParameter("--adapter-stage: give the --adapter that computes it")
    return "base" if adapter is None else ADAPTER_NAME


def parse_options(pairs: list[str]) -> dict[str, Any]:
    """name=value pairs; a value that reads as JSON is taken as such (4, true), else as text."""
    options = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise typer.BadParameter(f"--option {pair!r}: write name=value")
        try:
            options[name] = json.loads(value)
        except json.JSONDecodeError:
            options[name] = value
    return options
