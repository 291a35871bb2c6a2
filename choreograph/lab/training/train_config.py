"""Options and results of a training."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...errors import ConfigError
from ...utils import describe_validation_error

Count = Annotated[int, Field(ge=1)]
Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
ModuleNames = Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class TrainConfig(BaseModel):
    """Training options; defaults follow Prompt Choreography §3.3, footnote 7."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    lora_rank: Count = 64
    lora_alpha: Count = 32  # adapters are scaled by lora_alpha / lora_rank
    dropout: Fraction = 0.05  # share of inputs that adapters drop; the base model drops none
    target_modules: ModuleNames | None = None  # last name components of linear layers; None: those of the attention
    learning_rate: Positive = 2e-4  # maximum; cosine schedule
    epochs: Count = 2
    batch_size: Count = 8  # examples of one update
    examples_per_forward: Count = 1  # of these, examples that share a forward pass; shared calls are computed once
    warmup_ratio: Fraction = 0.1  # share of all updates
    weight_decay: Weight = 0.0
    max_grad_norm: Positive = 1.0
    kl_weight: Weight = 0.0  # weight of KL(baseline || model) in the loss and in the choice of the best checkpoint
    kv_loss_weight: Weight = 0.0  # weight of the distance of reused keys and values to their mean over full prompts
    evals_per_epoch: Count = 1
    patience: Annotated[int, Field(ge=0)] = 0  # evaluations without improvement before training stops; 0: never stop
    gradient_checkpointing: bool = False  # recompute layers in the backward pass to save memory
    bf16: bool = False  # compute in bfloat16; weights keep their dtype
    tensorboard: bool = False  # write metrics for TensorBoard too
    alignment: Annotated[tuple[Positive, Positive], Field(strict=False)] | None = None  # see `Repair`; None: none
    seed: Annotated[int, Field(ge=0, lt=1 << 32)] = 0  # NumPy's range

    def __init__(self, **options: Any) -> None:
        try:
            super().__init__(**options)
        except ValidationError as exc:
            raise ConfigError(describe_validation_error(exc)) from None
        if self.batch_size % self.examples_per_forward:
            raise ConfigError(
                f"examples_per_forward={self.examples_per_forward}: use a number that divides batch_size={self.batch_size}"
            )
        if "lm_head" in (self.target_modules or ()):
            raise ConfigError(f"target_modules={self.target_modules}: leave out the output layer lm_head")


class TrainReport(BaseModel):
    """Result of a training; losses are validation means per token, in nats."""

    model_config = ConfigDict(populate_by_name=True)

    loss_before: Annotated[float, Field(alias="before")]  # log-loss under reuse before training
    loss_after: Annotated[float, Field(alias="after")]  # the same with the adapter
    baseline: float | None  # log-loss of the baseline, if it was computed
    divergence: tuple[float, float] | None  # KL(baseline || model) before and after, if it was part of the loss
    trained_share: float  # parameters of the adapter over those of the model
    seconds: float  # training time of one example
    peak_memory: int  # bytes that the process, or the GPU, held at most
    updates: int
    log: list[dict[str, Any]]  # lines of `metrics.jsonl`

    @property
    def gap_closed(self) -> float | None:
        """Share of the gap to the baseline that training closed.

        None without a baseline or a gap.
        """
        if self.baseline is None or self.loss_before - self.baseline < 1e-4:
            return None
        return (self.loss_before - self.loss_after) / (self.loss_before - self.baseline)

    def as_dict(self) -> dict[str, Any]:
        return self.model_dump(by_alias=True) | {"closed": self.gap_closed}


class TrainManifest(BaseModel):
    """Inputs that determine a training (`train.json`)."""

    version: Literal[2] = 2
    config: dict[str, Any]
    model: str  # fingerprint
    examples: str  # hash
    validation: str  # hash
