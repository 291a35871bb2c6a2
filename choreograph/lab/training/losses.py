"""Losses of generated tokens and of reused keys and values.

Log-probabilities of the whole vocabulary and their gradient need several times the memory of the logits, although
only the target and the `top` tokens of the trace are read. Therefore only logits are stored, and converted to float32
a few rows at a time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...attention.rope import rotate
from ...errors import DataError
from ...models.hf_model import HFModel
from ...outputs import BASE_MODEL
from ..replay.packed_forward import KVByLayer, compute_kv, forward_no_grad, full_prompt_indices, pack
from ..replay.traced_calls import TracedCall, as_full_prompts, iter_decodes
from .examples import TrainingExample

MAX_CHUNK_LOGITS = 1 << 19  # logits converted to float32 at once; few enough to stay in a CPU cache


def log_likelihood(logits: Float[Tensor, "R V"], targets: Sequence[int]) -> Float[Tensor, "R"]:
    """Return the log-probability of each target."""
    return log_probs(logits, torch.tensor(targets, dtype=torch.long, device=logits.device)[:, None])[:, 0]


def log_probs(logits: Float[Tensor, "R V"], ids: Int[Tensor, "R K"]) -> Float[Tensor, "R K"]:
    """Return float32 log-probabilities of some tokens of each row; differentiable once."""
    return _LogProbs.apply(logits, ids)


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor) -> Tensor:
        norms = logits.new_empty(len(logits), 1, dtype=torch.float32)
        for rows, norm in _chunks(logits, norms):
            torch.logsumexp(rows.float(), -1, keepdim=True, out=norm)
        ctx.save_for_backward(logits, ids, norms)
        return logits.gather(1, ids).float() - norms

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grads: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the logits.

        It is 1 at the token, minus the probability of every token, times the incoming gradient.
        """
        logits, ids, norms = ctx.saved_tensors
        result, negative_sums = torch.empty_like(logits), -grads.sum(1, keepdim=True)
        for out, rows, norm, scale, index, grad in _chunks(result, logits, norms, negative_sums, ids, grads):
            out.copy_((rows.float() - norm).exp_().mul_(scale).scatter_add_(1, index, grad))
        return result, None


def _chunks(first: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split all tensors into the same blocks of rows."""
    size = max(1, MAX_CHUNK_LOGITS // max(first.shape[1], 1))
    return zip(*(tensor.split(size) for tensor in (first, *others)), strict=True)


@dataclass(frozen=True)
class KVTarget:
    """Mean keys and values that full prompts give to reused tokens."""

    rows: Int[Tensor, "R"]  # indices of the tokens in the packed trace, after its prefix
    layers: list[tuple[Float[Tensor, "G R D"], Float[Tensor, "G R D"]]]  # keys at base positions and values


@torch.no_grad()
def mean_baseline_kv(hf_model: HFModel, calls: Sequence[TracedCall], num_prefix_tokens: int = 0) -> KVTarget:
    """Compute the KV target of a trace with the base model.

    It is the mean over the decodes that attend to a token, each computed with its full prompt. Call this inside
    `hf_model.attention_hook()`.

    Args:
        num_prefix_tokens: leading tokens of the packed trace to leave out.
    """
    packed, prompts = pack(calls), pack(as_full_prompts(calls))
    baseline_indices = full_prompt_indices(prompts)
    pairs: list[
        tuple[int, int]
    ] = []  # index of a token under reuse, and in the full prompt of a decode that attends to it
    for name, call in iter_decodes(calls):
        rows = [packed.first_indices[s.call] + k for s in call.parents for k in range(s.first, s.last)]
        pairs += [pair for pair in zip(rows, baseline_indices[name], strict=False) if pair[0] >= num_prefix_tokens]
    if not pairs:
        return KVTarget(torch.zeros(0, dtype=torch.long), [])
    device = hf_model.model_info.device
    indices, homes = torch.tensor(pairs, device=device).unbind(1)
    reused, groups = indices.unique(return_inverse=True)
    shifts = [packed.positions[row] - prompts.positions[home] for row, home in pairs]
    layers = []
    for layer, (all_keys, all_values) in sorted(compute_kv(hf_model, prompts).items()):
        keys, values = all_keys[0, :, homes], all_values[0, :, homes]
        if (rope := hf_model.model_info.attention_specs[layer].rope) is not None:
            cos, sin = (torch.from_numpy(table).to(device) for table in rope.cos_sin(shifts))
            keys = rotate(keys, cos, sin, rope.interleaved)
        layers.append((_mean_by_group(keys, groups), _mean_by_group(values, groups)))
    return KVTarget(reused - num_prefix_tokens, layers)


def _mean_by_group(vectors: Float[Tensor, "G P D"], groups: Int[Tensor, "P"]) -> Float[Tensor, "G R D"]:
    count = groups.bincount()
    total = torch.zeros(vectors.shape[0], len(count), vectors.shape[2], device=vectors.device)
    return total.index_add_(1, groups, vectors.float()) / count[:, None]


def kv_loss(kv: KVByLayer, target: KVTarget) -> Float[Tensor, ""]:
    """Return the mean relative squared error of keys and values."""
    result = [
        (computed[0, :, target.rows].float() - expected).square().sum() / expected.square().sum()
        for layer, tensors in enumerate(target.layers)
        for computed, expected in zip(kv[layer], tensors, strict=True)
    ]
    return torch.stack(result).mean() if result else torch.zeros(())


def example_losses(hf_model: HFModel, examples: Sequence[TrainingExample], model: str = BASE_MODEL) -> list[float]:
    """Return the log-loss per token of every example, in nats."""
    return [mean_loss(hf_model, [example], model) for example in examples]


def mean_loss(hf_model: HFModel, examples: Sequence[TrainingExample], model: str = BASE_MODEL) -> float:
    """Return the log-loss per token of all examples together, in nats."""
    return mean_losses(hf_model, examples, model, with_kl=False)[0]


def mean_losses(
    hf_model: HFModel, examples: Sequence[TrainingExample], model: str = BASE_MODEL, *, with_kl: bool
) -> tuple[float, float]:
    """Return the mean log-loss and divergence per token, in nats.

    The divergence is 0 without `with_kl`.
    """
    total_loss = total_divergence = 0.0
    for example in examples:
        packed = example.packed
        logits = forward_no_grad(hf_model, packed, model)
        loss, divergence = token_losses(logits, packed.targets, example if with_kl else None)
        total_loss, total_divergence = total_loss + float(loss.sum()), total_divergence + float(divergence.sum())
    num_tokens = sum(example.num_targets for example in examples)
    return total_loss / num_tokens, total_divergence / num_tokens


def token_losses(
    logits: Float[Tensor, "R V"], targets: Sequence[int], kl_example: TrainingExample | None
) -> tuple[Float[Tensor, "R"], Float[Tensor, "R"]]:
    """Return log-loss and KL(baseline || model) of each generated token.

    Args:
        kl_example: has the baseline's likeliest tokens; the rest count as one token. None: divergences are 0.
    """
    if kl_example is None:
        loss = -log_likelihood(logits, targets)
        return loss, torch.zeros_like(loss)
    top = topk_targets(kl_example)
    width = min(map(len, top))
    ids = torch.tensor([[t, *(token for token, _ in pairs[:width])] for t, pairs in zip(targets, top, strict=True)])
    old = torch.tensor([[value for _, value in pairs[:width]] for pairs in top], device=logits.device)
    target, new = log_probs(logits, ids.to(logits.device)).split((1, width), dim=1)
    rest_old, rest_new = (torch.log1p(-x.exp().sum(-1).clamp(max=1 - 1e-6)) for x in (old, new))
    return -target[:, 0], (old.exp() * (old - new)).sum(-1) + rest_old.exp() * (rest_old - rest_new)


def topk_targets(example: TrainingExample) -> list[tuple[tuple[int, float], ...]]:
    """Return the likeliest tokens of the baseline at every generated token."""
    result = [top for call in example.calls if call.generated for top in call.top]
    if len(result) != example.num_targets or not all(result):
        raise DataError(f"{example.id}: the trace keeps no likeliest tokens (top): make it with --top 32")
    return result
