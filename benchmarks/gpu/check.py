"""Does the counting tell the time? Held against a machine that is at hand: the embedded model on the CPU, whose steps
are timed by their rows and by the tokens drawn; from that and the counted steps follow ratios, which are then measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from typing import Any

import numpy as np
import torch

from choreograph import CacheConfig, Engine, EngineConfig, SamplingParams
from choreograph.attention.backend import ForwardContext
from choreograph.lab.replay.dry_run import DryRunModel
from choreograph.models.compilation.cuda_graph import CudaGraphForward

from ..common import Row, greedy, last_result, median_row, random_tokens, row_from_record, seconds, write
from .bench import Bench
from .budget import Budget
from .counts import CountedRun, StepWork, count_flow, dummy_model_info
from .lines import TITLES
from .predictions import mean_wait
from .shape import FULL, Shape, flows
from .workflows import ratios

ROWS = (1, 2, 4, 8, 16, 24, 40, 80, 160, 320, 640, 1024)
SAMPLED_ROWS = (1, 2, 4, 8, 16)
LONG, SHORT = 96, 8


@dataclass(frozen=True)
class CpuBench(Bench):
    """The embedded model on the CPU, uncompiled."""

    @cached_property
    def engine(self) -> Engine:
        return Engine.from_pretrained(config=EngineConfig(cache=CacheConfig(capacity=16_384)))


class StepTimeCurve:
    """Seconds of a step: by its rows where no token is drawn, and what tokens that are drawn add to it."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.step_seconds = {rows: self._prompt(rows) for rows in ROWS}
        self.sampling_seconds = {
            count: max(0.0, self._decodes(count) - self.step_seconds[count]) for count in SAMPLED_ROWS
        }

    def __call__(self, work: StepWork) -> float:
        return float(
            np.interp(work.rows, list(self.step_seconds), list(self.step_seconds.values()))
            + np.interp(work.sampled_rows, [0, *self.sampling_seconds], [0.0, *self.sampling_seconds.values()])
        )

    def _prompt(self, rows: int) -> float:
        taken = []
        for seed in range(4):
            with self.bench.engine.session() as session:
                taken.append(seconds(session.prefill(random_tokens(rows, seed)).result))
            self.bench.engine.clear_cache()
        return median(taken[1:])

    def _decodes(self, count: int) -> float:
        e = self.bench.engine
        with e.session() as session:
            for seed in range(count):
                session.decode([5], [session.prefill(random_tokens(LONG, seed))], sampling=greedy(16))
            for _ in range(4):
                e.step()
            return median(seconds(e.step) for _ in range(10))


def check_host() -> None:
    """The host's part alone, saved beside what else was checked last."""
    bench = CpuBench(FULL, torch.device("cpu"), trial=True)
    new = measure_host(bench)
    had = [
        row_from_record(row)
        for row in last_result("gpu_check").get("rows", [])
        if row["measure"] not in {one.measure for one in new}
    ]
    write("gpu_check", [*new, *had], seconds=last_result("gpu_check").get("seconds", {}))


def check(rounds: int = 2) -> None:
    """Predicts, measures, saves and prints."""
    shape = replace(FULL, flows=flows(LONG, SHORT, 8, 16, LONG), max_rounds=rounds)
    bench = CpuBench(shape, torch.device("cpu"), trial=True)
    lines, curve = measure_host(bench), StepTimeCurve(bench)
    for name in TITLES:
        allowance = Budget(600, {name: 1}).open(name)
        assert allowance is not None
        measured = ratios(bench, allowance, name)
        runs = count_flow(bench.tokenizer, shape, shape.flows[name])
        before, after = (predicted_times(runs[mode], curve) for mode in ("baseline", "choreographed"))
        for (measure, one), a, b in zip(measured.items(), before, after, strict=True):
            lines.append(Row(measure, one.value, "x", one.low, one.high, predicted=a / b))
            print(f"{measure}: {one.value:.2f} ({one.low:.2f}, {one.high:.2f}), predicted {a / b:.2f}", flush=True)
    write("gpu_check", lines, seconds={"rows": curve.step_seconds, "drawn": curve.sampling_seconds})


class HostOnlyModel(DryRunModel):
    """As a GPU's steps are seen from the host: laid out, sent and begun, over graphs that compute nothing. Of one layer
    in the heads of another shape, and a small vocabulary: drawing is the device's work."""

    def __init__(self, tokenizer: Any, shape: Shape) -> None:
        c = shape.config
        super().__init__(tokenizer, dummy_model_info(c.max_position_embeddings, 128), ())
        self.model_info = replace(
            self.model_info, query_heads=c.num_attention_heads, kv_heads=c.num_key_value_heads, head_dim=16
        )
        self.model = torch.nn.Module()
        nothing = torch.zeros(1, max(shape.rows), 128)
        self.compiled = CudaGraphForward(self, shape.rows, capturer=lambda work: lambda: nothing, use_compiler=False)

    def forward(
        self,
        tokens: list[int],
        positions: list[int],
        forward_context: ForwardContext,
        logits_indices: list[int],
        models: Sequence[str] = (),
    ) -> torch.Tensor:
        result: torch.Tensor | None = self.compiled(tokens, positions, forward_context, logits_indices)
        return torch.zeros(len(logits_indices), 128) if result is None else result

    def launch_graph(
        self, tokens: torch.Tensor, positions: list[int], forward_context: ForwardContext, models: Sequence[str]
    ) -> torch.Tensor | None:
        result: torch.Tensor | None = self.compiled.launch(tokens, positions, forward_context)
        return result


def measure_host(bench: Bench) -> list[Row]:
    """What Python takes of a decode step on a GPU, over graphs that compute nothing: a lower bound, since drawing and
    copies are the CPU's here, without a driver, pinned memory or events. On one thread, as Python is."""
    result, threads = [], torch.get_num_threads()
    torch.set_num_threads(1)
    for count in (1, 8, 64, 256):
        e = Engine(
            HostOnlyModel(bench.tokenizer, FULL),
            EngineConfig(CacheConfig(capacity=FULL.cache_tokens), backend="reference"),
        )
        e.core.model_runner.overlaps = True
        with e.session(seed=0) as session:
            context = session.prefill([i % 100 for i in range(1024)])
            for i in range(count):
                session.decode([5 + i % 100], [context], sampling=SamplingParams(max_tokens=100, ignore_eos=True))
            for _ in range(10):
                e.step()
            taken = [1e3 * seconds(e.step) for _ in range(60)]
        result.append(median_row(f"the engine's own part of a step, {count} calls", taken, "ms", better="lower"))
        print(f"{result[-1].measure}: {result[-1].value:.2f} ms", flush=True)
    torch.set_num_threads(threads)
    return result


def predicted_times(run: CountedRun, curve: StepTimeCurve) -> tuple[float, float]:
    """Seconds to the first token and to the last."""
    taken = [curve(work) for work in run.steps]
    return mean_wait(run, taken), sum(taken)
