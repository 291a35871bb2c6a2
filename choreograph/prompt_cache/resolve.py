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
from .layout import (
    Layout,
    ModuleLayout,
    ModulePath,
    ParameterSlot,
    TokenizerProtocol,
    TokenRun,
    enclosing_union,
    required_unions,
)
from .schema import Import, Prompt, Role, has_roles, modules


class CachedRange(NamedTuple):
    """Tokens first <= k < first + count of a run of a cached piece, the first of them at position `start`."""

    path: ModulePath
    run_index: int
    token_start: int
    num_tokens: int
    position: int


class NewText(NamedTuple):
    """Tokens to encode at the positions from `start` on."""

    start: int
    tokens: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True)
class ResolvedPrompt:
    """What a prompt consists of. parts: its new text, first what it says and then what it fills in, each with the
    position in front of which it stands as plain text; new: the same, with what touches as one. together: imported
    modules that a scaffold encodes in sight of one another, in document order. end: the first position behind all that
    is used. talks: an answer is a chat turn.
    """

    cached: list[CachedRange]
    new_parts: list[tuple[int, NewText]]
    scaffolds: dict[ModulePath, tuple[ModulePath, ...]]
    end: int
    is_chat: bool

    @cached_property
    def new_texts(self) -> list[NewText]:
        return merge_adjacent(one for _, one in self.new_parts)

    def flatten(self, layout: Layout) -> list[int]:
        """The same prompt as plain text: all tokens in the order of their positions, and what is said in front of an
        import before it, however far it reaches."""
        parts = [(at, 0, list(one.tokens)) for at, one in self.new_parts]
        for one in self.cached:
            run = layout.modules[one.path].runs[one.run_index]
            parts.append((one.position, 1, run.tokens[one.token_start : one.token_start + one.num_tokens]))
        return [token for _, _, tokens in sorted(parts, key=lambda part: part[:2]) for token in tokens]


def resolve_prompt(prompt: Prompt, layout: Layout, tokenizer: TokenizerProtocol) -> ResolvedPrompt:
    """Checks a prompt against its schema and places it. Raises PromptError."""
    if prompt.schema != layout.schema.name:
        raise PromptError(f"the prompt is for schema {prompt.schema!r}, not for {layout.schema.name!r}")
    chosen = _select_modules(prompt, layout)
    filled = {path: _bind_arguments(layout.modules[path], given, tokenizer) for path, given in chosen.items()}
    used = [layout.modules[path] for path in layout.modules if path in chosen]
    seen = [one for piece in used if piece.cache for one in _cached_ranges(piece, filled[piece.path])]
    opened = any(run.start == 0 for piece in used for run in piece.runs)
    beginning = NewText(0, () if opened else tuple(layout.bos_ids))
    parts = [(0, beginning), *_TextPlacer(layout, used, beginning.end, tokenizer).place(prompt)]
    parts += [(one.start, one) for piece in used for one in _uncached_text(piece, filled[piece.path])]
    if not seen and not any(one.tokens for _, one in parts):
        raise PromptError("the prompt is empty: import a module or say something")
    talks = layout.is_chat or has_roles(prompt.children)
    end = max(*(one.position + one.num_tokens for one in seen), *(one.end for _, one in parts), 0)
    return ResolvedPrompt(seen, parts, _complete_scaffolds(layout, chosen), end, talks)


# -- which modules ------------------------------------------------------------------------------------------


def _select_modules(prompt: Prompt, layout: Layout) -> dict[ModulePath, Mapping[str, str]]:
    """Every imported module with its arguments; the anonymous piece with the prompt's own."""
    chosen: dict[ModulePath, Mapping[str, str]] = {(): prompt.arguments}
    _collect_imports(prompt, (), layout, chosen)
    for path in chosen:
        for union in required_unions(layout, path):
            if not any((*path, member.name) in chosen for member in union.members):
                names = ", ".join(member.name for member in union.members)
                raise PromptError(f"{_describe_path(path)}: one of {names} is required: import it")
    return chosen


def _collect_imports(
    level: Prompt | Import, path: ModulePath, layout: Layout, selected: dict[ModulePath, Mapping[str, str]]
) -> None:
    for child in level.children:
        if not isinstance(child, Import):
            continue
        inner = (*path, child.name)
        if inner not in layout.modules:
            raise PromptError(_unknown_module_message(child.name, path, layout))
        if inner in selected:
            raise PromptError(f"{_describe_path(path)}: {child.name!r} is imported twice: remove one")
        union = enclosing_union(layout, inner)
        for other in union.members if union else ():
            if (*path, other.name) in selected:
                raise PromptError(
                    f"{_describe_path(path)}: {other.name!r} and {child.name!r} exclude each other: import one"
                )
        selected[inner] = child.arguments
        _collect_imports(child, inner, layout, selected)


def _unknown_module_message(name: str, path: ModulePath, layout: Layout) -> str:
    elsewhere = [p for p in layout.modules if p and p[-1] == name]
    if len(elsewhere) == 1:
        nested = "".join(f"<{n}>" for n in elsewhere[0][:-1]) + f"<{name}/>"
        return f"{_describe_path(path)} has no module {name!r}; it stands inside another one: write {nested}..."
    if elsewhere:
        places = ", ".join("/".join(p) for p in elsewhere)
        return f"{_describe_path(path)}: {name!r} is ambiguous, it may be {places}: nest it in the one you mean"
    known = [m.name for m, _ in modules(layout.nodes[path].children)]
    return f"{_describe_path(path)} has no module {name!r}; it has {known or 'none'} (text that starts with < goes into CDATA)"


def _describe_path(path: ModulePath) -> str:
    return f"module {'/'.join(path)!r}" if path else "the schema"


# -- arguments ----------------------------------------------------------------------------------------------


def _bind_arguments(
    module_layout: ModuleLayout, arguments: Mapping[str, str], tokenizer: TokenizerProtocol
) -> list[tuple[ParameterSlot, tuple[int, ...]]]:
    """Every slot of a piece with the tokens that take it over."""
    for name in arguments:
        if name not in module_layout.parameter_slots:
            raise PromptError(
                f"{_describe_path(module_layout.path)}: no parameter {name!r}; it has {list(module_layout.parameter_slots) or 'none'}"
            )
    filled = []
    for slot in module_layout.parameter_slots.values():
        argument = tuple(tokenizer.encode_text(arguments[slot.name])) if slot.name in arguments else slot.default
        if argument is None:
            raise PromptError(
                f'{_describe_path(module_layout.path)}: parameter {slot.name!r} needs an argument: {slot.name}="..."'
            )
        if len(argument) > slot.length:
            raise PromptError(
                f"{_describe_path(module_layout.path)}: the argument {slot.name}={arguments[slot.name]!r} has {len(argument)} tokens, "
                f"its parameter holds {slot.length}: shorten it or raise length"
            )
        filled.append((slot, argument))
    return filled


def _cached_ranges(
    module_layout: ModuleLayout, bound_slots: list[tuple[ParameterSlot, tuple[int, ...]]]
) -> Iterable[CachedRange]:
    """The runs of a cached piece without its slots: placeholders stand in for text that now is there."""
    for index, run in enumerate(module_layout.runs):
        for first, last in _fixed_ranges(run, bound_slots):
            yield CachedRange(module_layout.path, index, first, last - first, run.start + first)


def _uncached_text(
    module_layout: ModuleLayout, bound_slots: list[tuple[ParameterSlot, tuple[int, ...]]]
) -> Iterable[NewText]:
    """Arguments in their slots, and all text of a piece that is not cached."""
    for slot, argument in bound_slots:
        if argument:
            yield NewText(slot.start, argument)
    if not module_layout.cache:
        for run in module_layout.runs:
            for first, last in _fixed_ranges(run, bound_slots):
                yield NewText(run.start + first, tuple(run.tokens[first:last]))


def _fixed_ranges(run: TokenRun, bound_slots: list[tuple[ParameterSlot, tuple[int, ...]]]) -> Iterable[tuple[int, int]]:
    at = 0
    for slot, _ in sorted(bound_slots, key=lambda one: one[0].start):
        if run.start <= slot.start < run.end:
            if slot.start - run.start > at:
                yield at, slot.start - run.start
            at = slot.start - run.start + slot.length
    if at < len(run.tokens):
        yield at, len(run.tokens)


def _complete_scaffolds(
    layout: Layout, selected: Mapping[ModulePath, object]
) -> dict[ModulePath, tuple[ModulePath, ...]]:
    """The scaffolds that are imported as a whole: of each union one member, of the rest all."""
    together: dict[ModulePath, tuple[ModulePath, ...]] = {}
    for group in reversed(layout.scaffold_groups):  # an outer scaffold has the last word
        here = [path for path in layout.modules if path in group and path in selected]
        missing = [path for path in group if path not in selected]
        whole = all(
            (u := enclosing_union(layout, p)) and any((*p[:-1], m.name) in selected for m in u.members) for p in missing
        )
        if whole and len(here) > 1:
            inside = [p for p in layout.modules if p in selected and any(p[: len(h)] == h for h in here)]
            members = tuple(path for path in inside if layout.modules[path].cache)
            together |= dict.fromkeys(members, members)
    return together


# -- new text -----------------------------------------------------------------------------------------------


class _TextPlacer:
    """Gives the prompt's own text its positions, in the order of the prompt: from `first` on, behind a
    beginning-of-sequence token that the prompt encodes itself."""

    def __init__(
        self, layout: Layout, used_modules: list[ModuleLayout], start: int, tokenizer: TokenizerProtocol
    ) -> None:
        self._layout = layout
        self._used_modules = used_modules
        self._start = start
        self._placed: list[
            tuple[ModulePath, int, NewText]
        ] = []  # with the import that it stands in, and what `place` gives
        self._tokenizer = tokenizer
        self._needs_bos = not start and not any(piece.runs for piece in used_modules)

    def place(self, prompt: Prompt) -> list[tuple[int, NewText]]:
        """Each text with the end of what it is said behind: of texts in a row, of the first."""
        self._walk(prompt, ())
        return [(behind, text) for _, behind, text in self._placed]

    def _walk(self, level: Prompt | Import, path: ModulePath) -> None:
        last = max((i for i, child in enumerate(level.children) if isinstance(child, Import)), default=-1)
        before: ModulePath | None = None  # the import in front
        behind = 0
        at: int | None = None  # where the text in front ends, if nothing was imported since
        for index, child in enumerate(level.children):
            if isinstance(child, Import):
                before, at = (*path, child.name), None
                self._walk(child, before)
                continue
            if at is None:
                after = path if index > last else before
                behind = max(self._start, self._leading_end(path) if after is None else self._end_of(after))
                at = max(behind, *self._inner_text_ends(after), 0)
            text = NewText(at, tuple(self._encode(child)))
            self._placed.append((path, behind, text))
            self._needs_bos, at = False, text.end

    def _encode(self, child: str | Role) -> list[int]:
        if isinstance(child, str):
            return (self._tokenizer.bos_ids() if self._needs_bos else []) + self._tokenizer.encode_text(child)
        text = "".join(part for part in child.children if isinstance(part, str))
        header, footer = self._tokenizer.encode_turn(child.name, text, opening=self._needs_bos, is_complete=True)
        return header + footer

    def _end_of(self, path: ModulePath) -> int:
        """Where a used piece and all that is nested in it ends."""
        return max(
            (run.end for p in self._nested_layouts(path) for run in p.runs), default=self._layout.modules[path].start
        )

    def _leading_end(self, path: ModulePath) -> int:
        """Where a level's own text up to its first import ends."""
        level = self._layout.modules[path]
        first = min(piece.start for piece in self._nested_layouts(path) if piece is not level)
        ends = (min(run.end, first) for run in level.runs if run.start < first)  # an empty import leaves no gap
        return max(ends, default=level.start)

    def _inner_text_ends(self, path: ModulePath | None) -> list[int]:
        """Where texts end that are said in an import, however deep."""
        return [text.end for inside, _, text in self._placed if path is not None and inside[: len(path)] == path]

    def _nested_layouts(self, path: ModulePath) -> list[ModuleLayout]:
        """A used piece and those nested in it."""
        return [piece for piece in self._used_modules if piece.path[: len(path)] == path]


def merge_adjacent(texts: Iterable[NewText]) -> list[NewText]:
    """By position, neighbours joined: fewer calls, and later text sees earlier text."""
    joined: list[NewText] = []
    for one in sorted(texts, key=lambda one: one.start):
        if not one.tokens:
            continue
        if joined and joined[-1].end == one.start:
            joined[-1] = NewText(joined[-1].start, joined[-1].tokens + one.tokens)
        else:
            joined.append(one)
    return joined
