"""Examples: the calls of a trace as they are made under reuse, saying what the baseline said. Computes nothing."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..engine.engine import Engine
from ..engine.message import Message
from ..errors import ConfigError, DataError
from ..evaluation.datasets import Example
from ..evaluation.run_dir import RunDirectory, RunRecord, read_json_object, read_lines
from ..evaluation.runner import evaluate_conditions, example_seed, make_run_config
from ..models.hf_model import HFModel
from ..outputs import Mode
from ..sampling_params import SamplingParams
from ..workflows import WorkflowFunction, conditions_of
from ..workflows.run import Condition, Transcript, WorkflowRun
from .dry_run import TaskTranscript, dry_run
from .packed_forward import PackedTrace, pack, pack_adapter_stages
from .trace import (
    VERSION,
    TracedCall,
    as_full_prompts,
    first_decode_index,
    from_json,
    iter_decodes,
    split_adapter_stages,
    to_json,
    trace_calls,
    with_ancestors,
)

TRACE_FILE = "traces"


@dataclass(frozen=True)
class Trace:
    """One run of a workflow. answer: the number of the call that gave the answer; findings: what the workflow noted, if
    that is known."""

    id: str
    task: Any
    seed: int
    calls: tuple[TracedCall, ...]
    answer: int
    outputs: Mapping[str, Any] | None = None

    @property
    def transcript(self) -> Transcript:
        """What was said, per stage in order."""
        said: dict[str, list[list[int]]] = {}
        for call in self.calls:
            if call.generated is not None:
                said.setdefault(call.stage, []).append(call.generated)
        return said

    @property
    def task_transcript(self) -> TaskTranscript:
        return TaskTranscript(self.id, self.task, self.transcript)

    @property
    def logprobs(self) -> list[float]:
        return [value for call in self.calls for value in call.logprobs]


def collect_traces(
    engine: Engine,
    name: str,
    workflow: WorkflowFunction,
    examples: Sequence[Example],
    out: Path,
    *,
    sampling: SamplingParams | None = None,
    top: int = 0,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    concurrency: int = 32,
    on_done: Callable[[str, RunRecord], None] = lambda condition, record: None,
) -> list[Trace]:
    """Runs the workflow on its baseline over all examples; at temperature 1 if no sampling is given.

    top: how many of the likeliest tokens to keep behind every token, for the divergence as a loss.
    """
    sampling = replace(sampling or SamplingParams(), logprobs=top)
    baseline = {TRACE_FILE: next(iter(conditions_of(workflow).values()))}
    settings = make_run_config(
        engine, name, workflow, examples, baseline, sampling=sampling, seed=seed, options=options or {}
    )

    def record(example: Example, p: WorkflowRun, answer: Message) -> RunRecord:
        calls = trace_calls(p.calls)
        decodes = [number for number, call in enumerate(calls) if call.generated is not None]
        said = [message.id for _, message in p.calls if message.kind == "decode"]
        if answer.id not in said:
            raise DataError(f"{example.id}: the answer of a workflow must be one of its {len(said)} decodes")
        return {
            "version": VERSION,
            "id": example.id,
            "task": example.task,
            "seed": example_seed(seed, example.id),
            "answer": decodes[said.index(answer.id)],
            "findings": p.outputs,
            "calls": to_json(calls),
        }

    folder = RunDirectory(out, settings)
    evaluate_conditions(
        engine,
        workflow,
        examples,
        baseline,
        folder,
        sampling=sampling,
        seed=seed,
        options=options,
        concurrency=concurrency,
        on_done=on_done,
        record=record,
    )
    result = {trace.id: trace for trace in load_traces(out)[1]}
    return [result[example.id] for example in examples if example.id in result]


def load_traces(out: Path) -> tuple[dict[str, Any], list[Trace]]:
    """The settings of a folder of traces, and its traces. Runs that failed are left out, and a last line that was cut
    off."""
    file, settings = out / f"{TRACE_FILE}.jsonl", out / "settings.json"
    if not file.is_file() or not settings.is_file():
        raise DataError(f"{out}: no traces; make them with `choreograph trace`")
    result: dict[str, Trace] = {}
    for line in filter(str.strip, read_lines(file)[0]):
        try:
            record = json.loads(line)
            if not record.get("error"):
                calls = tuple(from_json(record.get("version"), record["calls"]))
                answer = range(len(calls))[record["answer"]]
                if answer != record["answer"] or calls[answer].generated is None:
                    raise ValueError(f"answer {record['answer']} is no decode")
                noted = dict(record["findings"]) if "findings" in record else None
                result[record["id"]] = Trace(record["id"], record["task"], record["seed"], calls, answer, noted)
        except (ValueError, LookupError, TypeError, AttributeError) as exc:
            raise DataError(f"{file}: a damaged trace ({exc!r}); remove the line") from None
    known = read_json_object(settings)
    if lacking := sorted({"model", "workflow", "source", "sampling", "options"} - known.keys()):
        raise DataError(f"{settings}: lacks {lacking}: make the traces again")
    return known, list(result.values())


@dataclass(frozen=True)
class TrainingExample:
    """What is computed in one pass, and what it is to say. Its generated calls carry what the baseline gave them.
    reading: these alone are the adapter's, in the order of `for_readers`; what they see the base model encodes."""

    id: str
    calls: tuple[TracedCall, ...]
    adapter_only: bool = False

    @property
    def packed(self) -> PackedTrace:
        return pack_adapter_stages(self.calls) if self.adapter_only else pack(self.calls)

    @property
    def num_targets(self) -> int:
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
    """Each trace as the workflow runs under a condition; of one with readers, what they say, if they do. stages: those
    whose decodes are learned, with those that these see; every one if none are named."""
    check_stages(stages, traces, condition)
    scripts = [t.task_transcript for t in traces]
    result = dict(dry_run(model, workflow, scripts, condition, sampling=sampling or SamplingParams(), options=options))
    examples = [TrainingExample(t.id, _with_baseline_logprobs(result[t.id], t.calls)) for t in traces]
    if stages:
        examples = [replace(one, calls=tuple(with_ancestors(one.calls, stages))) for one in examples]
    if condition.adapter_stages:
        examples = [
            TrainingExample(one.id, tuple(split_adapter_stages(one.calls, condition.adapter_stages)), True)
            for one in examples
        ]
    return [one for one in examples if one.num_targets] if stages or condition.adapter_stages else examples


def check_stages(stages: Collection[str], traces: Sequence[Trace], condition: Condition) -> None:
    """Raises ConfigError for a stage to learn that says nothing, or that is no reader where some are."""
    said = {stage for trace in traces for stage in trace.transcript}
    known = said & set(condition.adapter_stages) if condition.adapter_stages else said
    if missing := sorted(set(stages) - known):
        what = "readers" if condition.adapter_stages else "stages that decode"
        raise ConfigError(f"stages {missing}: use {what}, {sorted(known)}")


def baseline_examples(
    traces: Sequence[Trace], adapter_stages: Sequence[str] = (), mode: Mode = "prefix"
) -> list[TrainingExample]:
    """Each trace as the baseline computed it in its mode: every decode, or every reader's, behind its whole prompt; or
    behind what it saw, where the baseline reuses messages too."""

    def kept(call: TracedCall) -> TracedCall:
        said = call.generated is None or not adapter_stages or call.stage in adapter_stages
        return call if said else TracedCall(call.stage, call.tokens, call.start, call.parents)

    computed = [t.calls if mode == "choreographed" else as_full_prompts(t.calls) for t in traces]
    examples = [TrainingExample(t.id, tuple(map(kept, calls))) for t, calls in zip(traces, computed, strict=True)]
    return [one for one in examples if one.num_targets]


def answer_examples(
    model: HFModel,
    workflow: WorkflowFunction,
    traces: Sequence[Trace],
    *,
    options: Mapping[str, Any] | None = None,
) -> list[TrainingExample]:
    """The final answer of a whole workflow, to be given by one of a single decode (the paper's distilled baseline).
    Runs without an answer that could be read teach none."""
    taught = [(trace, tokens) for trace in traces if (tokens := _answer_tokens(model, trace))]
    scripts = [TaskTranscript(trace.id, trace.task, _RepeatedAnswer(tokens)) for trace, tokens in taught]
    result = dry_run(model, workflow, scripts, Condition("choreographed"), sampling=SamplingParams(), options=options)
    calls = dict(result)
    for one in calls.values():
        if len(stages := [stage for (stage, _), _ in iter_decodes(one)]) != 1:
            raise ConfigError(f"a workflow that decodes {stages}: a final answer is learned by one of a single decode")
    return [TrainingExample(trace.id, tuple(calls[trace.id])) for trace, _ in taught]


def _answer_tokens(model: HFModel, trace: Trace) -> list[int]:
    """The final message; of a workflow that reads its answer out of that, the answer as a sentence (footnote 14)."""
    if trace.outputs is None:
        raise DataError(f"{trace.id}: a trace that does not tell what the workflow noted: make the traces again")
    if "answer" not in trace.outputs:
        return trace.calls[trace.answer].generated or []
    if (answer := trace.outputs["answer"]) is None:
        return []
    said = model.tokenizer(f"The answer is \\boxed{{{answer}}}.", add_special_tokens=False)["input_ids"]
    ends, usual = model.eos_token_ids, model.tokenizer.eos_token_id
    return [*said, *([usual] if usual in ends else ends[:1])]


def concat_examples(examples: Sequence[TrainingExample]) -> TrainingExample:
    """Several examples as one, in which equal prefills are one, as they are one encoding. All of them read, or none."""
    if len(examples) == 1:
        return examples[0]
    reading = examples[0].adapter_only
    assert all(one.adapter_only == reading for one in examples), "readers' lessons among others"
    result: list[TracedCall] = []
    known: dict[object, int] = {}
    parts = [(one.calls[:at], one.calls[at:]) for one in examples for at in [first_decode_index(one.calls)]]
    numbers: list[list[int]] = [[] for _ in examples]  # of each example's calls, among all
    for part in range(2):
        if reading:
            known = {}  # what the adapter computes is not what the base does
        for calls, own in zip(parts, numbers, strict=True):
            for call in calls[part]:
                parents = tuple(seen._replace(call=own[seen.call]) for seen in call.parents)
                name = (tuple(call.prompt), call.start, parents) if call.generated is None else len(result)
                if name not in known:
                    known[name] = len(result)
                    result.append(replace(call, parents=parents))
                own.append(known[name])
    return TrainingExample(", ".join(one.id for one in examples), tuple(result), reading)


class _RepeatedAnswer(dict[str, list[list[int]]]):
    """The content of a workflow with one decode, whatever the name of its stage. One that takes more gets the same
    again, and is refused by their number."""

    def __init__(self, tokens: list[int]) -> None:
        super().__init__()
        self._tokens = tokens

    def __contains__(self, stage: object) -> bool:
        return True

    def __getitem__(self, stage: str) -> list[list[int]]:
        return [self._tokens] * 256


def _with_baseline_logprobs(
    calls: Sequence[TracedCall], baseline_calls: Sequence[TracedCall]
) -> tuple[TracedCall, ...]:
    """The calls with the log-probabilities that the baseline gave to the same messages."""
    readings = dict(iter_decodes(baseline_calls))
    names = {id(call): name for name, call in iter_decodes(calls)}

    def read(call: TracedCall) -> TracedCall:
        name = names.get(id(call))
        return call if name is None else replace(call, logprobs=readings[name].logprobs, top=readings[name].top)

    return tuple(map(read, calls))
