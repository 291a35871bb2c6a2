"""Runs a workflow over examples under conditions, many at once, and keeps every run in a folder. Scores nothing.

A run that is started again does only what is missing.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..choreographies import Performance, Workflow, check_options, conditions_of, files_of
from ..choreographies.performance import Condition
from ..core import Engine
from ..errors import CacheFull, CallFailed, ConfigError, DataError
from ..measure import answered
from ..message import Message
from ..together import Outcome, together
from ..types import BASE, SamplingParams
from .data import Example
from .folder import Folder, Record, alone


def settings_of(
    engine: Engine,
    name: str,
    workflow: Workflow,
    examples: Sequence[Example],
    conditions: Mapping[str, Condition],
    *,
    sampling: SamplingParams,
    seed: int,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """All that a result depends on, but for the code of the package below the workflow. Raises ConfigError for options
    that every condition but the baseline sets itself."""
    _, *others = conditions_of(workflow).values()
    if twice := sorted(options.keys() & set.intersection(*(set(c.options) for c in others)) if others else ()):
        raise ConfigError(
            f"options {twice}: they tell the workflow's conditions apart: leave them out, name conditions"
        )
    asked = json.dumps([[e.id, e.task] for e in examples], ensure_ascii=False)
    return {
        "workflow": name,
        "source": source_of(workflow),
        "model": engine.facts.name,
        "fingerprint": engine.facts.fingerprint,
        "weights": engine.runner.adapter.weights,
        "engine": {
            "backend": engine.runner.backend.name,
            "compile": engine.runner.config.compile,
            "quantization": engine.runner.config.quantization,
        },
        "dtype": str(engine.facts.dtype).removeprefix("torch."),
        "examples": len(examples),
        "data": hashlib.sha256(asked.encode()).hexdigest()[:16],
        "conditions": {k: _condition(engine, c) for k, c in conditions.items()},
        "sampling": {k: v for k, v in asdict(sampling).items() if v != getattr(SamplingParams(), k)},
        "options": dict(options),
        "seed": seed,
    }


def _condition(engine: Engine, condition: Condition) -> dict[str, Any]:
    """The base model is not named: the fingerprint of all says which it is."""
    if condition.model not in engine.models:
        raise ConfigError(
            f"a condition on model {condition.model!r}: the engine has {list(engine.models)}; give an adapter"
        )
    described = asdict(condition)
    if described.pop("model") != BASE:
        described["model"] = engine.runner.family.fingerprint(condition.model)
    if not condition.readers:
        del described["readers"]
    return described


def source_of(workflow: Workflow) -> str:
    """A digest of the files of a workflow: other prompts make another run."""
    files = [names["__file__"] for names in files_of(workflow) if "__file__" in names]
    return hashlib.sha256(b"".join(Path(file).read_bytes() for file in files)).hexdigest()[:16] if files else ""


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
    record: Callable[[Example, Performance, Message], Record] | None = None,
) -> dict[str, list[Record]]:
    """Every example under every condition, in order; the records of each condition in the order of the examples.

    A run that failed is a record too, and is tried again when the folder is opened again. One that found the cache
    full of what others hold is repeated alone at once. record: what to keep of a run, `record_of` by default.
    """
    found: dict[str, dict[str, Record]] = {}
    if twice := sorted(id for id, count in Counter(e.id for e in examples).items() if count > 1):
        raise DataError(f"several examples have the ids {twice[:5]}: give each its own")
    with alone(folder.path):
        every = {name: {**(options or {}), **condition.options} for name, condition in conditions.items()}
        for given in every.values():
            check_options(workflow, given)
        for name, condition in conditions.items():
            given = every[name]
            first = next(iter(found.values()), None)
            found[name] = {r["id"]: r for r in folder.records(name) if not r.get("error")}
            missing = [e for e in examples if e.id not in found[name]]

            def program(e: Example, condition=condition, given=given, first=first) -> Callable[[], Record]:
                copied = first[e.id] if first is not None and condition.copies else None
                return _program(engine, workflow, e, condition, given, sampling, seed, copied, record or record_of)

            crowded = []
            engine.clear_cache()
            for outcome in together(engine, map(program, missing), at_once=at_once, calls=calls):
                example = missing[outcome.index]
                if isinstance(outcome.error, (CacheFull, CallFailed)) and at_once > 1:
                    crowded.append(example)
                    continue
                _keep(folder, name, example, outcome, found[name], on_done)
            for outcome in together(engine, map(program, crowded), at_once=1):
                _keep(folder, name, crowded[outcome.index], outcome, found[name], on_done)
            sound = [r for r in found[name].values() if not r.get("error")]
            if sound and condition.readers:
                condition.check_readers(stage for r in sound for stage in r["tokens"])
    return {name: [records[e.id] for e in examples] for name, records in found.items()}


def _keep(
    folder: Folder,
    condition: str,
    example: Example,
    outcome: Outcome,
    found: dict[str, Record],
    on_done: Callable[[str, Record], None],
) -> None:
    problem = f"{type(outcome.error).__name__}: {outcome.error}"
    record = outcome.value or {"id": example.id, "error": problem}
    folder.add(condition, record)
    found[example.id] = record
    on_done(condition, record)


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
    record: Callable[[Example, Performance, Message], Record],
) -> Callable[[], Record]:
    def program() -> Record:
        if copied is not None and copied.get("error"):
            raise CallFailed(f"{example.id}: the run to copy {condition.copies} from failed")
        if copied is not None and (unknown := sorted(set(condition.copies) - copied["tokens"].keys())):
            raise DataError(
                f"{example.id}: copies {unknown}: the run to copy has the stages {sorted(copied['tokens'])}"
            )
        forced = {stage: copied["tokens"][stage] for stage in condition.copies} if copied else None
        seeded = seed_of(seed, example.id)
        with engine.session(mode=condition.mode, seed=seeded, model=condition.writer) as session:
            p = Performance(session, sampling=sampling, forced=forced, **condition.reader())
            answer = answered(workflow, p, example.task, options)
            return record(example, p, answer)

    return program


def record_of(example: Example, p: Performance, answer: Message) -> Record:
    """A finished performance as JSON: what was said and by how many tokens, what was found and not understood."""
    record: Record = {"id": example.id, "answer": answer.text, "finish": answer.finish_reason, "texts": {}}
    record["tokens"] = p.content()
    for stage, message in p.steps:
        if message.kind == "decode":
            record["texts"].setdefault(stage, []).append(message.text)
    usage = [message.result().usage for _, message in p.steps]
    record["encoded"] = sum(u.encoded_tokens for u in usage)
    record["cached"] = sum(u.cached_tokens for u in usage)
    record["findings"], record["unparseable"] = dict(p.findings), dict(p.unparseable)
    return record
