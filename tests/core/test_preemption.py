"""Pages on demand, preemption and admission out of order: results never change, and every program ends."""

from dataclasses import dataclass

import pytest
from helpers import tiny_models
from helpers.hypothesis_profile import many
from helpers.inspect_engine import inspect
from helpers.message_graphs import VOCABULARY
from hypothesis import given, settings
from hypothesis import strategies as st

from choreograph import Engine, SamplingParams
from choreograph.core.preemption import MAX_PASSED_OVER
from choreograph.errors import CacheFullError, InvalidRequestError

PAGE, LIMIT = 2, 10_000


@dataclass
class Call:
    """One decode or prefill of a random program."""

    tokens: list[int]
    parents: list[int]
    max_tokens: int | None  # None: a prefill
    footer: list[int]
    priority: int
    later: int  # steps before it is submitted

    @property
    def num_pages(self) -> int:
        return -(-(len(self.tokens) + (self.max_tokens or 0) + len(self.footer) * bool(self.max_tokens)) // PAGE)


@st.composite
def programs(draw) -> list[Call]:
    calls: list[Call] = []
    for index in range(draw(st.integers(2, 12))):
        calls.append(
            Call(
                tokens=draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=9)),
                parents=draw(st.lists(st.integers(0, index - 1), unique=True, max_size=2)) if index else [],
                max_tokens=draw(st.one_of(st.none(), st.integers(1, 30), st.integers(10, 30))),
                footer=draw(st.lists(st.integers(0, VOCABULARY - 1), max_size=2)),
                priority=draw(st.sampled_from([0, 0, 0, -1, 1])),
                later=draw(st.sampled_from([0, 0, 0, 1, 5])),
            )
        )
    return calls


def room_for_each(calls: list[Call], mode: str) -> int:
    """Pages with which every call and the recomputation of its context fit, one call at a time."""
    depth: list[int] = []  # pages to compute a call or anything it needs
    text: list[int] = []  # pages of its concatenated prompt
    for call in calls:
        parents = sum(calls[p].num_pages for p in call.parents)
        depth.append(max([call.num_pages + parents + max((depth[p] for p in call.parents), default=0)]))
        text.append(call.num_pages + sum(text[p] for p in call.parents))
    return max(depth if mode == "choreographed" else text)


def run(engine, calls: list[Call], mode: str) -> tuple[list, int]:
    """The tokens and log-probabilities of all calls, and the steps that they took."""
    num_steps, messages = 0, []

    def step() -> bool:
        nonlocal num_steps
        advanced = engine.step()
        engine.check()
        num_steps += advanced
        return advanced

    with engine.session(mode=mode, seed=3) as session:
        for call in calls:
            for _ in range(call.later):
                step()
            parents = [messages[p] for p in call.parents]
            if call.max_tokens is None:
                messages.append(session.prefill(call.tokens, parents, priority=call.priority))
                continue
            sampling = SamplingParams(temperature=0.9, max_tokens=call.max_tokens, logprobs=0)
            messages.append(
                session.decode(call.tokens, parents, sampling=sampling, footer=call.footer, priority=call.priority)
            )
        while step():
            assert num_steps < LIMIT
        assert not inspect(engine).num_unfinished
        results = [(m.tokens, m.finish_reason, [one.logprob for one in m.logprobs or ()]) for m in messages]
    engine.clear_cache()
    counts = inspect(engine).cache_manager.stats
    assert counts["num_free_pages"] == counts["num_pages"]
    return results, num_steps


@pytest.mark.parametrize("lower", [{}, {"host_capacity": 48}, {"host_capacity": 4096}, {"disk_capacity": 64}], ids=str)
@given(
    calls=programs(),
    mode=st.sampled_from(["choreographed", "choreographed", "prefix", "naive"]),
    slack=st.integers(0, 12),
    eviction=st.sampled_from(["lru", "workflow", "lfu"]),
    aware=st.booleans(),
    step=st.sampled_from([4, 16, 1024]),
)
@settings(max_examples=many(8), deadline=None)
def test_results_under_memory_pressure_equal_those_with_ample_memory(lower, calls, mode, slack, eviction, aware, step):
    expected, _ = run(tiny_models.engine(tokens=4096, page=PAGE), calls, mode)
    num_pages = room_for_each(calls, mode) + slack
    engine = tiny_models.engine(tokens=PAGE * num_pages, page=PAGE, eviction=eviction, aware=aware, step=step, **lower)
    results, num_steps = run(engine, calls, mode)
    for (tokens, reason, logprobs), (tokens2, reason2, logprobs2) in zip(results, expected, strict=True):
        assert (tokens, reason) == (tokens2, reason2)
        assert logprobs == pytest.approx(logprobs2, abs=2e-4)
    num_tokens = sum(PAGE * call.num_pages for call in calls)
    assert num_steps <= 2 * len(calls) * num_tokens  # every token in a step of its own, recomputed for every call


def sampling(max_tokens: int | None, **options) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **options)


def step_until_idle(engine) -> None:
    while engine.step():
        engine.check()


def admitted_ids(engine) -> list[int]:
    return [event.data["request"] for event in engine.events.recent if event.kind == "admitted"]


def test_without_max_tokens_a_decode_ends_with_the_context_of_the_model():
    engine = Engine.from_pretrained(tiny_models.build(positions=24))
    with engine.session() as session:
        message = session.decode([1, 2, 3, 4], sampling=sampling(None))
        assert len(message.output_token_ids) == 20
        assert message.finish_reason == "length"


def test_without_max_tokens_a_decode_ends_when_the_cache_does_with_room_for_its_footer():
    with tiny_models.engine(tokens=2048).session() as session:
        expected = session.decode([1, 2, 3, 4], sampling=sampling(26), footer=[5, 6]).tokens
    engine = tiny_models.engine(tokens=32, page=4)
    with engine.session() as session:
        message = session.decode([1, 2, 3, 4], sampling=sampling(None), footer=[5, 6])
        assert message.tokens == expected
        assert (message.finish_reason, message.length) == ("length", 32)
        engine.check()
        message.release()
        with pytest.raises(CacheFullError, match="needs room for 33 tokens; the whole cache holds 32"):
            session.decode([1] * 32, sampling=sampling(None), footer=[])
        assert len(session.decode([1] * 31, sampling=sampling(None), footer=[]).output_token_ids) == 1


def test_the_youngest_decode_of_the_lowest_priority_is_preempted_and_continues():
    with tiny_models.engine().session() as session:
        expected = [session.decode([i], sampling=sampling(30)).tokens for i in range(3)]
    engine = tiny_models.engine(tokens=64, page=2)
    with engine.session() as session:
        messages = [session.decode([i], sampling=sampling(30), priority=p) for i, p in enumerate((0, 1, 0))]
        step_until_idle(engine)
        assert [message.tokens for message in messages] == expected
    preempted = [event.data["request"] for event in engine.events.recent if event.kind == "preempted"]
    assert preempted[0] == messages[1].id
    assert messages[0].id not in preempted
    assert engine.events.counts["resumed"] >= 1


def test_a_preempted_decode_is_offloaded_and_loaded_where_there_is_a_lower_tier():
    engine = tiny_models.engine(tokens=64, page=2, host_capacity=256)
    with engine.session() as session:
        messages = [session.decode([i], sampling=sampling(28)) for i in range(4)]
        step_until_idle(engine)
        assert all(len(message.output_token_ids) == 28 for message in messages)
        engine.check()
    assert engine.events.counts["preempted"] and engine.events.counts["loaded"]


def test_a_preempted_decode_that_is_released_leaves_nothing():
    engine = tiny_models.engine(tokens=48, page=2)
    with engine.session() as session:
        context = session.prefill([7] * 6)
        messages = [session.decode([i], [context], sampling=sampling(30)) for i in range(3)]
        while not engine.events.counts["preempted"]:
            assert engine.step()
        preempted = next(event.data["request"] for event in engine.events.recent if event.kind == "preempted")
        next(message for message in messages if message.id == preempted).release()
        engine.check()
        step_until_idle(engine)
    engine.clear_cache()
    counts = inspect(engine).cache_manager.stats
    assert counts["num_free_pages"] == counts["num_pages"]


def test_a_prompt_whose_cached_prefix_grew_is_computed_without_it_where_both_do_not_fit():
    calls = [([1] * 4, 26), ([1] * 4 + [2], 24)]
    results = []
    for tokens in (2048, 32):
        engine = tiny_models.engine(tokens=tokens, page=2)
        with engine.session(mode="prefix") as session:
            messages = [session.decode(prompt, sampling=sampling(length)) for prompt, length in calls]
            step_until_idle(engine)
            results.append([message.tokens for message in messages])
    assert results[0] == results[1]


def test_small_requests_pass_a_large_one_a_bounded_number_of_times():
    engine = tiny_models.engine(tokens=128, page=4)
    with engine.session(mode="naive") as session:
        session.decode([1] * 50, sampling=sampling(40))  # holds memory
        engine.step()
        large = session.decode([2] * 100, sampling=sampling(1))
        small = [session.decode([3], sampling=sampling(1)) for _ in range(MAX_PASSED_OVER + 8)]
        engine.step()
        assert small[0].id in admitted_ids(engine) and large.id not in admitted_ids(engine)
        step_until_idle(engine)
    order = admitted_ids(engine)
    assert order.index(large.id) == 1 + MAX_PASSED_OVER


def test_requests_of_a_lower_priority_number_are_admitted_first_with_the_parents_they_need():
    engine = tiny_models.engine(calls=1)
    with engine.session() as session:
        first = session.decode([1], sampling=sampling(2), priority=5)
        parent = session.prefill([2, 3], priority=7)
        urgent = session.decode([4], [parent], sampling=sampling(2), priority=-1)
        step_until_idle(engine)
    assert admitted_ids(engine) == [parent.id, urgent.id, first.id]


@pytest.mark.parametrize("priority", [None, 1.5, "high", True])
def test_a_priority_that_is_not_a_whole_number_is_refused(priority):
    with tiny_models.engine().session() as session, pytest.raises(InvalidRequestError, match="use a whole number"):
        session.decode([1], sampling=sampling(1), priority=priority)


def test_entries_that_grow_side_by_side_remain_few_slot_ranges():
    engine = tiny_models.engine(tokens=2048, page=4)
    with engine.session() as session:
        messages = [session.decode([i], sampling=sampling(60)) for i in range(12)]
        step_until_idle(engine)
        assert all(len(inspect(message).entry.slot_ranges) == 1 for message in messages)


def test_a_preempted_decode_does_not_take_back_the_pages_that_an_earlier_one_waits_for():
    """Its entry was loaded and offloaded in turns, and no step computed anything."""
    engine = tiny_models.engine(tokens=64, page=4, host_capacity=4096)
    core = inspect(engine)
    with engine.session() as session:
        first, second, third = (session.prefill([i, *range(19)]) for i in range(3))
        contexts = [[first, second], [first, second], [third, first], [third, first]]
        messages = [session.decode([7, 8, i], parents, sampling=sampling(12)) for i, parents in enumerate(contexts)]
        for _ in range(500):
            if not core.step() and not core.offload_manager.wait():
                break
        assert all(message.done for message in messages)
        assert engine.stats().events["preempted"]
        engine.check()
