"""Speculative decoding by prompt look-up in the debates, off against on, on the bundled model.

Each problem runs with both engines, in turns, from an empty cache. In bfloat16 a step of several rows may round
differently from a step of one, and take another of two nearly equal tokens; the texts differ from there on. So the
share of equal runs is shown, and the ratio of the times per generated token next to that of the times.
"""

import argparse
import json
from pathlib import Path

from choreograph import Engine, Message, SamplingParams
from choreograph.lab.workflows import WorkflowRun, find
from choreograph.outputs import Usage

from .common import Row, engine, median_row, ratio_row, save, seconds

WORKFLOWS = {"debate_iterative": "iterative debate", "debate_parallel": "parallel debate"}


class Run:
    """A debate about a problem on an engine: its time and what it generated."""

    def __init__(self, live: Engine, workflow: str, problem: str, sampling: SamplingParams) -> None:
        live.clear_cache()
        self.usage, self.tokens = Usage(), list[list[int]]()

        def run() -> None:
            with live.session(seed=0) as session:
                wf = WorkflowRun(session, sampling=sampling)
                find(workflow)(wf, problem).result()
                decodes: list[Message] = [message for _, message in wf.calls if message.kind == "decode"]
                self.tokens = [message.output_token_ids for message in decodes]
                for message in decodes:
                    self.usage += message.usage

        self.seconds = seconds(run)

    @property
    def seconds_per_token(self) -> float:
        return self.seconds / max(1, self.usage.completion_tokens)


def compare(name: str, runs: list[tuple[Run, Run]]) -> list[Row]:
    """Rows of a workflow: ratios, off over on, and what was drafted."""
    off, on = [pair[0] for pair in runs], [pair[1] for pair in runs]
    drafted, accepted = [r.usage.drafted_tokens for r in on], [r.usage.accepted_tokens for r in on]
    return [
        ratio_row(f"{name}: end to end", [r.seconds for r in off], [r.seconds for r in on], required=1.3),
        ratio_row(f"{name}: time per token", [r.seconds_per_token for r in off], [r.seconds_per_token for r in on]),
        median_row(f"{name}: accepted of drafted", [a / max(1, d) for a, d in zip(accepted, drafted, strict=True)], ""),
        median_row(
            f"{name}: accepted of generated",
            [a / max(1, r.usage.completion_tokens) for a, r in zip(accepted, on, strict=True)],
            "",
        ),
        median_row(f"{name}: runs of equal tokens", [float(a.tokens == b.tokens) for a, b in runs], ""),
    ]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--data", type=Path, default=Path("examples/problems.jsonl"))
    options.add_argument("--limit", type=int, default=10)
    options.add_argument("--max-tokens", type=int, default=256)
    options.add_argument("--draft-tokens", type=int, default=7)
    options.add_argument("--temperature", type=float, default=0.0)
    options.add_argument("--dtype", default="bfloat16")
    options.add_argument("--only", nargs="*", default=list(WORKFLOWS))
    given = options.parse_args()
    problems = [json.loads(line)["problem"] for line in given.data.read_text().splitlines()][: given.limit]
    sampling = SamplingParams(temperature=given.temperature, max_tokens=given.max_tokens)
    engines = [engine(dtype=given.dtype, draft_tokens=n) for n in (0, given.draft_tokens)]
    rows: list[Row] = []
    for workflow in given.only:
        for live in engines:  # warms up
            Run(live, workflow, problems[0], sampling)
        runs = []
        for number, problem in enumerate(problems):
            order = (0, 1) if number % 2 == 0 else (1, 0)
            pair = {i: Run(engines[i], workflow, problem, sampling) for i in order}
            runs.append((pair[0], pair[1]))
        rows += compare(WORKFLOWS[workflow], runs)
    save("speculative", rows, draft_tokens=given.draft_tokens, temperature=given.temperature, dtype=given.dtype)


if __name__ == "__main__":
    main()
