"""What choreography without fine-tuning does to answers (Prompt Choreography, Tables 1 to 4 and 6, Figure 8).

`make bench NAME=quality ARGS="--model model.gguf --data folder"`: every run of the table below that is not finished
yet is carried on in `--out`, many examples at once; then all of them are scored. `--only name ...` takes some of
them, `--report` scores what is there. Datasets are read from `folder/<name>.jsonl`.
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from choreograph import CacheConfig, Engine, EngineConfig
from choreograph.console import print_table
from choreograph.lab.evaluation.datasets import Example, load, make_games, make_pairs
from choreograph.lab.evaluation.experiment import Experiment
from choreograph.lab.evaluation.report import format_estimate, score_table, summarize, win_rates
from choreograph.lab.evaluation.run_dir import RunDirectory, RunRecord
from choreograph.lab.evaluation.runner import evaluate_conditions
from choreograph.lab.workflows import Condition, conditions_of, find
from choreograph.sampling_params import SamplingParams

from .common import FIGURES, last_result, merge_results, provenance, save
from .plots import difference_bars

WORKFLOWS = {  # by what their runs are called in result files
    "direct": "single_call",
    "mad_iter": "debate_iterative",
    "tree_of_thoughts": "tree_of_thoughts",
    "mad_par": "debate_parallel",
}
FORMS = {"mad_iter": "short", "tree_of_thoughts": "short", "mad_par": "guided"}  # that ran before there was another
LEAKS = ("baseline", "leak both", "leak system", "leak plan")


@dataclass(frozen=True)
class Plan:
    """One run: a workflow over a dataset. conditions: only these of the workflow's own."""

    workflow: str
    data: str
    limit: int
    max_tokens: int
    options: Mapping[str, Any] = field(default_factory=dict)
    conditions: tuple[str, ...] = ()
    judged: bool = False  # whether the model compares the answers, in both orders


PLANS = {
    **{
        f"{data}-{run}": Plan(w, data, 100, 224, {"form": FORMS[run]} if run in FORMS else {})
        for data in ("math", "gsm8k")
        for run, w in WORKFLOWS.items()
    },
    **{f"math-{run}-paper": Plan(WORKFLOWS[run], "math", 100, 512, {"form": "paper"}) for run in FORMS},
    **{f"qa-{data}": Plan("multi_qa", data, 200, 96) for data in ("nq_oracle", "triviaqa")},
    **{f"qa-{data}-paper": Plan("multi_qa", data, 200, 96, {"form": "paper"}) for data in ("nq_oracle", "triviaqa")},
    **{
        f"pd-{strategy}": Plan("prisoners_dilemma", "games", 100, 96, {"strategy": strategy}, LEAKS)
        for strategy in ("none", "cooperate", "defect")
    },
    "bsm": Plan("branch_solve_merge", "commongen_hard", 100, 224),
    "bsm-judged": Plan("branch_solve_merge", "commongen_hard", 12, 224, judged=True),
}


def examples_of(plan: Plan, folder: Path) -> list[Example]:
    if plan.data == "games":
        return make_games(plan.limit)
    file = str(folder / f"{plan.data}.jsonl")
    if plan.workflow == "multi_qa":
        return make_pairs(load(file, limit=plan.limit))
    return load(file, limit=plan.limit, seed=None if plan.workflow == "branch_solve_merge" else 0)


def conditions_for(plan: Plan) -> dict[str, Condition]:
    known = conditions_of(find(plan.workflow))
    return {k: c for k, c in known.items() if not plan.conditions or k in plan.conditions}


def run(engine: Engine, name: str, plan: Plan, examples: list[Example], out: Path) -> dict[str, list[RunRecord]]:
    workflow = find(plan.workflow)
    conditions = conditions_for(plan)
    sampling = SamplingParams(temperature=0.7, top_p=0.95, max_tokens=plan.max_tokens)
    experiment = Experiment(plan.workflow, workflow, conditions, sampling, options=plan.options)
    count = 0

    def on_done(condition: str, record: RunRecord) -> None:
        nonlocal count
        count += 1
        if count % 10 == 0:
            print(f"... {name}: {condition}, {count} runs", flush=True)

    return evaluate_conditions(
        engine,
        experiment,
        examples,
        RunDirectory(out / name, experiment.settings(engine, examples)),
        concurrency=64,
        max_requests=256,
        on_done=on_done,
    )


def finished_records(name: str, plan: Plan, examples: list[Example], out: Path) -> dict[str, list[RunRecord]] | None:
    """The records of a run if every example is there under every condition."""
    result = {}
    for condition in conditions_for(plan):
        records = traces_of(out, name, condition)
        if any(e.id not in records for e in examples):
            return None
        result[condition] = [records[e.id] for e in examples]
    return result


def traces_of(out: Path, name: str, condition: str) -> dict[str, RunRecord]:
    """What a run left behind, by the id of the example."""
    file = out / name / f"{condition.replace(' ', '-')}.jsonl"
    lines = file.read_text(encoding="utf-8").split("\n") if file.exists() else []
    return {r["id"]: r for r in map(json.loads, filter(None, lines))}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--model", required=True)
    options.add_argument("--data", type=Path, required=True)
    options.add_argument("--out", type=Path, default=Path("out/quality"))
    options.add_argument("--only", nargs="*", default=list(PLANS))
    options.add_argument("--limit", type=int, help="examples of every run; default: those of the table above")
    options.add_argument("--dtype", default="bfloat16", help="float32 is faster where bfloat16 is emulated")
    options.add_argument("--device", default="cpu")
    options.add_argument("--compile", action="store_true", help="CUDA graphs of small steps, with --device cuda")
    options.add_argument("--capacity", type=int, default=220_000, help="tokens of the cache")
    options.add_argument("--report", action="store_true", help="run nothing, score what is finished")
    given = options.parse_args()
    engine = None
    if not given.report:
        config = EngineConfig(cache=CacheConfig(capacity=given.capacity), compile=given.compile)
        engine = Engine.from_pretrained(given.model, device=given.device, dtype=given.dtype, config=config)
    for name in given.only:
        plan = PLANS[name] if given.limit is None else replace(PLANS[name], limit=given.limit)
        examples = examples_of(plan, given.data)
        if engine is not None:
            records = run(engine, name, plan, examples, given.out)
        elif (there := finished_records(name, plan, examples, given.out)) is not None:
            records = there
        else:
            print(f"{name}: not finished, left out")
            continue
        summary = {
            "workflow": plan.workflow,
            "data": plan.data,
            "max_tokens": plan.max_tokens,
            "dtype": given.dtype,
            **provenance(),
            **summarize(examples, records, max_tokens=plan.max_tokens),
        }
        head, lines = score_table(summary)
        print_table(Console(width=170), f"{name}, {len(examples)} examples", head, lines)
        if plan.judged:
            if engine is None:
                print(f"{name}: a report without a model compares no answers, left out")
                continue
            summary["win rates"] = win_rates(engine, Console(width=170), examples, records)
        save("quality", [], Path(given.model).stem, summaries=merge_results("quality", "summaries", {name: summary}))
    every = last_result("quality").get("summaries", {})
    if set(every) >= {f"pd-{s}" for s in ("none", "cooperate", "defect")}:
        leak_figure(every)


def leak_figure(summaries: Mapping[str, Any]) -> None:
    groups = {}
    titles = {"none": "no strategy", "cooperate": "always cooperate", "defect": "always defect"}
    for strategy, title in titles.items():
        conditions = summaries[f"pd-{strategy}"]["conditions"]
        result = {name: one["differences"].get("Bob cooperates") for name, one in conditions.items()}
        groups[title] = {
            name: tuple(100 * gap[k] for k in ("value", "low", "high")) for name, gap in result.items() if gap
        }
        print(title, {name: format_estimate(gap, 100) for name, gap in result.items() if gap})
    difference_bars(groups, FIGURES / "leak.svg", ylabel="shift of Bob's cooperation (points)")


if __name__ == "__main__":
    main()
