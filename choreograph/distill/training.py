"""Fine-tunes LoRA adapters on lessons, so that a model on reused encodings says what it says on the baseline.

A lesson is computed in one pass (`onepass.packed`), so that gradients reach every message that was reused. What follows
from a checkpoint depends on it and the seed alone: a run that was stopped goes on as if it had not been.
"""

import hashlib
import json
import math
import random
import resource
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.integrations import is_tensorboard_available
from transformers.trainer_utils import set_seed

from ..errors import ConfigError, DataError
from ..evaluation.folder import alone, read_settings, write_settings
from ..models.adapter import Adapter
from ..onepass.calls import to_json
from .lessons import Lesson
from .loop import Metrics, OnePass, best_of, history, last_checkpoint, stopped_early
from .losses import kept_of, mean_loss, mean_losses
from .setting import TrainConfig, TrainReport

ATTENTION = ("self_attn", "self_attention", "attention", "attn", "attn_module")  # what families call it


def train(
    adapter: Adapter,
    lessons: Sequence[Lesson],
    validation: Sequence[Lesson],
    out: Path,
    config: TrainConfig | None = None,
    *,
    baseline: Sequence[Lesson] = (),
    on_update: Any = None,
) -> TrainReport:
    """Trains an adapter and saves it in `out`, as `peft` does; the model is left as it was.

    baseline: the lessons for validation as the baseline computes them, to say how much of the gap is closed.
    on_update: called with the number of updates that are made, and of all. A folder that holds checkpoints of the same
    setting is gone on with, a finished one is read.
    """
    config = config or TrainConfig()
    if config.checkpointing and adapter.bridge is not None:
        raise ConfigError(f"checkpointing=True: layers of {adapter.facts.name} are not computed again; leave it out")
    if config.tensorboard and not is_tensorboard_available():
        raise ConfigError(
            "tensorboard=True: it is not installed: `pip install choreograph[tensorboard]`, or leave it out"
        )
    if not lessons or not validation:
        raise DataError(f"{len(lessons)} lessons, {len(validation)} for validation: give one or more of each")
    adapter.refuse_in_training()
    if nothing := [lesson.id for lesson in [*lessons, *validation] if not lesson.targets]:
        raise DataError(f"lessons {nothing[:5]}: nothing is said in them, so nothing is learned: leave them out")
    if len({lesson.reading for lesson in lessons}) == 2:
        raise DataError("lessons of readers among others: train on one kind")
    for lesson in [*lessons, *validation] if config.kl else ():
        kept_of(lesson)
    with alone(out):
        if _is_finished(adapter, lessons, validation, out, config):
            return TrainReport.read(out)
        return _trained_in(adapter, lessons, validation, out, config, baseline, Metrics(out, on_update))


def _trained_in(
    adapter: Adapter,
    lessons: Sequence[Lesson],
    validation: Sequence[Lesson],
    out: Path,
    config: TrainConfig,
    baseline: Sequence[Lesson],
    metrics: Metrics,
) -> TrainReport:
    floor = mean_loss(adapter, baseline) if baseline else None
    before, apart = mean_losses(adapter, validation, diverging=config.kl > 0)
    with _trained(adapter, config) as model:
        trained, every = model.get_nb_trainable_parameters()
        trainer = OnePass(adapter, model, lessons, validation, out, config, metrics)
        began = time.perf_counter()
        checkpoint = last_checkpoint(out)
        ended = stopped_early(checkpoint, config.patience) if checkpoint is not None else None
        if ended is None:
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        else:
            trainer.state = ended
            model.load_adapter(ended.best_model_checkpoint, "default")
        seconds = time.perf_counter() - began - trainer.validating
        trainer.shared.forget()
        log = history(out)
        best = best_of(out, trainer.state)
        if not math.isfinite(best["eval_learned"]):
            raise DataError(
                f"{out}: the loss is {best['eval_learned']}: use another folder, and a rate below {config.rate}"
            )
        model.save_pretrained(str(out), save_embedding_layers=False)
    report = TrainReport(
        before=before,
        after=best["eval_loss"],
        baseline=floor,
        divergence=(apart, best["eval_divergence"]) if config.kl else None,
        trained_share=trained / (every - trained),
        seconds=seconds / max(1, trainer.taken),
        peak_memory=_peak_memory(adapter),
        updates=trainer.state.global_step,
        log=log,
    )
    write_settings(out / "report.json", report.as_dict())
    return report


@contextmanager
def _trained(adapter: Adapter, config: TrainConfig) -> Iterator[Any]:
    """The model with adapters of its own to train; afterwards it, and everybody's random numbers, are as they were."""
    base, numbers, more = adapter.model, random.getstate(), np.random.get_state()
    targets = targets_of(base, config.targets)
    asked, use_cache = [(p, p.requires_grad) for p in base.parameters()], base.config.use_cache
    with torch.random.fork_rng(), warnings.catch_warnings(), _without_dropout(base):
        warnings.filterwarnings("ignore", message=".*checkpointing.*deprecated", category=FutureWarning)  # peft's own
        try:
            set_seed(config.seed)  # what the adapters begin with
            model = get_peft_model(base, _lora(config, targets))
            adapter.in_training = model
            try:
                yield model
            finally:
                adapter.in_training = None
                model.unload()
        finally:
            base.eval()
            if config.checkpointing:
                base.gradient_checkpointing_disable()
                base.disable_input_require_grads()
            base.config.use_cache = use_cache
            for parameter, wanted in asked:
                parameter.requires_grad_(wanted)
            random.setstate(numbers)
            np.random.set_state(more)


@contextmanager
def _without_dropout(base: nn.Module) -> Iterator[None]:
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


def targets_of(model: nn.Module, named: Sequence[str] | None) -> list[str]:
    """The ends of the names of the linear layers to adapt; those inside the attention, whatever the family calls them,
    if none are named. Raises ConfigError for a name that no linear layer has."""
    linear = {path for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    if named is None:
        found = sorted({path.rpartition(".")[2] for path in linear if set(path.split(".")[-2:-1]) & set(ATTENTION)})
        if not found:
            raise ConfigError("targets=None: this model has no linear layers in its attention; name some in targets")
        return found
    ends = {path.rpartition(".")[2] for path in linear}
    if unknown := sorted(set(named) - ends):
        raise ConfigError(f"targets: no linear layer is called {unknown}; there are {sorted(ends - {'lm_head'})}")
    return list(named)


def _lora(config: TrainConfig, targets: list[str]) -> LoraConfig:
    return LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )


def _is_finished(
    adapter: Adapter, lessons: Sequence[Lesson], validation: Sequence[Lesson], out: Path, config: TrainConfig
) -> bool:
    """Whether a folder holds this training, ended. It belongs to one setting, model, and set of lessons, once there is
    something of it to lose."""
    file, ended = out / "train.json", (out / "report.json").exists()
    if ended and not (file.exists() and (out / "adapter_model.safetensors").exists()):
        raise ConfigError(f"{out} holds a report, but no adapter or not what it was trained on: use another folder")
    wanted = {
        "config": asdict(config),
        "model": adapter.facts.fingerprint,
        "lessons": _digest(lessons),
        "validation": _digest(validation),
    }
    wanted = json.loads(json.dumps(wanted))
    known = read_settings(file) if file.exists() else None
    kept = sorted(path.name for path in out.glob("checkpoint-*"))
    if known is None and kept:
        raise ConfigError(f"{out} holds {kept[0]} of nobody knows what training: use another folder, or remove it")
    if known is not None and known != wanted and (kept or ended):
        raise ConfigError(
            f"{out} holds a training of another setting, model or traces: use another folder, or remove it"
        )
    write_settings(file, wanted)
    return ended


def _digest(lessons: Sequence[Lesson]) -> str:
    described = [[x.id, to_json(x.calls), *(["reading"] if x.reading else [])] for x in lessons]
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()


def _peak_memory(adapter: Adapter) -> int:
    if adapter.facts.device.type == "cuda":
        return torch.cuda.max_memory_allocated(adapter.facts.device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
