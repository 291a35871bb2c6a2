"""Repair strategy "attention": tokens that the header attends to (ProphetKV).

The header runs once over the reused context, without writing to the KV cache. A token's score is the
attention it receives, summed over the late layers as in InfoFlow KV (arXiv:2603.05353).
"""

import torch

from .probe import probe_context
from .strategy import ContextView, TokenRanges, select_by_score

LATE_LAYERS = 0.6  # share of the layers before those that count


def select_attended(view: ContextView) -> list[TokenRanges]:
    """Select the tokens that receive the most attention from the header."""
    num_layers = len(view.core.cache_manager.pool.keys)
    num_context = sum(len(parent.tokens) for parent in view.parents)
    probe = probe_context(view, view.request.prompt, position=num_context, num_layers=num_layers, reads_context=True)
    return select_by_score(view, torch.stack(probe.scores[int(LATE_LAYERS * num_layers) :]).sum(dim=0).cpu())
