"""On a pretended GPU (`pretended.py`) all says what it says on the CPU: no tensor is where it may not be, what is
recorded may be recorded, and the host waits for tokens alone."""

import pytest
import torch
from helpers import tiny_models
from helpers.fake_cuda import FakeCudaTensor, Graph, capture_graph, fake_cuda
from helpers.inspect_engine import inspect
from helpers.triton_reference import run
from lab.training.test_training import CHECK, LEARN
from peft import LoraConfig, get_peft_model

from benchmarks.gpu.__main__ import run as table_of
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.lines import PARTS as LINES
from choreograph import CacheConfig, Engine, EngineConfig, SamplingParams
from choreograph.attention import triton_backend as triton
from choreograph.lab.training import TrainConfig, train
from choreograph.models.compilation.cuda_graph import CudaGraphForward
from choreograph.models.loader import DEFAULT_MODEL

SHORT = SamplingParams(max_tokens=5)
WAYS = [
    {"top_p": 0.9},
    {"min_p": 0.05, "top_k": 5},
    {"presence_penalty": 0.5, "frequency_penalty": 0.4},
    {"repetition_penalty": 1.3, "min_tokens": 3},
    {"logit_bias": {3: 2.0, 0: 1.0}},
    {"temperature": 0, "logprobs": 4},
]


@pytest.fixture(autouse=True)
def _played(request, monkeypatch):
    """Kernels in plain tensors: the interpreter has one test."""
    if "interpreter" not in request.node.name:
        monkeypatch.setattr(triton, "run", run)


@pytest.fixture
def gpu(_played):
    with fake_cuda(kernels=[(triton, "run")]) as here:
        yield here


def test_fake_cuda_tensors_refuse_tensors_of_the_cpu(gpu):
    there = torch.arange(4.0, device="cuda")
    assert isinstance(there, FakeCudaTensor) and (there + 1).sum().item() == 10
    for wrong in (
        lambda: there + torch.ones(4),
        lambda: torch.ones(4).add_(there),
        lambda: torch.ones(4)[there.long()],
    ):
        with pytest.raises(RuntimeError, match="on the host and on the GPU"):
            wrong()
    with pytest.raises(TypeError, match="numpy"):
        there.numpy()
    graph = Graph()
    with pytest.raises(RuntimeError, match="not permitted"), capture_graph(graph):
        there.tolist()
    with capture_graph(graph):
        twice = there * 2
    there += 1
    graph.replay()
    assert twice.tolist() == [2, 4, 6, 8]


def engine(device: str, *, backend: str = "triton", tokens: int = 512, **options) -> Engine:
    cache = CacheConfig(capacity=tokens, page_size=4, poison_freed_pages=True, **options)
    config = EngineConfig(backend=backend if device == "cuda" else "auto", cache=cache)
    return Engine.from_pretrained(tiny_models.build(), device=device, config=config)


def branches(engine: Engine, mode: str = "choreographed") -> list[list[int]]:
    with engine.session(seed=0, mode=mode) as session:
        root = session.prefill(list(range(5, 25)))
        said = [session.decode([3 + i], [root], sampling=SHORT) for i in range(3)]
        said.append(session.decode([9], [said[2], root, said[0]], sampling=SamplingParams(max_tokens=7)))
        engine.run_until_idle()
        engine.check()
        return [message.tokens for message in said]


def options_of_sampling(device: str) -> list[object]:
    one = engine(device)
    with one.session(seed=0) as session:
        root = session.prefill(list(range(5, 25)))
        said = [session.decode([3], [root], sampling=SamplingParams(max_tokens=5, **way)) for way in WAYS]
        one.run_until_idle()
        return [(message.tokens, [sorted(p.top) for p in message.logprobs or ()]) for message in said]


def lower_tiers(device: str) -> list[list[int]]:
    one = engine(device, tokens=64, host_capacity=512, disk_capacity=2048)
    with one.session(seed=0) as session:
        roots = [session.prefill([i] * 20) for i in range(5, 13)]
        one.run_until_idle()
        said = [session.decode([3], [root], sampling=SHORT).tokens for root in reversed(roots)]
    one.check()
    return said


def scored_prompts(device: str) -> list[list[object]]:
    one = engine(device)
    with one.session(seed=0) as session:
        root = session.prefill(list(range(5, 25)))
        others = [session.decode([3 + i], [root], sampling=SHORT) for i in range(2)]
        scored = [session.decode([7, 2], [root], max_tokens=n, prompt_logprobs=2) for n in (0, 3)]
        values = [[(p.token, p.rank, list(p.top)) for p in m.prompt_logprobs[1:]] for m in scored]
        one.run_until_idle()
    one.check()
    return [*values, *([message.tokens for message in others])]


def another_model(device: str) -> list[list[int]]:
    one = engine(device)
    one.add_model("twin", tiny_models.build(seed=2))
    one.enable_layer_reuse("twin", pattern=[0, 1, 2])
    with one.session(seed=1) as session:
        root = session.prefill(list(range(12)))
        ways = ("reuse", "partial", "recompute")
        return [session.decode([5], [root], model="twin", kv_reuse=share, sampling=SHORT).tokens for share in ways]


PARTS = {
    "branches": lambda device: branches(engine(device)),
    "branches behind whole prompts": lambda device: branches(engine(device), "prefix"),
    "options of sampling": options_of_sampling,
    "lower tiers": lower_tiers,
    "another model": another_model,
    "scored prompts": scored_prompts,
    "gathered": lambda device: branches(engine(device, backend="sdpa")),
}


def test_the_interpreter_reads_what_is_there():
    with fake_cuda():
        there = engine("cuda")
        with there.session(seed=0) as session:
            said = session.decode([3], [session.prefill([5, 6, 7])], sampling=SamplingParams(max_tokens=2)).tokens
    with engine("cpu").session(seed=0) as session:
        assert said == session.decode([3], [session.prefill([5, 6, 7])], sampling=SamplingParams(max_tokens=2)).tokens


@pytest.mark.parametrize("part", PARTS)
def test_an_engine_on_the_fake_gpu_gives_the_tokens_of_the_cpu(part):
    here = PARTS[part]("cpu")
    with fake_cuda(kernels=[(triton, "run")]):
        assert PARTS[part]("cuda") == here


def test_the_host_waits_for_tokens_alone(gpu):
    there = engine("cuda")
    with there.session(seed=0) as session:
        root = session.prefill(list(range(5, 25)))
        root.result()
        gpu.sync_counts.clear()
        sampling = SamplingParams(max_tokens=6, ignore_eos=True)
        said = [session.decode([3 + i], [root], sampling=sampling) for i in range(3)]
        assert [len(message.tokens) for message in said] == [7, 7, 7]
        assert gpu.sync_counts == {"copy to the host": 6}
        gpu.sync_counts.clear()
        options = ({"temperature": 0}, {"presence_penalty": 1}, {"repetition_penalty": 1.3, "logit_bias": {4: 2.0}})
        ways = [SamplingParams(max_tokens=6, min_tokens=3, logprobs=2, seed=1, **more) for more in options]
        for message in [session.decode([3 + i], [root], sampling=way) for i, way in enumerate(ways)]:
            message.result()
        assert gpu.sync_counts == {"copy to the host": 6}, "tokens and all log-probabilities of a step in one"


def test_steps_can_be_recorded_and_say_the_same(gpu):
    here = branches(engine("cpu"))
    there = engine("cuda")
    adapter = inspect(there).hf_model
    adapter.compiled = CudaGraphForward(adapter, (2, 4, 8), use_compiler=False)
    assert branches(there) == here
    assert adapter.compiled.capture_error is None and len(adapter.compiled._graphs) == 2


def test_adapters_are_served_as_on_the_cpu(gpu, tmp_path):
    options = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    get_peft_model(tiny_models.build(), options).save_pretrained(tmp_path)

    def said(device: str) -> list[list[int]]:
        one = engine(device)
        one.add_adapter("ft", tmp_path)
        with one.session(seed=1) as session:
            root = session.prefill(list(range(12)))
            answers = [session.decode([5], [root], model=name, sampling=SHORT) for name in ("base", "ft")]
            one.run_until_idle()
            return [answer.tokens for answer in answers]

    assert said("cuda") == said("cpu")


def test_training_is_what_it_is_on_the_cpu(gpu, tmp_path):
    config = TrainConfig(lora_rank=4, lora_alpha=8, learning_rate=1e-2, batch_size=2, dropout=0.0, epochs=1)

    def learned(device: str) -> tuple[float, float]:
        report = train(inspect(engine(device)).hf_model, LEARN[:6], CHECK, tmp_path / device, config)
        return report.loss_before, report.loss_after

    there, here = learned("cuda"), learned("cpu")
    assert there == pytest.approx(here, abs=1e-3) and there[1] < there[0]


@pytest.mark.slow
def test_the_benchmark_of_the_gpu_path_runs_to_its_end(gpu, monkeypatch, capsys):
    """Recorded steps and all; but for FlexAttention, which is compiled for the device."""

    def recording(self, config, max_graph_rows: int = 1 << 30):
        made = new_engine(self, config, max_graph_rows)
        rows = tuple(n for n in self.shape.rows if n <= max_graph_rows)
        if rows:
            inspect(made).hf_model.compiled = CudaGraphForward(inspect(made).hf_model, rows, use_compiler=False)
        return made

    new_engine = Bench.new_engine
    monkeypatch.setattr(Bench, "new_engine", recording)
    parts = [part for part in LINES if part != "flex"]
    table_of(parts, 60.0, DEFAULT_MODEL, trial=True)
    told = capsys.readouterr().out
    assert all(line.measure in told for part in parts for line in LINES[part])
    assert "failed" not in told and "left out" not in told
