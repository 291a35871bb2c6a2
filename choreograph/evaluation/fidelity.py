"""How far a workflow drifts when its encodings are reused, whatever its task (Prompt Choreography, section 3.2).

A trace of the baseline is computed twice, in the baseline's mode and under a condition, each time in one pass: the mean
log-loss of its own tokens in both, and the divergence KL(baseline || condition) of the two distributions at every
token. Blockage and leakage show up here even where a small model solves nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from ..choreographies import Workflow
from ..choreographies.performance import Condition
from ..core import Engine
from ..models.adapter import Adapter
from ..onepass.calls import TracedCall, decodes_of, for_readers
from ..onepass.packed import Pack, pack, pack_reading, read_logits
from ..onepass.rehearsal import Script, rehearse
from ..types import SamplingParams
from .data import Example
from .folder import Record
from .statistics import Estimate, difference, mean

Readings = dict[tuple[str, int], tuple[list[int], torch.Tensor]]  # of a stage's n-th message: its tokens, their logits


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
    scripts: Sequence[Script],
    conditions: Mapping[str, Condition],
    *,
    sampling: SamplingParams,
    options: Mapping[str, Any] | None = None,
) -> Iterator[tuple[str, dict[str, list[Drift]]]]:
    """For every script, its id and what each condition but the first (the baseline) makes of it.

    Memory: two rows of logits for every token of a trace, one trace at a time.
    """
    adapter = engine.runner.adapter
    calls = {
        name: dict(rehearse(adapter, workflow, scripts, condition, sampling=sampling, options=options))
        for name, condition in conditions.items()
    }
    baseline, *others = conditions
    for name in others:
        conditions[name].check_readers(stage for script in scripts for stage in script.content)

    def readings(name: str, id: str) -> Readings:
        condition = conditions[name]
        found = _readings(adapter, pack(calls[name][id]), calls[name][id], condition.writer)
        if condition.readers:
            reading = for_readers(calls[name][id], condition.readers)
            found |= _readings(adapter, pack_reading(reading), reading, condition.model)
        return found

    for script in scripts:
        before = readings(baseline, script.id)
        yield script.id, {name: _compare(before, readings(name, script.id)) for name in others}


def scripts_of(examples: Sequence[Example], records: Mapping[str, Record]) -> list[Script]:
    """What was said in the records of a condition, but for those that failed."""
    return [Script(e.id, e.task, records[e.id]["tokens"]) for e in examples if not records[e.id].get("error")]


def _readings(adapter: Adapter, packed: Pack, calls: Sequence[TracedCall], model: str) -> Readings:
    logits = read_logits(adapter, packed, model)
    found: Readings = {}
    at = 0
    for name, call in decodes_of(calls):
        tokens = call.generated or []
        found[name] = tokens, logits[at : at + len(tokens)]
        at += len(tokens)
    return found


def _compare(before: Readings, after: Readings) -> list[Drift]:
    """Message by message, in the order of the condition's calls."""
    return [
        Drift(stage, *_measure(tokens, before[stage, number][1], logits))
        for (stage, number), (tokens, logits) in after.items()
        if tokens
    ]


def _measure(tokens: Sequence[int], before: torch.Tensor, after: torch.Tensor) -> tuple[tuple[float, ...], ...]:
    """Log-losses of the tokens before and now, and the divergence of the whole distributions (never below zero)."""
    old, new = before.float().log_softmax(-1), after.float().log_softmax(-1)
    divergence = (old.exp() * (old - new)).sum(-1).clamp_min(0)
    ids = torch.tensor(tokens, device=old.device)[:, None]
    losses = (tuple((-rows.gather(1, ids)[:, 0]).tolist()) for rows in (old, new))
    return (*losses, tuple(divergence.tolist()))


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
            if not each:  # of workflows that decode nothing
                continue
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
