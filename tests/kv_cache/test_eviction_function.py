"""Eviction by a user's own function: what it gets, its effect, and what happens if it is wrong."""

import pickle
import warnings
from dataclasses import asdict, replace
from functools import partial

import pytest
from helpers import tiny_models
from helpers.inspect_engine import inspect

from choreograph import CacheConfig, EngineConfig, SamplingParams
from choreograph.kv_cache.eviction import EvictionCandidate, least_recently_used, policy_name

GREEDY = SamplingParams(temperature=0, max_tokens=4)


def newest_first(candidates):
    return [candidate.id for candidate in sorted(candidates, key=lambda candidate: -candidate.created)]


def run(eviction):
    """Return the generated tokens of calls that do not fit together, and the ids of evicted entries."""
    engine, evicted = tiny_models.engine(tokens=64, page=4, eviction=eviction), []
    engine.events.subscribe(lambda event: event.kind == "evicted" and evicted.append(event.data))
    with engine.session(seed=0) as session:
        texts = [session.prefill([start] * 16).result() for start in (1, 2, 3)]
        answers = [session.decode([9, 9], [text], sampling=GREEDY).tokens for text in texts]
        session.prefill([4] * 40).result()
        ids = [inspect(text).entry.id for text in texts]
        engine.check()
    return answers, [ids.index(data["entry"]) for data in evicted if data["entry"] in ids], evicted


def test_a_function_of_the_user_decides_what_is_evicted():
    answers, in_order, _ = run("fifo")
    seen = []

    def policy(candidates):
        candidates = list(candidates)
        seen.extend(candidates)
        return newest_first(candidates)

    same_answers, reverse, events = run(policy)
    assert same_answers == answers and in_order[:2] == [0, 1] and reverse[:2] == [1, 0]
    assert seen and all(isinstance(candidate, EvictionCandidate) for candidate in seen)
    assert {data["policy"] for data in events} == {policy_name(policy)}


def broken(candidates):
    raise KeyError("no such entry")


def short(candidates):
    return newest_first(candidates)[1:]


def double(candidates):
    return newest_first(candidates) * 2


def unknown(candidates):
    return [candidate.id + 1000 for candidate in candidates]


def nothing(candidates):
    return None


def names(candidates):
    return [str(candidate.id) for candidate in candidates]


@pytest.mark.parametrize("policy", [broken, short, double, unknown, nothing, names])
def test_a_wrong_function_is_named_once_and_lru_takes_its_place(policy):
    expected = run("lru")
    with pytest.warns(RuntimeWarning, match=rf"{policy.__name__} (raised|returned) .*'lru'") as caught:
        answers, order, events = run(policy)
    assert (answers, order) == expected[:2] and {data["policy"] for data in events} == {"lru"}
    assert len([warning for warning in caught if warning.category is RuntimeWarning]) == 1


def test_a_function_that_sorts_its_argument_in_place_is_right():
    def policy(candidates):
        candidates.sort(key=lambda candidate: candidate.last_access)
        return [candidate.id for candidate in candidates]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(policy)


def test_a_config_with_a_function_is_printed_copied_hashed_and_sent():
    config = EngineConfig(cache=CacheConfig(capacity=64, eviction=newest_first))
    assert replace(config, compile=False) == config and hash(replace(config)) == hash(config)
    assert pickle.loads(pickle.dumps(config)) == config
    assert asdict(config)["cache"]["eviction"] is newest_first and "newest_first" in repr(config)


def test_the_name_of_a_function_is_the_same_in_every_process():
    assert policy_name("fifo") == "fifo" and policy_name(newest_first) == f"{__name__}.newest_first"
    assert policy_name(partial(least_recently_used)) == "functools.partial"
