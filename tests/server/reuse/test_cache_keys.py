"""Requests share cache only if all that separates it is equal: no field can be written as part of another."""

import itertools

import openai
import pytest
from helpers.live_server import make_engine, serving

KEYS = ("first-secret", "second-secret")

SALTS = [
    {},
    {"cache_salt": '["x", "y"]'},
    {"cache_salt": "x", "extra_key": "y"},
    {"cache_salt": "y", "extra_key": "x"},
    {"cache_salt": "x"},
    {"extra_key": "x"},
    {"cache_salt": '["x", ""]'},
    {"cache_salt": "xy"},
    {"cache_salt": "x, y"},
    {"cache_salt": "('x', 'y')"},
    {"cache_salt": "x\ny"},
    {"cache_salt": "playground 1, prefix"},
]

WORKFLOWS = ["a", "a b", "a, b", '["a", "b"]', "a/b", "a%2Fb", "a\nb", "A", "a' ", "default "]

LABELS = [[], ["a", "b"], ["a, b"], ["a', 'b"], ['a", "b'], ["a"], ["b"], ["['a', 'b']"], ["a\nb"]]


@pytest.fixture(scope="module")
def server(talker_folder):
    """A server of two tenants."""
    with serving(make_engine(talker_folder, tokens=1 << 16), api_keys=KEYS) as result:
        yield result


def cached_tokens(server, text, *, key=KEYS[0], reuse="exact", system="", choreography=(), **fields):
    """Send a chat; return the tokens of its prompt that were cached, without the template's own."""
    body = {"choreography": {"reuse": reuse, **dict(choreography)}} | fields
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": text * 4})
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
        answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=2, extra_body=body)
    server.wait_until_idle()
    num_tokens = answer.usage.prompt_tokens_details.cached_tokens
    return num_tokens if num_tokens > 45 else 0


def check_separate(ask, variants):
    """Check that each variant finds only what it has stored itself."""
    assert [ask(variant) for variant in variants] == [0] * len(variants)
    assert all(ask(variant) for variant in variants)


@pytest.mark.parametrize("reuse", ["exact", "messages", "auto"])
def test_salts_of_different_fields_share_no_cache(server, reuse):
    text = f"What is told under one salt in {reuse} stays there, whatever the other fields say. "
    check_separate(lambda salt: cached_tokens(server, text, reuse=reuse, **salt), SALTS)


def test_an_empty_salt_is_none(server):
    text = "An empty salt and an empty key are those of a request that names none of them. "
    assert not cached_tokens(server, text)
    assert cached_tokens(server, text, cache_salt="", extra_key="")


@pytest.mark.parametrize("reuse", ["messages", pytest.param("auto", marks=pytest.mark.slow)])
def test_workflows_of_different_names_share_no_messages(server, reuse):
    text = f"What is told in one workflow with {reuse} is not known in one of another name. "
    numbers = itertools.count()

    def ask(name):
        system = f"Rule {next(numbers)} comes first."  # the message is stored after another one
        return cached_tokens(server, text, reuse=reuse, system=system, choreography={"workflow": name})

    check_separate(ask, WORKFLOWS)


@pytest.mark.parametrize("reuse", ["exact", "messages", pytest.param("auto", marks=pytest.mark.slow)])
def test_labels_that_could_be_joined_to_equal_text_share_no_cache(server, reuse):
    text = f"What has a label with {reuse} is found by those who have the same labels alone. "
    check_separate(lambda labels: cached_tokens(server, text, reuse=reuse, choreography={"labels": labels}), LABELS)


@pytest.mark.parametrize("reuse", ["exact", "messages", "auto"])
def test_tenants_share_nothing_under_any_salt(server, reuse):
    text = f"What one tenant says in {reuse} is unknown to the other, with and without a salt. "
    places = list(
        itertools.product(KEYS, ({}, {"cache_salt": "tenant-1"}, {"cache_salt": "tenant-0", "extra_key": "x"}))
    )
    check_separate(lambda place: cached_tokens(server, text, key=place[0], reuse=reuse, **place[1]), places)
