"""The workflows and the evaluation on a (fake) vLLM server, over a tiny model that reads text."""

import json

import pytest
from helpers.command_line import app
from helpers.fake_vllm import serving_vllm
from helpers.live_server import make_engine
from typer.testing import CliRunner

from choreograph import SamplingParams, connect
from choreograph.errors import ConfigError
from choreograph.lab.evaluation.datasets import Example
from choreograph.lab.evaluation.experiment import Experiment
from choreograph.lab.evaluation.run_dir import RunDirectory
from choreograph.lab.evaluation.runner import evaluate_conditions
from choreograph.lab.workflows import conditions_of, find
from choreograph.lab.workflows.run import run_workflow

TASKS = {
    "tree_of_thoughts": ("What is 3 + 4?", {"branches": 3, "voters": 2}),
    "debate_iterative": ("What is 3 + 4?", {"rounds": 2}),
    "debate_parallel": ("What is 3 + 4?", {"rounds": 2}),
    "multi_qa": (["What is the capital of France?", "Who wrote Hamlet?"], {"topology": "parallel"}),
    "branch_solve_merge": (["dog", "run", "sea", "stone"], {"topology": "parallel"}),
    "prisoners_dilemma": ("Alice", {"guard": True}),
}
SAMPLING = SamplingParams(max_tokens=6, logprobs=2)


@pytest.fixture(scope="module")
def served(talker_folder):
    """A fake server over the tiny model, and an engine that is connected to it."""
    with (
        serving_vllm(make_engine(talker_folder, 32768), root=talker_folder) as (url, fake),
        connect(url, engine="vllm") as engine,
    ):
        yield url, engine, fake


@pytest.mark.parametrize("mode", ["choreographed", "prefix"])
@pytest.mark.parametrize("name", TASKS)
def test_a_workflow_gives_what_it_gives_in_process(name, mode, served, talker):
    task, options = TASKS[name]
    _, engine, fake = served

    def run(engine):
        result = run_workflow(engine, find(name), task, mode=mode, sampling=SAMPLING, options=options)
        return result.run.transcript(), result.answer.text, result.run.outputs

    assert run(engine) == run(talker)
    assert not fake.names
    talker.clear_cache()


def test_a_workflow_runs_with_repair_and_the_replayed_tokens_of_another_run(served):
    _, engine, fake = served
    task, options = TASKS["debate_parallel"]
    first = run_workflow(engine, find("debate_parallel"), task, mode="prefix", sampling=SAMPLING, options=options)
    replay = first.run.transcript()
    again = run_workflow(
        engine,
        find("debate_parallel"),
        task,
        mode="choreographed",
        sampling=SamplingParams(max_tokens=6),
        options=options,
        replay=replay,
    )
    assert again.run.transcript() == replay
    assert again.metrics.cached and not fake.names


def test_an_evaluation_gives_the_records_of_one_in_process(served, talker, tmp_path):
    _, engine, fake = served
    examples = [Example(f"m{i}", "math", f"What is {i} + {i}?", {"answer": str(2 * i)}) for i in range(1, 5)]
    workflow, sampling = find("debate_parallel"), SamplingParams(max_tokens=5)

    def run(engine, folder):
        options = {"sampling": sampling, "seed": 0, "options": {"rounds": 1, "agents": 2}}
        conditions = conditions_of(workflow)
        experiment = Experiment("debate_parallel", workflow, conditions, **options)
        run_dir = RunDirectory(folder, experiment.settings(engine, examples))
        records = evaluate_conditions(engine, experiment, examples, run_dir, concurrency=3)
        return {name: [r["tokens"] for r in rows] for name, rows in records.items()}

    assert run(engine, tmp_path / "a") == run(talker, tmp_path / "b")
    assert not fake.names
    assert fake.max_in_flight > 1


def test_the_commands_compute_on_a_server(served, tmp_path):
    url, _, fake = served
    before, runner = len(fake.bodies), CliRunner()
    arguments = ["debate_parallel", "--vllm", url, "--max-tokens", "4", "--option", "rounds=1", "--json"]
    result = runner.invoke(app, ["run", *arguments, "--task", "What is 3 + 4?"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["cached"] > 0
    assert len(fake.bodies) > before
    data = tmp_path / "math.jsonl"
    data.write_text(json.dumps({"question": "What is 1 + 1?", "answer": "#### 2"}) + "\n")
    evaluated = ["--data", str(data), "--split", "all", "--out", str(tmp_path / "out")]
    result = runner.invoke(app, ["eval", *arguments, *evaluated])
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["settings"]["engine"] == {"backend": "vllm"}
    for wrong in (["--fidelity", "1"], ["--adapter", "folder"]):
        assert runner.invoke(app, ["eval", *arguments, *evaluated, *wrong]).exit_code != 0


def test_text_ends_at_stop_strings_and_streams_in_pieces(served, talker):
    _, engine, _ = served

    def run(engine):
        with engine.session(seed=5) as session:
            question = session.prefill(session.user("Which river flows through Paris?"))
            whole = session.decode(session.assistant("It is"), [question], max_tokens=40, ignore_eos=True, seed=3)
            pieces = list(whole.stream())
            stop = whole.text[20:23]
            cut = session.decode(
                session.assistant("It is"), [question], max_tokens=40, ignore_eos=True, seed=3, stop=stop
            )
            assert "".join(pieces) == whole.text and len(pieces) > 3
            assert stop not in cut.text and whole.text.startswith(cut.text) and cut.finish_reason == "stop"
            after = session.decode(session.assistant(), [question, cut], temperature=0, max_tokens=3)
            return pieces[:2], cut.text, cut.tokens, after.tokens, whole.role, question.text

    assert run(engine) == run(talker)


def test_step_graphs_need_an_engine(served):
    _, engine, _ = served
    with pytest.raises(ConfigError, match="vLLM"):
        run_workflow(engine, find("peer"), "What is 3 + 4?", mode="choreographed")


async def test_messages_can_be_awaited(served):
    _, engine, _ = served
    with engine.session(seed=0) as session:
        assert (await session.decode("One two", max_tokens=4, ignore_eos=True)).output_token_ids
