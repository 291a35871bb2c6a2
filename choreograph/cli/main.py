"""What a command line reads and writes, and how it says what went wrong. Knows no commands."""

import io
import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ..console import make_console
from ..errors import ConfigError
from ..outputs import BASE_MODEL
from .common import (
    ADAPTER_NAME,
    DEFAULT_MODEL,
    AdapterOption,
    AdapterStagesOption,
    CompileOption,
    ConcurrencyOption,
    ConditionsOption,
    DataOption,
    DeviceOption,
    DtypeName,
    DtypeOption,
    JsonOption,
    LimitOption,
    MaxTokensOption,
    ModelOption,
    ModeName,
    ModeOption,
    OutOption,
    SeedOption,
    ShuffleSeedOption,
    SplitOption,
    TemperatureOption,
    WorkflowArgument,
    WorkflowOptions,
    adapter_name,
    open_engine,
    parse_options,
)
from .prompt_cache_commands import app as pml
from .reuse_commands import app as reuse
from .step_graph_commands import app as graph
from .train_commands import trace, train


def setup_stdio() -> None:
    """Before anything is computed: characters that standard output cannot write are replaced, and a closed standard
    input is an empty one. Raises ConfigError where standard output is closed: nobody would see what comes."""
    if sys.stdin is None:
        sys.stdin = io.StringIO()
    if sys.stdout is None:
        raise ConfigError("standard output is closed: send it somewhere, to /dev/null if nobody is to see it")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def format_error(exc: Exception) -> str:
    """What is wrong, in one line that names the file."""
    file, said = getattr(exc, "filename", None), str(exc)
    if file is not None:
        said = f"{file}: {getattr(exc, 'strerror', said)}"
    elif isinstance(exc, UnicodeDecodeError):
        said = f"not UTF-8: {said}"
    return " ".join(said.splitlines())


app = typer.Typer(
    name="choreograph",
    help="Multi-step LLM workflows that never encode the same message twice.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)

app.add_typer(pml)

app.add_typer(graph)

app.add_typer(reuse)

app.command()(trace)

app.command()(train)


@app.command()
def info(model: ModelOption = DEFAULT_MODEL, dtype: DtypeOption = DtypeName.auto, as_json: JsonOption = False) -> None:
    """Show the model, its cache and the backend that this machine gets."""
    engine = open_engine(model, dtype)
    facts, counts = engine.model_info, engine.core.cache_manager.stats
    tokens = counts["num_pages"] * engine.core.cache_manager.pool.page_size
    described = {
        "model": facts.name,
        "parameters": facts.parameters,
        "layers": facts.layers,
        "heads": f"{facts.query_heads} query, {facts.kv_heads} key-value, size {facts.head_dim}",
        "positions": facts.max_positions,
        "told apart by": facts.position_encoding,
        "layers by attention": _describe_attention(facts.attention_specs),
        "dtype": str(facts.dtype).removeprefix("torch."),
        "device": str(facts.device),
        "backend": engine.core.backend.name,
        "backend note": engine.core.backend_fallback_reason or "",
        "cache bytes per token": facts.kv_bytes_per_token,
        "cache tokens": tokens,
        "cache bytes": tokens * facts.kv_bytes_per_token,
        "largest context in the cache": min(facts.max_positions, tokens),
        "largest context in free memory": min(facts.max_positions, engine.core.hf_model.max_cache_tokens()),
        "fingerprint": facts.fingerprint,
    }
    if as_json:
        print(json.dumps(described))
        return
    from ..console import print_table

    lines = [(name, f"{value:,}" if isinstance(value, int) else value) for name, value in described.items() if value]
    print_table(make_console(), "choreograph", ("fact", "value"), lines, num_text_columns=2)


def _describe_attention(specs: Sequence[Any]) -> str:
    """How many layers have which attention."""
    counts = Counter(str(kind) for kind in specs)
    return "; ".join(f"{count} {text}" for text, count in counts.items())


@app.command()
def autotune(
    model: ModelOption = DEFAULT_MODEL,
    dtype: DtypeOption = DtypeName.auto,
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Measure the attention backends in a model's shape on this machine; from then on `auto` takes the fastest."""
    from ..attention import autotune as measured

    facts = open_engine(model, dtype, device=device).model_info
    table = measured.run(facts.head_shape, facts.attention_specs[0], facts.dtype, facts.device)
    path = measured.save(table, facts.head_shape, facts.dtype, facts.device)
    small, large = measured.fastest(table)
    if as_json:
        print(json.dumps({"seconds": table, "small": small, "large": large, "file": str(path)}))
        return
    from ..console import print_table

    lines = [(name, *(f"{1e6 * seconds:,.0f}" for seconds in taken.values())) for name, taken in table.items()]
    print_table(make_console(), "microseconds of a layer", ("backend", *next(iter(table.values()))), lines)
    print(f"auto: {small} in steps of few rows, {large} in others")


@app.command()
def models(as_json: JsonOption = False) -> None:
    """List the architectures that are proved, how each tells positions apart, and the test that proves it."""
    from ..models.architectures import SUPPORTED_ARCHITECTURES

    if as_json:
        print(json.dumps({name: family._asdict() for name, family in SUPPORTED_ARCHITECTURES.items()}))
        return
    from ..console import print_table

    lines = [(name, ", ".join(f.position_encodings), f.notes, f.test) for name, f in SUPPORTED_ARCHITECTURES.items()]
    print_table(
        make_console(),
        "proved architectures",
        ("architecture", "positions", "what is special", "proof"),
        lines,
        num_text_columns=4,
    )
    print("Any other that goes through transformers' attention interface is checked by numbers when it is loaded.")


@app.command()
def demo(
    model: ModelOption = DEFAULT_MODEL,
    dtype: DtypeOption = DtypeName.auto,
    compile: CompileOption = False,
    branches: Annotated[int, typer.Option(min=1, help="Solutions to branch into.")] = 8,
    voters: Annotated[int, typer.Option(min=1, help="Votes on the best solution.")] = 4,
    pairs: Annotated[int, typer.Option(min=1, help="How often to time both modes.")] = 3,
    svg: Annotated[Path, typer.Option(help="Where the picture of the message graph goes (SVG).")] = Path(
        "out/demo-graph.svg"
    ),
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Tree of Thoughts in prefix mode and choreographed, forced to the same tokens, with a table of both."""
    from .demo import run_demo

    console = make_console(quiet=as_json)
    with console.status("loading the model") if console.is_terminal else nullcontext():
        engine = open_engine(model, dtype, compile)
    numbers = run_demo(engine, console, branches=branches, voters=voters, pairs=pairs, svg_path=svg, seed=seed)
    if as_json:
        print(json.dumps(numbers))


@app.command()
def run(
    workflow: Annotated[str, typer.Argument(help="A workflow of the package, or the path of a Python file.")],
    task: Annotated[str, typer.Option(help="The task; - reads standard input.")] = "-",
    model: ModelOption = DEFAULT_MODEL,
    mode: ModeOption = ModeName.choreographed,
    dtype: DtypeOption = DtypeName.auto,
    device: DeviceOption = "cpu",
    compile: CompileOption = False,
    option: Annotated[list[str] | None, typer.Option(help="An option of the workflow, as name=value.")] = None,
    adapter: AdapterOption = None,
    adapter_stage: AdapterStagesOption = None,
    max_tokens: MaxTokensOption = 160,
    temperature: TemperatureOption = 0.7,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Run one workflow on one task and print its answer and what each stage cost."""
    from ..console import print_run
    from ..sampling_params import SamplingParams
    from ..workflows import find
    from ..workflows.run import run_workflow

    computed_by, result = adapter_name(adapter, adapter_stage), find(workflow)
    text = sys.stdin.read().strip() if task == "-" else task
    if not text:
        raise typer.BadParameter("the task is empty: give one with --task or on standard input")
    console = make_console(quiet=as_json)
    sampling = SamplingParams(temperature=temperature, top_p=0.95, max_tokens=max_tokens)
    done = run_workflow(
        open_engine(model, dtype, compile, adapter, device, adapter_stage),
        result,
        text,
        mode=mode.value,
        model=computed_by,
        adapter_stages=adapter_stage or (),
        seed=seed,
        sampling=sampling,
        options=parse_options(option or []),
        on_text=lambda piece: console.print(piece, end="", markup=False, highlight=False, soft_wrap=True),
    )
    if as_json:
        host_tokens = {"unparseable": dict(done.run.parse_failures), "findings": done.run.outputs}
        print(json.dumps({"answer": done.answer.text, **host_tokens, **done.metrics.as_dict()}))
    else:
        console.print("\n")
        print_run(console, f"{workflow}, {mode.value}: {done.metrics.seconds:.2f} s", done)


@app.command(name="eval")
def evaluate(
    workflow: WorkflowArgument,
    data: DataOption,
    out: OutOption = None,
    limit: LimitOption = None,
    shuffle_seed: ShuffleSeedOption = None,
    split: SplitOption = "test",
    model: ModelOption = DEFAULT_MODEL,
    dtype: DtypeOption = DtypeName.auto,
    device: DeviceOption = "cpu",
    condition: ConditionsOption = None,
    option: WorkflowOptions = None,
    max_tokens: MaxTokensOption = 256,
    temperature: TemperatureOption = 0.7,
    seed: SeedOption = 0,
    concurrency: ConcurrencyOption = 32,
    fidelity: Annotated[int, typer.Option(min=0, help="Measure log-loss and KL on so many traces.")] = 0,
    adapter: Annotated[
        str | None, typer.Option(help="Run every condition but the first with this LoRA adapter too.")
    ] = None,
    adapter_stage: AdapterStagesOption = None,
    judge: Annotated[str | None, typer.Option(help="A model that compares answers in both orders.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Score a workflow on data under its conditions: accuracy, paired differences, fidelity, win rates."""
    from ..evaluation import report as shown
    from ..sampling_params import SamplingParams
    from ..workflows import find

    adapter_name(adapter, adapter_stage)
    result, console = find(workflow), make_console(quiet=as_json)
    examples = shown.examples_for(result, data, limit=limit, seed=shuffle_seed, split=split)
    conditions = shown.select_conditions(result, condition or [])
    report = shown.evaluate(
        open_engine(model, dtype, adapter=adapter, device=device, adapter_stages=adapter_stage),
        console,
        workflow,
        result,
        examples,
        out or Path("out") / "eval" / Path(workflow).stem,
        conditions=shown.add_adapter_conditions(conditions, ADAPTER_NAME, adapter_stage or ())
        if adapter
        else conditions,
        options=parse_options(option or []),
        sampling=SamplingParams(temperature=temperature, top_p=0.95, max_tokens=max_tokens),
        seed=seed,
        concurrency=concurrency,
        fidelity=fidelity,
        judge=None if judge is None else open_engine(judge, dtype, device=device),
    )
    if as_json:
        print(json.dumps(report))
    shown.ensure_some_succeeded(report)


@app.command()
def bench(
    workflow: WorkflowArgument,
    data: DataOption,
    out: OutOption = None,
    limit: LimitOption = 30,
    shuffle_seed: ShuffleSeedOption = None,
    split: SplitOption = "test",
    model: ModelOption = DEFAULT_MODEL,
    dtype: DtypeOption = DtypeName.auto,
    device: DeviceOption = "cpu",
    compile: CompileOption = False,
    condition: ConditionsOption = None,
    option: WorkflowOptions = None,
    max_tokens: MaxTokensOption = 160,
    temperature: TemperatureOption = 0.7,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Time a workflow in all its conditions, forced to the same tokens: time to first token, end to end."""
    from ..evaluation import report as shown
    from ..sampling_params import SamplingParams
    from ..workflows import find

    result, console = find(workflow), make_console(quiet=as_json)
    examples = shown.examples_for(result, data, limit=limit, seed=shuffle_seed, split=split)
    report = shown.bench(
        open_engine(model, dtype, compile, device=device),
        console,
        workflow,
        result,
        examples,
        out or Path("out") / "bench" / Path(workflow).stem,
        conditions=shown.select_conditions(result, condition or []),
        options=parse_options(option or []),
        sampling=SamplingParams(temperature=temperature, top_p=0.95, max_tokens=max_tokens),
        seed=seed,
    )
    if as_json:
        print(json.dumps(report))


@app.command()
def chat(
    model: ModelOption = DEFAULT_MODEL,
    mode: ModeOption = ModeName.choreographed,
    dtype: DtypeOption = DtypeName.auto,
    compile: CompileOption = False,
    system: Annotated[str, typer.Option(help="A system prompt.")] = "",
    adapter: AdapterOption = None,
    max_tokens: MaxTokensOption = 256,
    temperature: TemperatureOption = 0.7,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Talk to a model. An empty line or end of input ends it; /reset forgets the conversation."""
    from ..errors import ChoreographError, ConfigError
    from ..sampling_params import SamplingParams

    console = make_console(quiet=as_json)
    engine = open_engine(model, dtype, compile, adapter)
    if engine.chat is None:
        raise ConfigError(
            f"{engine.model_info.name} has no tokenizer beside its weights: add its tokenizer.json to talk to it"
        )
    stop = [] if engine.chat.has_template else ["\nUser:", "\nSystem:"]
    sampling = SamplingParams(temperature=temperature, top_p=0.95, max_tokens=max_tokens, stop=stop)
    with engine.session(mode=mode.value, seed=seed, model=ADAPTER_NAME if adapter else BASE_MODEL) as session:
        opening = [session.prefill(session.system(system))] if system else []
        try:
            for turn in opening:
                turn.result()
        except ChoreographError as exc:
            raise ConfigError(f"--system: {exc}") from None
        history = list(opening)
        while line := _read_line(console):
            if line == "/reset":
                history = list(opening)
                continue
            turn = None
            try:
                turn = session.prefill(session.user(line), parents=history)
                reply = session.decode(session.assistant(), parents=[*history, turn], sampling=sampling)
                for piece in reply.stream():
                    console.print(piece, end="", markup=False, highlight=False, soft_wrap=True)
            except ChoreographError as exc:
                dropped = f"{(turn and turn.error) or exc}; this turn is dropped, /reset starts anew"
                if as_json:
                    print(json.dumps({"error": dropped}), flush=True)
                console.print(dropped, markup=False, highlight=False, soft_wrap=True)
                continue
            console.print()
            history += [turn, reply]
            if as_json:
                usage = {"cached": reply.usage.cached_tokens, "generated": reply.usage.completion_tokens}
                print(json.dumps({"text": reply.text, "ttft": reply.timing.ttft, **usage}), flush=True)


def _read_line(console: Console) -> str:
    try:
        return (console.input("[b]>[/b] ") if console.is_terminal else input()).strip()
    except EOFError:
        return ""


def main(command: Callable[[], None] = app) -> None:
    """The entry point: an error of the package or of a file is one line and exit code 1, never a traceback."""
    from ..errors import ChoreographError

    try:
        setup_stdio()
        command()
    except (ChoreographError, OSError, UnicodeDecodeError) as exc:
        console = make_console(stderr=True)
        console.print("[red]error[/red]: ", end="")
        console.print(format_error(exc), markup=False, highlight=False, soft_wrap=True)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
