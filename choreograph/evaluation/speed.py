"""Time conditions on the same tokens (Prompt Choreography, section 4.2)."""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..engine.engine import Engine
from ..errors import DataError
from ..sampling_params import SamplingParams
from ..workflows import WorkflowFunction
from ..workflows.run import Condition, Transcript, run_workflow
from .datasets import Example
from .run_dir import RunRecord
from .runner import example_seed
from .statistics import Estimate, ratio


def time_conditions(
    engine: Engine,
    workflow: WorkflowFunction,
    examples: Sequence[Example],
    transcripts: Mapping[str, Transcript],
    conditions: Mapping[str, Condition],
    *,
    options: Mapping[str, Any] | None = None,
    warm_up: bool = True,
    on_run: Callable[[], None] = lambda: None,
) -> Iterator[RunRecord]:
    """Yield the cost of every example under each condition.

    Each example runs alone, from an empty cache, forced to its transcript. The order of the conditions alternates.
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
        for name, condition in order if number % 2 == 0 else order[::-1]:
            costs[name] = measure_cost(example, condition)
            on_run()
        num_tokens = sum(len(message) for stage in transcripts[example.id].values() for message in stage)
        yield {"id": example.id, "generated": num_tokens, "costs": {name: costs[name] for name in conditions}}


def speed_rows(records: Sequence[RunRecord], baseline: str, other: str) -> dict[str, Estimate]:
    """Return pooled ratios baseline over other, with bootstrap intervals over examples.

    "TTFT, steps" counts parallel calls as one step, as the paper's pseudocode does (Figure 6); "TTFT, all decodes"
    counts each.
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
