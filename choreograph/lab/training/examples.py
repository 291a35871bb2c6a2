"""Training examples, made from traces."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...attention.metadata import Alignment
from ...errors import ConfigError
from ...models.hf_model import HFModel
from ...outputs import Mode
from ...sampling_params import SamplingParams
from ..evaluation.traces import Trace
from ..replay.dry_run import TaskTranscript, dry_run
from ..replay.packed_forward import PackedTrace, pack, pack_adapter_stages
from ..replay.traced_calls import (
    TracedCall,
    as_full_prompts,
    first_decode_index,
    iter_decodes,
    split_adapter_stages,
    with_ancestors,
)
from ..workflows import WorkflowFunction
from ..workflows.run import Condition


@dataclass(frozen=True)
class TrainingExample:
    """Calls of a workflow under reuse, with the outputs of the baseline."""

    id: str
    calls: tuple[TracedCall, ...]  # generated tokens, log-probabilities and `top` are the baseline's
    adapter_only: bool = False  # calls are the result of `split_adapter_stages`
    alignment: Alignment | None = None  # of attention to reused messages

    @property
    def packed(self) -> PackedTrace:
        return (pack_adapter_stages if self.adapter_only else pack)(self.calls, self.alignment)

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
    name = ", ".join(example.id for example in examples)
    return TrainingExample(name, tuple(result), adapter_only, examples[0].alignment)
