"""Time to first token of a call whose 4096 parent tokens are cached, at home and moved, in decode steps.

8 parents of 512 tokens, header of 3 tokens (a chat header), measured from submission to the first token; a step is
a decode step of the same call, which sees the same tokens. Prediction: one forward of 3 rows reads the weights
once, as a step does, so 1 to 1.5 steps at home; a moved parent costs a rotation of 3 query rows per layer.
"""

import time
from statistics import median

from choreograph import Engine, Message, Session

from .common import engine, greedy, interleaved, median_row, random_tokens, ratio_row, save

PARENTS, LENGTH, STEPS, ROUNDS = 8, 512, 16, 15


def call(e: Engine, session: Session, parents: list[Message], offsets: list[int] | None) -> tuple[float, float]:
    """(seconds to the first token, median seconds of a later step)."""
    end = PARENTS * LENGTH + 700
    began = time.perf_counter()
    message = session.decode([1, 520, 198], parents, offsets, new_offset=end, sampling=greedy(STEPS))
    e.step()
    first = time.perf_counter() - began
    taken = []
    for _ in range(STEPS - 1):
        began = time.perf_counter()
        e.step()
        taken.append(time.perf_counter() - began)
    message.release()
    return first, median(taken)


def main() -> None:
    e = engine()
    with e.session() as session:
        parents: list[Message] = []
        for i in range(PARENTS):
            parents.append(session.prefill(random_tokens(LENGTH, seed=i), new_offset=i * LENGTH))
        e.run_until_idle()
        places = {"home": None, "moved": [(PARENTS - 1 - i) * LENGTH + 7 * i + 1 for i in range(PARENTS)]}
        rows = []
        sides = [lambda o=offsets: call(e, session, parents, o) for offsets in places.values()]
        interleaved(2, *sides)
        measured = interleaved(ROUNDS, *sides)
        for name, must, aim, pairs in zip(places, (2.5, 4), (1.5, 2), measured, strict=True):
            firsts, steps = [p[0] for p in pairs], [p[1] for p in pairs]
            rows.append(median_row(f"{name}: time to first token", [t * 1e3 for t in firsts], "ms", better="lower"))
            rows.append(median_row(f"{name}: decode step", [t * 1e3 for t in steps], "ms", better="lower"))
            home_steps = [p[1] for p in measured[0]]
            rows.append(
                ratio_row(
                    f"{name}: first token in decode steps",
                    firsts,
                    home_steps,
                    better="lower",
                    required=must,
                    target=aim,
                )
            )
    save("ttft", rows)


if __name__ == "__main__":
    main()
