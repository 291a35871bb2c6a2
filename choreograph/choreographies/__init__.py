"""The papers' workflows, one file each. A workflow is a function `run(performance, task, **options)`.

`find` looks a workflow up by the name of its file here, or by the path of a user's own file: adding one needs no
registry. Beside `run`, a file may hold `CONDITIONS`, the ways in which it is compared (by default prefix mode with
choreographed), and `TAKES = "pairs"` if a task is two examples.
"""

import functools
import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import ConfigError
from ..message import Message
from .performance import DEFAULT_CONDITIONS, Condition, Performance, Step

Workflow = Callable[..., Message]
_SUPPORT = {"performance", "reading"}
__all__ = [
    "Condition",
    "Performance",
    "Step",
    "Workflow",
    "check_options",
    "conditions_of",
    "files_of",
    "find",
    "names",
    "options_of",
    "takes_pairs",
]


def names() -> list[str]:
    """The workflows that come with the package."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name not in _SUPPORT)


def find(name: str) -> Workflow:
    """The `run` function of a workflow, by name or by the path of a Python file that defines one."""
    if name in names():
        return importlib.import_module(f"{__name__}.{name}").run
    path = Path(name)
    if path.suffix == ".py" and path.is_file():
        module = _load(path)
        if callable(getattr(module, "run", None)):
            return _within(module)
        raise ConfigError(f"workflow {name!r}: the file defines no run(performance, task)")
    raise ConfigError(f"workflow {name!r}: use one of {names()}, or the path of a Python file")


def _load(path: Path) -> ModuleType:
    """The module of a file. Python knows it under a name of its own, which dataclasses ask for and no other has."""
    spec = importlib.util.spec_from_file_location(f"workflow {path.resolve()}", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException as problem:
        del sys.modules[spec.name]
        if isinstance(problem, SyntaxError):
            raise ConfigError(f"{problem.filename}, line {problem.lineno}: {problem.msg}") from None
        raise
    return module


class _Named(functools.partial[Message]):
    """A `run` that a file names and does not define, with the names of the file."""

    file: dict[str, Any]


def _within(module: ModuleType) -> Workflow:
    if _names_of(module.run) is vars(module):
        return module.run
    found = _Named(module.run)
    found.file = vars(module)
    return found


def files_of(workflow: Workflow) -> list[dict[str, Any]]:
    """The names of the files of a workflow: of the one in which it was looked up, and of the one that defines it."""
    if isinstance(workflow, _Named):
        return [workflow.file, _names_of(workflow.func)]
    return [_names_of(workflow)]


def _names_of(run: Workflow) -> dict[str, Any]:
    """The names of the file in which a function, what a decorator was put around, or a class of callables stands."""
    inner = inspect.unwrap(run)
    return getattr(inner, "__globals__", None) or getattr(type(inner).__call__, "__globals__", {})


def conditions_of(workflow: Workflow) -> Mapping[str, Condition]:
    """The ways in which a workflow is compared; the first one is the baseline."""
    found = _beside(workflow, "CONDITIONS", DEFAULT_CONDITIONS)
    if not isinstance(found, Mapping) or not found or not all(isinstance(c, Condition) for c in found.values()):
        raise ConfigError(f"CONDITIONS={found!r:.60}: use a dict of one Condition or more, by their names")
    return found


def check_options(workflow: Workflow, options: Mapping[str, Any]) -> None:
    """An option that the workflow does not have is an error that lists those it has; so is one of another type than its
    default, where that says one. A workflow with `**options` takes any."""
    known, taken, open_ended = _parameters(workflow)
    for name, value in options.items():
        if name in taken or not (name in known or open_ended):
            raise ConfigError(f"option {name!r}: the workflow has {list(known) or 'none'}")
        default = known.get(name)
        wanted = (int, float) if type(default) is float else type(default)
        plain = type(default) in (bool, int, float, str)
        if plain and (not isinstance(value, wanted) or isinstance(value, bool) != isinstance(default, bool)):
            raise ConfigError(f"option {name}={value!r}: use a value like its default, {default!r}")


def options_of(workflow: Workflow) -> list[str]:
    """The names of the options that a workflow names."""
    return list(_parameters(workflow)[0])


def _parameters(workflow: Workflow) -> tuple[dict[str, Any], set[str], bool]:
    """The options of a workflow with their defaults, the names of what is given by place, the performance and the task,
    and whether it takes other options too."""
    every = inspect.signature(workflow).parameters.values()
    placed = [p for p in every if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    named = [p for p in placed[2:] if p.kind is p.POSITIONAL_OR_KEYWORD] + [
        p for p in every if p.kind is p.KEYWORD_ONLY
    ]
    taken = {p.name for p in placed[:2] if p.kind is p.POSITIONAL_OR_KEYWORD}
    return {p.name: p.default for p in named}, taken, any(p.kind is p.VAR_KEYWORD for p in every)


def takes_pairs(workflow: Workflow) -> bool:
    """Whether a task of the workflow is two examples."""
    return _beside(workflow, "TAKES", "") == "pairs"


def _beside(workflow: Workflow, name: str, default: Any) -> Any:
    """A name of the files of a workflow, the first that has it."""
    return next((names[name] for names in files_of(workflow) if name in names), default)
