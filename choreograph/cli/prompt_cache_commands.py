"""`choreograph prompt-cache`: schemas and prompts in PML."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..console import make_console, print_table, print_text
from ..outputs import Mode
from .common import (
    DEFAULT_MODEL,
    DtypeOption,
    JsonOption,
    MaxTokensOption,
    ModelOption,
    SeedOption,
    TemperatureOption,
    open_engine,
    quiet_transformers,
)

if TYPE_CHECKING:
    from ..prompt_cache.layout import Layout, ModuleLayout

app = typer.Typer(
    name="prompt-cache",
    help="Prompt Cache: schemas of reusable modules, and prompts that import them.",
    no_args_is_help=True,
)
BAR_CHARS = 48  # characters of a layout bar, at most

SchemaFile = Annotated[Path, typer.Argument(help="A schema in PML.", show_default=False)]
PromptFile = Annotated[Path, typer.Argument(help="A prompt in PML for that schema.", show_default=False)]
CacheOption = Annotated[Path | None, typer.Option("--cache", help="A KV cache that `warm --save` wrote.")]


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
    summary = (
        f"{len(layout.modules) - 1} modules, {layout.length} positions, {layout.num_cached_tokens} tokens to cache"
    )
    print_text(console, f"{schema.name}: {layout.schema.name}, {summary}")
    for path in prompts or []:
        prompt = load_prompt(path)
        try:
            serving = resolve_prompt(prompt, layout, tokens)
        except PromptError as exc:
            raise PromptError(f"{path.name}: {exc}") from None
        cached = sum(part.num_tokens for part in serving.cached)
        new = sum(len(text.tokens) for text in serving.new_texts)
        print_text(console, f"{path.name}: {cached} tokens from the cache, {new} new, ends at {serving.end}")


@app.command()
def show(
    schema: SchemaFile,
    model: ModelOption = DEFAULT_MODEL,
    svg: Annotated[Path | None, typer.Option(help="Write the layout as SVG.")] = None,
) -> None:
    """Show the positions of every module of a schema."""
    from ..utils import ensure_writable
    from ..viz import draw_layout

    ensure_writable(svg)
    layout, _ = _load_layout(schema, model)
    console = make_console()
    title = f"{layout.schema.name}: {layout.length} positions, {layout.num_cached_tokens} tokens cached"
    chars = min(BAR_CHARS, console.width // 5) if console.is_terminal else BAR_CHARS
    header = ("module", "notes", "layout", "positions", "own tokens")
    print_table(console, title, header, layout_table_rows(layout, chars), num_text_columns=2)
    if svg is not None:
        draw_layout(layout, svg)
        print_text(console, f"drawn to {svg}")


@app.command()
def warm(
    schema: SchemaFile,
    save: Annotated[Path | None, typer.Option(help="Write the KV cache to this .safetensors file.")] = None,
    model: ModelOption = DEFAULT_MODEL,
    dtype: DtypeOption = "auto",
) -> None:
    """Prefill every module of a schema; save the KV cache."""
    from ..prompt_cache.storage import check_writable
    from ..utils import ensure_writable

    ensure_writable(save)
    if save is not None:
        check_writable(save)
    with _open_cache(schema, model, dtype) as cache:
        console, start = make_console(), time.perf_counter()
        num_tokens = cache.warmup()
        console.print(f"{num_tokens} tokens encoded in {time.perf_counter() - start:.2f} s", highlight=False)
        if save is not None:
            print_text(console, f"{cache.save(save):,} bytes written to {save}")


@app.command()
def run(
    schema: SchemaFile,
    prompt: PromptFile,
    model: ModelOption = DEFAULT_MODEL,
    dtype: DtypeOption = "auto",
    cache: CacheOption = None,
    compare: Annotated[bool, typer.Option("--compare", help="Answer without modules too, and time both.")] = False,
    max_tokens: MaxTokensOption = 160,
    temperature: TemperatureOption = 0.0,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Answer one prompt from cached modules."""
    from ..sampling_params import SamplingParams

    console = make_console(quiet=as_json)
    sampling = SamplingParams(temperature=temperature, top_p=0.95, max_tokens=max_tokens)
    report = {}
    with _open_cache(schema, model, dtype) as modules:
        modules.resolve(prompt)  # an error in the prompt is raised before anything is computed
        loaded = modules.load(cache) if cache is not None else 0
        console.print(f"{loaded} tokens loaded, {modules.warmup()} encoded", highlight=False)
        modes: list[tuple[str, Mode]] = [("cached", "choreographed")]
        modes += [("plain", "naive")] if compare else []
        for name, mode in modes:
            report[name] = _answer(modules, mode, prompt, sampling, seed, console)
    if as_json:
        print(json.dumps(report))


def _answer(cache: Any, mode: "Mode", prompt: Path, sampling: Any, seed: int, console: Any) -> dict[str, object]:
    """Print and return one answer, with its TTFT in seconds."""
    first_token_times: list[float] = []
    with cache.engine.session(mode=mode, seed=seed, client_id=cache.client_id) as session:
        num_cached = cache.count_cached_tokens(prompt)
        start = time.perf_counter()
        message = cache.generate(session, prompt, sampling=sampling)
        message.on_logprobs(lambda _: first_token_times.append(time.perf_counter() - start))
        for text in message.stream():
            print_text(console, text, end="")
        result = {
            "text": message.text,
            "ttft": first_token_times[0],
            "cached": num_cached if mode == "choreographed" else message.usage.cached_tokens,
            "generated": message.usage.completion_tokens,
        }
    how = "from modules" if mode == "choreographed" else "as plain text"
    summary = f"{result['cached']} tokens reused, {result['generated']} generated"
    print_text(console, f"\n-- {how}: first token after {first_token_times[0] * 1e3:.0f} ms, {summary}\n")
    return result


def layout_table_rows(layout: "Layout", bar_chars: int = BAR_CHARS) -> list[tuple[str, str, str, str, str]]:
    """Return (name, notes, bar, positions, own tokens) of every module."""
    from ..prompt_cache.layout import enclosing_union

    rows, union_numbers = [], dict[int, int]()
    for path, module in layout.modules.items():
        notes = []
        if path and (union := enclosing_union(layout, path)):
            notes.append(f"one of union {union_numbers.setdefault(id(union), len(union_numbers) + 1)}")
        if any(path in group for group in layout.scaffold_groups):
            notes.append("scaffold")
        if not module.cache:
            notes.append("not cached")
        notes += [f"{slot.name}: {slot.length} at {slot.start}" for slot in module.parameter_slots.values()]
        name = "  " * len(path) + (path[-1] if path else "(always present)")
        positions = f"{module.start}-{module.end - 1}" if module.end > module.start else "-"
        bar = _layout_bar(module, max(layout.length, 1), bar_chars)
        rows.append((name, ", ".join(notes), bar, positions, str(module.num_tokens)))
    return rows


def _layout_bar(module: "ModuleLayout", length: int, width: int) -> str:
    """Return a bar of a module's positions, `width` characters long.

    `#` is text, `?` an argument, `-` another position of the module, `.` outside of it.
    """
    marks = ["."] * width
    ranges = [("-", module.start, module.end), *(("#", run.start, run.end) for run in module.runs)]
    ranges += [("?", slot.start, slot.start + slot.length) for slot in module.parameter_slots.values()]
    for mark, start, end in ranges:
        first = start * width // length
        for column in range(first, max(first + (end > start), end * width // length)):
            marks[min(column, width - 1)] = mark
    return "".join(marks)


def _load_layout(schema: Path, model: str) -> Any:
    """Return a schema's layout and the tokenizer, without loading weights."""
    from ..api.chat import ChatTemplate
    from ..models.loader import load_tokenizer
    from ..prompt_cache.layout import ChatTokenizer, compute_layout
    from ..prompt_cache.parser import load_schema

    quiet_transformers()
    tokenizer, max_positions = load_tokenizer(model)
    chat_tokenizer = ChatTokenizer(ChatTemplate(tokenizer), tokenizer)
    return compute_layout(load_schema(schema), chat_tokenizer, max_positions), chat_tokenizer


def _open_cache(schema: Path, model: str, dtype: str) -> Any:
    from ..prompt_cache.cache import PromptCache

    return PromptCache(open_engine(model, dtype), schema)
