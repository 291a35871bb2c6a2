"""Routing policies: scores, bounds and what they forget; no Ray is needed."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from choreograph import SamplingParams
from choreograph.cluster.content_keys import anchor_keys, answer_keys, prompt_keys, scope_of
from choreograph.cluster.routing import POLICIES, MessageAffinity, RouteRequest, choose, create_policy
from choreograph.errors import ConfigError
from choreograph.namespace import Client, Namespace
from choreograph.server.openai.chat_prompt import ChatPrompt, Segment
from choreograph.server.reuse.message_store import WorkflowKey
from choreograph.server.running_request import GenerationSpec

IDLE = {"a": 0, "b": 0, "c": 0}
BUSY = dict.fromkeys(IDLE, 1)


def with_queues(policy, queues):
    """Return a policy that knows exactly these replicas and their queues."""
    for name in policy.queues.keys() - queues.keys():
        policy.on_removed(name)
    for name, length in queues.items():
        policy.set_queue(name, length)
    return policy


def rank(policy, request, queues):
    return with_queues(policy, queues).rank(request)


def routed_to(policy, request, queues):
    """Choose a replica, and note that it computes the request."""
    result = choose(with_queues(policy, queues), request)[0]
    policy.on_routed(request, result)
    return result


TEAM = Namespace(client=Client("team"))


def named(session):
    return Namespace(session=session)


def prompt(*messages, header=(9,)):
    segments = [Segment(tuple(message)) for message in messages]
    return ChatPrompt([*(token for message in messages for token in message), *header], segments, list(header))


def test_messages_in_another_order_have_the_same_keys_and_prefixes_have_not():
    one, two = prompt([1] * 20, [2] * 30), prompt([2] * 30, [1] * 20)
    assert prompt_keys("messages", TEAM, [one]) == prompt_keys("messages", TEAM, [two])
    assert not prompt_keys("exact", TEAM, [one]).keys() & prompt_keys("exact", TEAM, [two]).keys()
    assert sorted(prompt_keys("messages", TEAM, [one]).values()) == [20, 30]


def test_keys_of_two_tenants_differ():
    for mode in ("exact", "messages", "auto"):
        keys = [
            prompt_keys(mode, Namespace(client=Client(tenant)), [prompt(list(range(200)))]) for tenant in ("one", "two")
        ]
        assert keys[0] and not keys[0].keys() & keys[1].keys()


def test_keys_of_scopes_that_could_be_joined_to_equal_text_differ():
    salts = [("a", "b"), ("b", "a"), ('["a", "b"]', ""), ("a\0b", ""), ("a", ""), ("", "a"), ("ab", "")]
    workflows = ["a", "b", "a\0b", "a b", "", "0"]
    keys = [WorkflowKey(Client("t", salt), workflow, "m") for salt in salts for workflow in workflows]
    keys += [WorkflowKey(Client("t\0a", salts[4]), "a", "m"), WorkflowKey(Client("t", salts[4]), "m", "a")]
    text = prompt(list(range(200)))
    for mode in ("exact", "messages", "auto"):
        specs = [GenerationSpec(key, mode, [text], SamplingParams()) for key in keys]
        found = {scope: prompt_keys(mode, scope, [text]).keys() for scope in map(scope_of, specs)}
        assert len(found) == (len(salts) + 2 if mode == "exact" else len(keys))
        every = [key for own in found.values() for key in own]
        assert len(set(every)) == len(every) >= len(found)


def test_a_session_named_like_a_workflow_is_another_place():
    places = [Namespace(workflow="a"), Namespace(session="a"), Namespace(client=Client("a")), Namespace()]
    assert len({place.digest for place in places}) == 4


def test_a_quote_inside_another_text_has_the_keys_of_its_source():
    source, around = list(range(1000, 1400)), list(range(5000, 5050))
    quoted = anchor_keys(TEAM, around + source + around)
    own = anchor_keys(TEAM, source)
    assert own and own.keys() <= quoted.keys()


def test_an_answer_is_found_by_what_the_client_sends_back():
    learned = answer_keys("messages", TEAM, [1, 2, 3], ["said"])
    sent_back = ChatPrompt([1, 2], [Segment((7, 1, 2, 3, 8), "said")])
    assert prompt_keys("messages", TEAM, [sent_back]).keys() == learned.keys()


def test_the_replica_with_most_tokens_is_first_and_a_long_queue_outweighs_it():
    policy = with_queues(MessageAffinity(queue_tokens=100, balance=0, slack=0), IDLE)
    policy.on_routed(RouteRequest({1: 250, 2: 40}), "b")
    policy.on_routed(RouteRequest({2: 40}), "a")
    request = RouteRequest({1: 250, 2: 40})
    assert rank(policy, request, IDLE) == ["b", "a", "c"]
    assert policy.held(request) == {"b": 290, "a": 40}
    assert rank(policy, request, IDLE | {"b": 2})[0] == "b"
    assert rank(policy, request, IDLE | {"b": 3})[0] == "a"


def test_a_digest_keeps_its_most_recent_keys_within_both_limits():
    policy = with_queues(MessageAffinity(max_keys=2, max_tokens=100), IDLE)
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
        counts[routed_to(policy, request, IDLE)] += sum(request.keys.values())
    assert max(counts.values()) - min(counts.values()) <= 1000
    policy.on_removed("a")
    assert policy.work("a") == 0
    with_queues(policy, IDLE)  # it is back, and does not get everything
    assert policy.work("a") == min(policy.work(name) for name in "bc") > 0


def test_a_hot_message_is_given_to_another_replica_once_its_source_has_more_work():
    policy = with_queues(MessageAffinity(), BUSY)
    policy.on_routed(RouteRequest({1: 1000}), "a")
    routed = [routed_to(policy, RouteRequest({1: 1000, 100 + number: 200}), BUSY) for number in range(60)]
    assert routed[0] == "a" and set(routed) == set(IDLE)
    assert [routed.count(name) for name in IDLE] == pytest.approx([20] * 3, abs=10)


@pytest.mark.parametrize("is_movable", [False, True])
def test_an_idle_cluster_keeps_a_workflow_where_its_messages_are(is_movable):
    policy, keys = MessageAffinity(), {}
    first = None
    for turn in range(40):  # each turn adds a message, and nothing else runs
        keys = keys | {turn: 300}
        replica = routed_to(policy, RouteRequest(keys, named("debate"), is_movable=is_movable), IDLE)
        first = first or replica
        assert replica == first
    # another workflow goes to a replica that was given less
    assert routed_to(policy, RouteRequest({100: 300}, named("other")), IDLE) != first


def test_loads_that_differ_by_less_than_a_step_are_equal_to_the_holder_of_messages():
    policy, request = with_queues(MessageAffinity(slack=500), BUSY), RouteRequest({1: 100}, is_movable=True)
    policy.on_routed(RouteRequest({1: 100}), "a")
    policy.on_routed(RouteRequest({2: 250}), "a")
    assert rank(policy, request, BUSY)[0] == "a"
    policy.on_routed(RouteRequest({3: 200}), "a")
    assert rank(policy, request, BUSY)[0] != "a"
    assert rank(policy, request, IDLE)[0] == "a"


def test_a_few_common_tokens_do_not_keep_requests_together():
    """For example, those of a template, in requests that are nothing else alike."""
    policy = with_queues(MessageAffinity(), {"a": 0, "b": 0})
    for number in range(8):
        replica = rank(policy, RouteRequest({0: 12, number + 1: 20}), policy.queues)[0]
        policy.on_routed(RouteRequest({0: 12, number + 1: 20}), replica)
        policy.set_queue(replica, policy.queues[replica] + 1)
    assert policy.queues == {"a": 4, "b": 4}


def test_tokens_that_can_be_fetched_weigh_less():
    policy = with_queues(MessageAffinity(queue_tokens=100, moving=0.25, balance=0, slack=0), IDLE)
    policy.on_routed(RouteRequest({1: 600}), "a")
    assert rank(policy, RouteRequest({1: 600}), IDLE | {"a": 2})[0] == "a"
    assert rank(policy, RouteRequest({1: 600}, is_movable=True), IDLE | {"a": 2})[0] != "a"


def test_what_replicas_were_given_is_forgotten_and_stays_finite():
    policy = with_queues(MessageAffinity(horizon=1), IDLE)
    policy.on_routed(RouteRequest({1: 1000}), "a")
    for number in range(2000):
        policy.on_routed(RouteRequest({number: 10}), "b")
    assert policy.work("a") < 1e-9 and 5 < policy.work("b") < 50


def test_answers_of_a_removed_replica_are_not_learned():
    policy = with_queues(MessageAffinity(), IDLE)
    policy.on_routed(RouteRequest({1: 10}), "a")
    policy.on_removed("a")
    choose(policy, RouteRequest(learned=[("a", {3: 10})]))
    policy.on_routed(RouteRequest({3: 10}), "a")  # the request was sent before the replica went
    policy.on_routed(RouteRequest({2: 10}), "b")
    assert policy.held(RouteRequest({1: 10, 2: 10, 3: 10})) == {"b": 10}
    policy.check()


def test_what_replicas_generated_is_known_before_the_request_is_routed_and_is_named_to_others():
    policy = with_queues(MessageAffinity(balance=0), IDLE)
    policy.on_routed(RouteRequest({1: 10}), "a")
    request = RouteRequest({1: 10, 2: 500}, learned=[("a", {2: 500})])
    assert choose(policy, request)[0] == "a" and not request.learned
    assert policy.sources(RouteRequest({1: 10, 2: 500, 3: 10})) == {1: ["a"], 2: ["a"]}
    assert create_policy("session").sources(request) == {}


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_pinned_replica_is_the_only_one_and_failed_ones_are_avoided(name):
    policy = with_queues(create_policy(name), IDLE)
    assert choose(policy, RouteRequest(pinned="c")) == ["c"]
    assert set(choose(policy, RouteRequest(pinned="gone", failed={"a"}))) == {"b", "c"}
    assert set(choose(policy, RouteRequest(failed={"a", "b", "c"}))) <= {"a", "b", "c"}
    assert choose(policy, RouteRequest(failed={"a", "b", "c"}))


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_the_only_replica_that_has_not_failed_is_found_among_many(name):
    queues = {f"r{number}": number % 5 for number in range(60)}
    policy, failed = with_queues(create_policy(name), queues), set(queues) - {"r58"}
    assert choose(policy, RouteRequest({1: 100}, named("session"), failed=failed)) == ["r58"]


@pytest.mark.parametrize("name", ["message", "session"])
def test_new_sessions_spread_over_idle_replicas_and_stay(name):
    policy, queues = create_policy(name), {f"r{number}": 0 for number in range(4)}
    first = [rank(policy, RouteRequest(session=named(f"s{number}")), queues)[0] for number in range(400)]
    assert all(60 <= first.count(replica) <= 140 for replica in queues)
    assert first == [rank(policy, RouteRequest(session=named(f"s{number}")), queues)[0] for number in range(400)]
    fewer = {replica: 0 for replica in queues if replica != "r3"}
    moved = [rank(policy, RouteRequest(session=named(f"s{number}")), fewer)[0] for number in range(400)]
    assert all(old == new for old, new in zip(first, moved, strict=True) if old != "r3")


def test_prefix_affinity_balances_queues_that_differ_much():
    policy = with_queues(create_policy("prefix", imbalance=2), IDLE)
    request = RouteRequest({1: 100, 2: 100})
    policy.on_routed(request, "b")
    assert rank(policy, request, IDLE)[0] == "b"
    assert rank(policy, RouteRequest({2: 100, 1: 100}), IDLE | {"b": 1})[0] != "b"  # another order: no common prefix
    assert rank(policy, request, IDLE | {"b": 3})[0] != "b"


def test_replicas_that_have_a_message_of_another_model_hold_it_too():
    policy = with_queues(MessageAffinity(), BUSY)
    policy.on_routed(RouteRequest({11: 300}), "b")  # of the other model
    policy.on_routed(RouteRequest({2: 100}), "b")
    policy.on_routed(RouteRequest({1: 300}), "c")
    request = RouteRequest({1: 300, 2: 100}, alternatives={1: [11], 2: [12]}, is_movable=True)
    assert policy.held(request) == {"b": 400, "c": 300}
    assert policy.sources(request) == {1: ["c"], 2: ["b"], 11: ["b"]}


def test_a_message_of_another_model_is_fetched_and_counts_as_held():
    policy = with_queues(MessageAffinity(), IDLE)
    policy.on_routed(RouteRequest({11: 300}), "b")  # of the other model
    request = RouteRequest({1: 300, 2: 100}, alternatives={1: [11], 2: [12]}, is_movable=True)
    policy.on_routed(request, "c")
    assert policy.work("c") == pytest.approx(0.25 * 300 + 100, rel=0.01)
    assert policy.held(RouteRequest({11: 300, 12: 100})) == {"b": 300, "c": 300}
    policy.on_routed(request, "b")  # it has layers of the first, and computes the second
    assert policy.work("b") == pytest.approx(300 + 0.25 * 100, rel=0.01)
    policy.check()


def test_unknown_routers_are_refused():
    with pytest.raises(ConfigError, match="use one of"):
        create_policy("random")


KEYS = st.dictionaries(st.integers(0, 30), st.integers(1, 50), max_size=6)
STEPS = st.lists(st.tuples(st.sampled_from("abcd"), KEYS, st.booleans()), max_size=60)


@settings(max_examples=60, deadline=None)
@given(STEPS, st.integers(1, 8), st.integers(1, 200))
def test_tables_agree_after_any_sequence(steps, max_keys, max_tokens):
    policy = with_queues(MessageAffinity(256.0, slack=0, max_keys=max_keys, max_tokens=max_tokens), IDLE)
    for replica, keys, is_removed in steps:
        request = RouteRequest(keys)
        held = policy.held(request)
        assert all(0 < tokens <= sum(keys.values()) for tokens in held.values())
        assert sorted(rank(policy, request, IDLE)) == sorted(IDLE)
        queues = {"a": len(keys), "b": 1, "c": 2}  # never all idle
        first = rank(policy, request, queues)[0]
        scores = {name: held.get(name, 0) - 256 * queues[name] - policy.work(name) for name in queues}
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
    policy = with_queues(create_policy(name), queues)
    for _ in range(3):
        ranked = choose(policy, RouteRequest(keys, named("session")))
        assert ranked and set(ranked) <= set(queues) and len(set(ranked)) == len(ranked)
        policy.on_routed(RouteRequest(keys, named("session")), ranked[0])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([f"r{number}" for number in range(30)]), st.integers(0, 4), KEYS), max_size=90),
    st.integers(0, 500),
    st.booleans(),
)
def test_the_index_finds_the_first_replica_of_a_scan_over_all(steps, slack, is_movable):
    policy = with_queues(MessageAffinity(slack=slack), {f"r{number}": 0 for number in range(30)})
    for replica, length, keys in steps:
        policy.set_queue(replica, length)
        request = RouteRequest(keys, named("session"), is_movable=is_movable)
        held = policy.held(request)
        load = {name: 64 * queue + policy.work(name) for name, queue in policy.queues.items()}
        is_idle, least = not any(policy.queues.values()), min(load.values())
        limit = {name: math.inf if is_idle else least + min(slack, 4 * held.get(name, 0)) for name in load}
        cost = {name: value if value > limit[name] else least for name, value in load.items()}
        for name, num_held in held.items():
            cost[name] -= num_held / 4 if is_movable else num_held
        first = policy.rank(request)[0]
        assert cost[first] == pytest.approx(min(cost.values()))
        assert load[first] == pytest.approx(min(load[name] for name in cost if cost[name] <= cost[first] + 1e-9))
        policy.on_routed(request, replica)
        policy.check()
