"""`choreograph trace` and `choreograph train`: from a workflow to an adapter."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from ...cli import common
from ...cli.common import open_engine
from ...console import make_console, print_table, print_text, progress
from . import options


def trace(
    workflow: options.WorkflowArgument,
    data: options.DataOption,
    out: Annotated[Path | None, typer.Option(help="The folder of the traces; a stopped run continues there.")] = None,
    limit: options.LimitOption = None,
    shuffle_seed: options.ShuffleSeedOption = None,
    split: options.SplitOption = "train",
    split_seed: options.SplitSeedOption = 0,
    model: common.ModelOption = common.DEFAULT_MODEL,
    dtype: common.DtypeOption = "auto",
    device: common.DeviceOption = "cpu",
    option: options.WorkflowOptions = None,
    max_tokens: common.MaxTokensOption = 256,
    temperature: common.TemperatureOption = 1.0,
    top: Annotated[int, typer.Option(min=0, help="Likeliest tokens to keep for every token, for `--kl`.")] = 0,
    seed: common.SeedOption = 0,
    concurrency: options.ConcurrencyOption = 32,
    ray: options.RayOption = None,
    ray_workers: options.RayWorkersOption = None,
) -> None:
    """Record the calls of a workflow on its baseline, to train on."""
    from ...sampling_params import SamplingParams
    from ..evaluation.splits import training_examples
    from ..evaluation.traces import collect_traces
    from ..workflows import find

    options.check_ray_options(ray, ray_workers)
    function, console = find(workflow), make_console()
    examples, validation = training_examples(
        function, data, limit=limit, seed=shuffle_seed, split=split, split_seed=split_seed
    )
    num_examples = len(examples) + len(validation)
    out = out or Path("out") / "traces" / Path(workflow).stem
    errors: list[str] = []
    load_engine = partial(open_engine, model, dtype, device=device)
    engine = load_engine()
    with (
        options.open_ray_workers(ray, ray_workers, load_engine, engine) as workers,
        progress(console, workflow, num_examples) as tick,
    ):

        def on_done(condition: str, record: dict[str, Any]) -> None:
            tick()
            errors.extend(filter(None, [record.get("error")]))

        traces = collect_traces(
            engine,
            workflow,
            function,
            examples,
            out,
            validation=validation,
            sampling=SamplingParams(temperature=temperature, max_tokens=max_tokens),
            top=top,
            seed=seed,
            options=common.parse_options(option),
            concurrency=concurrency,
            on_done=on_done,
            workers=workers,
        )
    num_tokens = sum(len(call.generated or ()) for trace in traces for call in trace.calls)
    reason = f" (the first: {errors[0]})" if errors else ""
    failed = f"{num_examples - len(traces)} runs failed{reason}"
    print_text(
        console,
        f"{len(traces)} traces ({len(validation)} for validation), {num_tokens} generated tokens, {failed}: {out}",
    )
    if not traces:
        raise typer.Exit(1)


def train(
    context: typer.Context,
    traces: Annotated[Path, typer.Argument(help="A folder that `choreograph trace` wrote.", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(help="Where the adapter goes; a stopped training continues there.")
    ] = None,
    condition: Annotated[
        str | None, typer.Option(help="The way of running the workflow to learn; needed if it has several.")
    ] = None,
    direct: Annotated[
        str | None, typer.Option(help="Learn to give the final answers in this workflow of one call instead.")
    ] = None,
    adapter_stage: options.AdapterStagesOption = None,
    stage: Annotated[
        list[str] | None,
        typer.Option(help="A stage whose decodes are learned, with their context; all by default.", show_default=False),
    ] = None,
    workflow: Annotated[
        str | None, typer.Option(help="The file of a workflow of your own, as its code is run.", show_default=False)
    ] = None,
    validation: Annotated[
        float | None,
        typer.Option(
            help="Share of the traces to validate on, with no question of the others; by default the traces'."
        ),
    ] = None,
    model: common.ModelOption = common.DEFAULT_MODEL,
    dtype: common.DtypeOption = "float32",
    device: common.DeviceOption = "cpu",
    lora_rank: Annotated[int, typer.Option("--rank", min=1, help="Rank of the adapters.")] = 64,
    lora_alpha: Annotated[int, typer.Option("--alpha", min=1, help="Their scale is alpha / rank.")] = 32,
    dropout: Annotated[float, typer.Option(help="Share of inputs that an adapter drops.")] = 0.05,
    target_modules: Annotated[
        list[str] | None,
        typer.Option("--target", help="A kind of linear layer to adapt, by the end of its name; attention by default."),
    ] = None,
    learning_rate: Annotated[float, typer.Option(help="Highest learning rate.")] = 2e-4,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the traces.")] = 2,
    batch_size: Annotated[int, typer.Option(min=1, help="Traces of one update.")] = 8,
    examples_per_forward: Annotated[
        int, typer.Option(min=1, help="How many of these share one forward pass: faster, for memory.")
    ] = 1,
    evals_per_epoch: Annotated[int, typer.Option("--validations", min=1, help="Validations in each epoch.")] = 1,
    patience: Annotated[int, typer.Option(min=0, help="Validations without a better one; 0: never stop early.")] = 0,
    kl_weight: Annotated[
        float, typer.Option("--kl", help="Weight of the divergence from the baseline, added to the log-loss.")
    ] = 0.0,
    kv_loss_weight: Annotated[
        float, typer.Option("--encodings", help="Weight of the distance of reused KV from KV computed in each context.")
    ] = 0.0,
    alignment: Annotated[
        tuple[float, float] | None,
        typer.Option(metavar="TEMPERATURE SCALE", help="Attend to reused messages as Repair(0, 'align') does."),
    ] = None,
    gradient_checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Save memory: compute layers twice.")
    ] = False,
    bf16: Annotated[
        bool,
        typer.Option("--bf16", help="Compute in bfloat16, whatever the weights are; fastest with --dtype bfloat16."),
    ] = False,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Metrics for TensorBoard too.")] = False,
    seed: common.SeedOption = 0,
    as_json: common.JsonOption = False,
) -> None:
    """Train a LoRA adapter to generate under reuse what the baseline generated."""
    from ..training.train import train_from_traces
    from ..training.train_config import TrainConfig

    console = make_console(quiet=as_json)
    given = {name: context.params[name] for name in TrainConfig.__annotations__ if name in context.params}
    config = TrainConfig(**given | {"target_modules": tuple(target_modules) if target_modules else None})
    learned = "-".join(
        [direct or condition or "reused", *(adapter_stage or ()), *(f"of-{name}" for name in stage or ())]
    )
    out = out or Path("out") / "adapters" / f"{traces.name}-{learned}"
    hf_model = open_engine(model, dtype, device=device).core.hf_model
    with ExitStack() as stack:
        ticks: list[Callable[[], None]] = []  # the bar starts with the first update, which may continue a training

        def on_update(done: int, total: int) -> None:
            if not ticks:
                ticks.append(stack.enter_context(progress(console, "updates", total, done - 1)))
            ticks[0]()

        report = train_from_traces(
            hf_model,
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
    divergence, gap = report.divergence, report.gap_closed
    rows = {
        "log-loss under reuse, before": f"{report.loss_before:.4f}",
        "log-loss under reuse, after": f"{report.loss_after:.4f}",
        "log-loss on the baseline": None if report.baseline is None else f"{report.baseline:.4f}",
        "gap closed": None if gap is None else f"{gap:.0%}",
        "divergence from the baseline": divergence and "{:.4f} before, {:.4f} after".format(*divergence),
        "trained share of parameters": f"{report.trained_share:.2%}",
        "seconds a trace": f"{report.seconds:.2f}",
        "peak memory": f"{report.peak_memory / 2**30:.1f} GiB",
        "updates": str(report.updates),
    }
    lines = [(name, text) for name, text in rows.items() if text is not None]
    print_table(console, f"adapter in {out}", ("on the traces for validation", ""), lines)
