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
from .run import WorkflowRun, check_choices

BRANCH = (
    "Divide these concepts into two groups of equal size, so that each group could make a story. Name every concept "
    "once.\n\nConcepts: {concepts}"
)

SOLVE = "Write a short story of a few sentences that uses all of these concepts.\n\nConcepts: {concepts}"

MERGE = (
    "Two stories follow. Merge them into one coherent short story that keeps all concepts of both.\n\n"
    "Concepts: {concepts}"
)


SYSTEM = "You write short stories."

MERGE_BEHIND = (
    "Merge these two stories into one coherent short story that keeps all concepts of both.\n\nConcepts: {concepts}"
)

FORMS = ("paper", "in_context")


def run(wf: WorkflowRun, task: str | Sequence[str], *, topology: str = "serial", form: str = "paper") -> Message:
    """Write a story from concepts, given as a list or comma-separated string.

    Args:
        form: "paper": the instruction to merge precedes the stories; "in_context": stories and merge share a system
            turn, and the instruction is in the header of the merge, behind the stories.
    """
    check_choices(form=(form, FORMS))
    concepts = [c.strip() for c in task.split(",") if c.strip()] if isinstance(task, str) else list(task)
    if len(concepts) < 2:
        raise ConfigError("task: give two concepts or more, as a list or separated by commas")
    halves = split_concepts(wf, concepts)
    wf.record("groups", halves)
    is_paper, named = form == "paper", ", ".join(concepts)
    system = [] if is_paper else [wf.prefill("system", wf.system(SYSTEM))]
    stories = []
    for half in halves:
        prompt = wf.prefill("solve prompt", wf.user(SOLVE.format(concepts=", ".join(half))), system)
        stories.append(wf.decode("solve", wf.assistant("Story:"), [*system, prompt]))
    header = [wf.assistant("Merged story:")]
    if is_paper:
        first = wf.prefill("merge prompt", wf.user(MERGE.format(concepts=named)))
    else:
        (first,) = system
        header.insert(0, wf.user(MERGE_BEHIND.format(concepts=named)))
    offsets = topology_offsets(topology, [first], stories)
    new_offset = first.length + max(story.length for story in stories) if topology == "parallel" else None
    return wf.decode("merge", header, [first, *stories], offsets=offsets, new_offset=new_offset)


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
