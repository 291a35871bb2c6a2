"""One run of a workflow on a session: names its steps, and can repeat the content of an earlier run.

Owns the record of what was called under which name. A second performance that is given the first one's
`content()` forces every decode to the same tokens, step by step (Prompt Choreography, section 4.2).
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from ..message import Message
from ..session import Session, Text
from ..types import SamplingParams


class Step(NamedTuple):
    """One call of a performance: the name of its stage, and the message."""

    stage: str
    message: Message


class Performance:
    """forced: per stage, the generated tokens of an earlier run in order. on_step hears of every new call."""

    def __init__(
        self,
        session: Session,
        *,
        sampling: SamplingParams | None = None,
        forced: Mapping[str, list[list[int]]] | None = None,
        on_step: Callable[[Step], None] | None = None,
    ) -> None:
        self.session = session
        self.sampling = sampling or SamplingParams(temperature=0.7, top_p=0.95)
        self.steps: list[Step] = []
        self.unparseable: Counter[str] = Counter()
        self._forced = forced
        self._count: defaultdict[str, int] = defaultdict(int)
        self._on_step = on_step

    def prefill(self, stage: str, tokens: Text, parents: Iterable[Message] = (), **place: Any) -> Message:
        """`Session.prefill` under the name of a stage."""
        return self._note(stage, self.session.prefill(tokens, parents, **place))

    def decode(
        self,
        stage: str,
        header: Text,
        parents: Iterable[Message] = (),
        *,
        sampling: SamplingParams | None = None,
        **place: Any,
    ) -> Message:
        """`Session.decode` under the name of a stage; repeats the earlier run's content if there is one."""
        forced = None
        if self._forced is not None:
            forced = self._forced[stage][self._count[stage]]
        self._count[stage] += 1
        message = self.session.decode(
            header, parents, sampling=sampling or self.sampling, forced_tokens=forced, **place
        )
        return self._note(stage, message)

    def could_not_parse(self, stage: str) -> None:
        """Counts an output that the workflow could not read."""
        self.unparseable[stage] += 1

    def content(self) -> dict[str, list[list[int]]]:
        """What every decode generated, per stage in order: the `forced` of another performance."""
        content: defaultdict[str, list[list[int]]] = defaultdict(list)
        for stage, message in self.steps:
            if message.kind == "decode":
                content[stage].append(message.generated)
        return dict(content)

    def _note(self, stage: str, message: Message) -> Message:
        step = Step(stage, message)
        self.steps.append(step)
        if self._on_step is not None:
            self._on_step(step)
        return message
