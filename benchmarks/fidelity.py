"""How far reuse moves a model from itself, whatever the task: log-loss of the baseline's own traces, and KL.

`make bench NAME=fidelity ARGS="--model model.gguf --data folder --traces out/quality"`: the traces are those of a
`quality` run, forced under every condition of their workflow; what is not there is run first.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from choreograph import CacheConfig, Engine, EngineConfig
from choreograph.lab.evaluation.fidelity import measure_divergence, transcripts
from choreograph.lab.evaluation.report import print_divergence
from choreograph.lab.workflows import find
from choreograph.sampling_params import SamplingParams

from .common import merge_results, provenance, save
from .quality import PLANS, conditions_for, examples_of, run, traces_of

RUNS = ("math-tree_of_thoughts", "math-mad_iter", "math-mad_par", "qa-nq_oracle", "bsm", "pd-none", "pd-defect")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--model", required=True)
    options.add_argument("--data", type=Path, required=True)
    options.add_argument("--traces", type=Path, default=Path("out/quality"))
    options.add_argument("--limit", type=int, default=20)
    options.add_argument("--only", nargs="*", default=list(RUNS))
    options.add_argument("--dtype", default="bfloat16", help="float32 is faster where bfloat16 is emulated")
    given = options.parse_args()
    config = EngineConfig(cache=CacheConfig(capacity=100_000))
    engine = Engine.from_pretrained(given.model, dtype=given.dtype, config=config)
    for name in given.only:
        plan = PLANS[name]
        workflow = find(plan.workflow)
        examples = examples_of(plan, given.data)[: given.limit]
        traces = traces_of(given.traces, name, "baseline")
        if any(e.id not in traces for e in examples):
            alone = replace(plan, conditions=("baseline",))
            records = run(engine, f"{name}-baseline-{len(examples)}", alone, examples, given.traces)["baseline"]
            traces = {record["id"]: record for record in records}
        each = []
        for _, drift in measure_divergence(
            engine,
            workflow,
            transcripts(examples, traces),
            conditions_for(plan),
            sampling=SamplingParams(max_tokens=plan.max_tokens),
            options=plan.options,
        ):
            each.append(drift)
            print(f"... {name}: {len(each)} of {len(examples)}", flush=True)
        rows = print_divergence(Console(width=150), name, each)
        facts = {"workflow": plan.workflow, "data": plan.data, "dtype": given.dtype, **provenance()}
        result: dict[str, Any] = {name: {**facts, "n": len(each), "rows": rows}}
        save("fidelity", [], Path(given.model).stem, runs=merge_results("fidelity", "runs", result))


if __name__ == "__main__":
    main()
