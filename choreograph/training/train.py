"""Fine-tunes LoRA adapters on examples, so that a model on reused encodings says what it says on the baseline.

A example is computed in one pass (`training.packed_forward`), so that gradients reach every message that was reused. What follows
from a checkpoint depends on it and the seed alone: a run that was stopped goes on as if it had not been.
"""

import hashlib
import json
import math
import random
import resource
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.integrations import is_tensorboard_available
from transformers.trainer_utils import set_seed

from ..errors import ConfigError, DataError
from ..evaluation.run_dir import exclusive_dir, read_json_object, write_json
from ..evaluation.runner import source_hash
from ..models.hf_model import HFModel
from ..sampling_params import SamplingParams
from ..workflows import WorkflowFunction, conditions_of, find, names, options_of
from ..workflows.run import Condition
from .dataset import (
    Trace,
    TrainingExample,
    answer_examples,
    baseline_examples,
    check_stages,
    load_traces,
    make_examples,
)
from .losses import mean_loss, mean_losses, topk_targets
from .trace import to_json
from .train_config import TrainConfig, TrainReport
from .trainer import MetricsCallback, PackedTrainer, best_entry, early_stopped_state, last_checkpoint, read_metrics

ATTENTION_MODULE_NAMES = ("self_attn", "self_attention", "attention", "attn", "attn_module")  # what families call it


def train(
    hf_model: HFModel,
    examples: Sequence[TrainingExample],
    validation: Sequence[TrainingExample],
    out: Path,
    config: TrainConfig | None = None,
    *,
    baseline: Sequence[TrainingExample] = (),
    on_update: Any = None,
) -> TrainReport:
    """Trains an adapter and saves it in `out`, as `peft` does; the model is left as it was.

    baseline: the examples for validation as the baseline computes them, to say how much of the gap is closed.
    on_update: called with the number of updates that are made, and of all. A folder that holds checkpoints of the same
    setting is gone on with, a finished one is read.
    """
    config = config or TrainConfig()
    if config.gradient_checkpointing and hf_model.attention_patch is not None:
        raise ConfigError(
            f"gradient_checkpointing=True: layers of {hf_model.model_info.name} are not computed again; leave it out"
        )
    if config.tensorboard and not is_tensorboard_available():
        raise ConfigError(
            "tensorboard=True: it is not installed: `pip install choreograph[tensorboard]`, or leave it out"
        )
    if not examples or not validation:
        raise DataError(f"{len(examples)} lessons, {len(validation)} for validation: give one or more of each")
    hf_model.ensure_not_training()
    if nothing := [example.id for example in [*examples, *validation] if not example.num_targets]:
        raise DataError(f"lessons {nothing[:5]}: nothing is said in them, so nothing is learned: leave them out")
    if len({example.adapter_only for example in examples}) == 2:
        raise DataError("lessons of readers among others: train on one kind")
    for example in [*examples, *validation] if config.kl_weight else ():
        topk_targets(example)
    with exclusive_dir(out):
        if _is_finished(hf_model, examples, validation, out, config):
            return TrainReport.read(out)
        return _run_training(hf_model, examples, validation, out, config, baseline, MetricsCallback(out, on_update))


def _run_training(
    hf_model: HFModel,
    examples: Sequence[TrainingExample],
    validation: Sequence[TrainingExample],
    out: Path,
    config: TrainConfig,
    baseline: Sequence[TrainingExample],
    metrics: MetricsCallback,
) -> TrainReport:
    floor = mean_loss(hf_model, baseline) if baseline else None
    before, apart = mean_losses(hf_model, validation, with_kl=config.kl_weight > 0)
    with _lora_training(hf_model, config) as model:
        trained, every = model.get_nb_trainable_parameters()
        trainer = PackedTrainer(hf_model, model, examples, validation, out, config, metrics)
        began = time.perf_counter()
        checkpoint = last_checkpoint(out)
        ended = early_stopped_state(checkpoint, config.patience) if checkpoint is not None else None
        if ended is None:
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        else:
            trainer.state = ended
            model.load_adapter(ended.best_model_checkpoint, "default")
        seconds = time.perf_counter() - began - trainer.validation_seconds
        trainer.base_kv_memo.clear()
        log = read_metrics(out)
        best = best_entry(out, trainer.state)
        if not math.isfinite(best["eval_learned"]):
            raise DataError(
                f"{out}: the loss is {best['eval_learned']}: use another folder, and a rate below {config.learning_rate}"
            )
        model.save_pretrained(str(out), save_embedding_layers=False)
    report = TrainReport(
        loss_before=before,
        loss_after=best["eval_loss"],
        baseline=floor,
        divergence=(apart, best["eval_divergence"]) if config.kl_weight else None,
        trained_share=trained / (every - trained),
        seconds=seconds / max(1, trainer.num_trained_examples),
        peak_memory=_peak_memory(hf_model),
        updates=trainer.state.global_step,
        log=log,
    )
    write_json(out / "report.json", report.as_dict())
    return report


@contextmanager
def _lora_training(hf_model: HFModel, config: TrainConfig) -> Iterator[Any]:
    """The model with adapters of its own to train; afterwards it, and everybody's random numbers, are as they were."""
    base, numbers, more = hf_model.model, random.getstate(), np.random.get_state()
    targets = resolve_target_modules(base, config.target_modules)
    requested, use_cache = [(p, p.requires_grad) for p in base.parameters()], base.config.use_cache
    with torch.random.fork_rng(), warnings.catch_warnings(), _no_base_dropout(base):
        warnings.filterwarnings("ignore", message=".*checkpointing.*deprecated", category=FutureWarning)  # peft's own
        try:
            set_seed(config.seed)  # what the adapters begin with
            model = get_peft_model(base, _lora_config(config, targets))
            hf_model.training_model = model
            try:
                yield model
            finally:
                hf_model.training_model = None
                model.unload()
        finally:
            base.eval()
            if config.gradient_checkpointing:
                base.gradient_checkpointing_disable()
                base.disable_input_require_grads()
            base.config.use_cache = use_cache
            for parameter, expected in requested:
                parameter.requires_grad_(expected)
            random.setstate(numbers)
            np.random.set_state(more)


@contextmanager
def _no_base_dropout(base: nn.Module) -> Iterator[None]:
    """What a family drops while it is trained it does not drop where it is served: adapters alone do."""
    had = [
        (module, name, value)
        for module in base.modules()
        for name, value in vars(module).items()
        if isinstance(value, float) and ("dropout" in name or (name == "p" and isinstance(module, nn.Dropout)))
    ]
    for module, name, _ in had:
        setattr(module, name, 0.0)
    try:
        yield
    finally:
        for module, name, value in had:
            setattr(module, name, value)


def resolve_target_modules(model: nn.Module, names: Sequence[str] | None) -> list[str]:
    """The ends of the names of the linear layers to adapt; those inside the attention, whatever the family calls them,
    if none are named. Raises ConfigError for a name that no linear layer has."""
    linear = {path for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    if names is None:
        result = sorted(
            {path.rpartition(".")[2] for path in linear if set(path.split(".")[-2:-1]) & set(ATTENTION_MODULE_NAMES)}
        )
        if not result:
            raise ConfigError("target_modules=None: this model has no linear layers in its attention; name some")
        return result
    ends = {path.rpartition(".")[2] for path in linear}
    if unknown := sorted(set(names) - ends):
        raise ConfigError(
            f"target_modules: no linear layer is called {unknown}; there are {sorted(ends - {'lm_head'})}"
        )
    return list(names)


def _lora_config(config: TrainConfig, target_modules: list[str]) -> LoraConfig:
    return LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.dropout,
        target_modules=target_modules,
        task_type="CAUSAL_LM",
    )


def _is_finished(
    hf_model: HFModel,
    examples: Sequence[TrainingExample],
    validation: Sequence[TrainingExample],
    out: Path,
    config: TrainConfig,
) -> bool:
    """Whether a folder holds this training, ended. It belongs to one setting, model, and set of examples, once there is
    something of it to lose."""
    file, ended = out / "train.json", (out / "report.json").exists()
    if ended and not (file.exists() and (out / "adapter_model.safetensors").exists()):
        raise ConfigError(f"{out} holds a report, but no adapter or not what it was trained on: use another folder")
    expected = {
        "config": asdict(config),
        "model": hf_model.model_info.fingerprint,
        "lessons": _digest(examples),
        "validation": _digest(validation),
    }
    expected = json.loads(json.dumps(expected))
    known = read_json_object(file) if file.exists() else None
    kept = sorted(path.name for path in out.glob("checkpoint-*"))
    if known is None and kept:
        raise ConfigError(f"{out} holds {kept[0]} of nobody knows what training: use another folder, or remove it")
    if known is not None and known != expected and (kept or ended):
        raise ConfigError(
            f"{out} holds a training of another setting, model or traces: use another folder, or remove it"
        )
    write_json(file, expected)
    return ended


def _digest(examples: Sequence[TrainingExample]) -> str:
    described = [[x.id, to_json(x.calls), *(["reading"] if x.adapter_only else [])] for x in examples]
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()


def _peak_memory(hf_model: HFModel) -> int:
    if hf_model.model_info.device.type == "cuda":
        return torch.cuda.max_memory_allocated(hf_model.model_info.device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


T = TypeVar("T", Trace, TrainingExample)

ADAPTER_META = "learned.json"  # beside the adapter


def train_from_traces(
    hf_model: HFModel,
    traces: Path,
    out: Path,
    config: TrainConfig | None = None,
    *,
    condition: str | None = None,
    answer_workflow: str | None = None,
    adapter_stages: Sequence[str] = (),
    stages: Sequence[str] = (),
    workflow: str | None = None,
    validation: float = 0.1,
    on_update: Callable[[int, int], None] | None = None,
) -> TrainReport:
    """Trains an adapter for the workflow of some traces under one of its conditions (by default the only one), or for
    the decodes of its stages in `readers` alone, or, with `direct`, for a workflow of one decode that gives their final
    answers. stages: those whose decodes are learned, with those that these see; validation is on what the adapter
    computes. workflow: the file of a workflow of your own; traces alone have no code run."""
    settings, result = load_traces(traces)
    if settings["model"] != hf_model.model_info.name or not _matches_weights(settings, hf_model):
        other = (
            "of other weights"
            if settings["model"] == hf_model.model_info.name
            else f"not of {hf_model.model_info.name!r}"
        )
        raise ConfigError(f"{traces}: traces of model {settings['model']!r}, {other}: train the model that made them")
    seed = (config or TrainConfig()).seed
    if answer_workflow is not None:
        if (
            condition is not None
            or adapter_stages
            or stages
            or workflow
            or (config and (config.kl_weight or config.kv_loss_weight))
        ):
            raise ConfigError(
                "answer_workflow: final answers are learned without a condition, without what the baseline gave"
            )
        one = find(answer_workflow)
        given = {name: value for name, value in settings["options"].items() if name in options_of(one)}
        examples, checks = train_val_split(answer_examples(hf_model, one, result, options=given), validation, seed)
        report = train(hf_model, examples, checks, out, config, on_update=on_update)
        _write_meta(out, hf_model, workflow=answer_workflow)
        return report
    run = _find_trace_workflow(traces, settings, workflow)
    requested: dict[str, Any] = {
        "sampling": SamplingParams.from_dict({k: v for k, v in settings["sampling"].items() if k != "logprobs"}),
        "options": settings["options"],
    }
    conditions = conditions_of(run)
    chosen = replace(select_condition(conditions, condition), adapter_stages=tuple(adapter_stages))
    chosen.check_adapter_stages(stage for trace in result for stage in trace.transcript)
    check_stages(stages, result, chosen)
    if taught := set(stages or adapter_stages):  # which need not speak in every run
        result = [trace for trace in result if taught & trace.transcript.keys()]
    learn, check = train_val_split(result, validation, seed)
    examples = make_examples(hf_model, run, [*learn, *check], chosen, **requested, stages=stages)[
        : len(learn)
    ]  # some are rare
    checks = make_examples(hf_model, run, check, chosen, **requested)
    baseline = baseline_examples(check, adapter_stages, next(iter(conditions.values())).mode)
    report = train(hf_model, examples, checks, out, config, baseline=baseline, on_update=on_update)
    _write_meta(
        out, hf_model, workflow=settings["workflow"], readers=sorted(set(adapter_stages)), stages=sorted(set(stages))
    )
    return report


def _matches_weights(metadata: Mapping[str, Any], base: HFModel) -> bool:
    """Whether what is noted of some weights goes for these, whatever types both are in; so if nothing is noted."""
    known, types = metadata.get("weights"), {metadata.get("dtype"), _dtype_name(base)}
    comparable = known is not None and (len(types) == 1 or "float16" not in types)  # which rounds otherwise
    return not comparable or known == base.sampled_weights_hash


def _dtype_name(base: HFModel) -> str:
    return str(base.model_info.dtype).removeprefix("torch.")


def _find_trace_workflow(traces: Path, settings: Mapping[str, Any], name: str | None) -> WorkflowFunction:
    """The workflow of some traces. One that is a file of its own has to be named by the caller that trains: to look it up runs
    its code."""
    known = settings["workflow"]
    if name is None and known not in names():
        raise ConfigError(f"{traces}: of the workflow {known!r}: name it (workflow=, --workflow), as its code is run")
    result = find(name or known)
    if settings["source"] != source_hash(result):
        raise ConfigError(f"{traces}: the workflow {name or known!r} has changed since: make the traces again")
    return result


def _write_meta(out: Path, base: HFModel, **metadata: Any) -> None:
    write_json(out / ADAPTER_META, metadata | {"weights": base.sampled_weights_hash, "dtype": _dtype_name(base)})


def check_adapter_usage(source: str, adapter_stages: Sequence[str], base: HFModel) -> None:
    """Raises ConfigError where an adapter that says what it was trained for is used for other decodes, or over other
    weights."""
    file = Path(source) / ADAPTER_META
    if not file.is_file():
        return  # of another maker
    try:
        noted = json.loads(file.read_text(encoding="utf-8"))
        learned = sorted(map(str, noted.get("readers", [])))
    except (ValueError, AttributeError, TypeError) as exc:
        raise ConfigError(f"{file}: {exc}: train the adapter again, or remove this note") from None
    if sorted(set(adapter_stages)) != learned:
        requested = " ".join(f"--adapter-stage {json.dumps(stage)}" for stage in learned) or "no --adapter-stage"
        raise ConfigError(
            f"{source}: this adapter was trained for {'some stages' if learned else 'all decodes'}: give {requested}"
        )
    if not _matches_weights(noted, base):
        raise ConfigError(
            f"{source}: trained on other weights than {base.model_info.name!r} has: use the model of its training"
        )


def select_condition(conditions: Any, name: str | None) -> Condition:
    """A condition by name, or the only one beside the baseline."""
    known = list(conditions)
    if name is not None and name not in known:
        raise ConfigError(f"condition {name!r}: the workflow has {known}")
    if name is None and len(known) > 2:
        raise ConfigError(f"condition: name the one to learn (condition=, --condition), of {known[1:]}")
    return conditions[name or known[-1]]


def train_val_split(traces: Sequence[T], fraction: float, seed: int) -> tuple[list[T], list[T]]:
    """Some for learning and the others, at least one, for validation."""
    if not 0 < fraction < 1:
        raise ConfigError(f"validation={fraction}: use a share between 0 and 1")
    if len(traces) < 2:
        raise DataError(f"{len(traces)} traces: learning and validation need one each at least")
    mixed = list(traces)
    random.Random(seed).shuffle(mixed)
    apart = min(len(mixed) - 1, max(1, round(fraction * len(mixed))))
    return mixed[apart:], mixed[:apart]
