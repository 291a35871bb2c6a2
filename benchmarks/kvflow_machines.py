"""KVFlow's headline settings on machines that are not at hand, on a virtual clock (`simulator.py`).

`make bench NAME=kvflow_machines`. Peak rates are the makers'; what is reached of them is assumed, and stands beside the
figures. The link of the A10G is the paper's 2 GB/s.
"""

from dataclasses import asdict, replace

from benchmarks.simulator import HardwareModel, simulated_engine
from choreograph import EngineConfig

from .common import SIMULATED, Row, save
from .kvflow import EngineFactory, concurrent_workflows, single_workflow

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
CONCURRENT_SHAPES = ((512, 64), (1024, 32), (1024, 64))


def simulated_engines(hardware: HardwareModel) -> EngineFactory:
    """Engines on a virtual clock that also charges the host's processor time, as measured on this machine."""
    return lambda config: simulated_engine(
        hardware, EngineConfig(config.cache, config.scheduler, backend="reference"), charge_host=True
    )


def main() -> None:
    rows, result = [], {}
    for machine in (A10G, H100):
        for shape in SHAPES:
            more, facts = single_workflow(simulated_engines(machine), shape, rounds=4, device=machine.cache_tokens)
            label = f"{machine.name}, {rows_label(more)}"
            rows += [renamed(row, machine) for row in more]
            result[label] = facts
            print(label, {r.measure.partition(": ")[2]: round(r.value, 2) for r in more if r.unit == "x"}, flush=True)
    for fixed, workflows in CONCURRENT_SHAPES:
        more, facts = concurrent_workflows(
            simulated_engines(H100_SMALL),
            fixed,
            workflows,
            2,
            agents=10,
            turn_tokens=256,
            device=H100_SMALL.cache_tokens,
        )
        label = f"{H100_SMALL.name}, {rows_label(more)}"
        rows += [renamed(row, H100_SMALL) for row in more]
        result[label] = facts
        print(label, {r.measure.partition(": ")[2]: round(r.value, 2) for r in more if r.unit == "x"}, flush=True)
    machines = {m.name: {**asdict(m), "cache tokens": m.cache_tokens} for m in (A10G, H100, H100_SMALL)}
    save("kvflow_machines", rows, SIMULATED, found=result, machines=machines, reached=EFFICIENCY)


def rows_label(rows: list[Row]) -> str:
    return rows[0].measure.partition(":")[0]


def renamed(row: Row, hardware: HardwareModel) -> Row:
    return replace(row, measure=f"{hardware.name}, {row.measure}")


if __name__ == "__main__":
    main()
