"""Answers from documents that are modules of their own, against the same prompts read whole (Prompt Cache, Table 1).

`make bench NAME=prompt_cache_quality ARGS="--model model.gguf --data folder"`. Every document of a record is a module;
the question is new text behind them. Greedy. F1 for questions, Rouge-L for summaries, paired; many records at once.
Records of more than `--longest` words are left out and counted. Answers lie in `--out`, so a run that was stopped
goes on.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from rouge_score.rouge_scorer import RougeScorer

from choreograph import CacheConfig, Engine, EngineConfig, SamplingParams
from choreograph.engine.concurrency import run_concurrently
from choreograph.evaluation.metrics import f1, normalize_text
from choreograph.evaluation.statistics import difference, mean
from choreograph.prompt_cache import Import, Prompt, PromptCache, Role, Schema, module, schema, system, user

from .common import commit, merge_results, save

DATA = {"hotpotqa": 95, "2wikimqa": 80, "musique": 95, "longbench_qa": 43, "longbench_summ": 80}
MODES = {"whole": "prefix", "modules": "choreographed"}
SUMMARY = "Write a one-page summary of all the documents."
_rouge = RougeScorer(["rougeL"], use_stemmer=True)


def texts_of(record: Mapping[str, Any]) -> list[str]:
    """The documents of a record; a single long context is one."""
    if "documents" in record:
        return [f"{d.get('title', '')}\n{d['text']}".strip() for d in record["documents"]]
    return [record["context"]]


def answers_of(record: Mapping[str, Any]) -> list[str]:
    return list(record.get("answers") or [record["answer"], *record.get("answer_aliases", ())])


def is_summary(record: Mapping[str, Any]) -> bool:
    return record.get("task") in ("gov_report", "qmsum", "multi_news")


def make_schema_and_prompt(record: Mapping[str, Any]) -> tuple[Schema, Prompt]:
    """The schema of a record, and the prompt that imports all of it."""
    parts = [module(f"document-{i + 1}", f"Document {i + 1}: {t}\n\n") for i, t in enumerate(texts_of(record))]
    how = "Read the documents and do what is asked." if is_summary(record) else "Answer from the documents."
    question = record.get("question") or record.get("input") or SUMMARY
    if not is_summary(record):
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
    answers = answers_of(record)
    if is_summary(record):
        return max(_rouge.score(a, text)["rougeL"].fmeasure for a in answers)
    return f1(text, answers)


def compare_answers(
    records: list[Mapping[str, Any]], whole: Mapping[str, str], modules: Mapping[str, str]
) -> dict[str, Any]:
    before, after = ([score(r, one[r["id"]]) for r in records] for one in (whole, modules))
    same = fmean(normalize_text(whole[r["id"]]) == normalize_text(modules[r["id"]]) for r in records)
    return {
        "n": len(records),
        "documents": fmean(len(texts_of(r)) for r in records),
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
    options.add_argument("--longest", type=int, default=4000, help="words of a record's documents")
    options.add_argument("--limit", type=int, default=None)
    options.add_argument("--dtype", default="bfloat16", help="float32 is faster where bfloat16 is emulated")
    given = options.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    config = EngineConfig(cache=CacheConfig(capacity=120_000))
    engine = Engine.from_pretrained(given.model, dtype=given.dtype, config=config)
    result: dict[str, Any] = {}
    for name in given.only:
        lines = (given.data / f"{name}.jsonl").read_text(encoding="utf-8").split("\n")
        every = [json.loads(line) for line in lines if line]
        short = [r for r in every if sum(len(t.split()) for t in texts_of(r)) <= given.longest]
        records = short[: given.limit]
        texts = {how: generate_answers(engine, records, name, how, given.out) for how in MODES}
        for task in sorted({r.get("task", name) for r in records}):
            chosen = [r for r in records if r.get("task", name) == task]
            label = task if task == name else f"LongBench {task}"
            left_out = sum(r.get("task", name) == task for r in every) - sum(r.get("task", name) == task for r in short)
            measure = "Rouge-L" if is_summary(chosen[0]) else "F1"
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
