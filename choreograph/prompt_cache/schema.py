"""Schemas and prompts as values (Prompt Cache, section 3.2). Owns what makes them valid; knows no tokens.

    schema("trip", system("You plan trips."), user(module("plan", "For ", parameter("days", 5), " days.")))

Texts that stand side by side become one, so that equal schemas are equal values however they were made.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import PromptError, SchemaError

RoleName = Literal["system", "user", "assistant"]

NAME = r"[^\s<>/&\"'=!?]+"
ROLES: tuple[RoleName, ...] = ("system", "user", "assistant")

RESERVED = ("schema", "prompt", "module", "union", "parameter", "param", "scaffold", *ROLES)


@dataclass(frozen=True)
class Parameter:
    """A place for at most `length` tokens. Without a default every prompt has to give an argument."""

    name: str
    length: int
    default: str | None = None

    def __post_init__(self) -> None:
        _check_name(self.name, "parameter", ())
        if isinstance(self.length, bool) or not isinstance(self.length, int) or self.length < 1:
            raise SchemaError(f"parameter {self.name!r}: length={self.length!r}: use a whole number of 1 or more")


@dataclass(frozen=True)
class Module:
    """A piece that prompts import by name. cache=False: placed like the others, but encoded with every prompt."""

    name: str
    children: tuple["Child", ...] = ()
    cache: bool = True

    def __post_init__(self) -> None:
        _check_name(self.name, "module", RESERVED)
        object.__setattr__(self, "children", _merge_texts(self.children))


@dataclass(frozen=True)
class Union:
    """Modules of which a prompt imports at most one; required: exactly one."""

    members: tuple[Module, ...]
    required: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "members", tuple(self.members))
        if not self.members or not all(isinstance(m, Module) for m in self.members):
            raise SchemaError("a union holds modules, at least one, and nothing else")


@dataclass(frozen=True)
class Role:
    """A chat turn: the model's own template around what stands inside."""

    name: RoleName
    children: tuple["Child", ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "children", _merge_texts(self.children))


@dataclass(frozen=True)
class Scaffold:
    """Modules that are encoded in sight of one another wherever a prompt imports all of them."""

    children: tuple["Module | Union", ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "children", tuple(self.children))
        if not self.children or not all(isinstance(c, (Module, Union)) for c in self.children):
            raise SchemaError("a scaffold holds modules and unions, at least one, and nothing else")


Child = str | Parameter | Module | Union | Role | Scaffold


@dataclass(frozen=True)
class Schema:
    """What prompts may import and what all of them contain."""

    name: str
    children: tuple[Child, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not re.fullmatch(r"[^<>\"]+", self.name):
            raise SchemaError(f"schema name={self.name!r}: use text without <, > and quotes")
        object.__setattr__(self, "children", _merge_texts(self.children))
        _check_level(self.children, f"schema {self.name!r}", in_role=False)
        if any(p.name == "schema" for p in parameters(self.children)):
            raise SchemaError("a parameter of the schema itself cannot be called 'schema': prompts name theirs so")

    @property
    def fingerprint(self) -> str:
        """Names the content of the schema."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Import:
    """A module that a prompt takes from its schema, with arguments and what is imported, or said, inside it."""

    name: str
    children: tuple["str | Import | Role", ...] = ()
    arguments: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _validate_and_merge(self, f"import {self.name!r}")


@dataclass(frozen=True)
class Prompt:
    """What one request takes from a schema and what it says itself. arguments: of the schema's own parameters."""

    schema: str
    children: tuple[str | Import | Role, ...] = ()
    arguments: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _validate_and_merge(self, "prompt")


# -- builders -----------------------------------------------------------------------------------------------


def schema(name: str, *children: Child) -> Schema:
    """A schema of these parts."""
    return Schema(name, children)


def module(name: str, *children: Child, cache: bool = True) -> Module:
    """A piece that prompts import by name."""
    return Module(name, children, cache)


def union(*members: Module, required: bool = False) -> Union:
    """Modules of which a prompt imports at most one."""
    return Union(members, required)


def scaffold(*children: Module | Union) -> Scaffold:
    """Modules that are encoded in sight of one another where all are imported."""
    return Scaffold(children)


def parameter(name: str, length: int, default: str | None = None) -> Parameter:
    """A place for at most `length` tokens."""
    return Parameter(name, length, default)


def system(*children: Child) -> Role:
    """A system turn."""
    return Role("system", children)


def user(*children: Child) -> Role:
    """A user's turn."""
    return Role("user", children)


def assistant(*children: Child) -> Role:
    """An assistant's turn."""
    return Role("assistant", children)


# -- what stands in one level -------------------------------------------------------------------------------


def modules(children: Iterable[Child]) -> Iterator[tuple[Module, Union | None]]:
    """The modules that a prompt may import at a level, each with its union: through roles and scaffolds."""
    for child in children:
        if isinstance(child, Module):
            yield child, None
        elif isinstance(child, Union):
            yield from ((member, child) for member in child.members)
        elif isinstance(child, (Role, Scaffold)):
            yield from modules(child.children)


def parameters(children: Iterable[Child]) -> Iterator[Parameter]:
    """The parameters of a module's own text: through roles, not through modules."""
    for child in children:
        if isinstance(child, Parameter):
            yield child
        elif isinstance(child, Role):
            yield from parameters(child.children)


def unions(children: Iterable[Child]) -> Iterator[Union]:
    for child in children:
        if isinstance(child, Union):
            yield child
        elif isinstance(child, (Role, Scaffold)):
            yield from unions(child.children)


def has_roles(children: Iterable[object]) -> bool:
    """Whether a chat turn stands anywhere below."""
    for child in children:
        if isinstance(child, Role):
            return True
        if isinstance(child, Union):
            child = Scaffold(child.members)
        if isinstance(child, (Module, Scaffold, Import)) and has_roles(child.children):
            return True
    return False


def _validate_and_merge(value: "Import | Prompt", where: str) -> None:
    """Checks the parts of a prompt and joins its texts."""
    for child in value.children:
        if not isinstance(child, (str, Import, Role)):
            raise PromptError(f"{where}: {child!r}: use text, imports and roles")
        if isinstance(child, Role) and not all(isinstance(part, str) for part in child.children):
            raise PromptError(f"{where}: <{child.name}> in a prompt holds text only")
    for name, argument in value.arguments.items():
        if not isinstance(argument, str):
            raise PromptError(f"{where}: argument {name}={argument!r}: give a string")
    object.__setattr__(value, "children", _merge_texts(value.children))


def _merge_texts(children: Iterable[Any]) -> tuple[Any, ...]:
    """Neighbouring texts as one, empty ones dropped."""
    joined: list[Any] = []
    for child in (children,) if isinstance(children, str) else children:
        if not isinstance(child, (str, Parameter, Module, Union, Role, Scaffold, Import)):
            raise SchemaError(f"{child!r}: use text, parameters, modules, unions, roles and scaffolds")
        if isinstance(child, str) and joined and isinstance(joined[-1], str):
            joined[-1] += child
        elif child != "":
            joined.append(child)
    return tuple(joined)


def _check_name(name: object, label: str, reserved: tuple[str, ...]) -> None:
    if not isinstance(name, str) or not re.fullmatch(NAME, name):
        raise SchemaError(f"{label} name={name!r}: use one word without quotes, <, >, /, &, =, ? or !")
    if name in reserved:
        raise SchemaError(f"{label} name={name!r} is a word of the language: choose another")


def _check_level(children: tuple[Child, ...], where: str, *, in_role: bool) -> None:
    """Names are unique where they are used; turns do not nest."""
    for what, names in (
        ("module", [m.name for m, _ in modules(children)]),
        ("parameter", [p.name for p in parameters(children)]),
    ):
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise SchemaError(f"{where}: {what} {twice!r} is declared twice: give each its own name")
    _check_children(children, where, in_role)


def _check_children(children: Iterable[Child], where: str, in_role: bool) -> None:
    for child in children:
        if isinstance(child, Role):
            if in_role:
                raise SchemaError(f"{where}: <{child.name}> stands inside another turn: turns do not nest")
            _check_children(child.children, where, True)
        elif isinstance(child, Module):
            _check_level(child.children, f"{_qualify(where)} module {child.name!r}", in_role=in_role)
        elif isinstance(child, (Union, Scaffold)):
            _check_children(child.members if isinstance(child, Union) else child.children, where, in_role)


def _qualify(where: str) -> str:
    return where.removesuffix(",") + ","
