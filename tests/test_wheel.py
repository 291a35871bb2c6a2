"""A wheel built from the tree carries everything: it is unpacked elsewhere and runs from there."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_wheel_runs_without_the_tree(tmp_path):
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("choreograph-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = archive.namelist()
        archive.extractall(tmp_path / "site")
    for name in ("cpp_kernel.cpp", "cpp_tiles.h", "cpp_amx.h", "cpp_vector.h"):
        assert f"choreograph/attention/{name}" in held
    assert "choreograph/py.typed" in held
    assert not [name for name in held if name.startswith(("tests", "benchmarks", "examples"))]
    ask = (
        "import choreograph, json; from choreograph import Engine, SamplingParams; e = Engine.from_pretrained();"
        "s = e.session(); m = s.decode('Hello', sampling=SamplingParams(max_tokens=3, temperature=0));"
        "print(json.dumps([choreograph.__file__, len(m.output_token_ids)]))"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    place, count = json.loads(done.stdout.splitlines()[-1])
    assert place.startswith(str(tmp_path))
    assert count == 3
