"""One run of a workflow on a session: names its steps, and can repeat the content of an earlier run.

Owns the record of what was called under which name, what could not be read, and what the workflow found out. A
second performance that is given the first one's `content()` forces every decode to the same tokens, step by step
(Prompt Choreography, section 4.2); one that is given some of its stages repeats those alone.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ..chat import Turns
from ..errors import ConfigError, DataError
from ..message import Message
from ..session import Session, Text
from ..types import BASE, Mode, SamplingParams

Content = Mapping[str, list[list[int]]]


class Step(NamedTuple):
    """One call of a performance: the name of its stage, and the message."""

    stage: str
    message: Message


@dataclass(frozen=True)
class Condition:
    """One way to run a workflow. The content of the stages in `copies` is taken from the run of the first condition.
    model: what computes it, "base" or an adapter of the engine. readers: the stages whose decodes alone that adapter
    computes, with the prefills that see them, reading what the base encoded (nothing can be read in the other modes,
    which encode whole prompts); all that there is if none is named."""

    mode: Mode
    options: Mapping[str, Any] = field(default_factory=dict)
    copies: tuple[str, ...] = ()
    model: str = BASE
    readers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.readers and self.mode != "choreographed":
            raise ConfigError(f"readers={self.readers} in {self.mode} mode, which shares no encodings: leave them out")

    def check_readers(self, said: Iterable[str]) -> None:
        """Raises ConfigError for a reader that is none of the stages that said something."""
        known = sorted(set(said))
        if missing := sorted(set(self.readers) - set(known)):
            raise ConfigError(f"readers {missing}: use stages that decode, {known}")

    @property
    def writer(self) -> str:
        """What computes everything but the readers."""
        return BASE if self.readers else self.model

    def reader(self) -> dict[str, Any]:
        """What a `Performance` wants to know of it."""
        return {"model": self.model, "readers": self.readers} if self.readers else {}


BASELINE = {"baseline": Condition("prefix")}
DEFAULT_CONDITIONS = BASELINE | {"choreographed": Condition("choreographed")}


class Performance(Turns):
    """forced: per stage, the generated tokens of an earlier run in order. on_step hears of every new call. model: what
    decodes the stages in `readers`, from encodings as they are, and prefills what sees them; the session's model does
    everything else."""

    def __init__(
        self,
        session: Session,
        *,
        sampling: SamplingParams | None = None,
        forced: Content | None = None,
        on_step: Callable[[Step], None] | None = None,
        model: str = BASE,
        readers: Iterable[str] = (),
    ) -> None:
        self.session = session
        self.sampling = sampling or SamplingParams(temperature=0.7, top_p=0.95)
        self.steps: list[Step] = []
        self.unparseable: Counter[str] = Counter()
        self.findings: dict[str, Any] = {}
        self._forced: Content = {} if forced is None else forced
        self._count: defaultdict[str, int] = defaultdict(int)
        self._on_step = on_step
        self._readers = frozenset(readers)
        self._reading: dict[str, Any] = {"model": model, "share": "reuse"}
        self._read: set[int] = set()  # the messages that the readers' model made

    # -- calls --------------------------------------------------------------------------------------------

    def prefill(self, stage: str, tokens: Text, parents: Iterable[Message] = (), **place: Any) -> Message:
        """`Session.prefill` under the name of a stage."""
        parents = list(parents)
        reads = any(parent.id in self._read for parent in parents)
        message = self.session.prefill(tokens, parents, **(self._reading if reads else {}) | place)
        return self._note(stage, message, reads)

    def decode(
        self,
        stage: str,
        header: Text,
        parents: Iterable[Message] = (),
        *,
        most: int | None = None,
        stop: tuple[str, ...] = (),
        sampling: SamplingParams | None = None,
        **place: Any,
    ) -> Message:
        """`Session.decode` under the name of a stage; repeats the earlier run's content if there is one.

        most: a limit of tokens for a short message, below the one of the performance. stop: strings that end it.
        """
        if sampling is None:
            sampling = self.sampling
        elif sampling.logprobs is None:  # what is to be kept of every decode is the performance's to say
            sampling = replace(sampling, logprobs=self.sampling.logprobs)
        if most is not None:
            sampling = replace(sampling, max_tokens=min(most, sampling.max_tokens))
        if stop:
            sampling = replace(sampling, stop=(*sampling.stop, *stop))
        forced = self._next(stage)
        self._count[stage] += 1
        reads = stage in self._readers
        place = (self._reading if reads else {}) | place
        message = self.session.decode(header, parents, sampling=sampling, forced_tokens=forced, **place)
        return self._note(stage, message, reads)

    def _next(self, stage: str) -> list[int] | None:
        """What the next message of a stage repeats, if it does."""
        if stage not in self._forced:
            return None
        known, number = self._forced[stage], self._count[stage]
        if number >= len(known):
            raise DataError(
                f"stage {stage!r}: the content to repeat holds {len(known)} messages, the workflow takes more"
            )
        return known[number]

    def could_not_parse(self, stage: str) -> None:
        """Counts an output that the workflow could not read."""
        self.unparseable[stage] += 1

    def note(self, name: str, value: Any) -> None:
        """What the workflow found out besides its answer, as JSON: a decision, the round in which it stopped."""
        self.findings[name] = value

    def content(self) -> dict[str, list[list[int]]]:
        """What every decode generated, per stage in order: the `forced` of another performance."""
        content: defaultdict[str, list[list[int]]] = defaultdict(list)
        for stage, message in self.steps:
            if message.kind == "decode":
                content[stage].append(message.generated)
        return dict(content)

    def _note(self, stage: str, message: Message, reads: bool) -> Message:
        if reads:
            self._read.add(message.id)
        step = Step(stage, message)
        self.steps.append(step)
        if self._on_step is not None:
            self._on_step(step)
        return message
