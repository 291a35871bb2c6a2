"""Limits of instructions: kernels keep to them, and what is compiled under one is not loaded under another."""

import ctypes

import pytest
import torch

from choreograph.attention import autotune
from choreograph.attention.cpp_backend import (
    INSTRUCTION_SETS,
    ISA_VARIABLE,
    LIMIT_VARIABLES,
    compile_library,
    cpu_flags,
)
from choreograph.attention.metadata import HeadShape
from choreograph.errors import ConfigError

FLAGS = {"avx2": "avx2", "avx512": "avx512f", "avx512_bf16": "avx512_bf16", "amx": "amx_bf16"}  # of sets beyond SSE4
MACROS = """extern "C" int has(int set) {
#ifdef __AVX2__
  if (set == 1) return 1;
#endif
#ifdef __AVX512F__
  if (set == 2) return 1;
#endif
#ifdef __AVX512BF16__
  if (set == 3) return 1;
#endif
#ifdef __AMX_BF16__
  if (set == 4) return 1;
#endif
  return 0;
}
"""


@pytest.fixture(autouse=True)
def _no_limits(monkeypatch):
    for name in LIMIT_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def compiled_sets(tmp_path):
    """Function that compiles a library and returns the sets beyond SSE4 that it may use, and its path."""
    source = tmp_path / "macros.cpp"
    source.write_text(MACROS)

    def compile():
        path = compile_library("macros", [source], (), tmp_path)
        library = ctypes.CDLL(str(path))
        return {name for number, name in enumerate(FLAGS, 1) if library.has(number)}, path

    return compile


@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_kernels_use_no_instructions_beyond_the_limit(monkeypatch, compiled_sets, name):
    every, all_flags = compiled_sets(), cpu_flags()
    monkeypatch.setenv(ISA_VARIABLE, name)
    allowed = list(INSTRUCTION_SETS)[: list(INSTRUCTION_SETS).index(name) + 1]
    sets, path = compiled_sets()
    assert sets == {isa for isa in every[0] if isa in allowed}
    assert {isa for isa, flag in FLAGS.items() if flag in cpu_flags().split()} <= set(allowed)
    assert (path == every[1]) == (cpu_flags() == all_flags)


def test_an_unknown_limit_is_refused(monkeypatch):
    monkeypatch.setenv(ISA_VARIABLE, "sse2")
    with pytest.raises(ConfigError, match=f"{ISA_VARIABLE}='sse2': use one of .'sse4', 'avx2'"):
        cpu_flags()


@pytest.mark.parametrize("variable", LIMIT_VARIABLES)
def test_measurements_under_another_limit_are_not_used(monkeypatch, tmp_path, variable):
    monkeypatch.setattr(autotune, "_path", lambda: tmp_path / "backends.json")
    shape, cpu = HeadShape(4, 2, 16), torch.device("cpu")

    def backend_name():
        return autotune.create_tuned_backend("auto", shape, torch.float32, cpu)[0].name

    table = {"sdpa": {"few rows: one": 1.0, "many rows": 1.0}, "reference": {"few rows: one": 0.1, "many rows": 0.1}}
    autotune.save(table, shape, torch.float32, cpu)
    assert backend_name() == "reference"
    monkeypatch.setenv(variable, "avx2")
    assert backend_name() != "reference"
