"""What repair buys: share of the context recomputed, gap in log-loss closed, and time to first token.

`make bench NAME=repair ARGS="--data folder"`: every example runs once in prefix mode; its messages are then forced
under every condition, choreographed with each strategy and share. The gap is that of the mean log-loss a token of the
baseline's own messages, in stages that read reused messages out of their context.
"""

import argparse
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from choreograph import Budget, Engine, Message, Repair, SamplingParams
from choreograph.console import print_table
from choreograph.engine.request import RequestTag, tag_requests
from choreograph.evaluation.runner import example_seed
from choreograph.evaluation.statistics import mean
from choreograph.outputs import Mode
from choreograph.workflows import find
from choreograph.workflows.run import Transcript, WorkflowRun, call_workflow

from .common import engine as make_engine
from .common import merge_results, provenance, save
from .quality import PLANS, examples_of

RUNS = ("qa-nq_oracle", "math-tree_of_thoughts", "math-mad_par", "math-mad_iter", "bsm", "pd-none")
STRATEGIES = ("first", "deviation", "attention")
SHARES = (0.1, 0.2, 0.4)


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
) -> tuple[Measured, Transcript]:
    """Run an example from an empty cache and keep the distribution of every generated token."""
    engine.clear_cache()
    measured = Measured()

    def watch(message: Message) -> None:
        if message.kind == "decode":
            rows = measured.rows[message.id] = []
            message.on_logprobs(lambda row: rows.append(row.clone()))

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


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--model", default=None, help="default: the bundled model")
    options.add_argument("--data", type=Path, required=True)
    options.add_argument("--only", nargs="*", default=list(RUNS))
    options.add_argument("--limit", type=int, default=8, help="examples of each workflow")
    options.add_argument("--skip", type=int, default=0, help="examples to leave out at the start")
    options.add_argument("--max-tokens", type=int, default=64, help="of a message")
    options.add_argument("--dtype", default="bfloat16")
    given = options.parse_args()
    if given.model is None:
        engine, name = make_engine(tokens=40_000, compile=False, dtype=given.dtype), "bundled"
    else:
        engine, name = Engine.from_pretrained(given.model, dtype=given.dtype), Path(given.model).stem
    conditions: dict[str, Repair | None] = {"reuse": None}
    conditions |= {f"{strategy} {share:g}": Repair(share, strategy) for share in SHARES for strategy in STRATEGIES}
    for plan_name in given.only:
        plan = PLANS[plan_name]
        workflow = find(plan.workflow)
        sampling = SamplingParams(temperature=0.7, top_p=0.95, max_tokens=given.max_tokens)
        gathered: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        examples = examples_of(plan, given.data)[given.skip : given.skip + given.limit]
        for number, example in enumerate(examples):
            common = {"sampling": sampling, "options": dict(plan.options), "seed": example_seed(0, example.id)}
            baseline, transcript = run(engine, workflow, example.task, mode="prefix", repair=None, **common)
            for condition, repair in conditions.items():
                other, _ = run(
                    engine, workflow, example.task, mode="choreographed", repair=repair, replay=transcript, **common
                )
                for stage, (old, new, divergence) in losses(baseline, other).items():
                    values = gathered[condition, stage]
                    values["gap"].append(sum(new) / len(new) - sum(old) / len(old))
                    values["kl"].append(sum(divergence) / len(divergence))
                    values["ttft"].append(sum(other.ttft[stage]) / len(other.ttft[stage]))
                    values["prefix_ttft"].append(sum(baseline.ttft[stage]) / len(baseline.ttft[stage]))
                    values["repaired"].append(other.repaired[stage])
            print(f"... {plan_name}: {number + 1} of {len(examples)}", flush=True)
        rows, records = [], []
        for (condition, stage), values in gathered.items():
            reuse = gathered["reuse", stage]
            gap, full_gap = (sum(v["gap"]) / len(v["gap"]) for v in (values, reuse))
            kl, full_kl = (sum(v["kl"]) / len(v["kl"]) for v in (values, reuse))
            speed = sum(values["prefix_ttft"]) / max(1e-9, sum(values["ttft"]))
            record = {
                "condition": condition,
                "stage": stage,
                "gap": asdict(mean(values["gap"])),
                "kl": kl,
                "gap_closed": None if full_gap <= 0 else 1 - gap / full_gap,
                "kl_closed": None if full_kl <= 0 else 1 - kl / full_kl,
                "ttft_over_prefix": speed,
                "repaired_tokens": sum(values["repaired"]) / len(values["repaired"]),
            }
            records.append(record)
            closed = "-" if record["gap_closed"] is None else f"{record['gap_closed']:.0%}"
            rows.append(
                [
                    stage,
                    condition,
                    f"{gap:+.3f}",
                    closed,
                    f"{kl:.3f}",
                    f"{record['kl_closed'] or 0:.0%}",
                    f"{speed:.1f}x",
                    f"{record['repaired_tokens']:.0f}",
                ]
            )
        header = ["stage", "condition", "log-loss gap", "closed", "KL", "closed", "TTFT vs prefix", "repaired"]
        print_table(Console(width=150), plan_name, header, sorted(rows, key=lambda row: row[0]))
        facts = {"workflow": plan.workflow, "data": plan.data, "n": len(examples), **provenance()}
        save("repair", [], name, runs=merge_results("repair", "runs", {plan_name: {**facts, "rows": records}}))


if __name__ == "__main__":
    main()
