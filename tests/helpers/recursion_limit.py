"""Where calls may nest a little only, so that chains need not be long to show who walks them by recursion."""

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def limit_recursion(max_depth: int) -> Iterator[None]:
    """Behind those that are nested already."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + max_depth)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)
