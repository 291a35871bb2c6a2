"""`choreograph reuse`: profiles of pairs of models. Owns options and printing."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ..console import make_console
from .common import DEFAULT_MODEL, DtypeName, DtypeOption, JsonOption, LimitOption, ModelOption, ShuffleSeedOption

app = typer.Typer(name="reuse", help="DroidSpeak: one model on what another encoded.", no_args_is_help=True)

ProfileFile = Annotated[Path, typer.Argument(help="A profile that `reuse profile` wrote.", show_default=False)]


@app.callback()
def _group() -> None:
    """DroidSpeak: one model on what another encoded."""


@app.command()
def profile(
    receiver: Annotated[
        str, typer.Argument(help="The model that reuses: a LoRA adapter, a model folder, a .gguf file or a Hub id.")
    ],
    data: Annotated[Path, typer.Option(help="A .jsonl file: questions with documents or a context, and answers.")],
    out: Annotated[Path, typer.Option(help="The folder of the profile; one that was stopped goes on.")],
    model: ModelOption = DEFAULT_MODEL,
    sender: Annotated[
        str | None, typer.Option(help="The model that encodes, if it is not the base: as the receiver.")
    ] = None,
    metric: Annotated[
        str, typer.Option(help="f1, likelihood of the answers, or agreement with its own.")
    ] = "likelihood",
    stride: Annotated[int, typer.Option(min=1, help="Stretches begin and end so many layers apart.")] = 1,
    limit: LimitOption = 20,
    shuffle_seed: ShuffleSeedOption = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 16,
    time_tokens: Annotated[int | None, typer.Option(min=1, help="Time the frontier too, on so many tokens.")] = None,
    dtype: DtypeOption = DtypeName.float32,
) -> None:
    """Measure which layers a receiver has to compute itself of what a sender encoded."""
    from ..evaluation.report import progress
    from ..layer_reuse.profiler import ProfileConfig, check_timing_tokens, load_pair, load_qa_examples, profile_pair
    from ..layer_reuse.profiler import with_timings as with_times

    console = make_console()
    requested = load_qa_examples(data, limit=limit, seed=shuffle_seed)
    engine, names = load_pair(model, receiver, sender, dtype)
    if time_tokens is not None:
        check_timing_tokens(engine, time_tokens)
    with progress(console, "inputs", len(requested)) as tick:
        result = profile_pair(
            engine,
            names[0],
            requested,
            out,
            sender=names[1],
            config=ProfileConfig(metric=metric, stride=stride, max_tokens=max_tokens),
            on_done=lambda record: tick(),
        )
    if time_tokens is not None:
        result = with_times(engine, names[0], result, time_tokens, sender=names[1])
    result.save(out / "profile.json")
    _print_profile(console, result, f"{len(requested)} inputs, {result.metric}", out)
    said = f"{out / 'profile.json'}, with a picture beside it"
    console.print(said, markup=False, highlight=False, soft_wrap=True)


@app.command()
def show(
    profile: ProfileFile,
    loss: Annotated[float | None, typer.Option(help="Name the cheapest pattern that loses at most this.")] = None,
    figures: Annotated[Path | None, typer.Option(help="Draw it into this folder.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the frontier of a profile, or pick a pattern on it."""
    from ..layer_reuse.profile import Profile

    result, console = Profile.load(profile), make_console()
    picked = None if loss is None else result.cheapest(loss)
    if as_json:
        points = [{"pattern": str(p.pattern), "loss": p.loss, "cost": p.cost} for p in result.frontier()]
        chosen = None if picked is None else str(picked.pattern)
        print(json.dumps({"frontier": points, "critical": result.critical(), "picked": chosen}))
        return
    _print_profile(console, result, profile.name, figures)
    if picked is not None:
        console.print(f"picked {picked.pattern}: cost {picked.cost:.2f}, loss {picked.loss:.3f}", highlight=False)


def _print_profile(console: Console, profile: Any, title: str, figures: Path | None) -> None:
    from ..console import print_table
    from ..layer_reuse.profile_report import draw_profile, frontier_rows, summary_rows

    if figures is not None:
        draw_profile(profile, figures / "profile.svg")
    print_table(console, title, ("", ""), summary_rows(profile), num_text_columns=2)  # critical layers may be many
    print_table(console, "frontier", ("computes layers", "of all", "cost", "loss"), frontier_rows(profile))
