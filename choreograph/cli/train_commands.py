"""`choreograph trace` and `choreograph train`: from a workflow to an adapter. Owns options and printing."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ..console import make_console
from .common import (
    DEFAULT_MODEL,
    AdapterStagesOption,
    ConcurrencyOption,
    DataOption,
    DeviceOption,
    DtypeName,
    DtypeOption,
    JsonOption,
    LimitOption,
    MaxTokensOption,
    ModelOption,
    SeedOption,
    ShuffleSeedOption,
    SplitOption,
    TemperatureOption,
    WorkflowArgument,
    WorkflowOptions,
    open_engine,
    parse_options,
)


def trace(
    workflow: WorkflowArgument,
    data: DataOption,
    out: Annotated[Path | None, typer.Option(help="The folder of the traces; a run that was stopped goes on.")] = None,
    limit: LimitOption = None,
    shuffle_seed: ShuffleSeedOption = None,
    split: SplitOption = "train",
    model: ModelOption = DEFAULT_MODEL,
    dtype: DtypeOption = DtypeName.auto,
    device: DeviceOption = "cpu",
    option: WorkflowOptions = None,
    max_tokens: MaxTokensOption = 256,
    temperature: TemperatureOption = 1.0,
    top: Annotated[int, typer.Option(min=0, help="Likeliest tokens to keep behind every token, for `--kl`.")] = 0,
    seed: SeedOption = 0,
    concurrency: ConcurrencyOption = 32,
) -> None:
    """Record what a workflow says on its baseline, call by call, to train on."""
    from ..evaluation import report as shown
    from ..sampling_params import SamplingParams
    from ..training.dataset import collect_traces
    from ..workflows import find

    result, console = find(workflow), make_console()
    examples = shown.examples_for(result, data, limit=limit, seed=shuffle_seed, split=split)
    out = out or Path("out") / "traces" / Path(workflow).stem
    problems: list[str] = []
    with shown.progress(console, workflow, len(examples)) as tick:

        def done(condition: str, record: dict[str, Any]) -> None:
            tick()
            problems.extend(filter(None, [record.get("error")]))

        traces = collect_traces(
            open_engine(model, dtype, device=device),
            workflow,
            result,
            examples,
            out,
            sampling=SamplingParams(temperature=temperature, max_tokens=max_tokens),
            top=top,
            seed=seed,
            options=parse_options(option or []),
            concurrency=concurrency,
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
    adapter_stage: AdapterStagesOption = None,
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
    model: ModelOption = DEFAULT_MODEL,
    dtype: DtypeOption = DtypeName.float32,
    device: DeviceOption = "cpu",
    rank: Annotated[int, typer.Option(min=1, help="Rank of the adapters.")] = 64,
    alpha: Annotated[int, typer.Option(min=1, help="Their scale is alpha / rank.")] = 32,
    dropout: Annotated[float, typer.Option(help="Share of inputs that an adapter drops.")] = 0.05,
    target: Annotated[
        list[str] | None,
        typer.Option(help="A kind of linear layer to adapt, by the end of its name; the attention's by default."),
    ] = None,
    learning_rate: Annotated[float, typer.Option(help="Highest learning rate.")] = 2e-4,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the traces.")] = 2,
    batch_size: Annotated[int, typer.Option(min=1, help="Traces that go into one update.")] = 8,
    examples_per_forward: Annotated[
        int, typer.Option(min=1, help="How many of these share one pass: quicker, for memory.")
    ] = 1,
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
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Train a LoRA adapter so that reuse says what the baseline said in these traces."""
    from ..evaluation import report as shown
    from ..training.train import train_from_traces
    from ..training.train_config import TrainConfig

    console = make_console(quiet=as_json)
    config = TrainConfig(
        lora_rank=rank,
        lora_alpha=alpha,
        dropout=dropout,
        target_modules=tuple(target) if target else None,
        learning_rate=learning_rate,
        epochs=epochs,
        batch_size=batch_size,
        examples_per_forward=examples_per_forward,
        evals_per_epoch=validations,
        patience=patience,
        kl_weight=kl,
        kv_loss_weight=encodings,
        gradient_checkpointing=checkpointing,
        bf16=bf16,
        tensorboard=tensorboard,
        seed=seed,
    )
    learned = "-".join([direct or condition or "reused", *(adapter_stage or ()), *(f"of-{one}" for one in stage or ())])
    out = out or Path("out") / "adapters" / f"{traces.name}-{learned}"
    adapter = open_engine(model, dtype, device=device).core.hf_model
    with ExitStack() as stack:
        ticks: list[Callable[[], None]] = []

        def on_update(done: int, most: int) -> None:
            if not ticks:
                ticks.append(stack.enter_context(shown.progress(console, "updates", most, done - 1)))
            ticks[0]()

        report = train_from_traces(
            adapter,
            traces,
            out,
            config,
            condition=condition,
            answer_workflow=direct,
            adapter_stages=adapter_stage or (),
            stages=stage or (),
            workflow=workflow,
            validation=validation,
            on_update=on_update,
        )
    if as_json:
        print(json.dumps({k: v for k, v in report.as_dict().items() if k != "log"}))
        return
    _print_train_report(console, report, out)


def _print_train_report(console: Console, report: Any, out: Path) -> None:
    from ..console import print_table

    lines = [
        ("log-loss under reuse, before", f"{report.loss_before:.4f}"),
        ("log-loss under reuse, after", f"{report.loss_after:.4f}"),
    ]
    if report.baseline is not None:
        lines.append(("log-loss on the baseline", f"{report.baseline:.4f}"))
    if report.gap_closed is not None:
        lines.append(("gap closed", f"{report.gap_closed:.0%}"))
    if report.divergence is not None:
        lines.append(("divergence from the baseline", "{:.4f} before, {:.4f} after".format(*report.divergence)))
    lines += [
        ("trained share of parameters", f"{report.trained_share:.2%}"),
        ("seconds a trace", f"{report.seconds:.2f}"),
        ("peak memory", f"{report.peak_memory / 2**30:.1f} GiB"),
        ("updates", str(report.updates)),
    ]
    print_table(console, f"adapter in {out}", ("on the traces for validation", ""), lines)
