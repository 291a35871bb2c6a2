"""`choreograph trace` and `choreograph train`: from a workflow to an adapter. Owns options and printing."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from .cli_options import (
    EMBEDDED,
    AtOnce,
    Data,
    Device,
    Dtype,
    DtypeName,
    Json,
    Limit,
    MaxTokens,
    Model,
    Options,
    Readers,
    Seed,
    Shuffle,
    Split,
    Temperature,
    WorkflowName,
    open_engine,
    read_options,
)
from .report import console_of


def trace(
    workflow: WorkflowName,
    data: Data,
    out: Annotated[Path | None, typer.Option(help="The folder of the traces; a run that was stopped goes on.")] = None,
    limit: Limit = None,
    shuffle: Shuffle = None,
    split: Split = "train",
    model: Model = EMBEDDED,
    dtype: Dtype = DtypeName.auto,
    device: Device = "cpu",
    option: Options = None,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 1.0,
    top: Annotated[int, typer.Option(min=0, help="Likeliest tokens to keep behind every token, for `--kl`.")] = 0,
    seed: Seed = 0,
    at_once: AtOnce = 32,
) -> None:
    """Record what a workflow says on its baseline, call by call, to train on."""
    from .choreographies import find
    from .distill import collect
    from .evaluation import shown
    from .types import SamplingParams

    found, console = find(workflow), console_of()
    examples = shown.examples_for(found, data, limit=limit, seed=shuffle, split=split)
    out = out or Path("out") / "traces" / Path(workflow).stem
    problems: list[str] = []
    with shown.progress(console, workflow, len(examples)) as tick:

        def done(condition: str, record: dict[str, Any]) -> None:
            tick()
            problems.extend(filter(None, [record.get("error")]))

        traces = collect(
            open_engine(model, dtype, device=device),
            workflow,
            found,
            examples,
            out,
            sampling=SamplingParams(temperature=temperature, max_tokens=max_tokens),
            top=top,
            seed=seed,
            options=read_options(option or []),
            at_once=at_once,
            on_done=done,
        )
    said = sum(len(call.generated or ()) for one in traces for call in one.calls)
    lost = len(examples) - len(traces)
    why = f" (the first: {problems[0]})" if problems else ""
    console.print(
        f"{len(traces)} traces, {said} generated tokens, {lost} runs failed{why}: {out}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    if not traces:
        raise typer.Exit(1)


def train(
    traces: Annotated[Path, typer.Argument(help="A folder that `choreograph trace` wrote.", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(help="Where the adapter goes; a training that was stopped goes on.")
    ] = None,
    condition: Annotated[
        str | None, typer.Option(help="The way of running the workflow to learn; needed if it has several.")
    ] = None,
    direct: Annotated[
        str | None, typer.Option(help="Learn to give the final answers in this workflow of one call instead.")
    ] = None,
    reader: Readers = None,
    stage: Annotated[
        list[str] | None,
        typer.Option(
            help="A stage whose decodes are learned, with those they see; all by default.", show_default=False
        ),
    ] = None,
    workflow: Annotated[
        str | None, typer.Option(help="The file of a workflow of your own, as its code is run.", show_default=False)
    ] = None,
    validation: Annotated[float, typer.Option(help="Share of the traces that is kept apart.")] = 0.1,
    model: Model = EMBEDDED,
    dtype: Dtype = DtypeName.float32,
    device: Device = "cpu",
    rank: Annotated[int, typer.Option(min=1, help="Rank of the adapters.")] = 64,
    alpha: Annotated[int, typer.Option(min=1, help="Their scale is alpha / rank.")] = 32,
    dropout: Annotated[float, typer.Option(help="Share of inputs that an adapter drops.")] = 0.05,
    target: Annotated[
        list[str] | None,
        typer.Option(help="A kind of linear layer to adapt, by the end of its name; the attention's by default."),
    ] = None,
    rate: Annotated[float, typer.Option(help="Highest learning rate.")] = 2e-4,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the traces.")] = 2,
    lessons: Annotated[int, typer.Option(min=1, help="Traces that go into one update.")] = 8,
    packed: Annotated[int, typer.Option(min=1, help="How many of these share one pass: quicker, for memory.")] = 1,
    validations: Annotated[int, typer.Option(min=1, help="Validations in each epoch.")] = 1,
    patience: Annotated[int, typer.Option(min=0, help="Validations without a better one; 0: never stop early.")] = 0,
    kl: Annotated[float, typer.Option(help="Weight of the divergence from the baseline, beside the log-loss.")] = 0.0,
    encodings: Annotated[
        float, typer.Option(help="Weight of how far reused encodings are from those in readers' own prompts.")
    ] = 0.0,
    checkpointing: Annotated[bool, typer.Option("--checkpointing", help="Save memory: compute layers twice.")] = False,
    bf16: Annotated[
        bool,
        typer.Option("--bf16", help="Compute in bfloat16, whatever the weights are; quickest with --dtype bfloat16."),
    ] = False,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Metrics for TensorBoard too.")] = False,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Train a LoRA adapter so that reuse says what the baseline said in these traces."""
    from .distill import TrainConfig
    from .distill.run import train_on
    from .evaluation import shown

    console = console_of(quiet=as_json)
    config = TrainConfig(
        rank=rank,
        alpha=alpha,
        dropout=dropout,
        targets=tuple(target) if target else None,
        rate=rate,
        epochs=epochs,
        lessons=lessons,
        packed=packed,
        validations=validations,
        patience=patience,
        kl=kl,
        encodings=encodings,
        checkpointing=checkpointing,
        bf16=bf16,
        tensorboard=tensorboard,
        seed=seed,
    )
    learned = "-".join([direct or condition or "reused", *(reader or ()), *(f"of-{one}" for one in stage or ())])
    out = out or Path("out") / "adapters" / f"{traces.name}-{learned}"
    adapter = open_engine(model, dtype, device=device).runner.adapter
    with ExitStack() as stack:
        ticks: list[Callable[[], None]] = []

        def on_update(done: int, most: int) -> None:
            if not ticks:
                ticks.append(stack.enter_context(shown.progress(console, "updates", most, done - 1)))
            ticks[0]()

        report = train_on(
            adapter,
            traces,
            out,
            config,
            condition=condition,
            direct=direct,
            readers=reader or (),
            stages=stage or (),
            workflow=workflow,
            validation=validation,
            on_update=on_update,
        )
    if as_json:
        print(json.dumps({k: v for k, v in report.as_dict().items() if k != "log"}))
        return
    _show(console, report, out)


def _show(console: Console, report: Any, out: Path) -> None:
    from .report import show_table

    lines = [
        ("log-loss under reuse, before", f"{report.before:.4f}"),
        ("log-loss under reuse, after", f"{report.after:.4f}"),
    ]
    if report.baseline is not None:
        lines.append(("log-loss on the baseline", f"{report.baseline:.4f}"))
    if report.closed is not None:
        lines.append(("gap closed", f"{report.closed:.0%}"))
    if report.divergence is not None:
        lines.append(("divergence from the baseline", "{:.4f} before, {:.4f} after".format(*report.divergence)))
    lines += [
        ("trained share of parameters", f"{report.trained_share:.2%}"),
        ("seconds a trace", f"{report.seconds:.2f}"),
        ("peak memory", f"{report.peak_memory / 2**30:.1f} GiB"),
        ("updates", str(report.updates)),
    ]
    show_table(console, f"adapter in {out}", ("on the traces for validation", ""), lines)
