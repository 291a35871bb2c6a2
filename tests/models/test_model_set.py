"""Several models in one engine: each computes as alone, in any company; strangers are refused with what differs."""

import pytest
import torch
from helpers import model_variants, tiny_models
from helpers.hypothesis_profile import many
from helpers.inspect_engine import inspect
from helpers.message_graphs import graphs
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from choreograph import SamplingParams
from choreograph.errors import ConfigError, ModelError

HEARD = SamplingParams(logprobs=0)
MODELS = ("base", "math", "twin")


def values(message):
    return [one.logprob for one in message.logprobs]


@settings(max_examples=many(25), deadline=None)
@given(graphs(max_nodes=6), st.data())
def test_in_any_company_models_compute_what_they_compute_alone(nodes, data):
    """Every node by a model of its own, sharing in a way of its own: all at once, in small steps, or one by one."""
    kinds = [
        (data.draw(st.sampled_from(MODELS)), data.draw(st.sampled_from(["recompute", "reuse", "partial"])))
        for _ in nodes
    ]
    result = []
    for step, at_once in ((1024, True), (3, True), (1024, False)):
        engine = model_variants.engine(step=step)
        for receiver in MODELS:
            for sender in set(MODELS) - {receiver}:
                engine.enable_layer_reuse(receiver, sender, pattern=[1, 2, 4])
        with engine.session() as session:
            said = []
            for node, (model, share) in zip(nodes, kinds, strict=True):
                parents = [said[p] for p in node.parents]
                place = {"parents": parents, "offsets": node.offsets, "new_offset": node.position}
                if node.generated is None:
                    said.append(session.prefill(node.tokens, **place, model=model, kv_reuse=share))
                else:
                    forced = {"forced_tokens": node.generated, "footer": node.footer, "sampling": HEARD}
                    said.append(session.decode(node.tokens, **place, **forced, model=model, kv_reuse=share))
                if not at_once:
                    said[-1].wait_encoded()
                    engine.check()
            engine.run_until_idle()
            engine.check()
            result.append([values(m) for m in said if m.kind == "decode"])
        engine.check()
    for other in result[1:]:
        assert [pytest.approx(one, abs=1e-4) for one in result[0]] == other


def test_no_model_waits_for_ever_while_another_talks():
    engine = model_variants.engine()
    with engine.session() as session:
        talk = session.decode([1], sampling=SamplingParams(max_tokens=60, ignore_eos=True, seed=1))
        others = [session.decode([2], model=model, sampling=SamplingParams(max_tokens=2)) for model in MODELS]
        for _ in range(12):
            engine.step()
        assert all(other.done for other in others) and not talk.done


def test_kv_of_one_model_is_never_read_by_another():
    engine = model_variants.engine()
    with engine.session() as session, engine.session(model="math") as other:
        session.prefill([1, 2, 3]).result()
        again = other.prefill([1, 2, 3])
        assert again.result() and again.usage.computed_tokens == 3
        assert other.prefill([1, 2, 3]).usage.cached_tokens == 3
    twin = model_variants.engine()
    with twin.session(model="twin") as session, twin.session() as other:
        session.prefill([1, 2, 3]).result()
        assert other.prefill([1, 2, 3]).usage.cached_tokens == 3, "the same weights under another name"


def test_a_model_that_changed_little_is_another_one():
    """A fingerprint samples the weights; equal weights are looked for where two are the same."""
    engine, near = model_variants.engine(), tiny_models.build(layers=model_variants.LAYERS)
    weight = near.model.layers[0].mlp.up_proj.weight
    with torch.no_grad():
        weight.view(-1)[1] += 1.0  # between two samples
    engine.add_model("near", near)
    family = inspect(engine).model_set
    assert family.fingerprint("near") != family.fingerprint("base") == family.fingerprint("twin")


def test_strangers_are_refused_with_what_differs():
    engine = model_variants.engine()
    for model, why in (
        (tiny_models.build(layers=4), "layers: 5 and 4"),
        (tiny_models.build(layers=5, positions=128), "positions: 256 and 128"),
        (tiny_models.build(layers=5, vocabulary=60), "vocabulary: 61 and 60"),
        (tiny_models.build(layers=5).bfloat16(), "type: torch.float32 and torch.bfloat16"),
        (_altered(rope_parameters={"rope_type": "default", "rope_theta": 5e5}), "rotary embedding"),
        (_altered(intermediate_size=40), r"down_proj.weight: \(32, 48\) and \(32, 40\)"),
    ):
        with pytest.raises(ModelError, match=why):
            engine.add_model("stranger", model)
    for name in ("base", "math", "", 3):
        with pytest.raises(ConfigError, match="new name"):
            engine.add_model(name, model_variants.finetuned())
    assert engine.models == MODELS


def _altered(**options):
    config = model_variants.base().config.to_dict() | options
    return LlamaForCausalLM(LlamaConfig(**config)).float().eval()


def test_a_model_can_be_taken_away_when_nobody_holds_what_it_made():
    engine = model_variants.engine()
    engine.enable_layer_reuse("math", pattern=[1, 2, 4])
    with engine.session() as session:
        text = session.prefill([1, 2, 3])
        session.decode([4], [text], model="math", kv_reuse="partial").result()
        with pytest.raises(ConfigError, match="in use"):
            engine.remove_model("math")
    engine.remove_model("math")
    assert engine.models == ("base", "twin") and not inspect(engine).layer_reuse_pairs
    with pytest.raises(ConfigError, match="model 'math'"):
        engine.remove_model("math")
    engine.add_model("math", model_variants.finetuned())
    engine.check()
