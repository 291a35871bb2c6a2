"""Repair strategy "attention": tokens that the header attends to (ProphetKV).

The header is first computed over the reused context, in a step with other requests. A token's score is the
attention it receives, summed over the late layers as in InfoFlow KV (arXiv:2603.05353).
"""

from .strategy import ContextView, TokenRanges, select_by_score


def select_attended(view: ContextView) -> list[TokenRanges]:
    """Select the tokens that receive the most attention from the header."""
    assert view.attention is not None, "a strategy with reads_prompt"
    return select_by_score(view, view.attention)
