"""What choreography saves (Prompt Choreography, section 4.2): both modes on one engine, in turns, on the same tokens.

A trace of every example is drawn first, many at once and untimed. Then each example runs alone, from an empty
cache, forced to its trace in both modes; the mode that goes first changes from example to example.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from ..choreographies import Workflow
from ..choreographies.performance import Condition, Content
from ..core import Engine
from ..errors import DataError
from ..measure import perform
from ..types import SamplingParams
from .data import Example
from .folder import Record
from .runs import seed_of
from .statistics import Estimate, ratio


def timed(
    engine: Engine,
    workflow: Workflow,
    examples: Sequence[Example],
    traces: Mapping[str, Content],
    conditions: Mapping[str, Condition],
    *,
    options: Mapping[str, Any] | None = None,
    warm_up: bool = True,
    on_run: Callable[[], None] = lambda: None,
) -> Iterator[Record]:
    """One record an example: per condition the cost of its run, and the number of tokens generated."""
    for number, example in enumerate(examples):
        content, costs = traces[example.id], {}
        order = list(conditions.items())
        if number == 0:
            engine.warm_up()
        if number == 0 and warm_up:  # once in each mode without being counted
            for _, condition in order:
                _cost(engine, workflow, example, content, condition, options)
        for name, condition in order if number % 2 == 0 else order[::-1]:
            costs[name] = _cost(engine, workflow, example, content, condition, options)
            on_run()
        tokens = sum(len(message) for stage in content.values() for message in stage)
        yield {"id": example.id, "generated": tokens, "costs": {name: costs[name] for name in conditions}}


def _cost(
    engine: Engine, workflow: Workflow, example: Example, content: Content, condition: Condition, options: Any
) -> Record:
    engine.clear_cache()
    gc.collect()
    done = perform(
        engine,
        workflow,
        example.task,
        mode=condition.mode,
        model=condition.model,
        readers=condition.readers,
        seed=seed_of(0, example.id),
        sampling=SamplingParams(max_tokens=engine.facts.max_positions),
        forced=content,
        options={**(options or {}), **condition.options},
    )
    if done.performance.content() != {stage: [list(m) for m in messages] for stage, messages in content.items()}:
        raise DataError(
            f"{example.id}: forced to its trace, the workflow went another way: let nothing but what is said decide"
        )
    return done.cost.as_dict()


def speed_rows(records: Sequence[Record], baseline: str, other: str) -> dict[str, Estimate]:
    """Ratios baseline over other, pooled over examples, with bootstrap intervals over examples.

    Of times to first token there are two means: over steps, where parallel calls are one step as in the paper's
    pseudocode (Figure 6), and over all decodes, where each of them counts.
    """
    measures: dict[str, Callable[[Record], float | None]] = {
        "TTFT, steps": lambda cost: cost["step_ttft"],
        "TTFT, all decodes": lambda cost: cost["ttft"],
        "end to end": lambda cost: cost["seconds"],
        "prompt tokens encoded": lambda cost: cost["encoded"],
    }
    for stage in _decode_stages(records, baseline):
        measures[f"TTFT, {stage}"] = partial(_stage_ttft, stage=stage)
    found = {}
    for label, read in measures.items():
        both = [(read(r["costs"][baseline]), read(r["costs"][other])) for r in records]
        pairs = [(a, b) for a, b in both if a is not None and b is not None]
        if pairs:  # not where nothing is decoded, or only on one side
            found[label] = ratio(*map(list, zip(*pairs, strict=True)))
    return found


def _decode_stages(records: Sequence[Record], name: str) -> list[str]:
    stages = [s["stage"] for r in records for s in r["costs"][name]["stages"] if s["ttft"] is not None]
    return list(dict.fromkeys(stages))


def _stage_ttft(cost: Record, stage: str) -> float | None:
    return next((s["ttft"] for s in cost["stages"] if s["stage"] == stage), None)
