"""Log-probabilities of prompt tokens, given what is read before each.

The tokens that a decode computes itself get their logits in the step that computes them. The tokens of its context
were computed earlier, by other requests. Each of them is computed once more as a query at its place, which attends to
the keys and values of the context up to itself as they are in the cache: reused ones as they were encoded, repaired
ones as they were computed again. These rows write to the null page, so no entry changes and none is added.

Scores are in order of the prompt. A preempted request continues after the last one.
"""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..attention.backend import to_device
from ..errors import RequestFailedError
from ..kv_cache.entry import KVSlice, in_order
from ..outputs import TokenLogprob
from ..request.request import Request
from .batch import Batch, ScoredRows

MAX_LOGITS = 1 << 24  # of the scored rows of a step: 64 MB in float32
BLOCK_ROWS = 32  # rows whose log-probabilities are in memory at once


class PromptScorer:
    """Scores of one decode's prompt, in order.

    The prompt is everything that the decode reads before its first token: context and header.

    Args:
        num_top: most likely tokens to report with each token.
    """

    def __init__(self, num_top: int, vocab_size: int) -> None:
        self.num_top = num_top
        self.scores: list[TokenLogprob | None] = [None]  # nothing precedes the first token
        self.num_scored = 1  # tokens
        self.num_tokens: int | None = None  # of the prompt; None before the request is admitted
        self._max_rows = max(1, MAX_LOGITS // vocab_size)

    @property
    def is_complete(self) -> bool:
        return self.num_tokens is not None and self.num_scored >= self.num_tokens

    def drop(self) -> None:
        """Free the memory of the scores, which were read."""
        self.scores = []

    def plan_rows(self, request: Request, batch: Batch, token_budget: int) -> tuple[int, int]:
        """Return how many queries and own tokens the step computes.

        The request is admitted. The own tokens follow after all of the context. Both are 0 if the step has no room for more logits.
        """
        if self.num_tokens is None:
            self.num_tokens = _num_context(request.context) + len(request.entry.tokens) - request.num_generated
        if self.is_complete:
            return 0, min(request.num_pending_tokens, token_budget)
        if request.id in batch.scored:
            return 0, 0
        num_rows = min(token_budget, self._max_rows - sum(len(scored.rows) for scored in batch.scored.values()))
        num_queries = max(0, min(num_rows, _num_context(request.context) - self.num_scored + 1))
        return num_queries, max(0, min(request.num_pending_tokens, num_rows - num_queries))

    def add_rows(self, request: Request, batch: Batch, num_queries: int) -> None:
        """Append queries to a batch, after the request's own tokens in it."""
        if self.is_complete:
            return
        chunk, first_query = batch.chunks[-1], len(batch.tokens)
        start = self.num_scored - 1  # prompt token before the next one that is scored
        context = list(_context_tokens(request.context, start, start + num_queries + 1))
        for token, position in context[:num_queries]:
            batch.tokens.append(token)
            batch.positions.append(position)
        batch.slots += [0] * num_queries  # of the null page
        batch.models += [request.entry.model] * num_queries
        targets, rows = [token for token, _ in context[1:]], list(range(first_query, first_query + num_queries))
        num_context, own = _num_context(request.context), request.entry.tokens
        assert chunk.token_start <= max(0, start - num_context), "own tokens were computed before they were scored"
        if len(targets) < num_queries:
            targets.append(own[0])
        for token in range(max(chunk.token_start, start - num_context), chunk.token_end):
            if num_context + token + 1 < self.num_tokens:  # type: ignore[operator]
                targets.append(own[token + 1])
                rows.append(chunk.q_start + token - chunk.token_start)
        if rows:
            context_range = start, start + num_queries
            batch.scored[request.id] = ScoredRows(request, targets[: len(rows)], rows, first_query, context_range)

    def record(self, targets: list[int], logits: Float[Tensor, "R V"]) -> None:
        """Append the scores of the next tokens."""
        scores = score_tokens(targets, logits, self.num_top)
        self.scores += scores  # all or none: a step that raises is computed again
        self.num_scored += len(scores)


def score_tokens(tokens: list[int], logits: Float[Tensor, "R V"], num_top: int) -> list[TokenLogprob]:
    """Return one token's score for each row, and the likeliest tokens.

    Everything is copied to the host at once.

    Raises:
        RequestFailedError: if there are NaN logits.
    """
    targets = to_device(tokens, torch.long, logits.device)
    blocks = zip(targets.split(BLOCK_ROWS), logits.split(BLOCK_ROWS), strict=True)
    rows, result = torch.cat([_score_block(*block, num_top) for block in blocks]).tolist(), []
    for token, (logprob, rank, *top) in zip(tokens, rows, strict=True):
        if logprob != logprob:
            raise RequestFailedError("the model gave NaN instead of logits")
        ids, values = map(int, top[len(top) // 2 :]), top[: len(top) // 2]
        result.append(TokenLogprob(token, logprob, dict(zip(ids, values, strict=True)), int(rank)))
    return result


def _score_block(tokens: Int[Tensor, " R"], logits: Float[Tensor, "R V"], num_top: int) -> Float[Tensor, "R N"]:
    """Concatenate log-probability and rank of tokens, and the top ones."""
    scores = logits.float().log_softmax(-1)
    own = scores.gather(-1, tokens[:, None])
    ranks = (scores > own).sum(-1, keepdim=True) + 1
    values, ids = scores.topk(min(num_top, scores.shape[-1]))
    return torch.cat([own.double(), ranks.double(), values.double(), ids.double()], dim=-1)


def record_scores(batch: Batch, logits: Float[Tensor, "R V"]) -> Float[Tensor, "B V"]:
    """Record the scores of a batch; return the sampled rows' logits."""
    num_sampled = end = len(batch.sampled_rows)
    for scored in batch.scored.values():
        start, end = end, end + len(scored.rows)
        state = scored.request.decode_state
        assert state is not None and state.prompt_scorer is not None
        state.prompt_scorer.record(scored.targets, logits[start:end])
    return logits[:num_sampled]


def _visible(context: Sequence[KVSlice]) -> Iterator[KVSlice]:
    """Yield slices that together have every context token once, in order."""
    return (kv_slice for kv_slice in in_order(context) if kv_slice.visible_in(0))


def _num_context(context: Sequence[KVSlice]) -> int:
    return sum(kv_slice.num_tokens for kv_slice in _visible(context))


def _context_tokens(context: Sequence[KVSlice], start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield token id and position of the context tokens [start, end)."""
    index = 0  # of the slice's first token
    for kv_slice in _visible(context):
        first, last = max(start - index, 0), min(end - index, kv_slice.num_tokens)
        for offset in range(first, last):
            yield kv_slice.entry.tokens[kv_slice.token_start + offset], kv_slice.position + offset
        index += kv_slice.num_tokens
