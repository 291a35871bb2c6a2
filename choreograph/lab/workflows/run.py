"""Run a workflow; measure TTFT, computed and reused tokens by stage."""

import inspect
import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from types import FrameType
from typing import Any, NamedTuple, overload

from ...api.call import PromptInput, is_batch
from ...api.chat import ChatTurns
from ...api.engine import Engine
from ...api.message import Message
from ...api.session import Session
from ...errors import ConfigError, DataError, InvalidRequestError, SamplingError
from ...outputs import BASE_MODEL, MODES, Mode
from ...sampling_params import SamplingParams
from .parsing import final_answer

WorkflowFunction = Callable[..., Message]  # run(wf, task, **options)

Transcript = Mapping[str, list[list[int]]]  # generated token ids of each decode, by stage in order


class StageCall(NamedTuple):
    """One prefill or decode of a workflow."""

    stage: str
    message: Message


@dataclass(frozen=True)
class Condition:
    """One way to run a workflow."""

    mode: Mode
    options: Mapping[str, Any] = field(default_factory=dict)  # of the workflow
    replayed_stages: tuple[str, ...] = ()  # stages whose content is copied from the run of the first condition
    model: str = BASE_MODEL  # model that computes: "base" or an adapter
    adapter_stages: tuple[str, ...] = ()  # decodes that the adapter computes from the base's KV; (): all calls

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(f"mode={self.mode!r}: use one of {MODES}")
        if self.adapter_stages and self.mode != "choreographed":
            raise ConfigError(
                f"adapter_stages={self.adapter_stages} in {self.mode} mode, which reuses no messages: leave them out"
            )

    def check_adapter_stages(self, decoded_stages: Iterable[str]) -> None:
        """Raise ConfigError if an adapter stage is not among the decoded stages."""
        stages = sorted(set(decoded_stages))
        if missing := sorted(set(self.adapter_stages) - set(stages)):
            raise ConfigError(f"adapter_stages {missing}: use stages that decode, {stages}")

    @property
    def base_or_adapter(self) -> str:
        """Model of the session, which computes everything except the adapter stages."""
        return BASE_MODEL if self.adapter_stages else self.model

    def adapter_kwargs(self) -> dict[str, Any]:
        """Return the arguments for `WorkflowRun`."""
        return {"model": self.model, "adapter_stages": self.adapter_stages} if self.adapter_stages else {}


BASELINE = {"baseline": Condition("prefix")}

DEFAULT_CONDITIONS = BASELINE | {"choreographed": Condition("choreographed")}


class WorkflowRun(ChatTurns):
    """Session calls of one workflow run, named by stage, and recorded results.

    Args:
        sampling: default of all decodes.
        replay: transcript of an earlier run, whose stages are repeated.
        model: decodes the `adapter_stages`, reusing the session model's KV without recomputation,
            and prefills messages that attend to them.
        adapter_stages: stages that `model` decodes.
    """

    def __init__(
        self,
        session: Session,
        *,
        sampling: SamplingParams | None = None,
        replay: Transcript | None = None,
        model: str = BASE_MODEL,
        adapter_stages: Iterable[str] = (),
    ) -> None:
        self.session = session
        self.sampling = sampling or SamplingParams(temperature=0.7, top_p=0.95)
        self.calls: list[StageCall] = []
        self.parse_failures: Counter[str] = Counter()  # by stage
        self.outputs: dict[str, Any] = {}  # recorded values by name, as JSON
        self._replay: Transcript = {} if replay is None else replay
        self._num_decodes: Counter[str] = Counter()  # by stage
        self._adapter_stages = frozenset(adapter_stages)
        self._adapter_options: dict[str, Any] = {"model": model, "kv_reuse": "reuse"}
        self._adapter_message_ids: set[int] = set()  # messages that the adapter computes

    @overload
    def prefill(self, stage: str, tokens: list[dict[str, Any]]) -> list[Message]: ...
    @overload
    def prefill(self, stage: str, tokens: PromptInput, parents: Iterable[Message] = (), **options: Any) -> Message: ...
    def prefill(self, stage, tokens, parents=(), **options):
        """Call `Session.prefill` for a stage; a list of calls returns a list."""
        self._name_stage(stage)
        requests, uses_adapter = [], []
        for call in _as_batch("tokens", tokens, {"parents": parents, **options}):
            visible = call.get("parents", ())
            visible = list(visible) if isinstance(visible, Iterable) else visible  # the session refuses others
            uses_adapter.append(
                isinstance(visible, list) and any(getattr(p, "id", None) in self._adapter_message_ids for p in visible)
            )
            requests.append({**(self._adapter_options if uses_adapter[-1] else {}), **call, "parents": visible})
        with _located(sys._getframe(1)):
            messages = self.session.prefill(requests)
        for message, is_adapter in zip(messages, uses_adapter, strict=True):
            self._record_call(stage, message, is_adapter)
        return messages if is_batch(tokens) else messages[0]

    @overload
    def decode(self, stage: str, header: list[dict[str, Any]]) -> list[Message]: ...
    @overload
    def decode(self, stage: str, header: PromptInput, parents: Iterable[Message] = (), **options: Any) -> Message: ...
    def decode(self, stage, header, parents=(), **options):
        """Call `Session.decode` for a stage, or force the tokens to replay.

        Args:
            header: as in `Session.decode`, or a list of calls, which returns a list of messages.
            options: those of `Session.decode`. Sampling parameters replace the run's, except for
                `max_tokens`, a limit below that of the run, and `stop`, additional stop strings.
        """
        self._name_stage(stage)
        uses_adapter = stage in self._adapter_stages
        calls = _as_batch("header", header, {"parents": parents, **options})
        with _located(sys._getframe(1)):
            requests = [
                {**(self._adapter_options if uses_adapter else {}), **self._decode_args(stage, number, **call)}
                for number, call in enumerate(calls, self._num_decodes[stage])
            ]
            messages = self.session.decode(requests)
        self._num_decodes[stage] += len(messages)
        for message in messages:
            self._record_call(stage, message, uses_adapter)
        return messages if is_batch(header) else messages[0]

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
        """Return the `Session.decode` arguments for a stage's decode, counted from 0."""
        if sampling is None:
            sampling = self.sampling
        elif not isinstance(sampling, SamplingParams):
            raise SamplingError(f"sampling={sampling!r:.60}: use SamplingParams(...)")
        elif sampling.logprobs is None:  # the run decides what is kept of every decode
            sampling = replace(sampling, logprobs=self.sampling.logprobs)
        if max_tokens is not None:
            limited = replace(sampling, max_tokens=max_tokens, min_tokens=0)  # validated
            if sampling.max_tokens is None or max_tokens < sampling.max_tokens:
                sampling = replace(sampling, max_tokens=limited.max_tokens)
        sampling = replace(sampling, stop=(*sampling.stop, *replace(sampling, stop=stop).stop)) if stop else sampling
        options["sampling"] = sampling
        if stage in self._replay:
            replayed = self._replay[stage]
            if number >= len(replayed):
                raise DataError(
                    f"stage {stage!r}: the transcript has {len(replayed)} messages, the workflow takes more"
                )
            options["forced_tokens"] = replayed[number]
        return options

    def _name_stage(self, stage: str) -> None:
        budget = getattr(self.session, "budget", None)  # a remote session has none
        if budget is not None:
            budget.stage = stage

    def _record_call(self, stage: str, message: Message, uses_adapter: bool) -> None:
        self.calls.append(StageCall(stage, message))
        if uses_adapter:
            self._adapter_message_ids.add(message.id)

    def was_truncated(self, message: Message) -> bool:
        """Return whether the token limit ended a message or its replayed original."""
        limit = self.sampling.max_tokens
        repeats_truncated = (
            message.finish_reason == "forced" and limit is not None and len(message.output_token_ids) >= limit
        )
        return message.finish_reason == "length" or repeats_truncated

    def record_parse_failure(self, stage: str) -> None:
        """Count an output that the workflow could not parse."""
        self.parse_failures[stage] += 1

    def read_answer(self, stage: str, message: Message) -> str | None:
        """Return the final answer in a message; count a failure of the stage if there is none."""
        answer = final_answer(message.text, is_complete=not self.was_truncated(message))
        if answer is None:
            self.record_parse_failure(stage)
        return answer

    def record(self, name: str, value: Any) -> None:
        """Record a JSON-serializable result besides the answer, such as a decision."""
        try:
            json.dumps(value)
        except (TypeError, ValueError) as exc:
            raise DataError(f"note {name!r}: {value!r:.60} is no JSON ({exc}): use numbers, strings, lists") from None
        self.outputs[name] = value

    def transcript(self) -> Transcript:
        """Return the generated tokens of every decode by stage, for `replay`."""
        content: defaultdict[str, list[list[int]]] = defaultdict(list)
        for stage, message in self.calls:
            if message.kind == "decode":
                content[stage].append(message.output_token_ids)
        return dict(content)


@contextmanager
def _located(caller: FrameType) -> Iterator[None]:
    """Prefix an error of a call with the workflow's file and line."""
    try:
        yield
    except (InvalidRequestError, ConfigError) as exc:
        exc.args = (f"{caller.f_code.co_filename}, line {caller.f_lineno}: {exc}", *exc.args[1:])
        raise


def _as_batch(first_arg: str, calls: Any, shared_args: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Convert to a list of calls; reject arguments that would be ignored."""
    if not is_batch(calls):
        return [{first_arg: calls, **shared_args}]
    for name, value in shared_args.items():
        if value is not None and value != ():
            raise InvalidRequestError(f"{name}={value!r} with a list of requests: put it into each request")
    return list(calls)


@dataclass(frozen=True)
class StageMetrics:
    """Means and sums over the calls of one stage."""

    stage: str
    calls: int
    ttft: float | None  # mean seconds; None without decodes
    encoded: int  # tokens computed
    cached: int  # tokens reused
    generated: int  # tokens


@dataclass(frozen=True)
class RunMetrics:
    """Cost of one run of a workflow."""

    mode: Mode
    seconds: float  # end to end
    ttft: float | None  # mean seconds over all decodes
    step_ttft: float | None  # mean seconds over groups of parallel decodes
    stages: list[StageMetrics]
    steps: int  # engine steps
    encoded: int  # tokens computed
    cached: int  # tokens reused

    def as_dict(self) -> dict[str, Any]:
        """Return all metrics as JSON."""
        return asdict(self)


@dataclass
class WorkflowResult:
    """A finished run; its session is closed."""

    run: WorkflowRun
    answer: Message
    metrics: RunMetrics


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
    replay: Transcript | None = None,
    options: Mapping[str, Any] | None = None,
    on_answer: Callable[[Message, list[StageCall]], None] | None = None,
    on_text: Callable[[str], None] | None = None,
    on_finish: Callable[[list[StageCall]], object] | None = None,
) -> WorkflowResult:
    """Run a workflow to completion and measure it.

    Args:
        model: as in `Condition`, like `mode` and `adapter_stages`.
        sampling: as in `WorkflowRun`, like `replay`.
        options: options of the workflow.
        on_answer: called with the answer, before its tokens are read, and all calls.
        on_text: called with each piece of the answer as it is generated.
        on_finish: called with all calls before their messages are released.
    """
    check_options(workflow, options or {})
    first_step = engine.core.num_steps
    condition = Condition(mode, model=model, adapter_stages=tuple(adapter_stages))
    with engine.session(mode=mode, seed=seed, model=condition.base_or_adapter) as session:
        wf = WorkflowRun(session, sampling=sampling, replay=replay, **condition.adapter_kwargs())
        start = time.perf_counter()
        answer = call_workflow(workflow, wf, task, options or {})
        if on_answer is not None:
            on_answer(answer, wf.calls)
        for piece in answer.stream():
            if on_text is not None:
                on_text(piece)
        seconds = time.perf_counter() - start
        engine.run_until_idle()
        condition.check_adapter_stages(wf.transcript())
        by_stage: dict[str, list[Message]] = {}
        for stage, message in wf.calls:
            by_stage.setdefault(stage, []).append(message)
        stages = [_stage_metrics(stage, messages) for stage, messages in by_stage.items()]
        metrics = RunMetrics(
            mode=mode,
            seconds=seconds,
            ttft=_mean_ttft(message for _, message in wf.calls),
            step_ttft=_mean(_mean_ttft(message for _, message in group) for group in parallel_groups(wf.calls)),
            stages=stages,
            steps=engine.core.num_steps - first_step,
            encoded=sum(metrics.encoded for metrics in stages),
            cached=sum(metrics.cached for metrics in stages),
        )
        if on_finish is not None:
            on_finish(wf.calls)
        return WorkflowResult(wf, answer, metrics)


def call_workflow(workflow: WorkflowFunction, wf: WorkflowRun, task: Any, options: Mapping[str, Any]) -> Message:
    """Return a workflow's answer; raise ConfigError if it is not a message."""
    answer = workflow(wf, task, **options)
    if not isinstance(answer, Message):
        raise ConfigError(f"the workflow returned {answer!r:.60}: return the message of its answer, not its text")
    return answer


def _stage_metrics(stage: str, messages: list[Message]) -> StageMetrics:
    return StageMetrics(
        stage=stage,
        calls=len(messages),
        ttft=_mean_ttft(messages),
        encoded=sum(message.usage.computed_tokens for message in messages),
        cached=sum(message.usage.cached_tokens for message in messages),
        generated=sum(message.usage.completion_tokens for message in messages),
    )


def _mean_ttft(messages: Iterable[Message]) -> float | None:
    return _mean(message.timing.ttft for message in messages)


def _mean(values: Iterable[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return fmean(numbers) if numbers else None


def parallel_groups(calls: Iterable[StageCall]) -> list[list[StageCall]]:
    """Group consecutive decodes of one stage, none attending to another."""
    groups: list[list[StageCall]] = []
    for call in calls:
        if call.message.kind != "decode":
            continue
        group = groups[-1] if groups else []
        depends = any(other.message in call.message.parents for other in group)
        if group and group[0].stage == call.stage and not depends:
            group.append(call)
        else:
            groups.append([call])
    return groups


def exact(is_exact: bool) -> dict[str, Any]:
    """Return the options of a call that reads its context as in prefix mode, if it does."""
    return {"repair": 1.0} if is_exact else {}


def check_choices(**options: tuple[str, Collection[str]]) -> None:
    """Raise ConfigError unless every option's value is one of its choices."""
    for name, (value, choices) in options.items():
        if value not in choices:
            raise ConfigError(f"{name}={value!r}: use one of {list(choices)}")


def check_options(workflow: WorkflowFunction, options: Mapping[str, Any]) -> None:
    """Raise ConfigError for unknown options and for types other than the default's."""
    signature = inspect.signature(workflow)
    for name, value in options.items():
        try:
            signature.bind_partial(None, None, **{name: value})
        except TypeError:
            raise ConfigError(f"option {name!r}: the workflow has {options_of(workflow) or 'none'}") from None
        default = signature.parameters[name].default if name in signature.parameters else None
        expected = (int, float) if type(default) is float else type(default)
        is_typed = type(default) in (bool, int, float, str)
        if is_typed and (not isinstance(value, expected) or isinstance(value, bool) != isinstance(default, bool)):
            raise ConfigError(f"option {name}={value!r}: use a value like its default, {default!r}")


def options_of(workflow: WorkflowFunction) -> list[str]:
    """Return the names of a workflow's options."""
    _, _, *options = inspect.signature(workflow).parameters.values()
    return [option.name for option in options if option.kind in (option.POSITIONAL_OR_KEYWORD, option.KEYWORD_ONLY)]
