"""The GPU path in one table, within minutes: what a device reaches, decode steps against the bytes that must move, the
attention kernels against SDPA, Prompt Cache, DroidSpeak, KVFlow and the papers' workflows.

`make bench NAME=gpu`. Weights are random, in the exact shape of Llama-3.1-8B: times depend on shapes alone. Every
figure stands beside the one that was worked out before (`docs/performance.md`). `--predict h200` prints those alone, on
any machine; `--tiny` runs every part once in a small shape, on a CPU through Triton's interpreter
(`TRITON_INTERPRET=1`).
"""

import argparse
import gc
import time
import traceback
from collections.abc import Sequence

import torch
from rich.console import Console

from choreograph.console import print_table
from choreograph.models.loader import DEFAULT_MODEL, load_tokenizer

from ..common import Row, hardware, last_result, row_from_record, write
from . import binaries, check, kernels, kvflow, page, partial, prompt_cache, rates, steps, table, workflows
from .bench import Bench, Measure, PartResult
from .budget import Budget
from .lines import PARTS
from .predictions import ALTERNATIVES, PRESETS
from .shape import FULL, TINY

MEASURES: dict[str, Measure] = {
    "rates": rates.measure,
    "steps": steps.measure,
    "triton": kernels.measure("triton"),
    "prompt_cache": prompt_cache.measure,
    "partial": partial.measure,
    "tree_of_thoughts": workflows.measure("tree_of_thoughts"),
    "debate_parallel": workflows.measure("debate_parallel"),
    "kvflow": kvflow.measure,
    "debate_iterative": workflows.measure("debate_iterative"),
    "scaled": workflows.measure("scaled"),
    "flex": kernels.measure("flex"),
}
SHARES = {"rates": 1, "steps": 2, "triton": 2, "flex": 4, "prompt_cache": 2, "partial": 2}  # of the time; others below
SHARES |= {"tree_of_thoughts": 4, "debate_parallel": 6, "kvflow": 8, "debate_iterative": 12, "scaled": 8}
MIN_SECONDS = {
    "rates": 3,
    "steps": 15,
    "triton": 10,
    "flex": 20,
    "prompt_cache": 8,
    "partial": 8,
}  # seconds that one takes
MIN_SECONDS |= {"tree_of_thoughts": 12, "debate_parallel": 20, "kvflow": 80, "debate_iterative": 60, "scaled": 45}

PREDICTION_SECONDS = 20  # seconds at the end


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument(
        "--only", nargs="*", choices=list(PARTS), default=list(PARTS), metavar="PART", help=str([*PARTS])
    )
    options.add_argument("--minutes", type=float, default=8.0, help="parts that would not fit are left out, and named")
    options.add_argument("--tiny", action="store_true")
    options.add_argument(
        "--tokenizer", default=DEFAULT_MODEL, help="a folder or a Hub id, where the embedded model is not"
    )
    options.add_argument(
        "--predict", choices=list(PRESETS), help="print what is expected of a device, and nothing else"
    )
    options.add_argument(
        "--check", action="store_true", help="hold the counting against this CPU and the embedded model"
    )
    options.add_argument("--host", action="store_true", help="time the host's part of a step, over empty graphs")
    options.add_argument(
        "--binaries", action="store_true", help="compile the attention kernels for GPUs, and look at them"
    )
    given = options.parse_args()
    parts = [part for part in PARTS if part in given.only]
    if given.check:
        check.check()
        page.fill()
    elif given.host:
        check.check_host()
        page.fill()
    elif given.binaries:
        binaries.check()
        page.fill()
    elif given.predict:
        predict(given.predict)
    elif given.tiny or torch.cuda.is_available():
        run(parts, given.minutes, given.tokenizer, trial=given.tiny)
    else:
        options.error("torch finds no GPU here: use --tiny for a trial, or --predict")


def run(parts: Sequence[str], minutes: float, tokenizer_source: str, *, trial: bool) -> None:
    """Measures some parts, keeps what is there after each, and prints the table."""
    budget = Budget(60 * minutes - (0 if trial else PREDICTION_SECONDS), {part: SHARES[part] for part in parts})
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bench = Bench(TINY if trial else FULL, device, trial, tokenizer_source)
    result: dict[str, PartResult] = {}
    missing: dict[str, str] = {}
    print(f"{sum(p.numel() for p in bench.model.parameters()):,} weights, {budget.left:.0f} s left", flush=True)
    for part in parts:
        allowance = budget.open(part, 0 if trial else MIN_SECONDS[part])
        if allowance is None:
            missing[part] = f"left out: less than {MIN_SECONDS[part]} s were left"
            continue
        began = time.perf_counter()
        try:
            result[part] = MEASURES[part](bench, allowance)
        except Exception as exc:  # the other parts are worth having; the table names it
            traceback.print_exc()
            missing[part] = f"failed: {type(exc).__name__}"
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        print(f"{part}: {time.perf_counter() - began:.0f} s, {budget.left:.0f} s left", flush=True)
        if not trial:
            save_rows(table.rows_of(result), missing | bench.notes)
    predicted = {} if trial else predict_from_results(bench, result)
    rows = table.with_predictions(table.rows_of(result), predicted)
    if not trial:
        save_rows(rows, missing | bench.notes)
    title = f"{bench.shape.name}; {hardware()}"
    print_table(Console(width=200), title, table.HEAD, table.cells(rows, predicted, missing, parts))


def predict_from_results(bench: Bench, results: dict[str, PartResult]) -> dict[str, float]:
    return table.predict(table.device_of(bench, results), table.count(bench.tokenizer, bench.shape), bench.shape)


def save_rows(rows: Sequence[Row], missing: dict[str, str]) -> None:
    """Saves rows beside those of parts that were measured before."""
    new = {row.measure for row in rows}
    had = [row_from_record(row) for row in last_result("gpu").get("rows", []) if row["measure"] not in new]
    write("gpu", [*had, *rows], FULL.name, missing=missing)


def predict(name: str) -> None:
    """Prints what is expected of a device, and puts it into the page about it."""
    counts = table.count(load_tokenizer(DEFAULT_MODEL)[0], FULL)
    every = {title: table.predict(PRESETS[name], counts, FULL, reached) for title, reached in ALTERNATIVES.items()}
    predicted = next(iter(every.values()))
    title = f"{FULL.name}; {PRESETS[name].name}"
    print_table(Console(width=200), title, table.HEAD, table.cells([], predicted, {}, PARTS))
    page.save_predictions(name, every)


if __name__ == "__main__":
    main()
