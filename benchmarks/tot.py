"""Tree of Thoughts, prefix mode against choreographed forced to the same tokens (Prompt Choreography, section 4.2).

Both modes run on one engine, in turns, each from an empty cache; 8 branches, 4 voters. The problems are our own.
"""

from choreograph.choreographies import find
from choreograph.measure import perform
from choreograph.types import SamplingParams

from .common import engine, median_row, ratio_row, save

PROBLEMS = [
    "A baker fills 3 trays with 24 rolls each and sells 2/3 of them before noon. How many rolls are left?",
    "A train leaves at 9:40 and arrives at 13:05. How long does it travel?",
    "The sum of two numbers is 31 and their difference is 7. What are the numbers?",
    "A garden of 12 by 9 metres gets a path 1 metre wide inside its edge. What area is left for plants?",
    "Each of 5 friends shakes hands with every other once. How many handshakes are there?",
    "A shop lowers a price of 80 by a quarter, then raises it by a tenth. What is it now?",
    "How many whole numbers between 1 and 100 can be divided by 6 but not by 4?",
    "A tank fills in 6 hours by one pipe and in 3 hours by another. How long do both need?",
    "A ladder of 5 metres leans on a wall, its foot 3 metres away. How high does it reach?",
    "A team plays 24 games and wins three times as many as it loses, with no draws. How many does it win?",
]
SAMPLING = SamplingParams(temperature=0.7, top_p=0.95, max_tokens=160)


def main() -> None:
    e, workflow = engine(tokens=32768, compile=False), find("tree_of_thoughts")
    before, after = [], []
    for index, problem in enumerate([PROBLEMS[0], *PROBLEMS]):
        e.clear_cache()
        old = perform(e, workflow, problem, mode="prefix", seed=index, sampling=SAMPLING)
        e.clear_cache()
        forced = old.performance.content()
        new = perform(e, workflow, problem, mode="choreographed", seed=index, sampling=SAMPLING, forced=forced)
        assert new.performance.content() == forced
        before.append(old.cost)
        after.append(new.cost)
    before, after = before[1:], after[1:]  # the first pair warms up
    rows = [ratio_row("TTFT, all decodes", [c.ttft for c in before], [c.ttft for c in after], must=3.5, aim=7)]
    for i, stage in enumerate(before[0].stages):
        if stage.ttft is not None:
            times = [[c.stages[i].ttft for c in some] for some in (before, after)]
            rows.append(ratio_row(f"TTFT, {stage.stage}", *times))  # type: ignore[arg-type]
    rows.append(ratio_row("end to end", [c.seconds for c in before], [c.seconds for c in after], must=1.0, aim=1.2))
    rows.append(ratio_row("prompt tokens encoded", [c.encoded for c in before], [c.encoded for c in after]))
    rows.append(median_row("choreographed, end to end", [c.seconds for c in after], "s", better="lower"))
    save("tot", rows)


if __name__ == "__main__":
    main()
