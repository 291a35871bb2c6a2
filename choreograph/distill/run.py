"""From a folder of traces to an adapter: what `choreograph train` does. Owns the split, and the note beside the
adapter."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from ..choreographies import Workflow, conditions_of, find, names, options_of
from ..choreographies.performance import Condition
from ..errors import ConfigError, DataError
from ..evaluation.folder import write_settings
from ..evaluation.runs import source_of
from ..models.adapter import Adapter
from ..types import SamplingParams
from .lessons import Lesson, answer_lessons, baseline_lessons, check_stages, lessons_of
from .setting import TrainConfig, TrainReport
from .traces import Trace, read_traces
from .training import train

T = TypeVar("T", Trace, Lesson)
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
    stages: Sequence[str] = (),
    workflow: str | None = None,
    validation: float = 0.1,
    on_update: Callable[[int, int], None] | None = None,
) -> TrainReport:
    """Trains an adapter for the workflow of some traces under one of its conditions (by default the only one), or for
    the decodes of its stages in `readers` alone, or, with `direct`, for a workflow of one decode that gives their final
    answers. stages: those whose decodes are learned, with those that these see; validation is on what the adapter
    computes. workflow: the file of a workflow of your own; traces alone have no code run."""
    settings, found = read_traces(traces)
    if settings["model"] != adapter.facts.name or not _fits(settings, adapter):
        other = "of other weights" if settings["model"] == adapter.facts.name else f"not of {adapter.facts.name!r}"
        raise ConfigError(f"{traces}: traces of model {settings['model']!r}, {other}: train the model that made them")
    seed = (config or TrainConfig()).seed
    if direct is not None:
        if condition is not None or readers or stages or workflow or (config and (config.kl or config.encodings)):
            raise ConfigError("direct: final answers are learned without a condition, without what the baseline gave")
        one = find(direct)
        given = {name: value for name, value in settings["options"].items() if name in options_of(one)}
        lessons, checks = split(answer_lessons(adapter, one, found, options=given), validation, seed)
        report = train(adapter, lessons, checks, out, config, on_update=on_update)
        _note(out, adapter, workflow=direct)
        return report
    run = _workflow_of(traces, settings, workflow)
    asked: dict[str, Any] = {
        "sampling": SamplingParams.from_dict({k: v for k, v in settings["sampling"].items() if k != "logprobs"}),
        "options": settings["options"],
    }
    conditions = conditions_of(run)
    chosen = replace(choose(conditions, condition), readers=tuple(readers))
    chosen.check_readers(stage for trace in found for stage in trace.content)
    check_stages(stages, found, chosen)
    if taught := set(stages or readers):  # which need not speak in every run
        found = [trace for trace in found if taught & trace.content.keys()]
    learn, check = split(found, validation, seed)
    lessons = lessons_of(adapter, run, [*learn, *check], chosen, **asked, stages=stages)[: len(learn)]  # some are rare
    checks = lessons_of(adapter, run, check, chosen, **asked)
    baseline = baseline_lessons(check, readers, next(iter(conditions.values())).mode)
    report = train(adapter, lessons, checks, out, config, baseline=baseline, on_update=on_update)
    _note(out, adapter, workflow=settings["workflow"], readers=sorted(set(readers)), stages=sorted(set(stages)))
    return report


def _fits(noted: Mapping[str, Any], base: Adapter) -> bool:
    """Whether what is noted of some weights goes for these, whatever types both are in; so if nothing is noted."""
    known, types = noted.get("weights"), {noted.get("dtype"), _type(base)}
    comparable = known is not None and (len(types) == 1 or "float16" not in types)  # which rounds otherwise
    return not comparable or known == base.weights


def _type(base: Adapter) -> str:
    return str(base.facts.dtype).removeprefix("torch.")


def _workflow_of(traces: Path, settings: Mapping[str, Any], named: str | None) -> Workflow:
    """The workflow of some traces. One that is a file of its own has to be named by whoever trains: to look it up runs
    its code."""
    known = settings["workflow"]
    if named is None and known not in names():
        raise ConfigError(f"{traces}: of the workflow {known!r}: name it (workflow=, --workflow), as its code is run")
    found = find(named or known)
    if settings["source"] != source_of(found):
        raise ConfigError(f"{traces}: the workflow {named or known!r} has changed since: make the traces again")
    return found


def _note(out: Path, base: Adapter, **facts: Any) -> None:
    write_settings(out / LEARNED, facts | {"weights": base.weights, "dtype": _type(base)})


def check_use(source: str, readers: Sequence[str], base: Adapter) -> None:
    """Raises ConfigError where an adapter that says what it was trained for is used for other decodes, or over other
    weights."""
    file = Path(source) / LEARNED
    if not file.is_file():
        return  # of another maker
    try:
        noted = json.loads(file.read_text(encoding="utf-8"))
        learned = sorted(map(str, noted.get("readers", [])))
    except (ValueError, AttributeError, TypeError) as problem:
        raise ConfigError(f"{file}: {problem}: train the adapter again, or remove this note") from None
    if sorted(set(readers)) != learned:
        asked = " ".join(f"--reader {json.dumps(stage)}" for stage in learned) or "no --reader"
        raise ConfigError(
            f"{source}: this adapter was trained for {'some stages' if learned else 'all decodes'}: give {asked}"
        )
    if not _fits(noted, base):
        raise ConfigError(
            f"{source}: trained on other weights than {base.facts.name!r} has: use the model of its training"
        )


def choose(conditions: Any, name: str | None) -> Condition:
    """A condition by name, or the only one beside the baseline."""
    known = list(conditions)
    if name is not None and name not in known:
        raise ConfigError(f"condition {name!r}: the workflow has {known}")
    if name is None and len(known) > 2:
        raise ConfigError(f"condition: name the one to learn (condition=, --condition), of {known[1:]}")
    return conditions[name or known[-1]]


def split(traces: Sequence[T], share: float, seed: int) -> tuple[list[T], list[T]]:
    """Some for learning and the others, at least one, for validation."""
    if not 0 < share < 1:
        raise ConfigError(f"validation={share}: use a share between 0 and 1")
    if len(traces) < 2:
        raise DataError(f"{len(traces)} traces: learning and validation need one each at least")
    mixed = list(traces)
    random.Random(seed).shuffle(mixed)
    apart = min(len(mixed) - 1, max(1, round(share * len(mixed))))
    return mixed[apart:], mixed[:apart]
