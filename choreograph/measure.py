"""Runs one workflow and says what it cost: per stage, time to first token and tokens encoded or reused."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from .choreographies import Performance, Step, Workflow, check_options
from .choreographies.performance import Condition
from .core import Engine
from .errors import ConfigError
from .message import Message
from .types import BASE, Mode, SamplingParams


@dataclass(frozen=True)
class StageCost:
    """Means and sums over the calls of one stage; ttft in seconds, None for a stage without decodes."""

    stage: str
    calls: int
    ttft: float | None
    encoded: int
    cached: int
    generated: int


@dataclass(frozen=True)
class RunCost:
    """One run of a workflow, `seconds` end to end. ttft is the mean over every decode, step_ttft over steps: decodes
    that run side by side are one.
    """

    mode: Mode
    seconds: float
    ttft: float | None
    step_ttft: float | None
    stages: list[StageCost]
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
class Run:
    """A finished run: the performance with its messages (their session is closed), the answer, the cost."""

    performance: Performance
    answer: Message
    cost: RunCost
    picture: Any = None


def perform(
    engine: Engine,
    workflow: Workflow,
    task: str,
    *,
    mode: Mode,
    model: str = BASE,
    readers: Iterable[str] = (),
    seed: int | None = 0,
    sampling: SamplingParams | None = None,
    forced: Mapping[str, list[list[int]]] | None = None,
    options: Mapping[str, Any] | None = None,
    on_step: Callable[[Step], None] | None = None,
    on_text: Callable[[str], None] | None = None,
    look: Callable[[list[Step]], Any] | None = None,
) -> Run:
    """Runs a workflow to its end. model, readers: as in `Condition`. on_text streams the answer; look sees the messages
    before they are released."""
    check_options(workflow, options or {})
    steps = engine.runner.steps
    condition = Condition(mode, model=model, readers=tuple(readers))
    with engine.session(mode=mode, seed=seed, model=condition.writer) as session:
        performance = Performance(session, sampling=sampling, forced=forced, on_step=on_step, **condition.reader())
        began = time.perf_counter()
        answer = answered(workflow, performance, task, options or {})
        for piece in answer.stream():
            if on_text is not None:
                on_text(piece)
        seconds = time.perf_counter() - began
        engine.drain()
        condition.check_readers(performance.content())
        picture = look(performance.steps) if look is not None else None
        ttfts = [t for step in performance.steps if (t := step.message.timing.ttft) is not None]
        cost = RunCost(
            mode=mode,
            seconds=seconds,
            ttft=fmean(ttfts) if ttfts else None,
            step_ttft=fmean(means) if (means := step_ttfts(performance.steps)) else None,
            stages=stage_costs(performance.steps),
            steps=engine.runner.steps - steps,
        )
        return Run(performance, answer, cost, picture)


def answered(workflow: Workflow, performance: Performance, task: Any, options: Mapping[str, Any]) -> Message:
    """The answer of a workflow, which has to be a message. Raises ConfigError for anything else."""
    answer = workflow(performance, task, **options)
    if not isinstance(answer, Message):
        raise ConfigError(f"the workflow returned {answer!r:.60}: return the message of its answer, not its text")
    return answer


def step_ttfts(steps: Iterable[Step]) -> list[float]:
    """The mean time to first token of every step."""
    times = [[s.message.timing.ttft for s in group] for group in side_by_side(steps)]
    return [fmean(t for t in some if t is not None) for some in times if any(t is not None for t in some)]


def side_by_side(steps: Iterable[Step]) -> list[list[Step]]:
    """Decodes by step: those of one stage in a row, none of which sees another of them."""
    groups: list[list[Step]] = []
    for step in (s for s in steps if s.message.kind == "decode"):
        last = groups[-1] if groups else []
        seen = any(one.message in step.message.parents for one in last)
        if last and last[0].stage == step.stage and not seen:
            last.append(step)
        else:
            groups.append([step])
    return groups


def stage_costs(steps: Iterable[Step]) -> list[StageCost]:
    """Costs by stage, in the order in which stages began."""
    stages: dict[str, list[Message]] = {}
    for stage, message in steps:
        stages.setdefault(stage, []).append(message)
    return [_cost(stage, messages) for stage, messages in stages.items()]


def _cost(stage: str, messages: list[Message]) -> StageCost:
    ttfts = [m.timing.ttft for m in messages if m.timing.ttft is not None]
    return StageCost(
        stage=stage,
        calls=len(messages),
        ttft=fmean(ttfts) if ttfts else None,
        encoded=sum(m.usage.encoded_tokens for m in messages),
        cached=sum(m.usage.cached_tokens for m in messages),
        generated=sum(m.usage.generated_tokens for m in messages),
    )
