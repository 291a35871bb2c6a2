"""How many examples a property is tried on: three eighths by default, all of them where time is no matter."""

import os

THOROUGH = bool(os.environ.get("CHOREOGRAPH_THOROUGH"))


def many(examples: int, minimum: int = 5) -> int:
    return examples if THOROUGH else max(minimum, examples * 3 // 8)
