"""Train LoRA adapters to generate baseline outputs under KV reuse.

The result depends only on checkpoints and the seed: a resumed training equals an uninterrupted one.
"""

import hashlib
import json
import math
import random
import resource
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.integrations import is_tensorboard_available
from transformers.trainer_utils import set_seed

from ...attention.metadata import Alignment
from ...errors import ConfigError, DataError
from ...models.adapter_usage import AdapterUsage, matches_weights, read_record
from ...models.hf_model import HFModel
from ...sampling_params import SamplingParams
from ...utils import atomic_write_text, require
from ..evaluation.experiment import code_hash
from ..evaluation.run_dir import exclusive_dir
from ..evaluation.splits import check_disjoint, split_off
from ..evaluation.traces import Trace, load_traces
from ..workflows import WorkflowFunction, conditions_of, find, names, options_of
from .examples import TrainingExample, answer_examples, baseline_examples, check_stages, make_examples
from .losses import mean_loss, mean_losses, topk_targets
from .train_config import TrainConfig, TrainManifest, TrainReport

ATTENTION_MODULE_NAMES = ("self_attn", "self_attention", "attention", "attn", "attn_module")  # of all architectures


def train(
    hf_model: HFModel,
    examples: Sequence[TrainingExample],
    validation: Sequence[TrainingExample],
    out: Path,
    config: TrainConfig | None = None,
    *,
    baseline: Sequence[TrainingExample] = (),
    on_update: Callable[[int, int], None] | None = None,
) -> TrainReport:
    """Train an adapter and save it in `out` in peft's format.

    If `out` contains checkpoints of the same training, it is resumed. If it is finished, its report is returned.

    Args:
        baseline: validation examples as the baseline computes them, to report how much of the gap is closed.
        on_update: called with the number of updates done and of all updates.
    """
    config = config or TrainConfig()
    for module in ("accelerate", "peft"):
        require(module, "train")
    if config.gradient_checkpointing and hf_model.attention_patch is not None:
        raise ConfigError(f"gradient_checkpointing=True: {hf_model.model_info.name} does not support it: leave it out")
    if config.tensorboard and not is_tensorboard_available():
        raise ConfigError("tensorboard=True: not installed: pip install 'choreograph[tensorboard]', or leave it out")
    if not examples or not validation:
        raise DataError(f"{len(examples)} examples, {len(validation)} for validation: give one or more of each")
    hf_model.ensure_not_training()
    if empty := [example.id for example in [*examples, *validation] if not example.num_targets]:
        raise DataError(f"examples {empty[:5]} generate nothing: leave them out")
    if len({example.adapter_only for example in examples}) == 2:
        raise DataError("examples with and without adapter stages: train on one kind")
    if config.alignment is not None and any(example.adapter_only for example in examples):
        raise DataError(
            "alignment: it does not go with adapter stages, because an engine aligns all that another model computed"
        )
    for example in [*examples, *validation] if config.kl_weight else ():
        topk_targets(example)
    manifest = TrainManifest(
        config=config.model_dump(mode="json", exclude=set() if config.alignment else {"alignment"}),
        model=hf_model.model_info.fingerprint,
        examples=_content_hash(examples),
        validation=_content_hash(validation),
    )
    if config.alignment is not None:
        alignment = Alignment(*config.alignment)
        examples, validation = (
            [replace(example, alignment=alignment) for example in part] for part in (examples, validation)
        )
    with exclusive_dir(out):
        if not _is_finished(out, manifest):
            report = _run_training(hf_model, examples, validation, out, config, baseline, on_update)
            atomic_write_text(out / "report.json", json.dumps(report.as_dict(), indent=1))
        return read_record(TrainReport, out / "report.json")


def _content_hash(examples: Sequence[TrainingExample]) -> str:
    records = [asdict(example) for example in examples]
    for record in records:
        del record["alignment"]  # part of the configuration
    return hashlib.sha256(json.dumps(records).encode()).hexdigest()


def _is_finished(out: Path, manifest: TrainManifest) -> bool:
    """Return whether the folder contains this training, finished.

    Also writes the manifest of this training to the folder.

    Raises:
        ConfigError: if the folder contains checkpoints or results of another training.
    """
    manifest_file, is_finished = out / "train.json", (out / "report.json").exists()
    checkpoints = sorted(path.name for path in out.glob("checkpoint-*"))
    if is_finished and not (manifest_file.exists() and (out / "adapter_model.safetensors").exists()):
        raise ConfigError(f"{out} holds a report, but no adapter or no train.json: use another folder")
    if checkpoints and not manifest_file.exists():
        raise ConfigError(f"{out} holds {checkpoints[0]} of an unknown training: use another folder, or remove it")
    if (checkpoints or is_finished) and read_record(TrainManifest, manifest_file) != manifest:
        raise ConfigError(
            f"{out} holds a training of another setting, model or traces: use another folder, or remove it"
        )
    atomic_write_text(manifest_file, manifest.model_dump_json(indent=1))
    return is_finished


def _run_training(
    hf_model: HFModel,
    examples: Sequence[TrainingExample],
    validation: Sequence[TrainingExample],
    out: Path,
    config: TrainConfig,
    baseline: Sequence[TrainingExample],
    on_update: Callable[[int, int], None] | None,
) -> TrainReport:
    from .trainer import PackedTrainer, best_checkpoint, has_stopped_early, last_checkpoint, logged_metrics

    baseline_loss = mean_loss(hf_model, baseline) if baseline else None
    loss_before, divergence_before = mean_losses(hf_model, validation, with_kl=config.kl_weight > 0)
    with _lora_training(hf_model, config) as model:
        num_trained, num_parameters = model.get_nb_trainable_parameters()
        trainer = PackedTrainer(hf_model, model, examples, validation, out, config, on_update)
        start = time.perf_counter()
        checkpoint, state = last_checkpoint(out)
        if has_stopped_early(state, config.patience):
            trainer.state = state
            model.load_adapter(str(best_checkpoint(out, state)), "default")
        else:
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        seconds = time.perf_counter() - start - trainer.validation_seconds
        trainer.base_kv_memo.clear()
        log = logged_metrics(trainer.state)
        evaluations = [entry for entry in log if "eval_learned" in entry]
        best_step = trainer.state.best_global_step  # None if no loss was finite
        best = next((entry for entry in evaluations if entry["step"] == best_step), evaluations[-1])
        if not math.isfinite(best["eval_learned"]):
            raise DataError(
                f"{out}: the loss is {best['eval_learned']}: use another folder and learning_rate < {config.learning_rate}"
            )
        model.save_pretrained(str(out), save_embedding_layers=False)
    device = hf_model.model_info.device
    return TrainReport(
        loss_before=loss_before,
        loss_after=best["eval_loss"],
        baseline=baseline_loss,
        divergence=(divergence_before, best["eval_divergence"]) if config.kl_weight else None,
        trained_share=num_trained / (num_parameters - num_trained),
        seconds=seconds / max(1, trainer.num_trained_examples),
        peak_memory=(
            torch.cuda.max_memory_allocated(device)
            if device.type == "cuda"
            else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        ),
        updates=trainer.state.global_step,
        log=log,
    )


@contextmanager
def _lora_training(hf_model: HFModel, config: TrainConfig) -> Iterator[Any]:
    """Yield the model with LoRA adapters; restore it and random states afterwards."""
    peft = require("peft", "train")
    base = hf_model.model
    lora_config = peft.LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.dropout,
        target_modules=resolve_target_modules(base, config.target_modules),
        task_type="CAUSAL_LM",
    )
    python_state, numpy_state = random.getstate(), np.random.get_state()
    requires_grad, use_cache = [(p, p.requires_grad) for p in base.parameters()], base.config.use_cache
    dropout_rates = [  # set to 0, as the base model is served without dropout
        (module, name, value)
        for module in base.modules()
        for name, value in vars(module).items()
        if isinstance(value, float) and ("dropout" in name or (name == "p" and isinstance(module, nn.Dropout)))
    ]
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*checkpointing.*deprecated", category=FutureWarning)  # from peft
        try:
            for module, name, _ in dropout_rates:
                setattr(module, name, 0.0)
            set_seed(config.seed)
            model = peft.get_peft_model(base, lora_config)
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
            for module, name, rate in dropout_rates:
                setattr(module, name, rate)
            for parameter, value in requires_grad:
                parameter.requires_grad_(value)
            random.setstate(python_state)
            np.random.set_state(numpy_state)


def resolve_target_modules(model: nn.Module, names: Sequence[str] | None) -> list[str]:
    """Return the names of the linear layers to adapt.

    By default, they are those of the attention.

    Raises:
        ConfigError: if no linear layer has one of the names.
    """
    linear = {path for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    if names is None:
        in_attention = [path for path in linear if set(path.split(".")[-2:-1]) & set(ATTENTION_MODULE_NAMES)]
        if not in_attention:
            raise ConfigError("target_modules=None: the attention of this model has no linear layers: name some")
        return sorted({path.rpartition(".")[2] for path in in_attention})
    known = {path.rpartition(".")[2] for path in linear}
    if unknown := sorted(set(names) - known):
        raise ConfigError(
            f"target_modules: no linear layer is named {unknown}: use some of {sorted(known - {'lm_head'})}"
        )
    return list(names)


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
    validation: float | None = None,
    on_update: Callable[[int, int], None] | None = None,
) -> TrainReport:
    """Train an adapter on a folder of traces.

    Args:
        condition: condition of the workflow to learn; by default the only one besides the baseline.
        answer_workflow: workflow with a single decode that learns to give the final answers instead.
        adapter_stages: stages whose decodes the adapter computes; empty: all calls.
        stages: stages whose decodes are learned, with those they attend to; empty: all. Validation covers all decodes
            of the adapter.
        workflow: file of a user's workflow, whose code is run; traces alone never run code.
        validation: as in `split_traces`.
    """
    settings, loaded = load_traces(traces)
    name = hf_model.model_info.name
    if settings["model"] != name or not matches_weights(settings.get("weights"), settings.get("dtype"), hf_model):
        raise ConfigError(
            f"{traces}: traces of model {settings['model']!r} with other weights or name than {name!r}: "
            "train the model that made them"
        )
    seed = (config or TrainConfig()).seed

    def write_usage(**usage: Any) -> None:
        weights, dtype = hf_model.sampled_weights_hash, hf_model.model_info.dtype_name
        AdapterUsage(weights=weights, dtype=dtype, **usage).write(out)

    if answer_workflow is not None:
        if (
            condition
            or adapter_stages
            or stages
            or workflow
            or (config and (config.kl_weight or config.kv_loss_weight))
        ):
            raise ConfigError(
                "answer_workflow: leave out condition, stages, adapter_stages, workflow, kl_weight and kv_loss_weight"
            )
        answer_run = find(answer_workflow)
        options = {key: value for key, value in settings["options"].items() if key in options_of(answer_run)}
        examples, checks = (
            answer_examples(hf_model, answer_run, part, options=options)
            for part in split_traces(loaded, validation, seed)
        )
        report = train(hf_model, examples, checks, out, config, on_update=on_update)
        write_usage(workflow=answer_workflow, units=_trace_units(loaded))
        return report
    run = _find_trace_workflow(traces, settings, workflow)
    conditions = conditions_of(run)
    known = list(conditions)  # baseline first
    if condition is not None and condition not in conditions:
        raise ConfigError(f"condition {condition!r}: the workflow has {known}")
    if condition is None and len(known) > 2:
        raise ConfigError(f"condition: name the one to learn (condition=, --condition), of {known[1:]}")
    chosen = replace(conditions[condition or known[-1]], adapter_stages=tuple(adapter_stages))
    chosen.check_adapter_stages(stage for trace in loaded for stage in trace.transcript)
    check_stages(stages, loaded, chosen)
    if learned := set(stages or adapter_stages):  # some runs may lack these stages
        loaded = [trace for trace in loaded if learned & trace.transcript.keys()]
    learn, check = split_traces(loaded, validation, seed)
    args: dict[str, Any] = {
        "sampling": SamplingParams.from_dict({k: v for k, v in settings["sampling"].items() if k != "logprobs"}),
        "options": settings["options"],
    }
    # Stages are checked against all traces, as rare ones may lie in the validation split alone.
    examples = make_examples(hf_model, run, [*learn, *check], chosen, **args, stages=stages)[: len(learn)]
    checks = make_examples(hf_model, run, check, chosen, **args)
    baseline = baseline_examples(check, adapter_stages, conditions[known[0]].mode)
    report = train(hf_model, examples, checks, out, config, baseline=baseline, on_update=on_update)
    write_usage(
        workflow=settings["workflow"],
        adapter_stages=sorted(set(adapter_stages)),
        stages=sorted(set(stages)),
        units=_trace_units(loaded),
    )
    return report


def _find_trace_workflow(traces: Path, settings: Mapping[str, Any], name: str | None) -> WorkflowFunction:
    """Return the workflow that made the traces.

    A user's file must be named explicitly, since its code is run.
    """
    traced = settings["workflow"]
    if name is None and traced not in names():
        raise ConfigError(f"{traces}: of the workflow {traced!r}: name it (workflow=, --workflow), as its code is run")
    result = find(name or traced)
    if settings["source"] != code_hash(result):
        raise ConfigError(f"{traces}: the workflow {name or traced!r} has changed since: make the traces again")
    return result


def split_traces(traces: Sequence[Trace], validation: float | None, seed: int) -> tuple[list[Trace], list[Trace]]:
    """Return disjoint traces for training and for validation.

    Args:
        validation: share of the traces; None takes the split in which they were made, or a tenth
            if they were made without one.
    """
    splits = {name: [trace for trace in traces if trace.split == name] for name in ("train", "validation")}
    if validation is not None or not splits["validation"]:
        return split_off(traces, 0.1 if validation is None else validation, seed, lambda trace: trace.units)
    check_disjoint({name: _trace_units(split) for name, split in splits.items()})
    return splits["train"], splits["validation"]


def _trace_units(traces: Iterable[Trace]) -> list[str]:
    return sorted({unit for trace in traces for unit in trace.units})
