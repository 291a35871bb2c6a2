"""Traces of workflow runs, and training examples made from them."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass as pydantic_dataclass

from ...api.engine import Engine
from ...api.message import Message
from ...errors import ConfigError, DataError
from ...models.hf_model import HFModel
from ...outputs import Mode
from ...sampling_params import SamplingParams
from ...utils import describe_validation_error
from ..evaluation.datasets import Example
from ..evaluation.ray_workers import RayWorkers
from ..evaluation.run_dir import RunDirectory, RunRecord, read_json_object, read_lines
from ..evaluation.runner import evaluate_conditions, example_seed, make_run_config
from ..evaluation.splits import check_disjoint, shared_units, units_of
from ..workflows import WorkflowFunction, conditions_of
from ..workflows.run import Condition, Transcript, WorkflowRun
from .dry_run import TaskTranscript, dry_run
from .packed_forward import PackedTrace, pack, pack_adapter_stages
from .trace import (
    TracedCall,
    as_full_prompts,
    check_parents,
    first_decode_index,
    iter_decodes,
    split_adapter_stages,
    trace_calls,
    with_ancestors,
)

TRACE_FILE = "traces"


@pydantic_dataclass(frozen=True)
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
    sampling = replace(sampling or SamplingParams(), logprobs=top)
    baseline = {TRACE_FILE: next(iter(conditions_of(workflow).values()))}
    options = options or {}
    settings = make_run_config(
        engine, name, workflow, examples, baseline, sampling=sampling, seed=seed, options=options
    ) | {"validation": len(validation)}

    evaluate_conditions(
        engine,
        workflow,
        examples,
        baseline,
        RunDirectory(out, settings),
        sampling=sampling,
        seed=seed,
        options=options,
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
        except ValueError as exc:
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


@dataclass(frozen=True)
class TrainingExample:
    """Calls of a workflow under reuse, with the outputs of the baseline."""

    id: str
    calls: tuple[TracedCall, ...]  # generated tokens, log-probabilities and `top` are the baseline's
    adapter_only: bool = False  # calls are the result of `split_adapter_stages`

    @property
    def packed(self) -> PackedTrace:
        return pack_adapter_stages(self.calls) if self.adapter_only else pack(self.calls)

    @property
    def num_targets(self) -> int:
        """Number of generated tokens."""
        return sum(len(call.generated or ()) for call in self.calls)


def make_examples(
    model: HFModel,
    workflow: WorkflowFunction,
    traces: Sequence[Trace],
    condition: Condition,
    *,
    sampling: SamplingParams | None = None,
    options: Mapping[str, Any] | None = None,
    stages: Collection[str] = (),
) -> list[TrainingExample]:
    """Make a training example of each trace under a condition.

    With `stages` or adapter stages, traces without any of them are left out.

    Args:
        stages: learn from the decodes of these stages and their ancestors; empty: from all.
    """
    check_stages(stages, traces, condition)
    transcripts = [trace.task_transcript for trace in traces]
    sampling = sampling or SamplingParams()
    calls_by_id = dict(dry_run(model, workflow, transcripts, condition, sampling=sampling, options=options))
    result = []
    for trace in traces:
        baseline, names = dict(iter_decodes(trace.calls)), iter_decodes(calls_by_id[trace.id])
        calls = []
        for call in calls_by_id[trace.id]:
            if call.generated is not None:
                traced = baseline[next(names)[0]]
                call = replace(call, logprobs=traced.logprobs, top=traced.top)
            calls.append(call)
        if stages:
            calls = with_ancestors(calls, stages)
        if condition.adapter_stages:
            calls = split_adapter_stages(calls, condition.adapter_stages)
        result.append(TrainingExample(trace.id, tuple(calls), bool(condition.adapter_stages)))
    return [example for example in result if example.num_targets] if stages or condition.adapter_stages else result


def check_stages(stages: Collection[str], traces: Sequence[Trace], condition: Condition) -> None:
    """Raise ConfigError if a stage has no decodes to learn."""
    known = {stage for trace in traces for stage in trace.transcript}
    if condition.adapter_stages:
        known &= set(condition.adapter_stages)
    if missing := sorted(set(stages) - known):
        kind = "adapter stages" if condition.adapter_stages else "stages that decode"
        raise ConfigError(f"stages {missing}: use {kind}, {sorted(known)}")


def baseline_examples(
    traces: Sequence[Trace], adapter_stages: Sequence[str] = (), mode: Mode = "prefix"
) -> list[TrainingExample]:
    """Make a training example of each trace as the baseline computed it.

    Args:
        adapter_stages: stages whose decodes are targets; empty: all.
        mode: mode of the baseline.
    """
    result = []
    for trace in traces:
        calls = trace.calls if mode == "choreographed" else as_full_prompts(trace.calls)
        if adapter_stages:
            calls = [call if call.stage in adapter_stages else call.as_prefill() for call in calls]
        result.append(TrainingExample(trace.id, tuple(calls)))
    return [example for example in result if example.num_targets]


def answer_examples(
    model: HFModel, workflow: WorkflowFunction, traces: Sequence[Trace], *, options: Mapping[str, Any] | None = None
) -> list[TrainingExample]:
    """Make examples in which a single-decode workflow generates the final answers.

    Traces without a parsed answer are left out.
    """
    answers = {trace.id: _answer_tokens(model, trace) for trace in traces}
    transcripts = [TaskTranscript(t.id, t.task, _RepeatedAnswer(answers[t.id])) for t in traces if answers[t.id]]
    condition = Condition("choreographed")
    calls = dict(dry_run(model, workflow, transcripts, condition, sampling=SamplingParams(), options=options))
    for stages in ([stage for (stage, _), _ in iter_decodes(result)] for result in calls.values()):
        if len(stages) != 1:
            raise ConfigError(f"the workflow decodes {stages}: use one with a single decode to learn final answers")
    return [TrainingExample(transcript.id, tuple(calls[transcript.id])) for transcript in transcripts]


def _answer_tokens(model: HFModel, trace: Trace) -> list[int]:
    """Return the tokens of the final answer to learn.

    They are the final message, or the parsed answer as a sentence (footnote 14).
    """
    if "answer" not in trace.outputs:
        return trace.calls[trace.answer].generated or []
    if (answer := trace.outputs["answer"]) is None:
        return []
    tokens = model.tokenizer(f"The answer is \\boxed{{{answer}}}.", add_special_tokens=False)["input_ids"]
    ends, default = model.eos_token_ids, model.tokenizer.eos_token_id
    return [*tokens, *([default] if default in ends else ends[:1])]


class _RepeatedAnswer(dict[str, list[list[int]]]):
    """Transcript in which every decode of any stage generates the same answer."""

    def __init__(self, tokens: list[int]) -> None:
        super().__init__()
        self._tokens = tokens

    def __contains__(self, stage: object) -> bool:
        return True

    def __getitem__(self, stage: str) -> list[list[int]]:
        return [self._tokens] * 256


def concat_examples(examples: Sequence[TrainingExample]) -> TrainingExample:
    """Merge examples of the same kind; equal prefills become one call."""
    if len(examples) == 1:
        return examples[0]
    adapter_only = examples[0].adapter_only
    assert all(example.adapter_only == adapter_only for example in examples)
    result: list[TracedCall] = []
    seen: dict[object, int] = {}  # identity of a call to its index in the result
    indices: list[list[int]] = [[] for _ in examples]  # by example: index in the result of each of its calls
    for is_prefix in (True, False):
        if adapter_only and not is_prefix:
            seen = {}  # the adapter's prefills differ from the base model's
        for example, own in zip(examples, indices, strict=True):
            split = first_decode_index(example.calls)
            for call in example.calls[:split] if is_prefix else example.calls[split:]:
                parents = tuple(s._replace(call=own[s.call]) for s in call.parents)
                key = (tuple(call.prompt), call.start, parents) if call.generated is None else len(result)
                if key not in seen:
                    seen[key] = len(result)
                    result.append(replace(call, parents=parents))
                own.append(seen[key])
    return TrainingExample(", ".join(example.id for example in examples), tuple(result), adapter_only)
