"""What choreography without fine-tuning does to answers (Prompt Choreography, Tables 1 to 4 and 6, Figure 8).

`make bench NAME=quality ARGS="--model model.gguf --data folder"`: every run of the table below that is not finished
yet is carried on in `--out`, many examples at once; then all of them are scored. `--only name ...` takes some of
them, `--report` scores what is there. Datasets are read from `folder/<name>.jsonl`.
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from choreograph import CacheConfig, Engine, EngineConfig
from choreograph.choreographies import Condition, conditions_of, find
from choreograph.evaluation.data import Example, games, load, pairs
from choreograph.evaluation.folder import Folder, Record
from choreograph.evaluation.runs import run_conditions, settings_of
from choreograph.evaluation.summary import interval, summarize, table
from choreograph.report import show_table
from choreograph.types import SamplingParams
from choreograph.viz.charts import shifts

from .common import FIGURES, last, merged, provenance, save

WORKFLOWS = ("direct", "mad_iter", "tree_of_thoughts", "mad_par")
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


PLANS = {
    **{f"{data}-{w}": Plan(w, data, 100, 224) for data in ("math", "gsm8k") for w in WORKFLOWS},
    **{f"qa-{data}": Plan("multi_qa", data, 200, 96) for data in ("nq_oracle", "triviaqa")},
    **{
        f"pd-{strategy}": Plan("prisoners_dilemma", "games", 100, 96, {"strategy": strategy}, LEAKS)
        for strategy in ("none", "cooperate", "defect")
    },
    "bsm": Plan("branch_solve_merge", "commongen_hard", 100, 224),
}


def examples_of(plan: Plan, folder: Path) -> list[Example]:
    if plan.data == "games":
        return games(plan.limit)
    file = str(folder / f"{plan.data}.jsonl")
    if plan.workflow == "multi_qa":
        return pairs(load(file, limit=plan.limit))
    return load(file, limit=plan.limit, seed=None if plan.workflow == "branch_solve_merge" else 0)


def conditions_for(plan: Plan) -> dict[str, Condition]:
    known = conditions_of(find(plan.workflow))
    return {k: c for k, c in known.items() if not plan.conditions or k in plan.conditions}


def run(engine: Engine, name: str, plan: Plan, examples: list[Example], out: Path) -> dict[str, list[Record]]:
    workflow = find(plan.workflow)
    conditions = conditions_for(plan)
    sampling = SamplingParams(temperature=0.7, top_p=0.95, max_tokens=plan.max_tokens)
    settings = settings_of(
        engine, plan.workflow, workflow, examples, conditions, sampling=sampling, seed=0, options=plan.options
    )
    count = 0

    def on_done(condition: str, record: Record) -> None:
        nonlocal count
        count += 1
        if count % 10 == 0:
            print(f"... {name}: {condition}, {count} runs", flush=True)

    return run_conditions(
        engine,
        workflow,
        examples,
        conditions,
        Folder(out / name, settings),
        sampling=sampling,
        options=plan.options,
        at_once=64,
        calls=256,
        on_done=on_done,
    )


def finished(name: str, plan: Plan, examples: list[Example], out: Path) -> dict[str, list[Record]] | None:
    """The records of a run if every example is there under every condition."""
    found = {}
    for condition in conditions_for(plan):
        records = traces_of(out, name, condition)
        if any(e.id not in records for e in examples):
            return None
        found[condition] = [records[e.id] for e in examples]
    return found


def traces_of(out: Path, name: str, condition: str) -> dict[str, Record]:
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
    options.add_argument("--dtype", default="bfloat16", help="float32 is faster where bfloat16 is emulated")
    options.add_argument("--report", action="store_true", help="run nothing, score what is finished")
    given = options.parse_args()
    engine = None
    if not given.report:
        config = EngineConfig(cache=CacheConfig(tokens=220_000))
        engine = Engine.from_pretrained(given.model, dtype=given.dtype, config=config)
    for name in given.only:
        plan = PLANS[name]
        examples = examples_of(plan, given.data)
        if engine is not None:
            records = run(engine, name, plan, examples, given.out)
        elif (there := finished(name, plan, examples, given.out)) is not None:
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
        head, lines = table(summary)
        show_table(Console(width=170), f"{name}, {len(examples)} examples", head, lines)
        save("quality", [], Path(given.model).stem, summaries=merged("quality", "summaries", {name: summary}))
    every = last("quality").get("summaries", {})
    if set(every) >= {f"pd-{s}" for s in ("none", "cooperate", "defect")}:
        leak_figure(every)


def leak_figure(summaries: Mapping[str, Any]) -> None:
    groups = {}
    titles = {"none": "no strategy", "cooperate": "always cooperate", "defect": "always defect"}
    for strategy, title in titles.items():
        conditions = summaries[f"pd-{strategy}"]["conditions"]
        found = {name: one["differences"].get("Bob cooperates") for name, one in conditions.items()}
        groups[title] = {
            name: tuple(100 * gap[k] for k in ("value", "low", "high")) for name, gap in found.items() if gap
        }
        print(title, {name: interval(gap, 100) for name, gap in found.items() if gap})
    shifts(groups, FIGURES / "leak.svg", ylabel="shift of Bob's cooperation (points)")


if __name__ == "__main__":
    main()
