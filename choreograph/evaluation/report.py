"""Records into figures: per condition the scores, their paired differences from the baseline, and what went unread."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..console import print_table
from ..engine.engine import Engine
from ..errors import ConfigError, DataError, RequestFailedError
from ..sampling_params import SamplingParams
from ..viz.plots import speedup_over_tokens
from ..workflows import WorkflowFunction, conditions_of, takes_pairs
from ..workflows.run import Condition, Transcript
from .datasets import Example, load, make_pairs
from .fidelity import TokenDivergence, measure_divergence, summarize_divergence, transcripts
from .judge import judge_pairs
from .metrics import PRIMARY_METRIC, score
from .run_dir import RunDirectory, RunRecord, exclusive_dir, read_json_object, write_json
from .runner import evaluate_conditions, make_run_config
from .speed import speed_rows, time_conditions
from .statistics import Estimate, difference, mean

Summary = dict[str, Any]


def summarize(examples: Sequence[Example], records: Mapping[str, Sequence[RunRecord]], *, max_tokens: int) -> Summary:
    """JSON: n, the main score, and per condition all of it. The first condition is the one compared with."""
    scored = {name: [score(e, r) for e, r in zip(examples, some, strict=True)] for name, some in records.items()}
    baseline, result = next(iter(scored)), {}
    metrics = list(dict.fromkeys(k for scores in scored.values() for one in scores for k in one))
    for name, scores in scored.items():
        columns = {k: [one.get(k, 0.0) for one in scores] for k in metrics}
        result[name] = {
            "scores": {k: asdict(mean(v)) for k, v in columns.items()},
            "differences": {}
            if name == baseline
            else {k: asdict(difference(v, [one.get(k, 0.0) for one in scored[baseline]])) for k, v in columns.items()},
            **_counts(records[name], max_tokens),
        }
    return {"n": len(examples), "main": PRIMARY_METRIC[examples[0].kind], "baseline": baseline, "conditions": result}


def _counts(records: Sequence[RunRecord], max_tokens: int) -> dict[str, Any]:
    """Sums over records: what could not be parsed, what the limit of tokens cut off, what was computed. Messages with a
    shorter limit of their own are not cut: a number or a word is all that they are asked for."""
    whole = [r for r in records if not r.get("error")]
    unparseable: Counter[str] = Counter()
    cut: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for r in whole:
        unparseable.update(r["unparseable"])
        calls.update({stage: len(messages) for stage, messages in r["tokens"].items()})
        cut.update({stage: sum(len(m) >= max_tokens for m in messages) for stage, messages in r["tokens"].items()})
    return {
        "unparseable": dict(unparseable),
        "cut": {stage: n for stage, n in cut.items() if n},
        "calls": dict(calls),
        "generated": sum(len(m) for r in whole for stage in r["tokens"].values() for m in stage),
        "encoded": sum(r["encoded"] for r in whole),
        "cached": sum(r["cached"] for r in whole),
        "errors": dict(Counter(r["error"].split(":")[0] for r in records if r.get("error"))),
        "first error": next((r["error"] for r in records if r.get("error")), None),
    }


def score_table(summary: Summary) -> tuple[list[str], list[list[str]]]:
    """Head and lines: a condition a line, every score with its interval, the main one's difference behind it."""
    conditions, main = summary["conditions"], summary["main"]
    metrics = [k for k in next(iter(conditions.values()))["scores"] if k not in ("failed", "unread")]
    scale, sign = (100, "%") if main != "words" else (1, "")
    head = [
        "condition",
        *(f"{m} {sign}".strip() for m in metrics),
        f"difference in {main}",
        "p",
        "unread steps / answers",
        *(["failed"] if any(one["errors"] for one in conditions.values()) else []),
        "n",
    ]
    lines = []
    for name, one in conditions.items():
        cells = [format_estimate(one["scores"].get(m), scale) for m in metrics]
        gap = one["differences"].get(main)
        lines.append(
            [
                name,
                *cells,
                format_estimate(gap, scale, sign=True),
                format_p_value(gap),
                format_unparsed(one, summary["n"]),
                *([str(sum(one["errors"].values()))] if "failed" in head else []),
                str(summary["n"]),
            ]
        )
    return head, lines


def format_p_value(gap: Mapping[str, Any] | None) -> str:
    """The p of a difference as text, where there is one."""
    p = gap["p"] if gap else None
    return "" if p is None else "<0.001" if p < 0.001 else f"{p:.3f}"


def format_unparsed(condition: Mapping[str, Any], n: int) -> str:
    """`steps / answers` that could not be read."""
    answers = round(condition["scores"].get("unread", {"value": 0})["value"] * n)
    return f"{sum(condition['unparseable'].values())} / {answers}"


def format_estimate(
    estimate: Mapping[str, Any] | Estimate | None, scale: float = 1, *, sign: bool = False, places: int = 1
) -> str:
    """`56.4 (51.9, 60.8)`; empty for no estimate, without an interval where one value tells of none."""
    if estimate is None:
        return ""
    values = asdict(estimate) if isinstance(estimate, Estimate) else estimate
    plus = "+" if sign else ""
    value, low, high = (f"{values[k] * scale:{plus}.{places}f}" for k in ("value", "low", "high"))
    alone = values.get("n") == 1 and values["low"] == values["high"]
    return value if alone else f"{value} ({low}, {high})"


DEFERRED_SECTIONS = (
    "fidelity",
    "judge",
    "win rates",
)  # the parts of a report that are measured when they are asked for


def examples_for(
    workflow: WorkflowFunction, source: str, *, limit: int | None, seed: int | None, split: str
) -> list[Example]:
    """The examples of a source, in pairs for a workflow that answers two at once."""
    paired = takes_pairs(workflow)
    result = load(source, limit=limit, seed=seed, split=split)
    if paired and any(e.kind != "pair" for e in result):
        result = make_pairs(result, seed or 0)
    if not result:
        raise DataError(f"{source}: no examples")
    if len({e.kind for e in result}) > 1:
        raise DataError(f"{source}: records of several kinds {sorted({e.kind for e in result})}: split the file")
    return result


def select_conditions(workflow: WorkflowFunction, names: Sequence[str]) -> dict[str, Condition]:
    """The conditions of a workflow, or those named; the first one is always there, since others compare with it."""
    known = conditions_of(workflow)
    for name in names:
        if name not in known:
            raise ConfigError(f"condition {name!r}: the workflow has {list(known)}")
    first = next(iter(known))
    return {k: c for k, c in known.items() if not names or k in names or k == first}


def add_adapter_conditions(
    conditions: Mapping[str, Condition], model: str, adapter_stages: Sequence[str] = ()
) -> dict[str, Condition]:
    """The conditions, and beside each but the first the same one on an adapter, which computes what `readers` names."""
    _, *others = conditions.items()
    if not others:
        raise ConfigError("an adapter is tried under every condition but the first: there is no other")
    adapted = {f"{name} + {model}": replace(c, model=model, adapter_stages=tuple(adapter_stages)) for name, c in others}
    return {**conditions, **adapted}


def evaluate(
    engine: Engine,
    console: Console,
    name: str,
    workflow: WorkflowFunction,
    examples: Sequence[Example],
    out: Path,
    *,
    conditions: Mapping[str, Condition],
    options: Mapping[str, Any],
    sampling: SamplingParams,
    seed: int,
    concurrency: int,
    fidelity: int = 0,
    judge: Engine | None = None,
) -> Summary:
    """Runs (or goes on with) an evaluation in `out`, shows its tables and writes `report.json`."""
    settings = make_run_config(
        engine, name, workflow, examples, conditions, sampling=sampling, seed=seed, options=options
    )
    folder = RunDirectory(out, settings)
    with exclusive_dir(out):  # to read mends what was cut off, which another process may be writing
        done = sum(1 for c in conditions for r in folder.records(c) if not r.get("error"))
    with progress(console, name, len(examples) * len(conditions), done) as tick:
        records = evaluate_conditions(
            engine,
            workflow,
            examples,
            conditions,
            folder,
            sampling=sampling,
            seed=seed,
            options=options,
            concurrency=concurrency,
            on_done=lambda condition, record: tick(),
        )
    new = sum(1 for some in records.values() for r in some if not r.get("error")) - done
    before = {} if new else _load_previous_report(out, settings)
    later = {what: before[what] for what in DEFERRED_SECTIONS if what in before}  # measured of these very records
    report = {"settings": settings, **summarize(examples, records, max_tokens=sampling.max_tokens), **later}
    head, lines = score_table(report)
    print_table(console, f"{name}, {len(examples)} examples, 95% intervals", head, lines)
    _print_counts(console, report)
    write_json(out / "report.json", report)
    if fidelity:
        some = examples[:fidelity]
        traces = {r["id"]: r for r in next(iter(records.values()))}
        scripts = transcripts(some, traces)
        with progress(console, "fidelity", len(some)) as tick:
            result = []
            for _, drift in measure_divergence(
                engine, workflow, scripts, conditions, sampling=sampling, options=options
            ):
                result.append(drift)
                tick()
        report["fidelity"] = print_divergence(console, name, result)
        write_json(out / "report.json", report)
    if judge is not None:
        report["judge"] = judge.model_info.name
        report["win rates"] = win_rates(judge, console, examples, records)
        write_json(out / "report.json", report)
    return report


def ensure_some_succeeded(report: Summary) -> None:
    """Raises RequestFailedError where nothing ended but with an error, under any condition: what it says is
    no score."""
    for name, one in report["conditions"].items():
        if sum(one["errors"].values()) == report["n"]:
            raise RequestFailedError(
                f"{name}: all {report['n']} runs ended with an error, the first: {one['first error']}"
            )


def _load_previous_report(out: Path, run_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What an earlier call has found out of the same run, if anything."""
    try:
        result = read_json_object(out / "report.json")
    except (OSError, DataError):
        return {}
    return result if result.get("settings") == json.loads(json.dumps(run_config)) else {}


def _print_counts(console: Console, report: Summary) -> None:
    for name, one in report["conditions"].items():
        for what, counts in (("could not be parsed", one["unparseable"]), ("cut at the limit of tokens", one["cut"])):
            if counts:
                host_tokens = ", ".join(f"{stage} {n} of {one['calls'].get(stage, '?')}" for stage, n in counts.items())
                console.print(f"{name}: {what}: {host_tokens}", markup=False, highlight=False, soft_wrap=True)
        if one["errors"]:
            failed = f"{name}: ended with an error: {one['errors']}, the first: {one['first error']}"
            console.print(failed, markup=False, highlight=False, soft_wrap=True)


def print_divergence(
    console: Console, name: str, divergences: Sequence[Mapping[str, Sequence[TokenDivergence]]]
) -> list[dict[str, Any]]:
    """Prints what reuse does to traces, stage by stage; returns the rows as JSON."""
    rows = summarize_divergence(divergences)
    lines = [
        [
            f"{r.condition}: {r.stage}",
            *(format_estimate(e, places=3, sign=e is r.gap) for e in (r.before, r.after, r.gap, r.divergence)),
            str(r.tokens),
        ]
        for r in rows
    ]
    head = ["fidelity, nats a token", "log-loss, baseline", "reused", "gap", "KL", "tokens"]
    print_table(console, f"{name}: the baseline's own traces under reuse, n = {len(divergences)}", head, lines)
    return [asdict(r) for r in rows]


def win_rates(
    judge: Engine, console: Console, examples: Sequence[Example], records: Mapping[str, Sequence[RunRecord]]
) -> dict[str, Any]:
    """How often each condition beats the baseline in the judge's eyes, and the other way round."""
    (_, before), *others = records.items()
    requests = list(map(judge_prompt, examples))
    result, lines = {}, []
    for name, after in others:
        sound = [
            i for i, (a, b) in enumerate(zip(before, after, strict=True)) if not (a.get("error") or b.get("error"))
        ]
        if not sound:
            continue
        some = [[side[i] for i in sound] for side in (requests, before, after)]
        with progress(console, f"judging {name}", len(sound)) as tick:
            votes = {}
            for index, verdict in judge_pairs(judge, *some):  # type: ignore[arg-type]
                votes[index] = verdict
                tick()
        shares = {
            w: mean([float(votes[i].score == s) for i in range(len(sound))]) for w, s in (("lost", -1), ("won", 1))
        }
        unread = sum(v.unparsed for v in votes.values())
        if problems := [votes[i].error for i in sorted(votes) if votes[i].error]:
            lost = f"{name}: {len(problems)} pairs could not be asked, the first: {problems[0]}"
            console.print(lost, markup=False, highlight=False, soft_wrap=True)
        result[name] = {k: asdict(v) for k, v in shares.items()} | {"unread": unread}
        lines.append(
            [
                name,
                format_estimate(shares["lost"], 100),
                format_estimate(shares["won"], 100),
                str(unread),
                str(len(sound)),
            ]
        )
    head = ["condition", "baseline wins %", "condition wins %", "unread votes", "n"]
    print_table(console, "Win rates, asked in both orders", head, lines)
    return result


def judge_prompt(e: Example) -> str:
    """What was asked, to somebody who has not seen the workflow's prompts."""
    listed = e.task if isinstance(e.task, str) else "; ".join(map(str, e.task))
    requested = {"concepts": f"Write a story that uses these concepts: {listed}.", "pair": f"Answer both: {listed}"}
    return requested.get(e.kind, listed)


def bench(
    engine: Engine,
    console: Console,
    name: str,
    workflow: WorkflowFunction,
    examples: Sequence[Example],
    out: Path,
    *,
    conditions: Mapping[str, Condition],
    options: Mapping[str, Any],
    sampling: SamplingParams,
    seed: int,
    concurrency: int = 32,
) -> dict[str, Any]:
    """Draws traces, times all conditions on them in turns, shows the ratios, writes `speed.json` and a figure."""
    (baseline, first), *others = conditions.items()
    if not others:
        raise ConfigError(f"conditions {list(conditions)}: speed compares two or more")
    settings = make_run_config(
        engine, name, workflow, examples, conditions, sampling=sampling, seed=seed, options=options
    )
    with exclusive_dir(out):
        traces, failed = _collect_transcripts(
            engine,
            console,
            workflow,
            examples,
            {baseline: first},
            RunDirectory(out / "traces", settings),
            sampling=sampling,
            seed=seed,
            options=options,
            concurrency=concurrency,
        )
        if failed:
            lost = f"{len(failed)} traces could not be drawn, the first: {failed[0]}"
            console.print(lost, markup=False, highlight=False, soft_wrap=True)
        if not traces:
            raise DataError(f"{name}: no example could be run")
        folder = RunDirectory(out, settings)
        done = {r["id"]: r for r in folder.records("timed")}
        missing = [e for e in examples if e.id in traces and e.id not in done]
        with progress(console, name, len(traces), len(done)) as tick:
            for record in time_conditions(engine, workflow, missing, traces, conditions, options=options):
                folder.append("timed", record)
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
        lines = [[k, format_estimate(v, places=2)] for k, v in rows.items()]
        print_table(
            console, f"{name}: {baseline} over {other}, {len(costs)} examples", ["measure", "ratio (95%)"], lines
        )
    report["points"] = speedup_points(costs, baseline, others[0][0])
    speedup_over_tokens({name: report["points"]}, out / "speed.svg")
    write_json(out / "speed.json", report)
    return report


def _collect_transcripts(
    engine: Engine,
    console: Console,
    workflow: WorkflowFunction,
    examples: Sequence[Example],
    baseline: Mapping[str, Condition],
    run_dir: RunDirectory,
    **kwargs: Any,
) -> tuple[dict[str, Transcript], list[str]]:
    """What is said in every example on the baseline, and the errors of those that failed."""
    (name,) = baseline
    done = sum(1 for r in run_dir.records(name) if not r.get("error"))
    with progress(console, "traces", len(examples), done) as tick:
        records = evaluate_conditions(
            engine, workflow, examples, baseline, run_dir, on_done=lambda condition, record: tick(), **kwargs
        )[name]
    traces = {r["id"]: r["tokens"] for r in records if not r.get("error")}
    return traces, [r["error"] for r in records if r.get("error")]


def speedup_points(costs: Sequence[RunRecord], baseline: str, other: str) -> list[tuple[float, float]]:
    """(tokens generated, end-to-end ratio) of every example."""
    return [(r["generated"], r["costs"][baseline]["seconds"] / r["costs"][other]["seconds"]) for r in costs]


@contextmanager
def progress(console: Console, label: str, total: int, done: int = 0) -> Iterator[Callable[[], None]]:
    """A bar with the time left on a terminal, a line at each tenth in a pipe."""
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=console, transient=True) as bar:
            task = bar.add_task(label, total=total, completed=done)
            yield lambda: bar.advance(task)
        return
    count = done

    def tick() -> None:
        nonlocal count
        count += 1
        if count * 10 // total > (count - 1) * 10 // total:
            console.print(f"... {label}: {count} of {total}", highlight=False)

    yield tick
