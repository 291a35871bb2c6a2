"""The engine against vLLM's CPU build, llama.cpp and Hugging Face: one model, the same prompts, counts and threads.

All sides run in turns in one run. The first run installs vLLM into .venv-vllm. Weights are bfloat16; llama.cpp's are Q4_1,
the format of `quantization="int4"`, which is measured too. `--only decode` (or prefill, programs) measures a part and
keeps the other results; `--rounds` sets how often. On processors without AVX-512 bfloat16 instructions, vLLM
and Hugging Face compute in float32, which is faster for them there, and results are saved as `peers_avx2`; on processors
with AMX as `peers_amx`.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import fmean, median

import torch

from choreograph import Engine

from .common import (
    Row,
    eager_dtype,
    engine,
    greedy,
    interleaved,
    last_result,
    median_row,
    random_tokens,
    ratio_row,
    result_of_processor,
    row_from_record,
    save,
    seconds,
)
from .peer_engines import VLLM, HuggingFace, LlamaCpp
from .peer_programs import PROGRAMS, Choreograph, Concatenated, Side

STEPS, WARMUP_STEPS = 32, 4
DECODES = {  # name -> (context, requests, whether each has its own context), must, aim
    "decode, 1 request behind 512": ((512, 1, False), 1.0, 1.3),
    "decode, 8 requests over one context of 512": ((512, 8, False), 1.3, 2.0),
    "decode, 32 requests with own contexts of 256": ((256, 32, True), 1.1, 1.5),
}
PREFILLS = {  # name -> (tokens, prompts)
    "prefill of 1024": (1024, 1),
    "prefill of 8000": (8000, 1),
    "prefill of 16 prompts of 512": (512, 16),
}
OURS, OURS_INT4 = "choreograph", "choreograph int4"  # what ratios are of
RESULT = result_of_processor("peers")
PARTS = ("decode", "prefill", "programs")
# measured with one request only: with AVX2 it is faster than float32 there, and several times slower otherwise
VLLM_BFLOAT16 = "vLLM bfloat16"


def decode_ours(e: Engine, context: int, batch: int, own: bool) -> float:
    """Median seconds of a decode step of `batch` requests."""
    e.clear_cache()
    with e.session(seed=0) as session:
        parents = [session.prefill(random_tokens(context, seed=i)) for i in range(batch if own else 1)]
        for parent in parents:
            parent.result()
        for i in range(batch):
            session.decode([5 + i], [parents[i * own]], sampling=greedy(STEPS + 1))
        taken = [seconds(e.step) for _ in range(STEPS)]
    return median(taken[WARMUP_STEPS:])


def decode_peer(peer: HuggingFace | LlamaCpp | VLLM, context: int, batch: int, own: bool) -> float:
    return median(peer.decode(context, batch, STEPS, own)[WARMUP_STEPS:])


def prefill_ours(e: Engine, count: int, prompts: int) -> float:
    e.clear_cache()
    with e.session() as session:
        tokens = [random_tokens(count, seed=i) for i in range(prompts)]
        began = time.perf_counter()
        # a first token is part of a prefill, as the peers compute logits
        messages = [session.decode(prompt, sampling=greedy(1)) for prompt in tokens]
        for message in messages:
            message.result()
        return time.perf_counter() - began


def run_program(program: Callable[[Side], None], make: Callable[[], Side]) -> tuple[float, float]:
    """Return seconds end to end and the mean seconds to the first token of a call."""
    # every engine starts with an empty cache, since the sides before closed theirs
    side = make()
    taken = seconds(lambda: program(side))
    side.close()
    return taken, fmean(side.first_tokens)


def compare(name: str, sides: dict[str, Callable[[], float]], rounds: int, unit: str, **goals: float) -> list[Row]:
    """Measure all sides in turns; return their times and the speed of ours against each peer."""
    interleaved(1, *sides.values())
    taken = dict(zip(sides, interleaved(rounds, *sides.values()), strict=True))
    factor = 1e3 if unit == "ms" else 1
    rows = [
        median_row(f"{name}: {side}", [t * factor for t in times], unit, better="lower")
        for side, times in taken.items()
    ]
    for side in taken:
        if not side.startswith("choreograph"):
            facts = goals if side == "vLLM" else {}
            rows.append(ratio_row(name, taken[side], taken[OURS], peer=side, **facts))
            if OURS_INT4 in taken:
                rows.append(ratio_row(f"{name}, int4", taken[side], taken[OURS_INT4], peer=side, **goals))
    return rows


def compare_programs(e: Engine, vllm: VLLM, rounds: int) -> Iterator[list[Row]]:
    """Yield the rows of each program."""
    sides: dict[str, Callable[[], Side]] = {
        "choreograph prefix": lambda: Choreograph(e, "prefix"),
        "choreograph choreographed": lambda: Choreograph(e, "choreographed"),
        "vLLM": lambda: Concatenated(vllm),
    }
    for name, program in PROGRAMS.items():
        runs: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
        for i in range(rounds + 1):
            for side, make in sides.items():
                measured = run_program(program, make)
                runs[side] += [measured] if i else []  # the first one warms up
        must, aim = (1.5, 2.0) if name == "Tree of Thoughts" else (1.25, 2.0)
        rows: list[Row] = []
        for column, (measure, required, target) in enumerate((("end to end", must, aim), ("first token", 4, 8))):
            times = {side: [pair[column] for pair in pairs] for side, pairs in runs.items()}
            rows += [median_row(f"{name}: {measure}, {side}", t, "s", better="lower") for side, t in times.items()]
            for side in list(sides)[:2]:
                goals = {"required": required, "target": target} if side.endswith("choreographed") else {}
                rows.append(ratio_row(f"{name}: {measure}, {side}", times["vLLM"], times[side], peer="vLLM", **goals))
        yield rows


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--only", nargs="*", choices=PARTS, default=PARTS)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--peers", nargs="*", default=["vLLM", "llama.cpp Q4_1", "Hugging Face"])
    given = options.parse_args()
    threads, dtype = torch.get_num_threads(), eager_dtype()
    ours = {OURS: engine(tokens=16384), OURS_INT4: engine(tokens=16384, quantization="int4")}
    makers: dict[str, Callable[[], HuggingFace | LlamaCpp | VLLM]] = {
        "vLLM": lambda: VLLM(threads, dtype),
        VLLM_BFLOAT16: lambda: VLLM(threads, "bfloat16"),
        "llama.cpp Q4_1": lambda: LlamaCpp(threads),
        "Hugging Face": lambda: HuggingFace(dtype),
    }
    peers = {name: makers[name]() for name in given.peers}
    parts: dict[str, list[Row]] = {part: [] for part in PARTS}
    for row in last_result(RESULT).get("rows", []):
        part = next((p for p in ("decode", "prefill") if row["measure"].startswith(p)), "programs")
        parts[part].append(row_from_record(row))
    if "decode" in given.only:
        parts["decode"] = []
        for name, (shape, must, aim) in DECODES.items():
            sides = {label: partial(decode_ours, e, *shape) for label, e in ours.items()}
            sides |= {
                label: partial(decode_peer, peer, *shape)
                for label, peer in peers.items()
                if label != VLLM_BFLOAT16 or shape[1] == 1
            }
            parts["decode"] += compare(name, sides, given.rounds, "ms", required=must, target=aim)
            print(f"... {name}", flush=True)
        save(RESULT, [row for part in PARTS for row in parts[part]])  # the other parts take long
    if "prefill" in given.only:
        parts["prefill"] = []
        for name, shape in PREFILLS.items():
            sides = {label: partial(prefill_ours, e, *shape) for label, e in ours.items() if label != OURS_INT4}
            sides |= {label: partial(peer.prefill, *shape) for label, peer in peers.items() if label != VLLM_BFLOAT16}
            parts["prefill"] += compare(name, sides, given.rounds, "s", required=1.1, target=1.5)
            print(f"... {name}", flush=True)
        save(RESULT, [row for part in PARTS for row in parts[part]])
    vllm = peers.get("vLLM")
    if "programs" in given.only and isinstance(vllm, VLLM):
        for rows in compare_programs(ours[OURS], vllm, given.rounds):
            measured = {row.measure for row in rows}
            parts["programs"] = [row for row in parts["programs"] if row.measure not in measured] + rows
            save(RESULT, [row for part in PARTS for row in parts[part]])
    for peer in peers.values():
        if not isinstance(peer, HuggingFace):
            peer.close()


if __name__ == "__main__":
    main()
