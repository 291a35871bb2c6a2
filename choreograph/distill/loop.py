"""transformers' training loop over lessons that are computed in one pass each. Owns checkpoints and metrics."""

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
from ..models.adapter import Adapter
from ..onepass.packed import Encoding, logits_of
from ..onepass.shared import Shared
from .encodings import apart, wanted_of
from .lessons import Lesson, joined
from .losses import mean_losses, token_losses
from .setting import TrainConfig

_NAMES = {f.name for f in fields(TrainingArguments)}
_MEASURED = ("loss", "eval_loss", "eval_divergence", "eval_learned", "learning_rate", "grad_norm")
_PARTS = ("adapter_model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth")  # of a checkpoint
_CHECKPOINTING = next(n for n in ("activation_checkpointing", "gradient_checkpointing") if n in _NAMES)


class OnePass(Trainer):
    """transformers' loop over lessons that are computed in one pass each, or a few together."""

    def __init__(
        self,
        adapter: Adapter,
        model: Any,
        lessons: Sequence[Lesson],
        validation: Sequence[Lesson],
        out: Path,
        config: TrainConfig,
        metrics: TrainerCallback,
    ) -> None:
        self._adapter, self._config = adapter, config
        self._validation = validation
        self.shared = Shared(adapter, (past for one in lessons if one.reading and (past := one.packed.past)))
        self._typical = fmean(lesson.targets for lesson in lessons)
        self._sharing = float(config.packed)  # how many lessons of this update share a pass, in the mean
        self.validating, self.taken = 0.0, 0  # seconds; lessons
        updates = -(-len(lessons) // config.lessons)  # of an epoch
        every = max(1, updates // config.validations)
        warm_up = int(config.warm_up * updates * config.epochs)  # the first of them has a rate of 0
        callbacks = [metrics]
        if config.patience:
            callbacks.append(EarlyStoppingCallback(config.patience))
        super().__init__(
            model=model,
            args=_arguments(out, config, every, warm_up, adapter.facts.device.type == "cpu"),
            train_dataset=list(lessons),
            eval_dataset=list(validation),
            data_collator=lambda batch: {"lessons": batch},
            callbacks=callbacks,
        )
        self.remove_callback(PrinterCallback)

    def get_batch_samples(self, *given: Any, **named: Any) -> Any:
        """The passes of one update. Their mean is taken, so a pass counts by its share of the update's lessons."""
        passes, count = super().get_batch_samples(*given, **named)
        if passes:
            self._sharing = fmean(len(one["lessons"]) for one in passes)
        return passes, count

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        self.taken += len(inputs["lessons"])
        with self._adapter.hooked():  # over `backward` too
            return super().training_step(model, inputs, num_items_in_batch)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The log-loss of a whole trace (the paper's loss) and what else is learned, in units of a token of a typical
        one."""
        total: Any = 0.0
        kl, encodings = self._config.kl, self._config.encodings
        lessons = inputs["lessons"]
        for lesson in lessons if encodings else [joined(lessons)]:
            packed = lesson.packed
            kept: Encoding | None = {} if encodings else None
            logits = logits_of(self._adapter, packed, through=model, by_base=self.shared, kept=kept)
            loss, away = token_losses(logits, packed.targets, lesson if kl else None)
            total = total + loss.sum() + kl * away.sum()
            if kept is not None:
                wanted = wanted_of(self._adapter, lesson.calls, packed.behind)
                total = total + encodings * lesson.targets * apart(kept, wanted)
        return total / (self._typical * self._sharing)

    def evaluation_loop(self, *_: Any, metric_key_prefix: str = "eval", **__: Any) -> EvalLoopOutput:
        began = time.perf_counter()
        assert self.model is not None
        self.model.eval()  # what wraps the model too: it says what a pass of the base alone leaves behind
        kl = self._config.kl
        loss, apart = mean_losses(self._adapter, self._validation, diverging=kl > 0)  # the model holds the adapters now
        self.validating += time.perf_counter() - began
        found = {"loss": loss, "learned": loss + kl * apart} | ({"divergence": apart} if kl else {})
        named = {f"{metric_key_prefix}_{name}": value for name, value in found.items()}
        return EvalLoopOutput(None, None, named, len(self._validation))  # type: ignore[arg-type]

    def floating_point_ops(self, inputs: Any) -> int:
        return 0


class _Arguments(TrainingArguments):
    """A lesson is one sequence, computed where the model is: it is not scattered over several GPUs, nor moved."""

    @property
    def n_gpu(self) -> int:
        return min(1, super().n_gpu)

    @property
    def place_model_on_device(self) -> bool:
        return False


def _arguments(out: Path, config: TrainConfig, every: int, warm_up: int, cpu: bool) -> TrainingArguments:
    again: dict[str, Any] = {}
    if config.checkpointing:
        again = {_CHECKPOINTING: True, f"{_CHECKPOINTING}_kwargs": {"use_reentrant": False}}
    return _Arguments(
        output_dir=str(out),
        learning_rate=config.rate,
        weight_decay=config.decay,
        max_grad_norm=config.clip,
        num_train_epochs=config.epochs,
        per_device_train_batch_size=config.packed,
        gradient_accumulation_steps=config.lessons // config.packed,
        lr_scheduler_type="cosine",
        warmup_steps=warm_up,
        optim="adamw_torch",
        **again,
        bf16=config.bf16,
        use_cpu=cpu,
        eval_strategy="steps",
        eval_steps=every,
        save_strategy="steps",
        save_steps=every,
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


class Metrics(TrainerCallback):
    """Writes what is measured as lines of JSON; a run that goes on from a checkpoint repeats none."""

    def __init__(self, out: Path, on_update: Any) -> None:
        self._file = out / "metrics.jsonl"
        self._on_update = on_update

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        entries = [e for e in history(self._file.parent) if e["step"] <= state.global_step]
        self._file.write_text("".join(json.dumps(e) + "\n" for e in entries))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        kept = {k: v for k, v in (logs or {}).items() if k in _MEASURED}
        if kept:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": state.global_step, "epoch": state.epoch, **kept}) + "\n")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._on_update is not None:
            self._on_update(state.global_step, state.max_steps)


def history(out: Path) -> list[dict[str, Any]]:
    """What was measured so far; a last line that was cut off does not count."""
    file = out / "metrics.jsonl"
    lines = file.read_text(encoding="utf-8").split("\n")[:-1] if file.exists() else []
    try:
        return [json.loads(line) for line in lines]
    except json.JSONDecodeError as problem:
        raise DataError(f"{file}: damaged ({problem}): remove the folder and train again") from None


def best_of(out: Path, state: TrainerState) -> dict[str, Any]:
    """What was measured when the adapter was made that is kept."""
    found = [entry for entry in history(out) if "eval_learned" in entry]
    if state.best_global_step is not None:
        found = [entry for entry in found if entry["step"] == state.best_global_step]
    if not found:
        raise DataError(
            f"{out / 'metrics.jsonl'}: lacks step {state.best_global_step}: remove the folder and train again"
        )
    return min(found, key=lambda entry: entry["eval_learned"])


def last_checkpoint(out: Path) -> Path | None:
    """The newest whole checkpoint. One that was being written when the process ended is removed."""
    while (found := get_last_checkpoint(str(out))) is not None:
        try:  # written last
            state = json.loads((Path(found) / "trainer_state.json").read_text())
        except (OSError, json.JSONDecodeError):
            state = None
        if not isinstance(state, dict) or not all((Path(found) / name).is_file() for name in _PARTS):
            shutil.rmtree(found)
            continue
        _find_best(out, Path(found) / "trainer_state.json", state)
        return Path(found)
    return None


def stopped_early(checkpoint: Path, patience: int) -> TrainerState | None:
    """The state of a training that a checkpoint ends, since it waited long enough for something better."""
    state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
    kept = (state.stateful_callbacks or {}).get("EarlyStoppingCallback", {})
    waited = kept.get("attributes", {}).get("early_stopping_patience_counter", 0)
    return state if patience and waited >= patience else None


def _find_best(out: Path, file: Path, state: dict[str, Any]) -> None:
    """A checkpoint names the best one by the path of its day; the folder may have been moved since."""
    if state.get("best_model_checkpoint") is None:
        return
    best = out / Path(state["best_model_checkpoint"]).name
    if not best.is_dir():
        raise DataError(f"{file}: the best checkpoint, {best.name}, is gone: remove {out} and train again")
    if str(best) != state["best_model_checkpoint"]:
        file.write_text(json.dumps(state | {"best_model_checkpoint": str(best)}, indent=2))
