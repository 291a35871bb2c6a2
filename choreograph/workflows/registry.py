"""Find workflows by name or file path."""

import functools
import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from ..engine.message import Message
from ..errors import ConfigError
from .run import DEFAULT_CONDITIONS, Condition, WorkflowFunction

_PACKAGE = __name__.rpartition(".")[0]
_SUPPORT = {"parsing", "registry", "run"}  # modules of this package that are not workflows


def names() -> list[str]:
    """The workflows that come with the package."""
    return sorted(m.name for m in pkgutil.iter_modules([str(Path(__file__).parent)]) if m.name not in _SUPPORT)


def find(name: str) -> WorkflowFunction:
    """The `run` function of a workflow, by name or by the path of a Python file that defines one."""
    if name in names():
        return importlib.import_module(f"{_PACKAGE}.{name}").run
    path = Path(name)
    if path.suffix == ".py" and path.is_file():
        module = _load(path)
        if callable(getattr(module, "run", None)):
            return _bind_module(module)
        raise ConfigError(f"workflow {name!r}: the file defines no run(performance, task)")
    raise ConfigError(f"workflow {name!r}: use one of {names()}, or the path of a Python file")


def _load(path: Path) -> ModuleType:
    """The module of a file. Python knows it under a name of its own, which dataclasses ask for and no other has."""
    spec = importlib.util.spec_from_file_location(f"workflow {path.resolve()}", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException as exc:
        del sys.modules[spec.name]
        if isinstance(exc, SyntaxError):
            raise ConfigError(f"{exc.filename}, line {exc.lineno}: {exc.msg}") from None
        raise
    return module


class _BoundWorkflow(functools.partial[Message]):
    """A `run` that a file names and does not define, with the names of the file."""

    module_vars: dict[str, Any]


def _bind_module(module: ModuleType) -> WorkflowFunction:
    if _globals_of(module.run) is vars(module):
        return module.run
    result = _BoundWorkflow(module.run)
    result.module_vars = vars(module)
    return result


def source_modules(workflow: WorkflowFunction) -> list[dict[str, Any]]:
    """The names of the files of a workflow: of the one in which it was looked up, and of the one that defines it."""
    if isinstance(workflow, _BoundWorkflow):
        return [workflow.module_vars, _globals_of(workflow.func)]
    return [_globals_of(workflow)]


def _globals_of(run: WorkflowFunction) -> dict[str, Any]:
    """The names of the file in which a function, what a decorator was put around, or a class of callables stands."""
    inner = inspect.unwrap(run)
    return getattr(inner, "__globals__", None) or getattr(type(inner).__call__, "__globals__", {})


def conditions_of(workflow: WorkflowFunction) -> Mapping[str, Condition]:
    """The ways in which a workflow is compared; the first one is the baseline."""
    result = _module_attr(workflow, "CONDITIONS", DEFAULT_CONDITIONS)
    if not isinstance(result, Mapping) or not result or not all(isinstance(c, Condition) for c in result.values()):
        raise ConfigError(f"CONDITIONS={result!r:.60}: use a dict of one Condition or more, by their names")
    return result


def takes_pairs(workflow: WorkflowFunction) -> bool:
    """Whether a task of the workflow is two examples."""
    return _module_attr(workflow, "TASK_KIND", "") == "pair"


def _module_attr(workflow: WorkflowFunction, name: str, default: Any) -> Any:
    """A name of the files of a workflow, the first that has it."""
    return next((names[name] for names in source_modules(workflow) if name in names), default)
