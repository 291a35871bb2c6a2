"""`choreograph explain`: recorded runs, a table, and a page of one file."""

import json
import re
from xml.etree import ElementTree

import pytest
from helpers.command_line import app
from typer.testing import CliRunner

from choreograph import SamplingParams
from choreograph.errors import DataError
from choreograph.lab.evaluation.datasets import Example
from choreograph.lab.evaluation.experiment import Experiment
from choreograph.lab.evaluation.explain_page import render_page
from choreograph.lab.evaluation.explain_run import explain_run, load_run
from choreograph.lab.evaluation.run_dir import RunDirectory
from choreograph.lab.evaluation.runner import evaluate_conditions
from choreograph.lab.evaluation.traces import collect_traces
from choreograph.lab.workflows import Condition, find

EXAMPLES = [Example(f"m{i}", "math", f"What is {i} + <b>{i}</b>?", {"answer": str(2 * i)}) for i in (1, 2)]
OPTIONS = {"branches": 2, "voters": 1}
SAMPLING = SamplingParams(max_tokens=6)


@pytest.fixture
def traces(talker, tmp_path):
    workflow = find("tree_of_thoughts")
    collect_traces(talker, "tree_of_thoughts", workflow, EXAMPLES, tmp_path / "t", sampling=SAMPLING, options=OPTIONS)
    return tmp_path / "t"


def test_a_trace_is_replayed_and_its_messages_are_explained_by_name(talker, traces):
    settings, runs = load_run(traces)
    num_referenced = talker.stats().num_referenced_entries
    messages = explain_run(talker, find("tree_of_thoughts"), runs[1], options=settings["options"], measure=True)
    assert [m.name for m in messages] == ["solve 1", "solve 2", "vote", "answer"]
    assert [len(m.tokens) for m in messages] == [len(t) for t in (t for s in runs[1].transcript.values() for t in s)]
    vote = messages[2]
    assert vote.parents == ["vote prompt", "solve 1", "solve 2"]
    first, second = vote.explanation.parents[1:]
    assert (
        vote.describe(second.blocked) == f"solve 1 ({first.num_tokens}), vote prompt ({second.blocked[1].num_tokens})"
    )
    assert vote.describe(first.leaked).startswith("problem (")
    assert len(vote.explanation.divergence) == len(vote.tokens)
    assert talker.stats().num_referenced_entries == num_referenced


def test_the_page_is_one_file_that_names_everything_and_escapes_texts(talker, traces):
    settings, runs = load_run(traces)
    messages = explain_run(talker, find("tree_of_thoughts"), runs[0], options=settings["options"], measure=True)
    page = render_page(messages, "run <1>", "a & b")
    assert "run &lt;1&gt;" in page and "a &amp; b" in page and "<b>1</b>" not in page
    assert not re.search(r"(src|href)=|@import|url\(", page)
    assert page.count("<details") == len(messages) and page.count("<details open") == 1
    for picture in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(picture)
    for message in messages:
        for sentence in message.explanation.recommendations:
            assert sentence in page
    assert "nats a token from prefix mode" in page
    plain = render_page(explain_run(talker, find("tree_of_thoughts"), runs[0], options=OPTIONS), "run", "")
    assert "nats a token from prefix mode" not in plain


def test_an_evaluation_can_be_explained_too(talker, tmp_path):
    workflow, conditions = find("single_call"), {"baseline": Condition("prefix")}
    experiment = Experiment("single_call", workflow, conditions, SAMPLING)
    run_dir = RunDirectory(tmp_path / "e", experiment.settings(talker, EXAMPLES))
    evaluate_conditions(talker, experiment, EXAMPLES, run_dir)
    _, runs = load_run(tmp_path / "e")
    assert [(r.id, r.task) for r in runs] == [(e.id, e.task) for e in EXAMPLES]
    (message,) = explain_run(talker, workflow, runs[0], measure=True)
    assert message.explanation.kl < 1e-4 and message.explanation.recommendations[0].endswith("nothing to do")


def test_explain_refuses_a_folder_that_is_no_run(talker, traces, tmp_path):
    with pytest.raises(DataError, match="no run; make one"):
        load_run(tmp_path)
    with pytest.raises(DataError, match="use a choreographed one"):
        explain_run(talker, find("tree_of_thoughts"), load_run(traces)[1][0], condition="baseline")


def test_the_command_prints_a_table_and_writes_the_page(talker_folder, traces, tmp_path):
    page = tmp_path / "page.html"
    args = ["explain", str(traces), "--model", talker_folder, "--html", str(page)]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0] == "tree_of_thoughts: m1" and lines[1].split()[:3] == ["message", "parent", "saw"]
    assert any(re.match(r"vote +vote prompt ", line) for line in lines)
    assert "vote reads solve 1, solve 2 that did not see" in result.output
    assert page.read_text().startswith("<!doctype html>")
    listed = json.loads(CliRunner().invoke(app, [*args, "--json", "--example", "m2"]).output)
    assert [m["name"] for m in listed] == ["solve 1", "solve 2", "vote", "answer"]
    assert listed[0]["divergence"] is None
