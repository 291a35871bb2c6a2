"""Time to first token by LongBench data set, from modules in device and host memory (Prompt Cache, Figures 3 and 4).

`make bench NAME=prompt_cache_longbench ARGS="--model model.gguf --data hotpotqa.jsonl musique.jsonl"`. Files have records
in LongBench's own format (`input`, `context`, `answers`, `dataset`), or records with documents. Every passage is a
module, the question is new text. Each record is answered from modules on the device, from modules that are copied in
from host memory, and whole, in turns; every answer has the same number of tokens. Records of more than `--longest` words
or more positions than the model has are left out and counted.
"""

import argparse
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from choreograph import CacheConfig, Engine, EngineConfig
from choreograph.errors import PromptError, SchemaError
from choreograph.outputs import Mode
from choreograph.prompt_cache import Prompt, PromptCache

from .common import Row, greedy, median_row, ratio_row, save
from .prompt_cache_quality import documents_of, make_schema_and_prompt, read_records

SIDES: dict[str, tuple[str, Mode]] = {  # label: location of the modules, mode
    "device": ("device", "choreographed"),
    "host": ("host", "choreographed"),
    "whole": ("device", "naive"),
}


class AnswerTimes(NamedTuple):
    """Seconds of one answer."""

    first_token: float  # from handing over the prompt
    next_token: float  # mean over the tokens after the first
    total: float


def answer_times(cache: PromptCache, mode: Mode, prompt: Prompt, num_tokens: int) -> AnswerTimes:
    """Time an answer of so many tokens, two or more."""
    with cache.engine.session(mode=mode, client_id=cache.client_id) as session:
        start = time.perf_counter()
        timing = cache.generate(session, prompt, sampling=greedy(num_tokens)).timing
        total = time.perf_counter() - start
    cache.engine.run_until_idle()
    assert timing.e2e is not None and timing.ttft is not None
    after_first = timing.e2e - timing.ttft
    return AnswerTimes(total - after_first, after_first / (num_tokens - 1), total)


def time_record(
    engine: Engine, record: Mapping[str, Any], num_tokens: int
) -> tuple[dict[str, AnswerTimes], tuple[int, int]]:
    """Return the times of every side, and the numbers of cached and new tokens."""
    declaration, prompt = make_schema_and_prompt(record)
    times: dict[str, AnswerTimes] = {}
    for label, (location, mode) in SIDES.items():
        engine.clear_cache()
        with PromptCache(engine, declaration, client_id=label, location=location) as cache:
            if mode == "choreographed":
                cache.warmup()
            if location == "host":
                engine.clear_cache()  # modules are in host memory only
            times[label] = answer_times(cache, mode, prompt, num_tokens)
            resolved = cache.resolve(prompt)
    num_cached = sum(item.num_tokens for item in resolved.cached)
    return times, (num_cached, sum(len(text.tokens) for text in resolved.new_texts))


def task_rows(task: str, measured: list[tuple[dict[str, AnswerTimes], tuple[int, int]]]) -> list[Row]:
    """Return the rows of one data set."""
    times = {label: [sides[label] for sides, _ in measured] for label in SIDES}
    firsts = {label: [one.first_token for one in side] for label, side in times.items()}
    rows = [ratio_row(f"{task}: first token, whole against modules on the device", firsts["whole"], firsts["device"])]
    rows.append(
        ratio_row(f"{task}: first token, whole against modules in host memory", firsts["whole"], firsts["host"])
    )
    for field, name in (("first_token", "first token"), ("next_token", "each later token"), ("total", "end to end")):
        rows += [
            median_row(f"{task}: {name}, {label}", [1e3 * getattr(one, field) for one in side], "ms", better="lower")
            for label, side in times.items()
        ]
    for index, name in enumerate(("cached", "new")):
        rows.append(median_row(f"{task}: {name} tokens", [counts[index] for _, counts in measured], "tokens"))
    return rows


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--data", type=Path, nargs="+", required=True, help="JSON Lines files")
    options.add_argument("--model", default=None, help="default: the bundled model")
    options.add_argument("--device", default=None)
    options.add_argument("--dtype", default="auto")
    options.add_argument("--limit", type=int, default=5, help="records of a data set")
    options.add_argument("--longest", type=int, default=5000, help="words of a record's documents")
    options.add_argument("--tokens", type=int, default=16, help="tokens of an answer, 2 or more")
    args = options.parse_args()
    arguments = {
        "dtype": args.dtype,
        "device": args.device,
        "config": EngineConfig(cache=CacheConfig(capacity=40_960), compile=(args.device or "cpu") != "cpu"),
    }
    engine = Engine.from_pretrained(*([args.model] if args.model else []), **arguments)
    engine.warm_up()
    measured: dict[str, list[tuple[dict[str, AnswerTimes], tuple[int, int]]]] = defaultdict(list)
    left_out: Counter[str] = Counter()
    for file in args.data:
        for record in read_records(file):
            task = record.get("task", file.stem)
            if len(measured[task]) >= args.limit:
                continue
            try:
                if sum(len(text.split()) for text in documents_of(record)) > args.longest:
                    raise SchemaError("too long")
                measured[task].append(time_record(engine, record, args.tokens))
            except (SchemaError, PromptError):
                left_out[task] += 1
                continue
            sides = measured[task][-1][0]
            shown = ", ".join(f"{label} {1e3 * one.first_token:.0f} ms" for label, one in sides.items())
            print(f"{task}: {shown}", flush=True)
    rows = [row for task, results in measured.items() if results for row in task_rows(task, results)]
    counts = {task: {"n": len(results), "left out": left_out[task]} for task, results in measured.items()}
    save("prompt_cache_longbench", rows, Path(args.model).stem if args.model else engine.model_info.name, counts=counts)


if __name__ == "__main__":
    main()
