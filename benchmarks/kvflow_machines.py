"""KVFlow's headline settings on machines that are not at hand, on a virtual clock (`evaluation/virtual.py`).

`make bench NAME=kvflow_machines`. Peak rates are the makers'; what is reached of them is assumed, and stands beside the
figures. The link of the A10G is the paper's 2 GB/s.
"""

from dataclasses import asdict, replace

from choreograph import EngineConfig
from choreograph.evaluation.virtual import Machine, virtual_engine

from .common import VIRTUAL, Row, save
from .kvflow import Make, alone, crowd

REACHED = {"arithmetic": 0.5, "memory": 0.8, "link": 0.8}  # assumed shares of the peak rates
GIB = 2**30
A10G = Machine(
    name="Llama-3.1-8B on an A10G",
    parameters=8.03e9,
    weights=16.06e9,
    layers=32,
    width=4096,
    token_bytes=131072,
    arithmetic=REACHED["arithmetic"] * 70e12,
    memory=REACHED["memory"] * 600e9,
    link=2e9,
    cache=0.9 * 24e9 - 16.06e9,
    overhead=1e-3,
)
H100 = Machine(
    name="Qwen2.5-32B on an H100",
    parameters=32.8e9,
    weights=65.5e9,
    layers=64,
    width=5120,
    token_bytes=262144,
    arithmetic=REACHED["arithmetic"] * 989e12,
    memory=REACHED["memory"] * 3350e9,
    link=REACHED["link"] * 64e9,
    cache=0.9 * 80e9 - 65.5e9,
    overhead=1e-3,
)
H100_SMALL = Machine(**{**asdict(A10G),
    "name": "Llama-3.1-8B on an H100", "arithmetic": H100.arithmetic, "memory": H100.memory, "link": H100.link,
    "cache": 0.9 * 80e9 - 16.06e9
})  # fmt: skip
SHAPES = [(fixed, dynamic, output) for fixed in (4096, 8192) for dynamic, output in ((32, 32), (32, 256), (256, 256))]
CROWDS = ((512, 64), (1024, 32), (1024, 64))


def on(machine: Machine) -> Make:
    return lambda config: virtual_engine(machine, EngineConfig(config.cache, config.scheduler, backend="reference"))


def main() -> None:
    rows, found = [], {}
    for machine in (A10G, H100):
        for shape in SHAPES:
            more, facts = alone(on(machine), shape, rounds=4, device=machine.cache_tokens)
            label = f"{machine.name}, {rows_label(more)}"
            rows += [renamed(row, machine) for row in more]
            found[label] = facts
            print(label, {r.measure.partition(": ")[2]: round(r.value, 2) for r in more if r.unit == "x"}, flush=True)
    for fixed, workflows in CROWDS:
        more, facts = crowd(on(H100_SMALL), fixed, workflows, 2, agents=10, said=256, device=H100_SMALL.cache_tokens)
        label = f"{H100_SMALL.name}, {rows_label(more)}"
        rows += [renamed(row, H100_SMALL) for row in more]
        found[label] = facts
        print(label, {r.measure.partition(": ")[2]: round(r.value, 2) for r in more if r.unit == "x"}, flush=True)
    machines = {m.name: {**asdict(m), "cache tokens": m.cache_tokens} for m in (A10G, H100, H100_SMALL)}
    save("kvflow_machines", rows, VIRTUAL, found=found, machines=machines, reached=REACHED)


def rows_label(rows: list[Row]) -> str:
    return rows[0].measure.partition(":")[0]


def renamed(row: Row, machine: Machine) -> Row:
    return replace(row, measure=f"{machine.name}, {row.measure}")


if __name__ == "__main__":
    main()
