"""Boundaries of turns in the token ids of a chat."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

_CHAT = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "three"},
]


class TurnBoundaries:
    """Special tokens at which turns start, or after which they end."""

    def __init__(self, starts: set[int], ends: set[int]) -> None:
        self._starts, self._ends = starts, ends

    @classmethod
    def of_tokenizer(cls, tokenizer: Any) -> "TurnBoundaries | None":
        """Learn the boundaries from a chat template; None without any."""
        special = set(tokenizer.get_added_vocab().values()) | set(tokenizer.all_special_ids)
        try:
            turns = [_render(tokenizer, _CHAT[: n + 1]) for n in range(len(_CHAT))]
        except Exception:  # no template, or one that refuses such a chat
            return None
        starts, ends = set[int](), set[int]()
        for shorter, longer in pairwise(turns):
            if longer[: len(shorter)] != shorter or len(longer) == len(shorter):
                return None
            if longer[len(shorter)] in special:
                starts.add(longer[len(shorter)])
            elif shorter[-1] in special:
                ends.add(shorter[-1])
            else:
                return None
        return cls(starts, ends) if starts or ends else None

    def split(self, tokens: Sequence[int]) -> list[int]:
        """Return the first token of each turn; one without turns."""
        bounds = [i for i, token in enumerate(tokens) if i and (token in self._starts or tokens[i - 1] in self._ends)]
        if bounds and bounds[0] == 1 and tokens[0] not in self._starts:
            bounds.pop(0)  # a token that opens every text, such as BOS, belongs to the first turn
        return [0, *bounds]


def _render(tokenizer: Any, chat: Sequence[dict[str, str]]) -> list[int]:
    result = tokenizer.apply_chat_template(list(chat), tokenize=True, return_dict=False)
    return [int(token) for token in result]
