"""The command line. Owns options and printing; every command is a few calls of the API."""

import json
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from .cli_graph import app as graph
from .cli_pml import app as pml

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


class ModeName(StrEnum):
    """The three execution modes."""

    choreographed = "choreographed"
    prefix = "prefix"
    naive = "naive"


class DtypeName(StrEnum):
    """Types a model can compute in."""

    bfloat16 = "bfloat16"
    float32 = "float32"
    float16 = "float16"


Model = Annotated[str, typer.Option(help="A name, a Hub id, a model folder or a .gguf file.")]
Dtype = Annotated[DtypeName, typer.Option(help="The type to compute in.")]
Compile = Annotated[bool, typer.Option("--compile", help="Compile small steps; the first run waits for the compiler.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Mode = Annotated[ModeName, typer.Option(help="choreographed reuses messages anywhere, prefix only prefixes.")]
Seed = Annotated[int, typer.Option(help="Seed of all sampling.")]
EMBEDDED = "smollm2-135m-instruct"


@app.command()
def info(model: Model = EMBEDDED, dtype: Dtype = DtypeName.bfloat16, as_json: Json = False) -> None:
    """Show the model, its cache and the backend that this machine gets."""
    engine = _engine(model, dtype, False)
    facts, counts = engine.facts, engine.runner.store.counts
    tokens = counts["pages"] * engine.runner.store.arena.page_size
    described = {
        "model": facts.name,
        "parameters": facts.parameters,
        "layers": facts.layers,
        "heads": f"{facts.query_heads} query, {facts.kv_heads} key-value, size {facts.head_dim}",
        "positions": facts.max_positions,
        "dtype": str(facts.dtype).removeprefix("torch."),
        "device": str(facts.device),
        "backend": engine.runner.backend.name,
        "backend note": engine.runner.backend_note or "",
        "cache bytes per token": facts.kv_bytes_per_token,
        "cache tokens": tokens,
        "cache bytes": tokens * facts.kv_bytes_per_token,
        "fingerprint": facts.fingerprint,
    }
    if as_json:
        print(json.dumps(described))
        return
    from .report import show_table

    lines = [(name, f"{value:,}" if isinstance(value, int) else value) for name, value in described.items() if value]
    show_table(Console(), "choreograph", ("fact", "value"), lines)


@app.command()
def demo(
    model: Model = EMBEDDED,
    dtype: Dtype = DtypeName.bfloat16,
    compile: Compile = False,
    branches: Annotated[int, typer.Option(min=1, help="Solutions to branch into.")] = 8,
    voters: Annotated[int, typer.Option(min=1, help="Votes on the best solution.")] = 4,
    picture: Annotated[Path, typer.Option(help="Where the picture of the message graph goes (SVG).")] = Path(
        "out/demo-graph.svg"
    ),
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Tree of Thoughts in prefix mode and choreographed, forced to the same tokens, with a table of both."""
    from .demo import run_demo

    console = Console(quiet=as_json)
    with console.status("loading the model") if console.is_terminal else _nothing():
        engine = _engine(model, dtype, compile)
    numbers = run_demo(engine, console, branches=branches, voters=voters, picture=picture, seed=seed)
    if as_json:
        print(json.dumps(numbers))


@app.command()
def run(
    workflow: Annotated[str, typer.Argument(help="A workflow of the package, or the path of a Python file.")],
    task: Annotated[str, typer.Option(help="The task; - reads standard input.")] = "-",
    model: Model = EMBEDDED,
    mode: Mode = ModeName.choreographed,
    dtype: Dtype = DtypeName.bfloat16,
    compile: Compile = False,
    option: Annotated[list[str] | None, typer.Option(help="An option of the workflow, as name=value.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of one message.")] = 160,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.7,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Run one workflow on one task and print its answer and what each stage cost."""
    from .choreographies import find
    from .measure import perform
    from .types import SamplingParams

    found = find(workflow)
    text = sys.stdin.read().strip() if task == "-" else task
    if not text:
        raise typer.BadParameter("the task is empty: give one with --task or on standard input")
    console = Console(quiet=as_json)
    sampling = SamplingParams(temperature=temperature, top_p=0.95, max_tokens=max_tokens)
    done = perform(
        _engine(model, dtype, compile),
        found,
        text,
        mode=mode.value,
        seed=seed,
        sampling=sampling,
        options=_options(option or []),
        on_text=lambda piece: console.print(piece, end="", markup=False, highlight=False, soft_wrap=True),
    )
    if as_json:
        unparseable = dict(done.performance.unparseable)
        print(json.dumps({"answer": done.answer.text, "unparseable": unparseable, **done.cost.as_dict()}))
    else:
        console.print("\n")
        _show_run(console, f"{workflow}, {mode.value}: {done.cost.seconds:.2f} s", done)


WorkflowName = Annotated[str, typer.Argument(help="A workflow of the package, or the path of a Python file.")]
Data = Annotated[str, typer.Option(help="A .jsonl file, a Hub dataset (name or name:configuration), or games:N.")]
Out = Annotated[Path | None, typer.Option(help="The folder of the run; a run that was stopped goes on there.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Only so many examples.")]
Split = Annotated[str, typer.Option(help="The split of a Hub dataset.")]
Shuffle = Annotated[int | None, typer.Option(help="Seed to shuffle the examples with; unshuffled without one.")]
Only = Annotated[list[str] | None, typer.Option("--condition", help="Only these conditions (and the baseline).")]
Options = Annotated[list[str] | None, typer.Option("--option", help="An option of the workflow, as name=value.")]
MaxTokens = Annotated[int, typer.Option(min=1, help="Most tokens of one message.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="0 is greedy.")]
AtOnce = Annotated[int, typer.Option(min=1, help="Examples that run at once, packed into the same steps.")]


@app.command(name="eval")
def evaluate(
    workflow: WorkflowName,
    data: Data,
    out: Out = None,
    limit: Limit = None,
    shuffle: Shuffle = None,
    split: Split = "test",
    model: Model = EMBEDDED,
    dtype: Dtype = DtypeName.bfloat16,
    condition: Only = None,
    option: Options = None,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.7,
    seed: Seed = 0,
    at_once: AtOnce = 32,
    fidelity: Annotated[int, typer.Option(min=0, help="Measure log-loss and KL on so many traces.")] = 0,
    judge: Annotated[str | None, typer.Option(help="A model that compares answers in both orders.")] = None,
    as_json: Json = False,
) -> None:
    """Score a workflow on data under its conditions: accuracy, paired differences, fidelity, win rates."""
    from .choreographies import find
    from .evaluation import shown
    from .types import SamplingParams

    found, console = find(workflow), Console(quiet=as_json)
    examples = shown.examples_for(found, data, limit=limit, seed=shuffle, split=split)
    report = shown.evaluate(
        _engine(model, dtype, False),
        console,
        workflow,
        found,
        examples,
        out or Path("out") / "eval" / Path(workflow).stem,
        conditions=shown.chosen(found, condition or []),
        options=_options(option or []),
        sampling=SamplingParams(temperature=temperature, top_p=0.95, max_tokens=max_tokens),
        seed=seed,
        at_once=at_once,
        fidelity=fidelity,
        judge=None if judge is None else _engine(judge, dtype, False),
    )
    if as_json:
        print(json.dumps(report))


@app.command()
def bench(
    workflow: WorkflowName,
    data: Data,
    out: Out = None,
    limit: Limit = 30,
    shuffle: Shuffle = None,
    split: Split = "test",
    model: Model = EMBEDDED,
    dtype: Dtype = DtypeName.bfloat16,
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

    found, console = find(workflow), Console(quiet=as_json)
    examples = shown.examples_for(found, data, limit=limit, seed=shuffle, split=split)
    report = shown.bench(
        _engine(model, dtype, compile),
        console,
        workflow,
        found,
        examples,
        out or Path("out") / "bench" / Path(workflow).stem,
        conditions=shown.chosen(found, condition or []),
        options=_options(option or []),
        sampling=SamplingParams(temperature=temperature, top_p=0.95, max_tokens=max_tokens),
        seed=seed,
    )
    if as_json:
        print(json.dumps(report))


def _show_run(console: Console, title: str, done: Any) -> None:
    from .report import milliseconds, show_table

    lines = [
        (s.stage, str(s.calls), milliseconds(s.ttft), str(s.encoded), str(s.cached), str(s.generated))
        for s in done.cost.stages
    ]
    show_table(console, title, ("stage", "calls", "TTFT", "encoded", "reused", "generated"), lines)
    if done.performance.unparseable:
        console.print(f"could not be parsed: {dict(done.performance.unparseable)}", highlight=False)


@app.command()
def chat(
    model: Model = EMBEDDED,
    mode: Mode = ModeName.choreographed,
    dtype: Dtype = DtypeName.bfloat16,
    compile: Compile = False,
    system: Annotated[str, typer.Option(help="A system prompt.")] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of one reply.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.7,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Talk to a model. An empty line or end of input ends it; /reset forgets the conversation."""
    from .errors import ChoreographError
    from .types import SamplingParams

    console = Console(quiet=as_json)
    sampling = SamplingParams(temperature=temperature, top_p=0.95, max_tokens=max_tokens)
    engine = _engine(model, dtype, compile)
    with engine.session(mode=mode.value, seed=seed) as session:
        opening = [session.prefill(session.system(system))] if system else []
        history = list(opening)
        while line := _ask(console):
            if line == "/reset":
                history = list(opening)
                continue
            turn = session.prefill(session.user(line), parents=history)
            reply = session.decode(session.assistant(), parents=[*history, turn], sampling=sampling)
            try:
                for piece in reply.stream():
                    console.print(piece, end="", markup=False, highlight=False, soft_wrap=True)
            except ChoreographError as problem:
                console.print(f"{turn.error or problem}; this turn is dropped, /reset starts anew", markup=False)
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


def _engine(model: str, dtype: DtypeName, compile: bool) -> Any:
    from .config import EngineConfig
    from .core import Engine

    return Engine.from_pretrained(model, dtype=dtype.value, config=EngineConfig(compile=compile))


def _options(given: list[str]) -> dict[str, Any]:
    """name=value pairs; a value that reads as JSON is taken as such (4, true), else as text."""
    options = {}
    for pair in given:
        name, equals, value = pair.partition("=")
        if not equals:
            raise typer.BadParameter(f"--option {pair!r}: write name=value")
        try:
            options[name] = json.loads(value)
        except json.JSONDecodeError:
            options[name] = value
    return options


def _nothing() -> Any:
    from contextlib import nullcontext

    return nullcontext()


def main(command: Callable[[], None] = app) -> None:
    """The entry point: an error of the package is one line and exit code 1, never a traceback."""
    from .errors import ChoreographError

    try:
        command()
    except ChoreographError as problem:
        console = Console(stderr=True)
        console.print("[red]error[/red]: ", end="")
        console.print(str(problem), markup=False, highlight=False)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
