"""Sampling: HF logits processors and one random generator per message.

Rows are independent: a token depends only on its row's logits and generator, so a message samples
the same tokens alone and in a batch. Each token takes one uniform number, which is looked up in the
cumulative distribution in order of token id: rounding differences rarely change the result.

Top-p over the whole vocabulary needs a sort. The CANDIDATES most likely tokens suffice if they
contain the nucleus, which is checked with their exact probability mass; otherwise the HF processors
sample the row. All rows of a step are sampled together, on the logits' device.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers.generation import logits_process as hf

from ..attention.backend import to_device
from ..outputs import TokenLogprob
from ..request.decode_state import DecodeState
from ..sampling_params import SamplingParams

CANDIDATES = 512

ARGMAX_PARTS = 64  # of the vocabulary, on a GPU

NAN_LOGITS, NEEDS_FULL_VOCAB = -2, -1  # sentinels in place of token ids

_EMPTY_INPUT_IDS: Any = torch.empty(1, 0, dtype=torch.long)  # the warpers ignore it


def sample(logits: Float[Tensor, "B V"], decode_states: list[DecodeState]) -> "SampleOutput":
    """Sample one token per row on the logits' device, without synchronizing.

    Idempotent: random numbers are consumed only when the token is appended.
    """
    plain: list[int] = []
    processed: dict[int, Tensor] = {}
    forced: dict[int, int] = {}
    for i, state in enumerate(decode_states):
        if state.forced_tokens is not None:
            forced[i] = state.forced_tokens[len(state.tokens)]
        elif state.token_mask is None and _needs_no_processors(state):
            plain.append(i)
        else:
            processed[i] = _apply_penalties(logits[i].float(), state)
            if state.token_mask is not None:
                allowed = state.token_mask.allowed().to(logits.device, non_blocking=True)
                processed[i].masked_fill_(~allowed, float("-inf"))
    tokens = _sample_batch(logits, decode_states, plain)
    if processed:
        sampled = _sample_batch(
            torch.stack([*processed.values()]), [decode_states[i] for i in processed], range(len(processed))
        )
        tokens = tokens.index_copy(0, to_device(list(processed), torch.long, logits.device), sampled)
    if forced:
        rows, host_tokens = (
            to_device(list(values), torch.long, logits.device) for values in (forced.keys(), forced.values())
        )
        tokens = tokens.index_copy(0, rows, host_tokens).where(tokens != NAN_LOGITS, NAN_LOGITS)
    return SampleOutput(logits, decode_states, processed, tokens)


class SampleOutput:
    """Tokens being sampled on a device; `read` waits for them.

    Attributes:
        tokens: (B,) int64 on the device; NAN_LOGITS where the logits are NaN, NEEDS_FULL_VOCAB
            where the row must be sampled on the host.
        host_tokens: the same on the host, empty until `read`.

    Args:
        processed_rows: logits after penalties and bias, by row, where they differ from `logits`.
    """

    def __init__(
        self,
        logits: Float[Tensor, "B V"],
        decode_states: list[DecodeState],
        processed_rows: Mapping[int, Tensor],
        tokens: Int[Tensor, " B"],
    ) -> None:
        self.tokens, self.host_tokens = tokens, list[int]()
        self._logits, self._decode_states, self._processed_rows = logits, decode_states, processed_rows
        self._top_logprobs: dict[int, Tensor] = {}
        self._callback_logprobs: dict[int, AsyncHostCopy] = {}
        for i, state in enumerate(decode_states):
            if state.sampling.logprobs is not None:
                self._top_logprobs[i] = _logprobs(logits[i], tokens[i : i + 1], state.sampling.logprobs)
            if state.on_logprobs is not None:
                self._callback_logprobs[i] = AsyncHostCopy(_log_softmax(logits[i]))
        self._host_copy = AsyncHostCopy(
            torch.cat([tokens.double(), *self._top_logprobs.values()]) if self._top_logprobs else tokens
        )

    def read(self) -> list[int | None]:
        """Wait for the tokens; return one per row, None for NaN logits.

        Stores requested log-probabilities and callback rows in the decode states.
        """
        values = self._host_copy.read().tolist()
        offset, tokens = len(self._decode_states), list[int | None]()
        self.host_tokens = list(map(int, values[:offset]))
        for i, token in enumerate(self.host_tokens):
            state = self._decode_states[i]
            state.needs_host_sampling = token == NEEDS_FULL_VOCAB
            if state.needs_host_sampling:
                tokens.append(_sample_full_vocab(self._processed_rows.get(i, self._logits[i]).float(), state))
            else:
                tokens.append(None if token == NAN_LOGITS else token)
        for i, part in self._top_logprobs.items():
            logprob, *rest = values[offset : offset + len(part)]
            chosen, offset = tokens[i], offset + len(part)
            if chosen is not None:
                if self.host_tokens[i] == NEEDS_FULL_VOCAB:
                    logprob = float(_log_softmax(self._logits[i])[chosen])
                top = zip(map(int, rest[len(rest) // 2 :]), rest[: len(rest) // 2], strict=True)
                self._decode_states[i].next_logprob = TokenLogprob(chosen, logprob, dict(top))
        for i, row in self._callback_logprobs.items():
            if tokens[i] is not None:
                # cloned: callers may keep it, and must not keep pinned memory
                self._decode_states[i].pending_logprobs = row.read().clone()
        return tokens


def _needs_no_processors(state: DecodeState) -> bool:
    """True if sampling ignores earlier tokens and single token ids."""
    s = state.sampling
    penalties = s.presence_penalty or s.frequency_penalty or s.repetition_penalty != 1.0
    stop_allowed = not s.min_tokens or state.stop_allowed
    return not penalties and not s.logit_bias and (stop_allowed or not (state.stop_tokens or s.stop))


def _apply_penalties(row: Float[Tensor, " V"], state: DecodeState) -> Float[Tensor, " V"]:
    """Apply minimum length, bias and penalties, in vLLM's order."""
    stop_tokens = frozenset[int]() if state.stop_allowed else state.stop_tokens
    return state.penalties.apply(row, state.sampling, state.prompt, state.tokens, state.num_drafted, stop_tokens)


def logits_warpers(params: SamplingParams) -> hf.LogitsProcessorList:
    """Create the HF warpers for temperature, top-k, top-p and min-p."""
    warpers = hf.LogitsProcessorList([hf.TemperatureLogitsWarper(float(params.temperature))])
    if params.top_k > 0:
        warpers.append(hf.TopKLogitsWarper(int(params.top_k)))
    if params.top_p < 1:
        warpers.append(hf.TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        warpers.append(hf.MinPLogitsWarper(float(params.min_p)))
    return warpers


def _sample_batch(
    logits: Float[Tensor, "B V"], decode_states: list[DecodeState], rows: Sequence[int]
) -> Int[Tensor, " B"]:
    """Return a token per row: sampled for `rows`, else the argmax.

    Sampled tokens may be NEEDS_FULL_VOCAB; rows with NaN give NAN_LOGITS. Never synchronizes.
    """
    device, sampled, sampled_states = logits.device, list[int](), list[DecodeState]()
    for i in rows:
        if not decode_states[i].sampling.greedy:
            sampled.append(i)
            sampled_states.append(decode_states[i])
    if sampled:  # first: the copies overlap with the forward pass
        sampling_tensor = _sampling_tensor(sampled_states, device)
        row_index = to_device(sampled, torch.long, device) if len(sampled) < len(logits) else None
    largest, tokens = _largest(logits)  # NaN if the row contains NaN
    if sampled:
        sampled_tokens = _sample_truncated(
            logits if row_index is None else logits[row_index], sampled_states, sampling_tensor
        )
        tokens = sampled_tokens if row_index is None else tokens.index_copy(0, row_index, sampled_tokens)
    return tokens.where(~largest.isnan(), NAN_LOGITS)


def _largest(logits: Float[Tensor, "B V"]) -> tuple[Float[Tensor, " B"], Int[Tensor, " B"]]:
    """Return the largest logit of every row and its token."""
    if logits.device.type != "cpu" or logits.dtype != torch.float32:
        batch, vocabulary = logits.shape
        if vocabulary % ARGMAX_PARTS:
            return logits.max(-1)
        values, indices = logits.view(batch, ARGMAX_PARTS, -1).max(-1)  # one row alone would occupy one multiprocessor
        largest, part = values.max(-1)
        return largest, part * (vocabulary // ARGMAX_PARTS) + indices.gather(-1, part[:, None])[:, 0]
    tokens = torch.from_numpy(logits.numpy().argmax(-1))  # vectorized, unlike torch's: a tenth of the time
    return logits.gather(-1, tokens[:, None])[:, 0], tokens


def _sampling_tensor(decode_states: list[DecodeState], device: torch.device) -> Float[Tensor, "B 5"]:
    """Return temperature, top-k, top-p, min-p and uniform number per row, float64."""
    rows = [(s.temperature, s.top_k, s.top_p, s.min_p, g.next_uniform()) for g in decode_states for s in (g.sampling,)]
    return to_device(rows, torch.float64, device).view(-1, 5)


def _sample_truncated(
    logits: Float[Tensor, "B V"], decode_states: list[DecodeState], sampling_tensor: Float[Tensor, "B 5"]
) -> Tensor:
    """Sample one token per row on the logits' device.

    NEEDS_FULL_VOCAB for rows whose nucleus may exceed the candidates.
    """
    options = [g.sampling for g in decode_states]
    untruncated = [i for i, s in enumerate(options) if _is_untruncated(s)] if logits.shape[-1] > CANDIDATES else []
    if len(untruncated) == len(options):
        return _sample_full(logits, sampling_tensor)
    ids, weights, enough = top_candidates(logits, options, sampling_tensor)
    order = ids.argsort(-1)
    ids, weights = ids.gather(-1, order), weights.gather(-1, order)
    tokens = ids.gather(-1, _inverse_cdf(weights, sampling_tensor[:, 4:]))[:, 0].where(enough, NEEDS_FULL_VOCAB)
    if untruncated:
        rows = to_device(untruncated, torch.long, logits.device)
        tokens = tokens.index_copy(0, rows, _sample_full(logits[rows], sampling_tensor[rows]))
    return tokens


def _is_untruncated(params: SamplingParams) -> bool:
    """True if every token of the vocabulary may be sampled."""
    return params.top_k <= 0 and params.top_p >= 1 and params.min_p <= 0


def _sample_full(logits: Float[Tensor, "B V"], sampling_tensor: Float[Tensor, "B 5"]) -> Int[Tensor, " B"]:
    """Sample from the whole vocabulary.

    A CPU processes one row at a time, which stays in its cache.
    """
    size = 1 if logits.device.type == "cpu" else max(1, len(logits))
    parts = zip(logits.split(size), sampling_tensor.split(size), strict=True)
    return torch.cat([_inverse_cdf((row / a[:, :1].float()).softmax(-1), a[:, 4:])[:, 0] for row, a in parts])


def _inverse_cdf(weights: Float[Tensor, "B K"], uniforms: Float[Tensor, "B 1"]) -> Int[Tensor, "B 1"]:
    """Return the first index whose cumulative weight exceeds `uniforms` × total."""
    cdf = weights.double().cumsum(-1)
    index = torch.searchsorted(cdf, uniforms * cdf[:, -1:], right=True)
    last = (torch.arange(weights.shape[-1], device=weights.device) * (weights > 0)).amax(-1, keepdim=True)
    return index.minimum(last)


def _sample_full_vocab(row: Float[Tensor, " V"], state: DecodeState) -> int:
    """Sample one row with the HF warpers over the whole vocabulary."""
    weights = logits_warpers(state.sampling)(_EMPTY_INPUT_IDS, row[None].clone())[0].softmax(-1)
    return int(_inverse_cdf(weights[None], _sampling_tensor([state], row.device)[:, 4:]))


def top_candidates(
    logits: Float[Tensor, "B V"], options: list[SamplingParams], sampling_tensor: Float[Tensor, "B 5"]
) -> tuple[Int[Tensor, "B K"], Float[Tensor, "B K"], Bool[Tensor, " B"]]:
    """Return the most likely tokens of every row and their weights.

    Returns:
        ids: (B, K) token ids in order of probability.
        weights: (B, K) unnormalized, zero for tokens that the row's options exclude.
        enough: (B,) True if the options leave only candidates.
    """
    values, ids = torch.topk(logits, min(CANDIDATES, logits.shape[-1]))
    count, is_complete = values.shape[-1], values.shape[-1] == logits.shape[-1]
    temperature, top_p, min_p = (sampling_tensor[:, i : i + 1].to(torch.float32) for i in (0, 2, 3))
    top_k = sampling_tensor[:, 1].long()
    scores = values.float() / temperature
    weights = (scores - scores[:, :1]).exp()
    ranked = ((top_k > 0) & (top_k <= count))[:, None]
    min_score = scores.gather(-1, (top_k.clamp(1, count) - 1)[:, None])
    keep = (scores >= min_score) | ~ranked
    enough = (ranked & (scores[:, -1:] < min_score)) | is_complete
    uncertain = (ranked & ~enough) | ((top_k > count)[:, None] & (not is_complete))
    pool = weights * keep
    candidate_mass = pool.sum(-1, keepdim=True)
    if any(s.top_p < 1 for s in options):
        total = (
            candidate_mass
            if is_complete
            else candidate_mass.where(enough, _softmax_denominator(logits, temperature, scores[:, :1], options))
        )
        keep &= (pool.cumsum(-1) - pool < top_p * total) | (top_p >= 1)
        keep[:, 0] = True  # at least one token, for any top_p
        enough |= (top_p < 1) & (candidate_mass >= top_p * total)
    keep &= weights >= min_p
    enough |= (min_p > 0) & (weights[:, -1:] < min_p)
    return ids, weights * keep, (enough & ~uncertain)[:, 0]


def _softmax_denominator(
    logits: Float[Tensor, "B V"],
    temperature: Float[Tensor, "B 1"],
    max_score: Float[Tensor, "B 1"],
    options: list[SamplingParams],
) -> Float[Tensor, "B 1"]:
    """Return the total weight of the vocabulary, the denominator of top-p.

    A CPU processes one row at a time, which stays in its cache, and skips rows that do not need it.
    """
    if logits.device.type != "cpu":
        return (logits.float() / temperature - max_score).exp().sum(-1, keepdim=True)
    result = torch.zeros_like(max_score)
    for i, s in enumerate(options):
        if s.top_p < 1 and not 0 < s.top_k <= CANDIDATES:
            result[i] = (logits[i].float() / temperature[i] - max_score[i]).exp().sum()
    return result


def _log_softmax(row: Float[Tensor, " V"]) -> Float[Tensor, " V"]:
    return row.float().log_softmax(-1)


def _logprobs(row: Float[Tensor, " V"], token: Int[Tensor, " 1"], num_logprobs: int) -> Float[Tensor, " K"]:
    """Concatenate the token's log-probability, the top ones, and their token ids."""
    scores = _log_softmax(row)
    values, ids = scores.topk(min(num_logprobs, len(scores)))
    return torch.cat([scores.gather(0, token.clamp(min=0)), values, ids.double()])


class AsyncHostCopy:
    """Asynchronous copy of a tensor to host memory.

    The copy has the tensor's content at creation, in stream order.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._host, self._copy_done = tensor, None
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._copy_done = torch.cuda.Event()
            self._copy_done.record()

    def read(self) -> Tensor:
        """Wait for the copy and return it."""
        if self._copy_done is not None:
            self._copy_done.synchronize()
        return self._host
