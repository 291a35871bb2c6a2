"""KVFlow's headline settings on machines that are not at hand, on a virtual clock (`simulator.py`).

`make bench NAME=kvflow_machines`. Peak rates are the makers'; what is reached of them is assumed, and stands beside the
figures. The link of the A10G is the paper's 2 GB/s. The processor time of the host is measured here and added. Each
measurement is saved at once, beside those of the last run.
"""

import argparse
from dataclasses import asdict, replace
from typing import Any

from benchmarks.simulator import HardwareModel, simulated_engine
from choreograph import EngineConfig

from .common import SIMULATED, Row, last_result, row_from_record, save
from .kvflow import MODES, SETUP_NAMES, EngineFactory, concurrent_workflows, overhead_of_hints, single_workflow

EFFICIENCY = {"arithmetic": 0.5, "memory": 0.8, "link": 0.8}  # assumed shares of the peak rates
A10G = HardwareModel(
    name="Llama-3.1-8B on an A10G",
    parameters=8.03e9,
    weights=16.06e9,
    layers=32,
    width=4096,
    token_bytes=131072,
    arithmetic=EFFICIENCY["arithmetic"] * 70e12,
    memory=EFFICIENCY["memory"] * 600e9,
    link=2e9,
    cache=0.9 * 24e9 - 16.06e9,
    overhead=1e-3,
)
H100 = HardwareModel(
    name="Qwen2.5-32B on an H100",
    parameters=32.8e9,
    weights=65.5e9,
    layers=64,
    width=5120,
    token_bytes=262144,
    arithmetic=EFFICIENCY["arithmetic"] * 989e12,
    memory=EFFICIENCY["memory"] * 3350e9,
    link=EFFICIENCY["link"] * 64e9,
    cache=0.9 * 80e9 - 65.5e9,
    overhead=1e-3,
)
H100_SMALL = HardwareModel(**{**asdict(A10G),
    "name": "Llama-3.1-8B on an H100", "arithmetic": H100.arithmetic, "memory": H100.memory, "link": H100.link,
    "cache": 0.9 * 80e9 - 16.06e9
})  # fmt: skip
SHAPES = [(fixed, dynamic, output) for fixed in (4096, 8192) for dynamic, output in ((32, 32), (32, 256), (256, 256))]
CONCURRENT_SHAPES = ((512, 64), (1024, 32), (1024, 64))  # with all of the memory that the weights leave
SCALED_SHAPES = ((1024, 4), (1024, 16), (1024, 64))  # with room for half of the prompts and of the calls in flight
MEASUREMENTS = ("alone", "crowd", "scaled", "overhead")


def simulated_engines(hardware: HardwareModel, *, charge_host: bool = True) -> EngineFactory:
    """Return a factory of engines on a virtual clock.

    Args:
        charge_host: the processor time of the host passes too, as measured on this machine.
    """
    return lambda config: simulated_engine(
        hardware, EngineConfig(config.cache, config.scheduler, backend="reference"), charge_host=charge_host
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--only", nargs="*", choices=MEASUREMENTS, default=list(MEASUREMENTS))
    options.add_argument("--modes", nargs="*", choices=MODES, default=list(MODES))
    options.add_argument("--shapes", nargs="*", help="some of those alone or at once, as the results call them")
    options.add_argument("--rounds", type=int, default=2, help="rounds that count")
    options.add_argument("--setups", nargs="*", choices=SETUP_NAMES["choreographed"], default=[], help="by default all")
    given = options.parse_args()

    def is_wanted(label: str) -> bool:
        return not given.shapes or label in given.shapes

    for mode in given.modes:
        if "alone" in given.only:
            for machine in (A10G, H100):
                for shape in SHAPES:
                    if is_wanted("/".join(map(str, shape))):
                        engines, device = simulated_engines(machine), machine.cache_tokens
                        result = single_workflow(engines, shape, given.rounds, device, mode=mode, names=given.setups)
                        save_machine(machine, *result)
        for name, shapes, device, note in (
            ("crowd", CONCURRENT_SHAPES, H100_SMALL.cache_tokens, ""),
            ("scaled", SCALED_SHAPES, None, ", room for half"),
        ):
            for fixed, workflows in shapes if name in given.only else ():
                if is_wanted(f"{fixed} x {workflows}"):
                    result = concurrent_workflows(
                        simulated_engines(H100_SMALL),
                        fixed,
                        workflows,
                        given.rounds,
                        agents=10,
                        turn_tokens=256,
                        device=device,
                        mode=mode,
                        names=given.setups,
                    )
                    save_machine(H100_SMALL, *result, note)
        if "overhead" in given.only:
            rows = overhead_of_hints(
                simulated_engines(H100_SMALL), 512, 64, given.rounds, agents=10, turn_tokens=256, mode=mode
            )
            save_measurement(H100_SMALL, rows, {})


def save_machine(hardware: HardwareModel, rows: list[Row], counts: dict[str, Any], note: str = "") -> None:
    """Save one measurement beside those of the others. note: follows the name of the shape."""
    shape = rows[0].measure.partition(":")[0]
    label = f"{hardware.name}, {shape}{note}"
    rows = [replace(row, measure=label + row.measure.removeprefix(shape)) for row in rows]
    save_measurement(hardware, rows, {label: counts})
    print(label, {r.measure.partition(": ")[2]: round(r.value, 2) for r in rows if r.unit == "x"}, flush=True)


def save_measurement(hardware: HardwareModel, rows: list[Row], counts: dict[str, Any]) -> None:
    last, names = last_result("kvflow_machines"), {row.measure for row in rows}
    labels = set(counts)
    had = [
        row_from_record(record)
        for record in last.get("rows", [])
        if record["measure"] not in names and record["measure"].partition(": ")[0] not in labels
    ]
    machines = {**last.get("machines", {}), hardware.name: {**asdict(hardware), "cache tokens": hardware.cache_tokens}}
    found = {**last.get("found", {}), **counts}
    save("kvflow_machines", had + rows, SIMULATED, found=found, machines=machines, reached=EFFICIENCY)


if __name__ == "__main__":
    main()
