"""The papers' workflows, one file each. A workflow is a function `run(performance, task, **options)`.

`find` looks a workflow up by the name of its file here, or by the path of a user's own file: adding one needs no
registry. Beside `run`, a file may hold `CONDITIONS`, the ways in which it is compared (by default prefix mode with
choreographed), and `TAKES = "pairs"` if a task is two examples.
"""

import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..message import Message
from .performance import DEFAULT_CONDITIONS, Condition, Performance, Step

Workflow = Callable[..., Message]
_SUPPORT = {"performance", "reading"}
__all__ = ["Condition", "Performance", "Step", "Workflow", "conditions_of", "find", "names", "takes_pairs"]


def names() -> list[str]:
    """The workflows that come with the package."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name not in _SUPPORT)


def find(name: str) -> Workflow:
    """The `run` function of a workflow, by name or by the path of a Python file that defines one."""
    if name in names():
        return importlib.import_module(f"{__name__}.{name}").run
    path = Path(name)
    if path.suffix == ".py" and path.is_file():
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except SyntaxError as problem:
            raise ConfigError(f"{problem.filename}, line {problem.lineno}: {problem.msg}") from None
        if callable(getattr(module, "run", None)):
            return module.run
        raise ConfigError(f"workflow {name!r}: the file defines no run(performance, task)")
    raise ConfigError(f"workflow {name!r}: use one of {names()}, or the path of a Python file")


def conditions_of(workflow: Workflow) -> Mapping[str, Condition]:
    """The ways in which a workflow is compared; the first one is the baseline."""
    return _beside(workflow, "CONDITIONS", DEFAULT_CONDITIONS)


def takes_pairs(workflow: Workflow) -> bool:
    """Whether a task of the workflow is two examples."""
    return _beside(workflow, "TAKES", "") == "pairs"


def _beside(workflow: Workflow, name: str, default: Any) -> Any:
    """A name of the file that defines the workflow."""
    return getattr(workflow, "__globals__", {}).get(name, default)
