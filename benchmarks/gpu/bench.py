"""What every part works with: the model, engines over it, and clocks. Owns no measurement."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from choreograph import CacheConfig, Engine, EngineConfig
from choreograph.lab.evaluation.statistics import Estimate
from choreograph.models.loader import DEFAULT_MODEL, load_tokenizer

from ..common import random_tokens
from .budget import Allowance
from .shape import Shape

PartResult = Mapping[str, Sequence[float] | Estimate]  # by the name of a line: samples, or a figure with its interval


@dataclass(frozen=True)
class Bench:
    """trial: once, uncompiled, wherever it runs. words: where the tokenizer comes from: random weights know none, and
    the embedded model's ids are below the vocabulary's size. notes: what results say beside figures."""

    shape: Shape
    device: torch.device
    trial: bool
    tokenizer_source: str = DEFAULT_MODEL
    notes: dict[str, str] = field(default_factory=dict)

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.tokenizer_source)[0]

    @cached_property
    def model(self) -> LlamaForCausalLM:
        torch.manual_seed(0)
        with self.device:
            return cast(LlamaForCausalLM, AutoModelForCausalLM.from_config(self.shape.config, dtype=torch.bfloat16))

    @cached_property
    def engine(self) -> Engine:
        """One that several parts use."""
        return self.new_engine(EngineConfig(CacheConfig(capacity=self.shape.cache_tokens)))

    def new_engine(self, config: EngineConfig, max_graph_rows: int = 1 << 30) -> Engine:
        """With graphs of its own, for steps of so many rows (none: without graphs), ready to run."""
        options: dict[str, Any] = {"cache": config.cache, "scheduler": config.scheduler, "backend": "triton"}
        rows = tuple(n for n in self.shape.rows if n <= max_graph_rows)
        options |= {"compile": bool(rows) and not self.trial, "compile_sizes": rows or None}
        engine = Engine.from_pretrained(self.model, tokenizer=self.tokenizer, config=EngineConfig(**options))
        engine.warm_up()
        if refused := getattr(engine.core.hf_model.compiled, "capture_error", None):
            self.notes["graphs"] = f"not recorded, steps run eagerly: {refused}"
        if not self.trial:  # steps of whole chunks too
            with engine.session() as session:
                session.prefill(random_tokens(2 * config.scheduler.max_num_batched_tokens)).result()
        return engine

    @cached_property
    def bandwidth(self) -> float:
        """Bytes a second that a plain copy reads and writes."""
        one = torch.empty(1 << (24 if self.trial else 31), dtype=torch.uint8, device=self.device)
        other = torch.empty_like(one)
        return 2 * len(one) / min(device_seconds(lambda: other.copy_(one)) for _ in range(10))

    def noise(self, *size: int) -> Tensor:
        return torch.randn(*size, device=self.device, dtype=torch.bfloat16)


Measure = Callable[[Bench, Allowance], PartResult]


def now() -> float:
    """The time when the device has done all that it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds(work: Callable[[], object]) -> float:
    began = now()
    work()
    return now() - began


def device_seconds(work: Callable[[], object]) -> float:
    """Seconds on the device alone, without launching."""
    if not torch.cuda.is_available():
        return seconds(work)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def as_cuda_graph(work: Callable[[], object]) -> Callable[[], object]:
    """The work as one graph, so that nothing waits for the host; without a GPU as it is."""
    if not torch.cuda.is_available():
        return work
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):  # what is compiled or sent once must not be captured
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()

    def play(kept: Callable[[], object] = work) -> None:  # with all that the graph reads
        graph.replay()

    return play
