"""The attention kernels, compiled for GPUs by Triton's own compiler, in a process that does not interpret them."""

import json
import os
import subprocess
import sys

import pytest

ASKED = """
import json, sys
from dataclasses import asdict
from benchmarks.gpu.binaries import SHAPES, compile_attend, compile_merge
from choreograph.attention.metadata import HeadShape

made = [asdict(compile_attend(*SHAPES[name], dtype, rows, arch, single_split=direct, is_int8=is_int8))
        for name, dtype, rows, arch, direct, is_int8 in json.loads(sys.argv[1])]
print(json.dumps([*made, asdict(compile_merge(HeadShape(64, 8, 64), "bf16", 90, has_sinks=True))]))
"""
CASES = [
    ("Llama 3.1 8B", "bf16", 8, 90, False, False),
    ("Llama 3.1 8B", "bf16", 512, 90, True, False),
    ("Llama 3.1 8B", "bf16", 512, 90, True, True),  # over an int8 cache
    ("Gemma 2 2B", "bf16", 64, 80, False, False),  # wide heads, a cap and a window
    ("Gemma 3 270M", "fp32", 8, 86, False, False),  # the widest rows, on the least shared memory
    ("MPT 7B", "fp32", 64, 90, False, False),  # slopes
    ("GPT-J 6B", "fp16", 64, 89, False, False),  # interleaved pairs on a part of a head
]


@pytest.mark.slow
@pytest.mark.parametrize("cases", [CASES[:3], CASES[3:]], ids=["Llama", "others"])
def test_compiled_attention_kernels_fit_every_kind_of_gpu(cases):
    pytest.importorskip("triton.backends.nvidia")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    asked = [sys.executable, "-W", "ignore", "-c", ASKED, json.dumps(cases)]
    done = subprocess.run(asked, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = dict(zip([*cases, "merge"], json.loads(done.stdout), strict=True))
    for case, one in result.items():
        assert one["programs"] >= 1, (case, one)
        assert one["spilled"] <= 128, (case, one)
        assert (one["products"] == "none") == (case == "merge"), (case, one)
    for case in CASES[1:3]:
        assert case not in cases or result[case]["products"] == "wgmma"
