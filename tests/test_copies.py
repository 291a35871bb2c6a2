"""Copies of encodings: they come back as what they were made of, and as nothing else."""

import pytest
import relatives
import tiny
import torch

from choreograph import Engine, SamplingParams
from choreograph.engine import copies
from choreograph.engine.copies import Copy
from choreograph.errors import CallError, SessionClosed
from choreograph.kv.tiers import Work
from choreograph.models.facts import weights_checksum

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
TOKENS = [4, 5, 6, 7]


@pytest.fixture
def engine():
    return tiny.engine()


def said(session, tokens):
    return session.decode([9], [session.prefill(tokens)], sampling=GREEDY).generated


def test_a_copy_is_of_its_tokens_alone(engine):
    with tiny.engine().session() as session:
        expected = said(session, [8, 8, 8, 8])
    with engine.session() as session:
        copy = session.prefill(TOKENS).copy_out()
        for tokens, says in (([8, 8, 8, 8], "give the tokens"), ([4], "these 1 tokens"), ([*TOKENS, 7], "these 5")):
            with pytest.raises(CallError, match=says):
                session.restore(tokens, copy)
        for odd in (None, tuple(copy)):
            with pytest.raises(CallError, match=r"copy is of type .*copy_out"):
                session.restore(TOKENS, odd)
        cut = copy._replace(layers=copy.layers[:1])
        with pytest.raises(CallError, match="in 1 layers"):
            session.restore(TOKENS, cut)
        wide = copy._replace(layers=[(keys[:, :1], values[:, :1]) for keys, values in copy.layers])
        with pytest.raises(CallError, match="the copy has"):
            session.restore(TOKENS, wide)
        assert said(session, [8, 8, 8, 8]) == expected
        engine.check()


def test_a_copy_that_was_made_by_hand_is_refused_in_words(engine):
    with engine.session() as session:
        copy = session.prefill(TOKENS).copy_out()
        for field, values in {
            "start": (None, "0", 0.5, -1, 1 << 70, torch.zeros(1)),
            "layers": (None, 3, [None, None], [layer[:1] for layer in copy.layers], by_numpy(copy)),
            "maker": (None, 3),
            "name": (None, 3, b"x"),
            "checksum": ("7", 7.0),
        }.items():
            for value in values:
                with pytest.raises(CallError, match=rf"copy.{field} is .*copy_out"):
                    session.restore(TOKENS, copy._replace(**{field: value}))
        for dtype in (torch.float16, torch.bfloat16, torch.int64, torch.float64):
            odd = copy._replace(layers=[(keys, values.to(dtype)) for keys, values in copy.layers])
            with pytest.raises(CallError, match=rf"{dtype}.*the cache in torch.float32"):
                session.restore(TOKENS, odd)
        lists = copy._replace(layers=tuple(list(layer) for layer in copy.layers))
        assert session.restore(TOKENS, lists).usage.cached_tokens == 4
    assert engine.runner.store.counts["held_encodings"] == 0


def by_numpy(copy):
    return [(keys.numpy(), values.numpy()) for keys, values in copy.layers]


def flipped(copy, layer, part):
    """One bit of it is another."""
    layers = [tuple(tensor.clone() for tensor in pair) for pair in copy.layers]
    layers[layer][part].view(torch.uint8)[2, 1, -1] ^= 1
    return copy._replace(layers=layers)


def test_a_damaged_copy_is_found_out(engine):
    with tiny.engine().session() as session:
        copy = session.prefill(TOKENS).copy_out()
    layers = [tuple(tensor.permute(1, 0, 2).contiguous().permute(1, 0, 2) for tensor in pair) for pair in copy.layers]
    with engine.session() as session:
        for damaged in (flipped(copy, 0, 0), flipped(copy, 1, 1), copy._replace(start=3), copy._replace(checksum=7)):
            with pytest.raises(CallError, match="damaged"):
                session.restore(TOKENS, damaged)
        assert not engine.runner.store.counts["idle_encodings"]
        message = session.restore(TOKENS, copy._replace(layers=layers))
        assert message.usage.cached_tokens == 4 and message.copy_out().checksum == copy.checksum
    engine.check()


def test_a_copy_without_a_checksum_is_taken_where_somebody_vouches_for_it(engine):
    with tiny.engine().session() as session:
        copy = session.prefill(TOKENS).copy_out()
    old = Copy(*copy[:4])  # as it was written once
    with engine.session() as session:
        with pytest.raises(CallError, match=r"no checksum.*copy_out.*check=False"):
            session.restore(TOKENS, old)
        assert session.restore(TOKENS, old, check=False).usage.cached_tokens == 4
    engine.check()


def test_what_a_closed_engine_does_not_take_back_leaves_nothing_held(engine):
    with tiny.engine().session() as session:
        copy = session.prefill(TOKENS).copy_out()
    with engine.session() as session:
        coming, work, nothing = session._prefill_call([1, 2, 3])._call, Work(lambda layer: None), frozenset()
        encoding = copies.reserve(engine.runner, coming)
        engine.close()
        with pytest.raises(SessionClosed):
            session.restore(TOKENS, copy)
        with pytest.raises(SessionClosed):
            copies.receive(engine.runner, coming, encoding, 0, work, inputs=nothing, absent=nothing)
        engine.check()
        engine.clear_cache()
        counts = engine.runner.store.counts
        assert counts["held_encodings"] == counts["idle_encodings"] == 0 and counts["free_pages"] == counts["pages"]
        engine.check()


def test_a_copy_is_of_what_its_tokens_saw(engine):
    with engine.session() as session:
        seen, other = session.prefill([1, 2, 3]), session.prefill([3, 2, 1])
        copy = session.prefill(TOKENS, [seen]).copy_out()
        for parents, offsets in (((), None), ([other], None), ([seen], [1]), ([seen.part(0, 2)], [0])):
            with pytest.raises(CallError, match="give the tokens, parents and offsets"):
                session.restore(TOKENS, copy, parents, offsets, 3)
        assert session.restore(TOKENS, copy, [seen]).usage.cached_tokens == 4
        assert session.restore(TOKENS, copy, [seen], [10], 13).usage.cached_tokens == 4, "equal work elsewhere"


def test_a_copy_crosses_clients_and_engines(engine):
    with engine.session(client_id="one") as one:
        first = one.decode([1], sampling=GREEDY)
        second = one.prefill(TOKENS, [first, one.prefill([2, 2])])
        tokens, copies = first.tokens, (first.copy_out(), second.copy_out())
        expected = one.decode([9], [second], sampling=GREEDY).generated
    for other in (engine, tiny.engine()):
        rows = other.runner.rows
        with other.session(client_id="other") as session:
            first = session.restore(tokens, copies[0])
            second = session.restore(TOKENS, copies[1], [first, session.prefill([2, 2])])
            again = second.copy_out()
            assert again.name == copies[1].name and other.runner.rows == rows + 2
            assert all(torch.equal(a, b) for a, b in zip(again.layers[1], copies[1].layers[1], strict=True))
            assert session.decode([9], [second], sampling=GREEDY).generated == expected
        other.check()


def test_a_copy_behind_another_models_encoding_is_of_that():
    engine = relatives.engine()
    with engine.session(model="math") as session:
        seen = session.prefill([1, 2, 3], model="base")
        reused = session.prefill(TOKENS, [seen], share="reuse").copy_out()
        own = session.prefill(TOKENS, [seen]).copy_out()
        assert reused.name != own.name
        with pytest.raises(CallError, match="give the tokens, parents and offsets"):
            session.restore(TOKENS, reused, [seen])
        assert session.restore(TOKENS, own, [seen]).usage.cached_tokens == 4
        engine.check()


@pytest.fixture
def near():
    """The tiny model with one embedding changed, between the values that a fingerprint samples."""
    model = tiny.build()
    with torch.no_grad():
        model.get_input_embeddings().weight[TOKENS[0], 1] += 1.0
    return Engine.from_pretrained(model)


def test_a_copy_is_of_all_weights_of_its_model(engine, near):
    assert near.facts.fingerprint == engine.facts.fingerprint
    assert engine.runner.family.identity("base") == tiny.engine().runner.family.identity("base")
    with engine.session() as session, near.session() as other:
        copy = session.prefill(TOKENS).copy_out()
        with pytest.raises(CallError, match="another model"):
            other.restore(TOKENS, copy)


def test_weights_that_a_checkpoint_holds_as_buffers_count():
    """As quantised ones do."""
    model = tiny.build()
    model.register_buffer("packed", torch.zeros(1000, dtype=torch.int8))
    before = weights_checksum(model)
    model.packed[77] = 1
    assert weights_checksum(model) != before


def test_the_name_of_a_copy_knows_deep_chains(engine):
    with engine.session() as session:
        message = session.prefill([1])
        for _ in range(1100):
            message = session.prefill([2], [message], offsets=[0], new_offset=1)
        copy = message.copy_out()
        assert session.restore([2], copy, message.parents, [0], 1).usage.cached_tokens == 1
