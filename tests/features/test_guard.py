"""What a reader may not see changes neither what it attends to nor, but for rounding, its distributions."""

from typing import NamedTuple

import pytest
import torch
from helpers import model_variants, tiny_models
from helpers.hypothesis_profile import many
from helpers.inspect_engine import inspect
from helpers.message_graphs import graphs
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from choreograph import Budget, Repair, SamplingParams
from choreograph.features.budget import MIN_SAMPLES

GREEDY = SamplingParams(temperature=0, max_tokens=4)
SECRETS = ([1, 2, 3, 4, 5], [9, 8, 7, 6, 5])  # of one length
OTHER_LENGTHS = ([11, 12], [30] * 17)
# of log-probabilities: a product may round otherwise with another number of rows
ROUNDING = 100 * torch.finfo(torch.float32).eps


class Reading(NamedTuple):
    """What a decode attended to and computed."""

    attended: tuple  # tokens and positions of it and of all that its keys and values depend on
    cached_tokens: int  # of its context
    logprobs: Tensor  # (3, V)


def distributions(session, header, parents, **options) -> list[Reading]:
    """Read the parents in a decode that is forced to a fixed continuation."""
    rows = []
    message = session.decode(header, parents, forced_tokens=[5, 6, 7], **options)
    message.on_logprobs(rows.append)
    message.wait_encoded()
    return [Reading(attended_by(inspect(message).entry), message.usage.cached_tokens, torch.stack(rows))]


def attended_by(entry) -> tuple:
    """Return tokens and positions of an entry and, recursively, of the slices in its context."""
    context = ((attended_by(part.entry), *part[1:]) for part in entry.context)
    source = entry.layers.hidden_source
    return tuple(entry.tokens), entry.base_position, tuple(context), None if source is None else attended_by(source)


def assert_independent_of_the_secret(scenario, differs_without=True):
    """Run scenario(secret, guard), which returns readings.

    With a guard, a secret of the same length must not move them by a bit, and one of another length by no more than
    rounding: it may share a step. Without a guard they must move by more.
    """
    first, second = (scenario(secret, True) for secret in SECRETS)
    for reading, other in zip(first, second, strict=True):
        assert reading[:2] == other[:2] and torch.equal(reading.logprobs, other.logprobs)
    for secret in OTHER_LENGTHS:
        for reading, other in zip(first, scenario(secret, True), strict=True):
            assert reading[:2] == other[:2]
            torch.testing.assert_close(other.logprobs, reading.logprobs, rtol=0, atol=ROUNDING)
    if differs_without:
        first, second = (torch.cat([reading.logprobs for reading in scenario(secret, False)]) for secret in SECRETS)
        assert (first - second).abs().max() > 10 * ROUNDING


def clearance_of(guard, labels=()):
    return {"clearance": set(labels)} if guard else {}


def test_a_message_is_encoded_again_without_what_the_reader_may_not_see():
    engine = tiny_models.engine()
    with engine.session() as session:
        public, secret = session.prefill([1, 2]), session.prefill([3, 4, 5], labels={"alice"})
        said = session.decode([6], [public, secret], sampling=GREEDY, footer=[7])
        reader = session.decode([8], [public, said], clearance=set(), sampling=GREEDY)
        _, seen = reader.parents
        assert seen is not said and seen.tokens == said.tokens and seen.labels == reader.labels == frozenset()
        assert seen.parents == (public,) and seen.position == 2
        assert session.prefill(said.tokens, [public]).finish_reason == "cached"  # the same work
        assert reader.offsets == (0, 2)
        engine.check()
    assert engine.stats().num_referenced_entries == 0


def test_readers_of_equal_clearance_share_the_variant():
    engine = tiny_models.engine()
    with engine.session() as session:
        a, b = session.prefill([1, 2], labels={"a"}), session.prefill([3, 4], labels={"b"})
        said = session.prefill([5, 6], [a, b])
        readers = [session.prefill([7 + i], [said], clearance=c) for i, c in enumerate(([], {"c"}, {"b"}, {"b", "c"}))]
        seen = [reader.parents[0] for reader in readers]
        assert seen[0] is seen[1] and seen[2] is seen[3] and seen[0] is not seen[2]
        assert seen[2].parents == (b,) and seen[2].labels == {"b"}
        assert session.prefill([9], [said], clearance={"a", "b"}).parents == (said,)
        said.release()
        assert all(inspect(variant).is_released for variant in seen)


def test_ancestors_are_encoded_again_too():
    engine = tiny_models.engine()
    with engine.session() as session:
        secret = session.prefill([1, 2, 3], labels={"alice"})
        chain = [session.prefill([4], [secret])]
        for i in range(600):  # deeper than Python's call stack
            chain.append(session.prefill([i % 60], [chain[-1]]))
        reader = session.prefill([5], [chain[-1]], clearance=set())
        message = reader
        for _ in range(601):
            (message,) = message.parents
        assert not message.parents and message.labels == frozenset()


def test_a_released_ancestor_is_encoded_again():
    engine = tiny_models.engine()
    with engine.session() as session:
        public, secret = session.prefill([1, 2]), session.prefill([3, 4], labels={"alice"})
        said = session.prefill([6, 7], [public, secret]).result()
        public.release(), secret.release()
        (reading,) = distributions(session, [8], [said], clearance=set())
        (by_hand,) = distributions(session, [8], [session.prefill([6, 7], [session.prefill([1, 2])])])
        assert reading.attended == by_hand.attended
        torch.testing.assert_close(reading.logprobs, by_hand.logprobs, rtol=0, atol=ROUNDING)


def test_a_reader_may_be_submitted_before_the_text_is_final():
    engine = tiny_models.engine()
    with engine.session() as session:
        public, secret = session.prefill([1, 2]), session.prefill([3, 4], labels={"alice"})
        said = session.decode([6, 7], [public, secret], sampling=GREEDY)
        reader = session.decode([8], [said], clearance=set(), sampling=GREEDY)
        assert len(reader.output_token_ids) == 4
        assert reader.parents[0].tokens == said.tokens and reader.parents[0].position == 2
        engine.check()


def test_an_explanation_names_nothing_that_the_guard_has_removed():
    with tiny_models.engine().session() as session:
        public, secret = session.prefill([1, 2]), session.prefill([3, 4, 5], labels={"alice"})
        said = session.decode([6], [public, secret], sampling=GREEDY)
        free, guarded = (session.decode([8], [said], sampling=GREEDY, **clearance_of(g)) for g in (False, True))
        (parent,) = free.explain().parents
        assert parent.leaked == ((public.id, 2), (secret.id, 3))
        result = guarded.explain(measure=True)
        (parent,) = result.parents
        assert parent.leaked == ((public.id, 2),) and parent.message == guarded.parents[0].id
        assert parent.shift == -2 and len(result.divergence) == 4
        exact = session.decode([8], [public, said], sampling=GREEDY, clearance=set()).explain(measure=True)
        assert exact.kl < 1e-6 and not any(p.leaked or p.blocked for p in exact.parents)


@pytest.mark.parametrize("share", [0.0, 0.2])
def test_a_budget_in_a_guarded_session_does_not_see_the_secret(share):
    """Stages are known: calls reuse or repair, and some of them are measured when the session closes."""

    def scenario(secret, guard):
        engine, budget = tiny_models.engine(backend="reference"), Budget(0.1, shadow_calls=1, shadow_tokens=1e9)
        for _ in range(MIN_SAMPLES):
            for stage in ("/prefill 2 pp", "/decode 2 pp"):
                budget.observe(stage, {share: 0.01})
        with engine.session(max_kl=budget) as session:
            private, public = session.prefill(secret, labels={"alice"}), session.prefill([40, 41])
            engine.run_until_idle()
            said = session.prefill([6, 7, 8, 9, 10], [public, private])
            engine.run_until_idle()
            rows = distributions(session, [14], [session.prefill([20, 21, 22]), said], **clearance_of(guard))
        engine.check()
        assert budget.num_shadow_tokens > 0 and engine.stats().num_referenced_entries == 0
        return rows

    assert_independent_of_the_secret(scenario)


def test_a_declassified_message_is_read_as_it_is():
    engine = tiny_models.engine()
    with engine.session() as session:
        said = session.prefill([6, 7], [session.prefill([3, 4], labels={"alice"})]).declassify("alice")
        assert session.prefill([8], [said], clearance=set()).parents == (said,)


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("mode", ["choreographed", "prefix", "naive"])
def test_a_secret_does_not_move_a_reader(mode, backend):
    def scenario(secret, guard):
        engine = tiny_models.engine(backend=backend)
        with engine.session(mode=mode) as session:
            private, public = session.prefill(secret, labels={"alice"}), session.prefill([40, 41])
            said = session.decode([6], [public, private], forced_tokens=[7, 8], footer=[9])
            answer = session.decode([10], [public, said], forced_tokens=[11], **clearance_of(guard))
            again = session.decode([12], [public, private, said, answer], forced_tokens=[13])
            return distributions(session, [14], [again, public, said, answer], **clearance_of(guard))

    assert_independent_of_the_secret(scenario, differs_without=mode == "choreographed")


def test_explicit_positions_of_the_original_are_not_kept():
    """The author's call names positions that depend on the length of the secret."""

    def scenario(secret, guard):
        engine = tiny_models.engine(backend="reference")
        with engine.session() as session:
            private, public = session.prefill(secret, labels={"alice"}), session.prefill([40, 41])
            said = session.prefill([6, 7], [private, public], [0, len(secret)], len(secret) + 2)
            return distributions(session, [14], [said], **clearance_of(guard))

    assert_independent_of_the_secret(scenario)


@pytest.mark.parametrize("mode", ["choreographed", "prefix"])
def test_what_other_sessions_left_in_the_cache_does_not_move_a_reader(mode):
    """The secret is, or starts with, what the reader computes itself."""

    def scenario(secret, guard):
        engine = tiny_models.engine(backend="reference")
        with engine.session(mode=mode, labels={"alice"}) as session:
            session.decode([40, 41], [session.prefill(secret)], forced_tokens=[3]).wait_encoded()
            session.decode(secret, forced_tokens=[3]).wait_encoded()
        with engine.session(mode=mode, **clearance_of(guard)) as session:
            guess = session.prefill(SECRETS[0], labels=set())
            said = session.decode([40, 41], [guess], forced_tokens=[3])
            result = distributions(session, [14], [guess, said])
            assert said.usage.cached_tokens == (5 if mode == "choreographed" else 0)  # the guess, of this session
            return result

    assert_independent_of_the_secret(scenario, differs_without=False)


@pytest.mark.parametrize("tiers", [{"host_capacity": 256}, {}])
def test_memory_tiers_and_recomputation_do_not_move_a_reader(tiers):
    def scenario(secret, guard):
        engine = tiny_models.engine(tokens=80, backend="reference", **tiers)
        with engine.session() as session:
            private, public = session.prefill(secret, labels={"alice"}), session.prefill([40, 41])
            said = session.prefill([6, 7], [private, public]).wait_encoded()
            first = distributions(session, [14], [public, said], **clearance_of(guard))
            session.prefill([1] * 80).wait_encoded()
            assert said.kv_location == ("host" if tiers else "dropped")
            engine.check()
            return first + distributions(session, [14], [public, said], **clearance_of(guard))

    assert_independent_of_the_secret(scenario)


@pytest.mark.parametrize("strategy", ["first", "unseen", "deviation", "attention"])
@pytest.mark.parametrize("share", [0.3, 1])
def test_repair_does_not_see_the_secret(strategy, share):
    def scenario(secret, guard):
        engine = tiny_models.engine(backend="reference")
        with engine.session() as session:
            private, public = session.prefill(secret, labels={"alice"}), session.prefill(list(range(40, 52)))
            said = [session.prefill(list(range(i, i + 9)), [private, public]) for i in (2, 20)]
            repair = Repair(share, strategy)
            return distributions(session, [14], [*said, public], repair=repair, **clearance_of(guard))

    assert_independent_of_the_secret(scenario, differs_without=share < 1)


def test_slices_do_not_carry_the_secret():
    def scenario(secret, guard):
        engine = tiny_models.engine(backend="reference")
        with engine.session() as session:
            said = session.prefill([20, 21, 22, 23, 24], [session.prefill(secret, labels={"alice"})])
            quote = session.prefill([25, 26], [said[1:3]]).wait_encoded()
            return distributions(session, [14], [said[2:5], quote], **clearance_of(guard))

    assert_independent_of_the_secret(scenario)


@pytest.mark.parametrize("kv_reuse", ["recompute", "reuse", "partial"])
def test_reuse_across_models_does_not_carry_the_secret(kv_reuse):
    def scenario(secret, guard):
        engine = model_variants.engine(backend="reference")
        other = next(name for name in engine.models if name != "base")
        engine.enable_layer_reuse(other, pattern=(0, 1, 2))
        with engine.session() as session:
            private, public = session.prefill(secret, labels={"alice"}), session.prefill([40, 41])
            said = session.prefill([6, 7, 8], [private, public]).wait_encoded()
            quote = session.prefill([10, 11], [said], model=other, kv_reuse=kv_reuse).wait_encoded()
            options = {"model": other, "kv_reuse": kv_reuse, **clearance_of(guard)}
            return distributions(session, [14], [said, public, quote], **options)

    assert_independent_of_the_secret(scenario)


label_sets = st.sets(st.sampled_from("abc")).map(frozenset)


@settings(max_examples=many(16), deadline=None)
@given(nodes=graphs(), data=st.data())
def test_no_message_graph_carries_a_secret(nodes, data):
    """Texts with label a differ between two runs; a reader without it gets the same distributions.

    Bit for bit although lengths differ too: requests run one after the other.
    """
    labels = [data.draw(label_sets) for _ in nodes]
    clearances = [data.draw(st.none() | label_sets) for _ in nodes]
    slices = [data.draw(st.booleans()) for _ in nodes]
    clearance = data.draw(st.sets(st.sampled_from("bc")))
    secret = data.draw(st.lists(st.integers(0, 60), min_size=1, max_size=12))
    repair = data.draw(
        st.sampled_from([0, 0, 0.4, 1, Repair(0.4, "deviation"), Repair(0.4, "attention"), Repair(0.4, "unseen")])
    )
    mode = data.draw(st.sampled_from(["choreographed", "choreographed", "prefix"]))
    order = data.draw(st.permutations([i for i in range(len(nodes)) if labels[i] <= clearance]))

    def run(changes):
        # one page a message: the slots that are read together do not depend on the length of others
        engine, results = tiny_models.engine(backend="reference", page=64, tokens=4096), []
        for _ in range(2):  # the second session finds the entries of the first
            session = engine.session(mode=mode)
            messages = []
            for node, own, its_clearance, sliced in zip(nodes, labels, clearances, slices, strict=True):
                visible = frozenset().union(*(labels[index] for index in node.parents))
                parents = [messages[index] for index in node.parents]
                if sliced:
                    parents = [parent[1:] if parent.length > 1 else parent for parent in parents]
                options = {"labels": own, "clearance": None if its_clearance is None else its_clearance | visible}
                tokens = secret if changes and "a" in own else node.tokens
                args = (tokens, parents, node.offsets, node.position)
                if node.generated is None:
                    messages.append(session.prefill(*args, **options).wait_encoded())
                else:
                    forced = {"forced_tokens": node.generated, "footer": node.footer}
                    messages.append(session.decode(*args, **forced, **options).wait_encoded())
            parents = [messages[index] for index in order]
            results += distributions(session, [7, 8], parents, clearance=clearance, repair=repair)
            assert not any("a" in message.labels for message in ancestors(session.messages[-1]))
            engine.check()
        return results

    for reading, other in zip(run(False), run(True), strict=True):
        assert reading[:2] == other[:2] and torch.equal(reading.logprobs, other.logprobs)


def ancestors(message):
    """The message and everything that it depends on, in choreographed mode."""
    found = [message]
    for other in found:
        if inspect(message).mode == "choreographed":
            found += [parent for parent in (getattr(p, "message", p) for p in other.parents) if parent not in found]
    return found
