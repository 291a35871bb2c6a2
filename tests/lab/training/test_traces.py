"""From a workflow to a served adapter: traces, lessons, the two commands, on a tiny model that reads text."""

import json
from dataclasses import replace

import pytest
from helpers import tiny_models
from helpers.command_line import app
from helpers.inspect_engine import inspect
from typer.testing import CliRunner

from choreograph import Engine, SamplingParams
from choreograph.errors import ConfigError, DataError
from choreograph.lab.evaluation.datasets import Example
from choreograph.lab.evaluation.run_dir import exclusive_dir
from choreograph.lab.replay.traced_calls import trace_calls
from choreograph.lab.training import (
    TrainConfig,
    answer_examples,
    collect_traces,
    load_traces,
    make_examples,
    train_from_traces,
)
from choreograph.lab.training.examples import baseline_examples
from choreograph.lab.training.losses import example_losses
from choreograph.lab.training.train import split_traces
from choreograph.lab.workflows import StageCall, conditions_of, find

PAIRS = [
    Example(f"p{i}", "pair", [f"What is {i} plus one?", f"What is {i} plus two?"], {"first": {}, "second": {}})
    for i in range(3)
]
SHORT = SamplingParams(max_tokens=5)


@pytest.fixture(scope="module")
def traces(talker, tmp_path_factory):
    out = tmp_path_factory.mktemp("traces")
    return out, collect_traces(talker, "multi_qa", find("multi_qa"), PAIRS, out, sampling=SHORT, top=3)


def test_a_trace_says_all_of_a_run(talker, traces):
    out, result = traces
    assert [t.id for t in result] == ["p0", "p1", "p2"]
    for trace in result:
        call = trace.calls[trace.answer]
        assert call.stage == "answer" and 1 <= len(call.generated) == len(call.logprobs) == len(call.top) <= 5
        assert all(len(top) >= 3 for top in call.top)
        assert trace.transcript == {"answer": [call.generated]}
    settings, again = load_traces(out)
    assert sorted(again, key=lambda t: t.id) == result and settings["workflow"] == "multi_qa"


def test_traces_that_were_stopped_go_on(talker, traces, tmp_path):
    out, result = traces
    (tmp_path / "settings.json").write_text((out / "settings.json").read_text())
    first, *_ = (out / "traces.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "traces.jsonl").write_text(first + '{"id": "p1", "cut')
    drawn = []
    again = collect_traces(
        talker,
        "multi_qa",
        find("multi_qa"),
        PAIRS,
        tmp_path,
        sampling=SHORT,
        top=3,
        on_done=lambda condition, record: drawn.append(record["id"]),
    )
    assert json.loads(first)["id"] not in drawn and len(drawn) == 2
    assert [t.transcript for t in again] == [t.transcript for t in result]


def test_the_baseline_in_one_pass_is_what_was_traced(talker, traces):
    for trace, example in zip(traces[1], baseline_examples(traces[1]), strict=True):
        (loss,) = example_losses(inspect(talker).hf_model, [example])
        assert loss == pytest.approx(-sum(trace.logprobs) / len(trace.logprobs), abs=1e-4)


def test_lessons_are_the_workflow_under_reuse(talker, traces):
    workflow = find("multi_qa")
    for name, condition in conditions_of(workflow).items():
        if name == "baseline":
            continue
        examples = make_examples(inspect(talker).hf_model, workflow, traces[1], condition)
        for trace, example in zip(traces[1], examples, strict=True):
            said = example.calls[-1]
            assert said.generated == trace.calls[trace.answer].generated
            assert said.top == trace.calls[trace.answer].top
            with talker.session() as session:
                from choreograph.lab.workflows import WorkflowRun

                p = WorkflowRun(session, replay=trace.transcript, sampling=SamplingParams(logprobs=0))
                answer = workflow(p, trace.task, **condition.options)
                heard = [x.logprob for x in answer.logprobs]
            (loss,) = example_losses(inspect(talker).hf_model, [example])
            assert loss == pytest.approx(-sum(heard) / len(heard), abs=1e-4)


def test_final_answers_become_lessons_of_one_call(talker, traces):
    examples = answer_examples(inspect(talker).hf_model, find("single_call"), traces[1][:1])
    decodes = [call for call in examples[0].calls if call.generated is not None]
    assert [call.generated for call in decodes] == [traces[1][0].calls[traces[1][0].answer].generated]


def test_an_answer_that_was_read_out_of_a_message_is_taught_as_a_sentence(talker, traces):
    """Where none could be read, none is."""
    adapter, (trace, other, *_) = inspect(talker).hf_model, traces[1]
    result = [replace(trace, outputs={"answer": "\\frac{1}{2}"}), replace(other, outputs={"answer": None})]
    (example,) = answer_examples(adapter, find("single_call"), result)
    (said,) = [call.generated for call in example.calls if call.generated]
    assert (
        adapter.tokenizer.decode(said[:-1]) == "The answer is \\boxed{\\frac{1}{2}}."
        and said[-1] in adapter.eos_token_ids
    )


@pytest.mark.parametrize("rounds", [1, 2])
def test_a_final_answer_is_not_taught_to_a_workflow_of_several_decodes(talker, traces, rounds):
    with pytest.raises(ConfigError, match="single decode"):
        answer_examples(inspect(talker).hf_model, find("debate_iterative"), traces[1][:1], options={"rounds": rounds})


def test_damaged_traces_are_refused(traces, tmp_path):
    out, _ = traces
    with pytest.raises(DataError, match="no traces"):
        load_traces(tmp_path)
    (tmp_path / "settings.json").write_text((out / "settings.json").read_text())
    for text, words in (("{", "damaged"), ('{"id": "x"}', "damaged"), ('{"id":"x","version":9,"calls":[]}', "version")):
        (tmp_path / "traces.jsonl").write_text(text + "\n")
        with pytest.raises(DataError, match=words):
            load_traces(tmp_path)
    good = (out / "traces.jsonl").read_text().splitlines()[0]
    for wrong in (5, None, "x", [], json.loads(good) | {"answer": 99}, json.loads(good) | {"answer": -1}):
        (tmp_path / "traces.jsonl").write_text(json.dumps(wrong) + "\n")
        with pytest.raises(DataError, match="damaged trace"):
            load_traces(tmp_path)
    (tmp_path / "traces.jsonl").write_text(good + "\n\n")
    assert len(load_traces(tmp_path)[1]) == 1
    (tmp_path / "settings.json").write_text("{}")
    with pytest.raises(DataError, match="lacks"):
        load_traces(tmp_path)


def test_from_a_workflow_to_an_adapter_on_the_command_line(tmp_path, talker_folder):
    data = tmp_path / "data.jsonl"
    rows = [{"id": f"q{i}", "question": f"What is {i} plus {i}?", "answers": [str(2 * i)]} for i in range(20)]
    data.write_text("".join(json.dumps(r) + "\n" for r in rows))
    runner, traced, out = CliRunner(), tmp_path / "traces", tmp_path / "adapter"
    model = ["--model", talker_folder]
    common = ["--max-tokens", "4", "--dtype", "float32", *model]
    result = runner.invoke(app, ["trace", "multi_qa", "--data", str(data), "--out", str(traced), *common])
    assert result.exit_code == 0, result.output
    assert "10 traces (2 for validation)" in result.output
    command = ["train", str(traced), "--out", str(out), "--epochs", "1", "--rank", "2", *model]
    result = runner.invoke(app, [*command, "--condition", "parallel", "--batch-size", "2"])
    assert result.exit_code == 0, result.output
    assert "gap closed" in result.output and "trained share" in result.output
    assert (out / "adapter_model.safetensors").is_file()
    learned, check = (
        {u for t in load_traces(traced)[1] if t.split == s for u in t.units} for s in ("train", "validation")
    )
    assert (len(learned), len(check)) == (8, 2) and not learned & check, "a question is in one split alone"
    evaluated = ["eval", "multi_qa", "--data", str(data), "--out", str(tmp_path / "eval"), "--adapter", str(out)]
    result = runner.invoke(app, [*evaluated, *common, "--condition", "parallel", "--fidelity", "2", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.output)
    assert list(report["conditions"]) == ["baseline", "parallel", "parallel + FT"]
    drift = {r["condition"]: r["after"]["value"] for r in report["fidelity"] if r["stage"] == "all"}
    assert drift["parallel + FT"] != drift["parallel"]
    assert report["n"] == 10, "the test split alone"
    for seen in (["--split", "all"], ["--split", "validation"], ["--split-seed", "1"]):
        result = runner.invoke(app, [*evaluated, *common, *seen])
        assert isinstance(result.exception, DataError) and "questions or games: use disjoint" in str(result.exception)
    result = runner.invoke(app, [*command[:2], *model, "--out", str(tmp_path / "x")])
    assert isinstance(result.exception, ConfigError) and "['serial', 'parallel']" in str(result.exception)
    result = runner.invoke(app, [*command[:2], *model, "--condition", "sideways", "--out", str(tmp_path / "x")])
    assert isinstance(result.exception, ConfigError) and "sideways" in str(result.exception)
    result = runner.invoke(app, [*command, "--direct", "single_call"])
    assert isinstance(result.exception, ConfigError) and "another setting" in str(result.exception)
    direct = [*command[:2], "--out", str(tmp_path / "direct"), *command[4:], "--direct", "single_call"]
    assert runner.invoke(app, direct).exit_code == 0
    few = ["--limit", "2", "--condition", "serial", "--out", str(tmp_path / "few"), *common]
    compared = ["eval", "multi_qa", "--data", str(data), *few, "--direct"]
    result = runner.invoke(app, [*compared, str(tmp_path / "direct"), "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.output)
    assert list(report["conditions"]) == ["baseline", "serial", "direct", "direct + FT"]
    assert report["conditions"]["direct + FT"]["differences"]["both"]["n"] == 2, "paired with the workflow's baseline"
    assert report["conditions"]["direct"]["calls"] == {"answer": 2}
    result = runner.invoke(app, [*compared, str(out)])
    assert isinstance(result.exception, ConfigError) and "trained for the workflow 'multi_qa'" in str(result.exception)


def test_traces_of_a_workflow_that_has_changed_are_refused(talker, tmp_path):
    file = tmp_path / "own.py"
    text = "def run(p, task):\n    return p.decode('answer', p.assistant(), [p.prefill('task', p.user(task))])\n"
    file.write_text(text)
    tasks = [Example(f"t{i}", "text", f"Count to {i}.") for i in range(2)]
    collect_traces(talker, str(file), find(str(file)), tasks, tmp_path / "traces", sampling=SHORT)
    file.write_text(text + "# changed\n")
    with pytest.raises(ConfigError, match="has changed"):
        train_from_traces(inspect(talker).hf_model, tmp_path / "traces", tmp_path / "adapter", workflow=str(file))
    file.write_text("raise AssertionError('data made this run')\n")
    with pytest.raises(ConfigError, match="--workflow"):
        train_from_traces(inspect(talker).hf_model, tmp_path / "traces", tmp_path / "adapter")


def test_a_baseline_that_reuses_is_measured_as_it_was_computed(talker, tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "from choreograph.lab.workflows import Condition\n"
        "from choreograph.lab.workflows.multi_qa import run\n"
        "CONDITIONS = {t: Condition('choreographed', {'topology': t}) for t in ('serial', 'parallel')}\n"
    )
    made = collect_traces(talker, str(file), find(str(file)), PAIRS, tmp_path / "traces", sampling=SHORT)
    config = TrainConfig(lora_rank=2, epochs=1)
    adapter = inspect(talker).hf_model
    report = train_from_traces(adapter, tmp_path / "traces", tmp_path / "adapter", config, workflow=str(file))
    heard = [value for trace in split_traces(made, None, 0)[1] for value in trace.logprobs]
    assert report.baseline == pytest.approx(-sum(heard) / len(heard), abs=1e-4)
    assert abs(report.loss_before - report.baseline) > 1e-3


def test_traces_of_other_weights_are_refused(talker, traces, tmp_path):
    out, _ = traces
    settings = json.loads((out / "settings.json").read_text())
    (tmp_path / "traces.jsonl").write_text((out / "traces.jsonl").read_text())
    for change in ({"weights": "others"}, {"weights": "others", "dtype": "bfloat16"}, {"model": "another"}):
        (tmp_path / "settings.json").write_text(json.dumps(settings | change))
        with pytest.raises(ConfigError, match="train the model that made them"):
            train_from_traces(inspect(talker).hf_model, tmp_path, tmp_path / "adapter", condition="parallel")


def test_weights_are_known_in_another_type(talker, talker_folder):
    for dtype in ("bfloat16", "float32"):
        same = inspect(Engine.from_pretrained(talker_folder, dtype=dtype)).hf_model
        assert same.sampled_weights_hash == inspect(talker).hf_model.sampled_weights_hash
    assert (
        inspect(Engine.from_pretrained(tiny_models.build(seed=5))).hf_model.sampled_weights_hash
        != inspect(Engine.from_pretrained(tiny_models.build())).hf_model.sampled_weights_hash
    )


def test_a_record_that_ends_within_a_character_is_cut_off(talker, traces, tmp_path):
    out, _ = traces
    (tmp_path / "settings.json").write_text((out / "settings.json").read_text())
    whole = (out / "traces.jsonl").read_bytes()
    (tmp_path / "traces.jsonl").write_bytes(whole + '{"id": "漢'.encode()[:-1])
    assert load_traces(tmp_path)[1] == load_traces(out)[1]
    collect_traces(talker, "multi_qa", find("multi_qa"), PAIRS, tmp_path, sampling=SHORT, top=3, on_done=pytest.fail)
    assert (tmp_path / "traces.jsonl").read_bytes() == whole
    for settings in ('{"model', "[1]"):
        (tmp_path / "settings.json").write_text(settings)
        with pytest.raises(DataError, match="settings"):
            load_traces(tmp_path)
        with pytest.raises(DataError, match="settings"):
            collect_traces(talker, "multi_qa", find("multi_qa"), PAIRS, tmp_path, sampling=SHORT, top=3)


def test_a_decode_with_a_sampling_of_its_own_is_heard_as_the_others_are(talker, tmp_path):
    def run(p, task):
        asked = p.prefill("task", p.user(task))
        return p.decode("answer", p.assistant(), [asked], sampling=SamplingParams(temperature=0, max_tokens=4))

    (trace,) = collect_traces(talker, "own", run, [Example("t", "text", "Count.")], tmp_path, sampling=SHORT, top=3)
    said = trace.calls[trace.answer]
    assert 1 <= len(said.generated) == len(said.logprobs) == len(said.top) <= 4
    assert all(len(top) >= 3 for top in said.top)


def test_one_process_at_a_time_works_in_a_folder(talker, traces, tmp_path):
    out, _ = traces
    with exclusive_dir(tmp_path):
        with pytest.raises(ConfigError, match="another process"):
            train_from_traces(inspect(talker).hf_model, out, tmp_path, condition="parallel")
        with pytest.raises(ConfigError, match="another process"):
            collect_traces(talker, "multi_qa", find("multi_qa"), PAIRS, tmp_path, sampling=SHORT)


def test_runs_that_all_fail_say_why(tmp_path, talker_folder):
    (tmp_path / "own.py").write_text("def run(p, task):\n    raise ValueError('no such thing')\n")
    rows = [{"id": word, "question": f"{word}?", "answers": ["x"]} for word in ("What", "Who", "Where")]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["trace", str(tmp_path / "own.py"), "--data", str(tmp_path / "data.jsonl"), "--model", talker_folder]
    result = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "out")])
    assert result.exit_code == 1 and "no such thing" in result.output


def test_only_what_the_base_model_does_is_traced(talker):
    with talker.session() as session:
        outside = session.prefill([1, 2, 3])
        said = session.decode([4], [outside], sampling=SHORT)
        with pytest.raises(DataError, match="not made through"):
            trace_calls([StageCall("answer", said)])
