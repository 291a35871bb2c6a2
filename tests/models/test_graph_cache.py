"""Graphs that an earlier process compiled are loaded, compute the same, and are compiled again where they may not fit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import stored_graphs, tiny_models
from helpers.inspect_engine import inspect
from test_packed_linear import needs_kernel

from choreograph import CacheConfig, Engine, EngineConfig, SamplingParams
from choreograph.attention.cpp_backend import LIMIT_VARIABLES
from choreograph.models.compilation import graph_cache, graph_passes, torch_compile
from choreograph.models.compilation.graph_cache import GraphFile, LoadedGraph, graph_file
from choreograph.models.compilation.graph_passes import deduplication_pass
from choreograph.models.compilation.torch_compile import compile_cache
from choreograph.models.hf_model import HFModel


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(graph_cache, "user_cache_path", lambda name: tmp_path)
    return tmp_path / "graphs"


def bfloat16_engine(seed: int) -> Engine:
    config = EngineConfig(cache=CacheConfig(capacity=1024), compile=True, compile_sizes=(4,))
    return Engine.from_pretrained(tiny_models.build(seed=seed).bfloat16(), config=config)


def graphs_of(engine: Engine) -> dict:
    return inspect(engine).compiled._graphs


@pytest.mark.slow
@needs_kernel
def test_a_new_process_loads_graphs_of_every_size_and_computes_the_same(folder):
    """Dynamic rows stay dynamic, and projections with one input are one product."""
    first = stored_graphs.engine()
    answers = stored_graphs.run(first)["answers"]
    assert set(graphs_of(first)) == {1, "few", None}
    assert all(isinstance(graph, LoadedGraph) for graph in graphs_of(first).values())
    expected = {"answers": answers, "products": stored_graphs.NUM_GROUPS}
    assert stored_graphs.run(first) == expected
    command = [sys.executable, stored_graphs.__file__, str(folder.parent)]
    paths = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    process = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout.splitlines()[-1]) == expected


def logprobs_of(engine: Engine) -> list[float]:
    with engine.session() as session:
        message = session.decode([0, 1, 2], sampling=SamplingParams(temperature=0, max_tokens=6, logprobs=0))
        return [part.logprob for part in message.logprobs]


@needs_kernel
def test_a_loaded_graph_equals_a_traced_one_and_a_damaged_one_is_traced_again(folder, caplog):
    traced = bfloat16_engine(seed=1)
    inspect(traced).compiled._stores_graphs = False
    expected = logprobs_of(traced)
    assert not isinstance(graphs_of(traced)[4], LoadedGraph)
    assert logprobs_of(bfloat16_engine(seed=0)) != expected
    (note,), (artifact,) = folder.glob("*.json"), folder.glob("*.graph")
    engine = bfloat16_engine(seed=1)  # loads the graph of the other weights
    file = GraphFile(note, inspect(engine).model)
    assert isinstance(file.load(), LoadedGraph)
    assert logprobs_of(engine) == expected
    assert len(list(folder.iterdir())) == 2
    content = note.read_bytes()
    note.write_bytes(content[:-1])
    assert file.load() is None
    note.write_bytes(content)
    artifact.write_bytes(artifact.read_bytes()[:-1])
    with caplog.at_level("WARNING", "choreograph"):
        assert logprobs_of(bfloat16_engine(seed=1)) == expected
    assert f"{note} cannot be loaded, the graph is traced: {artifact.name} has another hash" in caplog.text
    assert isinstance(file.load(), LoadedGraph)  # it was stored again


@pytest.mark.slow
@needs_kernel
def test_graphs_of_two_models_with_different_numbers_are_stored():
    """Dynamo would take a number that differs from an earlier model's as an input, which a stored graph does not have."""
    for epsilon in (0.1, 0.01):
        model = tiny_models.build().bfloat16()
        model.model.norm.variance_epsilon = epsilon
        config = EngineConfig(cache=CacheConfig(capacity=1024), compile=True, compile_sizes=(4,))
        engine = Engine.from_pretrained(model, config=config)
        logprobs_of(engine)
        assert isinstance(graphs_of(engine)[4], LoadedGraph)


def break_artifact(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("no artifact")

    monkeypatch.setattr("torch._inductor.standalone_compile", fail)
    return "no artifact"


def specialize(monkeypatch):
    """Compile for real tensors, of which inductor does not know what is dynamic."""
    compile, compile_artifact, arguments = GraphFile.compile, torch._inductor.standalone_compile, []

    def keep_arguments(self, graph, inputs, **options):
        arguments[:] = inputs
        return compile(self, graph, inputs, **options)

    def compile_for_arguments(graph, examples, **options):
        return compile_artifact(graph, list(arguments), **options | {"dynamic_shapes": "from_tracing_context"})

    monkeypatch.setattr(GraphFile, "compile", keep_arguments)
    monkeypatch.setattr("torch._inductor.standalone_compile", compile_for_arguments)
    return "expected size"  # of two or of three tokens, whichever is traced first


@needs_kernel
@pytest.mark.slow
@pytest.mark.parametrize("change", [break_artifact, specialize])
def test_what_cannot_be_stored_or_has_fixed_rows_is_compiled_as_before(change, monkeypatch, folder, caplog):
    reason = change(monkeypatch)
    engine = stored_graphs.engine()
    with caplog.at_level("WARNING", "choreograph"), engine.session(seed=0) as session:
        root = session.prefill([5, 6]).wait_encoded()
        session.prefill(list(range(3)), [root]).result()
    assert "compiled graphs are not stored" in caplog.text and reason in caplog.text
    assert set(graphs_of(engine)) == {"few"} and not isinstance(graphs_of(engine)["few"], LoadedGraph)
    assert engine.stats().num_steps == 2
    assert list(folder.iterdir()) == []


@pytest.mark.slow
@needs_kernel
@pytest.mark.parametrize("num_inexact", [2, 3])
def test_a_few_tokens_that_are_inexact_without_compilation_do_not_matter(num_inexact, monkeypatch, folder, caplog):
    logits, checked = HFModel.logits, []

    def inexact(self, tokens, positions, forward_context, rows, **options):
        result = logits(self, tokens, positions, forward_context, rows, **options)
        if not isinstance(forward_context, torch_compile._TokenMixer):
            return result
        checked.append(tokens)
        return result + 100 * (len(checked) <= num_inexact)

    monkeypatch.setattr(HFModel, "logits", inexact)
    with caplog.at_level("WARNING", "choreograph"):
        engine = bfloat16_engine(seed=1)
        logprobs_of(engine)
    assert len({tuple(tokens) for tokens in checked}) == 3
    assert isinstance(graphs_of(engine)[4], LoadedGraph) == (num_inexact < 3)
    assert ("compiled graphs are not stored: with 4 tokens it differs" in caplog.text) == (num_inexact == 3)


CHANGES = {
    "an attribute": lambda model: setattr(model.model.layers[0].self_attn, "scaling", 0.5),
    "the configuration": lambda model: setattr(model.config, "rms_norm_eps", 0.5),
    "a dtype": lambda model: model.float(),
    "a shape": lambda model: model.lm_head.register_parameter("bias", torch.nn.Parameter(torch.zeros(97))),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_another_model_has_another_graph(change):
    model = tiny_models.build().bfloat16()
    path = graph_file(model, "forward")._path
    assert path == graph_file(tiny_models.build(seed=2).bfloat16(), "forward")._path
    change(model)
    assert graph_file(model, "forward")._path != path


def test_other_threads_and_compiler_options_have_another_graph(monkeypatch):
    model = tiny_models.build()
    paths = {graph_file(model, name)._path for name in ("forward", "other")}
    with torch._inductor.config.patch(max_autotune=True):
        paths.add(graph_file(model, "forward")._path)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    paths.add(graph_file(model, "forward")._path)
    assert len(paths) == 4


def test_other_limits_of_instructions_have_another_graph(monkeypatch):
    model, paths = tiny_models.build(), set()
    for name in LIMIT_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name in (None, *LIMIT_VARIABLES):
        with monkeypatch.context() as patch:
            if name is not None:
                patch.setenv(name, "avx2")
            paths.add(graph_file(model, "forward")._path)
    assert len(paths) == 1 + len(LIMIT_VARIABLES)


@pytest.mark.slow
def test_inductor_does_not_load_code_for_other_instructions(monkeypatch, tmp_path):
    """It finds a graph whose loops have the vectors of AVX-512, and compiles them with those of AVX2."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    x = torch.arange(2048.0).view(4, 512) / 2048
    for capability in ("avx512", "avx2"):
        monkeypatch.setenv("ATEN_CPU_CAPABILITY", capability)
        torch._dynamo.reset()
        with compile_cache():
            result = torch.compile(lambda x: (x.exp() * x).sum(-1))(x)
        torch.testing.assert_close(result, (x.exp() * x).sum(-1))


@needs_kernel
@pytest.mark.parametrize("packs", [False, True])
def test_graphs_are_traced_with_that_cache(monkeypatch, packs):
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    with inspect(bfloat16_engine(seed=1)).compiled._tracing(packs):
        assert "ATEN_CPU_CAPABILITY=avx2" in torch.compiler.config.cache_key_tag
    assert torch.compiler.config.cache_key_tag == ""


def test_inductor_caches_a_graph_by_all_that_the_pass_depends_on(monkeypatch):
    keys = {deduplication_pass().uuid(), deduplication_pass(graph_name="few").uuid()}
    monkeypatch.setattr(
        graph_passes, "MERGEABLE_OPERATORS", graph_passes.MERGEABLE_OPERATORS - {torch.ops.aten.mm.default}
    )
    assert len(keys | {deduplication_pass().uuid()}) == 3


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
    assert graph_file(model, "forward") is None


def test_a_patched_class_of_transformers_counts_as_code_of_others(monkeypatch):
    model = tiny_models.build()
    monkeypatch.setattr(type(model.model.norm), "forward", lambda self, x: x)
    assert graph_file(model, "forward") is None


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="folders have no owner")
@pytest.mark.parametrize("problem", ["others can write", "another owner", "a file in its place"])
def test_graphs_are_kept_only_where_no_other_user_can_write(problem, folder, monkeypatch):
    model = tiny_models.build()
    assert graph_file(model, "forward") is not None
    assert folder.stat().st_mode & 0o777 == 0o700
    if problem == "others can write":
        folder.chmod(0o777)
    elif problem == "another owner":
        monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    else:
        folder.rmdir()
        folder.touch()
    assert graph_file(model, "forward") is None
