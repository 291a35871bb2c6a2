"""Answers from documents that are modules of their own, against the same prompts read whole (Prompt Cache, Table 1).

`make bench NAME=prompt_cache_quality ARGS="--model model.gguf --data folder"`. Every document of a record is a module;
the question is new text behind them. Greedy. LongBench's metrics: F1 for questions, Rouge-L for summaries and so on, paired;
many records at once. Files are records with documents or context, or LongBench's own.
Records of more than `--longest` words are left out and counted. Answers lie in `--out`, so a run that was stopped
goes on.
"""

import argparse
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from choreograph import CacheConfig, Engine, EngineConfig, SamplingParams
from choreograph.api.concurrency import run_concurrently
from choreograph.lab.evaluation.datasets import context_of, documents_in, records
from choreograph.lab.evaluation.longbench import METRICS, PROMPTS, best_score
from choreograph.lab.evaluation.metrics import normalize_text
from choreograph.lab.evaluation.statistics import difference, mean
from choreograph.prompt_cache import Import, Prompt, PromptCache, Role, Schema, module, schema, system, user

from .common import commit, merge_results, save

DATA = {"hotpotqa": 95, "2wikimqa": 80, "musique": 95, "longbench_qa": 43, "longbench_summ": 80}
MODES = {"whole": "prefix", "modules": "choreographed"}
SUMMARY = "Write a one-page summary of all the documents."


def task_of(record: Mapping[str, Any]) -> str:
    """The task of LongBench whose metric counts; questions of other sets are scored as HotpotQA's."""
    return record["task"] if record.get("task") in METRICS else "hotpotqa"


def read_records(file: Path) -> list[Mapping[str, Any]]:
    """The records of a file; LongBench's own names are replaced by ours."""
    names = {"_id": "id", "dataset": "task"}
    return [{names.get(key, key): value for key, value in record.items()} for record in records(file)]


def documents_of(record: Mapping[str, Any]) -> list[str]:
    """Return a record's documents, and its context split into LongBench passages."""
    context = context_of(record)
    return documents_in(record) + (split_passages(context) if context else [])


def split_passages(context: str) -> list[str]:
    """Split a context losslessly into numbered passages, or return it whole."""
    starts: list[int] = []
    for match in re.finditer(r"^(?:Passage|Paragraph) (\d+):", context, re.MULTILINE):
        if int(match[1]) == len(starts) + 1:  # a number out of order is part of a passage
            starts.append(match.start())
    if not starts or starts[0]:
        return [context]
    return [context[start:end] for start, end in zip(starts, [*starts[1:], len(context)], strict=True)]


def answers_of(record: Mapping[str, Any]) -> list[str]:
    return list(record.get("answers") or [record["answer"], *record.get("answer_aliases", ())])


def is_summary(record: Mapping[str, Any]) -> bool:
    return METRICS[task_of(record)][0] == "Rouge-L"


def make_schema_and_prompt(record: Mapping[str, Any]) -> tuple[Schema, Prompt]:
    """The schema of a record, and the prompt that imports all of it."""
    parts = [module(f"document-{i + 1}", f"Document {i + 1}: {t}\n\n") for i, t in enumerate(documents_of(record))]
    how = "Read the documents and do what is asked." if is_summary(record) else "Answer from the documents."
    question = record.get("question") or record.get("input")
    if not question:
        question = SUMMARY if is_summary(record) else PROMPTS[task_of(record)].format(context="", input="").strip()
    elif not is_summary(record):
        question = f"{question}\nGive only the answer, in a few words."
    prompt = Prompt("documents", (*(Import(part.name) for part in parts), Role("user", (question,))))
    return schema("documents", system(how), user("Here are the documents.\n\n", *parts)), prompt


def answer(engine: Engine, record: Mapping[str, Any], mode: str) -> Callable[[], str]:
    most = 128 if is_summary(record) else 32

    def program() -> str:
        declaration, prompt = make_schema_and_prompt(record)
        with PromptCache(engine, declaration) as cache, engine.session(mode=mode) as session:
            sampling = SamplingParams(temperature=0, max_tokens=most)
            return cache.generate(session, prompt, sampling=sampling).text.strip()

    return program


def generate_answers(
    engine: Engine, records: list[Mapping[str, Any]], name: str, variant: str, out: Path
) -> dict[str, str]:
    """The answer to every record, by id: those in the file, and the others now."""
    file = out / f"{name}-{variant}.jsonl"
    there = dict(_read(file))
    missing = [r for r in records if r["id"] not in there]
    programs = [answer(engine, record, MODES[variant]) for record in missing]
    with file.open("a", encoding="utf-8") as opened:
        for count, outcome in enumerate(run_concurrently(engine, programs, max_programs=12, max_requests=160), 1):
            if outcome.error is not None:
                raise outcome.error
            there[missing[outcome.index]["id"]] = outcome.value
            print(json.dumps({"id": missing[outcome.index]["id"], "text": outcome.value}), file=opened, flush=True)
            if count % 10 == 0:
                print(f"... {name}, {variant}: {count} of {len(missing)}", flush=True)
    engine.clear_cache()
    return there


def _read(file: Path) -> Iterator[tuple[str, str]]:
    for line in file.read_text(encoding="utf-8").split("\n") if file.exists() else []:
        if line:
            record = json.loads(line)
            yield record["id"], record["text"]


def score(record: Mapping[str, Any], text: str) -> float:
    return best_score(task_of(record), text, answers_of(record), record.get("all_classes") or ())


def compare_answers(
    records: list[Mapping[str, Any]], whole: Mapping[str, str], modules: Mapping[str, str]
) -> dict[str, Any]:
    before, after = ([score(r, one[r["id"]]) for r in records] for one in (whole, modules))
    same = fmean(normalize_text(whole[r["id"]]) == normalize_text(modules[r["id"]]) for r in records)
    return {
        "n": len(records),
        "documents": fmean(len(documents_of(r)) for r in records),
        "whole": asdict(mean(before)),
        "modules": asdict(mean(after)),
        "difference": asdict(difference(after, before)),
        "same": same,
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--model", required=True)
    options.add_argument("--data", type=Path, required=True)
    options.add_argument("--out", type=Path, default=Path("out/prompt-cache-quality"))
    options.add_argument("--only", nargs="*", default=list(DATA))
    options.add_argument("--tasks", nargs="*", help="of LongBench; default: all in the files")
    options.add_argument("--longest", type=int, default=4000, help="words of a record's documents")
    options.add_argument("--limit", type=int, default=None)
    options.add_argument("--dtype", default="bfloat16", help="float32 is faster where bfloat16 is emulated")
    given = options.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    config = EngineConfig(cache=CacheConfig(capacity=120_000))
    engine = Engine.from_pretrained(given.model, dtype=given.dtype, config=config)
    result: dict[str, Any] = {}
    for name in given.only:
        every = read_records(given.data / f"{name}.jsonl")
        every = [r for r in every if not given.tasks or r.get("task", name) in given.tasks]
        short = [r for r in every if sum(len(t.split()) for t in documents_of(r)) <= given.longest]
        chosen_records = short[: given.limit]
        texts = {how: generate_answers(engine, chosen_records, name, how, given.out) for how in MODES}
        for task in sorted({r.get("task", name) for r in chosen_records}):
            chosen = [r for r in chosen_records if r.get("task", name) == task]
            label = task if task == name else f"LongBench {task}"
            left_out = sum(r.get("task", name) == task for r in every) - sum(r.get("task", name) == task for r in short)
            measure = METRICS[task_of(chosen[0])][0]
            facts = {"measure": measure, "longest": given.longest, "too_long": left_out, "commit": commit()}
            result[label] = {**facts, **compare_answers(chosen, texts["whole"], texts["modules"])}
            one = result[label]
            gap = one["difference"]
            print(
                f"{label}: n {one['n']}, {measure} whole {100 * one['whole']['value']:.1f}, modules "
                f"{100 * one['modules']['value']:.1f}, difference {100 * gap['value']:+.1f} "
                f"({100 * gap['low']:+.1f} to {100 * gap['high']:+.1f}), same {100 * one['same']:.0f}%",
                flush=True,
            )
    save(
        "prompt_cache_quality",
        [],
        Path(given.model).stem,
        tables=merge_results("prompt_cache_quality", "tables", result),
    )


if __name__ == "__main__":
    main()
