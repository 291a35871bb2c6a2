"""The papers' workflows, prefix mode against choreographed on the same tokens, in turns, one task after the other."""

from choreograph.lab.evaluation.datasets import Example
from choreograph.lab.evaluation.fidelity import speed_rows, time_conditions
from choreograph.lab.workflows import conditions_of, find

from .bench import Bench, Measure, PartResult
from .budget import Allowance
from .counts import make_transcript, task_of
from .lines import TITLES


def measure(name: str) -> Measure:
    """The part that measures one workflow."""
    return lambda bench, allowance: ratios(bench, allowance, name)


def ratios(bench: Bench, allowance: Allowance, name: str) -> PartResult:
    flow, records = bench.shape.flows[name], []
    workflow = find(flow.workflow)
    tasks = [
        Example(str(seed), "math", task_of(bench.tokenizer, bench.shape, seed))
        for seed in range(bench.shape.max_rounds)
    ]
    scripts = {one.id: make_transcript(bench.tokenizer, bench.shape, flow, int(one.id)) for one in tasks}
    conditions, options = conditions_of(workflow), dict(flow.options)
    runs = time_conditions(bench.engine, workflow, tasks, scripts, conditions, options=options, warm_up=not bench.trial)
    for _ in allowance.rounds(len(tasks)):
        records.append(next(runs))
    bench.engine.clear_cache()
    result = speed_rows(records, "baseline", "choreographed")
    title = TITLES[name]
    return {f"{title}: TTFT": result["TTFT, steps"], f"{title}: end to end": result["end to end"]}
