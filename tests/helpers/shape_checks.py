"""Shapes in signatures are checked at run time, and nothing else is: jaxtyping's import hook wraps every function of a
module, with which tests of tiny models take a quarter longer."""

from collections.abc import Callable
from typing import Any

import jaxtyping

_checked = jaxtyping.jaxtyped


def check_shapes(*modules: str) -> None:
    """In all modules of these packages, to be called before they are imported."""
    jaxtyping.jaxtyped = _check_annotated
    jaxtyping.install_import_hook(list(modules), "beartype.beartype")


def _check_annotated(*, typechecker: Any) -> Callable[[Any], Any]:
    return lambda one: _checked(one, typechecker=typechecker) if _names_shapes(one) else one


def _names_shapes(target: Any) -> bool:
    """Whether a function, or a class of values, names the shape of an array: `Float[Tensor, "T G D"]`."""
    return any("Tensor, '" in str(kind) or "ndarray, '" in str(kind) for kind in target.__annotations__.values())
