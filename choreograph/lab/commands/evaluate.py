"""`choreograph eval` and `choreograph bench`: a workflow under its conditions."""

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from ...cli import common
from ...cli.common import open_engine
from ...console import make_console
from ...errors import ConfigError
from . import options

DIRECT_ADAPTER_NAME = "direct FT"  # name under which `eval` serves its --direct


def evaluate(
    workflow: options.WorkflowArgument,
    data: options.DataOption,
    out: options.OutOption = None,
    limit: options.LimitOption = None,
    shuffle_seed: options.ShuffleSeedOption = None,
    split: options.SplitOption = "test",
    split_seed: options.SplitSeedOption = 0,
    model: common.ModelOption = common.DEFAULT_MODEL,
    dtype: common.DtypeOption = "auto",
    device: common.DeviceOption = "cpu",
    condition: options.ConditionsOption = None,
    option: options.WorkflowOptions = None,
    max_tokens: common.MaxTokensOption = 256,
    temperature: common.TemperatureOption = 0.7,
    seed: common.SeedOption = 0,
    concurrency: options.ConcurrencyOption = 32,
    fidelity: Annotated[int, typer.Option(min=0, help="Measure log-loss and KL on so many traces.")] = 0,
    adapter: Annotated[
        str | None, typer.Option(help="Run every condition but the first with this LoRA adapter too.")
    ] = None,
    adapter_stage: options.AdapterStagesOption = None,
    direct: Annotated[
        str | None, typer.Option(help="Score a single call too, plain and with this adapter of `train --direct`.")
    ] = None,
    judge: Annotated[str | None, typer.Option(help="A model that compares answers in both orders.")] = None,
    vllm: options.VllmOption = None,
    ray: options.RayOption = None,
    ray_workers: options.RayWorkersOption = None,
    as_json: common.JsonOption = False,
) -> None:
    """Score a workflow under its conditions: accuracy, differences, fidelity, win rates."""
    from ...sampling_params import SamplingParams
    from ..evaluation import report
    from ..evaluation.experiment import Experiment
    from ..evaluation.splits import check_unseen, examples_for
    from ..workflows import find

    options.adapter_name(adapter, adapter_stage)
    options.check_ray_options(ray, ray_workers)
    if vllm and fidelity:
        raise typer.BadParameter("--fidelity reads the model's own distributions: leave out --vllm")
    function = find(workflow)
    examples = examples_for(function, data, limit=limit, seed=shuffle_seed, split=split, split_seed=split_seed)
    for path in filter(None, (adapter, direct)):
        check_unseen(path, examples)
    conditions = report.select_conditions(function, condition or [])
    if adapter:
        conditions = report.add_adapter_conditions(conditions, common.ADAPTER_NAME, adapter_stage or ())
    if vllm and direct:
        raise ConfigError("--direct with --vllm: the server computes: load adapters there, or leave out --vllm")
    load_engine = partial(
        _load_engine, direct, model, dtype, adapter=adapter, device=device, adapter_stages=adapter_stage, vllm=vllm
    )
    sampling = SamplingParams(temperature=temperature, top_p=0.95, max_tokens=max_tokens)
    engine = load_engine()
    with options.open_ray_workers(ray, ray_workers, load_engine, engine) as workers:
        summary = report.evaluate(
            engine,
            make_console(quiet=as_json),
            Experiment(workflow, function, conditions, sampling, seed, common.parse_options(option)),
            examples,
            out or Path("out") / "eval" / Path(workflow).stem,
            concurrency=concurrency,
            fidelity=fidelity,
            judge=None if judge is None else open_engine(judge, dtype, device=device),
            direct=DIRECT_ADAPTER_NAME if direct else None,
            workers=workers,
        )
    if as_json:
        print(json.dumps(summary))
    report.ensure_some_succeeded(summary)


def _load_engine(direct: str | None, model: str, dtype: str, **options: Any) -> Any:
    """Open an engine that also serves the adapter of `--direct`; picklable for Ray."""
    engine = open_engine(model, dtype, **options)
    if direct is not None:
        from ...models.adapter_usage import check_adapter_usage

        check_adapter_usage(direct, [], engine.core.hf_model, workflow="single_call")
        engine.add_adapter(DIRECT_ADAPTER_NAME, direct)
    return engine


def bench(
    workflow: options.WorkflowArgument,
    data: options.DataOption,
    out: options.OutOption = None,
    limit: options.LimitOption = 30,
    shuffle_seed: options.ShuffleSeedOption = None,
    split: options.SplitOption = "all",
    split_seed: options.SplitSeedOption = 0,
    model: common.ModelOption = common.DEFAULT_MODEL,
    dtype: common.DtypeOption = "auto",
    device: common.DeviceOption = "cpu",
    compile: common.CompileOption = False,
    condition: options.ConditionsOption = None,
    option: options.WorkflowOptions = None,
    max_tokens: common.MaxTokensOption = 160,
    temperature: common.TemperatureOption = 0.7,
    seed: common.SeedOption = 0,
    ray: options.RayOption = None,
    ray_workers: options.RayWorkersOption = None,
    as_json: common.JsonOption = False,
) -> None:
    """Time a workflow in all its conditions, forced to the same tokens."""
    from ...sampling_params import SamplingParams
    from ..evaluation import report
    from ..evaluation.experiment import Experiment
    from ..evaluation.splits import examples_for
    from ..workflows import find

    options.check_ray_options(ray, ray_workers)
    function = find(workflow)
    examples = examples_for(function, data, limit=limit, seed=shuffle_seed, split=split, split_seed=split_seed)
    conditions = report.select_conditions(function, condition or [])
    load_engine = partial(open_engine, model, dtype, compile, device=device)
    sampling = SamplingParams(temperature=temperature, top_p=0.95, max_tokens=max_tokens)
    engine = load_engine()
    with options.open_ray_workers(ray, ray_workers, load_engine, engine) as workers:
        summary = report.bench(
            engine,
            make_console(quiet=as_json),
            Experiment(workflow, function, conditions, sampling, seed, common.parse_options(option)),
            examples,
            out or Path("out") / "bench" / Path(workflow).stem,
            workers=workers,
        )
    if as_json:
        print(json.dumps(summary))
