"""How many examples a property is tried on: three eighths by default, all of them where time is no matter."""

import os

THOROUGH = bool(os.environ.get("CHOREOGRAPH_THOROUGH"))


def many(examples: int, least: int = 5) -> int:
    return examples if THOROUGH else max(least, examples * 3 // 8)
