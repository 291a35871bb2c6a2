"""Repair strategy "first": the first tokens of every parent (LegoLink of EPIC).

Most of the difference between reused and recomputed KV lies at the seams, where the first tokens of
a message absorb the attention that belongs to the start of a prompt.
"""

import math

from .strategy import ContextView, TokenRanges


def select_first(view: ContextView) -> list[TokenRanges]:
    """Select the first `share` of each parent's tokens.

    The choice for a parent depends on that parent alone, so calls whose contexts have equal first
    parents share their repair.
    """
    return [[] if parent.is_exact else [(0, math.ceil(view.share * len(parent.tokens)))] for parent in view.parents]
