"""How far a token was from being another one, which rounding in another batch may decide.

Engines that compute the same request in other batches or with other kernels agree up to rounding. Where two runs
differ, the margin of the first other token tells rounding from an error.
"""

from collections import Counter

import torch

from choreograph import Message, SamplingParams
from choreograph.request.decode_state import TokenMask

LIMIT = 1e-3  # in log-probability, or cumulative probability: far above rounding in float32, far below usual margins


class Margins:
    """Callback of `Message.on_logprobs` that notes the margin of every token.

    Sampled requests need a seed, `top_k` and none of `top_p`, `min_p` and `repetition_penalty`: others have margin infinity.
    """

    def __init__(self, message: Message, sampling: SamplingParams, mask: TokenMask | None = None) -> None:
        self.values: list[float] = []
        self._message, self._sampling, self._mask = message, sampling, mask
        self._generator = torch.Generator().manual_seed((sampling.seed or 0) % (1 << 63))
        message.on_logprobs(self)

    def __call__(self, row: torch.Tensor) -> None:
        self.values.append(self._margin(row.clone()))

    def _margin(self, row: torch.Tensor) -> float:
        sampling = self._sampling
        if sampling.repetition_penalty != 1 or sampling.top_p != 1 or sampling.min_p:
            return float("inf")
        earlier = self._message.progress().token_ids[: len(self.values)]
        for token, count in Counter(earlier).items():
            row[token] -= sampling.frequency_penalty * count + sampling.presence_penalty
        for token, bias in sampling.logit_bias.items():
            row[token] += bias
        if sampling.greedy:
            first, second = row.topk(2).values.tolist()
            return float(first - second)
        uniform = torch.rand(1, generator=self._generator, dtype=torch.float64)
        values, ids = row.topk(sampling.top_k + 1)
        weights = (values[:-1].double() / sampling.temperature).softmax(-1)
        edges = weights[ids[:-1].argsort()].cumsum(-1)[:-1]
        return min(float(values[-2] - values[-1]), float((edges - uniform).abs().min()) if len(edges) else 1.0)


def first_difference(tokens: list[int], others: list[int]) -> int:
    """Return the first index at which two lists differ, or the length of both."""
    pairs = enumerate(zip(tokens, others, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(tokens), len(others)))
