"""What the leak guard costs in the Prisoner's Dilemma, and what leaks without it.

`make bench NAME=guard ARGS="--games 3"`: every game runs once in prefix mode; its texts are then forced under every
condition, from an empty cache. Alice's secret instructions are then replaced by others of another length while every text
stays the same: whatever Bob's distributions move is a leak.
"""

import argparse
import time
from collections.abc import Iterator
from typing import Any

import torch
from rich.console import Console

from choreograph import Engine, Message, SamplingParams
from choreograph.console import print_table
from choreograph.engine.request import RequestTag, tag_requests
from choreograph.outputs import Mode
from choreograph.workflows import prisoners_dilemma
from choreograph.workflows.run import Transcript, WorkflowRun

from .common import engine as make_engine
from .common import provenance, save

CONDITIONS: dict[str, tuple[Mode, dict[str, Any]]] = {
    "prefix": ("prefix", {}),
    "choreographed": ("choreographed", {}),
    "choreographed, guard": ("choreographed", {"guard": True}),
}
SECRETS = ("Promise to cooperate, then defect.", "You owe Bob a favour, and he knows it: whatever he says, cooperate.")


def run(
    engine: Engine, mode: Mode, options: dict[str, Any], seed: int, replay: Transcript | None = None
) -> tuple[dict[str, float], list[torch.Tensor], Transcript]:
    """Play one game from an empty cache; return its costs, the rows (V,) of Bob's decodes, and the texts."""
    engine.clear_cache()
    rows: dict[int, list[torch.Tensor]] = {}

    def watch(message: Message) -> None:
        if message.kind == "decode":
            own = rows[message.id] = []
            message.on_logprobs(lambda row: own.append(row.clone()))

    with engine.session(mode=mode, seed=seed) as session, tag_requests(RequestTag(session, None, watch)):
        wf = WorkflowRun(session, sampling=SamplingParams(temperature=0.7, top_p=0.95), replay=replay)
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--games", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=1, help="timed runs of every game; the fastest counts")
    args = parser.parse_args()
    engine = make_engine(compile=False, dtype="float32")
    results: dict[str, Any] = {name: [] for name in CONDITIONS}
    for seed in range(args.games):
        _, _, texts = run(engine, "prefix", {"orders": SECRETS[0]}, seed)
        for name, (mode, options) in CONDITIONS.items():
            runs = [run(engine, mode, {"orders": SECRETS[0], **options}, seed, texts) for _ in range(args.repeats)]
            costs, before, _ = min(runs, key=lambda result: result[0]["seconds"])
            _, after, _ = run(engine, mode, {"orders": SECRETS[1], **options}, seed, texts)
            moved = list(divergences(before, after))
            largest = max((old - new).abs().max().item() for old, new in zip(before, after, strict=True))
            results[name].append({**costs, "kl": sum(moved) / len(moved), "kl_max": max(moved), "largest": largest})
    save("guard", [], games=args.games, conditions=results, **provenance())
    rows = []
    for name, games in results.items():
        mean = {key: sum(game[key] for game in games) / len(games) for key in games[0]}
        rows.append(
            (
                name,
                f"{mean['seconds']:.2f}",
                f"{mean['computed']:.0f}",
                f"{mean['reencoded']:.0f}",
                f"{mean['kl']:.2g}",
                f"{max(game['kl_max'] for game in games):.2g}",
                f"{max(game['largest'] for game in games):.2g}",
            )
        )
    header = (
        "condition",
        "seconds",
        "computed tokens",
        "encoded again",
        "KL, mean",
        "KL, largest",
        "change of a log-prob",
    )
    print_table(Console(width=150), "guard", header, rows)


if __name__ == "__main__":
    main()
