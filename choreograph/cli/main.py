"""Commands that need an engine, and the error handling of all commands."""

import io
import json
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..console import format_ms, make_console, print_table, print_text
from ..errors import ChoreographError, ConfigError
from ..lab.commands import explain_command, reuse_commands, train_commands
from ..outputs import BASE_MODEL
from . import common, prompt_cache_commands, proxy_command, serve_command, step_graph_commands
from .common import adapter_name, open_engine, parse_options

if TYPE_CHECKING:
    from rich.console import Console

    from ..api.message import Message
    from ..lab.workflows import StageCall

app = typer.Typer(
    name="choreograph",
    help="Multi-step LLM workflows that never encode the same message twice.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
for group, earlier_name in ((prompt_cache_commands, "pml"), (step_graph_commands, "graph"), (reuse_commands, "reuse")):
    app.add_typer(group.app)
    app.add_typer(group.app, name=earlier_name, hidden=True)
app.command()(train_commands.trace)
app.command()(train_commands.train)
app.command()(explain_command.explain)
app.command()(serve_command.serve)
app.command()(proxy_command.proxy)


@app.command()
def info(
    model: common.ModelOption = common.DEFAULT_MODEL,
    dtype: common.DtypeOption = "auto",
    as_json: common.JsonOption = False,
) -> None:
    """Show the model, its cache and the backend that this machine gets."""
    engine = open_engine(model, dtype)
    model_info, core, stats = engine.model_info, engine.core, engine.stats()
    cache_tokens = stats.num_pages * core.config.cache.page_size
    specs = Counter(map(str, model_info.attention_specs))
    described = {
        "model": model_info.name,
        "parameters": model_info.parameters,
        "layers": model_info.layers,
        "heads": f"{model_info.query_heads} query, {model_info.kv_heads} key-value, size {model_info.head_dim}",
        "positions": model_info.max_positions,
        "position encoding": model_info.position_encoding,
        "layers by attention": "; ".join(f"{count} {spec}" for spec, count in specs.items()),
        "dtype": str(model_info.dtype).removeprefix("torch."),
        "device": str(model_info.device),
        "backend": core.backend.name,
        "backend note": core.backend_fallback_reason or "",
        "cache bytes per token": model_info.kv_bytes_per_token,
        "cache tokens": cache_tokens,
        "cache bytes": cache_tokens * model_info.kv_bytes_per_token,
        "largest context in the cache": min(model_info.max_positions, cache_tokens),
        "largest context in free memory": min(model_info.max_positions, core.hf_model.max_cache_tokens()),
        "fingerprint": model_info.fingerprint,
    }
    if as_json:
        print(json.dumps(described))
        return
    rows = [(name, f"{value:,}" if isinstance(value, int) else value) for name, value in described.items() if value]
    print_table(make_console(), "choreograph", ("fact", "value"), rows, num_text_columns=2)


@app.command("tune", hidden=True)
@app.command()
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


@app.command()
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


@app.command()
def demo(
    model: common.ModelOption = common.DEFAULT_MODEL,
    dtype: common.DtypeOption = "auto",
    compile: common.CompileOption = False,
    branches: Annotated[int, typer.Option(min=1, help="Solutions to branch into.")] = 8,
    voters: Annotated[int, typer.Option(min=1, help="Votes on the best solution.")] = 4,
    pairs: Annotated[int, typer.Option(min=1, help="How often to time both modes.")] = 3,
    svg: Annotated[Path, typer.Option(help="Where the picture of the message graph goes (SVG).")] = Path(
        "out/demo-graph.svg"
    ),
    seed: common.SeedOption = 0,
    as_json: common.JsonOption = False,
) -> None:
    """Compare Tree of Thoughts in prefix mode and choreographed, on equal tokens."""
    from ..lab.commands.demo import run_demo

    console = make_console(quiet=as_json)
    with console.status("loading the model") if console.is_terminal else nullcontext():
        engine = open_engine(model, dtype, compile)
    numbers = run_demo(engine, console, branches=branches, voters=voters, pairs=pairs, svg_path=svg, seed=seed)
    if as_json:
        print(json.dumps(numbers))


@app.command()
def run(
    workflow: common.WorkflowArgument,
    task: Annotated[str, typer.Option(help="The task; - reads standard input.")] = "-",
    model: common.ModelOption = common.DEFAULT_MODEL,
    mode: common.ModeOption = "choreographed",
    dtype: common.DtypeOption = "auto",
    device: common.DeviceOption = "cpu",
    compile: common.CompileOption = False,
    option: common.WorkflowOptions = None,
    adapter: common.AdapterOption = None,
    adapter_stage: common.AdapterStagesOption = None,
    vllm: common.VllmOption = None,
    max_tokens: common.MaxTokensOption = 160,
    temperature: common.TemperatureOption = 0.7,
    seed: common.SeedOption = 0,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the answer and nothing else.")] = False,
    as_json: common.JsonOption = False,
) -> None:
    """Run one workflow; print its calls, the answer and stage costs."""
    from ..lab.workflows import find
    from ..lab.workflows.run import run_workflow
    from ..sampling_params import SamplingParams

    computed_by, function = adapter_name(adapter, adapter_stage), find(workflow)
    text = sys.stdin.read().strip() if task == "-" else task
    if not text:
        raise typer.BadParameter("the task is empty: give one with --task or on standard input")
    console = make_console(quiet=as_json or quiet)
    result = run_workflow(
        open_engine(model, dtype, compile, adapter, device, adapter_stage, vllm=vllm),
        function,
        text,
        mode=mode,
        model=computed_by,
        adapter_stages=adapter_stage or (),
        seed=seed,
        sampling=SamplingParams(temperature=temperature, top_p=0.95, max_tokens=max_tokens),
        options=parse_options(option),
        on_answer=lambda answer, calls: None if console.quiet else _print_calls(console, answer, calls),
        on_text=lambda piece: print_text(console, piece, end=""),
    )
    failures, outputs = dict(result.run.parse_failures), result.run.outputs
    if as_json:
        generated = [{"stage": stage, "text": m.text} for stage, m in result.run.calls if m.kind == "decode"]
        noted = {"unparseable": failures, "findings": outputs, "generated": generated}
        print(json.dumps({"answer": result.answer.text, **noted, **result.metrics.as_dict()}))
        return
    if quiet:
        print_text(make_console(), result.answer.text.strip())
        return
    print_text(console, "\n" if result.answer.text.strip() else "(empty: the model ended it at once)\n")
    rows = [
        (s.stage, str(s.calls), format_ms(s.ttft), str(s.encoded), str(s.cached), str(s.generated))
        for s in result.metrics.stages
    ]
    sums = [str(sum(int(row[column]) for row in rows)) for column in (1, 3, 4, 5)]
    rows.append(("all", sums[0], format_ms(result.metrics.ttft), sums[1], sums[2], sums[3]))
    header = ("stage", "calls", "TTFT", "encoded", "reused", "generated")
    print_table(console, f"{workflow}, {mode}: {result.metrics.seconds:.2f} s", header, rows)
    if outputs:
        print_text(console, f"found out: {json.dumps(outputs, ensure_ascii=False)}")
    for stage, count in failures.items():
        calls = sum(s.calls for s in result.metrics.stages if s.stage == stage)
        print_text(console, f"could not be parsed: {count} of {calls or count} calls of stage {stage!r}")


def _print_calls(console: "Console", answer: "Message", calls: "list[StageCall]") -> None:
    """Print the text of every decode but the answer, which is streamed."""
    numbers: Counter[str] = Counter()
    for stage, message in calls:
        if message.kind == "decode" and message is not answer:
            numbers[stage] += 1
            try:
                text = message.text.strip() or "(empty)"
            except ChoreographError as exc:
                text = f"(failed: {exc})"
            print_text(console, f"[{stage} {numbers[stage]}] {text}")
    console.print("\n[b]Answer:[/b]", end="")


@app.command(name="eval")
def evaluate(
    workflow: common.WorkflowArgument,
    data: common.DataOption,
    out: common.OutOption = None,
    limit: common.LimitOption = None,
    shuffle_seed: common.ShuffleSeedOption = None,
    split: common.SplitOption = "test",
    split_seed: common.SplitSeedOption = 0,
    model: common.ModelOption = common.DEFAULT_MODEL,
    dtype: common.DtypeOption = "auto",
    device: common.DeviceOption = "cpu",
    condition: common.ConditionsOption = None,
    option: common.WorkflowOptions = None,
    max_tokens: common.MaxTokensOption = 256,
    temperature: common.TemperatureOption = 0.7,
    seed: common.SeedOption = 0,
    concurrency: common.ConcurrencyOption = 32,
    fidelity: Annotated[int, typer.Option(min=0, help="Measure log-loss and KL on so many traces.")] = 0,
    adapter: Annotated[
        str | None, typer.Option(help="Run every condition but the first with this LoRA adapter too.")
    ] = None,
    adapter_stage: common.AdapterStagesOption = None,
    direct: Annotated[
        str | None, typer.Option(help="Score a single call too, plain and with this adapter of `train --direct`.")
    ] = None,
    judge: Annotated[str | None, typer.Option(help="A model that compares answers in both orders.")] = None,
    vllm: common.VllmOption = None,
    ray: common.RayOption = None,
    ray_workers: common.RayWorkersOption = None,
    as_json: common.JsonOption = False,
) -> None:
    """Score a workflow under its conditions: accuracy, differences, fidelity, win rates."""
    from ..lab.evaluation import report
    from ..lab.evaluation.splits import examples_for
    from ..lab.training.train import check_unseen
    from ..lab.workflows import find
    from ..sampling_params import SamplingParams

    adapter_name(adapter, adapter_stage)
    common.check_ray_options(ray, ray_workers)
    if vllm and fidelity:
        raise typer.BadParameter("--fidelity reads the model's own distributions: leave out --vllm")
    function = find(workflow)
    examples = examples_for(function, data, limit=limit, seed=shuffle_seed, split=split, split_seed=split_seed)
    for path in filter(None, (adapter, direct)):
        check_unseen(path, examples)
    conditions = report.select_conditions(function, condition or [])
    if adapter:
        conditions = report.add_adapter_conditions(conditions, common.ADAPTER_NAME, adapter_stage or ())
    load_engine = partial(
        open_engine,
        model,
        dtype,
        adapter=adapter,
        device=device,
        adapter_stages=adapter_stage,
        direct=direct,
        vllm=vllm,
    )
    engine = load_engine()
    with common.open_ray_workers(ray, ray_workers, load_engine, engine) as workers:
        summary = report.evaluate(
            engine,
            make_console(quiet=as_json),
            workflow,
            function,
            examples,
            out or Path("out") / "eval" / Path(workflow).stem,
            conditions=conditions,
            options=parse_options(option),
            sampling=SamplingParams(temperature=temperature, top_p=0.95, max_tokens=max_tokens),
            seed=seed,
            concurrency=concurrency,
            fidelity=fidelity,
            judge=None if judge is None else open_engine(judge, dtype, device=device),
            direct=common.DIRECT_ADAPTER_NAME if direct else None,
            workers=workers,
        )
    if as_json:
        print(json.dumps(summary))
    report.ensure_some_succeeded(summary)


@app.command()
def bench(
    workflow: common.WorkflowArgument,
    data: common.DataOption,
    out: common.OutOption = None,
    limit: common.LimitOption = 30,
    shuffle_seed: common.ShuffleSeedOption = None,
    split: common.SplitOption = "all",
    split_seed: common.SplitSeedOption = 0,
    model: common.ModelOption = common.DEFAULT_MODEL,
    dtype: common.DtypeOption = "auto",
    device: common.DeviceOption = "cpu",
    compile: common.CompileOption = False,
    condition: common.ConditionsOption = None,
    option: common.WorkflowOptions = None,
    max_tokens: common.MaxTokensOption = 160,
    temperature: common.TemperatureOption = 0.7,
    seed: common.SeedOption = 0,
    ray: common.RayOption = None,
    ray_workers: common.RayWorkersOption = None,
    as_json: common.JsonOption = False,
) -> None:
    """Time a workflow in all its conditions, forced to the same tokens."""
    from ..lab.evaluation import report
    from ..lab.evaluation.splits import examples_for
    from ..lab.workflows import find
    from ..sampling_params import SamplingParams

    common.check_ray_options(ray, ray_workers)
    function = find(workflow)
    examples = examples_for(function, data, limit=limit, seed=shuffle_seed, split=split, split_seed=split_seed)
    load_engine = partial(open_engine, model, dtype, compile, device=device)
    engine = load_engine()
    with common.open_ray_workers(ray, ray_workers, load_engine, engine) as workers:
        summary = report.bench(
            engine,
            make_console(quiet=as_json),
            workflow,
            function,
            examples,
            out or Path("out") / "bench" / Path(workflow).stem,
            conditions=report.select_conditions(function, condition or []),
            options=parse_options(option),
            sampling=SamplingParams(temperature=temperature, top_p=0.95, max_tokens=max_tokens),
            seed=seed,
            workers=workers,
        )
    if as_json:
        print(json.dumps(summary))


@app.command()
def chat(
    model: common.ModelOption = common.DEFAULT_MODEL,
    mode: common.ModeOption = "choreographed",
    dtype: common.DtypeOption = "auto",
    compile: common.CompileOption = False,
    system: Annotated[str, typer.Option(help="A system prompt.")] = "",
    adapter: common.AdapterOption = None,
    max_tokens: common.MaxTokensOption = 256,
    temperature: common.TemperatureOption = 0.7,
    seed: common.SeedOption = 0,
    as_json: common.JsonOption = False,
) -> None:
    """Talk to a model; an empty line ends it, /reset starts anew."""
    from ..sampling_params import SamplingParams

    console, engine = make_console(quiet=as_json), open_engine(model, dtype, compile, adapter)
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
            turn = None
            try:
                turn = session.prefill(session.user(line), parents=history)
                reply = session.decode(session.assistant(), parents=[*history, turn], sampling=sampling)
                for piece in reply.stream():
                    print_text(console, piece, end="")
            except ChoreographError as exc:
                dropped = f"{(turn and turn.error) or exc}; this turn is dropped, /reset starts anew"
                if as_json:
                    print(json.dumps({"error": dropped}), flush=True)
                print_text(console, dropped)
                continue
            console.print()
            history += [turn, reply]
            if as_json:
                usage = {"cached": reply.usage.cached_tokens, "generated": reply.usage.completion_tokens}
                print(json.dumps({"text": reply.text, "ttft": reply.timing.ttft, **usage}), flush=True)


def _read_line(console: "Console") -> str:
    try:
        return (console.input("[b]>[/b] ") if console.is_terminal else input()).strip()
    except EOFError:
        return ""


def setup_stdio() -> None:
    """Make standard streams safe for any text, and a closed input empty.

    Raises ConfigError if standard output is closed, before anything is computed.
    """
    if sys.stdin is None:
        sys.stdin = io.StringIO()
    if sys.stdout is None:
        raise ConfigError("standard output is closed: redirect it to a file or to /dev/null")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def main(command: Callable[[], None] = app) -> None:
    """Run a command; an error is one line and exit code 1."""
    try:
        setup_stdio()
        command()
    except (ChoreographError, OSError, UnicodeDecodeError) as exc:
        file, text = getattr(exc, "filename", None), str(exc)
        if file is not None:
            text = f"{file}: {getattr(exc, 'strerror', text)}"
        elif isinstance(exc, UnicodeDecodeError):
            text = f"not UTF-8: {text}"
        console = make_console(stderr=True)
        console.print("[red]error[/red]: ", end="")
        print_text(console, " ".join(text.splitlines()))
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
