"""Schemas and prompts as values (Prompt Cache §3.2).

    schema("trip", system("You plan trips."), user(module("plan", "For ", parameter("days", 5), " days.")))

Adjacent texts are joined, so equal schemas are equal values no matter how they were built.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import PromptError, SchemaError

RoleName = Literal["system", "user", "assistant"]

NAME = r"[^\s<>/&\"'=!?]+"  # regular expression of a module or parameter name
ROLES: tuple[RoleName, ...] = ("system", "user", "assistant")
TAGS = ("schema", "module", "union", "parameter", "param", "scaffold", *ROLES)  # tags of a schema


@dataclass(frozen=True)
class Parameter:
    """Positions reserved for an argument."""

    name: str
    length: int  # maximum tokens of an argument
    default: str | None = None  # argument of prompts that give none; None: empty

    def __post_init__(self) -> None:
        _check_name(self.name, "parameter")
        if isinstance(self.length, bool) or not isinstance(self.length, int) or self.length < 1:
            raise SchemaError(f"parameter {self.name!r}: length={self.length!r}: use an integer of 1 or more")


@dataclass(frozen=True)
class Module:
    """Reusable content that prompts import by name."""

    name: str
    children: tuple["Child", ...] = ()
    cache: bool = True  # False: same positions, but computed anew for every prompt

    def __post_init__(self) -> None:
        _check_name(self.name, "module")
        if self.name in (*TAGS, "prompt"):
            raise SchemaError(f"module name={self.name!r} is a word of the language: choose another")
        object.__setattr__(self, "children", _merge_texts(self.children))


@dataclass(frozen=True)
class Union:
    """Modules of which a prompt imports at most one."""

    members: tuple[Module, ...]
    required: bool = False  # True: a prompt must import one

    def __post_init__(self) -> None:
        object.__setattr__(self, "members", tuple(self.members))
        if not self.members or not all(isinstance(member, Module) for member in self.members):
            raise SchemaError("a <union> holds modules, at least one, and no text: put text into a module")

    @property
    def children(self) -> tuple[Module, ...]:
        return self.members


@dataclass(frozen=True)
class Role:
    """Chat turn, rendered with the model's own template."""

    name: RoleName
    children: tuple["Child", ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "children", _merge_texts(self.children))


@dataclass(frozen=True)
class Scaffold:
    """Modules that attend to each other if a prompt imports all."""

    children: tuple["Module | Union", ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "children", tuple(self.children))
        if not self.children or not all(isinstance(child, (Module, Union)) for child in self.children):
            raise SchemaError("a <scaffold> holds modules and unions, at least one, and no text")


Child = str | Parameter | Module | Union | Role | Scaffold


@dataclass(frozen=True)
class Schema:
    """Content that prompts share: importable modules, and text of every prompt."""

    name: str
    children: tuple[Child, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not re.fullmatch(r"[^<>\"]+", self.name):
            raise SchemaError(f"schema name={self.name!r}: use text without <, > and quotes")
        object.__setattr__(self, "children", _merge_texts(self.children))
        _check_level(self.children, f"schema {self.name!r}")
        if any(parameter.name == "schema" for parameter in parameters(self.children)):
            raise SchemaError("a parameter of the schema itself cannot be called 'schema': prompts name theirs so")

    @property
    def fingerprint(self) -> str:
        """Hash of the schema's content."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Import:
    """Import of a module, with imports and new text inside it."""

    name: str
    children: tuple["str | Import | Role", ...] = ()
    arguments: Mapping[str, str] = field(default_factory=dict)  # of the module's own parameters

    def __post_init__(self) -> None:
        _check_prompt_level(self, f"import {self.name!r}")


@dataclass(frozen=True)
class Prompt:
    """Imports from a schema, and new text."""

    schema: str  # name of the schema
    children: tuple[str | Import | Role, ...] = ()
    arguments: Mapping[str, str] = field(default_factory=dict)  # of the schema's own parameters

    def __post_init__(self) -> None:
        _check_prompt_level(self, "prompt")


# -- builders -----------------------------------------------------------------------------------------------


def schema(name: str, *children: Child) -> Schema:
    """Build a schema."""
    return Schema(name, children)


def module(name: str, *children: Child, cache: bool = True) -> Module:
    """Build a module that prompts import by name."""
    return Module(name, children, cache)


def union(*members: Module, required: bool = False) -> Union:
    """Build a union: a prompt imports at most one member."""
    return Union(members, required)


def scaffold(*children: Module | Union) -> Scaffold:
    """Build a scaffold of modules that attend to each other."""
    return Scaffold(children)


def parameter(name: str, length: int, default: str | None = None) -> Parameter:
    """Build a parameter: positions for an argument of at most `length` tokens."""
    return Parameter(name, length, default)


def system(*children: Child) -> Role:
    """Build a system turn."""
    return Role("system", children)


def user(*children: Child) -> Role:
    """Build a user turn."""
    return Role("user", children)


def assistant(*children: Child) -> Role:
    """Build an assistant turn."""
    return Role("assistant", children)


# -- queries ------------------------------------------------------------------------------------------------


def modules(children: Iterable[Child]) -> Iterator[tuple[Module, Union | None]]:
    """Yield (module, union) pairs of one level, including turns and scaffolds."""
    for child in children:
        if isinstance(child, Module):
            yield child, None
        elif isinstance(child, Union):
            yield from ((member, child) for member in child.members)
        elif isinstance(child, (Role, Scaffold)):
            yield from modules(child.children)


def parameters(children: Iterable[Child]) -> Iterator[Parameter]:
    """Yield the parameters of one level, including those in chat turns."""
    for child in children:
        if isinstance(child, Parameter):
            yield child
        elif isinstance(child, Role):
            yield from parameters(child.children)


def has_roles(children: Iterable[object]) -> bool:
    """Return whether there is a chat turn at any depth."""
    return any(isinstance(child, Role) or has_roles(getattr(child, "children", ())) for child in children)


# -- validation ---------------------------------------------------------------------------------------------


def _check_prompt_level(value: Import | Prompt, where: str) -> None:
    """Check a prompt or import, and join its adjacent texts."""
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
    """Join adjacent texts and drop empty ones."""
    merged: list[Any] = []
    for child in (children,) if isinstance(children, str) else children:
        if not isinstance(child, (str, Parameter, Module, Union, Role, Scaffold, Import)):
            raise SchemaError(f"{child!r}: use text, parameters, modules, unions, roles and scaffolds")
        if isinstance(child, str) and merged and isinstance(merged[-1], str):
            merged[-1] += child
        elif child != "":
            merged.append(child)
    return tuple(merged)


def _check_name(name: object, label: str) -> None:
    if not isinstance(name, str) or not re.fullmatch(NAME, name):
        raise SchemaError(f"{label} name={name!r}: use one word without quotes, <, >, /, &, =, ? or !")


def _check_level(children: Iterable[Child], where: str, *, in_role: bool = False) -> None:
    """Check that names are unique per module and turns do not nest."""
    names = [("module", module.name) for module, _ in modules(children)]
    names += [("parameter", parameter.name) for parameter in parameters(children)]
    for (kind, name), count in Counter(names).items():
        if count > 1:
            raise SchemaError(f"{where}: {kind} {name!r} is declared twice: give each its own name")
    for child in children:
        if isinstance(child, Role) and in_role:
            raise SchemaError(f"{where}: <{child.name}> is inside another turn: turns do not nest")
        if isinstance(child, Module):
            _check_level(child.children, f"{where}, module {child.name!r}", in_role=in_role)
        elif isinstance(child, (Union, Scaffold, Role)):
            _check_level(child.children, where, in_role=in_role or isinstance(child, Role))
