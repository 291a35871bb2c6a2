"""Steps-to-execution: joins, choices, loops and progress, against a simulation that goes step by step."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from choreograph.agents import Progress, StepGraph
from choreograph.errors import GraphError

NEVER = math.inf
TEAM = {"planner": None, "one": "planner", "two": "planner"}


def after(*events: str) -> Progress:
    """A progress from "+agent" (starts) and "-agent" (ends)."""
    progress = Progress()
    for event in events:
        (progress.start if event[0] == "+" else progress.end)(event[1:])
    return progress


def test_all_of_waits_for_the_last_and_any_of_for_the_first():
    every = StepGraph.read({**TEAM, "slow": "two", "reviewer": {"all_of": ["one", "slow"]}})
    first = StepGraph.read({**TEAM, "slow": "two", "reviewer": {"any_of": ["one", "slow"]}})
    running = after("+planner")
    assert every.steps(running) == {"planner": 0, "one": 1, "two": 1, "slow": 2, "reviewer": 3}
    assert first.steps(running) == {"planner": 0, "one": 1, "two": 1, "slow": 2, "reviewer": 2}


def test_what_has_ended_counts_until_the_waiting_agent_starts():
    graph = StepGraph.read({**TEAM, "reviewer": {"all_of": ["one", "two"]}})
    half = after("+planner", "-planner", "+one", "-one", "+two")
    assert graph.steps(half)["reviewer"] == 1
    gone = after("+planner", "-planner", "+one", "-one", "+two", "-two", "+reviewer", "-reviewer")
    assert set(graph.steps(gone).values()) == {NEVER}


def test_an_agent_of_a_loop_is_expected_again():
    graph = StepGraph.read({"planner": "reviewer", "coder": "planner", "reviewer": "coder"})
    assert graph.steps(Progress()) == {"planner": 1, "coder": 2, "reviewer": 3}
    assert graph.steps(after("+planner", "-planner", "+coder")) == {"coder": 0, "reviewer": 1, "planner": 2}
    assert graph.steps(after("+planner", "-planner", "+coder", "-coder")) == {"reviewer": 1, "planner": 2, "coder": 3}


def test_a_workflow_that_repeats_begins_again_after_any_last_agent():
    given = {"a": None, "b": "a", "c": "a"}
    last = after("+a", "-a", "+b")
    assert StepGraph.read({"agents": given}).steps(last)["a"] == NEVER
    assert StepGraph.read({"agents": given, "repeats": True}).steps(last) == {"a": 1, "b": 0, "c": 1}


def test_after_a_choice_the_other_branch_waits_for_the_next_round():
    given = {"router": "end", "left": "router", "right": "router", "end": {"any_of": ["left", "right"]}}
    taken = after("+router", "-router", "+left")
    assert StepGraph.read(given).steps(taken)["right"] == 1
    chosen = StepGraph.read({"agents": given, "choosers": ["router"]}).steps(taken)
    assert chosen == {"router": 2, "left": 0, "right": 3, "end": 1}


def test_an_alternative_that_started_before_the_last_run_no_longer_counts():
    graph = StepGraph.read(
        {"agents": {"p": None, "fast": "p", "slow": "p", "x": {"any_of": ["fast", "slow"]}}, "repeats": True}
    )
    late = ("+p", "-p", "+fast", "+slow", "-fast", "+x", "-x", "-slow")
    assert graph.steps(after(*late)) == {"p": 1, "fast": 2, "slow": 2, "x": 3}
    assert graph.steps(after(*late[:-1]))["x"] == 3  # the slow one still runs
    assert graph.steps(after(*late, "+p", "-p", "+slow"))["x"] == 1


def test_joins_of_a_step_graph_may_be_nested():
    graph = StepGraph.read({"a": None, "b": "a", "c": "b", "d": {"any_of": [{"all_of": ["b", "c"]}, "c"]}})
    assert graph.steps(after("+a"))["d"] == 3
    assert graph.edges == [("a", "b"), ("b", "c"), ("b", "d"), ("c", "d")]


names = st.sampled_from("abcdef")
joins = st.builds(
    lambda kind, of: {kind: of}, st.sampled_from(["all_of", "any_of"]), st.lists(names, min_size=1, max_size=3)
)


@given(
    st.dictionaries(names, st.one_of(st.none(), joins), min_size=1),
    st.lists(names, max_size=4),
    st.lists(names, max_size=2),
)
def test_steps_are_the_first_moment_at_which_everything_waited_for_can_have_been(given, ended, running):
    given = {**{name: None for join in given.values() if join for name in next(iter(join.values()))}, **given}
    ended, running = ([name for name in one if name in given] for one in (ended, running))
    progress = after(*(f"{sign}{name}" for name in ended for sign in "+-"), *(f"+{name}" for name in running))
    graph = StepGraph.read({"agents": given})
    assert graph.steps(progress) == simulated(graph, progress)


def simulated(graph: StepGraph, progress: Progress) -> dict[str, float]:
    """Goes on step by step: who can start at all by now?"""
    when = {name: 0.0 if name in progress.running else NEVER for name in graph.agents}

    def there(agent: str, before: str, now: int) -> bool:
        join = graph.dependencies[agent]
        is_choice = join is not None and join.kind == "any_of" and len(join.operands) > 1
        if is_choice and progress.is_stale(agent, before):  # only another execution counts
            return before not in progress.running and when[before] < now
        return progress.is_satisfied(agent, before) or when[before] < now

    for now in range(1, len(when) + 2):
        starting = []
        for agent, join in graph.dependencies.items():
            if when[agent] < NEVER:
                continue
            begins = agent in graph.entry_agents and agent not in progress.started
            whole = all if join and join.kind == "all_of" else any
            if begins or (join and whole(there(agent, b, now) for b in join.operands)):
                starting.append(agent)
        for agent in starting:
            when[agent] = float(now)
    return when


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "at least one agent"),
        ({"a": "b"}, "agent 'b' is not declared"),
        ({"a": None, "b": ["a", "a"]}, r"say \{all_of: \[...\]\} or \{any_of: \[...\]\}"),
        ({"a": {"none_of": ["a"]}}, "waits for {'none_of': "),
        ({"a": {"all_of": []}}, "waits for {'all_of': "),
        ({"agents": ["a"]}, "map each agent"),
        ({"agents": {"a": None}, "repeat": True}, "'repeat': no such entry"),
        ({"agents": {"a": None}, "repeats": "yes"}, "repeats: 'yes'"),
        ({"agents": {"a": None}, "choosers": ["b"]}, "agent 'b' is not declared"),
        ({"agents": {1: None}}, "agent 1: use a name"),
        ({"agents": {"a": None}, "choosers": [["a"]]}, r"agent \['a'\]: use a name"),
        ({"agents": {"a": None}, 1: 2, "b": 3}, "1: no such entry"),
    ],
)
def test_a_graph_that_cannot_mean_anything_is_refused_with_why(given, message):
    with pytest.raises(GraphError, match=message):
        StepGraph.read(given)


def test_a_graph_from_a_file(tmp_path):
    file = tmp_path / "team.yaml"
    file.write_text("agents:\n  planner:\n  coder: planner\n  reviewer: {all_of: [planner, coder]}\nrepeats: true\n")
    graph = StepGraph.read(file)
    assert graph.name == "team" and graph.edges[-2:] == [("planner", "reviewer"), ("coder", "reviewer")]
    file.write_text("- planner\n")
    with pytest.raises(GraphError, match="map agents"):
        StepGraph.read(file)
    file.write_text("{")
    with pytest.raises(GraphError, match="not YAML"):
        StepGraph.read(file)
    with pytest.raises(GraphError, match="No such file"):
        StepGraph.read(tmp_path / "missing.yaml")


def test_a_graph_from_json_as_others_write_it(tmp_path):
    """Tabs, a byte order mark, and characters beyond the first plane as two escapes: no YAML parser takes them all."""
    file = tmp_path / "team.json"
    file.write_text('\ufeff{\n\t"\\ud83d\\ude00": null,\n\t"b": "\\ud83d\\ude00"\n}\n', encoding="utf-8")
    assert StepGraph.read(file).edges == [("\U0001f600", "b")]
    file.write_text('{"a": null')
    with pytest.raises(GraphError, match="not JSON"):
        StepGraph.read(file)


@pytest.mark.parametrize("name", ["g.json", "g.yaml"])
def test_an_error_in_a_file_names_it_and_no_agent_stands_twice(tmp_path, name):
    file = tmp_path / name
    file.write_text('{"a": null, "b": "a", "a": "b"}')
    with pytest.raises(GraphError, match=rf"{name}: 'a' stands twice"):
        StepGraph.read(file)
    file.write_text('{"a": null, "b": "c"}')
    with pytest.raises(GraphError, match=rf"{name}: agent 'c' is not declared"):
        StepGraph.read(file)
    merged = tmp_path / "merged.yaml"  # what a merge brings may be said otherwise
    merged.write_text("agents: {<<: &team {a: , b: a}, b: {any_of: [a]}}\nchoosers: []\n")
    assert StepGraph.read(merged).edges == [("a", "b")]


@pytest.mark.parametrize("name", ["g.json", "g.yaml"])
def test_a_graph_nested_without_end_is_refused(tmp_path, name):
    file = tmp_path / name
    file.write_text('{"a": ' + '{"any_of": [' * 100_000 + '"a"' + "]}" * 100_000 + "}")
    with pytest.raises(GraphError, match=r"recursion|nested too deep"):
        StepGraph.read(file)
    (tmp_path / "loop.yaml").write_text("a: &x {any_of: [b, *x]}\nb:\n")
    with pytest.raises(GraphError, match="'a': what it waits for is nested too deep"):
        StepGraph.read(tmp_path / "loop.yaml")
