"""One answer to several questions (Prompt Choreography §3.3, Figure 4).

Measures the cost of blocked attention. In prefix mode the second question attends to the first. In
choreographed mode, neither attends to the other: `serial` places one after the other, `parallel` places
both at the same position.
"""

from collections.abc import Sequence
from typing import Any

from ..engine.message import Message
from ..errors import ConfigError
from .run import BASELINE, Condition, WorkflowRun

SYSTEM = "Read the questions and answer all of them."

CLOSING = "Now answer all of the questions above, each in one short sentence."

TASK_KIND = "pair"

TOPOLOGIES = ("serial", "parallel")

CONDITIONS = BASELINE | {name: Condition("choreographed", {"topology": name}) for name in TOPOLOGIES}


def run(wf: WorkflowRun, task: str | Sequence[str], *, topology: str = "serial") -> Message:
    """Answer all questions of a task (a list, or one per line)."""
    questions = [line for line in task.splitlines() if line.strip()] if isinstance(task, str) else list(task)
    if not questions:
        raise ConfigError("task: give one question or more, as a list or one a line")
    system = wf.prefill("system", wf.system(SYSTEM))
    question_messages = [wf.prefill("question", wf.user(question), [system]) for question in questions]
    closing = wf.prefill("closing", wf.user(CLOSING), [system])
    offsets = topology_offsets(topology, [system], question_messages, [closing])
    return wf.decode(
        "answer", wf.assistant("Answers to all questions:\n-"), [system, *question_messages, closing], offsets=offsets
    )


def topology_offsets(topology: str, *parts: Sequence[Message]) -> list[int | None]:
    """Return the position offsets of all parents.

    "serial" places them one after the other. "parallel" places the messages of one part at the same
    position, and the next part after the longest of them.
    """
    if topology not in TOPOLOGIES:
        raise ConfigError(f"topology={topology!r}: use one of {TOPOLOGIES}")
    offsets: list[Any] = []
    start = 0
    for part in parts:
        offsets += [start if topology == "parallel" else None for _ in part]
        start += max((m.length for m in part), default=0) if topology == "parallel" else 0
    return offsets
