"""Repair of reused KV, and its selection strategies."""

from .attention import select_attended
from .deviation import select_deviating
from .first import select_first
from .strategy import Strategy
from .unseen import select_unseen

REPAIR_STRATEGIES = {
    "first": Strategy(select_first),
    "unseen": Strategy(select_unseen),
    "deviation": Strategy(select_deviating, reads_kv=True),
    "attention": Strategy(select_attended, reads_prompt=True),
}
