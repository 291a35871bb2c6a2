"""Resolve a prompt to cached token ranges and new text with positions.

New text starts at these positions (Prompt Cache §3.4):
- Between two imports: after the first import and the text inside it, in the gap that the paper assumes.
- Before the first import: after the text of the enclosing module or schema that precedes the import.
- After all imports: after all content that is used.

In a schema with chat turns, new text outside of a turn is a user turn.

New text may overlap positions that are already taken, a case that the paper leaves open.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ..errors import PromptError
from .layout import ChatTokenizer, Layout, ModuleLayout, ModulePath, ParameterSlot, TokenRun, enclosing_union
from .schema import Import, Prompt, Role, has_roles, modules


class CachedRange(NamedTuple):
    """Range of tokens of a cached module."""

    path: ModulePath
    run_index: int  # in ModuleLayout.runs
    token_start: int  # in the run
    num_tokens: int
    position: int  # of the first token


@dataclass(frozen=True)
class ResolvedPrompt:
    """Content of a prompt with its positions."""

    cached: list[CachedRange]
    new_parts: list[tuple[int, TokenRun]]  # with its position for the order in `flatten`; texts, then arguments
    scaffolds: dict[ModulePath, tuple[ModulePath, ...]]  # modules that attend to each other, in document order
    end: int  # position after everything that is used
    is_chat: bool  # True: the answer is a chat turn
    after_system: bool  # True: the answer follows a system turn

    @cached_property
    def new_texts(self) -> list[TokenRun]:
        """New text by position; adjacent texts are joined to save prefill calls."""
        merged: list[TokenRun] = []
        for text in sorted((text for _, text in self.new_parts if text.tokens), key=lambda text: text.start):
            if merged and merged[-1].end == text.start:
                text = TokenRun(merged[-1].start, merged.pop().tokens + text.tokens)
            merged.append(text)
        return merged

    def flatten(self, layout: Layout) -> list[int]:
        """Return the tokens of the same prompt as plain text.

        They are ordered by position, except that new text before an import stays before it even if the text is
        longer than the gap.
        """
        parts = [(position, 0, text.tokens) for position, text in self.new_parts]
        for path, run_index, first, num_tokens, position in self.cached:
            parts.append((position, 1, layout.modules[path].runs[run_index].tokens[first : first + num_tokens]))
        return [token for _, _, tokens in sorted(parts, key=lambda part: part[:2]) for token in tokens]


def resolve_prompt(prompt: Prompt, layout: Layout, tokenizer: ChatTokenizer) -> ResolvedPrompt:
    """Check a prompt against its schema and place its content.

    Raises:
        PromptError: if the prompt does not follow the schema.
    """
    if prompt.schema != layout.schema.name:
        raise PromptError(f"the prompt is for schema {prompt.schema!r}, not for {layout.schema.name!r}: name that one")
    selected = _select_modules(prompt, layout)
    used = [module for path, module in layout.modules.items() if path in selected]
    has_first_token = any(run.start == 0 for module in used for run in module.runs)
    bos = TokenRun(0, [] if has_first_token else layout.bos_ids)
    placer = _TextPlacer(layout, used, bos.end, tokenizer)
    parts = [(0, bos), *placer.place(prompt)]
    cached = []
    for module in used:
        slots = _bind_arguments(module, selected[module.path], tokenizer)
        new = [TokenRun(slot.start, argument) for slot, argument in slots if argument]
        for index, run in enumerate(module.runs):
            for first, last in _fixed_ranges(run, [slot for slot, _ in slots]):
                if module.cache:
                    cached.append(CachedRange(module.path, index, first, last - first, run.start + first))
                else:
                    new.append(TokenRun(run.start + first, run.tokens[first:last]))
        parts += [(text.start, text) for text in new]
    if not cached and not any(text.tokens for _, text in parts):
        raise PromptError("the prompt is empty: import a module or add text")
    end = max(*(item.position + item.num_tokens for item in cached), *(text.end for _, text in parts), 0)
    is_chat = layout.is_chat or has_roles(prompt.children)
    return ResolvedPrompt(
        cached, parts, _complete_scaffolds(layout, selected), end, is_chat, placer.last_role == "system"
    )


# -- imports ------------------------------------------------------------------------------------------------


def _select_modules(prompt: Prompt, layout: Layout) -> dict[ModulePath, Mapping[str, str]]:
    """Return the arguments of each imported module, by path."""
    selected: dict[ModulePath, Mapping[str, str]] = {(): prompt.arguments}
    _collect_imports(prompt, (), layout, selected)
    for path in selected:
        for _, union in modules(layout.nodes[path].children):
            if union and union.required and not any((*path, member.name) in selected for member in union.members):
                names = ", ".join(member.name for member in union.members)
                raise PromptError(f"{_describe_path(path)}: one of {names} is required: import it")
    return selected


def _collect_imports(
    level: Prompt | Import, path: ModulePath, layout: Layout, selected: dict[ModulePath, Mapping[str, str]]
) -> None:
    for child in level.children:
        if not isinstance(child, Import):
            continue
        inner = (*path, child.name)
        if inner not in layout.modules:
            raise _unknown_module_error(child.name, path, layout)
        if inner in selected:
            raise PromptError(f"{_describe_path(path)}: {child.name!r} is imported twice: remove one")
        union = enclosing_union(layout, inner)
        for member in union.members if union else ():
            if (*path, member.name) in selected:
                names = f"{member.name!r} and {child.name!r}"
                raise PromptError(f"{_describe_path(path)}: {names} exclude each other: import one")
        selected[inner] = child.arguments
        _collect_imports(child, inner, layout, selected)


def _unknown_module_error(name: str, path: ModulePath, layout: Layout) -> PromptError:
    message = f"{_describe_path(path)} has no module {name!r}"
    candidates = [candidate for candidate in layout.modules if candidate[-1:] == (name,)]
    if len(candidates) == 1:
        nested = "".join(f"<{outer}>" for outer in candidates[0][:-1])
        return PromptError(f"{message}; it stands inside another one: write {nested}<{name}/>...")
    if candidates:
        paths = ", ".join("/".join(candidate) for candidate in candidates)
        return PromptError(f"{message}; {name!r} is ambiguous, it may be {paths}: nest it in the one you mean")
    names = [module.name for module, _ in modules(layout.nodes[path].children)]
    return PromptError(f"{message}; it has {names or 'none'} (put text that starts with < into CDATA)")


def _describe_path(path: ModulePath) -> str:
    return f"module {'/'.join(path)!r}" if path else "the schema"


def _complete_scaffolds(
    layout: Layout, selected: Mapping[ModulePath, object]
) -> dict[ModulePath, tuple[ModulePath, ...]]:
    """Return the scaffold members that each cached module is computed with.

    Only scaffolds are included of which a prompt imports all modules and one member of each union.
    """
    result: dict[ModulePath, tuple[ModulePath, ...]] = {}
    for group in reversed(layout.scaffold_groups):  # an outer scaffold overrides the ones inside it
        unions = {path: enclosing_union(layout, path) for path in group if path not in selected}
        is_complete = all(
            union is not None and any((*path[:-1], member.name) in selected for member in union.members)
            for path, union in unions.items()
        )
        imported = [path for path in group if path in selected]
        if is_complete and len(imported) > 1:
            members = tuple(
                path
                for path, module in layout.modules.items()
                if module.cache and path in selected and any(path[: len(outer)] == outer for outer in imported)
            )
            result |= dict.fromkeys(members, members)
    return result


# -- arguments ----------------------------------------------------------------------------------------------


def _bind_arguments(
    module: ModuleLayout, arguments: Mapping[str, str], tokenizer: ChatTokenizer
) -> list[tuple[ParameterSlot, list[int]]]:
    """Return all parameter slots of a module with their argument tokens."""
    where = _describe_path(module.path)
    for name in arguments:
        if name not in module.parameter_slots:
            raise PromptError(f"{where}: no parameter {name!r}; it has {list(module.parameter_slots) or 'none'}")
    bound = []
    for name, slot in module.parameter_slots.items():
        argument = tokenizer.encode_text(arguments[name]) if name in arguments else list(slot.default)
        if len(argument) > slot.length:
            raise PromptError(
                f"{where}: the argument {name}={arguments[name]!r} has {len(argument)} tokens, its parameter holds "
                f"{slot.length}: shorten it or raise length"
            )
        bound.append((slot, argument))
    return bound


def _fixed_ranges(run: TokenRun, slots: list[ParameterSlot]) -> Iterator[tuple[int, int]]:
    """Yield half-open token ranges of a run, without its parameter placeholders."""
    first = 0
    for slot in sorted(slots, key=lambda slot: slot.start):
        if run.start <= slot.start < run.end:
            if slot.start - run.start > first:
                yield first, slot.start - run.start
            first = slot.start - run.start + slot.length
    if first < len(run.tokens):
        yield first, len(run.tokens)


# -- new text -----------------------------------------------------------------------------------------------


class _TextPlacer:
    """Assign positions to new text, in the order of the prompt.

    Args:
        used: modules that the prompt imports, and the text outside of modules.
        start: first free position.
    """

    def __init__(self, layout: Layout, used: list[ModuleLayout], start: int, tokenizer: ChatTokenizer) -> None:
        self._layout = layout
        self._used = used
        self._start = start
        self._tokenizer = tokenizer
        self._placed: list[tuple[ModulePath, int, TokenRun]] = []  # enclosing import, position it follows, text
        self._is_opening = not start and not any(module.runs for module in used)  # the next text opens the prompt
        self.last_role = next((module.last_role for module in reversed(used) if module.last_role), None)

    def place(self, prompt: Prompt) -> list[tuple[int, TokenRun]]:
        """Return each new text with the end position of the preceding content.

        Consecutive texts have the same end position, that of the content before the first of them.
        """
        self._place_level(prompt, ())
        return [(position, text) for _, position, text in self._placed]

    def _place_level(self, level: Prompt | Import, path: ModulePath) -> None:
        last_import = max((i for i, child in enumerate(level.children) if isinstance(child, Import)), default=-1)
        previous: ModulePath | None = None  # import before the text
        follows = 0  # end of the content before the text
        start: int | None = None  # where the next text starts; None: after an import
        in_turn = False  # the next text is inside a turn of the schema
        for index, child in enumerate(level.children):
            if isinstance(child, Import):
                previous, start = (*path, child.name), None
                self._place_level(child, previous)
                continue
            if start is None:
                after = path if index > last_import else previous
                follows = max(self._start, self._leading_end(path) if after is None else self._module_end(after))
                inner = [text.end for outer, _, text in self._placed if after is not None and _is_inside(outer, after)]
                start = max(follows, *inner, 0)
                in_turn = self._is_in_turn(path, after)
            if isinstance(child, str) and self._layout.is_chat and not in_turn:
                child = Role("user", (child.strip(),))
            text = TokenRun(start, self._encode(child))
            self._placed.append((path, follows, text))
            self._is_opening, start = False, text.end

    def _encode(self, child: str | Role) -> list[int]:
        if isinstance(child, str):
            return self._tokenizer.encode_text(child)
        text = "".join(part for part in child.children if isinstance(part, str))
        after_system, self.last_role = self.last_role == "system", child.name
        return self._tokenizer.encode_turn(
            child.name, text, opening=self._is_opening, is_complete=True, after_system=after_system
        )[0]

    def _module_end(self, path: ModulePath) -> int:
        """Return the position after a used module and its used inner modules."""
        ends = [run.end for module in self._used if _is_inside(module.path, path) for run in module.runs]
        return max(ends, default=self._layout.modules[path].start)

    def _first_import(self, path: ModulePath) -> ModuleLayout:
        """Return the imported module inside `path` that comes first in the schema."""
        inner = (module for module in self._used if _is_inside(module.path, path) and module.path != path)
        return min(inner, key=lambda module: module.start)

    def _is_in_turn(self, path: ModulePath, after: ModulePath | None) -> bool:
        """Return whether new text is inside a turn of the schema.

        Args:
            path: module whose import contains the text.
            after: module that the text follows; None before the first import.
        """
        return self._first_import(path).in_turn if after is None else self._layout.modules[after].in_turn

    def _leading_end(self, path: ModulePath) -> int:
        """Return the position after a module's own text before its first import."""
        level, first = self._layout.modules[path], self._first_import(path).start
        ends = [min(run.end, first) for run in level.runs if run.start < first]  # an empty import leaves no gap
        return max(ends, default=level.start)


def _is_inside(path: ModulePath, outer: ModulePath) -> bool:
    return path[: len(outer)] == outer
