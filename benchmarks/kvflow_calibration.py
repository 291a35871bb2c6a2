"""Whether the virtual clock tells the time: a machine fitted to measured costs here, then `kvflow.py`'s shapes on it.

`make bench NAME=kvflow_calibration`, behind `kvflow`. Three rates and an overhead are fitted to prefills and decode
steps of one call; how fast encodings are copied is measured apart. None of the workflows' times are fitted.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from statistics import median

import numpy as np
from scipy.optimize import least_squares

from benchmarks.simulator import HardwareModel, simulated_engine
from choreograph import CacheConfig, Engine, EngineConfig
from choreograph.kv_cache.tiers import HostTier
from choreograph.kv_cache.transfer import Transfer

from .common import Row, engine, greedy, last_result, median_row, random_tokens, row_from_record, save, seconds
from .kvflow import AWARE, DEVICE_ONLY, MODES, REACTIVE, parse_label, single_workflow
from .kvflow_machines import simulated_engines

PREFILLS = (64, 256, 1024, 2048, 4096)
CONTEXTS = (64, 1024, 4096)
ROUNDS, STEPS = 5, 16
Operation = tuple[str, int]


def seconds_of(e: Engine, clock: Callable[[], float], operation: Operation, seed: int) -> float:
    """Of a prefill of so many tokens, or of a decode step behind so many."""
    kind, tokens = operation
    with e.session(seed=0) as s:
        began = clock()
        parent = s.prefill(random_tokens(tokens, seed)).wait_encoded()
        taken = clock() - began
        if kind == "decode":
            s.decode([10], [parent], sampling=greedy(1)).wait_encoded()
            began = clock()
            s.decode([11], [parent], sampling=greedy(STEPS)).result()
            taken = (clock() - began) / STEPS
    e.clear_cache()
    return taken


def link_bandwidth(e: Engine, tokens: int = 2048) -> float:
    """Bytes a second, copied to host memory and back, median of several times."""
    arena, rates = e.core.cache_manager.pool, []
    tier = HostTier(arena, tokens)
    copy, pages = tier.reserve(tokens), arena.allocate(arena.num_pages_for(tokens))
    for _ in range(ROUNDS):
        for kind, work in (
            ("offloading", tier.store_ops(arena, pages, copy)),
            ("loading", tier.load_ops(copy, arena, pages)),
        ):
            transfer = Transfer(kind, len(arena.keys), tokens, work.copy_layer)  # type: ignore[arg-type]
            rates.append(tokens * arena.bytes_per_token / seconds(transfer.run))
    arena.release(pages)
    return median(rates)


def fit_hardware(e: Engine, measured: dict[Operation, float]) -> HardwareModel:
    """The machine that comes nearest to the measured costs, by the sum of squared logarithms of ratios."""
    facts = e.core.hf_model.model_info
    like = HardwareModel(
        name="SmolLM2-135M, here",
        parameters=facts.parameters,
        weights=facts.parameters * facts.dtype.itemsize,
        layers=facts.layers,
        width=facts.query_heads * facts.head_dim,
        token_bytes=e.core.cache_manager.pool.bytes_per_token,
        arithmetic=1e11,
        memory=1e10,
        link=link_bandwidth(e),
        cache=1e12,
        overhead=1e-3,
    )

    def at(x: np.ndarray) -> HardwareModel:
        arithmetic, memory, overhead = np.exp(x)
        return replace(like, arithmetic=float(arithmetic), memory=float(memory), overhead=float(overhead))

    def misses(x: np.ndarray) -> list[float]:
        return [float(np.log(simulated(at(x), what) / taken)) for what, taken in measured.items()]

    start = np.log([like.arithmetic, like.memory, like.overhead])
    return at(least_squares(misses, start, diff_step=1e-3).x)


def simulated(hardware: HardwareModel, operation: Operation) -> float:
    return seconds_of(
        *simulated_engine(hardware, EngineConfig(CacheConfig(capacity=8192), backend="reference")), operation, 0
    )


def main() -> None:
    e = engine(tokens=8192)
    kinds: list[Operation] = [("prefill", n) for n in PREFILLS] + [("decode", n) for n in CONTEXTS]
    taken: dict[Operation, list[float]] = {what: [] for what in kinds}
    for number in range(ROUNDS):
        for what in kinds:
            taken[what].append(seconds_of(e, time.perf_counter, what, number))
    machine = fit_hardware(e, {what: median(times) for what, times in taken.items()})
    rows: list[Row] = []
    for (kind, tokens), times in taken.items():
        label = f"{kind}, {tokens} tokens"
        rows.append(median_row(f"{label}: measured", [1e3 * t for t in times], "ms", better="lower"))
        rows.append(exact_row(f"{label}: fitted", 1e3 * simulated(machine, (kind, tokens)), "ms"))
    had = {row["measure"]: row for row in last_result("kvflow")["rows"]}
    for label in last_result("kvflow")["found"]["alone"]:
        mode = next((mode for mode in MODES if label.endswith(f"{mode} mode")), MODES[0])
        # the overhead that was fitted contains the processor time of the host
        engines = simulated_engines(machine, charge_host=False)
        result, _ = single_workflow(
            engines, parse_label(label, "/"), rounds=3, mode=mode, names=(DEVICE_ONLY, REACTIVE, AWARE)
        )
        values = {row.measure: row.value for row in result}
        for other in (DEVICE_ONLY, REACTIVE):
            name = f"{label}: over {other}"
            rows.append(replace(row_from_record(had[name]), measure=f"{name}, measured"))
            rows.append(exact_row(f"{name}, virtual", values[name], "x"))
    save("kvflow_calibration", rows, machine=asdict(machine))


def exact_row(measure: str, value: float, unit: str) -> Row:
    return Row(measure, value, unit, value, value)


if __name__ == "__main__":
    main()
