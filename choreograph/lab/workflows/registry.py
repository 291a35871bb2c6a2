"""Find workflows by name or file path."""

import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from ...api.message import Message
from ...errors import ConfigError
from .run import DEFAULT_CONDITIONS, Condition, WorkflowFunction

_PACKAGE = __name__.rpartition(".")[0]

_NOT_WORKFLOWS = {"answers", "parsing", "registry", "remarks", "run"}  # other modules of this package


@dataclass(frozen=True)
class WorkflowModule:
    """Callable wrapper of a module with `run` and optional `CONDITIONS`, `TASK_KIND`."""

    module: ModuleType

    def __call__(self, *args: Any, **options: Any) -> Message:
        return self.module.run(*args, **options)

    def __reduce__(self) -> tuple[Any, ...]:
        """Name the module, for a process that has to load it."""
        file = self.module.__file__ or ""
        return find, (Path(file).stem if self.module.__package__ == _PACKAGE else str(Path(file).resolve()),)

    @property
    def __wrapped__(self) -> WorkflowFunction:
        """The module's `run`, for `inspect`."""
        return self.module.run


def names() -> list[str]:
    """Return the names of the package's workflows."""
    modules = pkgutil.iter_modules([str(Path(__file__).parent)])
    return sorted(module.name for module in modules if module.name not in _NOT_WORKFLOWS)


def find(name: str) -> WorkflowModule:
    """Load a workflow by name or from a Python file with `run`."""
    if name in names():
        return WorkflowModule(importlib.import_module(f"{_PACKAGE}.{name}"))
    path = Path(name)
    if path.suffix != ".py" or not path.is_file():
        raise ConfigError(f"workflow {name!r}: use one of {names()}, or the path of a Python file")
    spec = importlib.util.spec_from_file_location(f"workflow {path.resolve()}", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException as exc:
        del sys.modules[spec.name]
        if isinstance(exc, SyntaxError):
            raise ConfigError(f"{exc.filename}, line {exc.lineno}: {exc.msg}") from None
        raise
    if not callable(getattr(module, "run", None)):
        raise ConfigError(f"workflow {name!r}: the file defines no run(wf, task)")
    return WorkflowModule(module)


def source_modules(workflow: WorkflowFunction) -> list[dict[str, Any]]:
    """Return the globals of a workflow's module.

    If `run` is imported, the globals of the module that defines it follow.
    """
    defining = getattr(inspect.unwrap(workflow), "__globals__", {})
    if not isinstance(workflow, WorkflowModule) or vars(workflow.module) is defining:
        return [defining]
    return [vars(workflow.module), defining]


def conditions_of(workflow: WorkflowFunction) -> Mapping[str, Condition]:
    """Return the conditions to compare a workflow under; the baseline is first."""
    result = _module_attr(workflow, "CONDITIONS", DEFAULT_CONDITIONS)
    if not isinstance(result, Mapping) or not result or not all(isinstance(c, Condition) for c in result.values()):
        raise ConfigError(f"CONDITIONS={result!r:.60}: use a dict of one Condition or more, by their names")
    return result


def takes_pairs(workflow: WorkflowFunction) -> bool:
    """Return whether each task of the workflow pairs two examples."""
    return _module_attr(workflow, "TASK_KIND", "") == "pair"


def _module_attr(workflow: WorkflowFunction, name: str, default: Any) -> Any:
    return next((module[name] for module in source_modules(workflow) if name in module), default)
