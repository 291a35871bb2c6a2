"""Routing policies: scores, bounds and what they forget; no Ray is needed."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from choreograph.cluster.content_keys import anchor_keys, answer_keys, prompt_keys
from choreograph.cluster.routing import POLICIES, MessageAffinity, RouteRequest, choose, create_policy
from choreograph.errors import ConfigError
from choreograph.server.chat_prompt import ChatPrompt, Segment

IDLE = {"a": 0, "b": 0, "c": 0}


def prompt(*messages, header=(9,)):
    segments = [Segment(tuple(message)) for message in messages]
    return ChatPrompt([*(token for message in messages for token in message), *header], segments, list(header))


def test_messages_in_another_order_have_the_same_keys_and_prefixes_have_not():
    one, two = prompt([1] * 20, [2] * 30), prompt([2] * 30, [1] * 20)
    assert prompt_keys("messages", ("t",), [one]) == prompt_keys("messages", ("t",), [two])
    assert not prompt_keys("exact", ("t",), [one]).keys() & prompt_keys("exact", ("t",), [two]).keys()
    assert sorted(prompt_keys("messages", ("t",), [one]).values()) == [20, 30]


def test_keys_of_two_tenants_differ():
    for mode in ("exact", "messages", "auto"):
        keys = [prompt_keys(mode, (tenant,), [prompt(list(range(200)))]) for tenant in ("one", "two")]
        assert keys[0] and not keys[0].keys() & keys[1].keys()


def test_a_quote_inside_another_text_has_the_keys_of_its_source():
    source, around = list(range(1000, 1400)), list(range(5000, 5050))
    quoted = anchor_keys(("t",), around + source + around)
    own = anchor_keys(("t",), source)
    assert own and own.keys() <= quoted.keys()


def test_an_answer_is_found_by_what_the_client_sends_back():
    learned = answer_keys("messages", ("t",), [1, 2, 3], ["said"])
    sent_back = ChatPrompt([1, 2], [Segment((7, 1, 2, 3, 8), "said")])
    assert prompt_keys("messages", ("t",), [sent_back]).keys() == learned.keys()


def test_the_replica_with_most_tokens_is_first_and_a_long_queue_outweighs_it():
    policy = MessageAffinity(queue_tokens=100, balance=0)
    policy.on_routed(RouteRequest({1: 250, 2: 40}), "b")
    policy.on_routed(RouteRequest({2: 40}), "a")
    request = RouteRequest({1: 250, 2: 40})
    assert policy.rank(request, IDLE) == ["b", "a", "c"]
    assert policy.held(request) == {"b": 290, "a": 40}
    assert policy.rank(request, IDLE | {"b": 2})[0] == "b"
    assert policy.rank(request, IDLE | {"b": 3})[0] == "a"


def test_a_digest_keeps_its_most_recent_keys_within_both_limits():
    policy = MessageAffinity(max_keys=2, max_tokens=100)
    policy.on_routed(RouteRequest({1: 10, 2: 10}), "a")
    policy.on_routed(RouteRequest({1: 10}), "a")  # used again: 2 is the oldest now
    policy.on_routed(RouteRequest({3: 10}), "a")
    assert policy.held(RouteRequest({1: 10, 2: 10, 3: 10})) == {"a": 20}
    policy.on_routed(RouteRequest({4: 95}), "a")
    assert policy.held(RouteRequest({1: 10, 3: 10, 4: 95})) == {"a": 95}
    policy.check()


def test_work_that_replicas_were_given_spreads_what_no_replica_holds():
    policy = MessageAffinity()
    counts = dict.fromkeys(IDLE, 0)
    for number in range(60):
        request = RouteRequest({number: 1000 if number % 3 else 100})
        name = choose(policy, request, IDLE)[0]
        policy.on_routed(request, name)
        counts[name] += sum(request.keys.values())
    assert max(counts.values()) - min(counts.values()) <= 1000
    policy.on_removed("a")
    assert policy.work("a") == 0
    choose(policy, RouteRequest(), IDLE)  # it is back, and does not get everything
    assert policy.work("a") == min(policy.work(name) for name in "bc") > 0


def test_a_hot_message_is_given_to_another_replica_once_its_source_has_more_work():
    policy, first = MessageAffinity(), RouteRequest({1: 1000})
    policy.on_routed(first, "a")
    routed = []
    for number in range(30):
        request = RouteRequest({1: 1000, 100 + number: 200})
        routed.append(choose(policy, request, IDLE)[0])
        policy.on_routed(request, routed[-1])
    assert routed[0] == "a" and set(routed) == set(IDLE)
    assert [routed.count(name) for name in IDLE] == pytest.approx([10] * 3, abs=5)


def test_tokens_that_can_be_fetched_weigh_less():
    policy = MessageAffinity(queue_tokens=100, moving=0.25, balance=0)
    policy.on_routed(RouteRequest({1: 600}), "a")
    assert policy.rank(RouteRequest({1: 600}), IDLE | {"a": 2})[0] == "a"
    assert policy.rank(RouteRequest({1: 600}, is_movable=True), IDLE | {"a": 2})[0] != "a"


def test_what_replicas_were_given_is_forgotten_and_stays_finite():
    policy = MessageAffinity(horizon=1)
    policy.on_routed(RouteRequest({1: 1000}), "a")
    for number in range(2000):
        policy.on_routed(RouteRequest({number: 10}), "b")
    assert policy.work("a") < 1e-9 and 5 < policy.work("b") < 50


def test_answers_of_a_removed_replica_are_not_learned():
    policy = MessageAffinity()
    policy.on_routed(RouteRequest({1: 10}), "a")
    policy.on_removed("a")
    choose(policy, RouteRequest(learned=[("a", {3: 10})]), IDLE)
    policy.on_routed(RouteRequest({2: 10}), "b")
    assert policy.held(RouteRequest({1: 10, 2: 10, 3: 10})) == {"b": 10}
    policy.check()


def test_what_replicas_generated_is_known_before_the_request_is_routed_and_is_named_to_others():
    policy = MessageAffinity(balance=0)
    policy.on_routed(RouteRequest({1: 10}), "a")
    request = RouteRequest({1: 10, 2: 500}, learned=[("a", {2: 500})])
    assert choose(policy, request, IDLE)[0] == "a" and not request.learned
    assert policy.sources(RouteRequest({1: 10, 2: 500, 3: 10})) == {1: ["a"], 2: ["a"]}
    assert create_policy("session").sources(request) == {}


def test_a_pinned_replica_is_the_only_one_and_failed_ones_are_avoided():
    policy = MessageAffinity()
    assert choose(policy, RouteRequest(pinned="c"), IDLE) == ["c"]
    assert set(choose(policy, RouteRequest(pinned="gone", failed={"a"}), IDLE)) == {"b", "c"}
    assert set(choose(policy, RouteRequest(failed={"a", "b", "c"}), IDLE)) == {"a", "b", "c"}


@pytest.mark.parametrize("name", ["message", "session"])
def test_new_sessions_spread_over_idle_replicas_and_stay(name):
    policy, queues = create_policy(name), {f"r{number}": 0 for number in range(4)}
    first = [policy.rank(RouteRequest(session=f"s{number}"), queues)[0] for number in range(400)]
    assert all(60 <= first.count(replica) <= 140 for replica in queues)
    assert first == [policy.rank(RouteRequest(session=f"s{number}"), queues)[0] for number in range(400)]
    fewer = {replica: 0 for replica in queues if replica != "r3"}
    moved = [policy.rank(RouteRequest(session=f"s{number}"), fewer)[0] for number in range(400)]
    assert all(old == new for old, new in zip(first, moved, strict=True) if old != "r3")


def test_prefix_affinity_balances_queues_that_differ_much():
    policy = create_policy("prefix", imbalance=2)
    request = RouteRequest({1: 100, 2: 100})
    policy.on_routed(request, "b")
    assert policy.rank(request, IDLE)[0] == "b"
    assert policy.rank(RouteRequest({2: 100, 1: 100}), IDLE | {"b": 1})[0] != "b"  # another order: no common prefix
    assert policy.rank(request, IDLE | {"b": 3})[0] != "b"


def test_unknown_routers_are_refused():
    with pytest.raises(ConfigError, match="use one of"):
        create_policy("random")


KEYS = st.dictionaries(st.integers(0, 30), st.integers(1, 50), max_size=6)
STEPS = st.lists(st.tuples(st.sampled_from("abcd"), KEYS, st.booleans()), max_size=60)


@settings(max_examples=60, deadline=None)
@given(STEPS, st.integers(1, 8), st.integers(1, 200))
def test_tables_agree_after_any_sequence(steps, max_keys, max_tokens):
    policy = MessageAffinity(256.0, max_keys=max_keys, max_tokens=max_tokens)
    for replica, keys, is_removed in steps:
        request = RouteRequest(keys)
        held = policy.held(request)
        assert all(0 < tokens <= sum(keys.values()) for tokens in held.values())
        assert sorted(policy.rank(request, IDLE)) == sorted(IDLE)
        queues = {"a": len(keys), "b": 1, "c": 2}
        first = policy.rank(request, queues)[0]
        scores = {name: held.get(name, 0) - 256 * queues[name] - policy.work(name) / 2 for name in queues}
        assert scores[first] == pytest.approx(max(scores.values()))
        if is_removed:
            policy.on_removed(replica)
            assert replica not in policy.held(request)
        else:
            policy.on_routed(request, replica)
            policy.on_learned("a", keys)
        policy.check()


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(sorted(POLICIES)), st.dictionaries(st.text(max_size=3), st.integers(0, 9), min_size=1), KEYS)
def test_every_policy_ranks_only_replicas_that_exist(name, queues, keys):
    policy = create_policy(name)
    for _ in range(3):
        ranked = choose(policy, RouteRequest(keys, "session"), queues)
        assert ranked and set(ranked) <= set(queues) and len(set(ranked)) == len(ranked)
        policy.on_routed(RouteRequest(keys, "session"), ranked[0])
