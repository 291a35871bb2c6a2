"""Runs a workflow over examples under conditions, many at once, and keeps every run as a line of JSON.

Owns the folder of a run: `settings.json` says what was run, `<condition>.jsonl` holds one record an example. A run
that is started again does only what is missing; one with other settings is refused. Scores nothing.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..choreographies import Performance, Workflow
from ..choreographies.performance import Condition
from ..core import Engine
from ..errors import ConfigError, DataError
from ..measure import check_options
from ..together import together
from ..types import SamplingParams
from .data import Example

Record = dict[str, Any]


class Folder:
    """The files of one run."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        wanted, file = json.loads(json.dumps(settings)), path / "settings.json"
        if file.exists():
            had = json.loads(file.read_text())
            differ = sorted(k for k in had.keys() | wanted.keys() if had.get(k) != wanted.get(k))
            if differ:
                was = {k: had.get(k) for k in differ}
                raise ConfigError(f"{path} holds a run with other settings {was}: use another folder, or remove it")
        else:
            file.write_text(json.dumps(wanted, indent=1) + "\n")

    def file(self, condition: str) -> Path:
        return self.path / f"{condition.replace(' ', '-')}.jsonl"

    def records(self, condition: str) -> list[Record]:
        """What is done already. A last line that was cut off is removed; any other damage is an error."""
        file = self.file(condition)
        if not file.exists():
            return []
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        if lines and not lines[-1].endswith("\n"):
            file.write_text("".join(lines[:-1]), encoding="utf-8")
            lines.pop()
        try:
            return [json.loads(line) for line in lines]
        except json.JSONDecodeError as problem:
            raise DataError(f"{file}: a damaged record ({problem}); remove the line") from None

    def add(self, condition: str, record: Record) -> None:
        with self.file(condition).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def settings_of(
    engine: Engine,
    name: str,
    examples: Sequence[Example],
    conditions: Mapping[str, Condition],
    *,
    sampling: SamplingParams,
    seed: int,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """All that a result depends on."""
    asked = json.dumps([[e.id, e.task] for e in examples], ensure_ascii=False)
    return {
        "workflow": name,
        "model": engine.facts.name,
        "fingerprint": engine.facts.fingerprint,
        "dtype": str(engine.facts.dtype).removeprefix("torch."),
        "examples": len(examples),
        "data": hashlib.sha256(asked.encode()).hexdigest()[:16],
        "conditions": {k: asdict(c) for k, c in conditions.items()},
        "sampling": {k: v for k, v in asdict(sampling).items() if v != getattr(SamplingParams(), k)},
        "options": dict(options),
        "seed": seed,
    }


def run_conditions(
    engine: Engine,
    workflow: Workflow,
    examples: Sequence[Example],
    conditions: Mapping[str, Condition],
    folder: Folder,
    *,
    sampling: SamplingParams,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    at_once: int = 32,
    calls: int = 128,
    on_done: Callable[[str, Record], None] = lambda condition, record: None,
) -> dict[str, list[Record]]:
    """Every example under every condition, in order; the records of each condition in the order of the examples."""
    found: dict[str, dict[str, Record]] = {}
    before: Mapping[str, Record] = {}
    for name, condition in conditions.items():
        given = {**(options or {}), **condition.options}
        check_options(workflow, given)
        first = next(iter(found.values()), before)
        found[name] = {r["id"]: r for r in folder.records(name)}
        missing = [e for e in examples if e.id not in found[name]]
        programs = (
            _program(
                engine, workflow, e, condition, given, sampling, seed, first.get(e.id) if condition.copies else None
            )
            for e in missing
        )
        engine.clear_cache()
        for outcome in together(engine, programs, at_once=at_once, calls=calls):
            example = missing[outcome.index]
            record = outcome.value or {"id": example.id, "error": f"{type(outcome.error).__name__}: {outcome.error}"}
            folder.add(name, record)
            found[name][example.id] = record
            on_done(name, record)
    return {name: [records[e.id] for e in examples] for name, records in found.items()}


def seed_of(seed: int, example: str) -> int:
    """The seed of one example: the same under every condition, whatever else runs."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{example}".encode()).digest()[:7], "big")


def _program(
    engine: Engine,
    workflow: Workflow,
    example: Example,
    condition: Condition,
    options: Mapping[str, Any],
    sampling: SamplingParams,
    seed: int,
    copied: Record | None,
) -> Callable[[], Record]:
    def program() -> Record:
        forced = {s: copied["tokens"][s] for s in condition.copies} if copied and "tokens" in copied else None
        with engine.session(mode=condition.mode, seed=seed_of(seed, example.id)) as session:
            p = Performance(session, sampling=sampling, forced=forced)
            answer = workflow(p, example.task, **options)
            return record_of(example, p, answer.text)

    return program


def record_of(example: Example, p: Performance, answer: str) -> Record:
    """A finished performance as JSON: what was said and by how many tokens, what was found and not understood."""
    record: Record = {"id": example.id, "answer": answer, "texts": {}, "tokens": p.content(), "cut": {}}
    for stage, message in decodes(p):
        record["texts"].setdefault(stage, []).append(message.text)
        record["cut"][stage] = record["cut"].get(stage, 0) + (message.finish_reason == "length")
    usage = [message.result().usage for _, message in p.steps]
    record["encoded"] = sum(u.encoded_tokens for u in usage)
    record["cached"] = sum(u.cached_tokens for u in usage)
    record["findings"], record["unparseable"] = dict(p.findings), dict(p.unparseable)
    return record


def decodes(p: Performance) -> Iterator[Any]:
    return (step for step in p.steps if step.message.kind == "decode")
