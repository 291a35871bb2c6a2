"""Lessons: the calls of a trace as they are made under reuse, saying what the baseline said. Computes nothing."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..choreographies import Workflow
from ..choreographies.performance import Condition
from ..errors import ConfigError, DataError
from ..models.adapter import Adapter
from ..onepass.calls import TracedCall, as_prompts, decodes_of, first_decode, for_readers, with_parents
from ..onepass.packed import Pack, pack, pack_reading
from ..onepass.rehearsal import Script, rehearse
from ..types import Mode, SamplingParams
from .traces import Trace


@dataclass(frozen=True)
class Lesson:
    """What is computed in one pass, and what it is to say. Its generated calls carry what the baseline gave them.
    reading: these alone are the adapter's, in the order of `for_readers`; what they see the base model encodes."""

    id: str
    calls: tuple[TracedCall, ...]
    reading: bool = False

    @property
    def packed(self) -> Pack:
        return pack_reading(self.calls) if self.reading else pack(self.calls)

    @property
    def targets(self) -> int:
        return sum(len(call.generated or ()) for call in self.calls)


def lessons_of(
    model: Adapter,
    workflow: Workflow,
    traces: Sequence[Trace],
    condition: Condition,
    *,
    sampling: SamplingParams | None = None,
    options: Mapping[str, Any] | None = None,
    stages: Collection[str] = (),
) -> list[Lesson]:
    """Each trace as the workflow runs under a condition; of one with readers, what they say, if they do. stages: those
    whose decodes are learned, with those that these see; every one if none are named."""
    check_stages(stages, traces, condition)
    scripts = [t.script for t in traces]
    found = dict(rehearse(model, workflow, scripts, condition, sampling=sampling or SamplingParams(), options=options))
    lessons = [Lesson(t.id, _with_readings(found[t.id], t.calls)) for t in traces]
    if stages:
        lessons = [replace(one, calls=tuple(with_parents(one.calls, stages))) for one in lessons]
    if condition.readers:
        lessons = [Lesson(one.id, tuple(for_readers(one.calls, condition.readers)), True) for one in lessons]
    return [one for one in lessons if one.targets] if stages or condition.readers else lessons


def check_stages(stages: Collection[str], traces: Sequence[Trace], condition: Condition) -> None:
    """Raises ConfigError for a stage to learn that says nothing, or that is no reader where some are."""
    said = {stage for trace in traces for stage in trace.content}
    known = said & set(condition.readers) if condition.readers else said
    if missing := sorted(set(stages) - known):
        what = "readers" if condition.readers else "stages that decode"
        raise ConfigError(f"stages {missing}: use {what}, {sorted(known)}")


def baseline_lessons(traces: Sequence[Trace], readers: Sequence[str] = (), mode: Mode = "prefix") -> list[Lesson]:
    """Each trace as the baseline computed it in its mode: every decode, or every reader's, behind its whole prompt; or
    behind what it saw, where the baseline reuses messages too."""

    def kept(call: TracedCall) -> TracedCall:
        said = call.generated is None or not readers or call.stage in readers
        return call if said else TracedCall(call.stage, call.tokens, call.start, call.parents)

    computed = [t.calls if mode == "choreographed" else as_prompts(t.calls) for t in traces]
    lessons = [Lesson(t.id, tuple(map(kept, calls))) for t, calls in zip(traces, computed, strict=True)]
    return [one for one in lessons if one.targets]


def answer_lessons(
    model: Adapter,
    direct: Workflow,
    traces: Sequence[Trace],
    *,
    options: Mapping[str, Any] | None = None,
) -> list[Lesson]:
    """The final answer of a whole workflow, to be given by one of a single decode (the paper's distilled baseline).
    Runs without an answer that could be read teach none."""
    taught = [(trace, tokens) for trace in traces if (tokens := _answer(model, trace))]
    scripts = [Script(trace.id, trace.task, _Only(tokens)) for trace, tokens in taught]
    found = rehearse(model, direct, scripts, Condition("choreographed"), sampling=SamplingParams(), options=options)
    calls = dict(found)
    for one in calls.values():
        if len(stages := [stage for (stage, _), _ in decodes_of(one)]) != 1:
            raise ConfigError(f"a workflow that decodes {stages}: a final answer is learned by one of a single decode")
    return [Lesson(trace.id, tuple(calls[trace.id])) for trace, _ in taught]


def _answer(model: Adapter, trace: Trace) -> list[int]:
    """The final message; of a workflow that reads its answer out of that, the answer as a sentence (footnote 14)."""
    if trace.findings is None:
        raise DataError(f"{trace.id}: a trace that does not tell what the workflow noted: make the traces again")
    if "answer" not in trace.findings:
        return trace.calls[trace.answer].generated or []
    if (answer := trace.findings["answer"]) is None:
        return []
    said = model.tokenizer(f"The answer is \\boxed{{{answer}}}.", add_special_tokens=False)["input_ids"]
    ends, usual = model.end_tokens, model.tokenizer.eos_token_id
    return [*said, *([usual] if usual in ends else ends[:1])]


def joined(lessons: Sequence[Lesson]) -> Lesson:
    """Several lessons as one, in which equal prefills are one, as they are one encoding. All of them read, or none."""
    if len(lessons) == 1:
        return lessons[0]
    reading = lessons[0].reading
    assert all(one.reading == reading for one in lessons), "readers' lessons among others"
    found: list[TracedCall] = []
    known: dict[object, int] = {}
    parts = [(one.calls[:at], one.calls[at:]) for one in lessons for at in [first_decode(one.calls)]]
    numbers: list[list[int]] = [[] for _ in lessons]  # of each lesson's calls, among all
    for part in range(2):
        if reading:
            known = {}  # what the adapter computes is not what the base does
        for calls, own in zip(parts, numbers, strict=True):
            for call in calls[part]:
                parents = tuple(seen._replace(call=own[seen.call]) for seen in call.parents)
                name = (tuple(call.prompt), call.start, parents) if call.generated is None else len(found)
                if name not in known:
                    known[name] = len(found)
                    found.append(replace(call, parents=parents))
                own.append(known[name])
    return Lesson(", ".join(one.id for one in lessons), tuple(found), reading)


class _Only(dict[str, list[list[int]]]):
    """The content of a workflow with one decode, whatever the name of its stage. One that takes more gets the same
    again, and is refused by their number."""

    def __init__(self, tokens: list[int]) -> None:
        super().__init__()
        self._tokens = tokens

    def __contains__(self, stage: object) -> bool:
        return True

    def __getitem__(self, stage: str) -> list[list[int]]:
        return [self._tokens] * 256


def _with_readings(calls: Sequence[TracedCall], heard: Sequence[TracedCall]) -> tuple[TracedCall, ...]:
    """The calls with the log-probabilities that the baseline gave to the same messages."""
    readings = dict(decodes_of(heard))
    names = {id(call): name for name, call in decodes_of(calls)}

    def read(call: TracedCall) -> TracedCall:
        name = names.get(id(call))
        return call if name is None else replace(call, logprobs=readings[name].logprobs, top=readings[name].top)

    return tuple(map(read, calls))
