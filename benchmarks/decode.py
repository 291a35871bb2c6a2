"""Decode steps over 512 tokens of context: one stream, and 8 branches over one shared context, against both peers.

A step of ours is the whole step of the engine: scheduling, the model, choosing tokens. Prediction: one bfloat16
token reads 270 MB of weights; at the 60 to 70 GB/s that this machine copies, no step is faster than 4 ms.
"""

from statistics import median

import torch

from choreograph import Engine

from .common import Row, engine, greedy, in_turns, median_row, ratio_row, save, some_tokens
from .peers import HuggingFace, LlamaCpp

CONTEXT, STEPS, ROUNDS, WARM = 512, 40, 12, 4


def ours(e: Engine, batch: int) -> float:
    """Median seconds of a step in which `batch` calls decode behind one shared context."""
    import time

    with e.session(seed=0) as session:
        context = session.prefill(some_tokens(CONTEXT))
        for i in range(batch):
            session.decode([5 + i], [context], sampling=greedy(STEPS + WARM))
        taken = []
        for _ in range(STEPS + WARM - 1):
            began = time.perf_counter()
            e.step()
            taken.append(time.perf_counter() - began)
    return median(taken[WARM:])


def main() -> None:
    threads = torch.get_num_threads()
    hf, llama, exact = HuggingFace(), LlamaCpp(threads), engine()
    small, eager = engine(quantization="int8"), engine(compile=False)
    rows: list[Row] = []
    for batch, musts in ((1, ((1.7, 2.5), (0.6, 1.0))), (8, ((3.0, 5.0), (1.3, 2.0)))):
        sides = (
            lambda: median(hf.decode(CONTEXT, batch, STEPS)[WARM:]),  # noqa: B023 - used at once
            lambda: median(llama.decode(CONTEXT, batch, STEPS)[WARM:]),  # noqa: B023
            lambda: ours(exact, batch),  # noqa: B023
            lambda: ours(small, batch),  # noqa: B023
            lambda: ours(eager, batch),  # noqa: B023
        )
        in_turns(1, *sides)
        a, b, c, d, f = in_turns(ROUNDS, *sides)
        name = "1 stream" if batch == 1 else f"{batch} branches, shared context"
        for label, times in (
            ("Hugging Face", a),
            ("llama.cpp Q4_1", b),
            ("compiled bf16", c),
            ("compiled int8", d),
            ("eager bf16", f),
        ):
            rows.append(median_row(f"{name}: step, {label}", [t * 1e3 for t in times], "ms", better="lower"))
        (hf_must, hf_aim), (ll_must, ll_aim) = musts
        rows.append(ratio_row(f"{name}: compiled bf16", a, c, must=hf_must, aim=hf_aim, peer="Hugging Face eager"))
        rows.append(ratio_row(f"{name}: eager bf16", a, f, peer="Hugging Face eager"))
        rows.append(
            ratio_row(f"{name}: compiled bf16", b, c, must=ll_must if batch > 1 else None, aim=ll_aim, peer="llama.cpp")
        )
        rows.append(ratio_row(f"{name}: compiled int8", b, d, must=ll_must, aim=ll_aim, peer="llama.cpp"))
    llama.close()
    save("decode", rows)


if __name__ == "__main__":
    main()
