"""Build Prompt Cache schemas from Python functions.

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

    trip.schema                                             # for a PromptCache
    trip("And then?", plan=True, days="3", place="alps")    # a prompt of that schema

The function's source is parsed, and the function is never called. Every string statement is text, including the
first. An `if` is a module and tests one argument by name. A `match` is a union and has string cases.
"""

import ast
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import PromptError, SchemaError
from .schema import ROLES, Child, Import, Module, Parameter, Prompt, Role, Schema, Union


@dataclass(frozen=True)
class Param:
    """Annotation of an argument whose text fills a parameter."""

    length: int  # maximum tokens
    default: str | None = None


def program(function: Callable[..., Any]) -> "Program":
    """Parse a function as a schema of the same name."""
    return Program(function)


def _parse_function(function: Callable[..., Any]) -> ast.FunctionDef:
    try:
        lines, first = inspect.getsourcelines(function)
        wrapper = "if True:\n" if lines[0][:1].isspace() else ""  # the source of a nested function is indented
        module = ast.parse(wrapper + "".join(lines))
        definition = next(node for node in ast.walk(module) if isinstance(node, ast.FunctionDef))
    except (OSError, TypeError, SyntaxError, StopIteration):
        raise SchemaError("a program is read from its source: define it in a file, as one function with def") from None
    ast.increment_lineno(module, first - 1 - wrapper.count("\n"))
    return definition


def _arguments(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        signature = inspect.signature(function, eval_str=True)  # also under `from __future__ import annotations`
    except (NameError, SyntaxError):  # an annotation may be any text
        signature = inspect.signature(function)
    return signature.parameters


class Program:
    """Schema of a function; a call builds a prompt for the schema."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name = function.__name__
        arguments = _arguments(function)
        self._argument_names = list(arguments)
        self._params = {name: p.annotation for name, p in arguments.items() if isinstance(p.annotation, Param)}
        self._defaults = {name: p.default for name, p in arguments.items() if p.default is not p.empty}
        self._union_arguments: dict[int, str] = {}  # argument that chooses the member, by id of the union
        self.schema = Schema(self.name, tuple(self._read_block(_parse_function(function).body)))

    def __call__(self, *content: str | Role, **arguments: object) -> Prompt:
        """Build a prompt.

        Args:
            content: new text, after all imports.
            arguments: values of the function's arguments, which choose modules and fill parameters.
        """
        for name in arguments:
            if name not in self._argument_names:
                raise PromptError(f"{self.name} has no argument {name!r}: it has {self._argument_names}")
        used: set[str] = set()
        imports, texts = self._build_level(self.schema.children, self._defaults | arguments, used)
        unused = [name for name in arguments if name not in used and arguments[name] not in (False, None)]
        if unused:
            raise PromptError(f"{self.name}: {unused} change nothing here: choose the module that they belong to")
        return Prompt(self.name, (*imports, *content), texts)

    # -- schema -------------------------------------------------------------------------------------------

    def _read_block(self, statements: Iterable[ast.stmt]) -> Iterator[Child]:
        for statement in statements:
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield text
                case ast.Expr(value=ast.JoinedStr(values=parts)):
                    yield from map(self._read_part, parts)
                case ast.If(test=ast.Name(id=name), body=body, orelse=[]):
                    self._check_argument(name, statement)
                    yield Module(name, tuple(self._read_block(body)))
                case ast.Match(subject=ast.Name(id=name), cases=cases):
                    self._check_argument(name, statement)
                    union = Union(tuple(self._read_case(case, statement) for case in cases))
                    self._union_arguments[id(union)] = name
                    yield union
                case ast.With(items=[ast.withitem(context_expr=ast.Name(id=role))], body=body) if role in ROLES:
                    yield Role(role, tuple(self._read_block(body)))
                case ast.Pass():
                    pass
                case _:
                    expected = "text, `if name:`, `match name:` or `with system|user|assistant:` is expected"
                    raise self._error(expected, statement)

    def _read_part(self, part: ast.expr) -> Child:
        match part:
            case ast.Constant(value=str(text)):
                return text
            case ast.FormattedValue(value=ast.Name(id=name), conversion=-1, format_spec=None) if name in self._params:
                return Parameter(name, self._params[name].length, self._params[name].default)
        raise self._error("in text, {name} has to be an argument that is annotated with Param(length)", part)

    def _read_case(self, case: ast.match_case, statement: ast.stmt) -> Module:
        match case:
            case ast.match_case(pattern=ast.MatchValue(value=ast.Constant(value=str(name))), guard=None):
                return Module(name, tuple(self._read_block(case.body)))
        raise self._error('a case is one string: case "name":', statement)

    def _check_argument(self, name: str, statement: ast.AST) -> None:
        if name not in self._argument_names or name in self._params:
            raise self._error(f"{name!r} has to be an argument of the function, without Param", statement)

    def _error(self, message: str, node: ast.AST) -> SchemaError:
        return SchemaError(f"program {self.name}, line {getattr(node, 'lineno', '?')}: {message}")

    # -- prompts ------------------------------------------------------------------------------------------

    def _build_level(
        self, children: Iterable[Child], arguments: dict[str, Any], used: set[str]
    ) -> tuple[list[Import], dict[str, str]]:
        """Return chosen modules and parameter texts; add argument names to `used`."""
        imports: list[Import] = []
        texts: dict[str, str] = {}
        for child in children:
            if isinstance(child, Parameter) and arguments.get(child.name) is not None:
                used.add(child.name)
                texts[child.name] = str(arguments[child.name])
            elif isinstance(child, Role):
                inner_imports, inner_texts = self._build_level(child.children, arguments, used)
                imports, texts = imports + inner_imports, texts | inner_texts
            elif isinstance(child, (Module, Union)):
                argument = child.name if isinstance(child, Module) else self._union_arguments[id(child)]
                module = self._choose_module(child, argument, arguments.get(argument))
                if module is not None:
                    used.add(argument)
                    inner_imports, inner_texts = self._build_level(module.children, arguments, used)
                    imports.append(Import(module.name, tuple(inner_imports), inner_texts))
        return imports, texts

    def _choose_module(self, node: Module | Union, argument: str, value: object) -> Module | None:
        """Return the module that an argument chooses, if any."""
        if isinstance(node, Module):
            return node if value else None
        member = next((member for member in node.members if member.name == value), None)
        if member is None and value is not None:
            names = [member.name for member in node.members]
            raise PromptError(f"{self.name}: {argument}={value!r}: use one of {names}")
        return member
