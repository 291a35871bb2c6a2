"""Steps of fixed memory give what eager steps give. Recording is stood in for by doing the work again: the memory is
the same, only CUDA's part is missing."""

import copy

import pytest
import torch
from helpers import tiny_models
from helpers.graph_stub import boards, engine_with, run_again  # noqa: F401
from helpers.inspect_engine import inspect
from helpers.model_configs import CONFIGS
from transformers import AutoModelForCausalLM

from choreograph import Engine, SamplingParams
from choreograph.models.compilation import cuda_graph as fixed
from choreograph.models.compilation import cuda_graph as graphed

pytestmark = pytest.mark.usefixtures("boards")


def talk(engine: Engine, seed: int = 3) -> list[list[int]]:
    """Branches that share, moved messages, one long answer."""
    with engine.session(seed=seed) as session:
        root = session.prefill(list(range(20)))
        branches = [session.decode([30 + i], [root], sampling=SamplingParams(max_tokens=3 + i)) for i in range(3)]
        parents = [branches[2], root, branches[0]]
        moved = {"offsets": [40, 0, 70], "new_offset": 90} if engine.model_info.supports_shift else {}
        last = session.decode([9], parents, sampling=SamplingParams(temperature=0, max_tokens=7), **moved)
        engine.run_until_idle()
        engine.check()
        return [message.tokens for message in (*branches, last)]


def test_recorded_steps_equal_eager_ones():
    plain, recorded = (engine_with(tiny_models.model(), use_graphs=one) for one in (False, True))
    assert talk(recorded) == talk(plain)
    sizes = {size for _, size, _ in inspect(recorded).compiled._graphs}
    assert len(sizes) > 1, "works of one size only"


@pytest.mark.parametrize("name", ["qwen2", "qwen2, window", "gemma2", "gemma3_text", "gpt_oss", "phi"])
def test_families_through_fixed_memory(name):
    """Several kinds of layers, windows, caps, sinks: each kind has a board of its own."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]).eval()
    assert talk(engine_with(model, use_graphs=True)) == talk(engine_with(model, use_graphs=False))


@pytest.mark.slow
def test_the_compilers_graph_is_what_is_recorded():
    """One trace for all numbers of rows: it is made of two, and serves three to eight as well."""
    plain = engine_with(tiny_models.model(), use_graphs=False)
    recorded = engine_with(tiny_models.model(), use_graphs=True, through_compiler=True, sizes=(1, 2, 4, 8))
    assert inspect(recorded).compiled.sizes == (2, 4, 8)  # a trace of one row would serve no others
    assert talk(recorded) == talk(plain)
    assert inspect(recorded).compiled.capture_error is None


def test_engines_over_one_model_share_its_trace_and_those_over_a_copy_do_not():
    model = tiny_models.model()
    twin = copy.deepcopy(model)
    twin.model.norm.weight = torch.nn.Parameter(-model.model.norm.weight)
    engines = [engine_with(one, use_graphs=True, through_compiler=True) for one in (model, model, twin)]
    for engine, one in zip(engines, (model, model, twin), strict=True):
        assert talk(engine) == talk(engine_with(one, use_graphs=False))
    first, second, other = (inspect(engine).compiled._compiled[False] for engine in engines)
    assert first is second is not other


def test_graphs_are_recorded_again_when_the_arena_has_moved():
    """A pair of models that share widens the arena: its tensors lie elsewhere then."""
    engine = engine_with(tiny_models.model(), use_graphs=True)
    first = talk(engine)
    engine.add_model("twin", tiny_models.build(seed=2))
    engine.enable_layer_reuse("twin", pattern=[0, 1, 2])
    engine.clear_cache()
    assert talk(engine) == first
    with engine.session(seed=1) as session:
        root = session.prefill(list(range(12)))
        said = [
            session.decode([5], [root], model="twin", kv_reuse=share, sampling=SamplingParams(max_tokens=5)).tokens
            for share in ("reuse", "partial", "recompute")
        ]
    assert all(len(one) == 6 for one in said)
    engine.check()


def test_a_step_that_cannot_be_captured_runs_eagerly_with_a_warning():
    def broken(work):
        raise RuntimeError("operation not permitted when stream is capturing")

    engine = engine_with(tiny_models.model(), use_graphs=False)
    adapter = inspect(engine).hf_model
    adapter.compiled = graphed.CudaGraphForward(adapter, (2, 4, 8), capturer=broken, use_compiler=False)
    with pytest.warns(UserWarning, match="not permitted when stream is capturing"):
        said = talk(engine)
    adapter.compiled = None
    assert said == talk(engine_with(tiny_models.model(), use_graphs=False))


def test_a_step_of_too_much_work_runs_eagerly(monkeypatch):
    monkeypatch.setattr(fixed, "NUM_SIZE_BUCKETS", 1)
    recorded = engine_with(tiny_models.model(), use_graphs=True)
    assert talk(recorded) == talk(engine_with(tiny_models.model(), use_graphs=False))
    assert {size for _, size, _ in inspect(recorded).compiled._graphs} <= {0}
