"""`auto` by measurement: what is measured is kept, found again for the same shape, and taken by engines."""

import json

import pytest
import tiny
import torch

from choreograph.ops import measured
from choreograph.ops.kind import Heads
from choreograph.ops.measured import keep, measure, open_backend, winners
from choreograph.ops.native import BackendUnavailable

CPU, HEADS = torch.device("cpu"), Heads(4, 2, 16)


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(measured, "_path", lambda: tmp_path / "backends.json")
    return tmp_path / "backends.json"


def table(native: tuple[float, float], sdpa: tuple[float, float]) -> measured.Table:
    return {
        name: {"few rows: one": few, "many rows": many} for name, (few, many) in (("native", native), ("sdpa", sdpa))
    }


def test_every_case_is_measured_for_every_backend():
    kind = tiny.engine().facts.kinds[0]
    found = measure(HEADS, kind, torch.float32, CPU, context=64)
    assert set(found) <= {"native", "sdpa"} and "sdpa" in found
    for taken in found.values():
        assert len(taken) == 3 and all(seconds > 0 for seconds in taken.values())


def test_the_fastest_is_taken(file):
    before = open_backend("auto", HEADS, torch.float32, CPU)[0].name
    keep(table((2.0, 2.0), (1.0, 1.0)), HEADS, torch.float32, CPU)
    assert open_backend("auto", HEADS, torch.float32, CPU)[0].name == "sdpa"
    assert open_backend("reference", HEADS, torch.float32, CPU)[0].name == "reference"
    for other in (Heads(4, 4, 16), Heads(4, 2, 32)):
        assert open_backend("auto", other, torch.float32, CPU)[0].name == before
    assert open_backend("auto", HEADS, torch.bfloat16, CPU)[0].name == before


def test_small_and_large_steps_may_have_different_ones(file):
    found = table((2.0, 1.0), (1.0, 2.0))
    assert winners(found) == ("sdpa", "native")
    keep(found, HEADS, torch.float32, CPU)
    engine = tiny.engine()
    assert engine.runner.backend.name == "sdpa, native from 17 rows on"
    plain = tiny.engine(backend="reference")
    for one in (engine, plain):
        with one.session(seed=1) as session:
            seen = session.prefill(list(range(30)))
            one.said = session.decode([3], [seen], new_offset=40).tokens
    assert engine.said == plain.said


def test_what_cannot_run_any_more_is_passed_over(file, monkeypatch):
    make = measured.make_backend

    def without_compiler(name, *given):
        if name == "native":
            raise BackendUnavailable("no compiler")
        return make(name, *given)

    monkeypatch.setattr(measured, "make_backend", without_compiler)
    keep(table((1.0, 1.0), (2.0, 2.0)), HEADS, torch.float32, CPU)
    assert open_backend("auto", HEADS, torch.float32, CPU)[0].name == "sdpa"
    keep({}, HEADS, torch.float32, CPU)
    assert open_backend("auto", HEADS, torch.float32, CPU)[0].name in ("native", "sdpa")


@pytest.mark.parametrize("text", ["", "{", "[1", "[]"])
def test_a_broken_file_is_no_table(file, text):
    file.write_text(text)
    assert open_backend("auto", HEADS, torch.float32, CPU)[0].name in ("native", "sdpa")
    keep(table((1.0, 1.0), (2.0, 2.0)), HEADS, torch.float32, CPU)
    assert len(json.loads(file.read_text())) == 1
