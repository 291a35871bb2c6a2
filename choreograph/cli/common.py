"""Options that several commands share, and what they open."""

import json
from typing import Annotated, Any, Literal

import typer

from ..errors import ConfigError
from ..outputs import Mode
from ..remote.remote_session import connect
from ..utils import check_on_hub, importing_torch

DEFAULT_MODEL = "smollm2-135m-instruct"
ADAPTER_NAME = "FT"  # name under which a command serves its --adapter

Dtype = Literal["auto", "bfloat16", "float32", "float16"]

ModelOption = Annotated[str, typer.Option(help="A name, a Hub id, a model folder or a .gguf file.")]
DtypeOption = Annotated[Dtype, typer.Option(help="The type to compute in; auto is what suits the machine.")]
DeviceOption = Annotated[str, typer.Option(help="Where to compute: cpu, cuda.")]
CompileOption = Annotated[
    bool, typer.Option("--compile", help="Run small steps on a GPU as CUDA graphs; compiling takes minutes.")
]
AdapterOption = Annotated[str | None, typer.Option(help="A LoRA adapter to compute with: a folder or a Hub id.")]
ModeOption = Annotated[Mode, typer.Option(help="choreographed reuses messages anywhere, prefix only prefixes.")]
MaxTokensOption = Annotated[int, typer.Option(min=1, help="Most tokens of one message.")]
TemperatureOption = Annotated[float, typer.Option(min=0.0, help="0 is greedy.")]
SeedOption = Annotated[int, typer.Option(help="Seed of all sampling.")]

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
    vllm: str | None = None,
) -> Any:
    """Return an engine over a model and an adapter served as `FT`, or on vLLM.

    Raises ConfigError if the adapter was trained for other stages or other weights.
    """
    if vllm is not None:
        if adapter is not None:
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
    if adapter is not None:
        from ..models.adapter_usage import check_adapter_usage

        check_adapter_usage(adapter, adapter_stages or [], engine.core.hf_model)
        engine.add_adapter(ADAPTER_NAME, adapter)
    return engine


def parse_options(pairs: list[str] | None) -> dict[str, Any]:
    """Parse name=value pairs; JSON values are decoded."""
    options = {}
    for pair in pairs or []:
        name, equals, value = pair.partition("=")
        if not equals:
            raise typer.BadParameter(f"--option {pair!r}: write name=value")
        try:
            options[name] = json.loads(value)
        except (ValueError, RecursionError):  # also integers of thousands of digits, and deep nesting
            options[name] = value
    return options
