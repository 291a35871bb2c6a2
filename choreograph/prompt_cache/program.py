"""Schemas from Python: a function whose text is the prompt, whose `if` is an optional module, whose `match` a union.

    @program
    def trip(plan: bool, days: Param(5), place: str):
        with system:
            "You plan trips."
        if plan:
            f"I have {days} days."
            match place:
                case "coast":
                    "I want to swim."
                case "alps":
                    "I want to climb."

    trip.schema                                             # what a PromptCache takes
    trip("And then?", plan=True, days="3", place="alps")    # a prompt of that schema

The function is read, never run. Every string that stands as a statement is text as it stands, the first one too. An
`if` tests one argument by name; a `match` has cases of plain strings.
"""

import ast
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ..errors import PromptError, SchemaError
from .schema import ROLES, Child, Import, Module, Parameter, Prompt, Role, Schema, Union


@dataclass(frozen=True)
class Param:
    """An argument that is a text of at most `length` tokens."""

    length: int
    default: str | None = None


def program(function: Callable[..., Any]) -> "Program":
    """Reads a function as a schema of the same name."""
    return Program(function)


def _definition(function: Callable[..., Any]) -> ast.FunctionDef:
    try:
        lines, first = inspect.getsourcelines(function)
        wrap = "if True:\n" if lines[0][:1].isspace() else ""  # a function inside something is indented
        module = ast.parse(wrap + "".join(lines))
        ast.increment_lineno(module, first - 1 - wrap.count("\n"))
    except (OSError, TypeError, SyntaxError):
        raise SchemaError("a program is read from its source: define it in a file, as one function") from None
    result = next((node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)), None)
    if result is None:
        raise SchemaError("a program is one function")
    return result


def _annotations(function: Callable[..., Any]) -> dict[str, Any]:
    """As values, also under `from __future__ import annotations`."""
    try:
        return inspect.get_annotations(function, eval_str=True)
    except (NameError, SyntaxError):  # a text that means nothing here may be meant for people
        return inspect.get_annotations(function)


class Program:
    """A schema, and prompts of it by a call."""

    def __init__(self, function: Callable[..., Any]) -> None:
        definition = _definition(function)
        self.name = function.__name__
        self._text_arguments = {
            name: value for name, value in _annotations(function).items() if isinstance(value, Param)
        }
        known = inspect.signature(function).parameters
        self._argument_names = list(known)
        self._defaults = {name: p.default for name, p in known.items() if p.default is not p.empty}
        self._union_arguments: dict[int, str] = {}  # what chooses a union's member, by the identity of the union
        self.schema = Schema(self.name, tuple(self._block(definition.body)))

    def __call__(self, *content: str | Role, **arguments: object) -> Prompt:
        """A prompt: what is said in it, and the arguments that choose and fill modules."""
        for name in arguments:
            if name not in self._argument_names:
                raise PromptError(f"{self.name} has no argument {name!r}; it has {self._argument_names}")
        taken: set[str] = set()
        imports, texts = self._build_imports(self.schema.children, self._defaults | arguments, taken)
        idle = [name for name in arguments if name not in taken and arguments[name] not in (False, None)]
        if idle:
            raise PromptError(f"{self.name}: {idle} change nothing here: choose the module that they belong to")
        return Prompt(self.name, (*imports, *content), texts)

    # -- the schema ---------------------------------------------------------------------------------------

    def _block(self, statements: Iterable[ast.stmt]) -> Iterable[Child]:
        for statement in statements:
            yield from self._statement(statement)

    def _statement(self, statement: ast.stmt) -> Iterable[Child]:
        match statement:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield text
            case ast.Expr(value=ast.JoinedStr(values=parts)):
                yield from map(self._part, parts)
            case ast.If(test=ast.Name(id=name), body=body, orelse=[]):
                self._check_argument(name, statement)
                yield Module(name, tuple(self._block(body)))
            case ast.Match(subject=ast.Name(id=name), cases=cases):
                self._check_argument(name, statement)
                union = Union(tuple(self._case(case, statement) for case in cases))
                self._union_arguments[id(union)] = name
                yield union
            case ast.With(items=[ast.withitem(context_expr=ast.Name(id=role))], body=body) if role in ROLES:
                yield Role(role, tuple(self._block(body)))
            case ast.Pass():
                return
            case _:
                raise self._error(
                    "text, `if name:`, `match name:` or `with system|user|assistant:` is expected", statement
                )

    def _part(self, part: ast.expr) -> Child:
        match part:
            case ast.Constant(value=str(text)):
                return text
            case ast.FormattedValue(value=ast.Name(id=name), conversion=-1, format_spec=None) if (
                name in self._text_arguments
            ):
                return Parameter(name, self._text_arguments[name].length, self._text_arguments[name].default)
        raise self._error("inside text, {name} stands for an argument that is annotated with Param(length)", part)

    def _case(self, case: ast.match_case, statement: ast.stmt) -> Module:
        match case:
            case ast.match_case(pattern=ast.MatchValue(value=ast.Constant(value=str(name))), guard=None):
                return Module(name, tuple(self._block(case.body)))
        raise self._error('a case is one string: case "name":', statement)

    def _check_argument(self, name: str, statement: ast.AST) -> None:
        if name not in self._argument_names or name in self._text_arguments:
            raise self._error(f"{name!r} has to be an argument of the function, without Param", statement)

    def _error(self, message: str, node: ast.AST) -> SchemaError:
        return SchemaError(f"program {self.name}, line {getattr(node, 'lineno', '?')}: {message}")

    # -- prompts ------------------------------------------------------------------------------------------

    def _build_imports(
        self, children: Iterable[Child], arguments: dict[str, Any], used_arguments: set[str]
    ) -> tuple[list[Import], dict[str, str]]:
        """What the arguments choose at one level, and the texts that fill its own parameters."""
        imports: list[Import] = []
        texts: dict[str, str] = {}
        for child in children:
            if isinstance(child, Parameter) and arguments.get(child.name) is not None:
                used_arguments.add(child.name)
                texts[child.name] = str(arguments[child.name])
            elif isinstance(child, Role):
                more, filled = self._build_imports(child.children, arguments, used_arguments)
                imports, texts = imports + more, texts | filled
            elif isinstance(child, Module) and arguments.get(child.name):
                used_arguments.add(child.name)
                imports.append(self._build_import(child, arguments, used_arguments))
            elif isinstance(child, Union):
                imports += self._build_union_import(child, arguments, used_arguments)
        return imports, texts

    def _build_union_import(self, union: Union, arguments: dict[str, Any], used_arguments: set[str]) -> list[Import]:
        subject = self._union_arguments[id(union)]
        expected = arguments.get(subject)
        if expected is None:
            return []
        member = next((m for m in union.members if m.name == expected), None)
        if member is None:
            raise PromptError(f"{self.name}: {subject}={expected!r}: use one of {[m.name for m in union.members]}")
        used_arguments.add(subject)
        return [self._build_import(member, arguments, used_arguments)]

    def _build_import(self, module: Module, arguments: dict[str, Any], used_arguments: set[str]) -> Import:
        imports, texts = self._build_imports(module.children, arguments, used_arguments)
        return Import(module.name, tuple(imports), texts)
