"""The command line. Owns options and printing; every command is a few calls of the API."""

import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from .cli_distill import trace, train
from .cli_graph import app as graph
from .cli_options import (
    ADAPTED,
    EMBEDDED,
    Adapter,
    AtOnce,
    Compile,
    Data,
    Device,
    Dtype,
    DtypeName,
    Json,
    Limit,
    MaxTokens,
    Mode,
    Model,
    ModeName,
    Only,
    Options,
    Out,
    Readers,
    Seed,
    Shuffle,
    Split,
    Temperature,
    WorkflowName,
    adapted,
    open_engine,
    read_options,
)
from .cli_pml import app as pml
from .cli_reuse import app as reuse
from .report import console_of
from .types import BASE

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
def info(model: Model = EMBEDDED, dtype: Dtype = DtypeName.auto, as_json: Json = False) -> None:
    """Show the model, its cache and the backend that this machine gets."""
    engine = open_engine(model, dtype)
    facts, counts = engine.facts, engine.runner.store.counts
    tokens = counts["pages"] * engine.runner.store.arena.page_size
    described = {
        "model": facts.name,
        "parameters": facts.parameters,
        "layers": facts.layers,
        "heads": f"{facts.query_heads} query, {facts.kv_heads} key-value, size {facts.head_dim}",
        "positions": facts.max_positions,
        "told apart by": facts.positions,
        "layers by attention": _kinds(facts.kinds),
        "dtype": str(facts.dtype).removeprefix("torch."),
        "device": str(facts.device),
        "backend": engine.runner.backend.name,
        "backend note": engine.runner.backend_note or "",
        "cache bytes per token": facts.kv_bytes_per_token,
        "cache tokens": tokens,
        "cache bytes": tokens * facts.kv_bytes_per_token,
        "largest context in the cache": min(facts.max_positions, tokens),
        "largest context in free memory": min(facts.max_positions, engine.runner.adapter.room()),
        "fingerprint": facts.fingerprint,
    }
    if as_json:
        print(json.dumps(described))
        return
    from .report import show_table

    lines = [(name, f"{value:,}" if isinstance(value, int) else value) for name, value in described.items() if value]
    show_table(console_of(), "choreograph", ("fact", "value"), lines, texts=2)


def _kinds(kinds: Sequence[Any]) -> str:
    """How many layers have which attention."""
    counts = Counter(str(kind) for kind in kinds)
    return "; ".join(f"{count} {text}" for text, count in counts.items())


@app.command()
def tune(model: Model = EMBEDDED, dtype: Dtype = DtypeName.auto, device: Device = "cpu", as_json: Json = False) -> None:
    """Measure the attention backends in a model's shape on this machine; from then on `auto` takes the fastest."""
    from .ops import measured

    facts = open_engine(model, dtype, device=device).facts
    table = measured.measure(facts.heads, facts.kinds[0], facts.dtype, facts.device)
    path = measured.keep(table, facts.heads, facts.dtype, facts.device)
    small, large = measured.winners(table)
    if as_json:
        print(json.dumps({"seconds": table, "small": small, "large": large, "file": str(path)}))
        return
    from .report import show_table

    lines = [(name, *(f"{1e6 * seconds:,.0f}" for seconds in taken.values())) for name, taken in table.items()]
    show_table(console_of(), "microseconds of a layer", ("backend", *next(iter(table.values()))), lines)
    print(f"auto: {small} in steps of few rows, {large} in others")


@app.command()
def models(as_json: Json = False) -> None:
    """List the architectures that are proved, how each tells positions apart, and the test that proves it."""
    from .models.families import FAMILIES

    if as_json:
        print(json.dumps({name: family._asdict() for name, family in FAMILIES.items()}))
        return
    from .report import show_table

    lines = [(name, ", ".join(f.positions), f.what, f.proof) for name, f in FAMILIES.items()]
    show_table(
        console_of(), "proved architectures", ("architecture", "positions", "what is special", "proof"), lines, texts=4
    )
    print("Any other that goes through transformers' attention interface is checked by numbers when it is loaded.")


@app.command()
def demo(
    model: Model = EMBEDDED,
    dtype: Dtype = DtypeName.auto,
    compile: Compile = False,
    branches: Annotated[int, typer.Option(min=1, help="Solutions to branch into.")] = 8,
    voters: Annotated[int, typer.Option(min=1, help="Votes on the best solution.")] = 4,
    pairs: Annotated[int, typer.Option(min=1, help="How often to time both modes.")] = 3,
    picture: Annotated[Path, typer.Option(help="Where the picture of the message graph goes (SVG).")] = Path(
        "out/demo-graph.svg"
    ),
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Tree of Thoughts in prefix mode and choreographed, forced to the same tokens, with a table of both."""
    from .demo import run_demo

    console = console_of(quiet=as_json)
    with console.status("loading the model") if console.is_terminal else nullcontext():
        engine = open_engine(model, dtype, compile)
    numbers = run_demo(engine, console, branches=branches, voters=voters, pairs=pairs, picture=picture, seed=seed)
    if as_json:
        print(json.dumps(numbers))


@app.command()
def run(
    workflow: Annotated[str, typer.Argument(help="A workflow of the package, or the path of a Python file.")],
    task: Annotated[str, typer.Option(help="The task; - reads standard input.")] = "-",
    model: Model = EMBEDDED,
    mode: Mode = ModeName.choreographed,
    dtype: Dtype = DtypeName.auto,
    device: Device = "cpu",
    compile: Compile = False,
    option: Annotated[list[str] | None, typer.Option(help="An option of the workflow, as name=value.")] = None,
    adapter: Adapter = None,
    reader: Readers = None,
    max_tokens: MaxTokens = 160,
    temperature: Temperature = 0.7,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Run one workflow on one task and print its answer and what each stage cost."""
    from .choreographies import find
    from .measure import perform
    from .report import show_run
    from .types import SamplingParams

    computed_by, found = adapted(adapter, reader), find(workflow)
    text = sys.stdin.read().strip() if task == "-" else task
    if not text:
        raise typer.BadParameter("the task is empty: give one with --task or on standard input")
    console = console_of(quiet=as_json)
    sampling = SamplingParams(temperature=temperature, top_p=0.95, max_tokens=max_tokens)
    done = perform(
        open_engine(model, dtype, compile, adapter, device, reader),
        found,
        text,
        mode=mode.value,
        model=computed_by,
        readers=reader or (),
        seed=seed,
        sampling=sampling,
        options=read_options(option or []),
        on_text=lambda piece: console.print(piece, end="", markup=False, highlight=False, soft_wrap=True),
    )
    if as_json:
        told = {"unparseable": dict(done.performance.unparseable), "findings": done.performance.findings}
        print(json.dumps({"answer": done.answer.text, **told, **done.cost.as_dict()}))
    else:
        console.print("\n")
        show_run(console, f"{workflow}, {mode.value}: {done.cost.seconds:.2f} s", done)


@app.command(name="eval")
def evaluate(
    workflow: WorkflowName,
    data: Data,
    out: Out = None,
    limit: Limit = None,
    shuffle: Shuffle = None,
    split: Split = "test",
    model: Model = EMBEDDED,
    dtype: Dtype = DtypeName.auto,
    device: Device = "cpu",
    condition: Only = None,
    option: Options = None,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.7,
    seed: Seed = 0,
    at_once: AtOnce = 32,
    fidelity: Annotated[int, typer.Option(min=0, help="Measure log-loss and KL on so many traces.")] = 0,
    adapter: Annotated[
        str | None, typer.Option(help="Run every condition but the first with this LoRA adapter too.")
    ] = None,
    reader: Readers = None,
    judge: Annotated[str | None, typer.Option(help="A model that compares answers in both orders.")] = None,
    as_json: Json = False,
) -> None:
    """Score a workflow on data under its conditions: accuracy, paired differences, fidelity, win rates."""
    from .choreographies import find
    from .evaluation import shown
    from .types import SamplingParams

    adapted(adapter, reader)
    found, console = find(workflow), console_of(quiet=as_json)
    examples = shown.examples_for(found, data, limit=limit, seed=shuffle, split=split)
    conditions = shown.chosen(found, condition or [])
    report = shown.evaluate(
        open_engine(model, dtype, adapter=adapter, device=device, readers=reader),
        console,
        workflow,
        found,
        examples,
        out or Path("out") / "eval" / Path(workflow).stem,
        conditions=shown.with_adapter(conditions, ADAPTED, reader or ()) if adapter else conditions,
        options=read_options(option or []),
        sampling=SamplingParams(temperature=temperature, top_p=0.95, max_tokens=max_tokens),
        seed=seed,
        at_once=at_once,
        fidelity=fidelity,
        judge=None if judge is None else open_engine(judge, dtype, device=device),
    )
    if as_json:
        print(json.dumps(report))
    shown.refuse_failed(report)


@app.command()
def bench(
    workflow: WorkflowName,
    data: Data,
    out: Out = None,
    limit: Limit = 30,
    shuffle: Shuffle = None,
    split: Split = "test",
    model: Model = EMBEDDED,
    dtype: Dtype = DtypeName.auto,
    device: Device = "cpu",
    compile: Compile = False,
    condition: Only = None,
    option: Options = None,
    max_tokens: MaxTokens = 160,
    temperature: Temperature = 0.7,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Time a workflow in all its conditions, forced to the same tokens: time to first token, end to end."""
    from .choreographies import find
    from .evaluation import shown
    from .types import SamplingParams

    found, console = find(workflow), console_of(quiet=as_json)
    examples = shown.examples_for(found, data, limit=limit, seed=shuffle, split=split)
    report = shown.bench(
        open_engine(model, dtype, compile, device=device),
        console,
        workflow,
        found,
        examples,
        out or Path("out") / "bench" / Path(workflow).stem,
        conditions=shown.chosen(found, condition or []),
        options=read_options(option or []),
        sampling=SamplingParams(temperature=temperature, top_p=0.95, max_tokens=max_tokens),
        seed=seed,
    )
    if as_json:
        print(json.dumps(report))


@app.command()
def chat(
    model: Model = EMBEDDED,
    mode: Mode = ModeName.choreographed,
    dtype: Dtype = DtypeName.auto,
    compile: Compile = False,
    system: Annotated[str, typer.Option(help="A system prompt.")] = "",
    adapter: Adapter = None,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.7,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Talk to a model. An empty line or end of input ends it; /reset forgets the conversation."""
    from .errors import ChoreographError, ConfigError
    from .types import SamplingParams

    console = console_of(quiet=as_json)
    engine = open_engine(model, dtype, compile, adapter)
    if engine.chat is None:
        raise ConfigError(
            f"{engine.facts.name} has no tokenizer beside its weights: add its tokenizer.json to talk to it"
        )
    stop = [] if engine.chat.has_template else ["\nUser:", "\nSystem:"]
    sampling = SamplingParams(temperature=temperature, top_p=0.95, max_tokens=max_tokens, stop=stop)
    with engine.session(mode=mode.value, seed=seed, model=ADAPTED if adapter else BASE) as session:
        opening = [session.prefill(session.system(system))] if system else []
        try:
            for turn in opening:
                turn.result()
        except ChoreographError as problem:
            raise ConfigError(f"--system: {problem}") from None
        history = list(opening)
        while line := _ask(console):
            if line == "/reset":
                history = list(opening)
                continue
            turn = None
            try:
                turn = session.prefill(session.user(line), parents=history)
                reply = session.decode(session.assistant(), parents=[*history, turn], sampling=sampling)
                for piece in reply.stream():
                    console.print(piece, end="", markup=False, highlight=False, soft_wrap=True)
            except ChoreographError as problem:
                dropped = f"{(turn and turn.error) or problem}; this turn is dropped, /reset starts anew"
                if as_json:
                    print(json.dumps({"error": dropped}), flush=True)
                console.print(dropped, markup=False, highlight=False, soft_wrap=True)
                continue
            console.print()
            history += [turn, reply]
            if as_json:
                usage = {"cached": reply.usage.cached_tokens, "generated": reply.usage.generated_tokens}
                print(json.dumps({"text": reply.text, "ttft": reply.timing.ttft, **usage}), flush=True)


def _ask(console: Console) -> str:
    try:
        return (console.input("[b]>[/b] ") if console.is_terminal else input()).strip()
    except EOFError:
        return ""


def main(command: Callable[[], None] = app) -> None:
    """The entry point: an error of the package or of a file is one line and exit code 1, never a traceback."""
    from .errors import ChoreographError
    from .streams import line_of, prepare

    try:
        prepare()
        command()
    except (ChoreographError, OSError, UnicodeDecodeError) as problem:
        console = console_of(stderr=True)
        console.print("[red]error[/red]: ", end="")
        console.print(line_of(problem), markup=False, highlight=False, soft_wrap=True)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
