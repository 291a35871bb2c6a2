"""The architectures that the engine serves, as a table of facts. A row is added with a test that proves it."""

from typing import NamedTuple


class Family(NamedTuple):
    """interleaved: rotary pairs are neighbours instead of halves. proof: the test that runs this family."""

    interleaved: bool
    proof: str


FAMILIES: dict[str, Family] = {
    "llama": Family(False, "tests/models/test_families.py"),
    "mistral": Family(False, "tests/models/test_families.py"),
    "qwen2": Family(False, "tests/models/test_families.py"),
    "qwen3": Family(False, "tests/models/test_families.py"),
}
