"""Programs of the soak, a few seconds of it in the slow tests, and its measures, which tell growth from none."""

import os
import random

import pytest

from benchmarks.torture import soak
from benchmarks.torture.campaign import Options
from benchmarks.torture.process_memory import slope_an_hour
from benchmarks.torture.soak_programs import KINDS, Program
from benchmarks.torture.soak_worker import QUIET_CACHE, Report, compare, crowded_cache, finish_engine, open_engine
from benchmarks.torture.tiny_family import save_family

SHORT = ("graph", "revisits", "guard", "adapters", "siblings", "modules", "moved_kv", "constrained")


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    return save_family(tmp_path_factory.mktemp("family"))


@pytest.mark.parametrize("kinds", [SHORT, pytest.param(tuple(KINDS), marks=pytest.mark.slow)], ids=["some", "all"])
def test_programs_give_the_tokens_of_a_quiet_engine_and_leave_nothing(kinds, family, tmp_path):
    report = Report(seed=3)
    engine = open_engine(family, crowded_cache(str(tmp_path), 2048))
    quiet = open_engine(family, QUIET_CACHE, backend="reference")
    for index, kind in enumerate(kinds):
        programs = [Program(one, family, random.Random(index), "0", one is quiet) for one in (engine, quiet)]
        for program in programs:
            KINDS[kind][0](program)
        engine.check()
        compare(report, kind, index, *(program.outputs for program in programs))
    finish_engine(report, engine, str(tmp_path), "engine")
    assert report.lost == []
    assert report.counts["compared"] > 20 and not os.listdir(tmp_path)
    quiet.close()


@pytest.mark.slow
def test_nothing_is_lost_or_left_after_mixed_work():
    outcome = soak.run(Options(seconds=4, seed=3))
    assert outcome.lost == ()
    assert outcome.inputs > 0
    assert outcome.details["server"]["counts"]["checks"] > 0
    assert outcome.details["in process"]["counts"]["checks"] > 0


def test_a_slope_is_found_among_noise_and_no_other():
    noise = random.Random(0)
    flat = [{"seconds": 2.0 * i, "rss": 500 + noise.random()} for i in range(600)]
    grown = [{**sample, "rss": sample["rss"] + 20 * sample["seconds"] / 3600} for sample in flat]
    slope = slope_an_hour(flat, "rss")
    assert slope["low"] < 0 < slope["high"]
    slope = slope_an_hour(grown, "rss")
    assert slope["low"] < 20 < slope["high"] and slope["low"] > 10
    assert slope_an_hour(flat[:50], "rss") is None


def test_memory_that_grows_is_a_loss():
    samples = [{"seconds": 2.0 * i, **dict.fromkeys(soak.FIGURES[1:], 500 + 0.01 * i)} for i in range(600)]
    summary = soak.summary_of({"samples": samples, "counts": {}})
    assert summary["slopes_an_hour"]["rss"]["value"] == pytest.approx(18)
    assert soak.growth_of("server", summary, Options(seconds=1200, seed=0)) == [
        "seed 0, server: anonymous memory grows by 18.0 MiB an hour (18.0 to 18.0)"
    ]
    assert soak.growth_of("server", summary, Options(seconds=60, seed=0)) == []
