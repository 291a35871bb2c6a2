"""`choreograph eval` and `choreograph bench`: whole evaluations with progress, tables and files. Owns no figures."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..choreographies import Workflow, conditions_of, takes_pairs
from ..choreographies.performance import Condition, Content
from ..core import Engine
from ..errors import CallFailed, ConfigError, DataError
from ..report import show_table
from ..types import SamplingParams
from ..viz.charts import speedup_over_tokens
from .data import Example, load, pairs
from .fidelity import Drift, drift_rows, drifts, scripts_of
from .folder import Folder, Record, alone, read_settings, write_settings
from .judge import verdicts
from .runs import run_conditions, settings_of
from .speed import speed_rows, timed
from .statistics import mean
from .summary import Summary, interval, summarize, table

LATER = ("fidelity", "judge", "win rates")  # the parts of a report that are measured when they are asked for


def examples_for(workflow: Workflow, source: str, *, limit: int | None, seed: int | None, split: str) -> list[Example]:
    """The examples of a source, in pairs for a workflow that answers two at once."""
    paired = takes_pairs(workflow)
    found = load(source, limit=limit, seed=seed, split=split)
    if paired and any(e.kind != "pair" for e in found):
        found = pairs(found, seed or 0)
    if not found:
        raise DataError(f"{source}: no examples")
    if len({e.kind for e in found}) > 1:
        raise DataError(f"{source}: records of several kinds {sorted({e.kind for e in found})}: split the file")
    return found


def chosen(workflow: Workflow, names: Sequence[str]) -> dict[str, Condition]:
    """The conditions of a workflow, or those named; the first one is always there, since others compare with it."""
    known = conditions_of(workflow)
    for name in names:
        if name not in known:
            raise ConfigError(f"condition {name!r}: the workflow has {list(known)}")
    first = next(iter(known))
    return {k: c for k, c in known.items() if not names or k in names or k == first}


def with_adapter(conditions: Mapping[str, Condition], model: str, readers: Sequence[str] = ()) -> dict[str, Condition]:
    """The conditions, and beside each but the first the same one on an adapter, which computes what `readers` names."""
    _, *others = conditions.items()
    if not others:
        raise ConfigError("an adapter is tried under every condition but the first: there is no other")
    adapted = {f"{name} + {model}": replace(c, model=model, readers=tuple(readers)) for name, c in others}
    return {**conditions, **adapted}


def evaluate(
    engine: Engine,
    console: Console,
    name: str,
    workflow: Workflow,
    examples: Sequence[Example],
    out: Path,
    *,
    conditions: Mapping[str, Condition],
    options: Mapping[str, Any],
    sampling: SamplingParams,
    seed: int,
    at_once: int,
    fidelity: int = 0,
    judge: Engine | None = None,
) -> Summary:
    """Runs (or goes on with) an evaluation in `out`, shows its tables and writes `report.json`."""
    settings = settings_of(engine, name, workflow, examples, conditions, sampling=sampling, seed=seed, options=options)
    folder = Folder(out, settings)
    with alone(out):  # to read mends what was cut off, which another process may be writing
        done = sum(1 for c in conditions for r in folder.records(c) if not r.get("error"))
    with progress(console, name, len(examples) * len(conditions), done) as tick:
        records = run_conditions(
            engine,
            workflow,
            examples,
            conditions,
            folder,
            sampling=sampling,
            seed=seed,
            options=options,
            at_once=at_once,
            on_done=lambda condition, record: tick(),
        )
    new = sum(1 for some in records.values() for r in some if not r.get("error")) - done
    before = {} if new else _report(out, settings)
    later = {what: before[what] for what in LATER if what in before}  # measured of these very records
    report = {"settings": settings, **summarize(examples, records, max_tokens=sampling.max_tokens), **later}
    head, lines = table(report)
    show_table(console, f"{name}, {len(examples)} examples, 95% intervals", head, lines)
    _show_counts(console, report)
    write_settings(out / "report.json", report)
    if fidelity:
        some = examples[:fidelity]
        traces = {r["id"]: r for r in next(iter(records.values()))}
        scripts = scripts_of(some, traces)
        with progress(console, "fidelity", len(some)) as tick:
            found = []
            for _, drift in drifts(engine, workflow, scripts, conditions, sampling=sampling, options=options):
                found.append(drift)
                tick()
        report["fidelity"] = show_drift(console, name, found)
        write_settings(out / "report.json", report)
    if judge is not None:
        report["judge"] = judge.facts.name
        report["win rates"] = judged(judge, console, examples, records)
        write_settings(out / "report.json", report)
    return report


def refuse_failed(report: Summary) -> None:
    """Raises CallFailed where nothing ended but with an error, under any condition: what it says is no score."""
    for name, one in report["conditions"].items():
        if sum(one["errors"].values()) == report["n"]:
            raise CallFailed(f"{name}: all {report['n']} runs ended with an error, the first: {one['first error']}")


def _report(out: Path, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """What an earlier call has found out of the same run, if anything."""
    try:
        found = read_settings(out / "report.json")
    except (OSError, DataError):
        return {}
    return found if found.get("settings") == json.loads(json.dumps(settings)) else {}


def _show_counts(console: Console, report: Summary) -> None:
    for name, one in report["conditions"].items():
        for what, counts in (("could not be parsed", one["unparseable"]), ("cut at the limit of tokens", one["cut"])):
            if counts:
                told = ", ".join(f"{stage} {n} of {one['calls'].get(stage, '?')}" for stage, n in counts.items())
                console.print(f"{name}: {what}: {told}", markup=False, highlight=False, soft_wrap=True)
        if one["errors"]:
            failed = f"{name}: ended with an error: {one['errors']}, the first: {one['first error']}"
            console.print(failed, markup=False, highlight=False, soft_wrap=True)


def show_drift(console: Console, name: str, found: Sequence[Mapping[str, Sequence[Drift]]]) -> list[dict[str, Any]]:
    """Prints what reuse does to traces, stage by stage; returns the rows as JSON."""
    rows = drift_rows(found)
    lines = [
        [
            f"{r.condition}: {r.stage}",
            *(interval(e, places=3, sign=e is r.gap) for e in (r.before, r.after, r.gap, r.divergence)),
            str(r.tokens),
        ]
        for r in rows
    ]
    head = ["fidelity, nats a token", "log-loss, baseline", "reused", "gap", "KL", "tokens"]
    show_table(console, f"{name}: the baseline's own traces under reuse, n = {len(found)}", head, lines)
    return [asdict(r) for r in rows]


def judged(
    judge: Engine, console: Console, examples: Sequence[Example], records: Mapping[str, Sequence[Record]]
) -> dict[str, Any]:
    """How often each condition beats the baseline in the judge's eyes, and the other way round."""
    (_, before), *others = records.items()
    requests = list(map(request_of, examples))
    found, lines = {}, []
    for name, after in others:
        sound = [
            i for i, (a, b) in enumerate(zip(before, after, strict=True)) if not (a.get("error") or b.get("error"))
        ]
        if not sound:
            continue
        some = [[side[i] for i in sound] for side in (requests, before, after)]
        with progress(console, f"judging {name}", len(sound)) as tick:
            votes = {}
            for index, verdict in verdicts(judge, *some):  # type: ignore[arg-type]
                votes[index] = verdict
                tick()
        shares = {
            w: mean([float(votes[i].score == s) for i in range(len(sound))]) for w, s in (("lost", -1), ("won", 1))
        }
        unread = sum(v.unread for v in votes.values())
        if problems := [votes[i].problem for i in sorted(votes) if votes[i].problem]:
            lost = f"{name}: {len(problems)} pairs could not be asked, the first: {problems[0]}"
            console.print(lost, markup=False, highlight=False, soft_wrap=True)
        found[name] = {k: asdict(v) for k, v in shares.items()} | {"unread": unread}
        lines.append([name, interval(shares["lost"], 100), interval(shares["won"], 100), str(unread), str(len(sound))])
    head = ["condition", "baseline wins %", "condition wins %", "unread votes", "n"]
    show_table(console, "Win rates, asked in both orders", head, lines)
    return found


def request_of(e: Example) -> str:
    """What was asked, to somebody who has not seen the workflow's prompts."""
    listed = e.task if isinstance(e.task, str) else "; ".join(map(str, e.task))
    asked = {"concepts": f"Write a story that uses these concepts: {listed}.", "pair": f"Answer both: {listed}"}
    return asked.get(e.kind, listed)


def bench(
    engine: Engine,
    console: Console,
    name: str,
    workflow: Workflow,
    examples: Sequence[Example],
    out: Path,
    *,
    conditions: Mapping[str, Condition],
    options: Mapping[str, Any],
    sampling: SamplingParams,
    seed: int,
    at_once: int = 32,
) -> dict[str, Any]:
    """Draws traces, times all conditions on them in turns, shows the ratios, writes `speed.json` and a figure."""
    (baseline, first), *others = conditions.items()
    if not others:
        raise ConfigError(f"conditions {list(conditions)}: speed compares two or more")
    settings = settings_of(engine, name, workflow, examples, conditions, sampling=sampling, seed=seed, options=options)
    with alone(out):
        traces, failed = _drawn(
            engine,
            console,
            workflow,
            examples,
            {baseline: first},
            Folder(out / "traces", settings),
            sampling=sampling,
            seed=seed,
            options=options,
            at_once=at_once,
        )
        if failed:
            lost = f"{len(failed)} traces could not be drawn, the first: {failed[0]}"
            console.print(lost, markup=False, highlight=False, soft_wrap=True)
        if not traces:
            raise DataError(f"{name}: no example could be run")
        folder = Folder(out, settings)
        done = {r["id"]: r for r in folder.records("timed")}
        missing = [e for e in examples if e.id in traces and e.id not in done]
        with progress(console, name, len(traces), len(done)) as tick:
            for record in timed(engine, workflow, missing, traces, conditions, options=options):
                folder.add("timed", record)
                done[record["id"]] = record
                tick()
    costs = [done[e.id] for e in examples if e.id in done]
    report: dict[str, Any] = {
        "settings": settings,
        "n": len(costs),
        "failed": len(failed),
        "ratios": {},
    }
    for other, _ in others:
        rows = speed_rows(costs, baseline, other)
        report["ratios"][other] = {k: asdict(v) for k, v in rows.items()}
        lines = [[k, interval(v, places=2)] for k, v in rows.items()]
        show_table(
            console, f"{name}: {baseline} over {other}, {len(costs)} examples", ["measure", "ratio (95%)"], lines
        )
    report["points"] = points(costs, baseline, others[0][0])
    speedup_over_tokens({name: report["points"]}, out / "speed.svg")
    write_settings(out / "speed.json", report)
    return report


def _drawn(
    engine: Engine,
    console: Console,
    workflow: Workflow,
    examples: Sequence[Example],
    baseline: Mapping[str, Condition],
    folder: Folder,
    **run: Any,
) -> tuple[dict[str, Content], list[str]]:
    """What is said in every example on the baseline, and the errors of those that failed."""
    (name,) = baseline
    done = sum(1 for r in folder.records(name) if not r.get("error"))
    with progress(console, "traces", len(examples), done) as tick:
        records = run_conditions(
            engine, workflow, examples, baseline, folder, on_done=lambda condition, record: tick(), **run
        )[name]
    traces = {r["id"]: r["tokens"] for r in records if not r.get("error")}
    return traces, [r["error"] for r in records if r.get("error")]


def points(costs: Sequence[Record], baseline: str, other: str) -> list[tuple[float, float]]:
    """(tokens generated, end-to-end ratio) of every example."""
    return [(r["generated"], r["costs"][baseline]["seconds"] / r["costs"][other]["seconds"]) for r in costs]


@contextmanager
def progress(console: Console, what: str, total: int, done: int = 0) -> Iterator[Callable[[], None]]:
    """A bar with the time left on a terminal, a line at each tenth in a pipe."""
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=console, transient=True) as bar:
            task = bar.add_task(what, total=total, completed=done)
            yield lambda: bar.advance(task)
        return
    count = done

    def tick() -> None:
        nonlocal count
        count += 1
        if count * 10 // total > (count - 1) * 10 // total:
            console.print(f"... {what}: {count} of {total}", highlight=False)

    yield tick
