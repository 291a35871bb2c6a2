"""Divergence and speed of workflows under KV reuse (Prompt Choreography, section 3.2).

The tokens of a baseline run are scored twice, in the baseline's mode and under a condition, each in one forward pass:
log-losses of the tokens, and KL(baseline || condition) of the distributions at every token.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Float

from ...api.engine import Engine
from ...errors import DataError
from ...sampling_params import SamplingParams
from ..replay.dry_run import TaskTranscript, dry_run
from ..replay.packed_forward import PackedTrace, forward_no_grad, pack, pack_adapter_stages
from ..replay.traced_calls import TracedCall, iter_decodes, split_adapter_stages
from ..workflows import WorkflowFunction
from ..workflows.run import Condition, Transcript, run_workflow
from .datasets import Example
from .experiment import example_seed
from .run_dir import RunRecord
from .statistics import Estimate, Units, difference, mean, ratio

POSITIONS = ((0, 4), (4, 16), (16, 64), (64, 10**9))  # half-open ranges of tokens in a message


@dataclass(frozen=True)
class TokenDivergence:
    """Losses of the generated tokens of one message, in nats."""

    stage: str
    before: tuple[float, ...]  # log-losses on the baseline
    after: tuple[float, ...]  # log-losses under the condition
    divergence: tuple[float, ...]  # KL(baseline || condition)


@dataclass(frozen=True)
class DivergenceSummary:
    """Means over examples of one stage and condition, in nats per token."""

    condition: str
    stage: str  # `all` for all stages
    tokens: int  # generated tokens
    before: Estimate  # log-loss on the baseline
    after: Estimate  # log-loss under the condition
    gap: Estimate  # after - before
    divergence: Estimate
    by_position: dict[str, float]  # mean divergence of tokens by their index in the message, such as `0-3`


def measure_divergence(
    engine: Engine,
    workflow: WorkflowFunction,
    task_transcripts: Sequence[TaskTranscript],
    conditions: Mapping[str, Condition],
    *,
    sampling: SamplingParams,
    options: Mapping[str, Any] | None = None,
) -> Iterator[tuple[str, dict[str, list[TokenDivergence]]]]:
    """Yield each transcript's id and every condition's divergence from the first.

    Memory: two rows of logits for every token of one transcript.
    """
    model = engine.core.hf_model
    calls = {
        name: dict(dry_run(model, workflow, task_transcripts, condition, sampling=sampling, options=options))
        for name, condition in conditions.items()
    }
    baseline, *others = conditions
    for name in others:
        conditions[name].check_adapter_stages(stage for task in task_transcripts for stage in task.transcript)

    def decodes(
        packed: PackedTrace, traced: Sequence[TracedCall], model_name: str
    ) -> dict[tuple[str, int], tuple[list[int], Float[torch.Tensor, "T V"]]]:
        """Return the tokens and logits of every decode, by stage and number."""
        logits, result, start = forward_no_grad(model, packed, model_name), {}, 0
        for key, call in iter_decodes(traced):
            tokens = call.generated or []
            result[key] = tokens, logits[start : start + len(tokens)]
            start += len(tokens)
        return result

    def decodes_under(name: str, id: str):
        condition, traced = conditions[name], calls[name][id]
        result = decodes(pack(traced), traced, condition.base_or_adapter)
        if condition.adapter_stages:
            staged = split_adapter_stages(traced, condition.adapter_stages)
            result |= decodes(pack_adapter_stages(staged), staged, condition.model)
        return result

    for task in task_transcripts:
        before = decodes_under(baseline, task.id)
        yield (
            task.id,
            {
                name: [
                    _token_divergence(stage, tokens, before[stage, number][1], logits)
                    for (stage, number), (tokens, logits) in decodes_under(name, task.id).items()
                    if tokens
                ]
                for name in others
            },
        )


def transcripts(examples: Sequence[Example], records: Mapping[str, RunRecord]) -> list[TaskTranscript]:
    """Return the transcripts of the runs that did not fail."""
    return [TaskTranscript(e.id, e.task, records[e.id]["tokens"]) for e in examples if not records[e.id].get("error")]


def _token_divergence(
    stage: str, tokens: Sequence[int], before: Float[torch.Tensor, "T V"], after: Float[torch.Tensor, "T V"]
) -> TokenDivergence:
    """Compare two arrays of logits at the tokens of one message."""
    old, new = before.float().log_softmax(-1), after.float().log_softmax(-1)
    kl = (old.exp() * (old - new)).sum(-1).clamp_min(0)
    ids = torch.tensor(tokens, device=old.device)[:, None]
    old_losses, new_losses = ((-logprobs.gather(1, ids)[:, 0]).tolist() for logprobs in (old, new))
    return TokenDivergence(stage, tuple(old_losses), tuple(new_losses), tuple(kl.tolist()))


def summarize_divergence(
    divergences: Sequence[Mapping[str, Sequence[TokenDivergence]]], units: Units = ()
) -> list[DivergenceSummary]:
    """Return equally weighted means over examples, by condition and stage.

    Args:
        units: of each example, as in `statistics.mean`.
    """
    rows = []
    for condition in divergences[0] if divergences else ():
        stages = list(dict.fromkeys(d.stage for example in divergences for d in example[condition]))
        for stage in ("all", *stages) if stages else ():
            messages = [[d for d in example[condition] if stage in ("all", d.stage)] for example in divergences]
            shared = [row for row, example in zip(units, messages, strict=bool(units)) if example]
            messages = [example for example in messages if example]
            before, after, kl = (
                [fmean(value for d in example for value in getattr(d, name)) for example in messages]
                for name in ("before", "after", "divergence")
            )
            by_position = {}
            for first, end in POSITIONS:
                values = [value for example in messages for d in example for value in d.divergence[first:end]]
                if values:
                    by_position[f"{first}-{end - 1}" if end < 10**9 else f"{first}-"] = fmean(values)
            row = DivergenceSummary(
                condition=condition,
                stage=stage,
                tokens=sum(len(d.before) for example in messages for d in example),
                before=mean(before, shared),
                after=mean(after, shared),
                gap=difference(after, before, shared),
                divergence=mean(kl, shared),
                by_position=by_position,
            )
            rows.append(row)
    return rows


def time_conditions(
    engine: Engine,
    workflow: WorkflowFunction,
    examples: Sequence[Example],
    transcripts: Mapping[str, Transcript],
    conditions: Mapping[str, Condition],
    *,
    options: Mapping[str, Any] | None = None,
    warm_up: bool = True,
    is_reversed: bool = False,
    on_run: Callable[[], None] = lambda: None,
) -> Iterator[RunRecord]:
    """Yield the cost of every example under each condition.

    Each example runs alone, from an empty cache, forced to its transcript. The order of the conditions alternates.

    Args:
        is_reversed: the first example runs under the last condition first.
    """

    def measure_cost(example: Example, condition: Condition) -> RunRecord:
        transcript = transcripts[example.id]
        engine.clear_cache()
        gc.collect()
        result = run_workflow(
            engine,
            workflow,
            example.task,
            mode=condition.mode,
            model=condition.model,
            adapter_stages=condition.adapter_stages,
            seed=example_seed(0, example.id),
            sampling=SamplingParams(max_tokens=engine.model_info.max_positions),
            replay=transcript,
            options={**(options or {}), **condition.options},
        )
        if result.run.transcript() != {stage: [list(m) for m in messages] for stage, messages in transcript.items()}:
            raise DataError(f"{example.id}: forced to its trace, the workflow took another path: let only texts decide")
        return result.metrics.as_dict()

    for number, example in enumerate(examples):
        order = list(conditions.items())
        if number == 0:
            engine.warm_up()
            for _, condition in order if warm_up else ():
                measure_cost(example, condition)
        costs = {}
        for name, condition in order if number % 2 == is_reversed else order[::-1]:
            costs[name] = measure_cost(example, condition)
            on_run()
        num_tokens = sum(len(message) for stage in transcripts[example.id].values() for message in stage)
        yield {"id": example.id, "generated": num_tokens, "costs": {name: costs[name] for name in conditions}}


def time_on_traces(
    workflow: WorkflowFunction,
    conditions: Mapping[str, Condition],
    options: Mapping[str, Any],
    engine: Engine,
    examples: Sequence[Example],
    baseline: Mapping[str, RunRecord] | None,
) -> Iterator[RunRecord]:
    """Yield the costs of some of the examples, as a `RunFunction`.

    Which order of the conditions comes first is drawn, since it may be the only one.
    """
    assert baseline is not None or not examples
    transcripts = {example.id: baseline[example.id]["tokens"] for example in examples} if baseline else {}
    is_reversed = bool(examples and example_seed(0, examples[0].id) % 2)
    yield from time_conditions(
        engine, workflow, examples, transcripts, conditions, options=options, is_reversed=is_reversed
    )


def speed_rows(records: Sequence[RunRecord], baseline: str, other: str) -> dict[str, Estimate]:
    """Return pooled cost ratios, baseline over other, with bootstrap intervals.

    Intervals are over examples. "TTFT, steps" counts parallel calls as one step, as the paper's
    pseudocode does (Figure 6); "TTFT, all decodes" counts each.
    """
    before, after = ([_measures(r["costs"][name]) for r in records] for name in (baseline, other))
    result = {}
    for label in dict.fromkeys(label for measures in before for label in measures):
        both = [(a.get(label), b.get(label)) for a, b in zip(before, after, strict=True)]
        pairs = [(a, b) for a, b in both if a is not None and b is not None]
        if pairs:  # a stage may decode nothing, or only under one condition
            result[label] = ratio(*map(list, zip(*pairs, strict=True)))
    return result


def _measures(cost: RunRecord) -> dict[str, float | None]:
    return {
        "TTFT, steps": cost["step_ttft"],
        "TTFT, all decodes": cost["ttft"],
        "end to end": cost["seconds"],
        "prompt tokens encoded": cost["encoded"],
        **{f"TTFT, {stage['stage']}": stage["ttft"] for stage in cost["stages"]},
    }
