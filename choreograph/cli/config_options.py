"""Options of commands that are fields of config classes.

A field with a docstring below it is an option: type, bounds, choices, default and help come from the class.
"""

import ast
import dataclasses
import inspect
import reprlib
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
from annotated_types import Ge, Le
from pydantic import Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from ..errors import ConfigError
from ..utils import describe_validation_error


def config_parameters(config_classes: Iterable[type]) -> dict[str, inspect.Parameter]:
    """Return the parameters of a command by the fields that they set."""
    result = {}
    for config_class in config_classes:
        hints, descriptions = get_type_hints(config_class, include_extras=True), _descriptions(config_class)
        for field in dataclasses.fields(config_class):
            if field.name in descriptions:
                result[field.name] = _parameter(field, hints[field.name], descriptions[field.name])
    return result


def add_parameters(command: Callable[..., None], parameters: Mapping[str, inspect.Parameter]) -> None:
    """Add options to a command, whose last parameter is `**options`."""
    own = list(inspect.signature(command).parameters.values())[:-1]
    command.__signature__ = inspect.Signature([*own, *parameters.values()])  # type: ignore[attr-defined]


def is_list(parameter: inspect.Parameter) -> bool:
    """Return whether an option may be repeated."""
    (kind, *_) = get_args(parameter.annotation)
    return list[str] in (kind, *get_args(kind))


def read_value(parameter: inspect.Parameter, value: object, where: str) -> Any:
    """Return an option's value from a file, of the type that the command line reads.

    A text is a list of one where the option may be repeated.

    Raises:
        ConfigError: if it has another type, or is out of bounds.
    """
    kind, option, *_ = get_args(parameter.annotation)
    bounds = {"ge": option.min, "le": option.max} if option.min is not None or option.max is not None else {}
    try:
        listed = [value] if is_list(parameter) and isinstance(value, str) else value
        annotation: Any = Annotated[kind, Field(**bounds)]
        return TypeAdapter(annotation).validate_python(listed)
    except ValidationError as exc:
        reason = describe_validation_error(exc)
        raise ConfigError(f"{where}: {parameter.name}={reprlib.repr(value)}: {reason}: use what --help says") from None


def _descriptions(config_class: type) -> dict[str, str]:
    """Return the docstrings below the fields of a class."""
    (tree,) = ast.parse(inspect.getsource(config_class)).body
    assert isinstance(tree, ast.ClassDef)
    return {
        ast.unparse(field.target): str(text.value.value)
        for field, text in pairwise(tree.body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


def _parameter(field: "dataclasses.Field[Any]", annotation: Any, description: str) -> inspect.Parameter:
    """Return a command's parameter for a field of a config class.

    A field of several values is an option that may be repeated, with a name in the singular.
    """
    name, settings, decls = field.name, dict[str, Any](), list[str]()
    kind = _read_type(annotation, settings)
    settings["help"] = " ".join(description.split()) + settings.pop("choices", "")
    if kind == list[str]:
        name = name.removesuffix("s")
        decls = [f"--{name.replace('_', '-')}"]
    elif field.default not in (None, False, dataclasses.MISSING) and "by default" not in description:
        settings["help"] += f" (default: {field.default})"
    is_required = field.default is dataclasses.MISSING
    option: Any = Annotated[kind if is_required else kind | None, typer.Option(*decls, **settings)]
    default = inspect.Parameter.empty if is_required else None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=option)


def _read_type(annotation: Any, settings: dict[str, Any]) -> Any:
    """Return the type that the command line reads.

    Adds choices and bounds to the settings of the option.
    """
    arguments = [argument for argument in get_args(annotation) if argument is not NoneType]
    if get_origin(annotation) is Annotated:
        kind = _read_type(arguments[0], settings)
        for item in arguments[1:]:
            for bound in item.metadata if isinstance(item, FieldInfo) else [item]:
                settings |= {"min": bound.ge} if isinstance(bound, Ge) else {}
                settings |= {"max": bound.le} if isinstance(bound, Le) else {}
        return kind
    if get_origin(annotation) is Literal:
        settings["choices"] = f" One of {', '.join(arguments)}."
        return str
    if get_origin(annotation) is tuple:
        return list[str]
    kind = _read_type(arguments[0], settings) if arguments else annotation
    return str if len(arguments) > 1 else kind  # a text may be any of several types
