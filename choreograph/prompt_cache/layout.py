"""A chat format as a layout sees it, and what stands for a parameter without an argument."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..engine.text import ChatTemplate, Turn
from ..errors import ConfigError, SchemaError
from .schema import Child, Module, Parameter, Role, Scaffold, Schema, Union, has_roles, modules, unions


class ChatTokenizer:
    """`layout.Tokens` over one tokenizer and its chat template."""

    def __init__(self, chat: ChatTemplate | None, tokenizer: Any) -> None:
        if chat is None:
            raise ConfigError("PML needs a tokenizer: give one to Engine.from_pretrained")
        self._chat = chat
        self.placeholder = placeholder_token(tokenizer)

    def encode_text(self, text: str) -> list[int]:
        return self._chat.encode_text(text, opening=False)

    def bos_ids(self) -> list[int]:
        return self._chat.bos_ids

    def encode_turn(self, role: str, text: str, *, opening: bool, is_complete: bool) -> tuple[list[int], list[int]]:
        """(header and text, footer); a whole turn is tokenised in one piece, as the template would be."""
        if is_complete:
            return self._chat.encode(Turn(role, text), opening=opening), []
        return self._chat.open_turn(Turn(role, text), opening=opening)


def placeholder_token(tokenizer: Any) -> int:
    """The token that fills a parameter (section 3.3): the unknown token, or a blank where there is none, or where
    its name says that it means something else too (the end of a text, often)."""
    if tokenizer.unk_token_id is not None and "unk" in str(tokenizer.unk_token).lower():
        return tokenizer.unk_token_id
    blank = tokenizer(" ", add_special_tokens=False)["input_ids"]
    return blank[-1] if blank else tokenizer.eos_token_id


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Names the tokenizer and its chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(f"{content}\0{getattr(tokenizer, 'chat_template', None)}".encode()).hexdigest()[:16]


ModulePath = tuple[str, ...]


class TokenizerProtocol(Protocol):
    """What a layout needs of a tokenizer and its chat template."""

    placeholder: int

    def encode_text(self, text: str) -> list[int]: ...
    def bos_ids(self) -> list[int]: ...
    def encode_turn(self, role: str, text: str, *, opening: bool, is_complete: bool) -> tuple[list[int], list[int]]: ...


@dataclass(frozen=True)
class ParameterSlot:
    """Positions start <= p < start + length that an argument takes over. default: its tokens, or None."""

    name: str
    start: int
    length: int
    default: tuple[int, ...] | None


@dataclass
class TokenRun:
    """Tokens at the positions from `start` on."""

    start: int
    tokens: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass
class ModuleLayout:
    """The own text of one module, or the anonymous text (path ()). `start` to `end` spans nested modules too."""

    path: ModulePath
    cache: bool
    start: int
    end: int = 0
    runs: list[TokenRun] = field(default_factory=list)
    parameter_slots: dict[str, ParameterSlot] = field(default_factory=dict)

    def add(self, position: int, tokens: list[int]) -> int:
        if tokens:
            if not self.runs or self.runs[-1].end != position:
                self.runs.append(TokenRun(position))
            self.runs[-1].tokens += tokens
        return position + len(tokens)

    @property
    def num_tokens(self) -> int:
        return sum(len(run.tokens) for run in self.runs)


@dataclass(frozen=True)
class Layout:
    """pieces by path, in document order. groups: paths of modules that a scaffold encodes together."""

    schema: Schema
    modules: dict[ModulePath, ModuleLayout]
    nodes: dict[ModulePath, Module | Schema]
    scaffold_groups: list[frozenset[ModulePath]]
    bos_ids: list[int]
    length: int
    is_chat: bool

    @property
    def fingerprint(self) -> str:
        """Names every token and its position."""
        runs = [(path, run.start, run.tokens) for path, piece in self.modules.items() for run in piece.runs]
        return hashlib.sha256(repr(runs).encode()).hexdigest()[:16]

    @property
    def num_cached_tokens(self) -> int:
        """Tokens that are encoded once, placeholders included."""
        return sum(piece.num_tokens for piece in self.modules.values() if piece.cache)


def compute_layout(schema: Schema, tokenizer: TokenizerProtocol, max_positions: int) -> Layout:
    """Gives every piece its positions; a schema that is longer than the model's `most` positions is refused."""
    result = _LayoutBuilder(tokenizer, schema, max_positions).layout()
    if result.length > max_positions:
        raise SchemaError(
            f"schema {schema.name!r} takes {result.length} positions; the model has {max_positions}: shorten it"
        )
    return result


class _LayoutBuilder:
    """Walks a schema with a cursor."""

    def __init__(self, tokenizer: TokenizerProtocol, schema: Schema, max_positions: int) -> None:
        self._tokenizer = tokenizer
        self._schema = schema
        self._max_positions = max_positions
        self._modules: dict[ModulePath, ModuleLayout] = {}
        self._nodes: dict[ModulePath, Module | Schema] = {(): schema}
        self._scaffold_groups: list[frozenset[ModulePath]] = []
        self._bos_ids = tokenizer.bos_ids()

    def layout(self) -> Layout:
        anonymous = self._modules[()] = ModuleLayout((), True, 0)
        end = anonymous.end = self._children(self._schema.children, anonymous, 0)
        talks = has_roles(self._schema.children)
        return Layout(self._schema, self._modules, self._nodes, self._scaffold_groups, self._bos_ids, end, talks)

    def _children(self, children: tuple[Child, ...], module_layout: ModuleLayout, position: int) -> int:
        for child in children:
            position = self._child(child, module_layout, position)
        return position

    def _child(self, child: Child, module_layout: ModuleLayout, position: int) -> int:
        match child:
            case str():
                return module_layout.add(self._add_bos(module_layout, position), self._tokenizer.encode_text(child))
            case Parameter():
                return self._parameter(child, module_layout, self._add_bos(module_layout, position))
            case Module():
                return self._module(child, module_layout, position)
            case Union():
                return max(self._module(member, module_layout, position) for member in child.members)
            case Role():
                return self._role(child, module_layout, position)
            case Scaffold():
                self._scaffold_groups.append(
                    frozenset((*module_layout.path, m.name) for m, _ in modules(child.children))
                )
                return self._children(child.children, module_layout, position)

    def _add_bos(self, module_layout: ModuleLayout, position: int) -> int:
        """The beginning-of-sequence token stands in front of whatever text comes first; a turn brings its own."""
        return module_layout.add(position, self._bos_ids) if position == 0 else position

    def _module(self, module: Module, outer: ModuleLayout, position: int) -> int:
        path = (*outer.path, module.name)
        piece = self._modules[path] = ModuleLayout(path, module.cache and outer.cache, position)
        self._nodes[path] = module
        piece.end = self._children(module.children, piece, position)
        return piece.end

    def _parameter(self, parameter: Parameter, module_layout: ModuleLayout, position: int) -> int:
        if parameter.length > self._max_positions:  # before so many placeholders are written
            raise SchemaError(
                f"parameter {parameter.name!r}: length={parameter.length}; the model has {self._max_positions} positions: "
                "shorten it"
            )
        default = None if parameter.default is None else tuple(self._tokenizer.encode_text(parameter.default))
        if default and len(default) > parameter.length:
            raise SchemaError(
                f"parameter {parameter.name!r}: its default has {len(default)} tokens, its length is {parameter.length}"
            )
        module_layout.parameter_slots[parameter.name] = ParameterSlot(
            parameter.name, position, parameter.length, default
        )
        return module_layout.add(position, [self._tokenizer.placeholder] * parameter.length)

    def _role(self, role: Role, module_layout: ModuleLayout, position: int) -> int:
        """The turn's header goes with the text that follows it, as the template would be tokenised."""
        first = role.children[0] if role.children and isinstance(role.children[0], str) else ""
        whole = len(role.children) == (1 if first else 0)
        header, footer = self._tokenizer.encode_turn(role.name, first, opening=position == 0, is_complete=whole)
        position = module_layout.add(position, header)
        position = self._children(role.children[1:] if first else role.children, module_layout, position)
        return module_layout.add(position, footer)


def enclosing_union(layout: Layout, path: ModulePath) -> Union | None:
    """The union that a module is a member of."""
    level = layout.nodes[path[:-1]].children
    return next((union for module, union in modules(level) if module.name == path[-1]), None)


def required_unions(layout: Layout, path: ModulePath) -> Iterator[Union]:
    return (union for union in unions(layout.nodes[path].children) if union.required)
