"""Number of examples of a property test.

`make test` tries 15% of them, `make test-all` three eighths (`CHOREOGRAPH_EXAMPLES`), and `CHOREOGRAPH_THOROUGH=1` all.
"""

import os

THOROUGH = bool(os.environ.get("CHOREOGRAPH_THOROUGH"))
SHARE = float(os.environ.get("CHOREOGRAPH_EXAMPLES", 0.15))


def many(examples: int, minimum: int = 5) -> int:
    """Return how many of `examples` are tried."""
    return examples if THOROUGH else max(minimum, int(examples * SHARE))
