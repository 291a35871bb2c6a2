"""Explanations of the decodes of a recorded workflow run."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ...api.engine import Engine
from ...errors import DataError
from ...features.explain import Explanation, MessageTokens, ParentExplanation, explain
from ..replay.dry_run import TaskTranscript
from ..workflows import WorkflowFunction, conditions_of
from ..workflows.run import WorkflowRun, call_workflow
from .run_dir import RunDirectory, read_json_object
from .traces import TRACE_FILE, load_traces


class ExplainedMessage(NamedTuple):
    """A decode of a run and its explanation."""

    name: str  # stage, and the number within it
    tokens: list[str]  # text of each generated token
    parents: list[str]  # names
    explanation: Explanation
    names: Mapping[int, str]  # of all messages of the run, by id

    def describe(self, messages: tuple[MessageTokens, ...]) -> str:
        """Return the names of messages and their numbers of tokens, as text."""
        return ", ".join(f"{self.names.get(m.message, m.message)} ({m.num_tokens})" for m in messages)

    def sum_of(self, field: str) -> int:
        """Return the sum over the parents of a count of tokens."""
        return sum(getattr(parent, field) for parent in self.explanation.parents)

    @property
    def rows(self) -> list[tuple[str, ParentExplanation]]:
        """Names and explanations of the parents."""
        return list(zip(self.parents, self.explanation.parents, strict=True))


def load_run(path: Path) -> tuple[dict[str, Any], list[TaskTranscript]]:
    """Return settings and transcripts of a folder of `trace` or `eval`."""
    if (path / f"{TRACE_FILE}.jsonl").is_file():
        settings, traces = load_traces(path)
        return settings, [trace.task_transcript for trace in traces]
    if not (path / "settings.json").is_file():
        raise DataError(f"{path}: no run; make one with `choreograph trace` or `choreograph eval`")
    settings = read_json_object(path / "settings.json")
    run_dir = RunDirectory(path, settings)
    records = [r for r in run_dir.records(next(iter(settings.get("conditions", ())), "")) if not r.get("error")]
    if missing := [r["id"] for r in records if "task" not in r or "tokens" not in r]:
        raise DataError(f"{path}: the record of {missing[0]!r} lacks its task: run `choreograph eval` again")
    return settings, [TaskTranscript(r["id"], r["task"], r["tokens"]) for r in records]


def explain_run(
    engine: Engine,
    workflow: WorkflowFunction,
    run: TaskTranscript,
    *,
    options: Mapping[str, Any] | None = None,
    condition: str | None = None,
    measure: bool = False,
) -> list[ExplainedMessage]:
    """Replay a run under reuse and explain its decodes.

    Args:
        condition: name of the workflow's condition; None for the first choreographed one.
        measure: as in `Message.explain`.
    """
    conditions = {name: c for name, c in conditions_of(workflow).items() if c.mode == "choreographed"}
    if not conditions or (condition is not None and condition not in conditions):
        raise DataError(f"condition={condition!r}: use a choreographed one, of {list(conditions)}")
    chosen = conditions[next(iter(conditions)) if condition is None else condition]
    with engine.session(seed=0) as session:
        wf = WorkflowRun(session, replay=run.transcript)
        call_workflow(workflow, wf, run.task, {**(options or {}), **chosen.options}).result()
        engine.run_until_idle()
        counts, names = Counter(stage for stage, _ in wf.calls), dict[int, str]()
        numbers: Counter[str] = Counter()
        for stage, message in wf.calls:
            numbers[stage] += 1
            names[message.id] = f"{stage} {numbers[stage]}" if counts[stage] > 1 else stage
        result = []
        for _, message in wf.calls:
            if message.kind == "decode":
                explanation = explain(message, measure=measure, names=names)
                tokens = [engine.tokenizer.decode([token]) for token in message.output_token_ids]
                parents = [names.get(parent.id, f"message {parent.id}") for parent in message.parents]
                result.append(ExplainedMessage(names[message.id], tokens, parents, explanation, names))
        return result
