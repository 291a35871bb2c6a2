"""Branch-Solve-Merge (Saha et al. 2024; Prompt Choreography, section 3.3): a story from many concepts, in two halves.

The branch step divides the concepts, two stories are written without sight of each other, and the merge step makes
one story of both. `topology` places the two stories for the merge as in `multi_qa`.
"""

import re
from collections.abc import Sequence
from typing import Any

from ..errors import ConfigError
from ..message import Message
from .multi_qa import CONDITIONS as CONDITIONS
from .multi_qa import placed
from .performance import Performance
from .reading import groups

BRANCH = (
    "Divide these concepts into two groups of equal size, so that each group could make a story. Name every concept "
    "once.\n\nConcepts: {concepts}"
)
SOLVE = "Write a short story of a few sentences that uses all of these concepts.\n\nConcepts: {concepts}"
MERGE = (
    "Two stories follow. Merge them into one coherent short story that keeps all concepts of both.\n\n"
    "Concepts: {concepts}"
)


def run(p: Performance, task: str | Sequence[str], *, topology: str = "serial") -> Message:
    """task: the concepts, as a list or separated by commas. The merged story, not read yet."""
    concepts = [c.strip() for c in task.split(",") if c.strip()] if isinstance(task, str) else list(task)
    if len(concepts) < 2:
        raise ConfigError("task: give two concepts or more, as a list or separated by commas")
    halves = branch(p, concepts)
    p.note("groups", halves)
    stories = []
    for half in halves:
        prompt = p.prefill("solve prompt", p.user(SOLVE.format(concepts=", ".join(half))))
        stories.append(p.decode("solve", p.assistant("Story:"), [prompt]))
    merge = p.prefill("merge prompt", p.user(MERGE.format(concepts=", ".join(concepts))))
    place: dict[str, Any] = {"offsets": placed(topology, [merge], stories)}
    if topology == "parallel":
        place["new_offset"] = merge.length + max(s.length for s in stories)
    return p.decode("merge", p.assistant("Merged story:"), [merge, *stories], **place)


def branch(p: Performance, concepts: list[str]) -> tuple[list[str], list[str]]:
    """The model's division; where it cannot be read, the first half and the second."""
    prompt = p.prefill("branch prompt", p.user(BRANCH.format(concepts=", ".join(concepts))))
    text = p.decode("branch", p.assistant("Group 1:"), [prompt]).text
    divided = groups(re.sub(r"\bgroup 2\b", "Group 2", text, flags=re.IGNORECASE), concepts)
    if divided is None:
        p.could_not_parse("branch")
        middle = (len(concepts) + 1) // 2
        divided = concepts[:middle], concepts[middle:]
    return divided
