"""`choreograph pml`: schemas and prompts from the command line. Owns options and printing."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ..console import make_console
from .common import DEFAULT_MODEL, DtypeName, DtypeOption, JsonOption, ModelOption

if TYPE_CHECKING:
    from ..outputs import Mode

app = typer.Typer(
    name="pml", help="Prompt Cache: schemas of reusable modules, and prompts that import them.", no_args_is_help=True
)

SchemaFile = Annotated[Path, typer.Argument(help="A schema in PML.", show_default=False)]

PromptFile = Annotated[Path, typer.Argument(help="A prompt in PML for that schema.", show_default=False)]

CacheOption = Annotated[Path | None, typer.Option("--cache", help="Encodings that `warm --save` wrote.")]


@app.command()
def check(
    schema: SchemaFile,
    prompts: Annotated[list[Path] | None, typer.Argument(help="Prompts for it.", show_default=False)] = None,
    model: ModelOption = DEFAULT_MODEL,
) -> None:
    """Check a schema, and prompts against it, with a model's tokenizer."""
    from ..errors import PromptError
    from ..prompt_cache.parser import load_prompt
    from ..prompt_cache.resolve import resolve_prompt

    layout, tokens = _load_layout(schema, model)
    console = make_console()
    facts = f"{len(layout.modules) - 1} modules, {layout.length} positions, {layout.num_cached_tokens} tokens to encode once"
    console.print(f"{schema.name}: {layout.schema.name}, {facts}", markup=False, highlight=False, soft_wrap=True)
    for path in prompts or []:
        prompt = load_prompt(path)
        try:
            serving = resolve_prompt(prompt, layout, tokens)
        except PromptError as exc:
            raise PromptError(f"{path.name}: {exc}") from None
        seen, new = sum(one.num_tokens for one in serving.cached), sum(len(one.tokens) for one in serving.new_texts)
        console.print(
            f"{path.name}: {seen} tokens from the cache, {new} new, ends at {serving.end}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


@app.command()
def show(
    schema: SchemaFile,
    model: ModelOption = DEFAULT_MODEL,
    svg: Annotated[Path | None, typer.Option(help="Write the layout as SVG.")] = None,
) -> None:
    """Show where every module of a schema stands."""
    from ..console import print_table
    from ..utils import atomic_write_text, ensure_writable
    from ..viz.schema_layout import BAR_CHARS, layout_table_rows, layout_to_svg

    ensure_writable(svg)
    layout, _ = _load_layout(schema, model)
    console = make_console()
    title = f"{layout.schema.name}: {layout.length} positions, {layout.num_cached_tokens} tokens cached"
    bar = min(BAR_CHARS, console.width // 5) if console.is_terminal else BAR_CHARS
    print_table(
        console,
        title,
        ("module", "notes", "layout", "positions", "own tokens"),
        layout_table_rows(layout, bar),
        num_text_columns=2,
    )
    if svg is not None:
        atomic_write_text(svg, layout_to_svg(layout))
        console.print(f"drawn to {svg}", markup=False, highlight=False, soft_wrap=True)


@app.command()
def warm(
    schema: SchemaFile,
    save: Annotated[Path | None, typer.Option(help="Write the encodings to this .safetensors file.")] = None,
    model: ModelOption = DEFAULT_MODEL,
    dtype: DtypeOption = DtypeName.auto,
) -> None:
    """Encode every module of a schema, and keep the encodings in a file."""
    from ..prompt_cache.storage import check_writable
    from ..utils import ensure_writable

    ensure_writable(save)
    if save is not None:
        check_writable(save)
    with _open_cache(schema, model, dtype) as cache:
        began = time.perf_counter()
        computed = cache.warmup()
        console = make_console()
        seconds = time.perf_counter() - began
        console.print(f"{computed} tokens encoded in {seconds:.2f} s", highlight=False)
        if save is not None:
            size = cache.save(save)
            console.print(f"{size:,} bytes written to {save}", markup=False, highlight=False, soft_wrap=True)


@app.command()
def run(
    schema: SchemaFile,
    prompt: PromptFile,
    model: ModelOption = DEFAULT_MODEL,
    dtype: DtypeOption = DtypeName.auto,
    cache: CacheOption = None,
    compare: Annotated[bool, typer.Option("--compare", help="Answer without modules too, and time both.")] = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of the answer.")] = 160,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of all sampling.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Answer one prompt from cached modules."""
    from ..sampling_params import SamplingParams

    console = make_console(quiet=as_json)
    sampling = SamplingParams(temperature=temperature, top_p=0.95, max_tokens=max_tokens)
    with _open_cache(schema, model, dtype) as modules:
        modules.resolve(prompt)  # a slip in it is told before anything is computed
        result = modules.load(cache) if cache is not None else 0
        computed = modules.warmup()
        console.print(f"{result} tokens loaded, {computed} encoded", highlight=False)
        report = {"cached": _answer(modules, "choreographed", prompt, sampling, seed, console)}
        if compare:
            report["plain"] = _answer(modules, "naive", prompt, sampling, seed, console)
    if as_json:
        print(json.dumps(report))


def _answer(cache: Any, mode: "Mode", prompt: Path, sampling: Any, seed: int, console: Console) -> dict[str, object]:
    """Print and return one answer, with the seconds from submitting the prompt to the first token."""
    first_token_times: list[float] = []
    with cache.engine.session(mode=mode, seed=seed, client_id=cache.client_id) as session:
        num_cached = cache.count_cached_tokens(prompt)
        start = time.perf_counter()
        message = cache.generate(session, prompt, sampling=sampling)
        message.on_logprobs(lambda _: first_token_times.append(time.perf_counter() - start))
        for text in message.stream():
            console.print(text, end="", markup=False, highlight=False, soft_wrap=True)
        result = {
            "text": message.text,
            "ttft": first_token_times[0],
            "cached": num_cached if mode == "choreographed" else message.usage.cached_tokens,
            "generated": message.usage.completion_tokens,
        }
    how = "from modules" if mode == "choreographed" else "as plain text"
    facts = f"{result['cached']} tokens reused, {result['generated']} generated"
    console.print(f"\n-- {how}: first token after {first_token_times[0] * 1e3:.0f} ms, {facts}\n", highlight=False)
    return result


def _load_layout(schema: Path, model: str) -> Any:
    """The layout of a schema file under a model's tokenizer, whose weights are not loaded."""
    from ..engine.text import ChatTemplate
    from ..models.loader import load_tokenizer
    from ..prompt_cache.layout import ChatTokenizer, compute_layout
    from ..prompt_cache.parser import load_schema

    tokenizer, most = load_tokenizer(model)
    tokens = ChatTokenizer(ChatTemplate(tokenizer), tokenizer)
    return compute_layout(load_schema(schema), tokens, most), tokens


def _open_cache(schema: Path, model: str, dtype: str) -> Any:
    from ..engine.engine import Engine
    from ..prompt_cache.cache import PromptCache

    return PromptCache(Engine.from_pretrained(model, dtype=dtype), schema)
