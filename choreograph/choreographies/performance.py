"""One run of a workflow on a session: names its steps, and can repeat the content of an earlier run.

Owns the record of what was called under which name, what could not be read, and what the workflow found out. A
second performance that is given the first one's `content()` forces every decode to the same tokens, step by step
(Prompt Choreography, section 4.2); one that is given some of its stages repeats those alone.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, overload

from ..arguments import is_calls
from ..chat import Turns
from ..errors import CallError, ConfigError, DataError
from ..message import Message
from ..session import Session, Text
from ..types import BASE, MODES, Mode, SamplingParams

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
        if self.mode not in MODES:
            raise ConfigError(f"mode={self.mode!r}: use one of {MODES}")
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

    @overload
    def prefill(self, stage: str, tokens: list[dict[str, Any]]) -> list[Message]: ...
    @overload
    def prefill(self, stage: str, tokens: Text, parents: Iterable[Message] = (), **place: Any) -> Message: ...
    def prefill(self, stage, tokens, parents=(), **place):
        """`Session.prefill` under the name of a stage. A list of calls is a list of messages of that stage."""
        made = [self._to_prefill(**call) for call in _each("tokens", tokens, {"parents": parents, **place})]
        messages = self.session.prefill([call for call, _ in made])
        noted = [self._note(stage, message, reads) for message, (_, reads) in zip(messages, made, strict=True)]
        return noted if is_calls(tokens) else noted[0]

    def _to_prefill(self, parents: Iterable[Message] = (), **call: Any) -> tuple[dict[str, Any], bool]:
        """The call of the session, and whether it sees what the readers' model made."""
        parents = list(parents) if isinstance(parents, Iterable) else parents
        reads = isinstance(parents, list) and any(getattr(parent, "id", None) in self._read for parent in parents)
        return {**(self._reading if reads else {}), "parents": parents, **call}, reads

    @overload
    def decode(self, stage: str, header: list[dict[str, Any]]) -> list[Message]: ...
    @overload
    def decode(
        self,
        stage: str,
        header: Text,
        parents: Iterable[Message] = (),
        *,
        most: int | None = None,
        stop: str | Sequence[str] = (),
        sampling: SamplingParams | None = None,
        **place: Any,
    ) -> Message: ...
    def decode(self, stage, header, parents=(), **place):
        """`Session.decode` under the name of a stage; repeats the earlier run's content if there is one.

        most: a limit of tokens for a short message, below the one of the performance. stop: strings that end it. A list
        of calls, each with these arguments, is a list of messages of that stage.
        """
        first, reads = self._count[stage], stage in self._readers
        calls = _each("header", header, {"parents": parents, **place})
        made = [self._to_decode(stage, number, **call) for number, call in enumerate(calls, first)]
        messages = self.session.decode([{**(self._reading if reads else {}), **call} for call in made])
        self._count[stage] += len(messages)
        noted = [self._note(stage, message, reads) for message in messages]
        return noted if is_calls(header) else noted[0]

    def _to_decode(
        self,
        stage: str,
        number: int,
        /,
        *,
        most: int | None = None,
        stop: str | Sequence[str] = (),
        sampling: SamplingParams | None = None,
        **call: Any,
    ) -> dict[str, Any]:
        """The call of the session that makes message `number` of a stage."""
        if sampling is None:
            sampling = self.sampling
        elif sampling.logprobs is None:  # what is to be kept of every decode is the performance's to say
            sampling = replace(sampling, logprobs=self.sampling.logprobs)
        if most is not None:
            sampling = replace(sampling, max_tokens=min(most, sampling.max_tokens))
        if stop:
            sampling = replace(sampling, stop=(*sampling.stop, *((stop,) if isinstance(stop, str) else stop)))
        forced = self._repeated(stage, number)
        return {**call, "sampling": sampling} | ({} if forced is None else {"forced_tokens": forced})

    def _repeated(self, stage: str, number: int) -> list[int] | None:
        """What message `number` of a stage repeats, if it does."""
        if stage not in self._forced:
            return None
        known = self._forced[stage]
        if number >= len(known):
            raise DataError(
                f"stage {stage!r}: the content to repeat holds {len(known)} messages, the workflow takes more"
            )
        return known[number]

    def was_cut(self, message: Message) -> bool:
        """Whether the limit of tokens ended a message, or the one that it repeats."""
        repeats = message.finish_reason == "forced"
        return message.finish_reason == "length" or (repeats and len(message.generated) >= self.sampling.max_tokens)

    def could_not_parse(self, stage: str) -> None:
        """Counts an output that the workflow could not read."""
        self.unparseable[stage] += 1

    def note(self, name: str, value: Any) -> None:
        """What the workflow found out besides its answer, as JSON: a decision, the round in which it stopped."""
        try:
            json.dumps(value)
        except (TypeError, ValueError) as problem:
            raise DataError(
                f"note {name!r}: {value!r:.60} is no JSON ({problem}): note numbers, texts, lists"
            ) from None
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


def _each(first: str, given: Any, beside: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The calls of a list, or the one call. What stands beside a list would be lost, so it is refused."""
    if not is_calls(given):
        return [{first: given, **beside}]
    for name, value in beside.items():
        if value is not None and not (isinstance(value, tuple) and not value):
            raise CallError(f"{name}={value!r} beside a list of calls: put it into each call")
    return list(given)
