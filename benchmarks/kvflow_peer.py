"""Small financial research desks of four agents, over a cache that holds half of their prompts (KVFlow, Figures 7, 8).

`make bench NAME=kvflow_peer ARGS="--data peer_finqa.jsonl"`. Every desk plans, executes, expresses and reviews (PEER)
one question after the other, over the setups and in the modes of `kvflow.py`. What is said is sampled once before, with
room for everything, and repeated in every setup, so that all compute the same tokens.
"""

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from statistics import median

from choreograph import Engine, SamplingParams
from choreograph.agents import StepGraph

from .common import FIGURES, Row, engine, save
from .kvflow import (
    COPIED_AHEAD,
    DEVICE_ONLY,
    MODES,
    REACTIVE,
    CacheSetup,
    fixed_part,
    label_of,
    make_setups,
    real_engines,
    rows_of,
    run_all,
    time_rounds,
    usage_counts,
)
from .peer_prompts import AGENTS, prompts_of
from .plots import difference_bars

MAX_TOKENS = {"planner": 64, "executor": 128, "expresser": 128, "reviewer": 48}  # tokens that an agent may say


class Desk:
    """One application: its prompts, its questions, and what its agents say to them."""

    def __init__(self, number: int, questions: list[str]) -> None:
        self.number = number
        self.introduction, self.prompts = prompts_of(number)
        self.questions = questions
        self.transcript: dict[tuple[int, str], list[int]] = {}
        self.turn_sizes: list[tuple[int, int, int]] = []  # of every turn: tokens that stay, that change, that are said
        names = [self.name(agent) for agent in AGENTS]
        self.graph = StepGraph.read({"agents": dict(zip(names, (None, *names), strict=False)), "repeats": True})

    def name(self, agent: str) -> str:
        return f"desk {self.number}: {agent}"

    def rounds(self, setup: CacheSetup) -> Iterator[None]:
        """Answers one question after the other. What was said before is repeated."""
        with setup.engine.session(seed=self.number, mode=setup.mode) as s:
            team = setup.workflow(s, self.graph)
            for number, text in enumerate(self.questions):
                task = s.prefill(s.user(f"Question: {text}"))
                made, answer = [task], None
                for name in AGENTS:
                    with team.agent(self.name(name)) if team else nullcontext(s) as agent:
                        desk = fixed_part(agent, s.system(self.introduction))
                        part = fixed_part(agent, s.user(self.prompts[name]), [desk])
                        changing = [task, answer] if answer else [task]
                        answer = s.decode(
                            s.assistant(),
                            [desk, part, *changing],
                            sampling=SamplingParams(temperature=0.7, top_p=0.95, max_tokens=MAX_TOKENS[name]),
                            forced_tokens=self.transcript.get((number, name)),
                        ).result()
                    setup.record_use([desk, part], answer)
                    if (number, name) not in self.transcript:
                        self.transcript[number, name] = answer.output_token_ids
                        sizes = desk.length + part.length, sum(m.length for m in changing), len(answer.output_token_ids)
                        self.turn_sizes.append(sizes)
                    made += [desk, part, answer]
                for message in made:
                    message.release()
                yield


def read_questions(file: Path, desks: int, rounds: int) -> list[Desk]:
    """Desks with questions of their own: one for each round, and one before the first."""
    asked = cycle([json.loads(line)["question"] for line in file.read_text(encoding="utf-8").splitlines()])
    return [Desk(number, list(islice(asked, rounds + 1))) for number in range(desks)]


def sample_transcripts(base_engine: Engine, desks: list[Desk]) -> list[Row]:
    """Samples what is said, with room for everything; how many tokens prompts, changing parts and answers have."""
    side = CacheSetup(base_engine, time.perf_counter, uses_step_graph=False)
    runs = [desk.rounds(side) for desk in desks]
    for _ in desks[0].questions:
        run_all(base_engine, [partial(next, run) for run in runs])
    for run in runs:
        run.close()
    base_engine.clear_cache()
    counts = zip(*(sizes for desk in desks for sizes in desk.turn_sizes), strict=True)
    return [range_row(name, list(some)) for name, some in zip(("fixed", "changing", "said"), counts, strict=True)]


def range_row(name: str, counts: list[int]) -> Row:
    """A median, from the least to the greatest."""
    return Row(f"tokens a turn, {name}", median(counts), "tokens", min(counts), max(counts), "lower")


def compare(base_engine: Engine, desks: list[Desk], rounds: int, mode: str = "choreographed") -> tuple[list[Row], dict]:
    """The setups over a cache for half of the fixed prompts, and for half of the calls in flight beside them."""
    texts = {(d.introduction, text) for d in desks for text in ("", *d.prompts.values())}  # desks may share them
    fixed = sum(
        len(base_engine.chat.encode_text(text or introduction, opening=False)) + 8 for introduction, text in texts
    )
    call = max(map(sum, (sizes for desk in desks for sizes in desk.turn_sizes)))
    device, host = fixed // 2 + len(desks) * call // 2, 4 * fixed + 2 * len(desks) * call
    every = make_setups(real_engines(base_engine), device=device, host=host, mode=mode)
    runs = {name: [desk.rounds(side) for desk in desks] for name, side in every.items()}
    time_rounds(every, rounds, lambda name: run_all(every[name].engine, [partial(next, run) for run in runs[name]]))
    for run in (one for some in runs.values() for one in some):
        run.close()
    return rows_of(label_of(f"{len(desks)} desks", mode), every, len(AGENTS) * len(desks)), usage_counts(every)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--data", type=Path, required=True)
    options.add_argument("--desks", type=int, nargs="*", default=[1, 4, 8])
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--modes", nargs="*", choices=MODES, default=list(MODES))
    given = options.parse_args()
    base = engine(tokens=32768)
    rows: list[Row] = []
    result = {}
    for count in given.desks:
        desks = read_questions(given.data, count, given.rounds)
        sizes = sample_transcripts(base, desks)
        rows += sizes if count == max(given.desks) else []
        for mode in given.modes:
            more, facts = compare(base, desks, given.rounds, mode)
            rows += more
            result[label_of(f"{count} desks", mode)] = facts
            print(count, mode, facts, flush=True)
    save("kvflow_peer", rows, found=result)
    at = {r.measure: (r.value, r.low, r.high) for r in rows}
    others = (DEVICE_ONLY, REACTIVE, COPIED_AHEAD)
    groups = {label: {f"over {o}": at[f"{label}: over {o}"] for o in others} for label in result}
    difference_bars(groups, FIGURES / "kvflow-peer.svg", ylabel="speed-up of a round", baseline=1)


if __name__ == "__main__":
    main()
