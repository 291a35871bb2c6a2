"""Branch-Solve-Merge: one story from many concepts (Saha et al. 2024).

Prompt Choreography §3.3. The branch step divides the concepts, two stories are written that do not
attend to each other, and the merge step makes one story of both. `topology` places the two stories
for the merge as in `multi_qa`.
"""

from collections.abc import Sequence

from ...api.message import Message
from ...errors import ConfigError
from .multi_qa import CONDITIONS as CONDITIONS
from .multi_qa import topology_offsets
from .parsing import parse_groups
from .run import WorkflowRun

BRANCH = (
    "Divide these concepts into two groups of equal size, so that each group could make a story. Name every concept "
    "once.\n\nConcepts: {concepts}"
)

SOLVE = "Write a short story of a few sentences that uses all of these concepts.\n\nConcepts: {concepts}"

MERGE = (
    "Two stories follow. Merge them into one coherent short story that keeps all concepts of both.\n\n"
    "Concepts: {concepts}"
)


def run(wf: WorkflowRun, task: str | Sequence[str], *, topology: str = "serial") -> Message:
    """Write a story from concepts, given as a list or comma-separated string."""
    concepts = [c.strip() for c in task.split(",") if c.strip()] if isinstance(task, str) else list(task)
    if len(concepts) < 2:
        raise ConfigError("task: give two concepts or more, as a list or separated by commas")
    halves = split_concepts(wf, concepts)
    wf.record("groups", halves)
    stories = []
    for half in halves:
        prompt = wf.prefill("solve prompt", wf.user(SOLVE.format(concepts=", ".join(half))))
        stories.append(wf.decode("solve", wf.assistant("Story:"), [prompt]))
    merge = wf.prefill("merge prompt", wf.user(MERGE.format(concepts=", ".join(concepts))))
    offsets = topology_offsets(topology, [merge], stories)
    new_offset = merge.length + max(story.length for story in stories) if topology == "parallel" else None
    return wf.decode("merge", wf.assistant("Merged story:"), [merge, *stories], offsets=offsets, new_offset=new_offset)


def split_concepts(wf: WorkflowRun, concepts: list[str]) -> tuple[list[str], list[str]]:
    """Divide the concepts with the model; on failure, split in the middle."""
    prompt = wf.prefill("branch prompt", wf.user(BRANCH.format(concepts=", ".join(concepts))))
    text = wf.decode("branch", wf.assistant("Group 1:"), [prompt]).text
    divided = parse_groups(text, concepts)
    if divided is None:
        wf.record_parse_failure("branch")
        middle = (len(concepts) + 1) // 2
        divided = concepts[:middle], concepts[middle:]
    return divided
