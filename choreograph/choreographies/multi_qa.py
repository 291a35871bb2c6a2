"""Two questions, one answer (Prompt Choreography, section 3.3, Figure 4): how much does blockage cost?

In prefix mode the second question is read after the first. Choreographed, neither sees the other: `serial` still
puts them one after the other, `parallel` puts both at the same place, so that neither comes first.
"""

from collections.abc import Sequence
from typing import Any

from ..errors import ConfigError
from ..message import Message
from .performance import BASELINE, Condition, Performance

SYSTEM = "Read the questions and answer all of them."
CLOSING = "Now answer all of the questions above, each in one short sentence."
TAKES = "pairs"
TOPOLOGIES = ("serial", "parallel")
CONDITIONS = BASELINE | {name: Condition("choreographed", {"topology": name}) for name in TOPOLOGIES}


def run(p: Performance, task: str | Sequence[str], *, topology: str = "serial") -> Message:
    """task: the questions, as a list or one a line. The answer to all of them, not read yet."""
    questions = [line for line in task.splitlines() if line.strip()] if isinstance(task, str) else list(task)
    if not questions:
        raise ConfigError("task: give one question or more, as a list or one a line")
    system = p.prefill("system", p.system(SYSTEM))
    asked = [p.prefill("question", p.user(question), [system]) for question in questions]
    closing = p.prefill("closing", p.user(CLOSING), [system])
    offsets = placed(topology, [system], asked, [closing])
    return p.decode("answer", p.assistant("Answers to all questions:\n-"), [system, *asked, closing], offsets=offsets)


def placed(topology: str, *parts: Sequence[Message]) -> list[int | None]:
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
