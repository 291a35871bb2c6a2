"""What a lesson costs: log-loss of its tokens, divergence from what the baseline gave. Every lesson in one pass."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import DataError
from ..models.adapter import Adapter
from ..onepass.likelihood import log_likelihood, log_probs
from ..onepass.packed import read_logits
from ..types import BASE
from .lessons import Lesson


def losses(adapter: Adapter, lessons: Sequence[Lesson], model: str = BASE) -> list[float]:
    """The mean log-loss of a token of every lesson, by the model or one of its adapters."""
    found = []
    for lesson in lessons:
        packed = lesson.packed
        found.append(-float(log_likelihood(read_logits(adapter, packed, model), packed.targets).mean()))
    return found


def mean_loss(adapter: Adapter, lessons: Sequence[Lesson], model: str = BASE) -> float:
    """The mean of a token over all lessons, each token weighing the same."""
    return mean_losses(adapter, lessons, model, diverging=False)[0]


def mean_losses(
    adapter: Adapter, lessons: Sequence[Lesson], model: str = BASE, *, diverging: bool
) -> tuple[float, float]:
    """Log-loss and divergence of a token over all lessons, each token weighing the same; no divergence is zero."""
    loss = apart = 0.0
    for lesson in lessons:
        packed = lesson.packed
        logits = read_logits(adapter, packed, model)
        lost, away = token_losses(logits, packed.targets, lesson if diverging else None)
        loss, apart = loss + float(lost.sum()), apart + float(away.sum())
    tokens = sum(lesson.targets for lesson in lessons)
    return loss / tokens, apart / tokens


def token_losses(logits: Tensor, targets: Sequence[int], diverging: Lesson | None) -> tuple[Tensor, Tensor]:
    """Of every generated token its log-loss, and KL(baseline || now) over the tokens that the trace of the lesson kept,
    the rest as one; zeros without a lesson. Logits are read once for both."""
    if diverging is None:
        loss = -log_likelihood(logits, targets)
        return loss, torch.zeros_like(loss)
    kept = kept_of(diverging)
    width = min(map(len, kept))
    ids = torch.tensor([[t, *(token for token, _ in one[:width])] for t, one in zip(targets, kept, strict=True)])
    old = torch.tensor([[value for _, value in one[:width]] for one in kept], device=logits.device)
    said, new = log_probs(logits, ids.to(logits.device)).split((1, width), dim=1)
    rest_old, rest_new = (torch.log1p(-x.exp().sum(-1).clamp(max=1 - 1e-6)) for x in (old, new))
    return -said[:, 0], (old.exp() * (old - new)).sum(-1) + rest_old.exp() * (rest_old - rest_new)


def kept_of(lesson: Lesson) -> list[Any]:
    """Of every generated token, the likeliest ones on the baseline."""
    kept = [top for call in lesson.calls if call.generated for top in call.top]
    if len(kept) != lesson.targets or not all(kept):
        raise DataError(f"{lesson.id}: the trace keeps no likeliest tokens: make it with --top 32")
    return kept
