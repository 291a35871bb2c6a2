"""Decode steps over 512 tokens of context: one stream, and 8 branches over one shared context, against both peers.
In bfloat16, or with `--dtype float32`, in which models load where the processor has no instructions for bfloat16.

A step of ours is the whole step of the engine: scheduling, the model, choosing tokens. Prediction: one bfloat16
token reads 270 MB of weights; at the 60 to 70 GB/s that this machine copies, no step is faster than 4 ms.
"""

import argparse
from collections.abc import Callable
from functools import partial
from statistics import median

import torch

from choreograph import Engine

from .common import (
    Row,
    engine,
    greedy,
    interleaved,
    last_result,
    median_row,
    random_tokens,
    ratio_row,
    row_from_record,
    save,
)
from .peer_engines import HuggingFace, LlamaCpp

CONTEXT, STEPS, ROUNDS, WARMUP_STEPS = 512, 40, 12, 4
EXACT = "float32"
PEERS = {"Hugging Face eager": "Hugging Face", "llama.cpp": "llama.cpp Q4_1"}
UNFAIR = {("compiled int8", "Hugging Face eager"), ("eager bf16", "llama.cpp"), ("eager float32", "llama.cpp")}
GOALS = {  # of this many calls: at least, and aim
    (1, "compiled bf16", "Hugging Face eager"): (1.7, 2.5),
    (1, "compiled bf16", "llama.cpp"): (None, 1.0),
    (1, "compiled int8", "llama.cpp"): (0.6, 1.0),
    (8, "compiled bf16", "Hugging Face eager"): (3.0, 5.0),
    (8, "compiled bf16", "llama.cpp"): (1.3, 2.0),
    (8, "compiled int8", "llama.cpp"): (1.3, 2.0),
}


def choreograph_step(e: Engine, batch: int) -> float:
    """Median seconds of a step in which `batch` calls decode behind one shared context."""
    import time

    with e.session(seed=0) as session:
        context = session.prefill(random_tokens(CONTEXT))
        for i in range(batch):
            session.decode([5 + i], [context], sampling=greedy(STEPS + WARMUP_STEPS))
        taken = []
        for _ in range(STEPS + WARMUP_STEPS - 1):
            began = time.perf_counter()
            e.step()
            taken.append(time.perf_counter() - began)
    return median(taken[WARMUP_STEPS:])


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--dtype", choices=("bfloat16", EXACT), default="bfloat16", help="ours and Hugging Face's")
    dtype = options.parse_args().dtype
    kind, before = ("bf16", "") if dtype == "bfloat16" else (dtype, f"{EXACT}, ")
    hf, llama = HuggingFace(dtype), LlamaCpp(torch.get_num_threads())
    models = {f"compiled {kind}": engine(dtype=dtype)}
    if dtype == "bfloat16":
        models["compiled int8"] = engine(quantization="int8")
    models[f"eager {kind}"] = engine(dtype=dtype, compile=False)
    rows: list[Row] = []
    for batch in (1, 8):
        sides: dict[str, Callable[[], float]] = {
            "Hugging Face": lambda: median(hf.decode(CONTEXT, batch, STEPS)[WARMUP_STEPS:]),  # noqa: B023 - used at once
            "llama.cpp Q4_1": lambda: median(llama.decode(CONTEXT, batch, STEPS)[WARMUP_STEPS:]),  # noqa: B023
            **{label: partial(choreograph_step, one, batch) for label, one in models.items()},
        }
        interleaved(1, *sides.values())
        taken = dict(zip(sides, interleaved(ROUNDS, *sides.values()), strict=True))
        name = before + ("1 stream" if batch == 1 else f"{batch} branches, shared context")
        for label, times in taken.items():
            rows.append(median_row(f"{name}: step, {label}", [t * 1e3 for t in times], "ms", better="lower"))
        for label in models:
            for peer, of in PEERS.items():
                if (label, peer) not in UNFAIR:
                    must, aim = GOALS.get((batch, label, peer), (None, None))
                    row = ratio_row(f"{name}: {label}", taken[of], taken[label], required=must, target=aim, peer=peer)
                    rows.append(row)
    llama.close()
    had = [
        row_from_record(r)
        for r in last_result("decode").get("rows", [])
        if r["measure"].startswith(EXACT) != (dtype == EXACT)
    ]
    save("decode", sorted(had + rows, key=lambda row: row.measure.startswith(EXACT)))


if __name__ == "__main__":
    main()
