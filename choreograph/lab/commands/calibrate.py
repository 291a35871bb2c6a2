"""`choreograph calibrate`: the temperature and scale of `Repair(0, "align")` for a model."""

import json
from pathlib import Path
from typing import Annotated

import typer

from ...cli import common
from ...console import make_console, print_text


def calibrate(
    model: Annotated[
        str, typer.Argument(help="A name, a Hub id, a model folder or a .gguf file.")
    ] = common.DEFAULT_MODEL,
    data: Annotated[
        Path | None,
        typer.Option(help="JSON Lines with question and documents (title, text); a set of the package by default."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only so many records.")] = None,
    dtype: common.DtypeOption = "auto",
    device: common.DeviceOption = "cpu",
    as_json: common.JsonOption = False,
) -> None:
    """Find the temperature and scale with which a model attends to reused messages."""
    from ...features.repair.align import save_calibration
    from ..evaluation.calibration import calibrate, load_examples

    console, examples = make_console(quiet=as_json), load_examples(data, limit)
    engine = common.open_engine(model, dtype, device=device)
    result = calibrate(
        engine,
        examples,
        lambda tried, kl: print_text(console, f"temperature {tried.temperature:g}, scale {tried.scale:g}: KL {kl:.4f}"),
    )
    path = save_calibration(engine.core.hf_model.sampled_weights_hash, result)
    if as_json:
        kl = {"kl": result.kl, "kl_of_reuse": result.kl_of_reuse}
        print(json.dumps({**result.alignment._asdict(), **kl, "n": len(examples), "file": str(path)}))
        return
    alignment = result.alignment
    print(
        f"temperature {alignment.temperature:g}, scale {alignment.scale:g}: KL from prefix mode {result.kl:.4f} nats a "
        f"token, {result.kl_of_reuse:.4f} without; {len(examples)} examples, stored in {path}"
    )
