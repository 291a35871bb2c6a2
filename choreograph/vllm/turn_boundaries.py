"""Boundaries of turns in the token ids of a chat."""

from collections.abc import Sequence
from typing import Any

_MARKS = ("Xone", "Xtwo", "Xthree")
_CHAT = [{"role": role, "content": mark} for role, mark in zip(("user", "assistant", "user"), _MARKS, strict=True)]


class TurnBoundaries:
    """Special tokens at which turns start, or after which they end."""

    def __init__(self, starts: set[int], ends: set[int]) -> None:
        self._starts, self._ends = starts, ends

    @classmethod
    def of_tokenizer(cls, tokenizer: Any) -> "TurnBoundaries | None":
        """Learn the boundaries from a chat template; None without any."""
        try:
            special = set(tokenizer.get_added_vocab().values()) | set(tokenizer.all_special_ids)
            before, _, later, _ = _pieces(tokenizer, _CHAT, _MARKS)
            _, footer = _pieces(tokenizer, _CHAT[:1], _MARKS[:1])
            _, opening = _pieces(tokenizer, _CHAT[:1], _MARKS[:1], add_generation_prompt=True)
        except Exception:  # no template, or one that refuses or changes such a chat
            return None
        footer = footer[: _common(footer, opening)]  # of a user's turn; templates may write more at the end of a chat
        starts, ends = set[int](), set[int]()
        header = later[len(later) - _common(later[::-1], before[::-1]) :]  # of a user's turn, perhaps behind a footer
        while header and header[0] in footer:
            header = header[1:]
        for tokens, end in ((opening[len(footer) :], footer), (header, later[: len(later) - len(header)])):
            if start := next((token for token in tokens if token in special), None):
                starts.add(start)
            elif end and end[-1] in special:
                ends.add(end[-1])
            else:
                return None
        return cls(starts, ends)

    def split(self, tokens: Sequence[int]) -> list[int]:
        """Return the first token of each turn; one without turns."""
        bounds = [i for i, token in enumerate(tokens) if i and (token in self._starts or tokens[i - 1] in self._ends)]
        if bounds and bounds[0] == 1 and tokens[0] not in self._starts:
            bounds.pop(0)  # a token that opens every text, such as BOS, belongs to the first turn
        return [0, *bounds]


def _pieces(tokenizer: Any, chat: Sequence[dict[str, str]], marks: Sequence[str], **options: Any) -> list[list[int]]:
    """Return the token ids before, between and after the contents of turns."""
    text = tokenizer.apply_chat_template(list(chat), tokenize=False, **options)
    pieces = []
    for mark in marks:
        piece, _, text = text.partition(mark)
        pieces.append(piece)
    return [list(tokenizer.encode(piece, add_special_tokens=False)) for piece in (*pieces, text)]


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many tokens two texts begin with."""
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
