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

from ..engine.concurrency import ProgramResult, run_concurrently
from ..engine.engine import Engine
from ..engine.message import Message
from ..errors import CacheFullError, ConfigError, DataError, RequestFailedError
from ..outputs import BASE_MODEL
from ..sampling_params import SamplingParams
from ..workflows import WorkflowFunction, check_options, conditions_of, source_modules
from ..workflows.run import Condition, WorkflowRun, call_workflow
from .datasets import Example
from .run_dir import RunDirectory, RunRecord, exclusive_dir


def make_run_config(
    engine: Engine,
    name: str,
    workflow: WorkflowFunction,
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
    requested = json.dumps([[e.id, e.task] for e in examples], ensure_ascii=False)
    return {
        "workflow": name,
        "source": source_hash(workflow),
        "model": engine.model_info.name,
        "fingerprint": engine.model_info.fingerprint,
        "weights": engine.core.hf_model.sampled_weights_hash,
        "engine": {
            "backend": engine.core.backend.name,
            "compile": engine.core.config.compile,
            "quantization": engine.core.config.quantization,
        },
        "dtype": str(engine.model_info.dtype).removeprefix("torch."),
        "examples": len(examples),
        "data": hashlib.sha256(requested.encode()).hexdigest()[:16],
        "conditions": {k: _describe_condition(engine, c) for k, c in conditions.items()},
        "sampling": {k: v for k, v in asdict(sampling).items() if v != getattr(SamplingParams(), k)},
        "options": dict(options),
        "seed": seed,
    }


def _describe_condition(engine: Engine, condition: Condition) -> dict[str, Any]:
    """The base model is not named: the fingerprint of all says which it is."""
    if condition.model not in engine.models:
        raise ConfigError(
            f"a condition on model {condition.model!r}: the engine has {list(engine.models)}; give an adapter"
        )
    described = asdict(condition)
    if described.pop("model") != BASE_MODEL:
        described["model"] = engine.core.model_set.fingerprint(condition.model)
    if not condition.adapter_stages:
        del described["adapter_stages"]
    return described


def source_hash(workflow: WorkflowFunction) -> str:
    """A digest of the files of a workflow: other prompts make another run."""
    files = [names["__file__"] for names in source_modules(workflow) if "__file__" in names]
    return hashlib.sha256(b"".join(Path(file).read_bytes() for file in files)).hexdigest()[:16] if files else ""


def evaluate_conditions(
    engine: Engine,
    workflow: WorkflowFunction,
    examples: Sequence[Example],
    conditions: Mapping[str, Condition],
    run_dir: RunDirectory,
    *,
    sampling: SamplingParams,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    concurrency: int = 32,
    max_requests: int = 128,
    on_done: Callable[[str, RunRecord], None] = lambda condition, record: None,
    record: Callable[[Example, WorkflowRun, Message], RunRecord] | None = None,
) -> dict[str, list[RunRecord]]:
    """Every example under every condition, in order; the records of each condition in the order of the examples.

    A run that failed is a record too, and is tried again when the folder is opened again. One that found the cache
    full of what others hold is repeated alone at once. record: what to keep of a run, `record_of` by default.
    """
    result: dict[str, dict[str, RunRecord]] = {}
    if twice := sorted(id for id, count in Counter(e.id for e in examples).items() if count > 1):
        raise DataError(f"several examples have the ids {twice[:5]}: give each its own")
    with exclusive_dir(run_dir.path):
        every = {name: {**(options or {}), **condition.options} for name, condition in conditions.items()}
        for given in every.values():
            check_options(workflow, given)
        for name, condition in conditions.items():
            given = every[name]
            first = next(iter(result.values()), None)
            result[name] = {r["id"]: r for r in run_dir.records(name) if not r.get("error")}
            missing = [e for e in examples if e.id not in result[name]]

            def program(e: Example, condition=condition, given=given, first=first) -> Callable[[], RunRecord]:
                copied = first[e.id] if first is not None and condition.replayed_stages else None
                return _make_program(
                    engine, workflow, e, condition, given, sampling, seed, copied, record or make_record
                )

            crowded = []
            engine.clear_cache()
            for outcome in run_concurrently(
                engine, map(program, missing), max_programs=concurrency, max_requests=max_requests
            ):
                example = missing[outcome.index]
                if isinstance(outcome.error, (CacheFullError, RequestFailedError)) and concurrency > 1:
                    crowded.append(example)
                    continue
                _store(run_dir, name, example, outcome, result[name], on_done)
            for outcome in run_concurrently(engine, map(program, crowded), max_programs=1):
                _store(run_dir, name, crowded[outcome.index], outcome, result[name], on_done)
            sound = [r for r in result[name].values() if not r.get("error")]
            if sound and condition.adapter_stages:
                condition.check_adapter_stages(stage for r in sound for stage in r["tokens"])
    return {name: [records[e.id] for e in examples] for name, records in result.items()}


def _store(
    run_dir: RunDirectory,
    condition: str,
    example: Example,
    outcome: ProgramResult,
    completed: dict[str, RunRecord],
    on_done: Callable[[str, RunRecord], None],
) -> None:
    exc = f"{type(outcome.error).__name__}: {outcome.error}"
    record = outcome.value or {"id": example.id, "error": exc}
    run_dir.append(condition, record)
    completed[example.id] = record
    on_done(condition, record)


def example_seed(seed: int, example: str) -> int:
    """The seed of one example: the same under every condition, whatever else runs."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{example}".encode()).digest()[:7], "big")


def _make_program(
    engine: Engine,
    workflow: WorkflowFunction,
    example: Example,
    condition: Condition,
    options: Mapping[str, Any],
    sampling: SamplingParams,
    seed: int,
    replayed: RunRecord | None,
    record: Callable[[Example, WorkflowRun, Message], RunRecord],
) -> Callable[[], RunRecord]:
    def program() -> RunRecord:
        if replayed is not None and replayed.get("error"):
            raise RequestFailedError(f"{example.id}: the run to copy {condition.replayed_stages} from failed")
        if replayed is not None and (unknown := sorted(set(condition.replayed_stages) - replayed["tokens"].keys())):
            raise DataError(
                f"{example.id}: copies {unknown}: the run to copy has the stages {sorted(replayed['tokens'])}"
            )
        forced = {stage: replayed["tokens"][stage] for stage in condition.replayed_stages} if replayed else None
        seeded = example_seed(seed, example.id)
        with engine.session(mode=condition.mode, seed=seeded, model=condition.base_or_adapter) as session:
            p = WorkflowRun(session, sampling=sampling, replay=forced, **condition.adapter_kwargs())
            answer = call_workflow(workflow, p, example.task, options)
            return record(example, p, answer)

    return program


def make_record(example: Example, run: WorkflowRun, answer: Message) -> RunRecord:
    """A finished performance as JSON: what was said and by how many tokens, what was found and not understood."""
    record: RunRecord = {"id": example.id, "answer": answer.text, "finish": answer.finish_reason, "texts": {}}
    record["tokens"] = run.transcript()
    for stage, message in run.calls:
        if message.kind == "decode":
            record["texts"].setdefault(stage, []).append(message.text)
    usage = [message.result().usage for _, message in run.calls]
    record["encoded"] = sum(u.computed_tokens for u in usage)
    record["cached"] = sum(u.cached_tokens for u in usage)
    record["findings"], record["unparseable"] = dict(run.outputs), dict(run.parse_failures)
    return record
