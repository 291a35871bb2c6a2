"""Each figure from bytes and operations, before it is measured. Pure: facts of a device and of a model, and the work
that `counts` counted, to seconds and ratios. What no data sheet says is assumed, in `Reached` and nowhere else.

A step computes 2 operations a parameter and row, and 4 * width a layer, row and token that the row sees; it reads every
weight once, and once the keys and values of every token that any row sees. It takes the longer of the two, and what
the host takes before and after it, unless it was begun while the host still worked on the one before: then the longer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean
from typing import NamedTuple

from benchmarks.simulator import HardwareModel

from .counts import CountedRun, StepWork
from .shape import Shape

BYTES = 2  # of a bfloat16 number


@dataclass(frozen=True)
class Device:
    """What a maker states. card: what drivers call it. memory, link: bytes a second, of its own memory and to the
    host's, one way. arithmetic: bfloat16 operations a second, dense. size: bytes of memory."""

    name: str
    card: str
    memory: float
    arithmetic: float
    link: float
    size: float


PRESETS = {
    "h200": Device("H200 SXM", "H200", 4.8e12, 989e12, 55e9, 141e9),
    "h100": Device("H100 SXM", "H100 80GB HBM3", 3.35e12, 989e12, 55e9, 80e9),
    "a100": Device("A100 80GB SXM", "A100-SXM4-80GB", 2.0e12, 312e12, 25e9, 80e9),
}


@dataclass(frozen=True)
class Efficiency:
    """Assumed. Shares of what the maker states: of arithmetic in large products, of memory by a decode step and by a
    plain copy, of the link, and of arithmetic in the attention of a long prompt, by SDPA and by us. Seconds: overhead
    is the host's part of a step, row what every row that a token is drawn from adds to it (the scheduler takes as much
    on a CPU; drawing on the device), kernel what a kernel takes at least inside a graph, serving what Prompt Cache
    takes to read and plan a prompt."""

    arithmetic: float = 0.6
    memory: float = 0.8
    copy: float = 0.9
    link: float = 0.8
    sdpa: float = 0.4
    triton: float = 0.2
    overhead: float = 1e-3
    row: float = 3e-5
    kernel: float = 2e-6
    serving: float = 1e-3


EFFICIENCY = Efficiency()
ALTERNATIVES = {  # what else could be, one thing at a time
    "as assumed": EFFICIENCY,
    "our attention as fast as SDPA": Efficiency(triton=EFFICIENCY.sdpa),
    "0.2 ms of the host a step": Efficiency(overhead=2e-4, row=0.0),
    "3 ms, and 0.2 ms a token": Efficiency(overhead=3e-3, row=2e-4),
}


@dataclass(frozen=True)
class Model:
    """parameters: in the layers. head: that give logits, for rows that a token is drawn from. token_bytes: keys and
    values of one token."""

    parameters: float
    lm_head_parameters: float
    layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    token_bytes: int

    @classmethod
    def from_shape(cls, shape: Shape) -> "Model":
        c, width = shape.config, shape.head_dim
        shared = 2 * c.hidden_size * width * (c.num_attention_heads + c.num_key_value_heads)
        layer = shared + 3 * c.hidden_size * c.intermediate_size
        return cls(
            parameters=layer * c.num_hidden_layers,
            lm_head_parameters=c.vocab_size * c.hidden_size,
            layers=c.num_hidden_layers,
            num_heads=c.num_attention_heads,
            num_kv_heads=c.num_key_value_heads,
            head_dim=width,
            token_bytes=shape.token_bytes,
        )

    @property
    def weight_bytes(self) -> float:
        """Of all that a step reads: tokens are looked up in the embedding, not multiplied with it."""
        return BYTES * (self.parameters + self.lm_head_parameters)

    @property
    def layer_bytes(self) -> float:
        """Of one token's keys and values in one layer."""
        return self.token_bytes / self.layers


def arithmetic_seconds(device: Device, model: Model, work: StepWork, efficiency: Efficiency = EFFICIENCY) -> float:
    """Seconds of a step's arithmetic."""
    products = 2 * model.parameters * work.rows + 2 * model.lm_head_parameters * work.sampled_rows
    attention = 4 * model.num_heads * model.head_dim * model.layers * work.pairs
    return (products / efficiency.arithmetic + attention / efficiency.triton) / device.arithmetic


def moved_bytes(model: Model, work: StepWork) -> float:
    """Weights and what is seen, once."""
    return (
        BYTES * (model.parameters + model.lm_head_parameters * bool(work.sampled_rows))
        + model.token_bytes * work.kv_tokens_read
    )


def step_seconds(
    device: Device, model: Model, work: StepWork, efficiency: Efficiency = EFFICIENCY, *, layer_fraction: float = 1.0
) -> float:
    """share: of the layers that are computed."""
    reading = moved_bytes(model, work) / (efficiency.memory * device.memory)
    longer = max(arithmetic_seconds(device, model, work, efficiency), reading)
    device, host = layer_fraction * longer, efficiency.overhead + efficiency.row * work.sampled_rows
    return max(device, host) if work.overlapped else device + host


def run_seconds(device: Device, model: Model, steps: Sequence[StepWork], efficiency: Efficiency = EFFICIENCY) -> float:
    return sum(step_seconds(device, model, work, efficiency) for work in steps)


def prefill(tokens: int, chunk: int = 1024, sampled_rows: int = 0) -> list[StepWork]:
    """The steps of a prompt alone."""
    firsts = range(0, tokens, chunk)
    ends = [min(first + chunk, tokens) for first in firsts]
    parts = [StepWork(e - f, (e * (e + 1) - f * (f + 1)) // 2, e, 0) for f, e in zip(firsts, ends, strict=True)]
    return [*parts[:-1], parts[-1]._replace(sampled_rows=sampled_rows)]


# -- rows of the table --------------------------------------------------------------------------------------------


def rates(device: Device, efficiency: Efficiency = EFFICIENCY) -> dict[str, float]:
    return {
        "memory, plain copy": efficiency.copy * device.memory / 1e12,
        "product of matrices": efficiency.arithmetic * device.arithmetic / 1e12,
        "host to device": efficiency.link * device.link / 1e9,
    }


def decode_steps(device: Device, model: Model, shape: Shape, efficiency: Efficiency = EFFICIENCY) -> dict[str, float]:
    """Milliseconds, and the share of what a plain copy's bandwidth allows. A moved parent turns one query row a
    layer and parent in registers: nothing that could be seen."""
    n, result = shape.context, {}
    for name, work in step_work(n).items():
        seconds = step_seconds(device, model, work, efficiency)
        least = moved_bytes(model, work) / (efficiency.copy * device.memory)
        result |= {f"decode step, {name}": 1e3 * seconds, f"decode step, {name}: share of the limit": least / seconds}
    # a plain loop reads the same bytes
    ratios = (
        "decode step, moved over home",
        "first token, moved over home",
        "decode step, batch 32: a plain loop over it",
    )
    return result | dict.fromkeys(ratios, 1.0)


def step_work(context: int) -> dict[str, StepWork]:
    """The decode steps that are measured. shared: eight rows over one context."""
    return {
        "batch 1": StepWork(1, context, context, 1, overlapped=True),
        "batch 8": StepWork(8, 8 * context, 8 * context, 8, overlapped=True),
        "batch 8, shared": StepWork(8, 8 * context, context, 8, overlapped=True),
        "batch 32": StepWork(32, 32 * context, 32 * context, 32, overlapped=True),
    }


class Attention(NamedTuple):
    """One case of attention alone: rows, pairs, tokens read by us and by SDPA, whose input is contiguous."""

    rows: int
    pairs: int
    ours: int
    theirs: int


def attention_cases(context: int) -> dict[str, Attention]:
    n = context
    return {
        "decode of 1": Attention(1, n, n, n),
        "decode of 8": Attention(8, 8 * n, 8 * n, 8 * n),
        "decode of 8, shared": Attention(8, 8 * n, n, 8 * n),
        "decode of 32": Attention(32, 32 * n, 32 * n, 32 * n),
        "prefill": Attention(n, n * (n + 1) // 2, n, n),
    }


def attention(
    device: Device, model: Model, shape: Shape, name: str, efficiency: Efficiency = EFFICIENCY
) -> dict[str, float]:
    """SDPA over ours, of the time of one layer. Two kernels each (stripes, then merging). Ours writes partial results
    in float32 and reads them again; flex also gathers keys and values first, which reads, writes and reads them, in
    some twenty kernels more."""
    memory, result = efficiency.memory * device.memory, {}
    for case, one in attention_cases(shape.context).items():
        work = 4 * model.num_heads * model.head_dim * one.pairs
        parts = 2 * 4 * one.rows * model.num_heads * model.head_dim
        reads = 3 if name == "flex" else 1
        computing = [work / (share * device.arithmetic) for share in (efficiency.sdpa, efficiency.triton)]
        theirs = max(computing[0], model.layer_bytes * one.theirs / memory) + 2 * efficiency.kernel
        ours = max(computing[1], (reads * model.layer_bytes * one.ours + parts) / memory)
        result[f"{name}, {case}: SDPA over it"] = theirs / (ours + (22 if name == "flex" else 2) * efficiency.kernel)
    return result | {f"{name}, decode of 1: moved over home": 1.0}


def flow(
    device: Device, model: Model, title: str, counted: Mapping[str, CountedRun], efficiency: Efficiency = EFFICIENCY
) -> dict[str, float]:
    """Baseline over choreographed, as `evaluation.fidelity` pools them."""
    before, after = (run_times(device, model, counted[name], efficiency) for name in ("baseline", "choreographed"))
    return {f"{title}: TTFT": before[0] / after[0], f"{title}: end to end": before[1] / after[1]}


def run_times(
    device: Device, model: Model, run: CountedRun, efficiency: Efficiency = EFFICIENCY
) -> tuple[float, float]:
    """Seconds to the first token, as a mean over the workflow's steps, and to the last."""
    taken = [step_seconds(device, model, work, efficiency) for work in run.steps]
    return mean_wait(run, taken), sum(taken)


def mean_wait(run: CountedRun, taken: Sequence[float]) -> float:
    """The mean over groups of decodes of their mean time to first token, when steps took so long."""
    ends = [0.0, *accumulate(taken)]
    return fmean(fmean(ends[last] - ends[first] for first, last in group) for group in run.waits)


def prompt_cache(device: Device, model: Model, shape: Shape, efficiency: Efficiency = EFFICIENCY) -> dict[str, float]:
    new, length = shape.num_new_tokens, shape.num_cached_tokens + shape.num_new_tokens
    behind = StepWork(new, new * shape.num_cached_tokens + new * (new + 1) // 2, length, 1)
    cached = step_seconds(device, model, behind, efficiency) + efficiency.serving
    whole = run_seconds(device, model, prefill(length, sampled_rows=1), efficiency) + efficiency.serving
    return {"Prompt Cache: first token": 1e3 * cached, "Prompt Cache: no reuse over modules": whole / cached}


def partial_prefill(
    device: Device, model: Model, shape: Shape, efficiency: Efficiency = EFFICIENCY
) -> dict[str, float]:
    """All layers over a quarter of them, of a context that another model has encoded."""
    steps = prefill(shape.num_cached_tokens)
    some = sum(step_seconds(device, model, work, efficiency, layer_fraction=0.25) for work in steps)
    return {"DroidSpeak: prefill, all layers over a quarter": run_seconds(device, model, steps, efficiency) / some}


@dataclass(frozen=True)
class PredictedHardware(HardwareModel):
    """A machine whose steps take what is predicted here."""

    seconds: Callable[[StepWork], float] = lambda work: 0.0

    def step_seconds(self, positions: list[int], sampled_rows: list[int]) -> float:
        seen = sum(positions[row] + 1 for row in sampled_rows)
        decodes = len(positions) == len(sampled_rows)
        return self.seconds(
            StepWork(len(positions), sum(positions) + len(positions), seen, len(sampled_rows), overlapped=decodes)
        )


def predicted_hardware(device: Device, model: Model, efficiency: Efficiency = EFFICIENCY) -> HardwareModel:
    """For KVFlow, whose figures come from the real policies on a virtual clock."""
    return PredictedHardware(
        name=device.name,
        parameters=model.parameters + model.lm_head_parameters,
        weights=model.weight_bytes,
        layers=model.layers,
        width=model.num_heads * model.head_dim,
        token_bytes=model.token_bytes,
        arithmetic=efficiency.arithmetic * device.arithmetic,
        memory=efficiency.memory * device.memory,
        link=efficiency.link * device.link,
        cache=0.9 * device.size - model.weight_bytes,
        overhead=efficiency.overhead,
        seconds=lambda work: step_seconds(device, model, work, efficiency),
    )
