"""Namespaces: different ones never compare equal, nor do their digests or the keys made of them."""

import os
import pickle
import subprocess
import sys
from dataclasses import replace

import pytest
from helpers import tiny_models
from helpers.hypothesis_profile import many
from hypothesis import given, settings
from hypothesis import strategies as st

from choreograph.kv_cache.hashing import content_hash
from choreograph.kv_cache.hints import prefix_key
from choreograph.namespace import UNSALTED, Client, Namespace, serialize, shared_namespace

# what joined and parsed text uses: separators, quotes, brackets, escapes, zero bytes, and an unpaired surrogate
NAMES = st.text(
    st.sampled_from(["\0", "\n", " ", ",", ":", "/", "%", "-", "[", "]", '"', "'", "\\", "a", "é", "\ud800"]),
    max_size=4,
)
LAYERS = st.frozensets(st.integers(0, 3), max_size=3)
NAMESPACES = st.builds(
    Namespace,
    weights=st.lists(NAMES, max_size=3).map(tuple),
    client=st.builds(Client, NAMES, st.lists(NAMES, max_size=3).map(tuple)),
    labels=st.frozensets(NAMES, max_size=3),
    layers=st.none() | LAYERS,
    position=st.none() | st.integers(0, 3),
    origin=st.none() | NAMES,
    is_prompt=st.booleans(),
    workflow=st.none() | NAMES,
    session=st.none() | NAMES,
    features=st.lists(st.tuples(NAMES, st.integers(0, 2)), max_size=2).map(tuple),
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | NAMES | st.binary(max_size=3) | st.builds(Client, NAMES),
    lambda values: st.lists(values, max_size=3).map(tuple) | st.frozensets(values, max_size=3),
    max_leaves=6,
)


def typed(value):
    """Return a value that is equal for equal values of equal types only: True is not 1."""
    if isinstance(value, tuple | frozenset):
        return type(value), type(value)(map(typed, value))
    return type(value), value


@given(VALUES, VALUES)
def test_different_values_are_serialized_differently(one, other):
    assert (serialize(one) == serialize(other)) == (typed(one) == typed(other))


@given(NAMESPACES, NAMESPACES)
def test_different_namespaces_share_no_digest_and_no_content_hash(one, other):
    is_same = all(getattr(one, name) == getattr(other, name) for name in one.__dataclass_fields__)
    assert (one == other) == (one.digest == other.digest) == is_same
    assert (content_hash(one, [1, 2], 0, ()) == content_hash(other, [1, 2], 0, ())) == is_same
    if is_same:
        assert hash(one) == hash(other)


@given(st.lists(NAMES, min_size=2, max_size=5), st.data())
def test_parts_that_are_cut_elsewhere_are_others(names, data):
    """Parts of one joined text, as a client could choose them."""
    text = data.draw(st.sampled_from(["\0", ", ", "/", ""])).join(names)
    first, second = (data.draw(st.integers(0, len(text))) for _ in range(2))
    pairs = [(text[:cut], text[cut:]) for cut in (first, second)]
    for make in (
        lambda a, b: Namespace(client=Client(a, (b,))),
        lambda a, b: Namespace(client=Client("t", (a, b))),
        lambda a, b: Namespace(weights=(a, b)),
        lambda a, b: Namespace(labels=frozenset({a, b, "x"})),
        lambda a, b: Namespace(workflow=a, session=b),
        lambda a, b: Namespace(client=Client(a), workflow=b),
    ):
        one, other = (make(*pair) for pair in pairs)
        assert (one == other) == (one.digest == other.digest)
        assert pairs[0] == pairs[1] or one != other or one.labels


def test_a_part_never_equals_the_same_text_in_another_field():
    others = [
        Namespace(client=Client("a")),
        Namespace(client=Client("a", UNSALTED)),
        Namespace(client=Client("a", ("prefix",))),
        Namespace(client=Client("a\0prefix")),
        Namespace(client=Client("a"), is_prompt=True),
        Namespace(client=Client("a"), workflow="prefix"),
        Namespace(client=Client("a"), session="prefix"),
        Namespace(client=Client("a"), origin="prefix"),
        Namespace(client=Client("a"), labels=frozenset({"prefix"})),
        Namespace(client=Client("a"), layers=frozenset()),
        Namespace(client=Client("a"), layers=frozenset({0})),
        Namespace(client=Client("a"), position=0),
        Namespace(("a",)),
        Namespace(("a", "")),
    ]
    assert len(set(others)) == len({namespace.digest for namespace in others}) == len(others)


def test_a_fixed_part_of_a_prompt_is_no_message_of_another_client():
    namespace, other = Namespace(client=Client("a")), Namespace(client=Client("a\0prefix"))
    keys = [prefix_key(namespace, [1, 2]), content_hash(namespace, [1, 2], 0, ()), content_hash(other, [1, 2], 0, ())]
    assert len(set(keys)) == 3


def test_a_digest_is_that_of_every_process_and_survives_a_copy():
    namespace = Namespace(("m", ""), Client("t", ("a", "b")), frozenset({"x", "y", "z", "\ud800"}), workflow="w\0")
    program = f"from choreograph.namespace import *; print(eval({repr(namespace)!a}).digest.hex())"
    for seed in ("1", "2"):
        result = subprocess.run(
            [sys.executable, "-c", program], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True
        )
        assert result.stdout.decode().strip() == namespace.digest.hex()
    copy = pickle.loads(pickle.dumps(namespace))
    assert copy == namespace and copy.digest == namespace.digest
    assert replace(copy, workflow="v").digest != namespace.digest


def test_a_value_of_another_type_is_refused():
    with pytest.raises(TypeError, match=r"1\.5 cannot be part of a key"):
        serialize(("a", 1.5))


def test_equal_parts_share_one_namespace_whose_digest_is_computed_once():
    one, two = (shared_namespace(("m",), Client("".join(["t"]))) for _ in range(2))
    assert one is two


CLIENTS = NAMES | st.builds(Client, NAMES, st.lists(NAMES, max_size=3).map(tuple))


@pytest.mark.parametrize("mode", ["choreographed", "prefix"])
def test_clients_whose_names_could_be_joined_to_equal_text_share_nothing(mode):
    engine, tokens = tiny_models.engine(), list(range(40))

    def cached(client):
        with engine.session(mode=mode, client_id=client, seed=0) as session:
            text = session.prefill(tokens)
            answer = session.decode([7], [text], max_tokens=2).result()
            return text.usage.cached_tokens + answer.usage.cached_tokens

    @settings(max_examples=many(20), deadline=None)
    @given(CLIENTS, CLIENTS)
    def check(one, other):
        engine.clear_cache()
        nothing = cached(one)  # but the message that the answer reads
        assert (cached(other) > nothing) == (Client.of(one) == Client.of(other))
        assert cached(one) > nothing
        engine.check()

    check()
