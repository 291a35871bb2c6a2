"""What every benchmark shares: paired timing, intervals, the table, the JSON file. Owns no measurement."""

import datetime
import json
import os
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from choreograph import CacheConfig, Engine, EngineConfig, SamplingParams
from choreograph.attention.cpp_backend import cpu_flags
from choreograph.console import print_table
from choreograph.models.loader import DEFAULT_MODEL, default_dtype

RESULTS = Path(os.environ.get("CHOREOGRAPH_RESULTS", Path(__file__).parent / "results"))
SIMULATED = "no model, virtual clock"
FIGURES = Path(__file__).parents[1] / "docs" / "figures"
MODEL_TITLES = {"qwen2.5-coder-0.5b-instruct-q4_k_m": "Qwen 0.5B"}  # what tables call a model, by the name of its file


@dataclass(frozen=True)
class Row:
    """One measured figure with its 95% interval. required and target: the numbers that it is held against. predicted:
    what was worked out before."""

    measure: str
    value: float
    unit: str
    low: float
    high: float
    better: str = "higher"
    required: float | None = None
    target: float | None = None
    peer: str | None = None
    predicted: float | None = None
    provenance: Mapping[str, str] | None = None  # commit, date and hardware; `save` fills it in


FILE_KEYS = {"required": "must", "target": "aim", "provenance": "made"}  # what result files call these fields of a row


def row_to_record(row: Row) -> dict[str, Any]:
    """A row as result files have it."""
    return {FILE_KEYS.get(name, name): value for name, value in asdict(row).items()}


def row_from_record(record: Mapping[str, Any]) -> Row:
    """The row that a result file holds."""
    fields = {key: name for name, key in FILE_KEYS.items()}
    return Row(**{fields.get(key, key): value for key, value in record.items()})


def median_row(measure: str, samples: Sequence[float], unit: str, **facts: object) -> Row:
    """The median of samples with a bootstrap interval."""
    low, high = interval(samples)
    return Row(measure, statistics.median(samples), unit, low, high, **facts)  # type: ignore[arg-type]


def estimate_row(measure: str, estimate: Mapping[str, float], unit: str, **facts: object) -> Row:
    """A figure that comes with its interval."""
    return Row(measure, estimate["value"], unit, estimate["low"], estimate["high"], **facts)  # type: ignore[arg-type]


def ratio_row(measure: str, numerators: Sequence[float], denominators: Sequence[float], **facts: object) -> Row:
    """The median of paired ratios above[i] / below[i]."""
    return median_row(measure, [a / b for a, b in zip(numerators, denominators, strict=True)], "x", **facts)


def interval(samples: Sequence[float], draws: int = 2000) -> tuple[float, float]:
    """95% bootstrap interval of the median."""
    data = np.asarray(samples, dtype=float)
    picks = np.random.default_rng(0).integers(0, len(data), (draws, len(data)))
    low, high = np.percentile(np.median(data[picks], axis=1), [2.5, 97.5])
    return float(low), float(high)


def interleaved(rounds: int, *callables: Callable[[], float]) -> list[list[float]]:
    """Runs every side once a round, in turns, so that a drift of the machine meets all of them alike."""
    taken: list[list[float]] = [[] for _ in callables]
    for _ in range(rounds):
        for side, times in zip(callables, taken, strict=True):
            times.append(side())
    return taken


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def engine(*, tokens: int = 16384, dtype: str = "bfloat16", **options: object) -> Engine:
    """dtype: bfloat16, as the peers compute, or another where they do."""
    config = EngineConfig(cache=CacheConfig(capacity=tokens), **options)  # type: ignore[arg-type]
    return Engine.from_pretrained(dtype=dtype, config=config)


def model_title(model: str) -> str:
    """Return what tables call a model, by its name or that of its file."""
    name = Path(model).name.removesuffix(".gguf")
    return MODEL_TITLES.get(name, name)


def has_fast_bfloat16() -> bool:
    """Whether this processor is: models load in it then, and training computes in it."""
    return default_dtype(torch.device("cpu")) == torch.bfloat16


def result_of_processor(name: str) -> str:
    """Return the name of the result file for this kind of processor: `name`, `name`_amx or `name`_avx2."""
    return f"{name}_amx" if "amx_bf16" in cpu_flags() else name if has_fast_bfloat16() else f"{name}_avx2"


def eager_dtype() -> str:
    """The type in which PyTorch's own operations are faster on this processor."""
    return "bfloat16" if has_fast_bfloat16() else "float32"


def random_tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(100, 49000, count).tolist()


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


def save(name: str, rows: Sequence[Row], model: str = DEFAULT_MODEL, **more: object) -> None:
    """Prints the table and writes `results/<name>.json`."""
    print_rows(name, rows)
    write(name, rows, model, **more)


def print_rows(name: str, rows: Sequence[Row]) -> None:
    lines = []
    for row in rows:
        span = f"{row.low:.3g} to {row.high:.3g}"
        aims = ["" if x is None else f"{x:g}" for x in (row.required, row.target)]
        lines.append((row.measure, f"{row.value:.3g} {row.unit}", span, *aims, row.peer or ""))
    print_table(Console(width=160), name, ("measure", "value", "95%", "must", "aim", "peer"), lines)


def write(name: str, rows: Sequence[Row], model: str = DEFAULT_MODEL, **more: object) -> None:
    """Writes `results/<name>.json`. Every row says where and when it was measured, since parts of a benchmark may be
    measured again alone."""
    made = provenance()
    record = {
        "benchmark": name,
        **made,
        "torch": torch.__version__,
        "model": model,
        "rows": [row_to_record(replace(row, provenance=row.provenance or made)) for row in rows],
        **more,
    }
    RESULTS.mkdir(exist_ok=True)
    result_file(name).write_text(json.dumps(record, indent=1) + "\n")


def provenance() -> dict[str, str]:
    return {"commit": commit(), "date": datetime.date.today().isoformat(), "hardware": hardware()}


def merge_results(name: str, key: str, updates: Mapping[str, object]) -> dict[str, object]:
    """`new` beside what the last result of a benchmark holds under `key`: parts that are measured apart."""
    return {**last_result(name).get(key, {}), **updates}


def last_result(name: str) -> dict[str, Any]:
    """The last result of a benchmark; empty before the first."""
    file = result_file(name)
    return json.loads(file.read_text()) if file.exists() else {}


def result_file(name: str) -> Path:
    return RESULTS / f"{name}.json"


def hardware() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*:\s*(.*)", info.read_text()) if info.exists() else []
    vectors = torch.backends.cpu.get_cpu_capability()  # one name is given to processors with and without AVX-512
    return f"{names[0] if names else platform.processor()} {os.cpu_count()} cores, {vectors}"


def commit() -> str:
    return _git("rev-parse", "--short", "HEAD") + ("-dirty" if _changed() else "")


def _changed() -> str:
    """Tracked files that differ from the commit, other than results and figures."""
    others = (f":(exclude,top){folder}" for folder in ("benchmarks/results", "docs/figures"))
    return _git("status", "--porcelain", "--untracked-files=no", "--", ":/", *others)


def _git(*args: str) -> str:
    try:
        return subprocess.run(["git", *args], capture_output=True, text=True, cwd=Path(__file__).parent).stdout.strip()
    except FileNotFoundError:  # a machine without git
        return ""


def keep_supporting(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record of questions over passages with those alone that the answer needs."""
    titles = record.get("supporting_titles", ())
    needed = [one for one in record["documents"] if one.get("is_supporting") or one["title"] in titles]
    return {**record, "documents": needed}
