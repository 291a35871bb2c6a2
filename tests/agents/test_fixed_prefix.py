"""Fixed parts of prompts: kept by steps on nodes of the prefix tree, with their context, and up to the mark."""

import pytest
from helpers import tiny_models
from helpers.inspect_engine import fixed_prefix_hashes, inspect

from choreograph import SamplingParams
from choreograph.agents import StepGraph, Workflow

NAMES = ("a", "b", "c", "d")
CYCLE = StepGraph.read({"agents": dict(zip(NAMES, (None, *NAMES), strict=False)), "repeats": True})
BRIEF = SamplingParams(temperature=0.8, max_tokens=4, ignore_eos=True)


def start_of(index: int, length: int, common: int = 0) -> list[int]:
    """Fixed tokens of an agent, of which all agents have the first `common`."""
    return [k % 60 for k in range(common)] + [(7 * index + k) % 60 for k in range(length - common)]


def run_rounds(engine, mode, *, fixed=180, common=0, task=20, rounds=4, marked=True):
    """Return the tokens computed in each round, and all answers."""
    computed, answers = [], []
    with engine.session(mode=mode, seed=0) as s:
        team = Workflow(s, CYCLE)
        for turn in range(rounds):
            messages = []
            for index, name in enumerate(NAMES):
                with team.agent(name) as agent:
                    tokens = start_of(index, fixed, common)
                    role = agent.prefill_fixed(tokens) if marked else s.prefill(tokens)
                    question = s.prefill([(4 * turn + index + 3 * k) % 60 for k in range(task)], [role])
                    messages += [role, question, s.decode([50 + index], [role, question], sampling=BRIEF).result()]
                answers.append(messages[-1].tokens)
                for message in messages[-3:]:
                    message.release()
                engine.check()
            computed.append(sum(message.usage.computed_tokens for message in messages))
    return computed, answers


@pytest.mark.parametrize("mode", ["prefix", "choreographed"])
def test_four_prompts_with_a_common_start_compute_it_once(mode):
    """Prompts of 64 tokens, 48 of them in common: 64 + 3 * 16, beside a task and a header of one token each."""
    engine = tiny_models.engine()
    computed, _ = run_rounds(engine, mode, fixed=64, common=48, task=1, rounds=1)
    assert computed == [64 + 3 * 16 + 4 * 2]


@pytest.mark.parametrize("mode", ["prefix", "choreographed"])
@pytest.mark.parametrize("marked", [True, False])
def test_steps_keep_fixed_parts_that_lru_evicts_just_before_their_use(mode, marked):
    """Room for three of four prompts of 180 tokens: of 12 turns after the first round, LRU finds no prompt."""
    lru, expected = run_rounds(tiny_models.engine(tokens=640), mode, marked=marked)
    computed, answers = run_rounds(tiny_models.engine(tokens=640, eviction="workflow"), mode, marked=marked)
    assert answers == expected
    varying = 4 * 21
    assert lru == [4 * 180 + varying] * 4
    known = computed[1:] if marked else computed[2:]  # unmarked parts are known after two turns
    num_found = sum(4 * 180 + varying - count for count in known) / 180
    assert num_found >= (8 if marked else 6)  # of 12 and 8; no policy finds more than two thirds of a cycle of four


def test_prefix_mode_loads_fixed_parts_ahead():
    engine = tiny_models.engine(tokens=640, eviction="workflow", host_capacity=2000)
    computed, answers = run_rounds(engine, "prefix")
    assert answers == run_rounds(tiny_models.engine(), "prefix")[1]
    assert computed[1:] == [4 * 21] * 3
    assert engine.events.counts["prefetch"]


def test_nodes_of_the_prefix_tree_have_the_minimum_of_the_agents_below_them():
    engine = tiny_models.engine(tokens=160, eviction="workflow")
    manager = inspect(engine).cache_manager
    with engine.session(mode="prefix", seed=0) as s:
        team = Workflow(s, CYCLE)
        for index, name in enumerate(NAMES):
            with team.agent(name) as agent:
                role = agent.prefill_fixed(start_of(index, 32, 16))
                s.decode([50], [role], sampling=BRIEF).result()
        with engine.session() as other:  # fills the cache, so that entries are cut into nodes
            other.decode([1] * 72, sampling=BRIEF).result()
        engine.check()
        steps = {
            (entry.base_position, entry.tokens[0]): manager.hints.candidate(entry).steps_to_execution
            for entry in manager.entries.values()
            if entry in manager.prefix_tree
        }
        assert team.steps == {"a": 1, "b": 2, "c": 3, "d": 4}
        assert steps[0, 0] == 1  # in the prompts of all
        assert {key: steps[key] for key in steps if key[0] == 16} == {(16, 7 * i): i + 1 for i in range(4)}
        assert not [key for key in steps if key[0] >= 32]  # varying ends are evicted first


def test_what_a_fixed_part_attends_to_is_kept_as_long():
    """A marked role sees an introduction, which nothing else names."""

    def computed_again(mark_introduction: bool) -> int:
        engine = tiny_models.engine(tokens=200, eviction="workflow", host_capacity=800)
        total = 0
        with engine.session(seed=0) as s:
            team = Workflow(s, CYCLE)
            for number in range(5):
                for index, name in enumerate(NAMES):
                    with team.agent(name) as agent:
                        introduction = s.prefill(start_of(index + 4, 24))
                        if mark_introduction:
                            agent.mark_fixed(introduction)
                        role = agent.prefill_fixed(start_of(index, 24), [introduction])
                        answer = s.decode([50, number], [introduction, role], sampling=BRIEF).result()
                    if number:
                        total += introduction.usage.computed_tokens + role.usage.computed_tokens
                    for message in (introduction, role, answer):
                        message.release()
                    engine.check()
        return total

    assert computed_again(False) == computed_again(True) == 0


@pytest.mark.parametrize("inferred", [False, True])
def test_a_marked_slice_ends_the_fixed_part(inferred):
    """Messages that start with 24 fixed tokens, and five that vary with every turn."""

    def computed(engine) -> list[int]:
        result = []
        with engine.session(seed=0) as s:
            team = Workflow(s, CYCLE)
            for number in range(5):
                total = 0
                for index, name in enumerate(NAMES):
                    with team.agent(name) as agent:
                        prompt = s.prefill([*start_of(index, 24), *range(number, number + 5)])
                        if not inferred:
                            agent.mark_fixed(prompt[0:24])
                        answer = s.decode([50], [prompt], sampling=BRIEF).result()
                    total += prompt.usage.computed_tokens
                    answer.release()
                    prompt.release()
                    engine.check()
                result.append(total)
        return result

    roomy = tiny_models.engine(eviction="workflow")
    assert computed(roomy) == [4 * 29] + [4 * 5] * 4
    engine = tiny_models.engine(tokens=100, eviction="workflow", host_capacity=400)
    small = computed(engine)
    assert small[-2:] == [4 * 5] * 2
    assert engine.events.counts["prefetch"]
    lru = tiny_models.engine(tokens=100, host_capacity=400)
    assert sum(computed(lru)) > sum(small)


def test_a_slice_marked_in_a_prefix_mode_prompt_ends_its_fixed_part():
    engine = tiny_models.engine()
    with engine.session(mode="prefix", seed=0) as s, Workflow(s, CYCLE) as team:
        with team.agent("a"):
            intro, role = s.prefill([1] * 10), s.prefill(start_of(0, 30))
            team.mark_fixed("a", [role[0:14]])
            s.decode([50], [intro, role], sampling=BRIEF).result()
        (key,) = fixed_prefix_hashes(team, "a")
        (entry,) = inspect(engine).cache_manager.entries_with(key)
        assert inspect(engine).cache_manager.fixed_parts.ends(entry) == {24: {key}}


def first_prompt(engine):
    """Compute a prompt of 100 tokens, whose first three all others have."""
    with engine.session(mode="prefix", seed=0) as s:
        s.decode([1, 2, 3, *(k % 50 for k in range(97))], sampling=BRIEF).result()


def test_of_an_entry_that_a_new_prompt_starts_with_the_rest_can_be_evicted():
    engine = tiny_models.engine(tokens=256)
    first_prompt(engine)
    with engine.session(mode="prefix", seed=0) as s:
        usage = s.decode([1, 2, 3, *(59 - k % 50 for k in range(200))], sampling=BRIEF).result().usage
    assert usage.cached_tokens == 3  # without the cut, both entries do not fit together
    engine.check()


def test_of_an_entry_whose_start_a_running_request_reads_the_rest_can_be_evicted():
    engine = tiny_models.engine(tokens=208)
    first_prompt(engine)
    with engine.session(mode="prefix", seed=0) as s, engine.session(mode="prefix", seed=0) as other:
        running = s.decode([1, 2, 3, 59], max_tokens=60, ignore_eos=True)
        for _ in range(3):
            engine.step()
        engine.check()
        other.decode([*(58 - k % 40 for k in range(130))], sampling=BRIEF).result()
        assert engine.stats().num_running == 1  # the other one did not wait for its end
        engine.check()
        assert len(running.result().tokens) >= 60
    engine.check()


def test_a_cut_of_an_entry_in_use_changes_no_answer():
    """Several clients share starts of different lengths under pressure; their answers are those without pressure."""

    def answers(engine):
        result = []
        with engine.session(mode="prefix", seed=0) as s:
            for turn in range(6):
                prompts = [
                    [*start_of(0, 40, 10 * n + 3), *((13 * turn + n + k) % 60 for k in range(60))] for n in range(3)
                ]
                messages = [s.decode(prompt, max_tokens=12, temperature=0.0, ignore_eos=True) for prompt in prompts]
                for message in messages:
                    result.append(message.result().tokens)
                    engine.check()
                for message in messages:
                    message.release()
        engine.check()
        return result

    expected = answers(tiny_models.engine())
    for options in ({}, {"eviction": "workflow"}, {"host_capacity": 600}):
        assert answers(tiny_models.engine(tokens=400, **options)) == expected
