"""How to train, and what came of it. Values; computes nothing."""

from dataclasses import asdict, dataclass, field, fields
from math import inf
from pathlib import Path
from typing import Any

from ..config import check_count
from ..errors import ConfigError, DataError
from ..evaluation.run_dir import read_json_object


@dataclass(frozen=True)
class TrainConfig:
    """The paper's setting where it says one (section 3.3, footnote 7).

    targets: the linear layers that get an adapter, by the end of their names; those of the attention if none are named.
    examples: how many go into one update. packed: how many of these are computed in one pass, where what they share is
    computed once, at the cost of memory (with `encodings` each has its own). kl: weight of the divergence from the
    log-probabilities kept in the traces, beside the log-loss, in what is learned and what the best checkpoint is chosen
    by. encodings: weight of how far reused encodings are from the mean of those in all readers' own prompts
    (`distill.encodings`), in what is learned. patience: validations without a better one before it stops (0: never).
    checkpointing: computes layers again for the gradient, to save memory. bf16: computes in bfloat16, with weights in
    their own type.
    """

    lora_rank: int = 64
    lora_alpha: int = 32
    dropout: float = 0.05
    target_modules: tuple[str, ...] | None = None
    learning_rate: float = 2e-4
    epochs: int = 2
    batch_size: int = 8
    examples_per_forward: int = 1
    warmup_ratio: float = 0.1
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    kl_weight: float = 0.0
    kv_loss_weight: float = 0.0
    evals_per_epoch: int = 1
    patience: int = 0
    gradient_checkpointing: bool = False
    bf16: bool = False
    tensorboard: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (
            ("lora_rank", 1),
            ("lora_alpha", 1),
            ("epochs", 1),
            ("batch_size", 1),
            ("examples_per_forward", 1),
            ("evals_per_epoch", 1),
        ):
            check_count(getattr(self, name), name, least)
        if self.batch_size % self.examples_per_forward:
            raise ConfigError(
                f"examples_per_forward={self.examples_per_forward}: use a number that divides batch_size={self.batch_size}"
            )
        check_count(self.patience, "patience", 0)
        check_count(self.seed, "seed", 0)
        named = self.target_modules
        if self.seed >= 1 << 32:
            raise ConfigError(f"seed={self.seed}: use one below 2**32, for NumPy's sake")
        for name, ok, hint in (
            ("dropout", 0 <= self.dropout < 1, "use 0 to below 1"),
            ("warmup_ratio", 0 <= self.warmup_ratio < 1, "use a share of all updates, 0 to below 1"),
            ("learning_rate", 0 < self.learning_rate < inf, "use a positive number"),
            ("max_grad_norm", 0 < self.max_grad_norm < inf, "use a positive number"),
            ("weight_decay", 0 <= self.weight_decay < inf, "use 0 or more"),
            ("kl_weight", 0 <= self.kl_weight < inf, "use 0 or more"),
            ("kv_loss_weight", 0 <= self.kv_loss_weight < inf, "use 0 or more"),
            (
                "target_modules",
                named is None or (named and "lm_head" not in named),
                "name kinds of layers, not the output layer",
            ),
        ):
            if not ok:
                raise ConfigError(f"{name}={getattr(self, name)!r}: {hint}")


_REPORT_KEYS = {"loss_before": "before", "loss_after": "after"}  # names in the file, where they differ


@dataclass
class TrainReport:
    """Mean log-loss of a token of the examples for validation: under reuse before and after, and of the baseline.

    divergence: of the same tokens from the baseline, before and after, where it was learned from. trained_share:
    trained parameters over those of the model, as the paper counts. seconds: of a example, in training. peak_memory: the
    most bytes that the process, or the GPU, ever held. log: what was measured on the way.
    """

    loss_before: float
    loss_after: float
    baseline: float | None
    divergence: tuple[float, float] | None
    trained_share: float
    seconds: float
    peak_memory: int
    updates: int
    log: list[dict[str, Any]] = field(default_factory=list)

    @property
    def gap_closed(self) -> float | None:
        """How much of the gap to the baseline is gone: 1 where the log-loss is the baseline's own; None where there
        is none to speak of."""
        if self.baseline is None or self.loss_before - self.baseline < 1e-4:
            return None
        return (self.loss_before - self.loss_after) / (self.loss_before - self.baseline)

    def as_dict(self) -> dict[str, Any]:
        return {_REPORT_KEYS.get(k, k): v for k, v in asdict(self).items()} | {"closed": self.gap_closed}

    @classmethod
    def read(cls, out: Path) -> "TrainReport":
        """The report that a finished training left in its folder."""
        file = out / "report.json"
        known = {key: name for name, key in _REPORT_KEYS.items()}
        result = {known.get(k, k): v for k, v in read_json_object(file).items() if k != "closed"}
        if result.keys() != {f.name for f in fields(cls)}:
            raise DataError(f"{file}: a report of another version of this package; remove the folder and train again")
        return cls(**result | {"divergence": result["divergence"] and tuple(result["divergence"])})
