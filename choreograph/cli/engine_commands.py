"""Commands on one engine: its facts, its backends, a chat."""

import json
from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer

from ..console import make_console, print_table, print_text
from ..errors import ChoreographError, ConfigError
from ..outputs import BASE_MODEL
from . import common
from .common import open_engine

if TYPE_CHECKING:
    from rich.console import Console


def info(
    model: common.ModelOption = common.DEFAULT_MODEL,
    dtype: common.DtypeOption = "auto",
    as_json: common.JsonOption = False,
) -> None:
    """Show the model, its cache and the backend that this machine gets."""
    engine = open_engine(model, dtype)
    model_info, core, stats = engine.model_info, engine.core, engine.stats()
    cache_tokens, bytes_per_token = (
        stats.num_pages * core.config.cache.page_size,
        core.cache_manager.pool.bytes_per_token,
    )
    specs = Counter(map(str, model_info.attention_specs))
    described = {
        "model": model_info.name,
        "parameters": model_info.parameters,
        "layers": model_info.layers,
        "heads": f"{model_info.query_heads} query, {model_info.kv_heads} key-value, size {model_info.head_dim}",
        "positions": model_info.max_positions,
        "position encoding": model_info.position_encoding,
        "layers by attention": "; ".join(f"{count} {spec}" for spec, count in specs.items()),
        "dtype": model_info.dtype_name,
        "device": str(model_info.device),
        "backend": core.backend.name,
        "backend note": core.backend_fallback_reason or "",
        "cache bytes per token": bytes_per_token,
        "cache tokens": cache_tokens,
        "cache bytes": cache_tokens * bytes_per_token,
        "largest context in the cache": min(model_info.max_positions, cache_tokens),
        "largest context in free memory": min(
            model_info.max_positions, core.hf_model.max_cache_tokens(bytes_per_token)
        ),
        "fingerprint": model_info.fingerprint,
    }
    if as_json:
        print(json.dumps(described))
        return
    rows = [(name, f"{value:,}" if isinstance(value, int) else value) for name, value in described.items() if value]
    print_table(make_console(), "choreograph", ("fact", "value"), rows, num_text_columns=2)


def autotune(
    model: common.ModelOption = common.DEFAULT_MODEL,
    dtype: common.DtypeOption = "auto",
    device: common.DeviceOption = "cpu",
    as_json: common.JsonOption = False,
) -> None:
    """Measure the attention backends on this machine; `auto` takes the fastest."""
    from ..attention import autotune as tuning

    model_info = open_engine(model, dtype, device=device).model_info
    table = tuning.run(model_info.head_shape, model_info.attention_specs[0], model_info.dtype, model_info.device)
    path = tuning.save(table, model_info.head_shape, model_info.dtype, model_info.device)
    small, large = tuning.fastest(table)
    if as_json:
        print(json.dumps({"seconds": table, "small": small, "large": large, "file": str(path)}))
        return
    rows = [(name, *(f"{1e6 * seconds:,.0f}" for seconds in times.values())) for name, times in table.items()]
    print_table(make_console(), "microseconds of a layer", ("backend", *next(iter(table.values()))), rows)
    print(f"auto: {small} in steps of few rows, {large} in others")


def models(as_json: common.JsonOption = False) -> None:
    """List the tested architectures, their position encodings, and the tests."""
    from ..models.architectures import SUPPORTED_ARCHITECTURES

    if as_json:
        print(json.dumps({name: family._asdict() for name, family in SUPPORTED_ARCHITECTURES.items()}))
        return
    rows = [(name, ", ".join(f.position_encodings), f.notes, f.test) for name, f in SUPPORTED_ARCHITECTURES.items()]
    header = ("architecture", "positions", "what is special", "test")
    print_table(make_console(), "tested architectures", header, rows, num_text_columns=4)
    print("Any other that goes through transformers' attention interface is checked by numbers when it is loaded.")


def chat(
    model: common.ModelOption = common.DEFAULT_MODEL,
    mode: common.ModeOption = "choreographed",
    dtype: common.DtypeOption = "auto",
    system: Annotated[str, typer.Option(help="A system prompt.")] = "",
    adapter: common.AdapterOption = None,
    max_tokens: common.MaxTokensOption = 256,
    temperature: common.TemperatureOption = 0.7,
    seed: common.SeedOption = 0,
    as_json: common.JsonOption = False,
) -> None:
    """Talk to a model; an empty line ends it, /reset starts anew."""
    from ..sampling_params import SamplingParams

    console, engine = make_console(quiet=as_json), open_engine(model, dtype, adapter=adapter)
    if engine.chat is None:
        raise ConfigError(f"{engine.model_info.name} has no tokenizer: add tokenizer.json to its folder to talk to it")
    stop = [] if engine.chat.has_template else ["\nUser:", "\nSystem:"]
    sampling = SamplingParams(temperature=temperature, top_p=0.95, max_tokens=max_tokens, stop=stop)
    with engine.session(mode=mode, seed=seed, model=common.ADAPTER_NAME if adapter else BASE_MODEL) as session:
        try:
            opening = [session.prefill(session.system(system)).result()] if system else []
        except ChoreographError as exc:
            raise ConfigError(f"--system: {exc}") from None
        history = list(opening)
        while line := _read_line(console):
            if line == "/reset":
                history = list(opening)
                continue
            try:
                header = [session.user(line), session.assistant()]
                reply = session.decode(header, parents=history, sampling=sampling)
                for piece in reply.stream():
                    print_text(console, piece, end="")
            except ChoreographError as exc:
                dropped = f"{exc}; this turn is dropped, /reset starts anew"
                if as_json:
                    print(json.dumps({"error": dropped}), flush=True)
                print_text(console, dropped)
                continue
            console.print()
            history.append(reply)
            if as_json:
                usage = {"cached": reply.usage.cached_tokens, "generated": reply.usage.completion_tokens}
                print(json.dumps({"text": reply.text, "ttft": reply.timing.ttft, **usage}), flush=True)


def _read_line(console: "Console") -> str:
    try:
        return (console.input("[b]>[/b] ") if console.is_terminal else input()).strip()
    except EOFError:
        return ""
