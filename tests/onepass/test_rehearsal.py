"""A rehearsal finds the calls that a real run makes, without computing."""

import json

import pytest

from choreograph import SamplingParams
from choreograph.choreographies import Performance, conditions_of, find
from choreograph.choreographies.performance import Condition
from choreograph.errors import DataError
from choreograph.onepass.calls import VERSION, as_prompts, calls_of, from_json, to_json
from choreograph.onepass.rehearsal import Script, rehearse

SAMPLING = SamplingParams(max_tokens=6, logprobs=2)
CASES = [
    ("multi_qa", ["Who wrote it?", "Where is it?"], {}),
    ("branch_solve_merge", "dog, river, stick, boy", {}),
    ("prisoners_dilemma", "Bob", {"strategy": "defect", "rounds": 1}),
    ("mad_par", "What is 2 + 3?", {"agents": 2, "rounds": 2}),
    ("tree_of_thoughts", "What is 2 + 3?", {"branches": 2, "voters": 2}),
    ("mad_iter", "What is 2 + 3?", {"rounds": 2}),
]


@pytest.mark.parametrize(("name", "task", "options"), CASES, ids=[c[0] for c in CASES])
def test_a_rehearsal_is_the_run_without_the_computing(talker, name, task, options):
    workflow, conditions = find(name), conditions_of(find(name))
    with talker.session(mode="prefix", seed=1) as session:
        p = Performance(session, sampling=SAMPLING)
        workflow(p, task, **options).result()
        talker.drain()
        script, baseline = Script("one", task, p.content()), as_prompts(calls_of(p.steps))
    for condition in list(conditions.values())[:3]:
        ((id, found),) = rehearse(
            talker.runner.adapter, workflow, [script], condition, sampling=SAMPLING, options=options
        )
        assert id == "one"
        if condition.mode == "prefix":
            wanted = baseline
        else:
            with talker.session(seed=1) as session:
                p = Performance(session, sampling=SAMPLING, forced=script.content)
                workflow(p, task, **options, **condition.options).result()
                wanted = calls_of(p.steps)
        assert [(c.stage, c.tokens, c.start, c.parents, c.generated) for c in found] == [
            (c.stage, c.tokens, c.start, c.parents, c.generated) for c in wanted
        ]


def test_a_trace_goes_to_json_and_back(talker):
    with talker.session(seed=1) as session:
        p = Performance(session, sampling=SAMPLING)
        find("mad_par")(p, "What is 1 + 1?", agents=2, rounds=1).result()
        calls = calls_of(p.steps)
    assert any(call.top for call in calls)
    text = json.dumps(to_json(calls))
    assert from_json(VERSION, json.loads(text)) == calls


def test_what_is_no_trace_is_refused(talker):
    with pytest.raises(DataError, match="version 0"):
        from_json(0, [])
    with pytest.raises(DataError, match="call 0"):
        from_json(VERSION, [{"stage": "x"}])
    call = {"stage": "x", "prompt": [1], "start": 0, "generated": None, "footer": [], "logprobs": [], "top": []}
    ahead = [{"call": 0, "first": 0, "last": 1, "offset": 0}]
    with pytest.raises(DataError, match="not there"):
        from_json(VERSION, [{**call, "parents": ahead}])


def test_a_trace_of_another_workflow_is_refused(talker):
    adapter, choreographed = talker.runner.adapter, Condition("choreographed")
    for content, words in (({"reply": [[5]]}, "does not know"), ({"answer": []}, "takes more")):
        with pytest.raises(DataError, match=words):
            list(
                rehearse(adapter, find("direct"), [Script("one", "2 + 2?", content)], choreographed, sampling=SAMPLING)
            )
