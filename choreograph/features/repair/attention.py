"""Repair strategy "attention": tokens that the header attends to (ProphetKV).

The header is first computed over the reused context, up to the layers that are observed. A token's score is the
attention that it receives there.
"""

from .strategy import ContextView, TokenRanges, select_by_score

BLOCK_SIZE = 4  # tokens that are selected together


def select_attended(view: ContextView, block_size: int = BLOCK_SIZE) -> list[TokenRanges]:
    """Select the tokens that receive the most attention from the header."""
    assert view.attention is not None, "a strategy with reads_prompt"
    return select_by_score(view, view.attention, block_size)
