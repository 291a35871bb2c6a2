"""Traces: recorded baseline runs of a workflow, with all their calls."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from ...api.engine import Engine
from ...api.message import Message
from ...errors import DataError
from ...sampling_params import SamplingParams
from ...utils import describe_validation_error
from ..replay.dry_run import TaskTranscript
from ..replay.traced_calls import TracedCall, check_parents, trace_calls
from ..workflows import WorkflowFunction, conditions_of
from ..workflows.run import Transcript, WorkflowRun
from .datasets import Example
from .experiment import Experiment, example_seed
from .ray_workers import RayWorkers
from .run_dir import RunDirectory, RunRecord, read_json_object, read_lines
from .runner import evaluate_conditions
from .splits import check_disjoint, shared_units, units_of

TRACE_FILE = "traces"


@dataclass(frozen=True)
class Trace:
    """One run of a workflow on its baseline; one line of `traces.jsonl`."""

    version: Literal[3]  # of the file format
    id: str
    task: Any
    seed: int
    calls: tuple[TracedCall, ...]
    answer: int  # index of the call that generated the final answer
    outputs: dict[str, Any]  # what the workflow recorded
    split: Literal["train", "validation"]
    units: tuple[str, ...]  # hashes of the questions, concepts or game, which no other split may contain

    @model_validator(mode="after")
    def _check_calls(self) -> "Trace":
        check_parents(self.calls)
        if not (0 <= self.answer < len(self.calls) and self.calls[self.answer].generated is not None):
            raise ValueError(f"answer={self.answer} is not the index of a decode")
        return self

    @property
    def transcript(self) -> Transcript:
        """Generated tokens of each decode by stage, in order."""
        result: dict[str, list[list[int]]] = {}
        for call in self.calls:
            if call.generated is not None:
                result.setdefault(call.stage, []).append(call.generated)
        return result

    @property
    def task_transcript(self) -> TaskTranscript:
        return TaskTranscript(self.id, self.task, self.transcript)

    @property
    def logprobs(self) -> list[float]:
        """Log-probabilities of all generated tokens."""
        return [value for call in self.calls for value in call.logprobs]


TRACE_ADAPTER = TypeAdapter(Trace)


def collect_traces(
    engine: Engine,
    name: str,
    workflow: WorkflowFunction,
    examples: Sequence[Example],
    out: Path,
    *,
    validation: Sequence[Example] = (),
    sampling: SamplingParams | None = None,
    top: int = 0,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    concurrency: int = 32,
    on_done: Callable[[str, RunRecord], None] = lambda condition, record: None,
    workers: RayWorkers | None = None,
) -> list[Trace]:
    """Run a workflow's baseline over examples and store the traces; resumable.

    Args:
        validation: further examples, whose traces `train_from_traces` validates on.
        sampling: defaults to temperature 1.
        top: likeliest tokens to keep at every generated token, for the divergence loss.
        workers: run the examples instead of `engine`.
    """
    check_disjoint({"training": units_of(examples), "validation": units_of(validation)})
    examples = [*examples, *validation]
    experiment = Experiment(
        name,
        workflow,
        {TRACE_FILE: next(iter(conditions_of(workflow).values()))},
        replace(sampling or SamplingParams(), logprobs=top),
        seed,
        options or {},
    )
    settings = experiment.settings(engine, examples) | {"validation": len(validation)}
    evaluate_conditions(
        engine,
        experiment,
        examples,
        RunDirectory(out, settings),
        concurrency=concurrency,
        on_done=on_done,
        record=partial(_make_trace, seed=seed, validation_ids=frozenset(e.id for e in validation)),
        workers=workers,
    )
    result = {trace.id: trace for trace in load_traces(out)[1]}
    return [result[example.id] for example in examples if example.id in result]


def _make_trace(
    example: Example, run: WorkflowRun, answer: Message, *, seed: int, validation_ids: Collection[str]
) -> RunRecord:
    """Return a finished run as a line of the traces."""
    calls = trace_calls(run.calls)
    decodes = [index for index, call in enumerate(calls) if call.generated is not None]
    ids = [message.id for _, message in run.calls if message.kind == "decode"]
    if answer.id not in ids:
        raise DataError(f"{example.id}: the answer of a workflow must be one of its {len(ids)} decodes")
    trace = Trace(
        version=3,
        id=example.id,
        task=example.task,
        seed=example_seed(seed, example.id),
        calls=tuple(calls),
        answer=decodes[ids.index(answer.id)],
        outputs=dict(run.outputs),
        split="validation" if example.id in validation_ids else "train",
        units=tuple(sorted(shared_units(example))),
    )
    return TRACE_ADAPTER.dump_python(trace, mode="json")


def load_traces(out: Path) -> tuple[dict[str, Any], list[Trace]]:
    """Return the settings and the traces of a folder, without failed runs."""
    file, settings_file = out / f"{TRACE_FILE}.jsonl", out / "settings.json"
    if not file.is_file() or not settings_file.is_file():
        raise DataError(f"{out}: no traces; make them with `choreograph trace`")
    result: dict[str, Trace] = {}  # by id; a repeated run replaces the earlier one
    for line in filter(str.strip, read_lines(file)[0]):
        try:
            record = json.loads(line)
            if isinstance(record, dict) and record.get("error"):
                continue
            trace = TRACE_ADAPTER.validate_python(record)
        except (ValueError, RecursionError) as exc:
            reason = describe_validation_error(exc) if isinstance(exc, ValidationError) else str(exc)
            raise DataError(
                f"{file}: damaged trace, or of another version of this package ({reason}): "
                "remove the line, or make the traces again"
            ) from None
        result[trace.id] = trace
    settings = read_json_object(settings_file)
    if missing := sorted({"model", "workflow", "source", "sampling", "options"} - settings.keys()):
        raise DataError(f"{settings_file}: lacks {missing}: make the traces again")
    return settings, list(result.values())
