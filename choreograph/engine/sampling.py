"""Chooses tokens from logits: transformers' own processors, one random generator per message. Pure otherwise.

Rows are independent: what a row chooses depends on its logits and its own generator only, so a message samples
the same tokens alone and in a batch. A uniform number is drawn per token and looked up in the cumulative
distribution in order of token id, which small differences of rounding hardly ever cross.

Nucleus sampling over a vocabulary sorts it; here the likeliest CANDIDATES are enough whenever they hold the
nucleus, which is checked with their exact share of the probability mass, and the processors of transformers
decide otherwise.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers.generation import logits_process as hf

from ..types import SamplingParams, TokenLogprob
from .generation import Generation

CANDIDATES = 512
_NO_IDS: Any = torch.empty(1, 0, dtype=torch.long)  # these processors look at scores only


def choose(logits: Float[Tensor, "B V"], generations: list[Generation]) -> list[int | None]:
    """The next token of each row, None where the model gave no numbers (NaN).

    Changes nothing that a second try would see; log-probabilities that were asked for wait in the generation.
    """
    logits = logits.cpu()  # one copy: what is chosen is the same wherever the model is
    chosen: list[int | None] = [None] * len(generations)
    largest, likeliest = logits.max(-1)  # NaN where the row has one
    sound = [not bad for bad in largest.isnan().tolist()]
    plain = [i for i, g in enumerate(generations) if sound[i] and g.next_forced is None and _is_plain(g)]
    for i in plain:
        if generations[i].sampling.greedy:
            chosen[i] = int(likeliest[i])
    sampled = [i for i in plain if not generations[i].sampling.greedy]
    if sampled:
        rows = logits if len(sampled) == len(logits) else logits[sampled]
        for i, values, ids in zip(sampled, *_candidates(rows), strict=True):
            chosen[i] = _sample(logits[i].float(), generations[i], values, ids)
    settled = set(plain)
    for i, g in enumerate(generations):
        if not sound[i]:
            continue
        if g.next_forced is not None:
            chosen[i] = g.next_forced
        elif i not in settled:
            row = _processed(logits[i].float(), g)
            chosen[i] = int(row.argmax()) if g.sampling.greedy else _sample(row, g, *_candidates(row))
        if g.sampling.logprobs is not None:
            token = chosen[i]
            assert token is not None
            g.next_logprob = _logprob(logits[i].float(), token, g.sampling.logprobs)
        if g.watch is not None:
            g.next_row = logits[i].float().log_softmax(-1)
    return chosen


def _is_plain(g: Generation) -> bool:
    """Whether no processor looks at earlier tokens or single ids."""
    s = g.sampling
    penalties = s.presence_penalty or s.frequency_penalty or s.repetition_penalty != 1.0
    return not penalties and not s.logit_bias and (g.stop_allowed or not (g.stop_tokens or s.stop))


def _processed(row: Float[Tensor, " V"], g: Generation) -> Float[Tensor, " V"]:
    """The minimum length, bias and penalties, in vLLM's order."""
    s, scores = g.sampling, row[None].clone()
    if not g.stop_allowed and g.stop_tokens:
        scores[:, sorted(g.stop_tokens)] = float("-inf")
    if s.logit_bias:
        bias: Any = [[[int(token)], float(value)] for token, value in s.logit_bias.items()]
        scores = hf.SequenceBiasLogitsProcessor(bias)(_NO_IDS, scores)
    if s.repetition_penalty != 1.0:
        seen = torch.tensor([g.prompt + g.tokens], device=row.device)
        scores = hf.RepetitionPenaltyLogitsProcessor(float(s.repetition_penalty))(seen, scores)
    if g.tokens and (s.presence_penalty or s.frequency_penalty):
        ids, counts = torch.tensor(g.tokens, device=row.device).unique(return_counts=True)
        scores[:, ids] -= s.presence_penalty + s.frequency_penalty * counts
    return scores[0]


def warpers(s: SamplingParams) -> hf.LogitsProcessorList:
    """The distribution-shaping processors of transformers for these options."""
    steps = hf.LogitsProcessorList([hf.TemperatureLogitsWarper(float(s.temperature))])
    if s.top_k > 0:
        steps.append(hf.TopKLogitsWarper(int(s.top_k)))
    if s.top_p < 1:
        steps.append(hf.TopPLogitsWarper(s.top_p))
    if s.min_p > 0:
        steps.append(hf.MinPLogitsWarper(float(s.min_p)))
    return steps


def _candidates(logits: Float[Tensor, "*B V"]) -> tuple[Float[Tensor, "*B K"], Tensor]:
    """Values and ids of the candidates of every row at once."""
    top = torch.topk(logits, min(CANDIDATES, logits.shape[-1]))
    return top.values.float(), top.indices


def _sample(row: Float[Tensor, " V"], g: Generation, values: Float[Tensor, " K"], ids: Tensor) -> int:
    point = g.point()
    kept = nucleus(row, g.sampling, values, ids)
    if kept is not None:
        ids, weights = kept
        order = ids.argsort()
        return int(ids[order][_pick(weights[order], point)])
    scores = warpers(g.sampling)(_NO_IDS, row[None].clone())[0]
    return _pick(scores.softmax(-1), point)


def _pick(weights: Tensor, point: float) -> int:
    """The first index at which the cumulative weight passes `point` of the total."""
    total = weights.double().cumsum(0)
    at = int(torch.searchsorted(total, point * float(total[-1]), right=True))
    return min(at, int(weights.nonzero()[-1]))


def nucleus(
    row: Float[Tensor, " V"], s: SamplingParams, values: Float[Tensor, " K"], ids: Tensor
) -> tuple[Tensor, Tensor] | None:
    """The kept ids and their weights from the likeliest candidates alone, or None if they may not suffice."""
    whole = len(values) == len(row)
    if s.top_k > len(values) and not whole:
        return None
    scores = values / s.temperature
    weights = (scores - scores[0]).exp()
    keep = torch.ones_like(weights, dtype=torch.bool)
    enough = whole
    if 0 < s.top_k <= len(values):
        keep = scores >= scores[s.top_k - 1]
        enough = enough or bool(scores[-1] < scores[s.top_k - 1])
        if not enough:
            return None
    if s.top_p < 1:
        pool = weights * keep
        total = pool.sum() if enough else (row / s.temperature - scores[0]).exp().sum()
        keep = keep & (pool.cumsum(0) - pool < s.top_p * total)
        enough = enough or bool(pool.sum() >= s.top_p * total)
    if s.min_p > 0:
        keep = keep & (weights >= s.min_p)
        enough = enough or bool(weights[-1] < s.min_p)
    return (ids[keep], weights[keep]) if enough else None


def _logprob(row: Float[Tensor, " V"], token: int, count: int) -> TokenLogprob:
    scores = row.log_softmax(-1)
    likeliest = scores.topk(min(count, len(scores)))
    top = dict(zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True))
    return TokenLogprob(token, float(scores[token]), top)
