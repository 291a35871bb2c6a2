"""Interface of the strategies that select what a repair computes."""

import math
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from ...core.core import EngineCore
from ...kv_cache.entry import KVSlice
from ...request.request import Request

TokenRanges = list[tuple[int, int]]  # half-open, ascending, not adjacent

OBSERVED_LAYERS = 0.5, 0.65  # first and end of the layers whose attention counts, as shares of all


class ParentView(NamedTuple):
    """One parent of a call that is to be repaired."""

    tokens: list[int]  # visible token ids
    position: int  # of the first one, where prefix mode would place it
    slices: tuple[KVSlice, ...]  # its KV at that position
    is_exact: bool  # its KV equals what prefix mode would compute here: nothing to repair


class ContextView(NamedTuple):
    """Context of a call, as a selection strategy sees it."""

    core: EngineCore
    request: Request  # the call that reads the context
    parents: list[ParentView]
    share: float  # of the tokens to recompute
    # (C,) attention that each context token receives from the call's prompt; None without `reads_prompt`
    attention: Tensor | None = None


class Strategy(NamedTuple):
    """Selection of the tokens to recompute."""

    select: Callable[[ContextView], list[TokenRanges]]  # ranges of every parent, relative to its first visible token
    reads_kv: bool = False  # the context must be complete and on the device
    reads_prompt: bool = False  # the prompt is computed over the context first, for `ContextView.attention`
    observed_layers: tuple[float, float] = OBSERVED_LAYERS  # of the prompt; those after them are not computed
    aligns: bool = False  # nothing is computed; attention to reused parents is corrected instead


def select_by_score(view: ContextView, scores: Tensor, block_size: int) -> list[TokenRanges]:
    """Select the blocks of tokens with the highest scores.

    Args:
        scores: (C,) one score for every context token, parents in order; those of exact parents
            are ignored.
        block_size: tokens of a parent that are selected together.

    Returns:
        Ranges of each parent with, together, `view.share` of the tokens that are not exact.
    """
    values = scores.tolist()
    blocks: list[tuple[float, int, int, int]] = []  # negative mean score, parent, start, end
    begin = budget = 0
    for index, parent in enumerate(view.parents):
        num_tokens = len(parent.tokens)
        if not parent.is_exact:
            budget += num_tokens
            for start in range(0, num_tokens, block_size):
                end = min(start + block_size, num_tokens)
                blocks.append((-sum(values[begin + start : begin + end]) / (end - start), index, start, end))
        begin += num_tokens
    remaining = math.ceil(view.share * budget)
    selected: list[TokenRanges] = [[] for _ in view.parents]
    for _, index, start, end in sorted(blocks):
        if remaining <= 0:
            break
        selected[index].append((start, min(end, start + remaining)))
        remaining -= end - start
    return [_merge(ranges) for ranges in selected]


def _merge(ranges: TokenRanges) -> TokenRanges:
    """Sort ranges and join adjacent ones."""
    merged: TokenRanges = []
    for start, end in sorted(ranges):
        if merged and merged[-1][1] == start:
            merged[-1] = merged[-1][0], end
        else:
            merged.append((start, end))
    return merged
