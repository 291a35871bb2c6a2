"""Where every token of a schema stands (Prompt Cache, section 3.3). Pure; knows tokens, not encodings.

Text is laid out in document order. The members of a union start at one place and the union is as long as its
longest member. What stands directly inside a module is one *piece*, encoded together and apart from all others;
so is what stands outside of modules (the anonymous piece, part of every prompt). A piece is one or more *runs* of
consecutive positions: where nested modules stand, it has a gap.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from ..errors import SchemaError
from .objects import Child, Module, Parameter, Role, Scaffold, Schema, Union, has_roles, modules, unions

Path = tuple[str, ...]


class Tokens(Protocol):
    """What a layout needs of a tokenizer and its chat template."""

    placeholder: int

    def text(self, text: str) -> list[int]: ...
    def beginning(self) -> list[int]: ...
    def turn(self, role: str, text: str, *, opening: bool, whole: bool) -> tuple[list[int], list[int]]: ...


@dataclass(frozen=True)
class Slot:
    """Positions start <= p < start + length that an argument takes over. default: its tokens, or None."""

    name: str
    start: int
    length: int
    default: tuple[int, ...] | None


@dataclass
class Run:
    """Tokens at the positions from `start` on."""

    start: int
    tokens: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass
class Piece:
    """The own text of one module, or the anonymous text (path ()). `start` to `end` spans nested modules too."""

    path: Path
    cache: bool
    start: int
    end: int = 0
    runs: list[Run] = field(default_factory=list)
    slots: dict[str, Slot] = field(default_factory=dict)

    def add(self, at: int, tokens: list[int]) -> int:
        if tokens:
            if not self.runs or self.runs[-1].end != at:
                self.runs.append(Run(at))
            self.runs[-1].tokens += tokens
        return at + len(tokens)

    @property
    def tokens(self) -> int:
        return sum(len(run.tokens) for run in self.runs)


@dataclass(frozen=True)
class Layout:
    """pieces by path, in document order. groups: paths of modules that a scaffold encodes together."""

    schema: Schema
    pieces: dict[Path, Piece]
    parents: dict[Path, Module | Schema]
    groups: list[frozenset[Path]]
    beginning: list[int]
    length: int
    talks: bool

    @property
    def fingerprint(self) -> str:
        """Names every token and its position."""
        runs = [(path, run.start, run.tokens) for path, piece in self.pieces.items() for run in piece.runs]
        return hashlib.sha256(repr(runs).encode()).hexdigest()[:16]

    @property
    def cached_tokens(self) -> int:
        """Tokens that are encoded once, placeholders included."""
        return sum(piece.tokens for piece in self.pieces.values() if piece.cache)


def lay_out(schema: Schema, tokens: Tokens, most: int) -> Layout:
    """Gives every piece its positions; a schema that is longer than the model's `most` positions is refused."""
    found = _Writer(tokens, schema, most).layout()
    if found.length > most:
        raise SchemaError(f"schema {schema.name!r} takes {found.length} positions; the model has {most}: shorten it")
    return found


class _Writer:
    """Walks a schema with a cursor."""

    def __init__(self, tokens: Tokens, schema: Schema, most: int) -> None:
        self._tokens = tokens
        self._schema = schema
        self._most = most
        self._pieces: dict[Path, Piece] = {}
        self._parents: dict[Path, Module | Schema] = {(): schema}
        self._groups: list[frozenset[Path]] = []
        self._beginning = tokens.beginning()

    def layout(self) -> Layout:
        anonymous = self._pieces[()] = Piece((), True, 0)
        end = anonymous.end = self._children(self._schema.children, anonymous, 0)
        talks = has_roles(self._schema.children)
        return Layout(self._schema, self._pieces, self._parents, self._groups, self._beginning, end, talks)

    def _children(self, children: tuple[Child, ...], piece: Piece, at: int) -> int:
        for child in children:
            at = self._child(child, piece, at)
        return at

    def _child(self, child: Child, piece: Piece, at: int) -> int:
        match child:
            case str():
                return piece.add(self._open(piece, at), self._tokens.text(child))
            case Parameter():
                return self._parameter(child, piece, self._open(piece, at))
            case Module():
                return self._module(child, piece, at)
            case Union():
                return max(self._module(member, piece, at) for member in child.members)
            case Role():
                return self._role(child, piece, at)
            case Scaffold():
                self._groups.append(frozenset((*piece.path, m.name) for m, _ in modules(child.children)))
                return self._children(child.children, piece, at)

    def _open(self, piece: Piece, at: int) -> int:
        """The beginning-of-sequence token stands in front of whatever text comes first; a turn brings its own."""
        return piece.add(at, self._beginning) if at == 0 else at

    def _module(self, module: Module, outer: Piece, at: int) -> int:
        path = (*outer.path, module.name)
        piece = self._pieces[path] = Piece(path, module.cache and outer.cache, at)
        self._parents[path] = module
        piece.end = self._children(module.children, piece, at)
        return piece.end

    def _parameter(self, parameter: Parameter, piece: Piece, at: int) -> int:
        if parameter.length > self._most:  # before so many placeholders are written
            raise SchemaError(
                f"parameter {parameter.name!r}: length={parameter.length}; the model has {self._most} positions: "
                "shorten it"
            )
        default = None if parameter.default is None else tuple(self._tokens.text(parameter.default))
        if default and len(default) > parameter.length:
            raise SchemaError(
                f"parameter {parameter.name!r}: its default has {len(default)} tokens, its length is {parameter.length}"
            )
        piece.slots[parameter.name] = Slot(parameter.name, at, parameter.length, default)
        return piece.add(at, [self._tokens.placeholder] * parameter.length)

    def _role(self, role: Role, piece: Piece, at: int) -> int:
        """The turn's header goes with the text that follows it, as the template would be tokenised."""
        first = role.children[0] if role.children and isinstance(role.children[0], str) else ""
        whole = len(role.children) == (1 if first else 0)
        header, footer = self._tokens.turn(role.name, first, opening=at == 0, whole=whole)
        at = piece.add(at, header)
        at = self._children(role.children[1:] if first else role.children, piece, at)
        return piece.add(at, footer)


def union_of(layout: Layout, path: Path) -> Union | None:
    """The union that a module is a member of."""
    level = layout.parents[path[:-1]].children
    return next((union for module, union in modules(level) if module.name == path[-1]), None)


def required_unions(layout: Layout, path: Path) -> Iterator[Union]:
    return (union for union in unions(layout.parents[path].children) if union.required)
