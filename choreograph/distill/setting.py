"""How to train, and what came of it. Values; computes nothing."""

from dataclasses import asdict, dataclass, field, fields
from math import inf
from pathlib import Path
from typing import Any

from ..config import check_count
from ..errors import ConfigError, DataError
from ..evaluation.folder import read_settings


@dataclass(frozen=True)
class TrainConfig:
    """The paper's setting where it says one (section 3.3, footnote 7).

    targets: the linear layers that get an adapter, by the end of their names; those of the attention if none are named.
    lessons: how many go into one update. packed: how many of these are computed in one pass, where what they share is
    computed once, at the cost of memory (with `encodings` each has its own). kl: weight of the divergence from the
    log-probabilities kept in the traces, beside the log-loss, in what is learned and what the best checkpoint is chosen
    by. encodings: weight of how far reused encodings are from the mean of those in all readers' own prompts
    (`distill.encodings`), in what is learned. patience: validations without a better one before it stops (0: never).
    checkpointing: computes layers again for the gradient, to save memory. bf16: computes in bfloat16, with weights in
    their own type.
    """

    rank: int = 64
    alpha: int = 32
    dropout: float = 0.05
    targets: tuple[str, ...] | None = None
    rate: float = 2e-4
    epochs: int = 2
    lessons: int = 8
    packed: int = 1
    warm_up: float = 0.1
    decay: float = 0.0
    clip: float = 1.0
    kl: float = 0.0
    encodings: float = 0.0
    validations: int = 1
    patience: int = 0
    checkpointing: bool = False
    bf16: bool = False
    tensorboard: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (
            ("rank", 1),
            ("alpha", 1),
            ("epochs", 1),
            ("lessons", 1),
            ("packed", 1),
            ("validations", 1),
        ):
            check_count(getattr(self, name), name, least)
        if self.lessons % self.packed:
            raise ConfigError(f"packed={self.packed}: use a number that divides lessons={self.lessons}")
        check_count(self.patience, "patience", 0)
        check_count(self.seed, "seed", 0)
        named = self.targets
        if self.seed >= 1 << 32:
            raise ConfigError(f"seed={self.seed}: use one below 2**32, for NumPy's sake")
        for name, ok, mend in (
            ("dropout", 0 <= self.dropout < 1, "use 0 to below 1"),
            ("warm_up", 0 <= self.warm_up < 1, "use a share of all updates, 0 to below 1"),
            ("rate", 0 < self.rate < inf, "use a positive number"),
            ("clip", 0 < self.clip < inf, "use a positive number"),
            ("decay", 0 <= self.decay < inf, "use 0 or more"),
            ("kl", 0 <= self.kl < inf, "use 0 or more"),
            ("encodings", 0 <= self.encodings < inf, "use 0 or more"),
            (
                "targets",
                named is None or (named and "lm_head" not in named),
                "name kinds of layers, not the output layer",
            ),
        ):
            if not ok:
                raise ConfigError(f"{name}={getattr(self, name)!r}: {mend}")


@dataclass
class TrainReport:
    """Mean log-loss of a token of the lessons for validation: under reuse before and after, and of the baseline.

    divergence: of the same tokens from the baseline, before and after, where it was learned from. trained_share:
    trained parameters over those of the model, as the paper counts. seconds: of a lesson, in training. peak_memory: the
    most bytes that the process, or the GPU, ever held. log: what was measured on the way.
    """

    before: float
    after: float
    baseline: float | None
    divergence: tuple[float, float] | None
    trained_share: float
    seconds: float
    peak_memory: int
    updates: int
    log: list[dict[str, Any]] = field(default_factory=list)

    @property
    def closed(self) -> float | None:
        """How much of the gap to the baseline is gone: 1 where the log-loss is the baseline's own; None where there
        is none to speak of."""
        if self.baseline is None or self.before - self.baseline < 1e-4:
            return None
        return (self.before - self.after) / (self.before - self.baseline)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"closed": self.closed}

    @classmethod
    def read(cls, out: Path) -> "TrainReport":
        """The report that a finished training left in its folder."""
        file = out / "report.json"
        found = {k: v for k, v in read_settings(file).items() if k != "closed"}
        if found.keys() != {f.name for f in fields(cls)}:
            raise DataError(f"{file}: a report of another version of this package; remove the folder and train again")
        return cls(**found | {"divergence": found["divergence"] and tuple(found["divergence"])})
