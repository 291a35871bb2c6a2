"""Run a workflow over examples and conditions, concurrently and resumably."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...api.concurrency import run_concurrently
from ...api.engine import Engine
from ...api.message import Message
from ...errors import CacheFullError, DataError, RequestFailedError
from ..workflows import check_options
from ..workflows.run import Condition, WorkflowRun, call_workflow
from .datasets import Example
from .experiment import Experiment, RunFunction, example_seed
from .metrics import SCORING_VERSION
from .ray_workers import RayWorkers
from .run_dir import RunDirectory, RunRecord, exclusive_dir


def run_examples(
    function: RunFunction,
    engine: Engine,
    workers: RayWorkers | None,
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

    experiment: Experiment
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
        experiment = self.experiment
        model, seed = condition.base_or_adapter, example_seed(experiment.seed, example.id)
        # a client of its own: token counts must not depend on which examples run together
        with engine.session(mode=condition.mode, seed=seed, client_id=example.id, model=model) as session:
            run = WorkflowRun(session, sampling=experiment.sampling, replay=replay, **condition.adapter_kwargs())
            answer = call_workflow(experiment.workflow, run, example.task, {**experiment.options, **condition.options})
            return self.make_record(example, run, answer)


def evaluate_conditions(
    engine: Engine,
    experiment: Experiment,
    examples: Sequence[Example],
    run_dir: RunDirectory,
    *,
    concurrency: int = 32,
    max_requests: int = 128,
    on_done: Callable[[str, RunRecord], None] = lambda condition, record: None,
    record: Callable[[Example, WorkflowRun, Message], RunRecord] | None = None,
    workers: RayWorkers | None = None,
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
    runner = ExampleRunner(experiment, record or make_record, concurrency, max_requests)
    result: dict[str, dict[str, RunRecord]] = {}
    with exclusive_dir(run_dir.path):
        for condition in experiment.conditions.values():
            check_options(experiment.workflow, {**experiment.options, **condition.options})
        for name, condition in experiment.conditions.items():
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
