"""The campaign of damaged and hostile files, for some seconds."""

import json
import random

import pytest

from benchmarks.torture import files
from benchmarks.torture.campaign import Options
from benchmarks.torture.file_mutations import Mutator, split_gguf
from benchmarks.torture.file_readers import gguf_file


def test_no_file_raises_hangs_escapes_or_runs_code():
    outcome = files.run(Options(seconds=5, seed=0))
    assert outcome.lost == ()
    assert outcome.inputs >= 1 and outcome.details["counts"]


def test_a_gguf_file_is_its_fields():
    data = gguf_file()
    assert b"".join(field.pack() for field in split_gguf(data)) == data


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.yaml", "a.safetensors", "a.gguf", "a.pml"])
def test_most_changes_leave_a_file_that_is_read_in_part(name):
    """A change by structure is no noise: most JSON that comes out is JSON."""
    valid = {"a.gguf": gguf_file(), "a.safetensors": (8).to_bytes(8, "little") + b'{"a":{}}' + bytes(8)}
    data = valid.get(name, b'{"a": 1, "b": [1, 2, {"c": "x"}]}\n')
    results = [Mutator(random.Random(seed), "/nowhere", [b"other"]).mutate(name, data) for seed in range(60)]
    assert len(set(results)) > 30
    if name == "a.json":
        assert sum(is_json(result) for result in results) > 20


def is_json(data):
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        return False
    return True
