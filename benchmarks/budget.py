"""Budget of divergence: measured divergence of every stage against it, and the speed-up that is kept.

`make bench NAME=budget ARGS="--data folder"`: a budget learns each workflow's stages on some examples, every call
measured. On other examples the messages of a run in prefix mode are then forced in prefix mode again, under full reuse and
under the budget, in another order for every example. Results are saved after every workflow.

A stage is used after eight measurements, one an example, so `--learn` must be at least eight. Workflows whose prefills are long
need `--early` to show what reuse saves.
"""

import argparse
import random
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from choreograph import Budget, Engine, SamplingParams
from choreograph.api.concurrency import run_concurrently
from choreograph.console import print_table
from choreograph.lab.evaluation.datasets import Example
from choreograph.lab.evaluation.experiment import example_seed
from choreograph.lab.evaluation.statistics import ratio
from choreograph.lab.workflows import find
from choreograph.lab.workflows.run import WorkflowRun, call_workflow
from choreograph.outputs import Mode

from .common import engine as make_engine
from .common import merge_results, model_title, provenance, write
from .quality import PLANS, Plan, examples_of
from .repair import COMPUTING, RUNS, average, losses, run, show

STRATEGIES = ("unseen", "attention")  # the cheaper one first


def learn(engine: Engine, plan: Plan, budget: Budget, examples: Sequence[Example], max_tokens: int) -> None:
    """Run examples together, as the budget chooses, and measure one call of each stage and example."""
    sampling = SamplingParams(temperature=0.7, top_p=0.95, max_tokens=max_tokens)

    def run_example(example: Example) -> None:
        with engine.session(seed=example_seed(0, example.id), max_kl=budget) as session:
            wf = WorkflowRun(session, sampling=sampling)
            call_workflow(find(plan.workflow), wf, example.task, dict(plan.options)).result()

    for result in run_concurrently(engine, [partial(run_example, example) for example in examples]):
        if result.error is not None:
            raise result.error


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", default=None, help="default: the bundled model")
    options.add_argument("--data", type=Path, required=True)
    options.add_argument("--only", nargs="*", default=list(RUNS))
    options.add_argument("--max-kl", type=float, default=0.02, help="nats a token")
    options.add_argument("--strategies", nargs="*", default=STRATEGIES, choices=COMPUTING, help="of repair")
    options.add_argument("--learn", type=int, default=10, help="examples of each workflow to learn from")
    options.add_argument("--limit", type=int, default=3, help="other examples of each workflow to measure")
    options.add_argument("--max-tokens", type=int, default=16, help="of a message")
    options.add_argument("--early", action="store_true", help="compute prefills before the calls that read them")
    options.add_argument("--dtype", default="bfloat16")
    given = options.parse_args()
    if given.model is None:
        engine, name = make_engine(tokens=40_000, dtype=given.dtype), "bundled"
    else:
        engine, name = Engine.from_pretrained(given.model, dtype=given.dtype), model_title(given.model)
    sampling = SamplingParams(temperature=0.7, top_p=0.95, max_tokens=given.max_tokens)
    all_records: list[dict[str, Any]] = []
    for plan_name in given.only:
        plan, began = PLANS[plan_name], time.perf_counter()
        examples = examples_of(plan, given.data)
        held_out = examples[given.learn : given.learn + given.limit]
        learned = {"shadow_calls": 1.0, "shadow_tokens": 1e9, "strategy": given.strategies}
        learner = Budget(given.max_kl, workflow=plan_name, **learned)
        learn(engine, plan, learner, examples[: given.learn], given.max_tokens)
        print(f"... {plan_name}: learned in {time.perf_counter() - began:.0f} s", flush=True)
        learner.shadow_calls = 0.0
        conditions: dict[str, tuple[Mode, Budget | None]] = {
            "prefix": ("prefix", None),
            "reuse": ("choreographed", None),
            "budget": ("choreographed", learner),
        }
        gathered: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for number, example in enumerate(held_out):
            common: dict[str, Any] = {"sampling": sampling, "options": dict(plan.options), "early": given.early}
            common["seed"] = example_seed(0, example.id)
            workflow = find(plan.workflow)
            baseline, texts = run(engine, workflow, example.task, mode="prefix", repair=None, **common)
            for condition in random.Random(number).sample(list(conditions), len(conditions)):
                mode, max_kl = conditions[condition]
                other, _ = run(
                    engine, workflow, example.task, mode=mode, repair=None, max_kl=max_kl, replay=texts, **common
                )
                for stage, (_, _, divergence) in losses(baseline, other).items():
                    gathered[stage][f"{condition} kl"].append(sum(divergence) / len(divergence))
                    gathered[stage][f"{condition} ttft"].append(sum(other.ttft[stage]) / len(other.ttft[stage]))
        rows, records = [], []
        for stage, values in gathered.items():
            ttft = {condition: sum(values[f"{condition} ttft"]) for condition in conditions}
            saved, kl = ttft["prefix"] - ttft["reuse"], average(values["budget kl"])
            repair = learner.repair_for(f"{plan_name}/{stage}")
            record = {
                "stage": stage,
                "share": repair.share,
                "strategy": repair.strategy if 0 < repair.share < 1 else None,
                "kl": asdict(kl),
                "reuse_kl": asdict(average(values["reuse kl"])),
                "within": kl.value <= given.max_kl,
                "speedup": asdict(ratio(values["prefix ttft"], values["budget ttft"])),
                "reuse_speedup": asdict(ratio(values["prefix ttft"], values["reuse ttft"])),
                "kept": (ttft["prefix"] - ttft["budget"]) / saved if saved > 0 else None,  # share of the time saved
            }
            records.append(record)
            kept = "-" if record["kept"] is None else f"{record['kept']:.0%}"
            shown = [show(record[key], ".3f") for key in ("reuse_kl", "kl")]
            speeds = [show(record[key], ".1f") for key in ("reuse_speedup", "speedup")]
            rows.append(
                [
                    stage,
                    f"{record['share']:g} {record['strategy'] or ''}",
                    *shown,
                    "yes" if record["within"] else "no",
                    *speeds,
                    kept,
                ]
            )
        header = ["stage", "repair", "KL of reuse", "KL", "within", "TTFT, prefix over reuse", "over this", "kept"]
        print_table(Console(width=170), f"{plan_name}, at most {given.max_kl} nats a token", header, rows)
        facts = {
            "max_kl": given.max_kl,
            "strategies": given.strategies,
            "learned_from": given.learn,
            "n": len(held_out),
            "early": given.early,
            "max_tokens": given.max_tokens,
            **provenance(),
        }
        facts["seconds"] = time.perf_counter() - began
        write("budget", [], name, runs=merge_results("budget", "runs", {plan_name: {**facts, "rows": records}}))
        all_records += records
    within = sum(record["within"] for record in all_records)
    print(f"within the budget: {within} of {len(all_records)} stages")
    # where no option is within the budget, or reuse saves nothing, nothing can be kept
    used = [record for record in all_records if record["share"] < 1 and record["reuse_speedup"]["low"] > 1]
    kept = sum(record["kept"] > 0.5 for record in used)
    print(f"more than half of the time that reuse saves: {kept} of {len(used)} stages that it makes faster")


if __name__ == "__main__":
    main()
