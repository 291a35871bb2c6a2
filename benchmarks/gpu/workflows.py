"""The papers' workflows, prefix mode against choreographed on the same tokens, in turns, one task after the other."""

from choreograph.choreographies import conditions_of, find
from choreograph.evaluation.data import Example
from choreograph.evaluation.speed import speed_rows, timed

from .bench import Bench, Found, Measure
from .budget import Allowance
from .counts import script, task_of
from .lines import TITLES


def measure(name: str) -> Measure:
    """The part that measures one workflow."""
    return lambda bench, allowance: ratios(bench, allowance, name)


def ratios(bench: Bench, allowance: Allowance, name: str) -> Found:
    flow, records = bench.shape.flows[name], []
    workflow = find(flow.workflow)
    tasks = [
        Example(str(seed), "math", task_of(bench.tokenizer, bench.shape, seed)) for seed in range(bench.shape.most)
    ]
    scripts = {one.id: script(bench.tokenizer, bench.shape, flow, int(one.id)) for one in tasks}
    conditions, options = conditions_of(workflow), dict(flow.options)
    runs = timed(bench.engine, workflow, tasks, scripts, conditions, options=options, warm_up=not bench.trial)
    for _ in allowance.rounds(len(tasks)):
        records.append(next(runs))
    bench.engine.clear_cache()
    found = speed_rows(records, "baseline", "choreographed")
    title = TITLES[name]
    return {f"{title}: TTFT": found["TTFT, steps"], f"{title}: end to end": found["end to end"]}
