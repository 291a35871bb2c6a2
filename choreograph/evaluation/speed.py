"""What choreography saves (Prompt Choreography, section 4.2): both modes on one engine, in turns, on the same tokens.

A trace of every example is drawn first, many at once and untimed. Then each example runs alone, from an empty
cache, forced to its trace in both modes; the mode that goes first changes from example to example.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
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
    """One record an example: per condition the cost of its run, and the number of tokens generated."""
    for number, example in enumerate(examples):
        content, costs = transcripts[example.id], {}
        order = list(conditions.items())
        if number == 0:
            engine.warm_up()
        if number == 0 and warm_up:  # once in each mode without being counted
            for _, condition in order:
                _measure_cost(engine, workflow, example, content, condition, options)
        for name, condition in order if number % 2 == 0 else order[::-1]:
            costs[name] = _measure_cost(engine, workflow, example, content, condition, options)
            on_run()
        tokens = sum(len(message) for stage in content.values() for message in stage)
        yield {"id": example.id, "generated": tokens, "costs": {name: costs[name] for name in conditions}}


def _measure_cost(
    engine: Engine,
    workflow: WorkflowFunction,
    example: Example,
    transcript: Transcript,
    condition: Condition,
    options: Any,
) -> RunRecord:
    engine.clear_cache()
    gc.collect()
    done = run_workflow(
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
    if done.run.transcript() != {stage: [list(m) for m in messages] for stage, messages in transcript.items()}:
        raise DataError(
            f"{example.id}: forced to its trace, the workflow went another way: let nothing but what is said decide"
        )
    return done.metrics.as_dict()


def speed_rows(records: Sequence[RunRecord], baseline: str, other: str) -> dict[str, Estimate]:
    """Ratios baseline over other, pooled over examples, with bootstrap intervals over examples.

    Of times to first token there are two means: over steps, where parallel calls are one step as in the paper's
    pseudocode (Figure 6), and over all decodes, where each of them counts.
    """
    measures: dict[str, Callable[[RunRecord], float | None]] = {
        "TTFT, steps": lambda cost: cost["step_ttft"],
        "TTFT, all decodes": lambda cost: cost["ttft"],
        "end to end": lambda cost: cost["seconds"],
        "prompt tokens encoded": lambda cost: cost["encoded"],
    }
    for stage in _decode_stages(records, baseline):
        measures[f"TTFT, {stage}"] = partial(_stage_ttft, stage=stage)
    result = {}
    for label, read in measures.items():
        both = [(read(r["costs"][baseline]), read(r["costs"][other])) for r in records]
        pairs = [(a, b) for a, b in both if a is not None and b is not None]
        if pairs:  # not where nothing is decoded, or only on one side
            result[label] = ratio(*map(list, zip(*pairs, strict=True)))
    return result


def _decode_stages(records: Sequence[RunRecord], name: str) -> list[str]:
    stages = [s["stage"] for r in records for s in r["costs"][name]["stages"] if s["ttft"] is not None]
    return list(dict.fromkeys(stages))


def _stage_ttft(cost: RunRecord, stage: str) -> float | None:
    return next((s["ttft"] for s in cost["stages"] if s["stage"] == stage), None)
