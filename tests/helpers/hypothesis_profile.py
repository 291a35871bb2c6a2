"""Number of examples of a property test, and tests that only thorough runs take.

`make test` tries 15% of them, `make test-all` three eighths (`CHOREOGRAPH_EXAMPLES`), and `CHOREOGRAPH_THOROUGH=1` all.
"""

import os

import pytest

THOROUGH = bool(os.environ.get("CHOREOGRAPH_THOROUGH"))
SHARE = float(os.environ.get("CHOREOGRAPH_EXAMPLES", 0.15))
# Marks a slow test whose promise a faster one covers.
only_thorough = pytest.mark.skipif(not THOROUGH, reason="takes minutes: CHOREOGRAPH_THOROUGH=1 runs it")


def many(examples: int, minimum: int = 5) -> int:
    """Return how many of `examples` are tried."""
    return examples if THOROUGH else max(minimum, int(examples * SHARE))
