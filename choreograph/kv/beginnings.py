"""Finds encodings that begin as a new one will: the same context at the same places, the same first tokens.

Branches, voters and agents often start with equal headers over equal parents. The first of them is computed, the others
take its tokens over. Knows names and tokens, not calls.
"""

from collections.abc import Iterable

from .encoding import Encoding, Sight, common, content_key

LEAST = 4  # fewer tokens cost less to compute than to copy


class Beginnings:
    """Decodes by the name of what they see."""

    def __init__(self) -> None:
        self._of: dict[tuple[bytes, int], dict[int, Encoding]] = {}
        self._names: dict[int, tuple[bytes, int]] = {}

    def find(self, salt: str, tokens: list[int], start: int, context: Iterable[Sight]) -> Sight | None:
        """The longest beginning of `tokens`, never all of them, that exists or will with the next step."""
        best = None
        for other in self._of.get(_name(salt, start, context), {}).values():
            if other.borrows or not other.resident:
                continue
            known = max(other.promised if not other.encoded else 0, other.encoded)
            count = common(other.tokens, 0, known, tokens, 0, len(tokens) - 1)
            if count >= LEAST and (best is None or count > best.count):
                best = Sight(other, 0, count, start)
            if count == len(tokens) - 1:
                break  # none begins longer alike
        return best

    def add(self, salt: str, encoding: Encoding) -> None:
        name = _name(salt, encoding.start, encoding.context)
        self._of.setdefault(name, {})[encoding.id] = encoding
        self._names[encoding.id] = name

    def forget(self, encoding: Encoding) -> None:
        name = self._names.pop(encoding.id, None)
        if name is None:
            return
        del self._of[name][encoding.id]
        if not self._of[name]:
            del self._of[name]


def _name(salt: str, start: int, context: Iterable[Sight]) -> tuple[bytes, int]:
    """Keys lie rotated to where they were made, so the place itself is part of the name."""
    return content_key(salt, (), start, context), start
