"""From a folder of traces to an adapter: what `choreograph train` does. Owns the split, and the note beside the
adapter."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..choreographies import conditions_of, find
from ..choreographies.performance import Condition
from ..errors import ConfigError, DataError
from ..evaluation.runs import source_of
from ..models.adapter import Adapter
from ..types import SamplingParams
from .lessons import answer_lessons, baseline_lessons, lessons_of
from .setting import TrainConfig, TrainReport
from .traces import Trace, read_traces
from .training import train

LEARNED = "learned.json"  # beside the adapter


def train_on(
    adapter: Adapter,
    traces: Path,
    out: Path,
    config: TrainConfig | None = None,
    *,
    condition: str | None = None,
    direct: str | None = None,
    readers: Sequence[str] = (),
    validation: float = 0.1,
    on_update: Callable[[int, int], None] | None = None,
) -> TrainReport:
    """Trains an adapter for the workflow of some traces under one of its conditions (by default its last one), or for
    the decodes of its stages in `readers` alone, or, with `direct`, for a workflow of one decode that gives their final
    answers."""
    settings, found = read_traces(traces)
    if settings["model"] != adapter.facts.name:
        raise ConfigError(f"{traces}: traces of model {settings['model']!r}, not of {adapter.facts.name!r}")
    learn, check = split(found, validation, (config or TrainConfig()).seed)
    if direct is not None:
        if condition is not None or readers or (config and config.kl):
            raise ConfigError("direct: final answers are learned without a condition, without what the baseline gave")
        workflow = find(direct)
        lessons, checks = (answer_lessons(adapter, workflow, part) for part in (learn, check))
        report = train(adapter, lessons, checks, out, config, on_update=on_update)
        _note(out, workflow=direct)
        return report
    workflow = find(settings["workflow"])
    if settings["source"] != source_of(workflow):
        raise ConfigError(f"{traces}: the workflow {settings['workflow']!r} has changed since: make the traces again")
    given: dict[str, Any] = {
        "sampling": SamplingParams.from_dict({k: v for k, v in settings["sampling"].items() if k != "logprobs"}),
        "options": settings["options"],
    }
    chosen = replace(choose(conditions_of(workflow), condition), readers=tuple(readers))
    lessons, checks = (lessons_of(adapter, workflow, part, chosen, **given) for part in (learn, check))
    baseline = baseline_lessons(check, readers)
    report = train(adapter, lessons, checks, out, config, baseline=baseline, on_update=on_update)
    _note(out, workflow=settings["workflow"], readers=sorted(set(readers)))
    return report


def _note(out: Path, **facts: Any) -> None:
    (out / LEARNED).write_text(json.dumps(facts, indent=1) + "\n")


def check_use(adapter: str, readers: Sequence[str]) -> None:
    """Raises ConfigError where an adapter that says what it was trained for is used for other decodes."""
    file = Path(adapter) / LEARNED
    if not file.is_file():
        return  # of another maker
    try:
        learned = sorted(map(str, json.loads(file.read_text(encoding="utf-8")).get("readers", [])))
    except (ValueError, AttributeError, TypeError) as problem:
        raise ConfigError(f"{file}: {problem}: train the adapter again, or remove this note") from None
    if sorted(set(readers)) != learned:
        asked = " ".join(f"--reader {json.dumps(stage)}" for stage in learned) or "no --reader"
        raise ConfigError(
            f"{adapter}: this adapter was trained for {'some stages' if learned else 'all decodes'}: give {asked}"
        )


def choose(conditions: Any, name: str | None) -> Condition:
    """A condition by name, or the last one."""
    known = list(conditions)
    if name is not None and name not in known:
        raise ConfigError(f"condition {name!r}: the workflow has {known}")
    return conditions[name or known[-1]]


def split(traces: Sequence[Trace], share: float, seed: int) -> tuple[list[Trace], list[Trace]]:
    """Some for learning and the others, at least one, for validation."""
    if not 0 < share < 1:
        raise ConfigError(f"validation={share}: use a share between 0 and 1")
    if len(traces) < 2:
        raise DataError(f"{len(traces)} traces: learning and validation need one each at least")
    mixed = list(traces)
    random.Random(seed).shuffle(mixed)
    apart = min(len(mixed) - 1, max(1, round(share * len(mixed))))
    return mixed[apart:], mixed[:apart]
