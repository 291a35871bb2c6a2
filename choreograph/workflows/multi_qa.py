"""Two questions, one answer (Prompt Choreography, section 3.3, Figure 4): how much does blockage cost?

In prefix mode the second question is read after the first. Choreographed, neither sees the other: `serial` still
puts them one after the other, `parallel` puts both at the same place, so that neither comes first.
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
    """task: the questions, as a list or one a line. The answer to all of them, not read yet."""
    questions = [line for line in task.splitlines() if line.strip()] if isinstance(task, str) else list(task)
    if not questions:
        raise ConfigError("task: give one question or more, as a list or one a line")
    system = wf.prefill("system", wf.system(SYSTEM))
    requested = [wf.prefill("question", wf.user(question), [system]) for question in questions]
    closing = wf.prefill("closing", wf.user(CLOSING), [system])
    offsets = topology_offsets(topology, [system], requested, [closing])
    return wf.decode(
        "answer", wf.assistant("Answers to all questions:\n-"), [system, *requested, closing], offsets=offsets
    )


def topology_offsets(topology: str, *parts: Sequence[Message]) -> list[int | None]:
    """Offsets of the parents in all parts. `serial`: one after the other; `parallel`: those of one part start together,
    and the next part behind the longest of them."""
    if topology not in TOPOLOGIES:
        raise ConfigError(f"topology={topology!r}: use one of {TOPOLOGIES}")
    offsets: list[Any] = []
    start = 0
    for part in parts:
        offsets += [start if topology == "parallel" else None for _ in part]
        start += max((m.length for m in part), default=0) if topology == "parallel" else 0
    return offsets
