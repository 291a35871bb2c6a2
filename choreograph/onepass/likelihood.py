"""Log-probabilities of a few tokens behind each of many rows, without a second table of rows by vocabulary.

A table of log-probabilities is as wide as the vocabulary, several times over with its gradient, and of each row only
the target and what a trace kept are read. So the logits alone are kept, and rows are widened a few at a time.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

AT_ONCE = 1 << 19  # logits that are widened together: little enough to stay in a cache


def log_likelihood(logits: Float[Tensor, "R V"], targets: Sequence[int]) -> Float[Tensor, "R"]:
    """The log-probability of every target."""
    return log_probs(logits, torch.tensor(targets, dtype=torch.long, device=logits.device)[:, None])[:, 0]


def log_probs(logits: Float[Tensor, "R V"], ids: Int[Tensor, "R K"]) -> Float[Tensor, "R K"]:
    """The log-probability of every token of a row, in float32; differentiable once."""
    return _LogProbs.apply(logits, ids)


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor) -> Tensor:
        norms = logits.new_empty(len(logits), 1, dtype=torch.float32)
        for some, norm in _chunks(logits, norms):
            torch.logsumexp(some.float(), -1, keepdim=True, out=norm)
        ctx.save_for_backward(logits, ids, norms)
        return logits.gather(1, ids).float() - norms

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grads: Tensor) -> tuple[Tensor, None]:
        """Of each token's log-probability by the logits: one at its own, less the probability of every token."""
        logits, ids, norms = ctx.saved_tensors
        found, all_less = torch.empty_like(logits), -grads.sum(1, keepdim=True)
        for out, some, norm, less, at, grad in _chunks(found, logits, norms, all_less, ids, grads):
            out.copy_((some.float() - norm).exp_().mul_(less).scatter_add_(1, at, grad))
        return found, None


def _chunks(first: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Rows of all tensors, as many as may be widened at once."""
    size = max(1, AT_ONCE // max(first.shape[1], 1))
    return zip(*(tensor.split(size) for tensor in (first, *others)), strict=True)
