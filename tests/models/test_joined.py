"""Projections that read alike as one product: the same numbers, the same model, less to start."""

import copy

import pytest
import tiny
import torch
from families import CONFIGS
from recorded import boards, engine_with  # noqa: F401
from test_graphed import talk
from torch import nn
from torch._inductor.utils import run_and_get_code
from transformers import AutoModelForCausalLM

from choreograph.models.joined import Part, as_one, join


def random_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[name]).eval()


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "mixtral", "phi3", "gpt2"])
def test_a_model_stays_what_it_is(name):
    """Biases too; experts and projections that are one already have nothing to join."""
    model = random_model(name)
    before, ids = copy.deepcopy(model), torch.arange(9)[None]
    parts = join(model)
    assert bool(parts) == (name not in ("phi3", "gpt2"))
    assert [(n, p.shape) for n, p in model.named_parameters()] == [(n, p.shape) for n, p in before.named_parameters()]
    assert model.state_dict().keys() == before.state_dict().keys()
    assert torch.equal(model(ids).logits, before(ids).logits)
    with as_one(parts):
        assert all(type(part) is Part for part in parts)
        torch.testing.assert_close(model(ids).logits, before(ids).logits)
    assert all(type(part) is nn.Linear for part in parts)


def test_what_changes_in_place_changes_the_joint_product():
    model = random_model("llama")
    parts = join(model)
    first = join(model)[0].joint[0]  # again: nothing moves
    assert first.data_ptr() == parts[0].weight.data_ptr() and len(first) == sum(len(p.weight) for p in parts[:3])
    with torch.no_grad():
        parts[1].weight.mul_(2)
    ids = torch.arange(9)[None]
    wanted = model(ids).logits
    with as_one(parts):
        torch.testing.assert_close(model(ids).logits, wanted)


def test_weights_that_several_share_stay_apart():
    model = random_model("llama")
    model.model.layers[1].self_attn.k_proj.weight = model.model.layers[0].self_attn.k_proj.weight
    parts = join(model)
    assert len(parts) == 4  # gate and up of both layers
    assert model.model.layers[1].self_attn.k_proj.weight is model.model.layers[0].self_attn.k_proj.weight


@pytest.mark.usefixtures("boards")
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_a_compiler_makes_one_product_of_them(name):
    model = tiny.model() if name == "llama" else random_model(name)
    wanted = talk(engine_with(model, recorded=False))
    engine = engine_with(model, recorded=True, compiler=True)
    got, [code, *_] = run_and_get_code(lambda: talk(engine))
    assert got == wanted
    layers = engine.facts.layers
    assert code.count("extern_kernels.mm(") + code.count("extern_kernels.addmm(") == 4 * layers + 1
