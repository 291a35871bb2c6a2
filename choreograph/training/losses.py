"""Log-probabilities of a few tokens behind each of many rows, without a second table of rows by vocabulary.

A table of log-probabilities is as wide as the vocabulary, several times over with its gradient, and of each row only
the target and what a trace kept are read. So the logits alone are kept, and rows are widened a few at a time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..attention.metadata import AttentionSpec
from ..attention.rope import rotate
from ..errors import DataError
from ..models.hf_model import HFModel
from ..outputs import BASE_MODEL
from .dataset import TrainingExample
from .packed_forward import KeysValues, KVByLayer, compute_kv, forward_no_grad, pack
from .trace import TracedCall, align_decodes, as_full_prompts

MAX_CHUNK_LOGITS = 1 << 19  # logits that are widened together: little enough to stay in a cache


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
        result, all_less = torch.empty_like(logits), -grads.sum(1, keepdim=True)
        for out, some, norm, less, at, grad in _chunks(result, logits, norms, all_less, ids, grads):
            out.copy_((some.float() - norm).exp_().mul_(less).scatter_add_(1, at, grad))
        return result, None


def _chunks(first: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Rows of all tensors, as many as may be widened at once."""
    size = max(1, MAX_CHUNK_LOGITS // max(first.shape[1], 1))
    return zip(*(tensor.split(size) for tensor in (first, *others)), strict=True)


@dataclass(frozen=True)
class KVTarget:
    """rows: of a example's pass, those that are seen; layers: their keys, turned to where they stand, and values, as the
    mean over the decodes that see them, each with its whole prompt."""

    rows: Int[Tensor, "R"]
    layers: list[KeysValues]  # (G, R, D) each


@torch.no_grad()
def mean_baseline_kv(hf_model: HFModel, calls: Sequence[TracedCall], num_prefix_tokens: int = 0) -> KVTarget:
    """By the base model, whatever is being trained. behind: rows that the pass has before its own. To be called inside
    `adapter.hooked()`."""
    reused, prompts = pack(calls), as_full_prompts(calls)
    whole = pack(prompts)
    pairs = [
        (row, home)
        for kv_slice in align_decodes(calls, reused, prompts, whole)
        for row, home in zip(kv_slice.rows, kv_slice.baseline_rows, strict=True)
        if row >= num_prefix_tokens
    ]
    if not pairs:
        return KVTarget(torch.zeros(0, dtype=torch.long), [])
    made, kinds = compute_kv(hf_model, whole), hf_model.model_info.attention_specs
    shifts = [reused.positions[row] - whole.positions[home] for row, home in pairs]
    seen, homes = torch.tensor(pairs, device=hf_model.model_info.device).unbind(1)
    rows, of = seen.unique(return_inverse=True)
    return KVTarget(
        rows - num_prefix_tokens,
        [
            (
                _mean_by_row(_rotate_keys(keys[0, :, homes], shifts, kinds[layer]), of),
                _mean_by_row(values[0, :, homes], of),
            )
            for layer, (keys, values) in sorted(made.items())
        ],
    )


def kv_loss(kv: KVByLayer, target: KVTarget) -> Tensor:
    """The square of the difference over that of what is wanted: the mean over keys and values of all layers."""
    result = [
        (some[0, :, target.rows].float() - other).square().sum() / other.square().sum()
        for layer, both in enumerate(target.layers)
        for some, other in zip(kv[layer], both, strict=True)
    ]
    return torch.stack(result).mean() if result else torch.zeros(())


def _rotate_keys(keys: Float[Tensor, "G P D"], shifts: Sequence[int], spec: AttentionSpec) -> Float[Tensor, "G P D"]:
    if spec.rope is None:
        return keys
    cos, sin = (torch.from_numpy(table).to(keys.device) for table in spec.rope.cos_sin(list(shifts)))
    return rotate(keys, cos, sin, spec.rope.interleaved)


def _mean_by_row(vectors: Float[Tensor, "G P D"], row_ids: Int[Tensor, "P"]) -> Float[Tensor, "G R D"]:
    """Over those that are of one row."""
    count = row_ids.bincount()
    total = torch.zeros(vectors.shape[0], len(count), vectors.shape[2], device=vectors.device)
    return total.index_add_(1, row_ids, vectors.float()) / count[:, None]


def example_losses(hf_model: HFModel, examples: Sequence[TrainingExample], model: str = BASE_MODEL) -> list[float]:
    """The mean log-loss of a token of every example, by the model or one of its adapters."""
    result = []
    for example in examples:
        packed = example.packed
        result.append(-float(log_likelihood(forward_no_grad(hf_model, packed, model), packed.targets).mean()))
    return result


def mean_loss(hf_model: HFModel, examples: Sequence[TrainingExample], model: str = BASE_MODEL) -> float:
    """The mean of a token over all examples, each token weighing the same."""
    return mean_losses(hf_model, examples, model, with_kl=False)[0]


def mean_losses(
    hf_model: HFModel, examples: Sequence[TrainingExample], model: str = BASE_MODEL, *, with_kl: bool
) -> tuple[float, float]:
    """Log-loss and divergence of a token over all examples, each token weighing the same; no divergence is zero."""
    loss = apart = 0.0
    for example in examples:
        packed = example.packed
        logits = forward_no_grad(hf_model, packed, model)
        lost, away = token_losses(logits, packed.targets, example if with_kl else None)
        loss, apart = loss + float(lost.sum()), apart + float(away.sum())
    tokens = sum(example.num_targets for example in examples)
    return loss / tokens, apart / tokens


def token_losses(logits: Tensor, targets: Sequence[int], kl_example: TrainingExample | None) -> tuple[Tensor, Tensor]:
    """Of every generated token its log-loss, and KL(baseline || now) over the tokens that the trace of the example kept,
    the rest as one; zeros without a example. Logits are read once for both."""
    if kl_example is None:
        loss = -log_likelihood(logits, targets)
        return loss, torch.zeros_like(loss)
    kept = topk_targets(kl_example)
    width = min(map(len, kept))
    ids = torch.tensor([[t, *(token for token, _ in one[:width])] for t, one in zip(targets, kept, strict=True)])
    old = torch.tensor([[value for _, value in one[:width]] for one in kept], device=logits.device)
    said, new = log_probs(logits, ids.to(logits.device)).split((1, width), dim=1)
    rest_old, rest_new = (torch.log1p(-x.exp().sum(-1).clamp(max=1 - 1e-6)) for x in (old, new))
    return -said[:, 0], (old.exp() * (old - new)).sum(-1) + rest_old.exp() * (rest_old - rest_new)


def topk_targets(example: TrainingExample) -> list[Any]:
    """Of every generated token, the likeliest ones on the baseline."""
    kept = [top for call in example.calls if call.generated for top in call.top]
    if len(kept) != example.num_targets or not all(kept):
        raise DataError(f"{example.id}: the trace keeps no likeliest tokens: make it with --top 32")
    return kept
