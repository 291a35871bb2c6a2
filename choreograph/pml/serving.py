"""What a prompt shows the model (Prompt Cache, section 3.4): cached runs, new text, where each stands. Pure.

New text between two imports starts where the first of them ends, with what is said in it, in the gap that the paper
assumes; text in front of the first import starts where the always present text before that ends; text behind all
imports starts after everything that is used. It may reach into positions that are taken: the paper leaves that open,
and it is legal.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ..errors import PromptError
from .layout import Layout, Path, Piece, Run, Slot, Tokens, required_unions, union_of
from .objects import Import, Prompt, Role, has_roles, modules


class Seen(NamedTuple):
    """Tokens first <= k < first + count of a run of a cached piece, the first of them at position `start`."""

    path: Path
    run: int
    first: int
    count: int  # type: ignore[assignment] # not tuple.count
    start: int


class New(NamedTuple):
    """Tokens to encode at the positions from `start` on."""

    start: int
    tokens: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True)
class Serving:
    """What a prompt consists of. parts: its new text, first what it says and then what it fills in, each with the
    position in front of which it stands as plain text; new: the same, with what touches as one. together: imported
    modules that a scaffold encodes in sight of one another, in document order. end: the first position behind all that
    is used. talks: an answer is a chat turn.
    """

    seen: list[Seen]
    parts: list[tuple[int, New]]
    together: dict[Path, tuple[Path, ...]]
    end: int
    talks: bool

    @cached_property
    def new(self) -> list[New]:
        return merged(one for _, one in self.parts)

    def linear(self, layout: Layout) -> list[int]:
        """The same prompt as plain text: all tokens in the order of their positions, and what is said in front of an
        import before it, however far it reaches."""
        parts = [(at, 0, list(one.tokens)) for at, one in self.parts]
        for one in self.seen:
            run = layout.pieces[one.path].runs[one.run]
            parts.append((one.start, 1, run.tokens[one.first : one.first + one.count]))
        return [token for _, _, tokens in sorted(parts, key=lambda part: part[:2]) for token in tokens]


def serve(prompt: Prompt, layout: Layout, tokens: Tokens) -> Serving:
    """Checks a prompt against its schema and places it. Raises PromptError."""
    if prompt.schema != layout.schema.name:
        raise PromptError(f"the prompt is for schema {prompt.schema!r}, not for {layout.schema.name!r}")
    chosen = _chosen(prompt, layout)
    filled = {path: _filled(layout.pieces[path], given, tokens) for path, given in chosen.items()}
    used = [layout.pieces[path] for path in layout.pieces if path in chosen]
    seen = [one for piece in used if piece.cache for one in _seen(piece, filled[piece.path])]
    opened = any(run.start == 0 for piece in used for run in piece.runs)
    beginning = New(0, () if opened else tuple(layout.beginning))
    parts = [(0, beginning), *_Placer(layout, used, beginning.end, tokens).place(prompt)]
    parts += [(one.start, one) for piece in used for one in _own_new(piece, filled[piece.path])]
    if not seen and not any(one.tokens for _, one in parts):
        raise PromptError("the prompt is empty: import a module or say something")
    talks = layout.talks or has_roles(prompt.children)
    end = max(*(one.start + one.count for one in seen), *(one.end for _, one in parts), 0)
    return Serving(seen, parts, _together(layout, chosen), end, talks)


# -- which modules ------------------------------------------------------------------------------------------


def _chosen(prompt: Prompt, layout: Layout) -> dict[Path, Mapping[str, str]]:
    """Every imported module with its arguments; the anonymous piece with the prompt's own."""
    chosen: dict[Path, Mapping[str, str]] = {(): prompt.arguments}
    _choose(prompt, (), layout, chosen)
    for path in chosen:
        for union in required_unions(layout, path):
            if not any((*path, member.name) in chosen for member in union.members):
                names = ", ".join(member.name for member in union.members)
                raise PromptError(f"{_name(path)}: one of {names} is required: import it")
    return chosen


def _choose(level: Prompt | Import, path: Path, layout: Layout, chosen: dict[Path, Mapping[str, str]]) -> None:
    for child in level.children:
        if not isinstance(child, Import):
            continue
        inner = (*path, child.name)
        if inner not in layout.pieces:
            raise PromptError(_unknown(child.name, path, layout))
        if inner in chosen:
            raise PromptError(f"{_name(path)}: {child.name!r} is imported twice: remove one")
        union = union_of(layout, inner)
        for other in union.members if union else ():
            if (*path, other.name) in chosen:
                raise PromptError(f"{_name(path)}: {other.name!r} and {child.name!r} exclude each other: import one")
        chosen[inner] = child.arguments
        _choose(child, inner, layout, chosen)


def _unknown(name: str, path: Path, layout: Layout) -> str:
    elsewhere = [p for p in layout.pieces if p and p[-1] == name]
    if len(elsewhere) == 1:
        nested = "".join(f"<{n}>" for n in elsewhere[0][:-1]) + f"<{name}/>"
        return f"{_name(path)} has no module {name!r}; it stands inside another one: write {nested}..."
    if elsewhere:
        places = ", ".join("/".join(p) for p in elsewhere)
        return f"{_name(path)}: {name!r} is ambiguous, it may be {places}: nest it in the one you mean"
    known = [m.name for m, _ in modules(layout.parents[path].children)]
    return f"{_name(path)} has no module {name!r}; it has {known or 'none'} (text that starts with < goes into CDATA)"


def _name(path: Path) -> str:
    return f"module {'/'.join(path)!r}" if path else "the schema"


# -- arguments ----------------------------------------------------------------------------------------------


def _filled(piece: Piece, given: Mapping[str, str], tokens: Tokens) -> list[tuple[Slot, tuple[int, ...]]]:
    """Every slot of a piece with the tokens that take it over."""
    for name in given:
        if name not in piece.slots:
            raise PromptError(f"{_name(piece.path)}: no parameter {name!r}; it has {list(piece.slots) or 'none'}")
    filled = []
    for slot in piece.slots.values():
        argument = tuple(tokens.text(given[slot.name])) if slot.name in given else slot.default
        if argument is None:
            raise PromptError(f'{_name(piece.path)}: parameter {slot.name!r} needs an argument: {slot.name}="..."')
        if len(argument) > slot.length:
            raise PromptError(
                f"{_name(piece.path)}: the argument {slot.name}={given[slot.name]!r} has {len(argument)} tokens, "
                f"its parameter holds {slot.length}: shorten it or raise length"
            )
        filled.append((slot, argument))
    return filled


def _seen(piece: Piece, filled: list[tuple[Slot, tuple[int, ...]]]) -> Iterable[Seen]:
    """The runs of a cached piece without its slots: placeholders stand in for text that now is there."""
    for index, run in enumerate(piece.runs):
        for first, last in _between_slots(run, filled):
            yield Seen(piece.path, index, first, last - first, run.start + first)


def _own_new(piece: Piece, filled: list[tuple[Slot, tuple[int, ...]]]) -> Iterable[New]:
    """Arguments in their slots, and all text of a piece that is not cached."""
    for slot, argument in filled:
        if argument:
            yield New(slot.start, argument)
    if not piece.cache:
        for run in piece.runs:
            for first, last in _between_slots(run, filled):
                yield New(run.start + first, tuple(run.tokens[first:last]))


def _between_slots(run: Run, filled: list[tuple[Slot, tuple[int, ...]]]) -> Iterable[tuple[int, int]]:
    at = 0
    for slot, _ in sorted(filled, key=lambda one: one[0].start):
        if run.start <= slot.start < run.end:
            if slot.start - run.start > at:
                yield at, slot.start - run.start
            at = slot.start - run.start + slot.length
    if at < len(run.tokens):
        yield at, len(run.tokens)


def _together(layout: Layout, chosen: Mapping[Path, object]) -> dict[Path, tuple[Path, ...]]:
    """The scaffolds that are imported as a whole: of each union one member, of the rest all."""
    together: dict[Path, tuple[Path, ...]] = {}
    for group in reversed(layout.groups):  # an outer scaffold has the last word
        here = [path for path in layout.pieces if path in group and path in chosen]
        missing = [path for path in group if path not in chosen]
        whole = all((u := union_of(layout, p)) and any((*p[:-1], m.name) in chosen for m in u.members) for p in missing)
        if whole and len(here) > 1:
            inside = [p for p in layout.pieces if p in chosen and any(p[: len(h)] == h for h in here)]
            members = tuple(path for path in inside if layout.pieces[path].cache)
            together |= dict.fromkeys(members, members)
    return together


# -- new text -----------------------------------------------------------------------------------------------


class _Placer:
    """Gives the prompt's own text its positions, in the order of the prompt: from `first` on, behind a
    beginning-of-sequence token that the prompt encodes itself."""

    def __init__(self, layout: Layout, used: list[Piece], first: int, tokens: Tokens) -> None:
        self._layout = layout
        self._used = used
        self._first = first
        self._said: list[tuple[Path, int, New]] = []  # with the import that it stands in, and what `place` gives
        self._tokens = tokens
        self._opening = not first and not any(piece.runs for piece in used)

    def place(self, prompt: Prompt) -> list[tuple[int, New]]:
        """Each text with the end of what it is said behind: of texts in a row, of the first."""
        self._walk(prompt, ())
        return [(behind, text) for _, behind, text in self._said]

    def _walk(self, level: Prompt | Import, path: Path) -> None:
        last = max((i for i, child in enumerate(level.children) if isinstance(child, Import)), default=-1)
        before: Path | None = None  # the import in front
        behind = 0
        at: int | None = None  # where the text in front ends, if nothing was imported since
        for index, child in enumerate(level.children):
            if isinstance(child, Import):
                before, at = (*path, child.name), None
                self._walk(child, before)
                continue
            if at is None:
                after = path if index > last else before
                behind = max(self._first, self._front(path) if after is None else self._end(after))
                at = max(behind, *self._said_ends(after), 0)
            text = New(at, tuple(self._text(child)))
            self._said.append((path, behind, text))
            self._opening, at = False, text.end

    def _text(self, child: str | Role) -> list[int]:
        if isinstance(child, str):
            return (self._tokens.beginning() if self._opening else []) + self._tokens.text(child)
        text = "".join(part for part in child.children if isinstance(part, str))
        header, footer = self._tokens.turn(child.name, text, opening=self._opening, whole=True)
        return header + footer

    def _end(self, path: Path) -> int:
        """Where a used piece and all that is nested in it ends."""
        return max((run.end for p in self._inside(path) for run in p.runs), default=self._layout.pieces[path].start)

    def _front(self, path: Path) -> int:
        """Where a level's own text up to its first import ends."""
        level = self._layout.pieces[path]
        first = min(piece.start for piece in self._inside(path) if piece is not level)
        ends = (min(run.end, first) for run in level.runs if run.start < first)  # an empty import leaves no gap
        return max(ends, default=level.start)

    def _said_ends(self, path: Path | None) -> list[int]:
        """Where texts end that are said in an import, however deep."""
        return [text.end for inside, _, text in self._said if path is not None and inside[: len(path)] == path]

    def _inside(self, path: Path) -> list[Piece]:
        """A used piece and those nested in it."""
        return [piece for piece in self._used if piece.path[: len(path)] == path]


def merged(new: Iterable[New]) -> list[New]:
    """By position, neighbours joined: fewer calls, and later text sees earlier text."""
    joined: list[New] = []
    for one in sorted(new, key=lambda one: one.start):
        if not one.tokens:
            continue
        if joined and joined[-1].end == one.start:
            joined[-1] = New(joined[-1].start, joined[-1].tokens + one.tokens)
        else:
            joined.append(one)
    return joined
