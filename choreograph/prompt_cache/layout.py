"""Token positions of a schema's modules (Prompt Cache §3.3)."""

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from ..api.chat import ChatTemplate, Turn
from ..errors import ConfigError, SchemaError
from ..namespace import serialize
from .schema import Child, Module, Parameter, Role, Scaffold, Schema, Union, has_roles, modules

ModulePath = tuple[str, ...]  # names from the outermost module to the inner one; (): text outside of modules


class ChatTokenizer:
    """Tokenizer and chat template for schemas and prompts."""

    def __init__(self, chat: ChatTemplate | None, tokenizer: Any) -> None:
        if chat is None:
            raise ConfigError("PML needs a tokenizer: give one to Engine.from_pretrained")
        self._chat = chat
        self.placeholder = placeholder_token(tokenizer)

    def encode_text(self, text: str) -> list[int]:
        return self._chat.encode_text(text, opening=False)

    def bos_ids(self) -> list[int]:
        return self._chat.bos_ids

    def encode_turn(
        self, role: str, text: str, *, opening: bool, is_complete: bool, after_system: bool = False
    ) -> tuple[list[int], list[int]]:
        """Tokenize a chat turn: return (header and text, footer).

        A complete turn is tokenized as a whole, and its footer is returned empty.
        """
        if is_complete:
            return self._chat.encode(Turn(role, text), opening=opening, after_system=after_system), []
        return self._chat.open_turn(Turn(role, text), opening=opening, after_system=after_system)

    def encode_answer(self, *, after_system: bool) -> tuple[list[int], list[int]]:
        """Return (header, footer) of an answer.

        The header is empty if the template has none.
        """
        header, footer = self._chat.open_turn(Turn("assistant", ""), opening=False, after_system=after_system)
        return header if self._chat.tokenizer.decode(header).strip() else [], footer


def placeholder_token(tokenizer: Any) -> int:
    """Return the token that fills the positions of a parameter.

    It is the unknown token (§3.3). A blank is used if the tokenizer has no unknown token, or if that token
    also has another meaning, often the end of a text.
    """
    if tokenizer.unk_token_id is not None and "unk" in str(tokenizer.unk_token).lower():
        return tokenizer.unk_token_id
    blank = tokenizer(" ", add_special_tokens=False)["input_ids"]
    return blank[-1] if blank else tokenizer.eos_token_id


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Return a hash of the tokenizer and its chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
    template = json.dumps(getattr(tokenizer, "chat_template", None), sort_keys=True)
    return hashlib.sha256(serialize((content, template))).hexdigest()[:16]


@dataclass(frozen=True)
class ParameterSlot:
    """Positions reserved for an argument: start <= p < start + length."""

    name: str
    start: int
    length: int
    default: tuple[int, ...]  # tokens


@dataclass
class TokenRun:
    """Tokens at consecutive positions."""

    start: int  # position of the first token
    tokens: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass
class ModuleLayout:
    """Positions of a module's text, or of the text outside of modules."""

    path: ModulePath
    cache: bool
    start: int  # first position
    in_turn: bool = False  # declared inside a chat turn
    end: int = 0  # position after the last one, nested modules included
    runs: list[TokenRun] = field(default_factory=list)
    parameter_slots: dict[str, ParameterSlot] = field(default_factory=dict)
    last_role: str | None = None  # role of its last chat turn

    def add(self, position: int, tokens: list[int]) -> int:
        """Append tokens at a position and return the position after them."""
        if tokens:
            if not self.runs or self.runs[-1].end != position:
                self.runs.append(TokenRun(position))
            self.runs[-1].tokens += tokens
        return position + len(tokens)

    @property
    def num_tokens(self) -> int:
        return sum(len(run.tokens) for run in self.runs)


@dataclass
class Layout:
    """Positions of a whole schema."""

    schema: Schema
    bos_ids: list[int]
    is_chat: bool  # True: the schema has chat turns
    length: int = 0  # positions
    modules: dict[ModulePath, ModuleLayout] = field(default_factory=dict)  # in document order
    nodes: dict[ModulePath, Module | Schema] = field(default_factory=dict)
    scaffold_groups: list[frozenset[ModulePath]] = field(default_factory=list)  # modules of each scaffold

    @property
    def fingerprint(self) -> str:
        """Hash of all tokens and their positions."""
        runs = [(path, run.start, run.tokens) for path, module in self.modules.items() for run in module.runs]
        return hashlib.sha256(repr(runs).encode()).hexdigest()[:16]

    @property
    def num_cached_tokens(self) -> int:
        """Number of tokens with cached keys and values, placeholders included."""
        return sum(module.num_tokens for module in self.modules.values() if module.cache)


def compute_layout(schema: Schema, tokenizer: ChatTokenizer, max_positions: int) -> Layout:
    """Assign positions to all tokens of a schema.

    Raises:
        SchemaError: if the schema needs more than `max_positions`.
    """
    layout = Layout(schema, tokenizer.bos_ids(), has_roles(schema.children))
    layout.length = _LayoutBuilder(layout, tokenizer, max_positions).add_module(schema, (), 0, True)
    if layout.length > max_positions:
        raise SchemaError(
            f"schema {schema.name!r} takes {layout.length} positions; the model has {max_positions}: shorten it"
        )
    return layout


class _LayoutBuilder:
    """Builder that walks a schema and assigns positions.

    Each method takes the next free position and returns the position after the content that it adds.
    """

    def __init__(self, layout: Layout, tokenizer: ChatTokenizer, max_positions: int) -> None:
        self._layout = layout
        self._tokenizer = tokenizer
        self._max_positions = max_positions
        self._last_role: str | None = None  # of the chat turn before
        self._in_turn = False

    def add_module(self, node: Module | Schema, path: ModulePath, position: int, cache: bool) -> int:
        target = self._layout.modules[path] = ModuleLayout(path, cache, position, self._in_turn)
        self._layout.nodes[path] = node
        target.end = self._add_children(node.children, target, position)
        return target.end

    def _add_children(self, children: tuple[Child, ...], target: ModuleLayout, position: int) -> int:
        for child in children:
            position = self._add_child(child, target, position)
        return position

    def _add_child(self, child: Child, target: ModuleLayout, position: int) -> int:
        match child:
            case str():
                return target.add(self._add_bos(target, position), self._tokenizer.encode_text(child))
            case Parameter():
                return self._add_parameter(child, target, self._add_bos(target, position))
            case Module():
                return self.add_module(child, (*target.path, child.name), position, child.cache and target.cache)
            case Union():
                ends, last_role = [position], self._last_role
                for member in child.members:  # alternatives: each follows the same turn
                    self._last_role = last_role
                    ends.append(self._add_child(member, target, position))
                return max(ends)
            case Role():
                return self._add_role(child, target, position)
            case Scaffold():
                paths = ((*target.path, module.name) for module, _ in modules(child.children))
                self._layout.scaffold_groups.append(frozenset(paths))
                return self._add_children(child.children, target, position)

    def _add_bos(self, target: ModuleLayout, position: int) -> int:
        """Add BOS at position 0; a chat turn includes its own BOS."""
        return target.add(position, self._layout.bos_ids) if position == 0 else position

    def _add_parameter(self, parameter: Parameter, target: ModuleLayout, position: int) -> int:
        name, length = parameter.name, parameter.length
        if length > self._max_positions:  # checked before that many placeholders are allocated
            raise SchemaError(
                f"parameter {name!r}: length={length}; the model has {self._max_positions} positions: shorten it"
            )
        default = tuple(self._tokenizer.encode_text(parameter.default)) if parameter.default else ()
        if len(default) > length:
            raise SchemaError(
                f"parameter {name!r}: its default has {len(default)} tokens, its length is {length}: raise length"
            )
        target.parameter_slots[name] = ParameterSlot(name, position, length, default)
        return target.add(position, [self._tokenizer.placeholder] * length)

    def _add_role(self, role: Role, target: ModuleLayout, position: int) -> int:
        """Add a chat turn; tokenize its header together with the following text."""
        first = role.children[0] if role.children and isinstance(role.children[0], str) else ""
        rest = role.children[1:] if first else role.children
        header, footer = self._tokenizer.encode_turn(
            role.name,
            first,
            opening=position == 0,
            is_complete=not rest,
            after_system=self._last_role == "system",
        )
        self._last_role = target.last_role = role.name
        self._in_turn = True
        position = self._add_children(rest, target, target.add(position, header))
        self._in_turn = False
        return target.add(position, footer)


def enclosing_union(layout: Layout, path: ModulePath) -> Union | None:
    """Return the union that a module is a member of."""
    level = layout.nodes[path[:-1]].children
    return next((union for module, union in modules(level) if module.name == path[-1]), None)
