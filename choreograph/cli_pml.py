"""`choreograph pml`: schemas and prompts from the command line. Owns options and printing."""

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from .cli_options import EMBEDDED, Dtype, DtypeName, Json, Model
from .report import console_of

if TYPE_CHECKING:
    from .types import Mode

app = typer.Typer(
    name="pml", help="Prompt Cache: schemas of reusable modules, and prompts that import them.", no_args_is_help=True
)
SchemaFile = Annotated[Path, typer.Argument(help="A schema in PML.", show_default=False)]
PromptFile = Annotated[Path, typer.Argument(help="A prompt in PML for that schema.", show_default=False)]
Cache = Annotated[Path | None, typer.Option("--cache", help="Encodings that `warm --save` wrote.")]


@app.command()
def check(
    schema: SchemaFile,
    prompts: Annotated[list[Path] | None, typer.Argument(help="Prompts for it.", show_default=False)] = None,
    model: Model = EMBEDDED,
) -> None:
    """Check a schema, and prompts against it, with a model's tokenizer."""
    from .errors import PromptError
    from .pml import read_prompt
    from .pml.serving import serve

    layout, tokens = _layout(schema, model)
    console = console_of()
    facts = f"{len(layout.pieces) - 1} modules, {layout.length} positions, {layout.cached_tokens} tokens to encode once"
    console.print(f"{schema.name}: {layout.schema.name}, {facts}", markup=False, highlight=False, soft_wrap=True)
    for path in prompts or []:
        prompt = read_prompt(path)
        try:
            serving = serve(prompt, layout, tokens)
        except PromptError as problem:
            raise PromptError(f"{path.name}: {problem}") from None
        seen, new = sum(one.count for one in serving.seen), sum(len(one.tokens) for one in serving.new)
        console.print(
            f"{path.name}: {seen} tokens from the cache, {new} new, ends at {serving.end}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


@app.command()
def show(
    schema: SchemaFile,
    model: Model = EMBEDDED,
    picture: Annotated[Path | None, typer.Option(help="Write the layout as SVG.")] = None,
) -> None:
    """Show where every module of a schema stands."""
    from .places import make_room, write_whole
    from .report import show_table
    from .viz.schema import BAR, lines, svg

    make_room(picture)
    layout, _ = _layout(schema, model)
    console = console_of()
    title = f"{layout.schema.name}: {layout.length} positions, {layout.cached_tokens} tokens cached"
    bar = min(BAR, console.width // 5) if console.is_terminal else BAR
    show_table(console, title, ("module", "notes", "layout", "positions", "own tokens"), lines(layout, bar), texts=2)
    if picture is not None:
        write_whole(picture, svg(layout))
        console.print(f"drawn to {picture}", markup=False, highlight=False, soft_wrap=True)


@app.command()
def warm(
    schema: SchemaFile,
    save: Annotated[Path | None, typer.Option(help="Write the encodings to this .safetensors file.")] = None,
    model: Model = EMBEDDED,
    dtype: Dtype = DtypeName.auto,
) -> None:
    """Encode every module of a schema, and keep the encodings in a file."""
    from .places import make_room
    from .pml.storage import check_place

    make_room(save)
    if save is not None:
        check_place(save)
    with _cache(schema, model, dtype) as cache:
        began = time.perf_counter()
        computed = cache.warm()
        console = console_of()
        seconds = time.perf_counter() - began
        console.print(f"{computed} tokens encoded in {seconds:.2f} s", highlight=False)
        if save is not None:
            size = cache.save(save)
            console.print(f"{size:,} bytes written to {save}", markup=False, highlight=False, soft_wrap=True)


@app.command()
def run(
    schema: SchemaFile,
    prompt: PromptFile,
    model: Model = EMBEDDED,
    dtype: Dtype = DtypeName.auto,
    cache: Cache = None,
    compare: Annotated[bool, typer.Option("--compare", help="Answer without modules too, and time both.")] = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of the answer.")] = 160,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of all sampling.")] = 0,
    as_json: Json = False,
) -> None:
    """Answer one prompt from cached modules."""
    from .types import SamplingParams

    console = console_of(quiet=as_json)
    sampling = SamplingParams(temperature=temperature, top_p=0.95, max_tokens=max_tokens)
    with _cache(schema, model, dtype) as modules:
        modules.plan(prompt)  # a slip in it is told before anything is computed
        found = modules.load(cache) if cache is not None else 0
        computed = modules.warm()
        console.print(f"{found} tokens loaded, {computed} encoded", highlight=False)
        report = {"cached": _answer(modules, "choreographed", prompt, sampling, seed, console)}
        if compare:
            report["plain"] = _answer(modules, "naive", prompt, sampling, seed, console)
    if as_json:
        print(json.dumps(report))


def _answer(cache: Any, mode: "Mode", prompt: Path, sampling: Any, seed: int, console: Console) -> dict[str, object]:
    from .pml.compare import answer

    def show(piece: str) -> None:
        console.print(piece, end="", markup=False, highlight=False, soft_wrap=True)

    found = answer(cache, prompt, mode, sampling=sampling, seed=seed, on_text=show)
    how = "from modules" if mode == "choreographed" else "as plain text"
    facts = f"{found.cached} tokens reused, {found.generated} generated"
    console.print(f"\n-- {how}: first token after {found.ttft * 1e3:.0f} ms, {facts}\n", highlight=False)
    return asdict(found)


def _layout(schema: Path, model: str) -> Any:
    """The layout of a schema file under a model's tokenizer, whose weights are not loaded."""
    from .chat import ChatFormat
    from .models.load import tokenizer_of
    from .pml import read_schema
    from .pml.layout import lay_out
    from .pml.tokens import ChatTokens

    tokenizer, most = tokenizer_of(model)
    tokens = ChatTokens(ChatFormat(tokenizer), tokenizer)
    return lay_out(read_schema(schema), tokens, most), tokens


def _cache(schema: Path, model: str, dtype: str) -> Any:
    from .core import Engine
    from .pml import PromptCache

    return PromptCache(Engine.from_pretrained(model, dtype=dtype), schema)
