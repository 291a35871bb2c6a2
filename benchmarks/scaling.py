"""Tree of Thoughts over more branches and voters (Prompt Choreography, Figure 5): where re-reading dominates.

`make bench NAME=scaling ARGS="--data math.jsonl"`. Solutions are decoded to exactly `--length` tokens, so that every
point compares the same shape; the baseline shares prefixes across branches and voters.
"""

import argparse
from dataclasses import replace

from choreograph.lab.evaluation.datasets import load
from choreograph.lab.evaluation.fidelity import speed_rows, time_conditions
from choreograph.lab.workflows import conditions_of, find
from choreograph.lab.workflows.run import WorkflowRun
from choreograph.lab.workflows.single_call import solve_prompt
from choreograph.sampling_params import SamplingParams

from .common import FIGURES, Row, engine, save
from .plots import speedup_over_branches

BRANCHES = (4, 16, 64)
VOTERS = (1, 4, 16)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--data", default="examples/problems.jsonl")
    options.add_argument("--problems", type=int, default=3)
    options.add_argument("--fresh", type=int, default=5)
    options.add_argument("--length", type=int, default=104, help="64 such solutions just fit the model")
    given = options.parse_args()
    e = engine(tokens=32768)
    workflow, examples = find("tree_of_thoughts"), load(given.data, limit=given.problems, seed=0)
    series: dict[str, list] = {}
    rows = []
    for voters in VOTERS:
        for branches in BRANCHES:
            chosen = {"branches": branches, "voters": voters, "prompt": "plain", "form": "short"}
            result = end_to_end(e, workflow, examples, given.length, chosen, warm_up=not series)
            for measure in ("end to end", "TTFT, all decodes"):
                one = result[measure]
                label = f"{branches} branches, {voters} voters: {measure}"
                rows.append(Row(label, one.value, "x", one.low, one.high))
            one = result["end to end"]
            print(f"{chosen}: {one.value:.2f} ({one.low:.2f}, {one.high:.2f})", flush=True)
            label = f"{voters} voter{'s' if voters > 1 else ''}"
            series.setdefault(label, []).append((branches, (one.value, one.low, one.high)))
    best = max((point[1][0], label, point[0]) for label, points in series.items() for point in points)
    chosen = {"branches": best[2], "voters": int(best[1].split()[0]), "prompt": "plain", "form": "short"}
    fresh = load(given.data, seed=0)[given.problems : given.problems + given.fresh]  # the best of many points flatters
    again = end_to_end(e, workflow, fresh, given.length, chosen)["end to end"]
    label = (
        f"best, timed again on {len(fresh)} other problems: {chosen['branches']} branches, {chosen['voters']} voters"
    )
    rows.insert(0, Row(label, again.value, "x", again.low, again.high, required=2.2, target=4.0))
    title = f"Tree of Thoughts, solutions of {given.length} tokens"
    speedup_over_branches(series, FIGURES / "speed-over-branches.svg", title=title)
    save("scaling", rows, options={"length": given.length, "problems": given.problems})


def end_to_end(e, workflow, examples: list, length: int, options: dict, *, warm_up: bool = False) -> dict:
    traces = {x.id: trace(e, workflow, x.task, length, options) for x in examples}
    costs = list(
        time_conditions(e, workflow, examples, traces, conditions_of(workflow), options=options, warm_up=warm_up)
    )
    return speed_rows(costs, "baseline", "choreographed")


def trace(e, workflow, task: str, length: int, options: dict) -> dict:
    """Solutions of exactly `length` tokens; votes and the answer as the model gives them."""
    sampling = SamplingParams(temperature=0.7, top_p=0.95, max_tokens=length)
    exactly = replace(sampling, min_tokens=length)
    with e.session(mode="prefix", seed=0) as session:
        exc = session.prefill(session.user(solve_prompt(task, "plain")))
        headers = [session.assistant(f"Solution {i + 1}:\n") for i in range(options["branches"])]
        solutions = [session.decode(header, [exc], sampling=exactly) for header in headers]
        p = WorkflowRun(session, sampling=sampling, replay={"solve": [s.generated for s in solutions]})
        workflow(p, task, **options).result()
        e.run_until_idle()
        return p.transcript()


if __name__ == "__main__":
    main()
