"""A rehearsal finds the calls that a real run makes, without computing."""

import json

import pytest
from helpers.inspect_engine import inspect
from pydantic import ValidationError

from choreograph import SamplingParams
from choreograph.errors import DataError
from choreograph.lab.evaluation.traces import TRACE_ADAPTER, Trace
from choreograph.lab.replay.dry_run import TaskTranscript, dry_run
from choreograph.lab.replay.traced_calls import as_full_prompts, trace_calls
from choreograph.lab.workflows import WorkflowRun, conditions_of, find
from choreograph.lab.workflows.run import Condition

SAMPLING = SamplingParams(max_tokens=6, logprobs=2)
CASES = [
    ("multi_qa", ["Who wrote it?", "Where is it?"], {}),
    ("branch_solve_merge", "dog, river, stick, boy", {}),
    ("prisoners_dilemma", "Bob", {"strategy": "defect", "rounds": 1}),
    ("debate_parallel", "What is 2 + 3?", {"agents": 2, "rounds": 2}),
    ("tree_of_thoughts", "What is 2 + 3?", {"branches": 2, "voters": 2}),
    ("debate_iterative", "What is 2 + 3?", {"rounds": 2}),
]


@pytest.mark.parametrize(("name", "task", "options"), CASES, ids=[c[0] for c in CASES])
def test_a_rehearsal_is_the_run_without_the_computing(talker, name, task, options):
    workflow, conditions = find(name), conditions_of(find(name))
    with talker.session(mode="prefix", seed=1) as session:
        p = WorkflowRun(session, sampling=SAMPLING)
        workflow(p, task, **options).result()
        talker.run_until_idle()
        script, baseline = TaskTranscript("one", task, p.transcript()), as_full_prompts(trace_calls(p.calls))
    for condition in list(conditions.values())[:3]:
        ((id, result),) = dry_run(
            inspect(talker).hf_model, workflow, [script], condition, sampling=SAMPLING, options=options
        )
        assert id == "one"
        if condition.mode == "prefix":
            expected = baseline
        else:
            with talker.session(seed=1) as session:
                p = WorkflowRun(session, sampling=SAMPLING, replay=script.transcript)
                workflow(p, task, **options, **condition.options).result()
                expected = trace_calls(p.calls)
        assert [(c.stage, c.tokens, c.start, c.parents, c.generated) for c in result] == [
            (c.stage, c.tokens, c.start, c.parents, c.generated) for c in expected
        ]


def test_a_trace_goes_to_json_and_back(talker):
    with talker.session(seed=1) as session:
        p = WorkflowRun(session, sampling=SAMPLING)
        find("debate_parallel")(p, "What is 1 + 1?", agents=2, rounds=1).result()
        calls = trace_calls(p.calls)
    assert any(call.top for call in calls)
    answer = calls.index([call for call in calls if call.generated][-1])
    trace = Trace(
        version=3, id="one", task="", seed=1, calls=tuple(calls), answer=answer, outputs={}, split="train", units=()
    )
    text = json.dumps(TRACE_ADAPTER.dump_python(trace, mode="json"))
    assert TRACE_ADAPTER.validate_python(json.loads(text)) == trace


def test_a_dry_run_refuses_a_file_that_is_no_trace(talker):
    call = {"stage": "x", "prompt": [1], "start": 0, "generated": [2], "footer": [], "logprobs": [], "top": []}
    trace = {"version": 3, "id": "x", "task": "", "seed": 0, "calls": [call], "answer": 0, "outputs": {}}
    trace |= {"split": "train", "units": []}
    assert TRACE_ADAPTER.validate_python(trace).calls[0].tokens == [1, 2]
    ahead = [{"call": 0, "first": 0, "last": 1, "offset": 0}]
    for change, words in (
        ({"version": 1}, "version"),
        ({"calls": [{"stage": "x"}]}, "calls.0"),
        ({"calls": [call | {"parents": ahead}]}, "not there"),
        ({"answer": 1}, "answer=1"),
    ):
        with pytest.raises(ValidationError, match=words):
            TRACE_ADAPTER.validate_python(trace | change)


def test_a_trace_of_another_workflow_is_refused(talker):
    adapter, choreographed = inspect(talker).hf_model, Condition("choreographed")
    for content, words in (({"reply": [[5]]}, "does not know"), ({"answer": []}, "takes more")):
        with pytest.raises(DataError, match=words):
            list(
                dry_run(
                    adapter,
                    find("single_call"),
                    [TaskTranscript("one", "2 + 2?", content)],
                    choreographed,
                    sampling=SAMPLING,
                )
            )
