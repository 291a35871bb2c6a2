"""Evaluate and benchmark a workflow: tables for the console, reports as JSON."""

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...api.engine import Engine
from ...console import print_table, print_text, progress
from ...errors import ConfigError, DataError, RequestFailedError
from ...utils import require
from ...viz import speedup_over_tokens
from ..workflows import WorkflowFunction, conditions_of, find, options_of
from ..workflows.run import Condition
from .datasets import Example
from .experiment import Experiment
from .fidelity import (
    TokenDivergence,
    measure_divergence,
    speed_rows,
    summarize_divergence,
    time_on_traces,
    transcripts,
)
from .judge import judge_pairs, judge_prompt
from .metrics import ORDERED_METRICS, SCORERS, SCORING_VERSION, score
from .ray_workers import RayWorkers
from .run_dir import RunDirectory, RunRecord, exclusive_dir, read_json_object, write_json
from .runner import evaluate_conditions, run_examples
from .splits import shared_units
from .statistics import Estimate, Units, difference, matched_pairs, mean

if TYPE_CHECKING:
    from rich.console import Console

Summary = dict[str, Any]

DEFERRED_SECTIONS = ("fidelity", "judge", "win rates")  # sections of a report that are measured only on request


def summarize(
    examples: Sequence[Example], records: Mapping[str, Sequence[RunRecord]], *, max_tokens: int | None
) -> Summary:
    """Return scores, differences from the first condition, and counts, as JSON."""
    scored = {name: [score(e, r) for e, r in zip(examples, rows, strict=True)] for name, rows in records.items()}
    metrics = list(dict.fromkeys(metric for scores in scored.values() for row in scores for metric in row))
    columns = {name: {m: [row.get(m, 0.0) for row in scores] for m in metrics} for name, scores in scored.items()}
    units = [shared_units(e) for e in examples]
    baseline, limit = next(iter(records)), sys.maxsize if max_tokens is None else max_tokens
    conditions = {}
    for name, values in columns.items():
        differences = (
            {} if name == baseline else {m: asdict(difference(values[m], columns[baseline][m], units)) for m in metrics}
        )
        completed = [r for r in records[name] if not r.get("error")]
        failures: Counter[str] = Counter()
        cut: Counter[str] = Counter()  # only messages without a shorter limit of their own can be cut
        calls: Counter[str] = Counter()
        for r in completed:
            failures.update(r["unparseable"])
            calls.update({stage: len(messages) for stage, messages in r["tokens"].items()})
            cut.update({stage: sum(len(m) >= limit for m in messages) for stage, messages in r["tokens"].items()})
        errors = [r["error"] for r in records[name] if r.get("error")]
        conditions[name] = {
            "scores": {m: asdict(mean(values[m], units)) for m in metrics},
            "differences": differences,
            "order": order_effect(examples[0].kind, values, units),
            "unparseable": dict(failures),
            "cut": {stage: n for stage, n in cut.items() if n},
            "calls": dict(calls),
            "generated": sum(len(m) for r in completed for messages in r["tokens"].values() for m in messages),
            "encoded": sum(r["encoded"] for r in completed),
            "cached": sum(r["cached"] for r in completed),
            "errors": dict(Counter(error.split(":")[0] for error in errors)),
            "first error": next(iter(errors), None),
        }
    primary_metric, _ = SCORERS[examples[0].kind]
    versions = Counter(str(r.get("scoring", 1)) for rows in records.values() for r in rows if not r.get("error"))
    return {
        "scoring": {"version": SCORING_VERSION, "records": dict(versions)},  # records by the version that read outputs
        "n": len(examples),
        "main": primary_metric,
        "baseline": baseline,
        "conditions": conditions,
    }


def order_effect(kind: str, values: Mapping[str, Sequence[float]], units: Units) -> dict[str, Any] | None:
    """Return which of two stories, or questions, a condition favours.

    `share` is that of examples in which the first one scores higher minus that in which the second
    one does, with McNemar's exact p; `difference` is that of the mean scores. None for other kinds of examples.
    """
    metrics = ORDERED_METRICS.get(kind)
    if metrics is None or not all(metric in values for metric in metrics):
        return None
    first, second = (values[metric] for metric in metrics)
    more, less = (sum(a > b for a, b in zip(*pair, strict=True)) for pair in ((first, second), (second, first)))
    return {
        "first": more,
        "second": less,
        "equal": len(first) - more - less,
        "share": asdict(matched_pairs(more, less, len(first))),
        "difference": asdict(difference(first, second, units)),
    }


def order_table(summary: Summary) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of which story or question is favoured."""
    rows = []
    for name, condition in summary["conditions"].items():
        if order := condition["order"]:
            counts = [str(order[key]) for key in ("first", "second", "equal")]
            share, gap = order["share"], order["difference"]
            cells = [format_p_value(share), format_estimate(gap, 100, sign=True)]
            rows.append([name, *counts, *cells])
    return ["condition", "first favoured", "second", "equal", "p (McNemar)", "first - second, points"], rows


def describe_scoring(report: Summary, earlier: Summary | None) -> list[str]:
    """Return notes on report parts that older scoring rules produced."""
    version, records = report["scoring"]["version"], report["scoring"]["records"]
    earlier_version = (earlier or report).get("scoring", {"version": 1})["version"]
    lines = [f"scored again by version {version} of the rules, before by {earlier_version}"]
    older = {v: n for v, n in records.items() if v != str(version)}
    notes = [
        f"outputs that workflows read by version {v} of the rules are kept in {n} records" for v, n in older.items()
    ]
    return (lines if earlier_version != version else []) + notes


def score_table(summary: Summary) -> tuple[list[str], list[list[str]]]:
    """Return the header and rows of the score table.

    Includes the primary metric's difference from the baseline.
    """
    conditions, main, n = summary["conditions"], summary["main"], summary["n"]
    metrics = [k for k in next(iter(conditions.values()))["scores"] if k not in ("failed", "unread")]
    scale, unit = (100, " %") if main != "words" else (1, "")
    has_failed = any(condition["errors"] for condition in conditions.values())
    header = ["condition", *(f"{m}{unit}" for m in metrics), f"difference in {main}", "p", "unread steps / answers"]
    rows = []
    for name, condition in conditions.items():
        gap = condition["differences"].get(main)
        row = [name, *(format_estimate(condition["scores"].get(m), scale) for m in metrics)]
        row += [format_estimate(gap, scale, sign=True), format_p_value(gap), format_unparsed(condition, n)]
        row += [str(sum(condition["errors"].values()))] if has_failed else []
        rows.append([*row, str(n)])
    return [*header, *(["failed"] if has_failed else []), "n"], rows


def format_p_value(gap: Mapping[str, Any] | None) -> str:
    """Return a difference's p-value as text, empty if it has none."""
    p = gap["p"] if gap else None
    return "" if p is None else "<0.001" if p < 0.001 else f"{p:.3f}"


def format_unparsed(condition: Mapping[str, Any], n: int) -> str:
    """Return the counts of unparsed steps and answers as `steps / answers`."""
    answers = round(condition["scores"].get("unread", {"value": 0})["value"] * n)
    return f"{sum(condition['unparseable'].values())} / {answers}"


def format_estimate(
    estimate: Mapping[str, Any] | Estimate | None, scale: float = 1, *, sign: bool = False, places: int = 1
) -> str:
    """Return `56.4 (51.9, 60.8)`; empty for None, no interval for one value."""
    if estimate is None:
        return ""
    values = asdict(estimate) if isinstance(estimate, Estimate) else estimate
    plus = "+" if sign else ""
    value, low, high = (f"{values[k] * scale:{plus}.{places}f}" for k in ("value", "low", "high"))
    return value if values.get("n") == 1 and values["low"] == values["high"] else f"{value} ({low}, {high})"


def select_conditions(workflow: WorkflowFunction, names: Sequence[str]) -> dict[str, Condition]:
    """Return the baseline and the named conditions; all without names."""
    conditions = conditions_of(workflow)
    if unknown := [name for name in names if name not in conditions]:
        raise ConfigError(f"condition {unknown[0]!r}: the workflow has {list(conditions)}")
    baseline = next(iter(conditions))
    return {k: c for k, c in conditions.items() if not names or k in names or k == baseline}


def add_adapter_conditions(
    conditions: Mapping[str, Condition], model: str, adapter_stages: Sequence[str] = ()
) -> dict[str, Condition]:
    """Add an adapter variant of every condition except the first."""
    _, *others = conditions.items()
    if not others:
        raise ConfigError("an adapter is tried under every condition but the first: there is no other")
    adapted = {f"{name} + {model}": replace(c, model=model, adapter_stages=tuple(adapter_stages)) for name, c in others}
    return {**conditions, **adapted}


def evaluate(
    engine: Engine,
    console: "Console",
    experiment: Experiment,
    examples: Sequence[Example],
    out: Path,
    *,
    concurrency: int,
    fidelity: int = 0,
    judge: Engine | None = None,
    direct: str | None = None,
    workers: RayWorkers | None = None,
) -> Summary:
    """Run or continue an evaluation; print tables and write `report.json`.

    Args:
        workers: Run the examples instead of `engine`.
        direct: Adapter of the engine that gives final answers in a single call. Adds the conditions "direct"
            and "direct + FT" on the same examples.
        fidelity: Number of baseline runs to measure divergence on.
        judge: Compares the answers of each condition with the baseline's.
    """
    _require_libraries()
    name, settings = experiment.name, experiment.settings(engine, examples)
    run = partial(_run, engine, console, examples=examples, concurrency=concurrency, workers=workers)
    records, num_new = run(name, experiment, RunDirectory(out, settings))
    if direct is not None:
        single = _single_calls(experiment, direct)
        extra, more = run("direct", single, RunDirectory(out / "direct", single.settings(engine, examples)))
        records, num_new = records | extra, num_new + more
    report = {"settings": settings, **summarize(examples, records, max_tokens=experiment.sampling.max_tokens)}
    earlier = read_json_object(out / "report.json") if (out / "report.json").exists() else None
    if earlier and not num_new and earlier.get("settings") == json.loads(json.dumps(settings)):
        report |= {
            section: earlier[section] for section in DEFERRED_SECTIONS if section in earlier
        }  # of the same records
    for line in describe_scoring(report, earlier):
        print_text(console, line)
    print_table(console, f"{name}, {len(examples)} examples, 95% intervals", *score_table(report))
    if (order := order_table(report))[1]:
        print_table(console, f"{name}: which of two comes off better", *order)
    for label, condition in report["conditions"].items():
        for key, what in (("unparseable", "could not be parsed"), ("cut", "cut at the limit of tokens")):
            if counts := condition[key]:
                shares = (f"{stage} {n} of {condition['calls'].get(stage, '?')}" for stage, n in counts.items())
                print_text(console, f"{label}: {what}: {', '.join(shares)}")
        if errors := condition["errors"]:
            print_text(console, f"{label}: ended with an error: {errors}, the first: {condition['first error']}")
    write_json(out / "report.json", report)
    if fidelity:
        baseline = {r["id"]: r for r in records[report["baseline"]]}
        subset, divergences = transcripts(examples[:fidelity], baseline), []
        with progress(console, "fidelity", len(subset)) as tick:
            for _, divergence in measure_divergence(
                engine,
                experiment.workflow,
                subset,
                experiment.conditions,
                sampling=experiment.sampling,
                options=experiment.options,
            ):
                divergences.append(divergence)
                tick()
        units = [shared_units(e) for e in examples if e.id in {task.id for task in subset}]
        report["fidelity"] = print_divergence(console, name, divergences, units)
        write_json(out / "report.json", report)
    if judge is not None:
        report["judge"] = judge.model_info.name
        report["win rates"] = win_rates(judge, console, examples, records)
        write_json(out / "report.json", report)
    return report


def _single_calls(experiment: Experiment, adapter: str) -> Experiment:
    """Return `single_call`, plain and with an adapter (Table 4's distilled baseline)."""
    workflow = find("single_call")
    return replace(
        experiment,
        name="single_call",
        workflow=workflow,
        conditions={"direct": Condition("prefix"), "direct + FT": Condition("prefix", model=adapter)},
        options={key: value for key, value in experiment.options.items() if key in options_of(workflow)},
    )


def _require_libraries() -> None:
    """Raise MissingDependencyError if a library of the evaluation is missing."""
    for module in ("filelock", "lemminflect", "math_verify", "rouge", "scipy", "statsmodels"):
        require(module, "eval")


def _run(
    engine: Engine,
    console: "Console",
    label: str,
    experiment: Experiment,
    run_dir: RunDirectory,
    *,
    examples: Sequence[Example],
    concurrency: int,
    workers: RayWorkers | None,
) -> tuple[dict[str, list[RunRecord]], int]:
    """Run missing examples; return all records and the number newly completed."""
    with exclusive_dir(run_dir.path):  # reading removes a line that another process may be writing
        num_done = sum(1 for c in experiment.conditions for r in run_dir.records(c) if not r.get("error"))
    with progress(console, label, len(examples) * len(experiment.conditions), num_done) as tick:
        records = evaluate_conditions(
            engine,
            experiment,
            examples,
            run_dir,
            concurrency=concurrency,
            on_done=lambda condition, record: tick(),
            workers=workers,
        )
    return records, sum(1 for rows in records.values() for r in rows if not r.get("error")) - num_done


def ensure_some_succeeded(report: Summary) -> None:
    """Raise RequestFailedError if all runs of a condition failed."""
    for name, condition in report["conditions"].items():
        if sum(condition["errors"].values()) == report["n"]:
            first = condition["first error"]
            raise RequestFailedError(f"{name}: all {report['n']} runs ended with an error, the first: {first}")


def print_divergence(
    console: "Console", name: str, divergences: Sequence[Mapping[str, Sequence[TokenDivergence]]], units: Units
) -> list[dict[str, Any]]:
    """Print the divergence by condition and stage; return the rows as JSON."""
    summaries = summarize_divergence(divergences, units)
    rows = []
    for s in summaries:
        before, after, kl = (format_estimate(e, places=3) for e in (s.before, s.after, s.divergence))
        gap = format_estimate(s.gap, places=3, sign=True)
        rows.append([f"{s.condition}: {s.stage}", before, after, gap, kl, str(s.tokens)])
    header = ["fidelity, nats a token", "log-loss, baseline", "reused", "gap", "KL", "tokens"]
    print_table(console, f"{name}: the baseline's own traces under reuse, n = {len(divergences)}", header, rows)
    return [asdict(s) for s in summaries]


def win_rates(
    judge: Engine, console: "Console", examples: Sequence[Example], records: Mapping[str, Sequence[RunRecord]]
) -> dict[str, Any]:
    """Print and return how often each condition beats the baseline."""
    (_, baseline), *others = records.items()
    result, rows = {}, []
    for name, after in others:
        triples = zip(map(judge_prompt, examples), baseline, after, strict=True)
        pairs = [(request, a, b) for request, a, b in triples if not (a.get("error") or b.get("error"))]
        if not pairs:
            continue
        verdicts = {}
        with progress(console, f"judging {name}", len(pairs)) as tick:
            for index, verdict in judge_pairs(judge, *map(list, zip(*pairs, strict=True))):
                verdicts[index] = verdict
                tick()
        lost, won = (mean([float(v.score == s) for _, v in sorted(verdicts.items())]) for s in (-1, 1))
        unread = sum(v.unparsed for v in verdicts.values())
        if errors := [v.error for _, v in sorted(verdicts.items()) if v.error]:
            print_text(console, f"{name}: {len(errors)} pairs could not be asked, the first: {errors[0]}")
        scores = [v.score for v in verdicts.values()]
        net = matched_pairs(scores.count(1), scores.count(-1), len(pairs))
        same = sum(v.same_letter for v in verdicts.values())
        result[name] = {"lost": asdict(lost), "won": asdict(won), "net": asdict(net), "same letter": same}
        result[name]["unread"] = unread
        counts = [str(same), str(unread), str(len(pairs))]
        rows.append([name, format_estimate(lost, 100), format_estimate(won, 100), format_p_value(asdict(net)), *counts])
    header = ["condition", "baseline wins %", "condition wins %", "p", "same letter twice", "unread votes", "n"]
    print_table(console, "Win rates, asked in both orders", header, rows)
    return result


def bench(
    engine: Engine,
    console: "Console",
    experiment: Experiment,
    examples: Sequence[Example],
    out: Path,
    *,
    concurrency: int = 32,
    workers: RayWorkers | None = None,
) -> dict[str, Any]:
    """Time all conditions on the baseline's tokens; write `speed.json` and a plot.

    Args:
        workers: Run the examples instead of `engine`; all conditions of an example are timed by one worker.
    """
    _require_libraries()
    require("matplotlib", "viz")
    name, conditions = experiment.name, experiment.conditions
    (baseline, first), *others = conditions.items()
    if not others:
        raise ConfigError(f"conditions {list(conditions)}: speed compares two or more")
    settings = experiment.settings(engine, examples)
    with exclusive_dir(out):
        records, _ = _run(
            engine,
            console,
            "traces",
            replace(experiment, conditions={baseline: first}),
            RunDirectory(out / "traces", settings),
            examples=examples,
            concurrency=concurrency,
            workers=workers,
        )
        traces = {r["id"]: r for r in records[baseline] if not r.get("error")}
        errors = [r["error"] for r in records[baseline] if r.get("error")]
        if not traces:
            raise DataError(f"{name}: no example could be run")
        run_dir = RunDirectory(out, settings)
        timed = {r["id"]: r for r in run_dir.records("timed")}
        missing = [e for e in examples if e.id in traces and e.id not in timed]
        with progress(console, name, len(traces), len(timed)) as tick:
            function = partial(time_on_traces, experiment.workflow, conditions, experiment.options)
            for record in run_examples(function, engine, workers, missing, traces, max_examples=len(missing)):
                if record.get("error"):  # of its worker
                    errors.append(record["error"])
                    continue
                run_dir.append("timed", record)
                timed[record["id"]] = record
                tick()
    if errors:
        print_text(console, f"{len(errors)} examples could not be run, the first: {errors[0]}")
    costs = [timed[e.id] for e in examples if e.id in timed]
    report: dict[str, Any] = {"settings": settings, "n": len(costs), "failed": len(errors), "ratios": {}}
    for other, _ in others:
        ratios = speed_rows(costs, baseline, other)
        report["ratios"][other] = {label: asdict(estimate) for label, estimate in ratios.items()}
        rows = [[label, format_estimate(estimate, places=2)] for label, estimate in ratios.items()]
        title = f"{name}: {baseline} over {other}, {len(costs)} examples"
        print_table(console, title, ["measure", "ratio (95%)"], rows)
    first_other = others[0][0]
    report["points"] = [  # tokens generated, end-to-end speedup
        (r["generated"], r["costs"][baseline]["seconds"] / r["costs"][first_other]["seconds"]) for r in costs
    ]
    speedup_over_tokens({name: report["points"]}, out / "speed.svg")
    write_json(out / "speed.json", report)
    return report
