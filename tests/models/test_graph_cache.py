"""Graphs that an earlier engine compiled are loaded, compute the same, and are compiled again where they may not fit."""

import pytest
import torch
from helpers import tiny_models
from test_packed_linear import needs_kernel, tokens_of

from choreograph import CacheConfig, Engine, EngineConfig, SamplingParams
from choreograph.models import graph_cache, torch_compile
from choreograph.models.graph_cache import GraphCache, LoadedGraph

CACHE = CacheConfig(capacity=1024)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(graph_cache, "user_cache_path", lambda name: tmp_path)
    return tmp_path / "graphs"


def compiled_engine(seed: int = 0, sizes: tuple[int, ...] | None = (4,)) -> Engine:
    config = EngineConfig(cache=CACHE, compile=True, compile_sizes=sizes)
    return Engine.from_pretrained(tiny_models.build(seed=seed).bfloat16(), config=config)


def graphs_of(engine: Engine) -> dict:
    return engine.core.hf_model.compiled._graphs


def talk(engine: Engine) -> list[list[int]]:
    """Run steps of many, few and single tokens, with several sizes of each."""
    greedy = SamplingParams(temperature=0, max_tokens=3)
    with engine.session(seed=0) as session:
        roots = [session.prefill(list(range(count))) for count in (40, 50)]
        branches = [session.decode([30 + i], roots, sampling=greedy) for i in range(2)]
        branches += [session.decode([40 + i], branches, sampling=greedy) for i in range(3)]
        tokens = [message.tokens for message in branches]
        return [*tokens, session.decode([5], [roots[0]], sampling=greedy).tokens]


@needs_kernel
def test_a_second_engine_loads_the_graphs_of_every_size_and_traces_nothing(monkeypatch):
    monkeypatch.setattr(torch_compile, "cpu_flags", lambda: "avx512_bf16")  # all graphs use packed weights
    first = compiled_engine(sizes=None)
    tokens = talk(first)
    monkeypatch.setattr(torch_compile, "compile_model", lambda *_, **__: pytest.fail("a graph is traced"))
    second = compiled_engine(sizes=None)
    assert talk(second) == tokens
    assert set(graphs_of(second)) == set(graphs_of(first)) == {1, "few", None}
    assert all(isinstance(graph, LoadedGraph) for graph in graphs_of(second).values())


@needs_kernel
def test_a_loaded_graph_uses_the_weights_of_its_model(monkeypatch, tmp_path):
    tokens = [tokens_of(compiled_engine(seed)) for seed in (0, 1)]  # the second one loads the graph of the first one
    monkeypatch.setattr(graph_cache, "user_cache_path", lambda name: tmp_path / "other")
    traced = compiled_engine(1)
    assert tokens_of(traced) == tokens[1] != tokens[0]
    assert not isinstance(graphs_of(traced)[4], LoadedGraph)


@needs_kernel
def test_a_damaged_graph_is_compiled_and_stored_again(folder, caplog):
    tokens = tokens_of(compiled_engine())
    ((graph,), (note,)) = folder.glob("*.graph"), folder.glob("*.json")
    cache = GraphCache(compiled_engine().core.hf_model.model)
    assert isinstance(cache.load("forward_4"), LoadedGraph)
    content = note.read_bytes()
    note.write_bytes(content[:-1])
    assert cache.load("forward_4") is None
    note.write_bytes(content)
    graph.write_bytes(graph.read_bytes()[:-1])
    engine = compiled_engine()
    with caplog.at_level("WARNING", "choreograph"):
        assert tokens_of(engine) == tokens
    assert not isinstance(graphs_of(engine)[4], LoadedGraph)
    assert f"{graph} cannot be loaded and is compiled again: its hash is another" in caplog.text
    assert isinstance(cache.load("forward_4"), LoadedGraph)


@needs_kernel
def test_what_cannot_be_stored_is_compiled_as_before(monkeypatch, folder, caplog):
    def fail(*_, **__):
        raise RuntimeError("no artifact")

    monkeypatch.setattr("torch._inductor.standalone_compile", fail)
    with caplog.at_level("WARNING", "choreograph"):
        assert len(tokens_of(compiled_engine())) == 9
    assert "is not stored: no artifact" in caplog.text
    assert not folder.exists()


CHANGES = {
    "an attribute": lambda model: setattr(model.model.layers[0].self_attn, "scaling", 0.5),
    "the configuration": lambda model: setattr(model.config, "rms_norm_eps", 0.5),
    "a dtype": lambda model: model.float(),
    "a shape": lambda model: model.lm_head.register_parameter("bias", torch.nn.Parameter(torch.zeros(97))),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_another_model_has_another_graph(change):
    model = tiny_models.build().bfloat16()
    cache = GraphCache(model)
    path = cache._path("forward")
    assert path == GraphCache(tiny_models.build(seed=1).bfloat16())._path("forward") is not None
    change(model)
    assert cache._path("forward") not in (path, None)


def test_other_threads_and_compiler_options_have_another_graph(monkeypatch):
    cache = GraphCache(tiny_models.build())
    paths = {cache._path("forward"), cache._path("other")}
    with torch._inductor.config.patch(max_autotune=True):
        paths.add(cache._path("forward"))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    paths.add(cache._path("forward"))
    assert len(paths) == 4


class _Subclass(torch.nn.Linear):
    pass


FOREIGN = {
    "a class": lambda model: setattr(model, "lm_head", _Subclass(32, 97)),
    "a method": lambda model: setattr(model.lm_head, "forward", lambda x: x),
    "a hook": lambda model: model.lm_head.register_forward_hook(lambda *_: None),
}


@pytest.mark.parametrize("change", FOREIGN.values(), ids=FOREIGN)
def test_graphs_of_models_with_code_of_others_are_not_stored(change):
    model = tiny_models.build()
    change(model)
    assert GraphCache(model)._path("forward") is None


def test_a_patched_class_of_transformers_counts_as_code_of_others(monkeypatch):
    model = tiny_models.build()
    monkeypatch.setattr(type(model.model.norm), "forward", lambda self, x: x)
    assert GraphCache(model)._path("forward") is None
