"""`choreograph reuse`: profiles of pairs of models. Owns options and printing."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from .cli_options import EMBEDDED, Dtype, DtypeName, Json, Limit, Model, Shuffle
from .report import console_of

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
    model: Model = EMBEDDED,
    sender: Annotated[
        str | None, typer.Option(help="The model that encodes, if it is not the base: as the receiver.")
    ] = None,
    metric: Annotated[
        str, typer.Option(help="f1, likelihood of the answers, or agreement with its own.")
    ] = "likelihood",
    every: Annotated[int, typer.Option(min=1, help="Stretches begin and end so many layers apart.")] = 1,
    limit: Limit = 20,
    shuffle: Shuffle = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 16,
    timed: Annotated[int | None, typer.Option(min=1, help="Time the frontier too, on so many tokens.")] = None,
    dtype: Dtype = DtypeName.float32,
) -> None:
    """Measure which layers a receiver has to compute itself of what a sender encoded."""
    from .evaluation.shown import progress
    from .reuse.asked import read_asked
    from .reuse.profiling import Setting, check_timed, measure, open_pair
    from .reuse.profiling import timed as with_times

    console = console_of()
    asked = read_asked(data, limit=limit, seed=shuffle)
    engine, names = open_pair(model, receiver, sender, dtype)
    if timed is not None:
        check_timed(engine, timed)
    with progress(console, "inputs", len(asked)) as tick:
        found = measure(
            engine,
            names[0],
            asked,
            out,
            sender=names[1],
            setting=Setting(metric=metric, every=every, max_tokens=max_tokens),
            on_done=lambda record: tick(),
        )
    if timed is not None:
        found = with_times(engine, names[0], found, timed, sender=names[1])
    found.save(out / "profile.json")
    _show(console, found, f"{len(asked)} inputs, {found.metric}", out)
    said = f"{out / 'profile.json'}, with pictures beside it"
    console.print(said, markup=False, highlight=False, soft_wrap=True)


@app.command()
def show(
    profile: ProfileFile,
    loss: Annotated[float | None, typer.Option(help="Name the cheapest pattern that loses at most this.")] = None,
    pictures: Annotated[Path | None, typer.Option(help="Draw it into this folder.")] = None,
    as_json: Json = False,
) -> None:
    """Show the frontier of a profile, or pick a pattern on it."""
    from .reuse.profile import Profile

    found, console = Profile.load(profile), console_of()
    picked = None if loss is None else found.cheapest(loss)
    if as_json:
        points = [{"pattern": str(p.pattern), "loss": p.loss, "cost": p.cost} for p in found.frontier()]
        chosen = None if picked is None else str(picked.pattern)
        print(json.dumps({"frontier": points, "critical": found.critical(), "picked": chosen}))
        return
    _show(console, found, profile.name, pictures)
    if picked is not None:
        console.print(f"picked {picked.pattern}: cost {picked.cost:.2f}, loss {picked.loss:.3f}", highlight=False)


def _show(console: Console, found: Any, title: str, pictures: Path | None) -> None:
    from .report import show_table
    from .reuse.shown import draw, lines, summary

    if pictures is not None:
        draw(found, pictures, "profile")
    show_table(console, title, ("", ""), summary(found), texts=2)  # critical layers may be many
    show_table(console, "frontier", ("computes layers", "of all", "cost", "loss"), lines(found))
