"""Number of examples of a property test.

`make test` tries an eighth of them or a little more, `make test-all` three eighths, and `CHOREOGRAPH_THOROUGH=1` all.
"""

import os

THOROUGH = bool(os.environ.get("CHOREOGRAPH_THOROUGH"))
SHARE = 1.0 if THOROUGH else float(os.environ.get("CHOREOGRAPH_EXAMPLES", 0.15))


def many(examples: int, minimum: int = 4) -> int:
    """Return how many of `examples` are tried."""
    return max(min(minimum, examples), int(examples * SHARE))
