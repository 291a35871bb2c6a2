"""Repair strategy "attention": tokens that the header attends to (ProphetKV).

The header runs once over the reused context, without writing to the KV cache. A token's score is the
attention it receives, summed over layers.
"""

import torch

from .probe import probe_context
from .strategy import ContextView, TokenRanges, select_by_score


def select_attended(view: ContextView) -> list[TokenRanges]:
    """Select the tokens that receive the most attention from the header."""
    num_layers = len(view.core.cache_manager.pool.keys)
    num_context = sum(len(parent.tokens) for parent in view.parents)
    probe = probe_context(view, view.request.prompt, position=num_context, num_layers=num_layers, reads_context=True)
    return select_by_score(view, torch.stack(probe.scores).sum(dim=0).cpu())
