"""Plans of requests inside vLLM: identity of blocks, continuations, holes. Needs no vLLM."""

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from choreograph.vllm.entry_index import EntryIndex, EntryScope, KVRecord
from choreograph.vllm.reuse_params import ReuseParams, SpanParams, StoreParams
from choreograph.vllm.reuse_plan import PlanBuilder, ReusePlan, plan_messages, plan_spans

SCOPE = EntryScope(None, (), ())
TURN = 99  # the token that starts a turn


def plan_chat(index: EntryIndex, turns: list[list[int]], *, repair: float = 0.0, holes: bool = True) -> ReusePlan:
    """Plan a chat, store what it stores, and return the plan."""
    tokens = [token for turn in turns for token in turn]
    bounds = [sum(map(len, turns[:i])) for i in range(len(turns))]
    builder = PlanBuilder(tokens, SCOPE, repair=repair, can_compute_holes=holes)
    plan_messages(tokens, bounds, SCOPE, index, builder, min_tokens=2, min_moved=5)
    plan = builder.finish()
    for save in plan.saves:
        if save.stop is not None:
            record = KVRecord(SCOPE, tuple(tokens[save.start : save.stop]), save.start, save.context)
            if not index.has_content(record) and index.reserve(record):
                index.mark_stored(record)
    index.check()
    return plan


def turn(name: int, length: int = 5) -> list[int]:
    return [TURN, *[name] * length]


HEADER = [TURN, 98]


def test_a_chat_that_goes_on_has_the_identity_of_exact_requests():
    index = EntryIndex(1000)
    assert plan_chat(index, [turn(1), turn(2), HEADER]).places is None
    plan = plan_chat(index, [turn(1), turn(2), turn(3), HEADER])
    assert plan.num_reused == 12 and plan.places is None and plan.salt("tenant") == "tenant"


def test_messages_in_another_order_get_an_identity_of_their_own():
    index = EntryIndex(1000)
    plan_chat(index, [turn(1), turn(2), HEADER])
    moved = plan_chat(index, [turn(2), turn(1), HEADER])
    assert moved.num_reused == 12 and moved.salt(None) is not None and not moved.has_holes
    assert [run.shift for run in moved.runs] == [-6, 6]
    assert plan_chat(index, [turn(2), turn(1), HEADER]).salt(None) == moved.salt(None)
    assert plan_chat(index, [turn(2), turn(1), HEADER]).salt("tenant") != moved.salt(None)


def test_a_chat_that_goes_on_after_moved_messages_keeps_their_identity():
    index = EntryIndex(1000)
    plan_chat(index, [turn(1), turn(2), HEADER])
    first = plan_chat(index, [turn(2), turn(1), turn(3), HEADER])
    second = plan_chat(index, [turn(2), turn(1), turn(3), turn(4), HEADER])
    assert second.num_reused == 18 and second.salt(None) == first.salt(None)


def test_a_short_message_is_computed_where_nothing_is_gained_by_moving_it():
    """Two chats in which a user says the same thanks stay exact; before a moved message it is moved too."""
    index, thanks = EntryIndex(1000), turn(9, 2)
    plan_chat(index, [turn(1), turn(2), thanks, HEADER])
    for _ in range(2):
        plan = plan_chat(index, [turn(3), thanks, HEADER])
        assert plan.places is None
    assert plan.num_reused == 9  # the second chat finds its own
    assert plan_chat(index, [thanks, turn(2), HEADER]).num_reused == 9


def test_an_equal_message_twice_in_a_prompt_is_reused_twice():
    index = EntryIndex(1000)
    plan_chat(index, [turn(1), HEADER])
    assert [run.at for run in plan_chat(index, [turn(1), turn(1), HEADER]).runs] == [0, 6]


def test_plans_with_holes_never_share_blocks():
    index = EntryIndex(1000)
    plan_chat(index, [turn(1), turn(2), HEADER])
    plan = plan_chat(index, [turn(2), turn(3), turn(1), HEADER])
    assert plan.has_holes and plan.salt(None) != plan.salt(None)


def test_without_holes_reuse_ends_at_the_first_new_message():
    index = EntryIndex(1000)
    plan_chat(index, [turn(1), turn(2), HEADER])
    plan = plan_chat(index, [turn(2), turn(3), turn(1), HEADER], holes=False)
    assert [run.at for run in plan.runs] == [0] and not plan.has_holes


def test_full_repair_is_an_exact_request():
    index = EntryIndex(1000)
    plan_chat(index, [turn(1), turn(2), HEADER])
    plan = plan_chat(index, [turn(2), turn(1), HEADER], repair=1.0)
    assert plan.num_reused == 0 and plan.places is None


def test_repair_computes_the_first_tokens_of_every_moved_message():
    index = EntryIndex(1000)
    plan_chat(index, [turn(1, 9), turn(2, 9), HEADER])
    plan = plan_chat(index, [turn(2, 9), turn(1, 9), HEADER], repair=0.15)
    assert [(run.at, run.source, run.length) for run in plan.runs] == [(2, 2, 8), (12, 2, 8)]
    assert plan.has_holes


def test_a_message_that_was_stored_over_moved_ones_is_no_exact_continuation():
    """An entry with a moved message in it differs from what computing its tokens would give."""
    index = EntryIndex(1000)
    context = hashlib.sha256(repr(SCOPE).encode())
    for name, tokens, home in (("a", [1, 2, 3], 0), ("b", [4, 5, 6], 0)):
        record = KVRecord(SCOPE, tuple(tokens), home, context.copy(), name)
        assert index.reserve(record)
        index.mark_stored(record)
    prompt = [1, 2, 3, 4, 5, 6, 7]
    spans = [SpanParams(entry="a", stop=3, at=0), SpanParams(entry="b", stop=3, at=3)]
    params = ReuseParams(spans=spans, store=[StoreParams(entry="c", start=0, stop=6)])
    builder = PlanBuilder(prompt, SCOPE, repair=0.0, can_compute_holes=True)
    plan_spans(prompt, params, SCOPE, index, builder)
    plan = builder.finish()
    record = KVRecord(SCOPE, tuple(prompt[:6]), 0, plan.saves[0].context, "c")
    assert index.reserve(record)
    index.mark_stored(record)
    builder = PlanBuilder(prompt, SCOPE, repair=0.0, can_compute_holes=True)
    plan_spans(prompt, ReuseParams(spans=[SpanParams(entry="c", stop=6, at=0)]), SCOPE, index, builder)
    assert builder.finish().places is not None


@given(st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=6), min_size=1, max_size=8), st.booleans())
def test_runs_are_in_order_and_hold_the_tokens_of_the_prompt(chats: list[list[int]], holes: bool):
    index = EntryIndex(60)  # some are evicted
    for chat in chats:
        turns = [*(turn(name) for name in chat), HEADER]
        tokens = [token for t in turns for token in t]
        plan = plan_chat(index, turns, holes=holes)
        end = 0
        for run in plan.runs:
            assert run.at >= end and run.stop < len(tokens)
            assert run.record.tokens[run.source : run.source + run.length] == tuple(tokens[run.at : run.stop])
            assert holes or run.at == end
            end = run.stop


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(1, 30), st.integers(0, 5)), max_size=40))
def test_the_index_keeps_its_budget_and_its_pins(operations: list[tuple[str, int, int]]):
    index, pinned, held = EntryIndex(64), list[KVRecord](), set[int]()
    for name, length, action in operations:
        found = index.find_name(SCOPE, name)
        if action == 0 and found is not None:
            index.pin(found)
            pinned.append(found)
        elif action == 1 and pinned:
            index.unpin(pinned.pop())
        elif action == 2 and found is not None:
            index.remove(found)
        elif action == 3 and found is not None:
            index.hint(found, length)
        else:
            record = KVRecord(SCOPE, tuple(range(length)), 0, hashlib.sha256(), name)
            if index.reserve(record):
                index.mark_stored(record)
                held.add(record.uid)
        held -= set(index.take_released())
        index.check()
        assert index.stored_uids() == held
        assert {record.uid for record in pinned} <= held
