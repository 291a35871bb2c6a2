"""Repair strategy "deviation": tokens whose keys and values change most (CacheBlend).

The first layers run over the whole context, in which every token attends to all before it. In the
last of these layers the new keys and values are compared with the reused ones.
"""

import torch

from .probe import probe_context
from .strategy import ContextView, TokenRanges, select_by_score

BLOCK_SIZE = 4  # tokens that are selected together
CHECK_LAYER = 1  # layer 0 has the same keys and values in every context


def select_deviating(view: ContextView) -> list[TokenRanges]:
    """Select the tokens whose key and value change most."""
    layer = min(CHECK_LAYER, len(view.core.cache_manager.pool.keys) - 1)
    tokens = [token for parent in view.parents for token in parent.tokens]
    probe = probe_context(view, tokens, num_layers=layer + 1)
    change = torch.zeros(len(tokens), device=probe.keys[layer].device)
    for new, old in (
        (probe.keys[layer], probe.context_keys(layer)),
        (probe.values[layer], probe.context_values(layer)),
    ):
        change += (new.float() - old.float()).square().sum(dim=(1, 2))
    return select_by_score(view, change.cpu(), BLOCK_SIZE)
