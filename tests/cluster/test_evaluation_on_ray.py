"""Evaluations and traces on workers of Ray have the records of one process."""

import json
import os
import signal
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
from helpers.command_line import app
from helpers.hypothesis_profile import only_thorough
from helpers.live_server import make_engine
from ray import cloudpickle
from typer.testing import CliRunner

from choreograph import SamplingParams
from choreograph.console import make_console
from choreograph.errors import ConfigError
from choreograph.lab.commands import options
from choreograph.lab.evaluation.datasets import Example, make_games
from choreograph.lab.evaluation.experiment import Experiment, describe_engine
from choreograph.lab.evaluation.ray_workers import EngineWorker, RayWorkers
from choreograph.lab.evaluation.report import bench
from choreograph.lab.evaluation.run_dir import RunDirectory
from choreograph.lab.evaluation.runner import evaluate_conditions
from choreograph.lab.training import collect_traces, load_traces
from choreograph.lab.workflows import Condition, conditions_of, find

SAMPLING = SamplingParams(temperature=0.7, top_p=0.95, max_tokens=6)

GAME = find("prisoners_dilemma")

CONDITIONS = dict(list(conditions_of(GAME).items())[:3])  # the second and third replay plans of the first


@pytest.fixture(scope="module")
def workers(ray_nodes, talker, talker_folder):
    """Two workers on a node of their own, with room for one more."""
    node = ray_nodes.add_node(num_cpus=3, object_store_memory=100 << 20)
    with RayWorkers(partial(make_engine, talker_folder), talker, num_workers=2) as result:
        yield result
    ray_nodes.remove_node(node)


def evaluate(engine, folder, workers=None, on_done=lambda condition, record: None, examples=None):
    examples, options = examples or make_games(8), {"strategy": "defect", "rounds": 1}
    experiment = Experiment("prisoners_dilemma", GAME, CONDITIONS, SAMPLING, options=options)
    run_dir = RunDirectory(folder, experiment.settings(engine, examples))
    return evaluate_conditions(engine, experiment, examples, run_dir, on_done=on_done, workers=workers)


@pytest.fixture(scope="module")
def expected(talker, tmp_path_factory):
    return evaluate(talker, tmp_path_factory.mktemp("one_process"))


@pytest.mark.slow
def test_two_workers_give_the_records_of_one_process(talker, workers, expected, tmp_path):
    steps = talker.stats().num_steps
    assert evaluate(talker, tmp_path, workers) == expected
    assert talker.stats().num_steps == steps


@pytest.mark.slow
def test_an_interrupted_run_continues_with_the_missing_examples(talker, workers, expected, tmp_path):
    done = []

    def interrupt(condition, record):
        done.append((condition, record["id"]))
        if len(done) == 11:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(talker, tmp_path, workers, interrupt)
    result = evaluate(talker, tmp_path, workers, lambda condition, record: done.append((condition, record["id"])))
    assert result == expected
    assert len(done) == len(set(done)) == 24


def kill_process(wf, task):
    if task == "bad":
        os.kill(os.getpid(), signal.SIGKILL)
    return wf.decode("answer", wf.assistant(), [wf.prefill("task", wf.user(task))])


@pytest.mark.slow
@only_thorough
def test_only_the_example_that_ends_its_worker_fails(talker, workers, tmp_path):
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import this module
    examples = [Example(str(number), "text", "bad" if number == 0 else "good") for number in range(8)]
    experiment = Experiment("kill_process", kill_process, {"baseline": Condition("prefix")}, SAMPLING)
    run_dir = RunDirectory(tmp_path, {})
    records = evaluate_conditions(talker, experiment, examples, run_dir, workers=workers)["baseline"]
    assert [record["id"] for record in records if "answer" in record] == list("1234567")
    assert "its worker ended twice" in records[0]["error"]


@pytest.mark.slow
def test_traces_of_workers_are_those_of_one_process(talker, workers, tmp_path):
    pairs = [Example(f"p{i}", "pair", [f"What is {i} plus one?", f"And {i} plus two?"]) for i in range(4)]
    for folder, engines in (("one", None), ("two", workers)):
        arguments = (talker, "multi_qa", find("multi_qa"), pairs[:3], tmp_path / folder)
        collect_traces(*arguments, validation=pairs[3:], sampling=SamplingParams(max_tokens=5), top=2, workers=engines)
    (one_settings, one), (two_settings, two) = (load_traces(tmp_path / folder) for folder in ("one", "two"))
    assert one_settings == two_settings
    for trace, other in zip(*(sorted(traces, key=lambda trace: trace.id) for traces in (one, two)), strict=True):
        assert [without_logprobs(call) for call in trace.calls] == [without_logprobs(call) for call in other.calls]
        assert trace.logprobs == pytest.approx(other.logprobs, abs=1e-4)  # another batch rounds differently
        assert (trace.id, trace.seed, trace.split, trace.units) == (other.id, other.seed, other.split, other.units)


@pytest.mark.slow
@only_thorough
def test_timings_of_workers_are_of_the_traces_and_tokens_of_one_process(talker, workers, tmp_path):
    pairs, reports = [Example(f"p{i}", "pair", [f"Is {i} odd?", f"And {i} plus two?"]) for i in range(5)], []
    workflow = find("multi_qa")
    conditions = dict(list(conditions_of(workflow).items())[:2])
    experiment = Experiment("multi_qa", workflow, conditions, SamplingParams(max_tokens=4))
    for folder, engines in (("one", None), ("two", workers)):
        steps = talker.stats().num_steps
        reports.append(bench(talker, make_console(quiet=True), experiment, pairs, tmp_path / folder, workers=engines))
        assert (talker.stats().num_steps == steps) == (engines is not None)
    one, two = ([point[0] for point in report["points"]] for report in reports)
    assert one == two and len(two) == 5
    (name,) = reports[0]["ratios"]
    assert len({report["ratios"][name]["prompt tokens encoded"]["value"] for report in reports}) == 1


def without_logprobs(call):
    return replace(call, logprobs=(), top=())


def test_a_worker_with_another_model_is_refused(talker, talker_folder):
    half = partial(type(talker).from_pretrained, talker_folder, dtype="bfloat16", device="cpu")
    with pytest.raises(ConfigError, match=r"'dtype': 'bfloat16'.*use one model"):
        next(EngineWorker(half, describe_engine(talker)).run(None, [], None))


@pytest.mark.slow
def test_the_commands_run_own_workflows_on_ray(workers, talker_folder, tmp_path, monkeypatch):
    data, code = tmp_path / "data.jsonl", tmp_path / "own.py"
    data.write_text("".join(json.dumps({"id": str(i), "problem": f"{i} + 1?", "answer": "1"}) + "\n" for i in range(4)))
    code.write_text(
        "def run(wf, task):\n    return wf.decode('answer', wf.assistant(), [wf.prefill('task', wf.user(task))])\n"
    )
    given = [str(code), "--data", str(data), "--model", talker_folder, "--max-tokens", "4", "--split", "all"]
    reports = []
    for more in ([], ["--ray", "auto", "--ray-workers", "1"]):
        out = tmp_path / f"eval{len(more)}"
        result = CliRunner().invoke(app, ["eval", *given, "--out", str(out), "--json", *more])
        assert result.exit_code == 0, result.output
        reports.append(json.loads((out / "report.json").read_text()))
    assert reports[0] == reports[1]
    monkeypatch.setattr(options, "open_ray_workers", lambda *_: nullcontext(workers))
    result = CliRunner().invoke(app, ["trace", *given, "--out", str(tmp_path / "traces"), "--ray", "auto"])
    assert "4 traces" in result.output and len(load_traces(tmp_path / "traces")[1]) == 4
    result = CliRunner().invoke(app, ["bench", *given, "--out", str(tmp_path / "bench"), "--json", "--ray", "auto"])
    assert result.exit_code == 0 and json.loads(result.stdout)["n"] == 4, result.output


@pytest.mark.slow
def test_errors_of_a_worker_are_those_of_one_process(talker, workers, tmp_path):
    experiment = Experiment("prisoners_dilemma", GAME, CONDITIONS, SAMPLING)
    with pytest.raises(ConfigError, match="max_programs=0"):
        evaluate_conditions(
            talker, experiment, make_games(1), RunDirectory(tmp_path, {}), workers=workers, concurrency=0
        )


def test_workers_without_ray_are_refused():
    result = CliRunner().invoke(app, ["eval", "single_call", "--data", "games", "--ray-workers", "2"])
    assert result.exit_code == 2 and "give --ray too" in result.output
