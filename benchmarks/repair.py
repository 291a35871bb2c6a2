"""What repair buys: share of the context recomputed, gap in log-loss closed, and time to first token.

`make bench NAME=repair ARGS="--data folder"`: every example runs once in prefix mode; its messages are then forced
in prefix mode again and choreographed with each strategy and share, in another order for every example. The gap is that
of the mean log-loss a token of the baseline's own messages, in stages that read reused messages out of their context.
Intervals are of a bootstrap over examples, paired. Results are saved after every example.

Ten minutes on two cores are enough for `--only math-tree_of_thoughts --limit 6 --max-tokens 32 --shares 0.2`, and for
`--only qa-nq_oracle --limit 8 --max-tokens 32 --shares 0.2 --early`.

`--cost` measures first tokens instead, paired: records with ten documents (`hotpotqa`), encoded before, of which the question
reads five in another order. Each is compared with reuse, with prefix mode, and with the time of reuse, 1.25 times the
prefill of as many tokens and one decode step.
"""

import argparse
import json
import random
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from choreograph import Budget, Engine, Message, Repair, SamplingParams
from choreograph.console import print_table
from choreograph.features.agent_tags import RequestTag, tag_requests
from choreograph.features.repair.options import REPAIR_STRATEGIES
from choreograph.lab.evaluation.experiment import example_seed
from choreograph.lab.evaluation.statistics import Estimate, bootstrap, ratio
from choreograph.lab.workflows import find
from choreograph.lab.workflows.run import Transcript, WorkflowRun, call_workflow
from choreograph.outputs import Mode
from choreograph.viz import Point

from .common import FIGURES, interval, last_result, merge_results, provenance, seconds, write
from .common import engine as make_engine
from .plots import repair_curves
from .quality import PLANS, examples_of

RUNS = ("qa-nq_oracle", "math-tree_of_thoughts", "math-mad_par", "math-mad_iter", "bsm", "pd-none")
SHARES = (0.1, 0.2, 0.4)
COMPUTING = [name for name, strategy in REPAIR_STRATEGIES.items() if not strategy.aligns]  # `align` measures the other
TITLES = {
    "qa-nq_oracle": "MultiQA",
    "math-tree_of_thoughts": "Tree of Thoughts",
    "math-mad_par": "parallel debate",
    "math-mad_iter": "iterative debate",
    "bsm": "Branch-Solve-Merge",
    "pd-none": "Prisoner's Dilemma",
}


class Measured:
    """Losses and times of one run, by stage."""

    def __init__(self) -> None:
        self.rows: dict[int, list[torch.Tensor]] = {}  # log-probabilities (V,) of every token, by message
        self.messages: list[tuple[str, Message]] = []
        self.ttft: dict[str, list[float]] = defaultdict(list)  # seconds
        self.repaired: dict[str, int] = defaultdict(int)  # tokens


def run(
    engine: Engine,
    workflow: Any,
    task: str,
    *,
    mode: Mode,
    repair: Repair | None,
    max_kl: Budget | None = None,
    sampling: SamplingParams,
    options: dict[str, Any],
    seed: int,
    replay: Transcript | None = None,
    early: bool = False,
) -> tuple[Measured, Transcript]:
    """Run an example from an empty cache and keep the distribution of every generated token.

    early: prefills are computed when they are submitted, before the calls that read them.
    """
    engine.clear_cache()
    measured = Measured()

    def watch(message: Message) -> None:
        if message.kind == "decode":
            rows = measured.rows[message.id] = []
            message.on_logprobs(lambda row: rows.append(row.clone()))
        elif early:
            message.wait_encoded()

    with (
        engine.session(mode=mode, seed=seed, repair=repair, max_kl=max_kl) as session,
        tag_requests(RequestTag(session, None, watch)),
    ):
        wf = WorkflowRun(session, sampling=sampling, replay=replay)
        call_workflow(workflow, wf, task, options).result()
        engine.run_until_idle()
        for stage, message in wf.calls:
            measured.repaired[stage] += message.usage.repaired_tokens
            if message.kind == "decode":
                measured.messages.append((stage, message))
                measured.ttft[stage].append(message.timing.ttft or 0.0)
        return measured, wf.transcript()


def losses(baseline: Measured, other: Measured) -> dict[str, tuple[list[float], list[float], list[float]]]:
    """By stage: log-loss of every token on the baseline and under the condition, and the KL divergence, in nats."""
    result: dict[str, tuple[list[float], list[float], list[float]]] = defaultdict(lambda: ([], [], []))
    for (stage, message), (_, forced) in zip(baseline.messages, other.messages, strict=True):
        tokens = message.output_token_ids
        before, after = torch.stack(baseline.rows[message.id]), torch.stack(other.rows[forced.id])
        ids = torch.tensor(tokens)[:, None]
        old, new, divergence = result[stage]
        old += (-before.gather(1, ids)[:, 0]).tolist()
        new += (-after.gather(1, ids)[:, 0]).tolist()
        divergence += (before.exp() * (before - after)).sum(-1).clamp_min(0).tolist()
    return result


def average(values: Sequence[float]) -> Estimate:
    """Mean of examples; zeros and ones are numbers like others."""
    return bootstrap(np.mean, np.asarray(values))


def closed(values: Sequence[float], full: Sequence[float]) -> Estimate | None:
    """Share of a mean gap that a condition closes; None without a gap."""
    if sum(full) <= 0:
        return None
    left = ratio(values, full)
    return Estimate(1 - left.value, 1 - left.high, 1 - left.low, left.n)


def summarize(gathered: Mapping[tuple[str, str], Mapping[str, list[float]]]) -> list[dict[str, Any]]:
    """One record a stage and condition."""
    records = []
    for (stage, condition), values in sorted(gathered.items()):
        reuse, prefix = gathered[stage, "reuse"], gathered[stage, "prefix"]
        estimates = {
            "gap": average(values["gap"]),
            "kl": average(values["kl"]),
            "gap_closed": closed(values["gap"], reuse["gap"]),
            "kl_closed": closed(values["kl"], reuse["kl"]),
            "ttft_over_prefix": ratio(prefix["ttft"], values["ttft"]),
            "repaired_tokens": average(values["repaired"]),
        }
        records.append({"stage": stage, "condition": condition, **{k: e and asdict(e) for k, e in estimates.items()}})
    return records


def show(record: Mapping[str, float] | None, form: str) -> str:
    """A value and its interval."""
    return "-" if record is None else f"{record['value']:{form}} ({record['low']:{form}}, {record['high']:{form}})"


def draw(runs: Mapping[str, Any]) -> None:
    """Draw what strategies close over their speed, of stages where reuse diverges by 0.01 nats or more."""
    stages: dict[str, dict[str, list[Point]]] = {}
    for name, run in runs.items():
        points = {
            (record["stage"], record["condition"]): (
                record["ttft_over_prefix"]["value"],
                100 * record["kl_closed"]["value"],
            )
            for record in run["rows"]
            if record["kl_closed"] is not None
        }
        for record in run["rows"]:
            if record["condition"] == "reuse" and record["kl"]["value"] >= 0.01:
                stages[f"{TITLES[name]}: {record['stage']}"] = {
                    strategy: [
                        points[record["stage"], condition]
                        for condition in ("reuse", *(f"{strategy} {share:g}" for share in SHARES))
                        if (record["stage"], condition) in points
                    ]
                    for strategy in COMPUTING
                }
    repair_curves(stages, FIGURES / "repair.svg")


def answer_question(
    engine: Engine, record: Mapping[str, Any], mode: Mode, repair: Repair | None, seed: int
) -> tuple[float, float, Message]:
    """Ask over five of ten encoded documents; return TTFT and the time of a decode step, in seconds."""
    engine.clear_cache()
    texts = [f"{document['title']}\n{document['text']}\n\n" for document in record["documents"]]
    with engine.session(mode=mode, repair=repair, seed=0) as session:
        system = session.prefill(session.system("Answer the question from the documents."))
        documents = [session.prefill(text, [system]) for text in texts]
        if mode == "choreographed":
            for document in documents:
                document.wait_encoded()
        read = random.Random(seed).sample(documents, min(5, len(documents)))
        answer = session.decode(
            f"Question: {record['question']}\nAnswer:", [system, *read], temperature=0, max_tokens=9, ignore_eos=True
        )
        timing = answer.result().timing
        assert timing.ttft is not None and timing.e2e is not None
        return timing.ttft, (timing.e2e - timing.ttft) / 8, answer


def measure_costs(engine: Engine, data: Path, limit: int, conditions: Mapping[str, Repair | None]) -> None:
    """Print what the first token costs under each condition, of paired records."""
    records = [json.loads(line) for line in (data / "hotpotqa.jsonl").read_text().splitlines()[: limit + 1]]
    ttft: dict[str, list[float]] = defaultdict(list)
    bounds: dict[str, list[float]] = defaultdict(list)
    for number, record in enumerate(records):
        times = {}
        for condition in random.Random(number).sample(list(conditions), len(conditions)):
            mode: Mode = "prefix" if condition == "prefix" else "choreographed"
            times[condition] = answer_question(engine, record, mode, conditions[condition], number)
        for condition, (first_token, _, answer) in times.items() if number else ():  # the first record warms up
            ttft[condition].append(first_token)
            if num_tokens := answer.usage.repaired_tokens:
                engine.clear_cache()
                with engine.session() as session:
                    prompt = session.prefill([7 + i % 1000 for i in range(num_tokens)])
                    prefill = seconds(prompt.wait_encoded)
                bounds[condition].append(times["reuse"][0] + 1.25 * prefill + times["reuse"][1])
    rows = []
    for name, values in ttft.items():
        pairs = ((values, ttft["reuse"]), (ttft["prefix"], values), (values, bounds[name]))
        ratios = [[a / b for a, b in zip(above, below, strict=True)] if below else [] for above, below in pairs]
        cells = [show_median([1e3 * value for value in values]), *map(show_median, ratios)]
        rows.append([name, *cells])
    header = ["condition", "first token, ms", "over reuse", "prefix over this", "over its bound"]
    print_table(Console(width=120), f"retrieval, n = {len(ttft['reuse'])}", header, rows)


def show_median(values: Sequence[float]) -> str:
    """A median and its interval."""
    if not values:
        return "-"
    low, high = interval(values)
    return f"{statistics.median(values):.3g} ({low:.3g}, {high:.3g})"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", default=None, help="default: the bundled model")
    options.add_argument("--data", type=Path, required=True)
    options.add_argument("--only", nargs="*", default=list(RUNS))
    options.add_argument("--limit", type=int, default=8, help="examples of each workflow")
    options.add_argument("--skip", type=int, default=0, help="examples to leave out at the start")
    options.add_argument("--max-tokens", type=int, default=64, help="of a message")
    options.add_argument("--shares", type=float, nargs="*", default=list(SHARES))
    options.add_argument("--strategies", nargs="*", default=COMPUTING)
    options.add_argument("--cost", action="store_true", help="measure first tokens of retrieval instead")
    options.add_argument("--early", action="store_true", help="compute prefills before the calls that read them")
    options.add_argument("--dtype", default="bfloat16")
    given = options.parse_args()
    if given.model is None:
        engine, name = make_engine(tokens=40_000, dtype=given.dtype), "bundled"
    else:
        engine, name = Engine.from_pretrained(given.model, dtype=given.dtype), Path(given.model).stem
    conditions: dict[str, Repair | None] = {"prefix": None, "reuse": None}
    conditions |= {f"{kind} {share:g}": Repair(share, kind) for share in given.shares for kind in given.strategies}
    if given.cost:
        measure_costs(engine, given.data, given.limit, conditions)
        return
    for plan_name in given.only:
        plan = PLANS[plan_name]
        workflow = find(plan.workflow)
        sampling = SamplingParams(temperature=0.7, top_p=0.95, max_tokens=given.max_tokens)
        gathered: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        examples = examples_of(plan, given.data)[given.skip : given.skip + given.limit]
        records: list[dict[str, Any]] = []
        for number, example in enumerate(examples):
            common = {
                "sampling": sampling,
                "options": dict(plan.options),
                "seed": example_seed(0, example.id),
                "early": given.early,
            }
            baseline, transcript = run(engine, workflow, example.task, mode="prefix", repair=None, **common)
            for condition in random.Random(number).sample(list(conditions), len(conditions)):
                mode: Mode = "prefix" if condition == "prefix" else "choreographed"
                repair = conditions[condition]
                other, _ = run(engine, workflow, example.task, mode=mode, repair=repair, replay=transcript, **common)
                for stage, (old, new, divergence) in losses(baseline, other).items():
                    values = gathered[stage, condition]
                    values["gap"].append(sum(new) / len(new) - sum(old) / len(old))
                    values["kl"].append(sum(divergence) / len(divergence))
                    values["ttft"].append(sum(other.ttft[stage]) / len(other.ttft[stage]))
                    values["repaired"].append(other.repaired[stage])
            print(f"... {plan_name}: {number + 1} of {len(examples)}", flush=True)
            records = summarize(gathered)
            facts = {"workflow": plan.workflow, "data": plan.data, "n": number + 1, "early": given.early}
            update = {plan_name: {**facts, **provenance(), "rows": records}}
            write("repair", [], name, runs=merge_results("repair", "runs", update))
        columns = {
            "gap": "+.3f",
            "gap_closed": ".0%",
            "kl": ".3f",
            "kl_closed": ".0%",
            "ttft_over_prefix": ".1f",
            "repaired_tokens": ".0f",
        }
        rows = [
            [record["stage"], record["condition"], *(show(record[key], form) for key, form in columns.items())]
            for record in records
        ]
        header = ["stage", "condition", "log-loss gap", "closed", "KL", "closed", "TTFT, prefix over this", "repaired"]
        print_table(Console(width=170), plan_name, header, rows)
    draw(last_result("repair")["runs"])


if __name__ == "__main__":
    main()
