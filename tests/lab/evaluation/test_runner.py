"""Evaluations from end to end on a tiny model that reads text: resumed, fidelity, speed, judges, the command line."""

import json
import math
import re
from dataclasses import asdict

import pytest
from helpers.command_line import app
from helpers.inspect_engine import inspect
from typer.testing import CliRunner

from choreograph import CacheConfig, Engine, EngineConfig, SamplingParams
from choreograph.console import make_console
from choreograph.errors import ChoreographError, ConfigError, DataError, RequestFailedError
from choreograph.lab.evaluation import report
from choreograph.lab.evaluation.datasets import Example, make_games
from choreograph.lab.evaluation.experiment import Experiment, example_seed
from choreograph.lab.evaluation.fidelity import (
    measure_divergence,
    speed_rows,
    summarize_divergence,
    time_conditions,
    transcripts,
)
from choreograph.lab.evaluation.judge import Verdict, judge_pairs, judge_prompt
from choreograph.lab.evaluation.metrics import SCORING_VERSION
from choreograph.lab.evaluation.report import ensure_some_succeeded, order_effect, score_table, summarize
from choreograph.lab.evaluation.run_dir import RunDirectory, exclusive_dir
from choreograph.lab.evaluation.runner import evaluate_conditions
from choreograph.lab.evaluation.statistics import matched_pairs
from choreograph.lab.replay.dry_run import TaskTranscript, dry_run
from choreograph.lab.workflows import Condition, WorkflowRun, conditions_of, find

SAMPLING = SamplingParams(temperature=0.7, top_p=0.95, max_tokens=6)
MATH = [Example(f"m{i}", "math", f"What is {i} + {i}?", {"answer": str(2 * i)}) for i in range(1, 5)]
BOTH = {"baseline": Condition("prefix"), "choreographed": Condition("choreographed")}


def run(engine, folder, name="single_call", examples=MATH, conditions=BOTH, at_once=4, seed=0, **options):
    experiment = Experiment(name, find(name), conditions, SAMPLING, seed, options)
    run_dir = RunDirectory(folder, experiment.settings(engine, examples))
    return evaluate_conditions(engine, experiment, examples, run_dir, concurrency=at_once)


def test_the_same_seed_gives_the_same_records_however_many_run_at_once(talker, tmp_path):
    one = run(talker, tmp_path / "a", at_once=1)
    assert run(talker, tmp_path / "b", at_once=4) == one
    assert [r["id"] for r in one["baseline"]] == [e.id for e in MATH]
    other = run(talker, tmp_path / "c", seed=1)
    assert other["baseline"] != one["baseline"]
    assert example_seed(0, "m1") != example_seed(0, "m2") != example_seed(1, "m2")


def test_two_examples_of_one_id_are_refused(talker, tmp_path):
    folder = RunDirectory(tmp_path, {})
    experiment = Experiment("single_call", find("single_call"), {}, SamplingParams())
    with pytest.raises(DataError, match=r"have the ids \['m1'\]"):
        evaluate_conditions(talker, experiment, [MATH[0], MATH[0]], folder)


def test_a_run_goes_on_where_it_stopped(talker, tmp_path):
    whole = run(talker, tmp_path)
    file = tmp_path / "choreographed.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:2]) + lines[2][: len(lines[2]) // 2])
    steps = talker.stats().num_steps
    assert run(talker, tmp_path) == whole
    assert talker.stats().num_steps > steps
    steps = talker.stats().num_steps
    assert run(talker, tmp_path) == whole
    assert talker.stats().num_steps == steps, "nothing is run twice"
    with pytest.raises(ConfigError, match="seed"):
        run(talker, tmp_path, seed=5)
    file.write_text("not JSON\n" + file.read_text())
    with pytest.raises(DataError, match="damaged"):
        run(talker, tmp_path)


def test_conditions_with_one_file_are_refused(tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(ConfigError, match="'leak none' and 'Leak none' would share a file"):
        RunDirectory(folder, {"conditions": {"leak none": {}, "Leak none": {}}})
    assert not folder.exists()


def test_a_file_is_no_folder_of_a_run(tmp_path):
    file = tmp_path / "file"
    file.touch()
    for path in (file, file / "below"):
        with pytest.raises(ConfigError, match=f"{path}: directory cannot be created"):
            RunDirectory(path, {})
        with pytest.raises(ConfigError, match="directory cannot be created"), exclusive_dir(path):
            pass


def test_any_name_of_a_condition_has_a_file_of_its_own(tmp_path):
    names = ["leak none", "leak-none", "leak%2Dnone", "half 1/2", "half 1%2F2", "half 1", "..", "a\0b", "a%00b", ""]
    folder = RunDirectory(tmp_path, {"conditions": dict.fromkeys(names)})
    for name in names:
        folder.append(name, {"id": name})
    assert [folder.records(name) for name in names] == [[{"id": name}] for name in names]
    assert folder.path_for("leak none").name == "leak-none.jsonl"


def test_errors_are_records_and_scores(talker, tmp_path):
    examples = [MATH[0], Example("long", "math", "word " * 5000, {"answer": "1"})]
    result = run(talker, tmp_path, examples=examples)
    assert result["baseline"][1]["error"].startswith(("RequestTooLargeError", "InvalidPositionError"))
    report = summarize(examples, result, max_tokens=6)
    assert report["conditions"]["baseline"]["scores"]["failed"]["value"] == 0.5
    assert sum(report["conditions"]["baseline"]["errors"].values()) == 1
    assert report["conditions"]["baseline"]["first error"] == result["baseline"][1]["error"]
    head, lines = score_table(report)
    assert len(lines) == 2 and len(lines[0]) == len(head)


def draft_and_answer(p, task):
    draft = p.decode("draft", p.assistant(), [p.prefill("task", p.user(task))])
    assert draft.output_token_ids
    return p.decode("answer", p.assistant(), [draft])


def test_a_crowded_cache_fails_nobody(talker, tmp_path):
    """Programs that fill the cache together run alone in the end; and a run that failed is tried again."""
    examples = [Example(f"e{i}", "text", f"Say {i}.") for i in range(4)]
    condition = {"choreographed": Condition("choreographed")}

    def play(tokens):
        engine = Engine(
            inspect(talker).hf_model, EngineConfig(cache=CacheConfig(capacity=tokens, poison_freed_pages=True))
        )
        folder = RunDirectory(tmp_path / str(tokens), {})
        experiment = Experiment("draft_and_answer", draft_and_answer, condition, SAMPLING)
        result = evaluate_conditions(engine, experiment, examples, folder, concurrency=4)
        return result["choreographed"]

    roomy, crowded = play(1024), play(96)
    assert not any(r.get("error") for r in crowded)
    assert [r["tokens"] for r in crowded] == [r["tokens"] for r in roomy]
    file = tmp_path / "96" / "choreographed.jsonl"
    kept = [line for line in file.read_text().splitlines(keepends=True) if '"e0"' not in line]
    file.write_text(json.dumps({"id": "e0", "error": "RequestFailedError: once"}) + "\n" + "".join(kept))
    assert [r["tokens"] for r in play(96)] == [r["tokens"] for r in crowded]


def test_plans_come_from_the_baseline(talker, tmp_path):
    conditions = dict(list(conditions_of(find("prisoners_dilemma")).items())[:3])
    result = run(talker, tmp_path, "prisoners_dilemma", make_games(2), conditions, strategy="defect", rounds=1)
    for records in zip(*result.values(), strict=True):
        assert len({json.dumps(r["tokens"]["Bob plans"]) for r in records}) == 1
    report = summarize(make_games(2), result, max_tokens=6)
    assert report["conditions"]["leak both"]["differences"]["Bob cooperates"]["n"] == 2


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (Condition("choreographed", {"depth": 1}), "depth"),
        (Condition("choreographed", model="FT"), "model 'FT'"),
    ],
)
def test_a_condition_that_cannot_run_is_refused_before_another_runs(talker, tmp_path, wrong, said):
    steps = talker.stats().num_steps
    with pytest.raises(ConfigError, match=said):
        run(talker, tmp_path, examples=MATH[:1], conditions=BOTH | {"wrong": wrong})
    with pytest.raises(ConfigError, match="depth"):
        list(
            dry_run(
                inspect(talker).hf_model, find("single_call"), [], Condition("naive", {"depth": 1}), sampling=SAMPLING
            )
        )
    assert talker.stats().num_steps == steps


def test_copies_of_a_stage_that_is_not_there_name_those_that_are(talker, tmp_path):
    result = run(
        talker, tmp_path, examples=MATH[:1], conditions=BOTH | {"c": Condition("prefix", replayed_stages=("plan",))}
    )
    assert "copies ['plan']: the run to copy has the stages ['answer']" in result["c"][0]["error"]


def test_nothing_drifts_where_nothing_is_reused_elsewhere(talker, tmp_path):
    records = run(talker, tmp_path)
    traces = {r["id"]: r for r in records["baseline"]}
    result = list(measure_divergence(talker, find("single_call"), transcripts(MATH, traces), BOTH, sampling=SAMPLING))
    assert sorted(id for id, _ in result) == [e.id for e in MATH]
    rows = summarize_divergence([one for _, one in result])
    assert [r.stage for r in rows] == ["all", "answer"]
    assert set(rows[0].by_position) == {"0-3", "4-15"}
    assert rows[0].tokens == sum(len(r["tokens"]["answer"][0]) for r in traces.values())
    assert abs(rows[0].gap.value) < 1e-2 and rows[0].divergence.value < 1e-2


def test_drift_is_what_log_probabilities_say(talker, tmp_path):
    """Blockage in a debate of two agents: the sum of log-probabilities under both modes, taken another way."""
    examples, options = MATH[:1], {"agents": 2, "rounds": 2}
    records = run(talker, tmp_path, "debate_parallel", examples, **options)
    trace = records["baseline"][0]
    scripts = transcripts(examples, {"m1": trace})
    ((_, result),) = measure_divergence(
        talker, find("debate_parallel"), scripts, BOTH, sampling=SAMPLING, options=options
    )
    logprobs = SamplingParams(logprobs=0)
    for mode, name in (("prefix", "before"), ("choreographed", "after")):
        from choreograph.lab.workflows import WorkflowRun

        with talker.session(mode=mode) as s:
            p = WorkflowRun(s, sampling=logprobs, replay=trace["tokens"])
            find("debate_parallel")(p, examples[0].task, **options)
            talker.run_until_idle()
            said = [(x, m) for x, m in p.calls if m.logprobs]
            for drift, (stage, message) in zip(result["choreographed"], said, strict=True):
                assert drift.stage == stage
                assert getattr(drift, name) == pytest.approx([-x.logprob for x in message.logprobs], abs=2e-2)
    rows = {r.stage: r for r in summarize_divergence([result])}
    assert rows["round 2"].divergence.value > 100 * rows["round 1"].divergence.value
    assert all(math.isfinite(v) for d in result["choreographed"] for v in d.divergence)


def test_both_modes_are_timed_on_the_same_tokens(talker, tmp_path):
    examples, options = MATH[:2], {"branches": 2, "voters": 2}
    records = run(talker, tmp_path, "tree_of_thoughts", examples, **options)
    traces = {r["id"]: r["tokens"] for r in records["baseline"]}
    costs = list(time_conditions(talker, find("tree_of_thoughts"), examples, traces, BOTH, options=options))
    assert [c["id"] for c in costs] == ["m1", "m2"]
    for cost in costs:
        old, new = cost["costs"]["baseline"], cost["costs"]["choreographed"]
        assert [s["generated"] for s in old["stages"]] == [s["generated"] for s in new["stages"]]
        assert (old["mode"], new["mode"]) == ("prefix", "choreographed")
    rows = speed_rows(costs, "baseline", "choreographed")
    assert {"TTFT, all decodes", "end to end", "prompt tokens encoded", "TTFT, vote"} <= set(rows)
    assert all(row.low <= row.value <= row.high for row in rows.values())


def test_a_forced_run_that_goes_another_way_is_named(talker):
    """Of a workflow in which something else than what is said decides."""
    rounds = iter([2, 1])

    def run(p, task):
        said = [p.decode("say", p.assistant(f"{i}"), [p.prefill("task", p.user(task))]) for i in range(next(rounds))]
        return said[-1]

    with talker.session() as session:
        p = WorkflowRun(session, sampling=SAMPLING)
        run(p, "Say.").result()
        content = p.transcript()
    with pytest.raises(DataError, match="m1: forced to its trace"):
        next(time_conditions(talker, run, MATH[:1], {"m1": content}, BOTH, warm_up=False))


def test_where_nothing_is_decoded_there_is_no_figure_of_it(talker, tmp_path):
    def run(p, task):
        return p.prefill("task", p.user(task))

    costs = list(time_conditions(talker, run, MATH[:2], {e.id: {} for e in MATH}, BOTH, warm_up=False))
    assert set(speed_rows(costs, "baseline", "choreographed")) == {"end to end", "prompt tokens encoded"}
    scripts = [TaskTranscript(e.id, e.task, {}) for e in MATH[:2]]
    assert (
        summarize_divergence(
            [result for _, result in measure_divergence(talker, run, scripts, BOTH, sampling=SAMPLING)]
        )
        == []
    )


def test_what_depends_on_log_probabilities_is_not_repeated(talker):
    """A repetition without computing knows none, and would go another way than the run."""

    def run(p, task):
        task = p.prefill("task", p.user(task))
        said = [p.decode("say", "a", [task], sampling=SamplingParams(logprobs=0, max_tokens=1)) for _ in range(2)]
        return p.decode("answer", "b", [max(said, key=lambda m: m.logprobs[0].logprob)])

    scripts = [TaskTranscript("m1", "Say.", {"say": [[5], [6]], "answer": [[7]]})]
    with pytest.raises(DataError, match="m1: stage 'say' asks for log-probabilities"):
        list(measure_divergence(talker, run, scripts, BOTH, sampling=SAMPLING))


@pytest.mark.parametrize("command", ["eval", "bench"])
def test_one_process_at_a_time_evaluates_in_a_folder(command, data, tmp_path, talker_folder):
    """The other one does not even mend a line that is being written."""
    file = tmp_path / "out" / ("traces/baseline.jsonl" if command == "bench" else "baseline.jsonl")
    file.parent.mkdir(parents=True)
    file.write_text('{"id": "m1", ')
    with exclusive_dir(tmp_path / "out"):
        given = [command, "single_call", "--data", str(data), "--out", str(tmp_path / "out"), "--model", talker_folder]
        result = CliRunner().invoke(app, given)
    assert isinstance(result.exception, ConfigError) and "another process" in str(result.exception)
    assert file.read_text() == '{"id": "m1", '


def test_a_judge_that_always_says_the_same_letter_sees_only_ties(talker):
    answers = [{"answer": "It is four."}, {"answer": "Four."}]
    result = dict(judge_pairs(talker, ["2 + 2?", "1 + 3?"], answers, answers[::-1]))
    assert set(result) == {0, 1}
    assert all(v.score in (-1, 0, 1) and 0 <= v.unparsed <= 2 for v in result.values())
    same = dict(judge_pairs(talker, ["2 + 2?"], answers[:1], answers[:1]))
    assert same[0].score == 0, "equal answers cannot win in both orders"
    endless = {"answer": "four " * 40_000}
    result = dict(judge_pairs(talker, ["2 + 2?", "1 + 3?"], [answers[0], endless], [answers[1], answers[1]]))
    assert result[1].unparsed == 2 and "position" in result[1].error, "what cannot be asked is unread"
    with pytest.raises(ChoreographError):
        dict(judge_pairs(talker, ["2 + 2?"], [endless], answers[:1]))


def test_a_judge_that_prefers_a_place_is_counted(talker, monkeypatch):
    """Letters that are the same in both orders are ties; wins are tested by the exact test of matched pairs."""
    verdicts = [Verdict(1, 0), Verdict(1, 0), Verdict(-1, 0), Verdict(0, 0, same_letter=True)]
    monkeypatch.setattr(report, "judge_pairs", lambda judge, *columns: enumerate(verdicts))
    examples = [Example(str(i), "text", "Say.") for i in range(4)]
    records = [{"answer": key} for key in "xyxy"]
    result = report.win_rates(talker, make_console(quiet=True), examples, {"baseline": records, "after": records})
    assert (result["after"]["won"]["value"], result["after"]["lost"]["value"]) == (0.5, 0.25)
    assert result["after"]["same letter"] == 1 and result["after"]["net"] == asdict(matched_pairs(2, 1, 4))


def test_the_favoured_story_is_told_by_matched_pairs():
    """Of ten merges that differ, the first story is better covered in nine."""
    first, second = [1.0] * 9 + [0.0] + [0.5] * 2, [0.5] * 9 + [0.5] + [0.5] * 2
    result = order_effect("concepts", {"story 1": first, "story 2": second}, [])
    assert (result["first"], result["second"], result["equal"]) == (9, 1, 2)
    assert result["share"] == asdict(matched_pairs(9, 1, 12)) and result["share"]["p"] < 0.05
    assert result["difference"]["value"] == pytest.approx((9 * 0.5 - 0.5) / 12)
    assert order_effect("math", {"right": first}, []) is None
    assert order_effect("pair", {"first": [1.0, 0.0], "second": [0.0, 0.0]}, [])["first"] == 1


def test_judges_are_told_what_was_asked():
    assert judge_prompt(MATH[0]) == MATH[0].task
    assert judge_prompt(Example("a", "concepts", ["sea", "dog"])) == "Write a story that uses these concepts: sea; dog."
    assert judge_prompt(Example("b", "text", ["sea", "dog"])) == "sea; dog"


def test_options_that_conditions_set_are_refused(talker):
    workflow = find("multi_qa")
    with pytest.raises(ConfigError, match=r"\['topology'\].*conditions"):
        Experiment("multi_qa", workflow, {}, SamplingParams(), options={"topology": "serial"}).settings(talker, [])


def test_a_condition_that_failed_as_a_whole_is_no_score():
    """Nor are the runs of others that failed hidden."""
    good, bad = {"answer": "5", "findings": {}}, {"error": "InvalidPositionError: too far"}
    counted = {"unparseable": {}, "tokens": {}, "encoded": 0, "cached": 0}
    records = {"baseline": [{**good, **counted}, bad], "reused": [bad, bad]}
    report = summarize([Example(str(i), "math", "", {"answer": "5"}) for i in range(2)], records, max_tokens=4)
    head, lines = score_table(report)
    assert [line[head.index("failed")] for line in lines] == ["1", "2"]
    with pytest.raises(RequestFailedError, match=r"reused: all 2 runs.*too far"):
        ensure_some_succeeded(report)


@pytest.fixture
def data(tmp_path):
    file = tmp_path / "data.jsonl"
    records = [{"id": e.id, "problem": e.task, "answer": e.reference["answer"]} for e in MATH[:2]]
    file.write_text("".join(json.dumps(r) + "\n" for r in records))
    return file


def test_eval_on_the_command_line(data, tmp_path):
    out = tmp_path / "out"
    arguments = [
        "eval",
        "debate_parallel",
        "--data",
        str(data),
        "--out",
        str(out),
        "--max-tokens",
        "4",
        "--option",
        "agents=2",
        "--split",
        "all",
    ]
    result = CliRunner().invoke(app, [*arguments, "--fidelity", "1"])
    assert result.exit_code == 0, result.output
    assert "right %" in result.output and "fidelity" in result.output and "cut at the limit" in result.output
    report = json.loads((out / "report.json").read_text())
    assert report["n"] == 2 and report["fidelity"][0]["stage"] == "all"
    again = CliRunner().invoke(app, [*arguments, "--json"])
    assert json.loads(again.output)["conditions"] == report["conditions"]
    assert json.loads(again.output)["fidelity"] == report["fidelity"], "what was measured of these runs before"


def test_results_of_older_rules_are_scored_again(data, tmp_path, talker_folder):
    out = tmp_path / "out"
    arguments = ["eval", "single_call", "--data", str(data), "--out", str(out), "--max-tokens", "4"]
    arguments += ["--model", talker_folder, "--condition", "choreographed", "--split", "all"]
    assert "version" not in CliRunner().invoke(app, arguments).output
    report = json.loads((out / "report.json").read_text())
    assert report["scoring"] == {"version": SCORING_VERSION, "records": {str(SCORING_VERSION): 4}}
    scores = report["conditions"]["baseline"]["scores"]
    del report["scoring"]
    report["conditions"]["baseline"]["scores"] = {"right": {"value": 0.99}}
    (out / "report.json").write_text(json.dumps(report))
    file = out / "baseline.jsonl"
    file.write_text(file.read_text().replace(f'"scoring": {SCORING_VERSION}, ', "", 1))
    output = " ".join(CliRunner().invoke(app, arguments).output.split())
    assert f"scored again by version {SCORING_VERSION} of the rules, before by 1" in output
    assert "read by version 1 of the rules are kept in 1 records" in output
    report = json.loads((out / "report.json").read_text())
    assert report["conditions"]["baseline"]["scores"] == scores and report["scoring"]["records"]["1"] == 1


def test_an_evaluation_in_which_every_run_failed_says_so(tmp_path, talker_folder):
    file = tmp_path / "long.jsonl"
    file.write_text(json.dumps({"id": "long", "problem": "what " * 40_000, "answer": "5"}))
    given = ["eval", "single_call", "--data", str(file), "--out", str(tmp_path / "out"), "--model", talker_folder]
    result = CliRunner().invoke(app, given)
    assert isinstance(result.exception, RequestFailedError) and "runs ended with an error" in str(result.exception)
    assert (tmp_path / "out" / "report.json").exists()


def test_bench_on_the_command_line(data, tmp_path, talker_folder):
    out = tmp_path / "out"
    arguments = ["bench", "debate_iterative", "--data", str(data), "--out", str(out), "--max-tokens", "4"]
    result = CliRunner().invoke(app, [*arguments, "--option", "rounds=1", "--model", talker_folder])
    assert result.exit_code == 0, result.output
    assert re.search(r"end to end +\d", result.output)
    assert json.loads((out / "speed.json").read_text())["n"] == 2
    assert (out / "speed.svg").read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--condition", "sideways"], "sideways"),
        (["--option", "voters=3"], "voters"),
        (["--data", "nothing.jsonl"], "nothing.jsonl"),
    ],
)
def test_what_eval_cannot_do_is_one_error(data, tmp_path, arguments, said):
    given = ["eval", "debate_parallel", "--data", str(data), "--out", str(tmp_path / "o"), *arguments]
    result = CliRunner().invoke(app, given)
    assert result.exit_code != 0
    assert said in str(result.exception) + result.output
