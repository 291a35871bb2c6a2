"""Setups of the KVFlow benchmark on a virtual clock: which prompts each finds, in both modes."""

import pytest

from benchmarks.kvflow import (
    AWARE,
    COPIED_AHEAD,
    DEVICE_ONLY,
    REACTIVE,
    SETUP_NAMES,
    VARYING_FIRST,
    concurrent_workflows,
    overhead_of_hints,
    parse_label,
    single_workflow,
)
from benchmarks.kvflow_machines import simulated_engines
from benchmarks.kvflow_policies import hit_rate
from benchmarks.simulator import HardwareModel
from choreograph.agents import StepGraph

# loading a token takes 1 ms, computing it 10 ms
MACHINE = HardwareModel(
    name="round numbers", parameters=1e6, weights=1e4, layers=4, width=1, token_bytes=1000, arithmetic=2e8,
    memory=1e8, link=1e6, cache=1e6,
)  # fmt: skip
ENGINES = simulated_engines(MACHINE, charge_host=False)


@pytest.mark.parametrize("mode", SETUP_NAMES)
def test_a_cycle_finds_its_prompts_in_host_memory_or_not_at_all(mode):
    rows, counts = single_workflow(ENGINES, (256, 16, 4), rounds=3, mode=mode)
    assert list(counts) == list(SETUP_NAMES[mode]), "the last one is compared with the others"
    assert {name: count["computed"] for name, count in counts.items()} == dict.fromkeys(counts, 0) | {DEVICE_ONLY: 30}
    assert counts[REACTIVE]["loads"] == 30 > counts[AWARE]["loads"] > 0, "LRU keeps no prompt of a cycle"
    gains = {row.measure.partition("over ")[2]: row.value for row in rows if row.unit == "x"}
    assert gains.keys() == counts.keys() - {AWARE}
    assert gains[DEVICE_ONLY] > 2 and gains[REACTIVE] > 1.01
    assert gains[COPIED_AHEAD] > 1.01, "copies spare evictions their offload, not the loads"


def test_prefix_mode_is_named_in_labels_and_counts_what_prompts_find():
    rows, counts = single_workflow(ENGINES, (256, 16, 4), rounds=1, mode="prefix", names=(DEVICE_ONLY, AWARE))
    assert list(counts) == [DEVICE_ONLY, AWARE]
    assert {row.measure.partition(":")[0] for row in rows} == {"256/16/4, prefix mode"}
    assert parse_label("256/16/4, prefix mode", "/") == (256, 16, 4)


@pytest.mark.parametrize("mode", SETUP_NAMES)
def test_concurrent_workflows_of_several_clients_find_their_own_prompts(mode):
    names = tuple(name for name in (DEVICE_ONLY, VARYING_FIRST, AWARE) if name in SETUP_NAMES[mode])
    _, counts = concurrent_workflows(ENGINES, 64, 6, 1, turn_tokens=8, mode=mode, names=names)
    assert {name: count["uses"] for name, count in counts.items()} == dict.fromkeys(names, 24)
    assert counts[DEVICE_ONLY]["computed"] > 0
    assert all(counts[name]["computed"] == 0 for name in names[1:])


def test_hints_take_no_simulated_time_where_nothing_is_evicted():
    (row,) = overhead_of_hints(ENGINES, 64, 6, 2, turn_tokens=8)
    assert row.value == pytest.approx(1) and row.required == 1.05


def test_policies_find_the_same_prompts_in_prefix_mode():
    """A cycle of ten with room for five: a declared graph finds what the optimum does, LRU nothing."""
    names = [f"agent {i}" for i in range(10)]
    graph = StepGraph.read({"agents": dict(zip(names, (None, *names), strict=False)), "repeats": True})
    rates = {
        (mode, policy): hit_rate(names * 4, 5, policy, graph, mode)[0]
        for mode in SETUP_NAMES
        for policy in ("lru", "declared")
    }
    assert rates["prefix", "lru"] == rates["choreographed", "lru"] == 0
    assert rates["prefix", "declared"] == rates["choreographed", "declared"] > 0.3
