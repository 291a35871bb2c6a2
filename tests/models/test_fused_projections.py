"""Projections that read alike as one product: the same numbers, the same model, less to start."""

import copy
import gc
import sys

import pytest
import torch
from helpers import tiny_models
from helpers.graph_stub import boards, engine_with  # noqa: F401
from helpers.hypothesis_profile import only_thorough
from helpers.model_configs import CONFIGS
from test_cuda_graph import talk
from torch import nn
from torch._inductor.utils import run_and_get_code
from torch.nn.utils.prune import l1_unstructured
from transformers import AutoModelForCausalLM

from choreograph.models.compilation import model_graph
from choreograph.models.compilation.model_graph import cacheable_pass, deduplicate
from choreograph.models.kernels import few_row_linear
from choreograph.models.kernels.fused_projections import fuse, fused_for_tracing


def random_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[name]).eval()


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "mixtral", "phi3", "gpt2"])
def test_a_model_stays_what_it_is(name):
    """Biases too; experts and projections that are one already have nothing to join."""
    model = random_model(name)
    before, ids = copy.deepcopy(model), torch.arange(9)[None]
    groups = fuse(model)
    parts = [part for group in groups for part in group]
    assert bool(parts) == (name not in ("phi3", "gpt2"))
    assert [(n, p.shape) for n, p in model.named_parameters()] == [(n, p.shape) for n, p in before.named_parameters()]
    assert model.state_dict().keys() == before.state_dict().keys()
    assert torch.equal(model(ids).logits, before(ids).logits)
    with fused_for_tracing(groups):
        assert all("forward" in vars(part) for part in parts)
        torch.testing.assert_close(model(ids).logits, before(ids).logits)
    assert not any("forward" in vars(part) for part in parts)


def test_what_changes_in_place_changes_the_joint_product():
    model = random_model("llama")
    (group, *_), (again, *_) = fuse(model), fuse(model)  # the second time nothing moves
    weight = again[0].fused_weight.weight
    assert weight.data_ptr() == group[0].weight.data_ptr() and len(weight) == sum(len(one.weight) for one in group)
    with torch.no_grad():
        group[1].weight.mul_(2)
    assert torch.equal(weight, torch.cat([one.weight for one in group]))


@pytest.mark.parametrize("change", ["parameter", "data", "type", "bound"])
def test_weights_that_come_later_are_joined_when_it_matters(change):
    model, ids = random_model("llama"), torch.arange(9)[None]
    groups = fuse(model)
    projection = groups[0][1]
    if change == "parameter":
        projection.weight = nn.Parameter(2 * projection.weight.detach())
    elif change == "data":
        projection.weight.data = 2 * projection.weight.data
    elif change == "type":
        model.half().float()
    else:
        model.load_state_dict({n: 2 * p for n, p in model.state_dict().items()}, assign=True)
    expected = model(ids).logits
    with fused_for_tracing(groups):
        torch.testing.assert_close(model(ids).logits, expected)


def test_a_projection_that_became_something_else_is_left_alone():
    model, ids = random_model("llama"), torch.arange(9)[None]
    groups = fuse(model)
    l1_unstructured(groups[0][0], "weight", 0.5)
    expected = model(ids).logits
    with fused_for_tracing(groups):
        assert "forward" not in vars(groups[0][0])
        torch.testing.assert_close(model(ids).logits, expected)
    assert "fused_weight" not in groups[0][0].__dict__  # what was compiled of it fails, and steps run eagerly


def test_weights_that_others_use_stay_where_they_are():
    model = random_model("llama")
    first, second = (layer.self_attn for layer in model.model.layers)
    second.k_proj.weight = first.k_proj.weight
    second.v_proj.weight = nn.Parameter(first.v_proj.weight.data)  # of the same memory
    assert len(fuse(model)) == 2  # gate and up of both layers
    assert second.k_proj.weight is first.k_proj.weight
    assert second.v_proj.weight.data_ptr() == first.v_proj.weight.data_ptr()


def test_a_copy_has_weights_of_its_own_once():
    model = random_model("llama")
    groups = fuse(model)
    twin = copy.deepcopy(model)
    assert twin.model.layers[0].self_attn.q_proj.fused_weight is None
    (group, *_) = fuse(twin)
    assert group[0].fused_weight.weight.data_ptr() == group[0].weight.data_ptr() != groups[0][0].weight.data_ptr()


def test_models_of_inference_alone_are_not_touched():
    with torch.inference_mode():
        model = random_model("llama")
    assert fuse(model) == []
    trained = random_model("llama")
    with torch.inference_mode():
        assert fuse(trained)
    trained(torch.arange(9)[None]).logits.sum().backward()


def test_memory_that_runs_out_leaves_the_rest_apart(monkeypatch):
    cat, calls = torch.cat, []

    def short(*args, **kwargs):
        calls.append(args)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("no room")
        return cat(*args, **kwargs)

    monkeypatch.setattr(torch, "cat", short)
    model = random_model("llama")
    assert len(fuse(model)) == 2


@pytest.mark.usefixtures("boards")
def test_the_joint_products_go_with_the_last_engine():
    model = tiny_models.model()
    engines = [engine_with(model, use_graphs=True, through_compiler=True) for _ in range(2)]
    projection = model.model.layers[0].self_attn.q_proj
    for _ in range(2):
        assert projection.__dict__["fused_weight"].weight.data_ptr() == projection.weight.data_ptr()
        engines.pop()
        gc.collect()
    assert "fused_weight" not in projection.__dict__


@pytest.mark.usefixtures("boards")
@pytest.mark.parametrize(
    ("name", "is_cached"),
    [
        ("llama", True),
        pytest.param("qwen2", True, marks=only_thorough),
        pytest.param("llama", False, marks=only_thorough),
    ],
)
@pytest.mark.slow
def test_a_compiler_makes_one_product_of_them(name, is_cached, monkeypatch):
    """Also without inductor's private class, where the pass is a plain function and graphs are not cached on disk."""
    if not is_cached:
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "torch._inductor.custom_graph_pass", None)
            assert cacheable_pass(deduplicate) is deduplicate
        monkeypatch.setattr(model_graph, "cacheable_pass", lambda change: change)
    model = tiny_models.model() if name == "llama" else random_model(name)
    expected = talk(engine_with(model, use_graphs=False))
    engine = engine_with(model, use_graphs=True, through_compiler=True)
    got, [code, *_] = run_and_get_code(lambda: talk(engine))
    assert got == expected
    layers = engine.model_info.layers
    assert code.count("extern_kernels.mm(") + code.count("extern_kernels.addmm(") == 4 * layers + 1


def test_inductor_caches_a_graph_by_the_pass_that_changed_it():
    assert cacheable_pass(deduplicate).uuid() == cacheable_pass(deduplicate).uuid()
    assert cacheable_pass(deduplicate).uuid() != cacheable_pass(few_row_linear.fuse_operators).uuid()
