"""What the leak guard costs in the Prisoner's Dilemma, and what leaks without it.

`make bench NAME=guard ARGS="--games 3"`: every game runs once in prefix mode; its texts are then forced under every
condition, from an empty cache. Alice's secret instructions are then replaced by others of another length while every text
stays the same: whatever Bob's distributions move is a leak. Timed runs alternate between the conditions, in another order
every time; the interval is of a bootstrap over games. Results are saved after every game.

Ten minutes on two cores are enough for `--games 3 --max-tokens 32`.
"""

import argparse
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console

from choreograph import Engine, Message, SamplingParams
from choreograph.console import print_table
from choreograph.features.agent_tags import RequestTag, tag_requests
from choreograph.lab.evaluation.statistics import ratio
from choreograph.lab.workflows import prisoners_dilemma
from choreograph.lab.workflows.run import Transcript, WorkflowRun
from choreograph.outputs import Mode

from .common import engine as make_engine
from .common import write
from .repair import show

CONDITIONS: dict[str, tuple[Mode, dict[str, Any]]] = {
    "prefix": ("prefix", {}),
    "choreographed": ("choreographed", {}),
    "choreographed, guard": ("choreographed", {"guard": True}),
}
SECRETS = ("Promise to cooperate, then defect.", "You owe Bob a favour, and he knows it: whatever he says, cooperate.")


def run(
    engine: Engine,
    mode: Mode,
    options: dict[str, Any],
    *,
    seed: int,
    max_tokens: int,
    replay: Transcript | None = None,
) -> tuple[dict[str, float], list[torch.Tensor], Transcript]:
    """Play one game from an empty cache; return its costs, the rows (V,) of Bob's decodes, and the texts."""
    engine.clear_cache()
    rows: dict[int, list[torch.Tensor]] = {}

    def watch(message: Message) -> None:
        if message.kind == "decode":
            own = rows[message.id] = []
            message.on_logprobs(lambda row: own.append(row.clone()))

    with engine.session(mode=mode, seed=seed) as session, tag_requests(RequestTag(session, None, watch)):
        wf = WorkflowRun(
            session, sampling=SamplingParams(temperature=0.7, top_p=0.95, max_tokens=max_tokens), replay=replay
        )
        start = time.perf_counter()
        prisoners_dilemma.run(wf, "Alice", **options).result()
        engine.run_until_idle()
        seconds = time.perf_counter() - start
        called = {message.id for _, message in wf.calls}
        others = [message for message in session.messages if message.id not in called]
        costs = {
            "seconds": seconds,
            "computed": float(session.usage.computed_tokens),
            "reencoded": float(sum(message.usage.computed_tokens for message in others)),
        }
        readers = [message for stage, message in wf.calls if stage in ("Bob says", "Bob decides", "Bob predicts")]
        return costs, [torch.stack(rows[message.id]) for message in readers], wf.transcript()


def divergences(before: list[torch.Tensor], after: list[torch.Tensor]) -> Iterator[float]:
    """Yield the KL divergence in nats of every token."""
    for old, new in zip(before, after, strict=True):
        yield from (old.exp() * (old - new)).sum(-1).clamp_min(0).tolist()


def main() -> None:
    """Measure all games and print one row a condition."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--games", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=2, help="timed runs of every game; the median counts")
    parser.add_argument("--max-tokens", type=int, default=48, help="of a message")
    args = parser.parse_args()
    engine = make_engine(dtype="float32")
    results: dict[str, list[dict[str, float]]] = {name: [] for name in CONDITIONS}
    for seed in range(args.games):
        common = {"seed": seed, "max_tokens": args.max_tokens}
        _, _, texts = run(engine, "prefix", {"orders": SECRETS[0]}, **common)
        times: dict[str, list[float]] = {name: [] for name in CONDITIONS}
        for repeat in range(args.repeats):
            for name in random.Random(f"{seed} {repeat}").sample(list(CONDITIONS), len(CONDITIONS)):
                mode, options = CONDITIONS[name]
                costs, before, _ = run(engine, mode, {"orders": SECRETS[0], **options}, replay=texts, **common)
                times[name].append(costs["seconds"])
                if repeat == 0:  # repetitions compute the same
                    _, after, _ = run(engine, mode, {"orders": SECRETS[1], **options}, replay=texts, **common)
                    moved = list(divergences(before, after))
                    largest = max((old - new).abs().max().item() for old, new in zip(before, after, strict=True))
                    leak = {"kl": sum(moved) / len(moved), "kl_max": max(moved), "largest": largest}
                    results[name].append({**costs, **leak})
        for name, games in results.items():
            games[-1]["seconds"] = statistics.median(times[name])
        write("guard", [], games=seed + 1, conditions=results, repeats=args.repeats)
        print(f"... {seed + 1} of {args.games} games", flush=True)
    rows = []
    plain = [game["seconds"] for game in results["choreographed"]]
    for name, games in results.items():
        average = {key: sum(game[key] for game in games) / len(games) for key in games[0]}
        rows.append(
            (
                name,
                f"{average['seconds']:.2f}",
                show(asdict(ratio([game["seconds"] for game in games], plain)), ".2f"),
                f"{average['computed']:.0f}",
                f"{average['reencoded']:.0f}",
                f"{average['kl']:.2g}",
                f"{max(game['kl_max'] for game in games):.2g}",
                f"{max(game['largest'] for game in games):.2g}",
            )
        )
    header = (
        "condition",
        "seconds",
        "over choreographed",
        "computed tokens",
        "encoded again",
        "KL, mean",
        "KL, largest",
        "change of a log-prob",
    )
    print_table(Console(width=160), "guard", header, rows)


if __name__ == "__main__":
    main()
