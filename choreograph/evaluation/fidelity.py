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

from ..engine.engine import Engine
from ..models.hf_model import HFModel
from ..sampling_params import SamplingParams
from ..training.dry_run import TaskTranscript, dry_run
from ..training.packed_forward import PackedTrace, forward_no_grad, pack, pack_adapter_stages
from ..training.trace import TracedCall, iter_decodes, split_adapter_stages
from ..workflows import WorkflowFunction
from ..workflows.run import Condition
from .datasets import Example
from .run_dir import RunRecord
from .statistics import Estimate, difference, mean

DecodeLogits = dict[
    tuple[str, int], tuple[list[int], torch.Tensor]
]  # of a stage's n-th message: its tokens, their logits


@dataclass(frozen=True)
class TokenDivergence:
    """One message of one trace: per generated token the log-loss before and now, and the divergence, in nats."""

    stage: str
    before: tuple[float, ...]
    after: tuple[float, ...]
    divergence: tuple[float, ...]


def measure_divergence(
    engine: Engine,
    workflow: WorkflowFunction,
    task_transcripts: Sequence[TaskTranscript],
    conditions: Mapping[str, Condition],
    *,
    sampling: SamplingParams,
    options: Mapping[str, Any] | None = None,
) -> Iterator[tuple[str, dict[str, list[TokenDivergence]]]]:
    """For every script, its id and what each condition but the first (the baseline) makes of it.

    Memory: two rows of logits for every token of a trace, one trace at a time.
    """
    adapter = engine.core.hf_model
    calls = {
        name: dict(dry_run(adapter, workflow, task_transcripts, condition, sampling=sampling, options=options))
        for name, condition in conditions.items()
    }
    baseline, *others = conditions
    for name in others:
        conditions[name].check_adapter_stages(stage for script in task_transcripts for stage in script.transcript)

    def readings(name: str, id: str) -> DecodeLogits:
        condition = conditions[name]
        result = _decode_logits(adapter, pack(calls[name][id]), calls[name][id], condition.base_or_adapter)
        if condition.adapter_stages:
            reading = split_adapter_stages(calls[name][id], condition.adapter_stages)
            result |= _decode_logits(adapter, pack_adapter_stages(reading), reading, condition.model)
        return result

    for script in task_transcripts:
        before = readings(baseline, script.id)
        yield script.id, {name: _compare(before, readings(name, script.id)) for name in others}


def transcripts(examples: Sequence[Example], records: Mapping[str, RunRecord]) -> list[TaskTranscript]:
    """What was said in the records of a condition, but for those that failed."""
    return [TaskTranscript(e.id, e.task, records[e.id]["tokens"]) for e in examples if not records[e.id].get("error")]


def _decode_logits(
    hf_model: HFModel, packed_trace: PackedTrace, calls: Sequence[TracedCall], model: str
) -> DecodeLogits:
    logits = forward_no_grad(hf_model, packed_trace, model)
    result: DecodeLogits = {}
    at = 0
    for name, call in iter_decodes(calls):
        tokens = call.generated or []
        result[name] = tokens, logits[at : at + len(tokens)]
        at += len(tokens)
    return result


def _compare(before: DecodeLogits, after: DecodeLogits) -> list[TokenDivergence]:
    """Message by message, in the order of the condition's calls."""
    return [
        TokenDivergence(stage, *_log_losses_and_kl(tokens, before[stage, number][1], logits))
        for (stage, number), (tokens, logits) in after.items()
        if tokens
    ]


def _log_losses_and_kl(
    tokens: Sequence[int], before: torch.Tensor, after: torch.Tensor
) -> tuple[tuple[float, ...], ...]:
    """Log-losses of the tokens before and now, and the divergence of the whole distributions (never below zero)."""
    old, new = before.float().log_softmax(-1), after.float().log_softmax(-1)
    divergence = (old.exp() * (old - new)).sum(-1).clamp_min(0)
    ids = torch.tensor(tokens, device=old.device)[:, None]
    losses = (tuple((-rows.gather(1, ids)[:, 0]).tolist()) for rows in (old, new))
    return (*losses, tuple(divergence.tolist()))


@dataclass(frozen=True)
class DivergenceSummary:
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


def summarize_divergence(divergences: Sequence[Mapping[str, Sequence[TokenDivergence]]]) -> list[DivergenceSummary]:
    """Means over examples (each example weighs the same), for `all` decodes and for each stage."""
    rows = []
    for condition in divergences[0] if divergences else ():
        stages = list(dict.fromkeys(d.stage for one in divergences for d in one[condition]))
        for stage in ("all", *stages):
            each = [[d for d in one[condition] if stage in ("all", d.stage)] for one in divergences]
            each = [drifts for drifts in each if drifts]
            if not each:  # of workflows that decode nothing
                continue
            before, after, divergence = (
                [fmean(value for d in one for value in getattr(d, name)) for one in each]
                for name in ("before", "after", "divergence")
            )
            row = DivergenceSummary(
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


def _by_position(divergences: Sequence[TokenDivergence]) -> dict[str, float]:
    """Mean divergence over the tokens at some places of their messages."""
    means = {}
    for first, end in POSITIONS:
        values = [value for d in divergences for value in d.divergence[first:end]]
        if values:
            means[f"{first}-{end - 1}" if end < 10**9 else f"{first}-"] = fmean(values)
    return means
