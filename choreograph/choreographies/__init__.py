"""The papers' workflows, one file each. A workflow is a function `run(performance, task, **options)`.

`find` looks a workflow up by the name of its file here, or by the path of a user's own file: adding one needs no
registry.
"""

import importlib
import importlib.util
import pkgutil
from collections.abc import Callable
from pathlib import Path

from ..errors import ConfigError
from ..message import Message
from .performance import Performance, Step

Workflow = Callable[..., Message]
_SUPPORT = {"performance"}
__all__ = ["Performance", "Step", "Workflow", "find", "names"]


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
        spec.loader.exec_module(module)
        if callable(getattr(module, "run", None)):
            return module.run
        raise ConfigError(f"workflow {name!r}: the file defines no run(performance, task)")
    raise ConfigError(f"workflow {name!r}: use one of {names()}, or the path of a Python file")
