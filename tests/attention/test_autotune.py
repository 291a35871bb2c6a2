"""`auto` by measurement: what is measured is kept, found again for the same shape, and taken by engines."""

import json

import pytest
import torch
from helpers import tiny_models
from helpers.inspect_engine import inspect

from choreograph.attention import autotune as measured
from choreograph.attention.autotune import create_tuned_backend, fastest, run, save
from choreograph.attention.cpp_backend import BackendUnavailableError
from choreograph.attention.metadata import HeadShape

CPU, HEADS = torch.device("cpu"), HeadShape(4, 2, 16)


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(measured, "_path", lambda: tmp_path / "backends.json")
    return tmp_path / "backends.json"


def table(native: tuple[float, float], sdpa: tuple[float, float]) -> measured.Table:
    return {
        name: {"few rows: one": few, "many rows": many} for name, (few, many) in (("native", native), ("sdpa", sdpa))
    }


def test_every_case_is_measured_for_every_backend():
    kind = tiny_models.engine().model_info.attention_specs[0]
    result = run(HEADS, kind, torch.float32, CPU, context=64)
    assert set(result) <= {"native", "sdpa"} and "sdpa" in result
    for taken in result.values():
        assert len(taken) == 3 and all(seconds > 0 for seconds in taken.values())


def test_autotune_takes_the_fastest_backend(file):
    before = create_tuned_backend("auto", HEADS, torch.float32, CPU)[0].name
    save(table((2.0, 2.0), (1.0, 1.0)), HEADS, torch.float32, CPU)
    assert create_tuned_backend("auto", HEADS, torch.float32, CPU)[0].name == "sdpa"
    assert create_tuned_backend("reference", HEADS, torch.float32, CPU)[0].name == "reference"
    for other in (HeadShape(4, 4, 16), HeadShape(4, 2, 32)):
        assert create_tuned_backend("auto", other, torch.float32, CPU)[0].name == before
    assert create_tuned_backend("auto", HEADS, torch.bfloat16, CPU)[0].name == before


def test_small_and_large_steps_may_have_different_ones(file):
    result = table((2.0, 1.0), (1.0, 2.0))
    assert fastest(result) == ("sdpa", "native")
    save(result, HEADS, torch.float32, CPU)
    engine = tiny_models.engine()
    assert inspect(engine).backend.name == "sdpa, native from 17 rows on"
    plain = tiny_models.engine(backend="reference")
    for one in (engine, plain):
        with one.session(seed=1) as session:
            seen = session.prefill(list(range(30)))
            one.said = session.decode([3], [seen], new_offset=40).tokens
    assert engine.said == plain.said


def test_a_measured_backend_that_cannot_run_is_passed_over(file, monkeypatch):
    make = measured.create_backend

    def without_compiler(name, *given):
        if name == "native":
            raise BackendUnavailableError("no compiler")
        return make(name, *given)

    monkeypatch.setattr(measured, "create_backend", without_compiler)
    save(table((1.0, 1.0), (2.0, 2.0)), HEADS, torch.float32, CPU)
    assert create_tuned_backend("auto", HEADS, torch.float32, CPU)[0].name == "sdpa"
    save({}, HEADS, torch.float32, CPU)
    assert create_tuned_backend("auto", HEADS, torch.float32, CPU)[0].name in ("native", "sdpa")


def test_a_backend_that_fails_is_left_out_of_the_measurement(monkeypatch):
    make = measured.create_backend

    def failing(call):
        raise RuntimeError("out of memory")

    def create(name, *given):
        return (failing, None) if name == "sdpa" else make("reference", *given)

    monkeypatch.setattr(measured, "create_backend", create)
    kind = tiny_models.engine().model_info.attention_specs[0]
    with pytest.warns(UserWarning, match="'sdpa' is left out, it fails here: out of memory"):
        result = run(HEADS, kind, torch.float32, CPU, context=64)
    assert set(result) == {"native"}


def test_a_stored_backend_that_exists_no_more_is_passed_over(file):
    save({"flex": {"few rows: one": 1.0, "many rows": 1.0}}, HEADS, torch.float32, CPU)
    assert create_tuned_backend("auto", HEADS, torch.float32, CPU)[0].name in ("native", "sdpa")


@pytest.mark.parametrize("text", ["", "{", "[1", "[]"])
def test_a_broken_file_is_no_table(file, text):
    file.write_text(text)
    assert create_tuned_backend("auto", HEADS, torch.float32, CPU)[0].name in ("native", "sdpa")
    save(table((1.0, 1.0), (2.0, 2.0)), HEADS, torch.float32, CPU)
    assert len(json.loads(file.read_text())) == 1
