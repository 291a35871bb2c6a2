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
from choreograph.models.graphed import GraphedForward
from choreograph.onepass.rehearsal import SilentModel
from choreograph.ops.attend import Step

from ..common import Row, greedy, last, median_row, seconds, some_tokens, write
from .bench import Bench
from .budget import Budget
from .counts import Counted, Work, count_flow, facts_of
from .lines import TITLES
from .predictions import mean_wait
from .shape import FULL, Shape, flows
from .workflows import ratios

ROWS = (1, 2, 4, 8, 16, 24, 40, 80, 160, 320, 640, 1024)
DRAWN = (1, 2, 4, 8, 16)
LONG, SHORT = 96, 8


@dataclass(frozen=True)
class Here(Bench):
    """The embedded model on the CPU, uncompiled."""

    @cached_property
    def engine(self) -> Engine:
        return Engine.from_pretrained(config=EngineConfig(cache=CacheConfig(tokens=16_384)))


class Curve:
    """Seconds of a step: by its rows where no token is drawn, and what tokens that are drawn add to it."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.rows = {rows: self._prompt(rows) for rows in ROWS}
        self.drawn = {count: max(0.0, self._decodes(count) - self.rows[count]) for count in DRAWN}

    def __call__(self, work: Work) -> float:
        return float(
            np.interp(work.rows, list(self.rows), list(self.rows.values()))
            + np.interp(work.drawn, [0, *self.drawn], [0.0, *self.drawn.values()])
        )

    def _prompt(self, rows: int) -> float:
        taken = []
        for seed in range(4):
            with self.bench.engine.session() as session:
                taken.append(seconds(session.prefill(some_tokens(rows, seed)).result))
            self.bench.engine.clear_cache()
        return median(taken[1:])

    def _decodes(self, count: int) -> float:
        e = self.bench.engine
        with e.session() as session:
            for seed in range(count):
                session.decode([5], [session.prefill(some_tokens(LONG, seed))], sampling=greedy(16))
            for _ in range(4):
                e.step()
            return median(seconds(e.step) for _ in range(10))


def check_host() -> None:
    """The host's part alone, saved beside what else was checked last."""
    bench = Here(FULL, torch.device("cpu"), trial=True)
    new = host(bench)
    had = [
        Row(**row) for row in last("gpu_check").get("rows", []) if row["measure"] not in {one.measure for one in new}
    ]
    write("gpu_check", [*new, *had], seconds=last("gpu_check").get("seconds", {}))


def check(rounds: int = 2) -> None:
    """Predicts, measures, saves and prints."""
    shape = replace(FULL, flows=flows(LONG, SHORT, 8, 16, LONG), most=rounds)
    bench = Here(shape, torch.device("cpu"), trial=True)
    lines, curve = host(bench), Curve(bench)
    for name in TITLES:
        allowance = Budget(600, {name: 1}).open(name)
        assert allowance is not None
        measured = ratios(bench, allowance, name)
        runs = count_flow(bench.tokenizer, shape, shape.flows[name])
        before, after = (told(runs[mode], curve) for mode in ("baseline", "choreographed"))
        for (measure, one), a, b in zip(measured.items(), before, after, strict=True):
            lines.append(Row(measure, one.value, "x", one.low, one.high, predicted=a / b))
            print(f"{measure}: {one.value:.2f} ({one.low:.2f}, {one.high:.2f}), predicted {a / b:.2f}", flush=True)
    write("gpu_check", lines, seconds={"rows": curve.rows, "drawn": curve.drawn})


class Hollow(SilentModel):
    """As a GPU's steps are seen from the host: laid out, sent and begun, over graphs that compute nothing. Of one layer
    in the heads of another shape, and a small vocabulary: drawing is the device's work."""

    def __init__(self, tokenizer: Any, shape: Shape) -> None:
        c = shape.config
        super().__init__(tokenizer, facts_of(c.max_position_embeddings, 128), ())
        self.facts = replace(self.facts, query_heads=c.num_attention_heads, kv_heads=c.num_key_value_heads, head_dim=16)
        self.model = torch.nn.Module()
        nothing = torch.zeros(1, max(shape.rows), 128)
        self.compiled = GraphedForward(self, shape.rows, record=lambda work: lambda: nothing, through_compiler=False)

    def forward(
        self, tokens: list[int], positions: list[int], step: Step, rows: list[int], models: Sequence[str] = ()
    ) -> torch.Tensor:
        found: torch.Tensor | None = self.compiled(tokens, positions, step, rows)
        return torch.zeros(len(rows), 128) if found is None else found

    def begin(
        self, tokens: torch.Tensor, positions: list[int], step: Step, models: Sequence[str]
    ) -> torch.Tensor | None:
        found: torch.Tensor | None = self.compiled.begin(tokens, positions, step)
        return found


def host(bench: Bench) -> list[Row]:
    """What Python takes of a decode step on a GPU, over graphs that compute nothing: a lower bound, since drawing and
    copies are the CPU's here, without a driver, pinned memory or events. On one thread, as Python is."""
    found, threads = [], torch.get_num_threads()
    torch.set_num_threads(1)
    for count in (1, 8, 64, 256):
        e = Engine(Hollow(bench.tokenizer, FULL), EngineConfig(CacheConfig(tokens=FULL.room), backend="reference"))
        e.runner.computer.goes_ahead = True
        with e.session(seed=0) as session:
            context = session.prefill([i % 100 for i in range(1024)])
            for i in range(count):
                session.decode([5 + i % 100], [context], sampling=SamplingParams(max_tokens=100, ignore_eos=True))
            for _ in range(10):
                e.step()
            taken = [1e3 * seconds(e.step) for _ in range(60)]
        found.append(median_row(f"the engine's own part of a step, {count} calls", taken, "ms", better="lower"))
        print(f"{found[-1].measure}: {found[-1].value:.2f} ms", flush=True)
    torch.set_num_threads(threads)
    return found


def told(run: Counted, curve: Curve) -> tuple[float, float]:
    """Seconds to the first token and to the last."""
    taken = [curve(work) for work in run.steps]
    return mean_wait(run, taken), sum(taken)
