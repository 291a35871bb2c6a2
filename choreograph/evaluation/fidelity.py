"""How far a workflow drifts when its encodings are reused, whatever its task (Prompt Choreography, section 3.2).

A trace of the baseline is forced twice, in the baseline's mode and under a condition: the mean log-loss of its own
tokens in both, and the divergence KL(baseline || condition) of the two distributions at every token. Blockage and
leakage show up here even where a small model solves nothing.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from ..choreographies import Performance, Workflow
from ..choreographies.performance import Condition, Step
from ..core import Engine
from ..together import together
from ..types import SamplingParams
from .data import Example
from .runs import Record, seed_of
from .statistics import Estimate, difference, mean


@dataclass(frozen=True)
class Drift:
    """One message of one trace: per generated token the log-loss before and now, and the divergence, in nats."""

    stage: str
    before: tuple[float, ...]
    after: tuple[float, ...]
    divergence: tuple[float, ...]


def drifts(
    engine: Engine,
    workflow: Workflow,
    examples: Sequence[Example],
    traces: Mapping[str, Record],
    conditions: Mapping[str, Condition],
    *,
    sampling: SamplingParams,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    at_once: int = 2,
) -> Iterator[tuple[str, dict[str, list[Drift]]]]:
    """For every example, its id and what each condition but the first (the baseline) makes of its trace.

    Memory: two bytes for every token of a trace and every word of the vocabulary, `at_once` traces at a time.
    """
    baseline, *others = conditions.items()
    known = [e for e in examples if not traces[e.id].get("error")]

    def program(example: Example) -> Callable[[], dict[str, list[Drift]]]:
        def run() -> dict[str, list[Drift]]:
            trace = traces[example.id]["tokens"]
            rows = _listen(engine, workflow, example, baseline[1], trace, sampling, seed, options)
            found = {}
            for name, condition in others:
                found[name] = _compare(engine, workflow, example, condition, trace, sampling, seed, options, rows)
            return found

        return run

    for outcome in together(engine, (program(e) for e in known), at_once=at_once):
        if outcome.error is not None:
            raise outcome.error
        yield known[outcome.index].id, outcome.value


class _Stage:
    """Per stage, the messages in order, each with what was heard of it."""

    def __init__(self) -> None:
        self.heard: dict[str, list[list[Any]]] = {}

    def open(self, step: Step) -> tuple[int, list[Any]]:
        messages = self.heard.setdefault(step.stage, [])
        messages.append([])
        return len(messages) - 1, messages[-1]


def _perform(engine, workflow, example, condition, trace, sampling, seed, options, on_step) -> None:
    with engine.session(mode=condition.mode, seed=seed_of(seed, example.id)) as session:
        p = Performance(session, sampling=sampling, forced=trace, on_step=on_step)
        workflow(p, example.task, **{**(options or {}), **condition.options}).result()
        for _, message in p.steps:
            message.result()


def _listen(
    engine, workflow, example, condition, trace, sampling, seed, options
) -> dict[str, list[list[torch.Tensor]]]:
    """The baseline's log-probabilities behind every token of the trace, as float16."""
    stages = _Stage()

    def on_step(step: Step) -> None:
        if step.message.kind == "decode":
            _, rows = stages.open(step)
            step.message.watch(lambda row: rows.append(row.half()))

    _perform(engine, workflow, example, condition, trace, sampling, seed, options, on_step)
    return stages.heard


def _compare(engine, workflow, example, condition, trace, sampling, seed, options, rows) -> list[Drift]:
    stages = _Stage()

    def on_step(step: Step) -> None:
        if step.message.kind == "decode":
            number, heard = stages.open(step)
            tokens, before = trace[step.stage][number], rows[step.stage][number]
            step.message.watch(lambda row: heard.append(_measure(row, before[len(heard)], tokens[len(heard)])))

    _perform(engine, workflow, example, condition, trace, sampling, seed, options, on_step)
    return [
        Drift(stage, *zip(*values, strict=True))
        for stage, messages in stages.heard.items()
        for values in messages
        if values
    ]


def _measure(row: torch.Tensor, before: torch.Tensor, token: int) -> tuple[float, float, float]:
    """Log-loss of the token before and now, and the divergence of the whole distribution (never below zero)."""
    old = before.float().log_softmax(-1)  # half precision does not quite sum to one
    divergence = float((old.exp() * (old - row)).sum())
    return -float(old[token]), -float(row[token]), max(0.0, divergence)


@dataclass(frozen=True)
class DriftRow:
    """One stage under one condition: mean log-loss of the baseline and now, their difference, and the divergence, also
    by the token's place in its message (`0-3`: the first four)."""

    condition: str
    stage: str
    tokens: int
    before: Estimate
    after: Estimate
    gap: Estimate
    divergence: Estimate
    by_position: dict[str, float]


POSITIONS = ((0, 4), (4, 16), (16, 64), (64, 10**9))


def drift_rows(found: Sequence[Mapping[str, Sequence[Drift]]]) -> list[DriftRow]:
    """Means over examples (each example weighs the same), for `all` decodes and for each stage."""
    rows = []
    for condition in found[0] if found else ():
        stages = list(dict.fromkeys(d.stage for one in found for d in one[condition]))
        for stage in ("all", *stages):
            each = [[d for d in one[condition] if stage in ("all", d.stage)] for one in found]
            each = [drifts for drifts in each if drifts]
            before, after, divergence = (
                [fmean(value for d in one for value in getattr(d, name)) for one in each]
                for name in ("before", "after", "divergence")
            )
            row = DriftRow(
                condition=condition,
                stage=stage,
                tokens=sum(len(d.before) for one in each for d in one),
                before=mean(before),
                after=mean(after),
                gap=difference(after, before),
                divergence=mean(divergence),
                by_position=_by_position([d for one in each for d in one]),
            )
            rows.append(row)
    return rows


def _by_position(found: Sequence[Drift]) -> dict[str, float]:
    """Mean divergence over the tokens at some places of their messages."""
    means = {}
    for first, end in POSITIONS:
        values = [value for d in found for value in d.divergence[first:end]]
        if values:
            means[f"{first}-{end - 1}" if end < 10**9 else f"{first}-"] = fmean(values)
    return means
