"""Attention to reused messages is corrected by two numbers; nothing is computed."""

import math

import pytest
import torch
from helpers import tiny_models
from helpers.hypothesis_profile import many
from helpers.inspect_engine import inspect
from helpers.message_graphs import graphs
from hypothesis import given, settings
from hypothesis import strategies as st
from test_repair import build, distributions

from choreograph import Budget, Repair
from choreograph.attention.metadata import Alignment
from choreograph.errors import ConfigError, DataError
from choreograph.features.repair import align
from choreograph.features.repair.align import Calibration, find_alignment, save_calibration

ALIGNMENT = Alignment(0.8, 0.5)
ALIGNED = Repair(0, "align", ALIGNMENT)
DOCUMENTS = [list(range(5, 20)), list(range(3, 12)), list(range(9, 30))]


@pytest.fixture(autouse=True)
def own_calibrations(monkeypatch, tmp_path):
    monkeypatch.setattr(align, "calibrations_file", lambda: tmp_path / "models" / "alignments.json")
    return tmp_path


def answer(repair, backend="native", chained=False, **options):
    """Distributions of a call over documents behind one system turn, in an engine of its own."""
    engine = tiny_models.engine(backend=backend)
    with engine.session() as session:
        context = [session.prefill([1, 2, 3, 4])]
        for tokens in DOCUMENTS:
            context.append(session.prefill(tokens, context if chained else context[:1]))
        result, message = distributions(session, [7, 8], context, repair=repair, **options)
        engine.check()
        return result, message


def test_ones_give_reuse_bit_for_bit():
    assert torch.equal(answer(Repair(0, "align", Alignment(1, 1)))[0], answer(None)[0])


def test_parents_that_saw_what_precedes_them_are_attended_to_as_ever():
    assert torch.equal(answer(ALIGNED, chained=True)[0], answer(None, chained=True)[0])


def test_nothing_is_computed_and_something_changes():
    aligned, message = answer(ALIGNED)
    assert message.usage.repaired_tokens == 0
    assert message.usage.computed_tokens == answer(None)[1].usage.computed_tokens
    assert (aligned - answer(None)[0]).abs().max() > 1e-2


def test_a_tiny_scale_is_attention_without_the_reused_messages():
    """The first document follows the system turn as in prefix mode; the others fade."""
    faded, _ = answer(Repair(0, "align", Alignment(1, 1e-12)))
    engine = tiny_models.engine()
    with engine.session() as session:
        system = session.prefill([1, 2, 3, 4])
        first = session.prefill(DOCUMENTS[0], [system])
        end = 4 + sum(map(len, DOCUMENTS))
        alone, _ = distributions(session, [7, 8], [system, first], new_offset=end)
    torch.testing.assert_close(faded, alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("backend", ["native", "sdpa", pytest.param("triton", marks=pytest.mark.slow)])
@settings(max_examples=many(5), deadline=None)
@given(nodes=graphs(), data=st.data())
def test_every_backend_gives_what_the_reference_gives(backend, nodes, data):
    order = data.draw(st.permutations(range(len(nodes))))[: data.draw(st.integers(1, 4))]
    share = data.draw(st.sampled_from([0, 0.3]))
    repair = Repair(share, "first" if share else "align", ALIGNMENT)
    results = []
    for name in (backend, "reference"):
        engine = tiny_models.engine(backend=name)
        with engine.session() as session:
            messages = build(session, nodes)
            results.append(distributions(session, [7, 8], [messages[i] for i in order], repair=repair)[0])
            engine.check()
    torch.testing.assert_close(*results, atol=5e-4, rtol=5e-4)


def test_a_full_repair_leaves_nothing_to_align():
    torch.testing.assert_close(answer(Repair(1, "first", ALIGNMENT))[0], answer(Repair(1))[0], atol=1e-5, rtol=1e-5)


def test_offsets_of_the_call_stay():
    result, message = answer(ALIGNED, offsets=[0, 4, 4, 4], new_offset=25)
    assert message.offsets == (0, 4, 4, 4) and result.isfinite().all()
    assert (result - answer(ALIGNED)[0]).abs().max() > 1e-3


def test_prefills_share_their_cache_with_equal_alignments_only():
    engine = tiny_models.engine()
    with engine.session() as session:
        parents = [session.prefill(tokens) for tokens in DOCUMENTS]
        plain, *aligned = (session.prefill([7, 8, 9], parents, repair=repair) for repair in (None, ALIGNED, ALIGNED))
        for message in (plain, *aligned):
            message.wait_encoded()
        assert [message.usage.computed_tokens for message in (plain, *aligned)] == [3, 3, 0]
        engine.check()


def test_an_evicted_message_is_computed_again_as_it_was():
    engine = tiny_models.engine()
    with engine.session() as session:
        parents = [session.prefill(tokens) for tokens in DOCUMENTS]
        reader = session.prefill([7, 8, 9], parents, repair=ALIGNED)
        before, _ = distributions(session, [5], [reader])
        engine.run_until_idle()
        cache_manager = inspect(engine).cache_manager
        for entry in cache_manager.evictable(partial=False):
            cache_manager.evict_entry(entry)
        assert reader.kv_location == "dropped"
        after, _ = distributions(session, [5], [reader])
    torch.testing.assert_close(before, after, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("value", [(0, 1), (1, -1), (math.nan, 1), (1, math.inf), (True, 1), (1,), "yes", 0.8])
def test_alignments_are_two_numbers_above_zero(value):
    with pytest.raises(ConfigError, match="two numbers above 0"):
        Repair(0, "align", value)


def test_align_has_no_share():
    with pytest.raises(ConfigError, match="computes nothing: use 0"):
        Repair(0.2, "align")
    with pytest.raises(ConfigError, match="computes nothing: use 0"):
        Budget(0.1, strategy="align")


def test_a_model_without_calibration_says_how_to_get_one():
    engine = tiny_models.engine()
    with engine.session() as session:
        parent = session.prefill([1, 2, 3])
        with pytest.raises(ConfigError, match="choreograph calibrate"):
            session.decode([5], [parent], repair=Repair(0, "align"))
        with pytest.raises(ConfigError, match="choreograph calibrate"):
            session.decode([5], [parent], repair=Repair(0.2, "first", "calibrated"))
        engine.check()


def test_calibrated_numbers_are_used():
    engine = tiny_models.engine()
    hf_model = engine.core.hf_model
    save_calibration("another model", Calibration("other", Alignment(0.5, 0.5), 0.1, 0.2))
    save_calibration(hf_model.sampled_weights_hash, Calibration("tiny", ALIGNMENT, 0.1, 0.2))
    assert find_alignment(hf_model.sampled_weights_hash, "tiny") == ALIGNMENT
    assert find_alignment("another model", "other") == (0.5, 0.5)
    assert torch.equal(answer(Repair(0, "align"))[0], answer(ALIGNED)[0])


@pytest.mark.parametrize("text", ["[]", "{", '{"tiny": {"temperature": 0, "scale": 1}}', '{"tiny": 3}'])
def test_a_damaged_file_is_named(own_calibrations, text):
    (own_calibrations / "models").mkdir()
    (own_calibrations / "models" / "alignments.json").write_text(text)
    with pytest.raises(DataError, match=r"alignments\.json"):
        find_alignment("tiny", "tiny")
