"""Runs one workflow and says what it cost: per stage, time to first token and tokens encoded or reused."""

import inspect
import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any, NamedTuple, overload

from ..engine.engine import Engine
from ..engine.message import Message
from ..engine.session import PromptInput, Session
from ..engine.text import ChatTurns
from ..engine.validation import is_batch
from ..errors import ConfigError, DataError, InvalidRequestError
from ..outputs import BASE_MODEL, MODES, Mode
from ..sampling_params import SamplingParams

WorkflowFunction = Callable[..., Message]
Transcript = Mapping[str, list[list[int]]]


class StageCall(NamedTuple):
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
    replayed_stages: tuple[str, ...] = ()
    model: str = BASE_MODEL
    adapter_stages: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(f"mode={self.mode!r}: use one of {MODES}")
        if self.adapter_stages and self.mode != "choreographed":
            raise ConfigError(
                f"adapter_stages={self.adapter_stages} in {self.mode} mode, which shares no encodings: leave them out"
            )

    def check_adapter_stages(self, decoded_stages: Iterable[str]) -> None:
        """Raises ConfigError for a reader that is none of the stages that said something."""
        known = sorted(set(decoded_stages))
        if missing := sorted(set(self.adapter_stages) - set(known)):
            raise ConfigError(f"adapter_stages {missing}: use stages that decode, {known}")

    @property
    def base_or_adapter(self) -> str:
        """What computes everything but the readers."""
        return BASE_MODEL if self.adapter_stages else self.model

    def adapter_kwargs(self) -> dict[str, Any]:
        """What a `Performance` wants to know of it."""
        return {"model": self.model, "adapter_stages": self.adapter_stages} if self.adapter_stages else {}


BASELINE = {"baseline": Condition("prefix")}

DEFAULT_CONDITIONS = BASELINE | {"choreographed": Condition("choreographed")}


class WorkflowRun(ChatTurns):
    """forced: per stage, the generated tokens of an earlier run in order. on_step hears of every new call. model: what
    decodes the stages in `readers`, from encodings as they are, and prefills what sees them; the session's model does
    everything else."""

    def __init__(
        self,
        session: Session,
        *,
        sampling: SamplingParams | None = None,
        replay: Transcript | None = None,
        on_call: Callable[[StageCall], None] | None = None,
        model: str = BASE_MODEL,
        adapter_stages: Iterable[str] = (),
    ) -> None:
        self.session = session
        self.sampling = sampling or SamplingParams(temperature=0.7, top_p=0.95)
        self.calls: list[StageCall] = []
        self.parse_failures: Counter[str] = Counter()
        self.outputs: dict[str, Any] = {}
        self._replay: Transcript = {} if replay is None else replay
        self._num_decodes: defaultdict[str, int] = defaultdict(int)
        self._on_call = on_call
        self._adapter_stages = frozenset(adapter_stages)
        self._adapter_options: dict[str, Any] = {"model": model, "kv_reuse": "reuse"}
        self._adapter_message_ids: set[int] = set()  # the messages that the readers' model made

    # -- calls --------------------------------------------------------------------------------------------

    @overload
    def prefill(self, stage: str, tokens: list[dict[str, Any]]) -> list[Message]: ...
    @overload
    def prefill(self, stage: str, tokens: PromptInput, parents: Iterable[Message] = (), **options: Any) -> Message: ...
    def prefill(self, stage, tokens, parents=(), **options):
        """`Session.prefill` under the name of a stage. A list of calls is a list of messages of that stage."""
        made = [self._prefill_args(**call) for call in _as_batch("tokens", tokens, {"parents": parents, **options})]
        messages = self.session.prefill([call for call, _ in made])
        noted = [self._record_call(stage, message, reads) for message, (_, reads) in zip(messages, made, strict=True)]
        return noted if is_batch(tokens) else noted[0]

    def _prefill_args(self, parents: Iterable[Message] = (), **options: Any) -> tuple[dict[str, Any], bool]:
        """The call of the session, and whether it sees what the readers' model made."""
        parents = list(parents) if isinstance(parents, Iterable) else parents
        reads = isinstance(parents, list) and any(
            getattr(parent, "id", None) in self._adapter_message_ids for parent in parents
        )
        return {**(self._adapter_options if reads else {}), "parents": parents, **options}, reads

    @overload
    def decode(self, stage: str, header: list[dict[str, Any]]) -> list[Message]: ...
    @overload
    def decode(
        self,
        stage: str,
        header: PromptInput,
        parents: Iterable[Message] = (),
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        sampling: SamplingParams | None = None,
        **options: Any,
    ) -> Message: ...
    def decode(self, stage, header, parents=(), **options):
        """`Session.decode` under the name of a stage; repeats the earlier run's content if there is one.

        most: a limit of tokens for a short message, below the one of the performance. stop: strings that end it. A list
        of calls, each with these arguments, is a list of messages of that stage.
        """
        first, reads = self._num_decodes[stage], stage in self._adapter_stages
        calls = _as_batch("header", header, {"parents": parents, **options})
        made = [self._decode_args(stage, number, **call) for number, call in enumerate(calls, first)]
        messages = self.session.decode([{**(self._adapter_options if reads else {}), **call} for call in made])
        self._num_decodes[stage] += len(messages)
        noted = [self._record_call(stage, message, reads) for message in messages]
        return noted if is_batch(header) else noted[0]

    def _decode_args(
        self,
        stage: str,
        number: int,
        /,
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        sampling: SamplingParams | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """The call of the session that makes message `number` of a stage."""
        if sampling is None:
            sampling = self.sampling
        elif sampling.logprobs is None:  # what is to be kept of every decode is the performance's to say
            sampling = replace(sampling, logprobs=self.sampling.logprobs)
        if max_tokens is not None:
            sampling = replace(sampling, max_tokens=min(max_tokens, sampling.max_tokens))
        if stop:
            sampling = replace(sampling, stop=(*sampling.stop, *((stop,) if isinstance(stop, str) else stop)))
        forced = self._replayed(stage, number)
        return {**options, "sampling": sampling} | ({} if forced is None else {"forced_tokens": forced})

    def _replayed(self, stage: str, number: int) -> list[int] | None:
        """What message `number` of a stage repeats, if it does."""
        if stage not in self._replay:
            return None
        known = self._replay[stage]
        if number >= len(known):
            raise DataError(
                f"stage {stage!r}: the content to repeat holds {len(known)} messages, the workflow takes more"
            )
        return known[number]

    def was_truncated(self, message: Message) -> bool:
        """Whether the limit of tokens ended a message, or the one that it repeats."""
        repeats = message.finish_reason == "forced"
        return message.finish_reason == "length" or (
            repeats and len(message.output_token_ids) >= self.sampling.max_tokens
        )

    def record_parse_failure(self, stage: str) -> None:
        """Counts an output that the workflow could not read."""
        self.parse_failures[stage] += 1

    def record(self, name: str, value: Any) -> None:
        """What the workflow found out besides its answer, as JSON: a decision, the round in which it stopped."""
        try:
            json.dumps(value)
        except (TypeError, ValueError) as exc:
            raise DataError(f"note {name!r}: {value!r:.60} is no JSON ({exc}): note numbers, texts, lists") from None
        self.outputs[name] = value

    def transcript(self) -> dict[str, list[list[int]]]:
        """What every decode generated, per stage in order: the `forced` of another performance."""
        content: defaultdict[str, list[list[int]]] = defaultdict(list)
        for stage, message in self.calls:
            if message.kind == "decode":
                content[stage].append(message.output_token_ids)
        return dict(content)

    def _record_call(self, stage: str, message: Message, uses_adapter: bool) -> Message:
        if uses_adapter:
            self._adapter_message_ids.add(message.id)
        step = StageCall(stage, message)
        self.calls.append(step)
        if self._on_call is not None:
            self._on_call(step)
        return message


def _as_batch(arg_name: str, calls: Any, shared_args: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The calls of a list, or the one call. What stands beside a list would be lost, so it is refused."""
    if not is_batch(calls):
        return [{arg_name: calls, **shared_args}]
    for name, value in shared_args.items():
        if value is not None and not (isinstance(value, tuple) and not value):
            raise InvalidRequestError(f"{name}={value!r} beside a list of calls: put it into each call")
    return list(calls)


@dataclass(frozen=True)
class StageMetrics:
    """Means and sums over the calls of one stage; ttft in seconds, None for a stage without decodes."""

    stage: str
    calls: int
    ttft: float | None
    encoded: int
    cached: int
    generated: int


@dataclass(frozen=True)
class RunMetrics:
    """One run of a workflow, `seconds` end to end. ttft is the mean over every decode, step_ttft over steps: decodes
    that run side by side are one.
    """

    mode: Mode
    seconds: float
    ttft: float | None
    step_ttft: float | None
    stages: list[StageMetrics]
    steps: int

    @property
    def encoded(self) -> int:
        return sum(stage.encoded for stage in self.stages)

    @property
    def cached(self) -> int:
        return sum(stage.cached for stage in self.stages)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"encoded": self.encoded, "cached": self.cached}


@dataclass
class WorkflowResult:
    """A finished run: the performance with its messages (their session is closed), the answer, the cost."""

    run: "WorkflowRun"
    answer: Message
    metrics: RunMetrics
    artifact: Any = None


def run_workflow(
    engine: Engine,
    workflow: WorkflowFunction,
    task: str,
    *,
    mode: Mode,
    model: str = BASE_MODEL,
    adapter_stages: Iterable[str] = (),
    seed: int | None = 0,
    sampling: SamplingParams | None = None,
    replay: Mapping[str, list[list[int]]] | None = None,
    options: Mapping[str, Any] | None = None,
    on_call: Callable[[StageCall], None] | None = None,
    on_text: Callable[[str], None] | None = None,
    on_finish: Callable[[list[StageCall]], Any] | None = None,
) -> WorkflowResult:
    """Runs a workflow to its end. model, readers: as in `Condition`. on_text streams the answer; look sees the messages
    before they are released."""
    check_options(workflow, options or {})
    steps = engine.core.num_steps
    condition = Condition(mode, model=model, adapter_stages=tuple(adapter_stages))
    with engine.session(mode=mode, seed=seed, model=condition.base_or_adapter) as session:
        performance = WorkflowRun(
            session, sampling=sampling, replay=replay, on_call=on_call, **condition.adapter_kwargs()
        )
        began = time.perf_counter()
        answer = call_workflow(workflow, performance, task, options or {})
        for piece in answer.stream():
            if on_text is not None:
                on_text(piece)
        seconds = time.perf_counter() - began
        engine.run_until_idle()
        condition.check_adapter_stages(performance.transcript())
        picture = on_finish(performance.calls) if on_finish is not None else None
        ttfts = [t for step in performance.calls if (t := step.message.timing.ttft) is not None]
        cost = RunMetrics(
            mode=mode,
            seconds=seconds,
            ttft=fmean(ttfts) if ttfts else None,
            step_ttft=fmean(means) if (means := ttft_by_parallel_group(performance.calls)) else None,
            stages=stage_metrics(performance.calls),
            steps=engine.core.num_steps - steps,
        )
        return WorkflowResult(performance, answer, cost, picture)


def call_workflow(workflow: WorkflowFunction, run: WorkflowRun, task: Any, options: Mapping[str, Any]) -> Message:
    """The answer of a workflow, which has to be a message. Raises ConfigError for anything else."""
    answer = workflow(run, task, **options)
    if not isinstance(answer, Message):
        raise ConfigError(f"the workflow returned {answer!r:.60}: return the message of its answer, not its text")
    return answer


def ttft_by_parallel_group(calls: Iterable[StageCall]) -> list[float]:
    """The mean time to first token of every step."""
    times = [[s.message.timing.ttft for s in group] for group in parallel_groups(calls)]
    return [fmean(t for t in some if t is not None) for some in times if any(t is not None for t in some)]


def parallel_groups(calls: Iterable[StageCall]) -> list[list[StageCall]]:
    """Decodes by step: those of one stage in a row, none of which sees another of them."""
    groups: list[list[StageCall]] = []
    for step in (s for s in calls if s.message.kind == "decode"):
        last = groups[-1] if groups else []
        seen = any(one.message in step.message.parents for one in last)
        if last and last[0].stage == step.stage and not seen:
            last.append(step)
        else:
            groups.append([step])
    return groups


def stage_metrics(calls: Iterable[StageCall]) -> list[StageMetrics]:
    """Costs by stage, in the order in which stages began."""
    stages: dict[str, list[Message]] = {}
    for stage, message in calls:
        stages.setdefault(stage, []).append(message)
    return [_stage_metrics(stage, messages) for stage, messages in stages.items()]


def _stage_metrics(stage: str, messages: list[Message]) -> StageMetrics:
    ttfts = [m.timing.ttft for m in messages if m.timing.ttft is not None]
    return StageMetrics(
        stage=stage,
        calls=len(messages),
        ttft=fmean(ttfts) if ttfts else None,
        encoded=sum(m.usage.computed_tokens for m in messages),
        cached=sum(m.usage.cached_tokens for m in messages),
        generated=sum(m.usage.completion_tokens for m in messages),
    )


def check_options(workflow: WorkflowFunction, options: Mapping[str, Any]) -> None:
    """An option that the workflow does not have is an error that lists those it has; so is one of another type than its
    default, where that says one. A workflow with `**options` takes any."""
    known, taken, open_ended = _parameters(workflow)
    for name, value in options.items():
        if name in taken or not (name in known or open_ended):
            raise ConfigError(f"option {name!r}: the workflow has {list(known) or 'none'}")
        default = known.get(name)
        expected = (int, float) if type(default) is float else type(default)
        plain = type(default) in (bool, int, float, str)
        if plain and (not isinstance(value, expected) or isinstance(value, bool) != isinstance(default, bool)):
            raise ConfigError(f"option {name}={value!r}: use a value like its default, {default!r}")


def options_of(workflow: WorkflowFunction) -> list[str]:
    """The names of the options that a workflow names."""
    return list(_parameters(workflow)[0])


def _parameters(workflow: WorkflowFunction) -> tuple[dict[str, Any], set[str], bool]:
    """The options of a workflow with their defaults, the names of what is given by place, the performance and the task,
    and whether it takes other options too."""
    every = inspect.signature(workflow).parameters.values()
    placed = [p for p in every if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    named = [p for p in placed[2:] if p.kind is p.POSITIONAL_OR_KEYWORD] + [
        p for p in every if p.kind is p.KEYWORD_ONLY
    ]
    taken = {p.name for p in placed[:2] if p.kind is p.POSITIONAL_OR_KEYWORD}
    return {p.name: p.default for p in named}, taken, any(p.kind is p.VAR_KEYWORD for p in every)
