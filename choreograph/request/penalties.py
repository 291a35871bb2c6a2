"""Penalties, bias and minimum length of a request, on the device.

They are kept between tokens. A token adds to them; nothing is computed again for the whole prompt, so its cost does not grow with the
number of generated tokens.
"""

from collections import Counter
from collections.abc import Collection, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..attention.backend import to_device
from ..sampling_params import SamplingParams


class TokenCounts:
    """Distinct tokens of a growing list, and how often each occurs."""

    def __init__(self, device: torch.device) -> None:
        self.num_tokens = 0  # counted so far
        self._index: dict[int, int] = {}  # of every distinct token
        self._ids = torch.empty(0, dtype=torch.long, device=device)  # (capacity,)
        self._counts = torch.empty(0, dtype=torch.float64, device=device)  # (capacity,)

    def extend(self, tokens: Sequence[int]) -> None:
        """Count further tokens."""
        if not tokens:
            return
        num_known = len(self._index)
        new_ids = self._add(self._index, tokens)
        if len(self._index) > len(self._ids):
            num_spare = 2 * len(self._index) - num_known
            self._ids = torch.cat([self._ids[:num_known], self._ids.new_zeros(num_spare)])
            self._counts = torch.cat([self._counts[:num_known], self._counts.new_zeros(num_spare)])
        self._ids[num_known : len(self._index)] = to_device(new_ids, torch.long, self._ids.device)
        self._count(self._counts, self._index, tokens)
        self.num_tokens += len(tokens)

    def read(self, drafted: Sequence[int] = ()) -> tuple[Int[Tensor, " K"], Float[Tensor, " K"]]:
        """Return distinct tokens and their numbers, drafted ones included."""
        num_known = len(self._index)
        ids, counts = self._ids[:num_known], self._counts[:num_known]
        if not drafted:
            return ids, counts
        index = {token: self._index[token] for token in drafted if token in self._index}
        others = list(dict.fromkeys(token for token in drafted if token not in index))
        index |= {token: num_known + number for number, token in enumerate(others)}
        ids = torch.cat([ids, to_device(others, torch.long, ids.device)])
        counts = torch.cat([counts, counts.new_zeros(len(others))])
        self._count(counts, index, drafted)
        return ids, counts

    @staticmethod
    def _add(index: dict[int, int], tokens: Sequence[int]) -> list[int]:
        new_ids = [token for token in dict.fromkeys(tokens) if token not in index]
        for token in new_ids:
            index[token] = len(index)
        return new_ids

    @staticmethod
    def _count(counts: Float[Tensor, " K"], index: dict[int, int], tokens: Sequence[int]) -> None:
        number_of = Counter(index[token] for token in tokens)
        places = to_device(list(number_of), torch.long, counts.device)
        counts.index_add_(0, places, to_device(list(number_of.values()), torch.float64, counts.device))


class Penalties:
    """What the penalties of one request keep; its drafted states share it."""

    def __init__(self) -> None:
        self._bias: tuple[Int[Tensor, " K"], Float[Tensor, "1 K"]] | None = None
        self._stop_ids: Int[Tensor, " S"] | None = None
        self._seen: TokenCounts | None = None  # prompt and generated tokens
        self._generated: TokenCounts | None = None

    def apply(
        self,
        row: Float[Tensor, " V"],
        sampling: SamplingParams,
        prompt: Sequence[int],
        tokens: Sequence[int],
        num_drafted: int,
        stop_tokens: Collection[int],
    ) -> Float[Tensor, " V"]:
        """Return logits after minimum length, bias and penalties, in vLLM's order.

        Args:
            row: unchanged.
            tokens: generated ones, then `num_drafted` that may be rejected.
            stop_tokens: that may not come yet.
        """
        scores, device = row[None].clone(), row.device
        if stop_tokens:
            if self._stop_ids is None:
                self._stop_ids = to_device(sorted(stop_tokens), torch.long, device)
            scores.index_fill_(1, self._stop_ids, float("-inf"))
        if sampling.logit_bias:  # transformers' processor rejects token 0 in some versions
            if self._bias is None:
                values = to_device([list(sampling.logit_bias.values())], torch.float32, device)
                self._bias = to_device(list(sampling.logit_bias), torch.long, device), values
            scores.index_add_(1, *self._bias)
        num_kept = len(tokens) - num_drafted
        drafted = tokens[num_kept:]
        if sampling.repetition_penalty != 1.0:
            seen = self._seen = self._seen or TokenCounts(device)
            seen.extend(prompt[seen.num_tokens :])
            seen.extend(tokens[seen.num_tokens - len(prompt) : num_kept])
            ids, _ = seen.read(drafted)
            old, penalty = scores[:, ids], float(sampling.repetition_penalty)
            scores[:, ids] = torch.where(old < 0, old * penalty, old / penalty)
        if tokens and (sampling.presence_penalty or sampling.frequency_penalty):
            generated = self._generated = self._generated or TokenCounts(device)
            generated.extend(tokens[generated.num_tokens : num_kept])
            ids, counts = generated.read(drafted)
            penalties = -sampling.presence_penalty - sampling.frequency_penalty * counts
            scores.index_add_(1, ids, penalties[None].float())
        return scores[0]
