"""Quality by lm-evaluation-harness over HTTP, against its own `hf` backend, and what each reuse mode costs.

The harness scores two tasks of `lm_eval_tasks` (questions with four answers, perplexity of texts) through
`/v1/completions` of a running server, and with transformers in this process, both in float32. In mode exact every
log-likelihood has to be the same to 1e-3. Run it from the root of the repository: make bench NAME=lm_eval
"""

import argparse
import os
import statistics
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # tasks and model are local
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

from lm_eval import simple_evaluate
from lm_eval.api.model import LM
from lm_eval.models.huggingface import HFLM
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.tasks import TaskManager
from rich.console import Console

from choreograph.console import print_table
from choreograph.models.loader import bundled_gguf, convert_gguf

from .common import Row, median_row, save
from .serve_peers import Server

TASKS = {"choreograph_notes": ("acc", "acc_norm"), "choreograph_texts": ("word_perplexity", "bits_per_byte")}
TOLERANCE = 1e-3  # nats, of every log-likelihood in mode exact
SERVER = ["--log-level", "warning", "--dtype", "float32", "--capacity", "16384"]
# options of requests that reuse; the harness's own client sends those of mode exact
MODES: dict[str, dict[str, Any]] = {
    "auto": {"reuse": "auto"},
    "auto, repair 0.3": {"reuse": "auto", "repair": 0.3},
    "auto, repair 1": {"reuse": "auto", "repair": 1.0},
}


class ReuseClient(LocalCompletionsAPI):
    """The harness's client of completions, whose requests choose a reuse mode."""

    def __init__(self, options: dict[str, Any], **arguments: Any) -> None:
        super().__init__(**arguments)
        self._options = options

    def _create_payload(self, *arguments: Any, **keywords: Any) -> dict[str, Any]:
        return super()._create_payload(*arguments, **keywords) | {"choreography": self._options}


Result = tuple[dict[str, float], dict[str, list[float]]]  # metrics by task and name; log-likelihoods by task


def evaluate(model: LM) -> Result:
    """Return metrics by task and name, and log-likelihoods of all requests by task."""
    manager = TaskManager(include_path=str(Path(__file__).parent / "lm_eval_tasks"), include_defaults=False)
    results: Any = simple_evaluate(
        model=model, tasks=list(TASKS), task_manager=manager, log_samples=True, bootstrap_iters=0, random_seed=0
    )
    metrics = {f"{task}: {name}": results["results"][task][f"{name},none"] for task in TASKS for name in TASKS[task]}
    likelihoods: dict[str, list[float]] = {}
    for task in TASKS:
        samples = sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
        values = [response for sample in samples for (response,) in sample["resps"]]
        likelihoods[task] = [float(value[0] if isinstance(value, tuple | list) else value) for value in values]
    return metrics, likelihoods


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="*", choices=list(MODES), default=list(MODES))
    parser.add_argument("--threads", type=int, help="of the server's operations; as the machine has cores by default")
    chosen = parser.parse_args()
    folder = str(convert_gguf(bundled_gguf()))
    environment = {"OMP_NUM_THREADS": str(chosen.threads)} if chosen.threads else {}
    server = Server("lm_eval", [sys.executable, "-m", "choreograph", "serve", *SERVER], environment)
    try:
        server.wait()
        arguments = {"base_url": f"{server.url}/v1/completions", "model": server.model, "tokenizer": folder}
        arguments |= {"tokenizer_backend": "huggingface", "max_retries": 1, "timeout": 600}
        results = {"exact": evaluate(LocalCompletionsAPI(**arguments))}
        for name in chosen.modes:
            options = MODES[name] | {"workflow": name}  # which shares nothing with those of other modes
            results[name] = evaluate(ReuseClient(options, **arguments))
    finally:
        server.close()
    results = {"hf": evaluate(HFLM(pretrained=folder, dtype="float32", device="cpu", batch_size=1)), **results}
    rows, lines = [], []
    differences = {
        f"{task}, {name}": [abs(a - b) for a, b in zip(values[task], results["hf"][1][task], strict=True)]
        for name, (_, values) in results.items()
        for task in TASKS
    }
    for task, names in TASKS.items():
        for backend, (metrics, _) in results.items():
            gaps, values = differences[f"{task}, {backend}"], [metrics[f"{task}: {name}"] for name in names]
            figures = [*(f"{value:.6f}" for value in values), f"{max(gaps):.2g}", f"{statistics.mean(gaps):.2g}"]
            lines.append((task, backend, *figures))
            for name, value in zip(names, values, strict=True):
                rows.append(Row(f"{task}: {name}, {backend}", value, "", value, value))
            if backend != "hf":
                what, limit = "difference of a log-likelihood to hf", TOLERANCE if backend == "exact" else None
                rows.append(
                    Row(f"{task}: largest {what}, {backend}", max(gaps), "nats", 0.0, max(gaps), "lower", limit)
                )
                rows.append(median_row(f"{task}: median {what}, {backend}", gaps, "nats", better="lower"))
    print_requests(results, differences)
    head = ("task", "backend", "acc / word perplexity", "acc_norm / bits per byte", "largest gap", "mean gap")
    print_table(Console(width=160), "lm-evaluation-harness, gaps of log-likelihoods to hf in nats", head, lines)
    likelihoods = {name: values for name, (_, values) in results.items()}
    save("lm_eval", rows, differences=differences, likelihoods=likelihoods, lm_eval=version("lm_eval"))
    worst = max(max(differences[f"{task}, exact"]) for task in TASKS)
    if worst > TOLERANCE:
        sys.exit(f"mode exact differs from hf by {worst:.2g} nats: at most {TOLERANCE:g} is expected")


def print_requests(results: Mapping[str, Result], differences: Mapping[str, list[float]]) -> None:
    """Print the log-likelihood of every request, and each mode's difference from it."""
    modes = [name for name in results if name != "hf"]
    for task in TASKS:
        values = results["hf"][1][task]
        gaps = ([f"{differences[f'{task}, {mode}'][number]:.1e}" for mode in modes] for number in range(len(values)))
        lines = [
            (str(number), f"{value:.5f}", *row) for number, (value, row) in enumerate(zip(values, gaps, strict=True))
        ]
        print_table(Console(width=160), f"{task}: requests", ("request", "hf, nats", *modes), lines)


if __name__ == "__main__":
    main()
