"""Traces: what a workflow says over many inputs on its baseline, call by call. Owns the folder that keeps them.

`settings.json` says what was run, `traces.jsonl` holds one trace a line: id, task, seed, the calls with their tokens,
parents, offsets and log-probabilities, and which call is the answer. A run that was stopped goes on.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..choreographies import Performance, Workflow, conditions_of
from ..choreographies.performance import Content
from ..core import Engine
from ..errors import DataError
from ..evaluation.data import Example
from ..evaluation.folder import Folder, Record, read_lines, read_settings
from ..evaluation.runs import run_conditions, seed_of, settings_of
from ..message import Message
from ..onepass.calls import VERSION, TracedCall, calls_of, from_json, to_json
from ..onepass.rehearsal import Script
from ..types import SamplingParams

NAME = "traces"


@dataclass(frozen=True)
class Trace:
    """One run of a workflow. answer: the number of the call that gave the answer; findings: what the workflow noted, if
    that is known."""

    id: str
    task: Any
    seed: int
    calls: tuple[TracedCall, ...]
    answer: int
    findings: Mapping[str, Any] | None = None

    @property
    def content(self) -> Content:
        """What was said, per stage in order."""
        said: dict[str, list[list[int]]] = {}
        for call in self.calls:
            if call.generated is not None:
                said.setdefault(call.stage, []).append(call.generated)
        return said

    @property
    def script(self) -> Script:
        return Script(self.id, self.task, self.content)

    @property
    def logprobs(self) -> list[float]:
        return [value for call in self.calls for value in call.logprobs]


def collect(
    engine: Engine,
    name: str,
    workflow: Workflow,
    examples: Sequence[Example],
    out: Path,
    *,
    sampling: SamplingParams | None = None,
    top: int = 0,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    at_once: int = 32,
    on_done: Callable[[str, Record], None] = lambda condition, record: None,
) -> list[Trace]:
    """Runs the workflow on its baseline over all examples; at temperature 1 if no sampling is given.

    top: how many of the likeliest tokens to keep behind every token, for the divergence as a loss.
    """
    sampling = replace(sampling or SamplingParams(), logprobs=top)
    baseline = {NAME: next(iter(conditions_of(workflow).values()))}
    settings = settings_of(
        engine, name, workflow, examples, baseline, sampling=sampling, seed=seed, options=options or {}
    )

    def record(example: Example, p: Performance, answer: Message) -> Record:
        calls = calls_of(p.steps)
        decodes = [number for number, call in enumerate(calls) if call.generated is not None]
        said = [message.id for _, message in p.steps if message.kind == "decode"]
        if answer.id not in said:
            raise DataError(f"{example.id}: the answer of a workflow must be one of its {len(said)} decodes")
        return {
            "version": VERSION,
            "id": example.id,
            "task": example.task,
            "seed": seed_of(seed, example.id),
            "answer": decodes[said.index(answer.id)],
            "findings": p.findings,
            "calls": to_json(calls),
        }

    folder = Folder(out, settings)
    run_conditions(
        engine,
        workflow,
        examples,
        baseline,
        folder,
        sampling=sampling,
        seed=seed,
        options=options,
        at_once=at_once,
        on_done=on_done,
        record=record,
    )
    found = {trace.id: trace for trace in read_traces(out)[1]}
    return [found[example.id] for example in examples if example.id in found]


def read_traces(out: Path) -> tuple[dict[str, Any], list[Trace]]:
    """The settings of a folder of traces, and its traces. Runs that failed are left out, and a last line that was cut
    off."""
    file, settings = out / f"{NAME}.jsonl", out / "settings.json"
    if not file.is_file() or not settings.is_file():
        raise DataError(f"{out}: no traces; make them with `choreograph trace`")
    found: dict[str, Trace] = {}
    for line in filter(str.strip, read_lines(file)[0]):
        try:
            record = json.loads(line)
            if not record.get("error"):
                calls = tuple(from_json(record.get("version"), record["calls"]))
                answer = range(len(calls))[record["answer"]]
                if answer != record["answer"] or calls[answer].generated is None:
                    raise ValueError(f"answer {record['answer']} is no decode")
                noted = dict(record["findings"]) if "findings" in record else None
                found[record["id"]] = Trace(record["id"], record["task"], record["seed"], calls, answer, noted)
        except (ValueError, LookupError, TypeError, AttributeError) as problem:
            raise DataError(f"{file}: a damaged trace ({problem!r}); remove the line") from None
    known = read_settings(settings)
    if lacking := sorted({"model", "workflow", "source", "sampling", "options"} - known.keys()):
        raise DataError(f"{settings}: lacks {lacking}: make the traces again")
    return known, list(found.values())
