"""One answer to several questions (Prompt Choreography §3.3, Figure 4).

Measures the cost of blocked attention. In prefix mode the second question attends to the first. In
choreographed mode, neither attends to the other: `serial` places one after the other, `parallel` places
both at the same position.
"""

from collections.abc import Sequence
from typing import Any

from ...api.message import Message
from ...errors import ConfigError
from .run import BASELINE, Condition, WorkflowRun, check_choices

SYSTEM = "Read the questions and answer all of them."

PAPER_SYSTEM = "Answer all questions."  # verbatim

CLOSING = "Now answer all of the questions above, each in one short sentence."

TASK_KIND = "pair"

FORMS = ("guided", "paper", "in_context")

TOPOLOGIES = ("serial", "parallel")

CONDITIONS = BASELINE | {name: Condition("choreographed", {"topology": name}) for name in TOPOLOGIES}


def run(wf: WorkflowRun, task: str | Sequence[str], *, topology: str = "serial", form: str = "guided") -> Message:
    """Answer all questions of a task (a list, or one per line).

    Args:
        form: "guided": a turn after the questions and the start of the answer say that all are to be
            answered; "paper": only the system prompt does; "in_context": as "guided", with that turn in the header
            of the answer, so that it attends to the questions.
    """
    questions = [line for line in task.splitlines() if line.strip()] if isinstance(task, str) else list(task)
    if not questions:
        raise ConfigError("task: give one question or more, as a list or one a line")
    check_choices(form=(form, FORMS))
    is_paper = form == "paper"
    system = wf.prefill("system", wf.system(PAPER_SYSTEM if is_paper else SYSTEM))
    question_messages = [wf.prefill("question", wf.user(question), [system]) for question in questions]
    closing = [wf.prefill("closing", wf.user(CLOSING), [system])] if form == "guided" else []
    parts = [[system], question_messages, closing]
    offsets = topology_offsets(topology, *parts)
    header = [wf.assistant("" if is_paper else "Answers to all questions:\n-")]
    if form == "in_context":
        header.insert(0, wf.user(CLOSING))
    end = sum(max((m.length for m in part), default=0) for part in parts) if topology == "parallel" else None
    context = [m for part in parts for m in part]
    # that questions do not see each other is what this measures
    return wf.decode("answer", header, context, offsets=offsets, new_offset=end, warn_blocked=False)


def topology_offsets(topology: str, *parts: Sequence[Message]) -> list[int | None]:
    """Return the position offsets of all parents.

    "serial" places them one after the other. "parallel" places the messages of one part at the same
    position, and the next part after the longest of them.
    """
    check_choices(topology=(topology, TOPOLOGIES))
    offsets: list[Any] = []
    start = 0
    for part in parts:
        offsets += [start if topology == "parallel" else None for _ in part]
        start += max((m.length for m in part), default=0) if topology == "parallel" else 0
    return offsets
