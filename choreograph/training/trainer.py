"""transformers' training loop over examples that are computed in one pass each. Owns checkpoints and metrics."""

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import fields
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

from ..errors import DataError
from ..models.hf_model import HFModel
from .base_kv_memo import BaseKVMemo
from .dataset import TrainingExample, concat_examples
from .losses import kv_loss, mean_baseline_kv, mean_losses, token_losses
from .packed_forward import KVByLayer, forward
from .train_config import TrainConfig

_ARGUMENT_NAMES = {f.name for f in fields(TrainingArguments)}

_LOGGED_METRICS = ("loss", "eval_loss", "eval_divergence", "eval_learned", "learning_rate", "grad_norm")

_CHECKPOINT_FILES = ("adapter_model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth")  # of a checkpoint

_CHECKPOINTING_OPTION = next(n for n in ("activation_checkpointing", "gradient_checkpointing") if n in _ARGUMENT_NAMES)


class PackedTrainer(Trainer):
    """transformers' loop over examples that are computed in one pass each, or a few together."""

    def __init__(
        self,
        hf_model: HFModel,
        model: Any,
        examples: Sequence[TrainingExample],
        validation: Sequence[TrainingExample],
        out: Path,
        config: TrainConfig,
        metrics: TrainerCallback,
    ) -> None:
        self._hf_model, self._config = hf_model, config
        self._validation_examples = validation
        self.base_kv_memo = BaseKVMemo(
            hf_model, (past for one in examples if one.adapter_only and (past := one.packed.prefix))
        )
        self._mean_num_targets = fmean(example.num_targets for example in examples)
        self._mean_examples_per_forward = float(
            config.examples_per_forward
        )  # how many examples of this update share a pass, in the mean
        self.validation_seconds, self.num_trained_examples = 0.0, 0  # seconds; examples
        updates = -(-len(examples) // config.batch_size)  # of an epoch
        every = max(1, updates // config.evals_per_epoch)
        warm_up = int(config.warmup_ratio * updates * config.epochs)  # the first of them has a rate of 0
        callbacks = [metrics]
        if config.patience:
            callbacks.append(EarlyStoppingCallback(config.patience))
        super().__init__(
            model=model,
            args=_training_arguments(out, config, every, warm_up, hf_model.model_info.device.type == "cpu"),
            train_dataset=list(examples),
            eval_dataset=list(validation),
            data_collator=lambda batch: {"lessons": batch},
            callbacks=callbacks,
        )
        self.remove_callback(PrinterCallback)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """The passes of one update. Their mean is taken, so a pass counts by its share of the update's examples."""
        passes, count = super().get_batch_samples(*args, **kwargs)
        if passes:
            self._mean_examples_per_forward = fmean(len(one["lessons"]) for one in passes)
        return passes, count

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        self.num_trained_examples += len(inputs["lessons"])
        with self._hf_model.attention_hook():  # over `backward` too
            return super().training_step(model, inputs, num_items_in_batch)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The log-loss of a whole trace (the paper's loss) and what else is learned, in units of a token of a typical
        one."""
        total: Any = 0.0
        kl, encodings = self._config.kl_weight, self._config.kv_loss_weight
        examples = inputs["lessons"]
        for example in examples if encodings else [concat_examples(examples)]:
            packed = example.packed
            kept: KVByLayer | None = {} if encodings else None
            logits = forward(self._hf_model, packed, model=model, base_kv_provider=self.base_kv_memo, kv_out=kept)
            loss, away = token_losses(logits, packed.targets, example if kl else None)
            total = total + loss.sum() + kl * away.sum()
            if kept is not None:
                expected = mean_baseline_kv(self._hf_model, example.calls, packed.num_prefix_tokens)
                total = total + encodings * example.num_targets * kv_loss(kept, expected)
        return total / (self._mean_num_targets * self._mean_examples_per_forward)

    def evaluation_loop(self, *_: Any, metric_key_prefix: str = "eval", **__: Any) -> EvalLoopOutput:
        began = time.perf_counter()
        assert self.model is not None
        self.model.eval()  # what wraps the model too: it says what a pass of the base alone leaves behind
        kl = self._config.kl_weight
        loss, apart = mean_losses(
            self._hf_model, self._validation_examples, with_kl=kl > 0
        )  # the model holds the adapters now
        self.validation_seconds += time.perf_counter() - began
        result = {"loss": loss, "learned": loss + kl * apart} | ({"divergence": apart} if kl else {})
        named = {f"{metric_key_prefix}_{name}": value for name, value in result.items()}
        return EvalLoopOutput(None, None, named, len(self._validation_examples))  # type: ignore[arg-type]

    def floating_point_ops(self, inputs: Any) -> int:
        return 0


class _SingleDeviceArguments(TrainingArguments):
    """A example is one sequence, computed where the model is: it is not scattered over several GPUs, nor moved."""

    @property
    def n_gpu(self) -> int:
        return min(1, super().n_gpu)

    @property
    def place_model_on_device(self) -> bool:
        return False


def _training_arguments(
    out: Path, config: TrainConfig, eval_steps: int, warmup_steps: int, use_cpu: bool
) -> TrainingArguments:
    again: dict[str, Any] = {}
    if config.gradient_checkpointing:
        again = {_CHECKPOINTING_OPTION: True, f"{_CHECKPOINTING_OPTION}_kwargs": {"use_reentrant": False}}
    return _SingleDeviceArguments(
        output_dir=str(out),
        learning_rate=config.learning_rate,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        num_train_epochs=config.epochs,
        per_device_train_batch_size=config.examples_per_forward,
        gradient_accumulation_steps=config.batch_size // config.examples_per_forward,
        lr_scheduler_type="cosine",
        warmup_steps=warmup_steps,
        optim="adamw_torch",
        **again,
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
    """Writes what is measured as lines of JSON; a run that goes on from a checkpoint repeats none."""

    def __init__(self, out: Path, on_update: Any) -> None:
        self._file = out / "metrics.jsonl"
        self._on_update = on_update

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        entries = [e for e in read_metrics(self._file.parent) if e["step"] <= state.global_step]
        self._file.write_text("".join(json.dumps(e) + "\n" for e in entries))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        kept = {k: v for k, v in (logs or {}).items() if k in _LOGGED_METRICS}
        if kept:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": state.global_step, "epoch": state.epoch, **kept}) + "\n")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._on_update is not None:
            self._on_update(state.global_step, state.max_steps)


def read_metrics(out: Path) -> list[dict[str, Any]]:
    """What was measured so far; a last line that was cut off does not count."""
    file = out / "metrics.jsonl"
    lines = file.read_text(encoding="utf-8").split("\n")[:-1] if file.exists() else []
    try:
        return [json.loads(line) for line in lines]
    except json.JSONDecodeError as exc:
        raise DataError(f"{file}: damaged ({exc}): remove the folder and train again") from None


def best_entry(out: Path, state: TrainerState) -> dict[str, Any]:
    """What was measured when the adapter was made that is kept."""
    result = [entry for entry in read_metrics(out) if "eval_learned" in entry]
    if state.best_global_step is not None:
        result = [entry for entry in result if entry["step"] == state.best_global_step]
    if not result:
        raise DataError(
            f"{out / 'metrics.jsonl'}: lacks step {state.best_global_step}: remove the folder and train again"
        )
    return min(result, key=lambda entry: entry["eval_learned"])


def last_checkpoint(out: Path) -> Path | None:
    """The newest whole checkpoint. One that was being written when the process ended is removed."""
    while (result := get_last_checkpoint(str(out))) is not None:
        try:  # written last
            state = json.loads((Path(result) / "trainer_state.json").read_text())
        except (OSError, json.JSONDecodeError):
            state = None
        if not isinstance(state, dict) or not all((Path(result) / name).is_file() for name in _CHECKPOINT_FILES):
            shutil.rmtree(result)
            continue
        _relocate_best(out, Path(result) / "trainer_state.json", state)
        return Path(result)
    return None


def early_stopped_state(checkpoint: Path, patience: int) -> TrainerState | None:
    """The state of a training that a checkpoint ends, since it waited long enough for something better."""
    state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
    kept = (state.stateful_callbacks or {}).get("EarlyStoppingCallback", {})
    waited = kept.get("attributes", {}).get("early_stopping_patience_counter", 0)
    return state if patience and waited >= patience else None


def _relocate_best(out: Path, file: Path, state: dict[str, Any]) -> None:
    """A checkpoint names the best one by the path of its day; the folder may have been moved since."""
    if state.get("best_model_checkpoint") is None:
        return
    best = out / Path(state["best_model_checkpoint"]).name
    if not best.is_dir():
        raise DataError(f"{file}: the best checkpoint, {best.name}, is gone: remove {out} and train again")
    if str(best) != state["best_model_checkpoint"]:
        file.write_text(json.dumps(state | {"best_model_checkpoint": str(best)}, indent=2))
