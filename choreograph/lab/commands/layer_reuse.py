"""`choreograph layer-reuse`: profiles of pairs of models (DroidSpeak)."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ...cli.common import DEFAULT_MODEL, DtypeOption, JsonOption, ModelOption
from ...console import make_console, print_table, print_text, progress
from .options import LimitOption, ShuffleSeedOption

app = typer.Typer(
    name="layer-reuse", help="DroidSpeak: one model on the KV cache of another, layer by layer.", no_args_is_help=True
)


@app.command()
def profile(
    receiver: Annotated[
        str, typer.Argument(help="The model that reuses: a LoRA adapter, a model folder, a .gguf file or a Hub id.")
    ],
    data: Annotated[Path, typer.Option(help="A .jsonl file: questions with documents or a context, and answers.")],
    out: Annotated[Path, typer.Option(help="The folder of the profile; a stopped run continues there.")],
    model: ModelOption = DEFAULT_MODEL,
    sender: Annotated[
        str | None, typer.Option(help="The model that prefills, if it is not the base: as the receiver.")
    ] = None,
    metric: Annotated[
        str, typer.Option(help="f1, likelihood of the answers, or agreement with its own.")
    ] = "likelihood",
    stride: Annotated[int, typer.Option(min=1, help="Layer ranges start and end at multiples of this.")] = 1,
    limit: LimitOption = 20,
    shuffle_seed: ShuffleSeedOption = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 16,
    time_tokens: Annotated[int | None, typer.Option(min=1, help="Time the frontier too, on so many tokens.")] = None,
    dtype: DtypeOption = "float32",
) -> None:
    """Measure which layers a receiver must recompute of a sender's KV."""
    from ..profiling.profiler import ProfileConfig, check_timing_tokens, load_pair, load_qa_examples, profile_pair
    from ..profiling.profiler import with_timings as with_times

    console, examples = make_console(), load_qa_examples(data, limit=limit, seed=shuffle_seed)
    engine, (receiver_name, sender_name) = load_pair(model, receiver, sender, dtype)
    if time_tokens is not None:
        check_timing_tokens(engine, time_tokens)
    config = ProfileConfig(metric=metric, stride=stride, max_tokens=max_tokens)
    with progress(console, "inputs", len(examples)) as tick:
        result = profile_pair(
            engine, receiver_name, examples, out, sender=sender_name, config=config, on_done=lambda record: tick()
        )
    if time_tokens is not None:
        result = with_times(engine, receiver_name, result, time_tokens, sender=sender_name)
    result.save(out / "profile.json")
    _print_profile(result, f"{len(examples)} inputs, {result.metric}", out)
    print_text(console, f"{out / 'profile.json'}, with a picture in the same folder")


@app.command()
def show(
    profile: Annotated[Path, typer.Argument(help="A profile that `profile` wrote.", show_default=False)],
    loss: Annotated[float | None, typer.Option(help="Name the cheapest pattern that loses at most this.")] = None,
    figures: Annotated[Path | None, typer.Option(help="Draw it into this folder.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the frontier of a profile, or pick a pattern on it."""
    from ...layer_reuse.profile import Profile

    result = Profile.load(profile)
    picked = None if loss is None else result.cheapest(loss)
    if as_json:
        points = [{"pattern": str(p.pattern), "loss": p.loss, "cost": p.cost} for p in result.frontier()]
        pattern = None if picked is None else str(picked.pattern)
        print(json.dumps({"frontier": points, "critical": result.critical(), "picked": pattern}))
        return
    _print_profile(result, profile.name, figures)
    if picked is not None:
        print_text(make_console(), f"picked {picked.pattern}: cost {picked.cost:.2f}, loss {picked.loss:.3f}")


def _print_profile(profile: Any, title: str, figures: Path | None) -> None:
    from ..profiling.profile_report import draw_profile, frontier_rows, summary_rows

    if figures is not None:
        draw_profile(profile, figures / "profile.svg")
    console = make_console()
    print_table(console, title, ("", ""), summary_rows(profile), num_text_columns=2)  # critical layers may be many
    print_table(console, "frontier", ("computes layers", "of all", "cost", "loss"), frontier_rows(profile))
