"""Repair strategy "unseen": first tokens, in proportion to unseen context.

A parent's part grows with the number of tokens before it in the call that it did not attend to when it
was encoded: a repair shows it those. Nothing is computed to select.
"""

import math
from collections import defaultdict

from .strategy import ContextView, TokenRanges


def select_unseen(view: ContextView) -> list[TokenRanges]:
    """Select first tokens of each parent, in proportion to unseen context."""
    unseen = _count_unseen(view)
    lengths = [0 if parent.is_exact else len(parent.tokens) for parent in view.parents]
    selected: list[TokenRanges] = [[] for _ in lengths]
    remaining = math.ceil(view.share * sum(lengths))
    weight = sum(count * length for count, length in zip(unseen, lengths, strict=True))
    for index in sorted(range(len(lengths)), key=lambda i: -unseen[i]):  # what does not fit is left to the next ones
        own = unseen[index] * lengths[index]
        num_tokens = min(lengths[index], remaining, math.ceil(remaining * own / weight) if own else remaining)
        weight -= own
        remaining -= num_tokens
        if num_tokens:
            selected[index].append((0, num_tokens))
    return selected


def _count_unseen(view: ContextView) -> list[int]:
    """Count the preceding tokens that each parent did not attend to."""
    before, result = list[tuple[int, int, int]](), list[int]()  # entry, first token and end of each slice
    for parent in view.parents:
        own = [kv_slice for kv_slice in parent.slices if kv_slice.visible_in(0)]
        seen = defaultdict[int, list[tuple[int, int]]](list)
        for context in {kv_slice for one in own for kv_slice in one.entry.context if kv_slice.visible_in(0)}:
            seen[context.entry.id].append((context.token_start, context.token_start + context.num_tokens))
        num_seen = sum(
            max(0, min(end, seen_end) - max(start, seen_start))
            for entry_id, start, end in before
            for seen_start, seen_end in seen[entry_id]
        )
        result.append(max(0, sum(end - start for _, start, end in before) - num_seen))
        before += [(s.entry.id, s.token_start, s.token_start + s.num_tokens) for s in own]
    return result
