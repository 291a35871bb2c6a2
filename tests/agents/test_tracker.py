"""Agents of a running workflow: order of turns, hints for the KV cache, and that hints never change a result."""

import asyncio
import math
import threading

import pytest
from helpers import tiny_models
from helpers.hypothesis_profile import many
from helpers.inspect_engine import fixed_prefix_hashes, inspect
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.host_work import count_calls
from choreograph import SamplingParams
from choreograph.agents import StepGraph, TransitionStats, Workflow
from choreograph.api.concurrency import run_concurrently
from choreograph.errors import ConfigError, GraphError, InvalidRequestError, NotAMessageError, SessionClosedError

NAMES = ("a", "b", "c", "d")
CYCLE = StepGraph.read({"agents": dict(zip(NAMES, (None, *NAMES), strict=False)), "repeats": True})
BRIEF = SamplingParams(temperature=0.8, max_tokens=4, ignore_eos=True)


def fixed_of(index: int) -> list[int]:
    return [(7 * index + k) % 60 for k in range(24)]


def rounds(engine, count=3, graph=CYCLE, marked=True, client="x", **options):
    """Every agent in turn, with a fixed part and the last two things said; all that was said."""
    said = []
    with engine.session(seed=5, client_id=client) as s, Workflow(s, graph, **options) as team:
        for turn in range(count):
            task = s.prefill([turn + 1, 2, 3])
            last = task
            for index, name in enumerate(NAMES):
                with team.agent(name) as agent:
                    role = agent.prefill_fixed(fixed_of(index)) if marked else s.prefill(fixed_of(index))
                    last = s.decode([50 + index], [role, task, *([last] if last is not task else [])], sampling=BRIEF)
                    said.append(last)
                    last.result()
                role.release()
            engine.check()
        tokens = [m.tokens for m in said]
        steps = team.steps
    engine.check()
    return tokens, steps


def small(**options):
    """A device that holds two of four fixed parts beside a call."""
    return tiny_models.engine(tokens=100, eviction="workflow", **options)


def test_agents_whose_calls_are_submitted_together_run_in_their_order():
    """Fixed parts of all are computed at once; no turn starts before what it attends to is generated."""
    team_of_four = StepGraph.read(
        {"agents": {"a": None, "b": "a", "c": "a", "d": {"all_of": ["b", "c"]}}, "repeats": True}
    )
    with tiny_models.engine().session(seed=1) as s, Workflow(s, team_of_four) as team:
        for _ in range(2):
            said = []
            for index, name in enumerate(NAMES):
                with team.agent(name) as agent:
                    said.append(s.decode([50], [agent.prefill_fixed(fixed_of(index)), *said], sampling=BRIEF))
            said[-1].result()
            assert team.steps == {"a": 1, "b": 2, "c": 2, "d": 3}


@given(
    eviction=st.sampled_from(["workflow", "lru", "lfu", "fifo"]),
    host=st.sampled_from([None, 40, 400]),
    prefetch=st.sampled_from([0, 1, 4]),
    graph=st.sampled_from([CYCLE, None]),
    marked=st.booleans(),
    aware=st.booleans(),
)
@settings(max_examples=many(15), deadline=None)
def test_hints_never_change_results(eviction, host, prefetch, graph, marked, aware):
    expected, _ = rounds(tiny_models.engine())
    engine = tiny_models.engine(tokens=100, eviction=eviction, host_capacity=host, aware=aware)
    assert rounds(engine, graph=graph, marked=marked, prefetch=prefetch)[0] == expected


def test_with_a_graph_and_room_below_nothing_fixed_is_computed_twice():
    engine = small(host_capacity=400)
    rounds(engine, 5)
    computed = [e.data["num_tokens"] for e in engine.events.recent if e.kind == "admitted"]
    assert sum(count == 24 for count in computed) == 4
    assert engine.events.counts["prefetch"] and not engine.events.counts["recomputing"]
    lru = tiny_models.engine(tokens=100)
    rounds(lru, 5)
    assert sum(e.data["num_tokens"] == 24 for e in lru.events.recent if e.kind == "admitted") == 20


def test_without_room_below_the_graph_still_keeps_what_comes_next():
    def computed(engine) -> int:
        rounds(engine, 6)
        return sum(e.data["num_tokens"] == 24 for e in engine.events.recent if e.kind == "admitted")

    assert computed(small()) < computed(tiny_models.engine(tokens=100)) == 24


def test_steps_follow_what_is_computed_not_what_is_submitted():
    engine = tiny_models.engine()
    with engine.session(seed=0) as s, Workflow(s, CYCLE) as team:
        assert team.steps == {"a": 1, "b": 2, "c": 3, "d": 4}
        with team.agent("a"):
            first = s.decode([1], sampling=BRIEF)
        with team.agent("b"):
            second = s.decode([2], [first], sampling=BRIEF)
        engine.step()
        assert team.steps == {"a": 0, "b": 1, "c": 2, "d": 3}
        first.result()
        engine.step()
        assert team.steps == {"b": 0, "c": 1, "d": 2, "a": 3}
        second.result()
        engine.run_until_idle()
        assert team.steps == {"c": 1, "d": 2, "a": 3, "b": 4}


def test_a_fixed_part_is_guessed_from_what_is_seen_twice():
    engine = tiny_models.engine()
    with engine.session(seed=0) as s, Workflow(s) as team:
        for turn in range(3):
            assert len(fixed_prefix_hashes(team, "a")) == (turn >= 2)
            with team.agent("a"):
                s.decode([1], [s.prefill([5, 6]), s.prefill([7, turn])], sampling=BRIEF).result()
        assert fixed_prefix_hashes(team, "a") == [
            inspect(engine).cache_manager.lookup(k).content_hash for k in fixed_prefix_hashes(team, "a")
        ]


def test_learned_steps_come_to_the_declared_ones():
    learned = TransitionStats()
    _, declared = rounds(tiny_models.engine(), 3)
    _, result = rounds(tiny_models.engine(), 3, graph=None, learned=learned)
    assert result == pytest.approx(declared)
    assert learned.agents == NAMES


def test_clients_with_equal_names_do_not_meet():
    engine = small(host_capacity=800)
    alone, _ = rounds(tiny_models.engine())
    outcomes = list(run_concurrently(engine, [lambda c=c: rounds(engine, client=c)[0] for c in ("x", "y", "z")]))
    assert [one.error for one in outcomes] == [None] * 3
    assert all(one.value == alone for one in outcomes)


def test_the_cost_of_tracking_a_workflow_does_not_depend_on_the_others():
    def calls(num_workflows: int) -> float:
        engine = tiny_models.engine(tokens=8192)  # nothing is evicted
        programs = [lambda i=i: rounds(engine, client=str(i))[0] for i in range(num_workflows)]
        counted = count_calls(lambda: list(run_concurrently(engine, programs)))
        return (
            sum(n for name, n in counted.items() if name.startswith(("agents/", "kv_cache/eviction"))) / num_workflows
        )

    assert calls(12) <= 1.02 * calls(2)


def made_by(message) -> str | None:
    return inspect(message).agent_key and inspect(message).agent_key[1]


def test_agents_in_tasks_keep_their_calls():
    async def turn(s, team, name, turns):
        with team.agent(name):
            said = []
            for _ in range(turns):
                said.append(s.decode([5], sampling=BRIEF))
                await said[-1]
            said.append(await asyncio.create_task(aside(s)))
        return [made_by(message) for message in said]

    async def aside(s):
        return s.prefill([3])

    async def all_of(s, team):
        return await asyncio.gather(turn(s, team, "a", 1), turn(s, team, "b", 3))

    engine = tiny_models.engine()
    with engine.session(seed=0) as s, Workflow(s, CYCLE) as team:
        assert asyncio.run(all_of(s, team)) == [["a"] * 2, ["b"] * 4]
        assert made_by(s.prefill([1])) is None
        engine.run_until_idle()
        assert team.progress.ended.keys() == {"a", "b"}
    engine.check()


def test_agents_in_threads_keep_their_calls():
    engine, both, result = tiny_models.engine(), threading.Barrier(2, timeout=20), {}
    with engine.session(seed=0) as s, Workflow(s, CYCLE) as team:

        def turn(name):
            with team.agent(name):
                both.wait()
                result[name] = made_by(s.decode([5], sampling=BRIEF).result())
                both.wait()

        threads = [threading.Thread(target=turn, args=(name,)) for name in "ab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert result == {"a": "a", "b": "b"} and made_by(s.prefill([1])) is None
    engine.check()


def test_agents_of_programs_that_take_turns_keep_their_calls():
    engine = tiny_models.engine()
    with engine.session(seed=0) as s, Workflow(s, CYCLE) as team:

        def turn(name):
            with team.agent(name):
                return [made_by(s.decode([5], sampling=BRIEF).result()) for _ in range(2)]

        outcomes = run_concurrently(engine, [lambda name=name: turn(name) for name in "ab"])
        assert [one.value for one in outcomes] == [["a", "a"], ["b", "b"]]
        with team.agent("c"):
            (outcome,) = run_concurrently(engine, [lambda: made_by(s.decode([5], sampling=BRIEF).result())])
        assert outcome.value == "c" and made_by(s.prefill([1])) is None


def test_blocks_nest_and_sessions_do_not_meet():
    engine = tiny_models.engine()
    with engine.session() as s, engine.session() as other, Workflow(s) as team, Workflow(other) as others:
        with team.agent("a"), others.agent("x"):
            with team.agent("b"):
                assert (made_by(s.prefill([1])), made_by(other.prefill([1]))) == ("b", "x")
            assert (made_by(s.prefill([1])), made_by(other.prefill([1]))) == ("a", "x")

        def block(name):
            with team.agent(name):
                yield
                yield made_by(s.prefill([1]))

        first, second = block("a"), block("b")
        next(first), next(second)
        first.close()
        assert next(second) == "b"
        second.close()
        assert made_by(s.prefill([1])) is None


def test_what_was_said_to_the_cache_goes_with_the_session():
    engine = small(host_capacity=400)
    rounds(engine, 2)
    store = inspect(engine).cache_manager
    assert not inspect(engine).num_hint_sources and not len(store.hints.steps_to_execution)
    session = engine.session()
    team = Workflow(session, CYCLE)
    with team.agent("a") as agent:
        role = agent.prefill_fixed(fixed_of(0)).result()
    assert store.hints.candidate(inspect(role).entry).steps_to_execution < math.inf
    assert len(store.hints.steps_to_execution) == 1
    session.close()
    assert not inspect(engine).num_hint_sources and not engine.events._watchers


def test_steps_may_come_from_a_client_with_each_turn():
    engine = tiny_models.engine(eviction="workflow")
    with engine.session(seed=0) as s, Workflow(s) as team:
        with team.agent("planner", steps={"planner": 0, "coder": 1, "tester": 7, "judge": None}) as agent:
            role = agent.prefill_fixed(fixed_of(0))
            s.decode([1], [role], sampling=BRIEF).result()
            assert team.steps == {"planner": 0, "coder": 1, "tester": 7, "judge": math.inf}
        with team.agent("coder", steps={"planner": 5, "coder": 0}) as agent:
            s.decode([2], [agent.prefill_fixed(fixed_of(1))], sampling=BRIEF).result()
        assert inspect(engine).hints.candidate(inspect(role).entry).steps_to_execution == 5
        for steps in ({"a": -1}, {"a": "soon"}, {1: 1}, {"a": math.nan}, {"a": True}, [1]):
            with pytest.raises(GraphError, match="steps"), team.agent("a", steps=steps):
                pass


def test_another_graph_counts_at_once():
    with tiny_models.engine().session(seed=0) as s, Workflow(s, CYCLE) as team:
        with team.agent("a"):
            s.decode([1], sampling=BRIEF).result()
        assert team.steps == {"b": 1, "c": 2, "d": 3, "a": 4}
        team.graph = StepGraph.read({"a": None, "d": "a", "b": "d"})
        assert team.steps == {"a": math.inf, "d": 1, "b": 2}
        with pytest.raises(GraphError, match="use a StepGraph"):
            team.graph = {"a": None}


def test_errors_name_what_is_wrong():
    engine = tiny_models.engine()
    with engine.session() as s, Workflow(s, CYCLE) as team:
        with pytest.raises(ConfigError, match="prefetch=-1"):
            Workflow(s, CYCLE, prefetch=-1)
        with pytest.raises(GraphError, match="agent 'absent' is not declared"), team.agent("absent"):
            pass
        with pytest.raises(GraphError, match="agent 'absent' is not declared"):
            team.mark_fixed("absent", [s.prefill([1])])
        with pytest.raises(NotAMessageError, match="'role' is not a message"):
            team.mark_fixed("a", ["role"])
        with pytest.raises(InvalidRequestError, match="put it into a list"):
            team.mark_fixed("a", s.prefill([1]))
        with pytest.raises(GraphError, match=r"use a StepGraph; StepGraph\.read"):
            Workflow(s, {"agents": {"a": None}})
        with pytest.raises(ConfigError, match="learned="):
            Workflow(s, learned={})
    with pytest.raises(SessionClosedError):
        Workflow(s, CYCLE)
    assert not inspect(engine).num_hint_sources


def test_a_turn_that_fails_is_over_too():
    def fails(session, team):
        with team.agent("a"):
            session.decode([1], sampling=BRIEF).release()
            raise ZeroDivisionError

    engine = tiny_models.engine()
    with engine.session() as s, Workflow(s, CYCLE) as team:
        with pytest.raises(ZeroDivisionError):
            fails(s, team)
        assert team.steps == {"b": 1, "c": 2, "d": 3, "a": 4}


def test_what_was_taken_for_fixed_is_given_up_when_the_agent_no_longer_sees_it():
    """Two agents that see each task twice in a row, and their own part always."""
    engine = small(host_capacity=4096)
    graph = StepGraph.read({"agents": {"worker": None, "critic": "worker"}, "repeats": True})
    with engine.session(seed=0) as s, Workflow(s, graph) as team:
        roles = {name: s.prefill([index] * 16) for index, name in enumerate(graph.agents)}
        for number in range(4):
            task = s.prefill([10 + number] * 16)
            for _ in range(2):
                for name, role in roles.items():
                    with team.agent(name):
                        s.decode([3], [role, task], sampling=BRIEF).result()
            assert all(len(fixed_prefix_hashes(team, name)) == 2 for name in roles)
            task.release()


def test_marks_stand_while_what_they_name_is_seen():
    with tiny_models.engine().session(seed=0) as s, Workflow(s, CYCLE) as team:
        shared, old = s.prefill([1] * 8), s.prefill([2] * 8)
        team.mark_fixed("a", [shared])
        for number in range(3):
            with team.agent("a") as agent:
                own = agent.prefill_fixed([5 + number] * 8)
                s.decode([3], [shared, own], sampling=BRIEF).result()
            assert len(fixed_prefix_hashes(team, "a")) == 2
        with team.agent("a"):
            s.decode([3], [old], sampling=BRIEF).result()
        assert not fixed_prefix_hashes(team, "a")


def test_events_tell_every_hit_miss_and_eviction_and_why():
    engine = small(host_capacity=400)
    rounds(engine, 3)
    by_kind = {}
    for event in engine.events.recent:
        by_kind.setdefault(event.kind, []).append(event.data)
    assert sum(facts["tokens"] == 24 for facts in by_kind["miss"]) == 4  # the fixed parts, once each
    assert {facts["where"] for facts in by_kind["hit"]} <= {"device", "host", "loading", "offloading"}
    assert all(facts["policy"] == "workflow" for facts in by_kind["evicted"])
    assert any(facts["ephemeral"] for facts in by_kind["evicted"])
    assert any(facts["steps"] for facts in by_kind["evicted"] if not facts["ephemeral"])


def test_what_the_next_turn_reads_is_expected_while_it_is_held():
    engine = tiny_models.engine(eviction="workflow")
    with engine.session(seed=0) as s, Workflow(s, CYCLE) as team:
        facts = inspect(engine).hints.candidate

        def expected(message):
            return facts(inspect(message).entry).steps_to_execution

        task = s.prefill([9, 9, 9])
        with team.agent("a"):
            aside = s.prefill([8, 8], [task]).wait_encoded()
            assert expected(aside) == 1  # the turn that made it is not over
            first = s.decode([1], [task], sampling=BRIEF).result()
        assert (expected(task), expected(first), expected(aside)) == (1, 1, 1)
        with team.agent("b"):
            second = s.decode([2], [first], sampling=BRIEF).result()
        assert (expected(task), expected(first), expected(second), expected(aside)) == (None, 1, 1, 2)
        first.release()
        assert facts(inspect(second).entry).ephemeral is False
        for name in ("c", "d", "a"):
            with team.agent(name):
                s.decode([3], [second], sampling=BRIEF).result()
        assert expected(aside) is None or expected(aside) > 2


def test_all_varying_content_is_evicted_first_if_it_is_not_kept():
    engine = tiny_models.engine(eviction="workflow")
    with engine.session(seed=0) as s, Workflow(s, CYCLE, keep_varying=False) as team:
        facts = inspect(engine).hints.candidate
        with team.agent("a") as agent:
            role = agent.prefill_fixed(fixed_of(0))
            aside = s.prefill([8, 8], [role]).wait_encoded()
            first = s.decode([1], [role, aside], sampling=BRIEF).result()
        candidates = [facts(inspect(message).entry) for message in (aside, first)]
        assert all(candidate.ephemeral and candidate.steps_to_execution is None for candidate in candidates)
        assert facts(inspect(role).entry).steps_to_execution == 4
    expected, _ = rounds(tiny_models.engine())
    assert rounds(small(host_capacity=400), keep_varying=False)[0] == expected


def test_nothing_is_loaded_ahead_while_a_call_waits_for_room_and_then_it_is():
    engine = small(host_capacity=400)
    with engine.session(seed=0) as s, Workflow(s, CYCLE) as team:
        for index, name in enumerate(NAMES):
            with team.agent(name) as agent:
                role = agent.prefill_fixed(fixed_of(index))
                s.decode([1], [role], sampling=BRIEF).result().release()
            role.release()
        long = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
        with team.agent("a") as agent, engine.session(seed=1) as other:
            holds = other.decode([1] * 20, sampling=long)
            blocked = other.decode([2] * 60, sampling=long)
            engine.step()
            assert inspect(engine).scheduler.blocked_on_memory
            before = engine.events.counts["prefetch"]
            engine.step()
            assert engine.events.counts["prefetch"] == before
            assert len(holds.result().output_token_ids) == len(blocked.result().output_token_ids) == 30
            assert not inspect(engine).scheduler.blocked_on_memory
        engine.run_until_idle()
        assert engine.events.counts["prefetch"] > before


def test_a_workflow_that_is_closed_within_a_turn_says_nothing_more():
    engine = tiny_models.engine()
    with engine.session(seed=0) as s:
        team = Workflow(s, CYCLE)
        with team.agent("a"):
            team.close()
        assert not inspect(engine).num_hint_sources


def test_steps_may_be_replaced_between_turns():
    engine = tiny_models.engine(eviction="workflow")
    with engine.session(mode="prefix", seed=0) as s, Workflow(s) as team:
        with team.agent("a") as agent:
            role = agent.prefill_fixed([1] * 20)
            s.decode([2], [role], max_tokens=2).result()
        team.set_steps({"a": 3, "b": None})
        assert team.steps == {"a": 3, "b": math.inf}
        (key,) = fixed_prefix_hashes(team, "a")
        assert inspect(engine).hints.steps_to_execution.get(key) == 3
        with pytest.raises(GraphError, match="steps of agent 'a'"):
            team.set_steps({"a": -1})
        assert team.steps == {"a": 3, "b": math.inf}
