"""Run a workflow over examples and conditions, concurrently and resumably."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...api.concurrency import run_concurrently
from ...api.engine import Engine
from ...api.message import Message
from ...errors import CacheFullError, ConfigError, DataError, RequestFailedError
from ...outputs import BASE_MODEL
from ...sampling_params import SamplingParams
from ..workflows import WorkflowFunction, check_options, conditions_of, source_modules
from ..workflows.run import Condition, WorkflowRun, call_workflow
from .datasets import Example
from .metrics import SCORING_VERSION
from .run_dir import RunDirectory, RunRecord, exclusive_dir

if TYPE_CHECKING:
    from .ray_workers import RayWorkers


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
    """Return the settings that determine a result, except this package's code.

    Raises ConfigError for an option that every condition but the baseline sets, or for an unknown model.
    """
    _, *others = conditions_of(workflow).values()
    if fixed := sorted(options.keys() & set.intersection(*(set(c.options) for c in others)) if others else ()):
        raise ConfigError(f"options {fixed}: the workflow's conditions set them: leave them out, name conditions")
    described = {key: asdict(condition) for key, condition in conditions.items()}
    for condition in described.values():
        if (model := condition.pop("model")) not in engine.models:
            raise ConfigError(f"a condition on model {model!r}: the engine has {list(engine.models)}: give an adapter")
        if model != BASE_MODEL:  # the fingerprint of the engine names the base model
            condition["model"] = engine.core.model_set.fingerprint(model)
        if not condition["adapter_stages"]:
            del condition["adapter_stages"]
    tasks = json.dumps([[e.id, e.task] for e in examples], ensure_ascii=False)
    return {
        "workflow": name,
        "source": source_hash(workflow),
        **describe_engine(engine),
        "examples": len(examples),
        "data": hashlib.sha256(tasks.encode()).hexdigest()[:16],
        "conditions": described,
        "sampling": {k: v for k, v in asdict(sampling).items() if v != getattr(SamplingParams(), k)},
        "options": dict(options),
        "seed": seed,
    }


def describe_engine(engine: Engine) -> dict[str, Any]:
    """Return what of an engine determines a result."""
    describe = getattr(engine, "describe", None)  # of a server, whose model is not in this process
    if describe is not None:
        return dict(describe())
    return {
        "model": engine.model_info.name,
        "fingerprint": engine.model_info.fingerprint,
        "weights": engine.core.hf_model.sampled_weights_hash,
        "engine": {
            "backend": engine.core.backend.name,
            "compile": engine.core.config.compile,
            "quantization": engine.core.config.quantization,
        },
        "dtype": engine.model_info.dtype_name,
    }


def source_hash(workflow: WorkflowFunction) -> str:
    """Return a hash of the source files of a workflow."""
    files = [names["__file__"] for names in source_modules(workflow) if "__file__" in names]
    return hashlib.sha256(b"".join(Path(file).read_bytes() for file in files)).hexdigest()[:16] if files else ""


def example_seed(seed: int, example: str) -> int:
    """Return the seed of one example, equal under every condition."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{example}".encode()).digest()[:7], "big")


# yields a record of each example; the records of the baseline are None if it has to read none
RunFunction = Callable[[Engine, Sequence[Example], Mapping[str, RunRecord] | None], Iterator[RunRecord]]


def run_examples(
    function: RunFunction,
    engine: Engine,
    workers: "RayWorkers | None",
    examples: Sequence[Example],
    baseline: Mapping[str, RunRecord] | None,
    *,
    max_examples: int,
) -> Iterator[RunRecord]:
    """Yield a record of each example as it ends.

    Args:
        workers: run the examples instead of `engine`.
    """
    if workers is None:
        return function(engine, examples, baseline)
    return workers.run(function, examples, baseline, max_examples=max_examples)


@dataclass(frozen=True)
class ExampleRunner:
    """Settings under which examples run, on any engine."""

    workflow: WorkflowFunction
    sampling: SamplingParams
    seed: int
    options: Mapping[str, Any]  # of the workflow, without a condition's
    make_record: Callable[[Example, WorkflowRun, Message], RunRecord]  # of a finished run
    concurrency: int  # examples that run at once
    max_requests: int  # requests in flight at once

    def run(
        self,
        condition: Condition,
        engine: Engine,
        examples: Sequence[Example],
        baseline: Mapping[str, RunRecord] | None,
    ) -> Iterator[RunRecord]:
        """Yield a record of each example as it ends.

        Args:
            baseline: records by example, for the stages that the condition replays; None: it replays none.
        """
        pending, max_programs = list(examples), self.concurrency
        engine.clear_cache()
        while pending:
            batch, pending = pending, []
            programs = (partial(self._run_example, engine, condition, e, baseline) for e in batch)
            for outcome in run_concurrently(
                engine, programs, max_programs=max_programs, max_requests=self.max_requests
            ):
                example, error = batch[outcome.index], outcome.error
                if isinstance(error, (CacheFullError, RequestFailedError)) and max_programs > 1:
                    pending.append(example)
                else:
                    yield outcome.value or {"id": example.id, "error": f"{type(error).__name__}: {error}"}
            max_programs = 1

    def _run_example(
        self, engine: Engine, condition: Condition, example: Example, baseline: Mapping[str, RunRecord] | None
    ) -> RunRecord:
        replay = None if baseline is None else _replayed_tokens(example, condition, baseline[example.id])
        model, seed = condition.base_or_adapter, example_seed(self.seed, example.id)
        # a client of its own: token counts must not depend on which examples run together
        with engine.session(mode=condition.mode, seed=seed, client_id=example.id, model=model) as session:
            run = WorkflowRun(session, sampling=self.sampling, replay=replay, **condition.adapter_kwargs())
            answer = call_workflow(self.workflow, run, example.task, {**self.options, **condition.options})
            return self.make_record(example, run, answer)


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
    workers: "RayWorkers | None" = None,
) -> dict[str, list[RunRecord]]:
    """Return a record per example and condition; run missing ones.

    Args:
        concurrency: Examples that run at once. Those that do not fit into the cache together run again, alone.
        max_requests: Requests in flight at once.
        on_done: Called with the condition and each new record.
        record: Makes the record of a finished run; `make_record` by default.
        workers: Run the examples instead of `engine`.
    """
    if repeated := sorted(id for id, count in Counter(e.id for e in examples).items() if count > 1):
        raise DataError(f"several examples have the ids {repeated[:5]}: give each its own")
    runner = ExampleRunner(workflow, sampling, seed, options or {}, record or make_record, concurrency, max_requests)
    result: dict[str, dict[str, RunRecord]] = {}
    with exclusive_dir(run_dir.path):
        for condition in conditions.values():
            check_options(workflow, {**runner.options, **condition.options})
        for name, condition in conditions.items():
            baseline = next(iter(result.values()), None) if condition.replayed_stages else None
            records = result[name] = {r["id"]: r for r in run_dir.records(name) if not r.get("error")}
            missing = [e for e in examples if e.id not in records]
            for entry in run_examples(
                partial(runner.run, condition), engine, workers, missing, baseline, max_examples=concurrency
            ):
                run_dir.append(name, entry)
                records[entry["id"]] = entry
                on_done(name, entry)
            completed = [r for r in records.values() if not r.get("error")]
            if completed and condition.adapter_stages:
                condition.check_adapter_stages(stage for r in completed for stage in r["tokens"])
    return {name: [records[e.id] for e in examples] for name, records in result.items()}


def _replayed_tokens(example: Example, condition: Condition, baseline: RunRecord) -> dict[str, Any]:
    """Return the tokens that a condition copies from the baseline."""
    stages = condition.replayed_stages
    if baseline.get("error"):
        raise RequestFailedError(f"{example.id}: the run to copy {stages} from failed")
    if unknown := sorted(set(stages) - baseline["tokens"].keys()):
        raise DataError(f"{example.id}: copies {unknown}: the run to copy has the stages {sorted(baseline['tokens'])}")
    return {stage: baseline["tokens"][stage] for stage in stages}


def make_record(example: Example, run: WorkflowRun, answer: Message) -> RunRecord:
    """Return a finished run as JSON."""
    texts: dict[str, list[str]] = {}
    for stage, message in run.calls:
        if message.kind == "decode":
            texts.setdefault(stage, []).append(message.text)
    usage = [message.result().usage for _, message in run.calls]
    return {
        "id": example.id,
        "task": example.task,
        "scoring": SCORING_VERSION,  # rules by which the workflow read its outputs
        "answer": answer.text,
        "finish": answer.finish_reason,
        "texts": texts,
        "tokens": run.transcript(),
        "encoded": sum(u.computed_tokens for u in usage),
        "cached": sum(u.cached_tokens for u in usage),
        "findings": dict(run.outputs),
        "unparseable": dict(run.parse_failures),
    }
