"""Training on packed examples with the `Trainer` of transformers."""

import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import Tensor
from transformers import (
    EarlyStoppingCallback,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import EvalLoopOutput, get_last_checkpoint

from ...errors import DataError
from ...models.hf_model import HFModel
from ..replay.packed_forward import BaseKVMemo, KVByLayer, forward
from .examples import TrainingExample, concat_examples
from .losses import kv_loss, mean_baseline_kv, mean_losses, token_losses
from .train_config import TrainConfig

_LOGGED_METRICS = ("loss", "eval_loss", "eval_divergence", "eval_learned", "learning_rate", "grad_norm")

_CHECKPOINT_FILES = ("adapter_model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth")


class PackedTrainer(Trainer):
    """Trainer whose batches are examples that share a forward pass."""

    def __init__(
        self,
        hf_model: HFModel,
        model: Any,
        examples: Sequence[TrainingExample],
        validation: Sequence[TrainingExample],
        out: Path,
        config: TrainConfig,
        on_update: Any,
    ) -> None:
        self._hf_model, self._config, self._validation_examples = hf_model, config, validation
        self.base_kv_memo = BaseKVMemo(hf_model, (e.packed.prefix for e in examples if e.adapter_only))
        self._mean_num_targets = fmean(example.num_targets for example in examples)
        self._mean_examples_per_forward = float(config.examples_per_forward)  # in the current update
        self.validation_seconds, self.num_trained_examples = 0.0, 0
        callbacks: list[TrainerCallback] = [MetricsCallback(out, on_update)]
        if config.patience:
            callbacks.append(EarlyStoppingCallback(config.patience))
        super().__init__(
            model=model,
            args=_training_arguments(out, config, len(examples), hf_model.model_info.device.type == "cpu"),
            train_dataset=list(examples),
            eval_dataset=list(validation),
            data_collator=lambda batch: {"examples": batch},
            callbacks=callbacks,
        )
        self.remove_callback(PrinterCallback)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Return the batches of one update, and record their mean size."""
        batches, count = super().get_batch_samples(*args, **kwargs)
        if batches:
            self._mean_examples_per_forward = fmean(len(batch["examples"]) for batch in batches)
        return batches, count

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        self.num_trained_examples += len(inputs["examples"])
        with self._hf_model.attention_hook():  # `backward` may recompute layers
            return super().training_step(model, inputs, num_items_in_batch)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the summed token losses over the mean number of tokens."""
        total: Any = 0.0
        kl_weight, kv_weight = self._config.kl_weight, self._config.kv_loss_weight
        examples = inputs["examples"]
        for example in examples if kv_weight else [concat_examples(examples)]:
            packed = example.packed
            kv: KVByLayer | None = {} if kv_weight else None
            logits = forward(self._hf_model, packed, model=model, base_kv_provider=self.base_kv_memo, kv_out=kv)
            loss, divergence = token_losses(logits, packed.targets, example if kl_weight else None)
            total = total + loss.sum() + kl_weight * divergence.sum()
            if kv is not None:
                target = mean_baseline_kv(self._hf_model, example.calls, packed.num_prefix_tokens)
                total = total + kv_weight * example.num_targets * kv_loss(kv, target)
        return total / (self._mean_num_targets * self._mean_examples_per_forward)

    def evaluation_loop(self, *_: Any, metric_key_prefix: str = "eval", **__: Any) -> EvalLoopOutput:
        start = time.perf_counter()
        assert self.model is not None
        self.model.eval()
        kl_weight = self._config.kl_weight
        loss, divergence = mean_losses(self._hf_model, self._validation_examples, with_kl=kl_weight > 0)
        self.validation_seconds += time.perf_counter() - start
        metrics = {"loss": loss, "learned": loss + kl_weight * divergence}
        if kl_weight:
            metrics["divergence"] = divergence
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        return EvalLoopOutput(None, None, metrics, len(self._validation_examples))  # type: ignore[arg-type]

    def floating_point_ops(self, inputs: Any) -> int:
        return 0


class _SingleDeviceArguments(TrainingArguments):
    """Arguments that keep examples on the device of the model."""

    @property
    def n_gpu(self) -> int:
        return min(1, super().n_gpu)

    @property
    def place_model_on_device(self) -> bool:
        return False


def _training_arguments(out: Path, config: TrainConfig, num_examples: int, use_cpu: bool) -> TrainingArguments:
    updates = -(-num_examples // config.batch_size)  # of an epoch
    eval_steps = max(1, updates // config.evals_per_epoch)
    return _SingleDeviceArguments(
        output_dir=str(out),
        learning_rate=config.learning_rate,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        num_train_epochs=config.epochs,
        per_device_train_batch_size=config.examples_per_forward,
        gradient_accumulation_steps=config.batch_size // config.examples_per_forward,
        lr_scheduler_type="cosine",
        warmup_steps=int(config.warmup_ratio * updates * config.epochs),  # the first update has a rate of 0
        optim="adamw_torch",
        gradient_checkpointing=config.gradient_checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        bf16=config.bf16,
        use_cpu=use_cpu,
        eval_strategy="steps",
        eval_steps=eval_steps,
        save_strategy="steps",
        save_steps=eval_steps,
        save_total_limit=2,
        load_best_model_at_end=True,
        restore_callback_states_from_checkpoint=True,
        metric_for_best_model="eval_learned",
        greater_is_better=False,
        logging_steps=1,
        report_to=["tensorboard"] if config.tensorboard else [],
        seed=config.seed,
        remove_unused_columns=False,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


class MetricsCallback(TrainerCallback):
    """Callback that writes `metrics.jsonl`; a resumed training repeats no step."""

    def __init__(self, out: Path, on_update: Any) -> None:
        self._out, self._on_update = out, on_update

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        if state.best_global_step:
            state.best_model_checkpoint = str(best_checkpoint(self._out, state))  # the folder may have been moved
        self._write("w", logged_metrics(state))

    def on_log(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        self._write("a", logged_metrics(state, first=-1))

    def _write(self, mode: str, entries: list[dict[str, Any]]) -> None:
        with (self._out / "metrics.jsonl").open(mode, encoding="utf-8") as file:
            file.writelines(json.dumps(entry) + "\n" for entry in entries)

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        if self._on_update is not None:
            self._on_update(state.global_step, state.max_steps)


def logged_metrics(state: TrainerState, first: int = 0) -> list[dict[str, Any]]:
    """Return the metrics logged so far, by step."""
    result = []
    for entry in state.log_history[first:]:
        metrics = {name: value for name, value in entry.items() if name in _LOGGED_METRICS}
        if metrics:
            result.append({"step": entry["step"], "epoch": entry["epoch"], **metrics})
    return result


def best_checkpoint(out: Path, state: TrainerState) -> Path:
    """Return the checkpoint with the best validation so far."""
    result = out / f"checkpoint-{state.best_global_step}"
    if not result.is_dir():
        raise DataError(f"{out}: the best checkpoint, {result.name}, is missing: remove the folder and train again")
    return result


def last_checkpoint(out: Path) -> tuple[Path | None, TrainerState]:
    """Return the newest complete checkpoint and its state; remove incomplete ones."""
    while (path := get_last_checkpoint(str(out))) is not None:
        checkpoint = Path(path)
        try:  # the state is written last
            state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
            if all((checkpoint / name).is_file() for name in _CHECKPOINT_FILES):
                return checkpoint, state
        except (OSError, ValueError, TypeError):
            pass
        shutil.rmtree(checkpoint)
    return None, TrainerState()


def has_stopped_early(state: TrainerState, patience: int) -> bool:
    """Return whether early stopping ended the training."""
    callbacks: Any = state.stateful_callbacks or {}
    attributes = callbacks.get("EarlyStoppingCallback", {}).get("attributes", {})
    return 0 < patience <= attributes.get("early_stopping_patience_counter", 0)
