"""Chooses tokens from logits: transformers' own processors, one random generator per message. Pure otherwise.

Rows are independent: what a row chooses depends on its logits and its own generator only, so a message samples
the same tokens alone and in a batch. A uniform number is drawn per token and looked up in the cumulative
distribution in order of token id, which small differences of rounding hardly ever cross.

Nucleus sampling over a vocabulary sorts it; here the likeliest CANDIDATES are enough whenever they hold the
nucleus, which is checked with their exact share of the probability mass, and the processors of transformers
decide otherwise. All rows of a step are worked out together, on the device that has the logits.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers.generation import logits_process as hf

from ..ops.crossing import Fetched, sent
from ..types import SamplingParams, TokenLogprob
from .generation import Generation

CANDIDATES = 512
NO_NUMBER, TOO_FEW = -2, -1  # in place of tokens
_NO_IDS: Any = torch.empty(1, 0, dtype=torch.long)  # these processors look at scores only


def choose(logits: Float[Tensor, "B V"], generations: list[Generation]) -> "Choice":
    """Begins to choose the next token of each row, where the logits are. It may be tried again: nothing is used up."""
    free = [i for i, g in enumerate(generations) if g.next_forced is None]
    apart = {i: _processed(logits[i].float(), generations[i]) for i in free if not _is_plain(generations[i])}
    tokens = _tokens(logits, generations, [i for i in free if i not in apart])
    if apart:
        found = _tokens(torch.stack([*apart.values()]), [generations[i] for i in apart], range(len(apart)))
        tokens = tokens.index_copy(0, sent(list(apart), torch.long, logits.device), found)
    forced = {i: token for i, g in enumerate(generations) for token in (g.next_forced,) if token is not None}
    if forced:
        rows, told = (sent(list(part), torch.long, logits.device) for part in (forced.keys(), forced.values()))
        tokens = tokens.index_copy(0, rows, told).where(tokens != NO_NUMBER, NO_NUMBER)
    return Choice(logits, generations, apart, tokens)


class Choice:
    """Tokens that are being chosen on a device. tokens: (B,) there, NO_NUMBER where the model gave none (NaN), TOO_FEW
    where only the host can say; `read` waits until the host knows them, in one copy. told: the same, once it does.
    apart: the scores of rows that were worked out apart."""

    def __init__(
        self,
        logits: Float[Tensor, "B V"],
        generations: list[Generation],
        apart: Mapping[int, Tensor],
        tokens: Int[Tensor, " B"],
    ) -> None:
        self.tokens, self.told = tokens, list[int]()
        self._logits, self._generations, self._apart = logits, generations, apart
        self._parts = {
            i: _logprobs(logits[i], tokens[i : i + 1], g.sampling.logprobs)
            for i, g in enumerate(generations)
            if g.sampling.logprobs is not None
        }
        self._found = Fetched(torch.cat([tokens.double(), *self._parts.values()]) if self._parts else tokens)
        self._rows = {i: Fetched(_logs(logits[i])) for i, g in enumerate(generations) if g.watch is not None}

    def read(self) -> list[int | None]:
        """The next token of each row, None where the model gave no numbers. Log-probabilities that were asked for, and
        rows that somebody watches, wait in the generation."""
        told = self._found.read().tolist()
        at = len(self._generations)
        self.told = [int(token) for token in told[:at]]
        chosen = [self._sure(i, token) for i, token in enumerate(self.told)]
        for i, part in self._parts.items():
            own, *rest = told[at : at + len(part)]
            token, at = chosen[i], at + len(part)
            if token is not None:
                own = float(_logs(self._logits[i])[token]) if told[i] == TOO_FEW else own
                values, ids = rest[: len(rest) // 2], map(int, rest[len(rest) // 2 :])
                self._generations[i].next_logprob = TokenLogprob(token, own, dict(zip(ids, values, strict=True)))
        for i, row in self._rows.items():
            if chosen[i] is not None:
                self._generations[i].next_row = row.read().clone()  # whoever keeps it shall not keep pinned memory
        return chosen

    def _sure(self, i: int, token: int) -> int | None:
        self._generations[i].host_chooses = token == TOO_FEW
        if token == TOO_FEW:
            return _sample_slowly(self._apart.get(i, self._logits[i]).float(), self._generations[i])
        return None if token == NO_NUMBER else token


def _is_plain(g: Generation) -> bool:
    """Whether no processor looks at earlier tokens or single ids."""
    s = g.sampling
    penalties = s.presence_penalty or s.frequency_penalty or s.repetition_penalty != 1.0
    return not penalties and not s.logit_bias and (g.stop_allowed or not (g.stop_tokens or s.stop))


def _processed(row: Float[Tensor, " V"], g: Generation) -> Float[Tensor, " V"]:
    """The minimum length, bias and penalties, in vLLM's order."""
    s, scores, device = g.sampling, row[None].clone(), row.device
    if not g.stop_allowed and g.stop_tokens:
        scores.index_fill_(1, sent(sorted(g.stop_tokens), torch.long, device), float("-inf"))
    if s.logit_bias:  # transformers' own processor refuses token 0 in some versions
        scores.index_add_(1, *_by_token(s.logit_bias, device))
    if s.repetition_penalty != 1.0:
        seen = sent([g.prompt + g.tokens], torch.long, device)
        scores = hf.RepetitionPenaltyLogitsProcessor(float(s.repetition_penalty))(seen, scores)
    if g.tokens and (s.presence_penalty or s.frequency_penalty):
        less = {token: -s.presence_penalty - s.frequency_penalty * n for token, n in Counter(g.tokens).items()}
        scores.index_add_(1, *_by_token(less, device))
    return scores[0]


def _by_token(more: Mapping[int, float | int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens, and what is added to the score of each."""
    return sent(list(more), torch.long, device), sent([list(more.values())], torch.float32, device)


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


def _tokens(logits: Float[Tensor, "B V"], generations: list[Generation], rows: Sequence[int]) -> Int[Tensor, " B"]:
    """Of every row its likeliest token; the one that is drawn for those of `rows` that sample, which may be TOO_FEW;
    NO_NUMBER where the model gave none. The host waits for nothing."""
    device = logits.device
    sampled = [i for i in rows if not generations[i].sampling.greedy]
    asked = _asked([generations[i] for i in sampled], device)  # first of all: it goes while logits are computed
    own = sent(sampled, torch.long, device) if len(sampled) < len(logits) else None
    largest, tokens = logits.max(-1)  # NaN where the row has one
    if sampled:
        drawn = _drawn(logits if own is None else logits[own], [generations[i] for i in sampled], asked)
        tokens = drawn if own is None else tokens.index_copy(0, own, drawn)
    return tokens.where(~largest.isnan(), NO_NUMBER)


def _asked(generations: list[Generation], device: torch.device) -> Float[Tensor, "B 5"]:
    """Of every row: temperature, top k, top p, min p, and the uniform number that chooses."""
    rows = [(s.temperature, s.top_k, s.top_p, s.min_p, g.point()) for g in generations for s in (g.sampling,)]
    return sent(rows, torch.float64, device).view(-1, 5)


def _drawn(logits: Float[Tensor, "B V"], generations: list[Generation], asked: Float[Tensor, "B 5"]) -> Tensor:
    """A token for each row, chosen where the logits are; TOO_FEW where the candidates may not hold the nucleus."""
    options = [g.sampling for g in generations]
    every = [i for i, s in enumerate(options) if _is_open(s)] if logits.shape[-1] > CANDIDATES else []
    if len(every) == len(options):
        return _drawn_from_all(logits, asked)
    ids, weights, enough = nucleus(logits, options, asked)
    order = ids.argsort(-1)
    ids, weights = ids.gather(-1, order), weights.gather(-1, order)
    tokens = ids.gather(-1, _pick(weights, asked[:, 4:]))[:, 0].where(enough, TOO_FEW)
    if every:
        rows = sent(every, torch.long, logits.device)
        tokens = tokens.index_copy(0, rows, _drawn_from_all(logits[rows], asked[rows]))
    return tokens


def _is_open(s: SamplingParams) -> bool:
    """Whether every token may be drawn."""
    return s.top_k <= 0 and s.top_p >= 1 and s.min_p <= 0


def _drawn_from_all(logits: Float[Tensor, "B V"], asked: Float[Tensor, "B 5"]) -> Int[Tensor, " B"]:
    """Of whole vocabularies: a CPU goes row by row, which stays in its cache."""
    size = 1 if logits.device.type == "cpu" else max(1, len(logits))
    parts = zip(logits.split(size), asked.split(size), strict=True)
    return torch.cat([_pick((row / a[:, :1].float()).softmax(-1), a[:, 4:])[:, 0] for row, a in parts])


def _pick(weights: Float[Tensor, "B K"], points: Float[Tensor, "B 1"]) -> Int[Tensor, "B 1"]:
    """The first index at which the cumulative weight of a row passes its point of the total."""
    total = weights.double().cumsum(-1)
    at = torch.searchsorted(total, points * total[:, -1:], right=True)
    last = (torch.arange(weights.shape[-1], device=weights.device) * (weights > 0)).amax(-1, keepdim=True)
    return at.minimum(last)


def _sample_slowly(row: Float[Tensor, " V"], g: Generation) -> int:
    """By transformers' processors, over the whole vocabulary."""
    weights = warpers(g.sampling)(_NO_IDS, row[None].clone())[0].softmax(-1)
    return int(_pick(weights[None], _asked([g], row.device)[:, 4:]))


def nucleus(
    logits: Float[Tensor, "B V"], options: list[SamplingParams], asked: Float[Tensor, "B 5"]
) -> tuple[Int[Tensor, "B K"], Float[Tensor, "B K"], Bool[Tensor, " B"]]:
    """The likeliest candidates of every row with their weights, zero for those that the row's options leave out; and
    whether nothing but candidates is left by them."""
    values, ids = torch.topk(logits, min(CANDIDATES, logits.shape[-1]))
    count, whole = values.shape[-1], values.shape[-1] == logits.shape[-1]
    temperature, top_p, min_p = (asked[:, i : i + 1].to(torch.float32) for i in (0, 2, 3))
    top_k = asked[:, 1].long()
    scores = values.float() / temperature
    weights = (scores - scores[:, :1]).exp()
    ranked = ((top_k > 0) & (top_k <= count))[:, None]
    least = scores.gather(-1, (top_k.clamp(1, count) - 1)[:, None])
    keep = (scores >= least) | ~ranked
    enough = (ranked & (scores[:, -1:] < least)) | whole
    doubtful = (ranked & ~enough) | ((top_k > count)[:, None] & (not whole))
    pool = weights * keep
    inside = pool.sum(-1, keepdim=True)
    if any(s.top_p < 1 for s in options):
        total = inside if whole else inside.where(enough, _mass(logits, temperature, scores[:, :1], options))
        keep &= (pool.cumsum(-1) - pool < top_p * total) | (top_p >= 1)
        keep[:, 0] = True  # however little is asked for
        enough |= (top_p < 1) & (inside >= top_p * total)
    keep &= weights >= min_p
    enough |= (min_p > 0) & (weights[:, -1:] < min_p)
    return ids, weights * keep, (enough & ~doubtful)[:, 0]


def _mass(
    logits: Float[Tensor, "B V"],
    temperature: Float[Tensor, "B 1"],
    top: Float[Tensor, "B 1"],
    options: list[SamplingParams],
) -> Float[Tensor, "B 1"]:
    """The weight of the whole vocabulary, where a nucleus is a share of it. A CPU goes row by row, which stays in its
    cache, and leaves out rows that do not ask for it."""
    if logits.device.type != "cpu":
        return (logits.float() / temperature - top).exp().sum(-1, keepdim=True)
    found = torch.zeros_like(top)
    for i, s in enumerate(options):
        if s.top_p < 1 and not 0 < s.top_k <= CANDIDATES:
            found[i] = (logits[i].float() / temperature[i] - top[i]).exp().sum()
    return found


def _logs(row: Float[Tensor, " V"]) -> Float[Tensor, " V"]:
    return row.float().log_softmax(-1)


def _logprobs(row: Float[Tensor, " V"], token: Int[Tensor, " 1"], most: int) -> Float[Tensor, " K"]:
    """The log-probabilities of a token and of the likeliest, and which these are."""
    scores = _logs(row)
    values, ids = scores.topk(min(most, len(scores)))
    return torch.cat([scores.gather(0, token.clamp(min=0)), values, ids.double()])
