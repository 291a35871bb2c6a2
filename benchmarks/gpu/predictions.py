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

from choreograph.evaluation.virtual import Machine

from .counts import Counted, Work
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
class Reached:
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


REACHED = Reached()
OTHERWISE = {  # what else could be, one thing at a time
    "as assumed": REACHED,
    "our attention as fast as SDPA": Reached(triton=REACHED.sdpa),
    "0.2 ms of the host a step": Reached(overhead=2e-4, row=0.0),
    "3 ms, and 0.2 ms a token": Reached(overhead=3e-3, row=2e-4),
}


@dataclass(frozen=True)
class Model:
    """parameters: in the layers. head: that give logits, for rows that a token is drawn from. token_bytes: keys and
    values of one token."""

    parameters: float
    head: float
    layers: int
    heads: int
    groups: int
    width: int
    token_bytes: int

    @classmethod
    def of(cls, shape: Shape) -> "Model":
        c, width = shape.config, shape.width
        shared = 2 * c.hidden_size * width * (c.num_attention_heads + c.num_key_value_heads)
        layer = shared + 3 * c.hidden_size * c.intermediate_size
        return cls(
            parameters=layer * c.num_hidden_layers,
            head=c.vocab_size * c.hidden_size,
            layers=c.num_hidden_layers,
            heads=c.num_attention_heads,
            groups=c.num_key_value_heads,
            width=width,
            token_bytes=shape.token_bytes,
        )

    @property
    def weight_bytes(self) -> float:
        """Of all that a step reads: tokens are looked up in the embedding, not multiplied with it."""
        return BYTES * (self.parameters + self.head)

    @property
    def layer_bytes(self) -> float:
        """Of one token's keys and values in one layer."""
        return self.token_bytes / self.layers


def computing(device: Device, model: Model, work: Work, reached: Reached = REACHED) -> float:
    """Seconds of a step's arithmetic."""
    products = 2 * model.parameters * work.rows + 2 * model.head * work.drawn
    attention = 4 * model.heads * model.width * model.layers * work.pairs
    return (products / reached.arithmetic + attention / reached.triton) / device.arithmetic


def moved_bytes(model: Model, work: Work) -> float:
    """Weights and what is seen, once."""
    return BYTES * (model.parameters + model.head * bool(work.drawn)) + model.token_bytes * work.seen


def step_seconds(device: Device, model: Model, work: Work, reached: Reached = REACHED, *, share: float = 1.0) -> float:
    """share: of the layers that are computed."""
    reading = moved_bytes(model, work) / (reached.memory * device.memory)
    longer = max(computing(device, model, work, reached), reading)
    device, host = share * longer, reached.overhead + reached.row * work.drawn
    return max(device, host) if work.begun else device + host


def run_seconds(device: Device, model: Model, steps: Sequence[Work], reached: Reached = REACHED) -> float:
    return sum(step_seconds(device, model, work, reached) for work in steps)


def prefill(tokens: int, chunk: int = 1024, drawn: int = 0) -> list[Work]:
    """The steps of a prompt alone."""
    firsts = range(0, tokens, chunk)
    ends = [min(first + chunk, tokens) for first in firsts]
    parts = [Work(e - f, (e * (e + 1) - f * (f + 1)) // 2, e, 0) for f, e in zip(firsts, ends, strict=True)]
    return [*parts[:-1], parts[-1]._replace(drawn=drawn)]


# -- rows of the table --------------------------------------------------------------------------------------------


def rates(device: Device, reached: Reached = REACHED) -> dict[str, float]:
    return {
        "memory, plain copy": reached.copy * device.memory / 1e12,
        "product of matrices": reached.arithmetic * device.arithmetic / 1e12,
        "host to device": reached.link * device.link / 1e9,
    }


def decode_steps(device: Device, model: Model, shape: Shape, reached: Reached = REACHED) -> dict[str, float]:
    """Milliseconds, and the share of what a plain copy's bandwidth allows. A moved parent turns one query row a
    layer and parent in registers: nothing that could be seen."""
    n, found = shape.context, {}
    for name, work in step_work(n).items():
        seconds = step_seconds(device, model, work, reached)
        least = moved_bytes(model, work) / (reached.copy * device.memory)
        found |= {f"decode step, {name}": 1e3 * seconds, f"decode step, {name}: share of the limit": least / seconds}
    return found | {"decode step, moved over home": 1.0, "first token, moved over home": 1.0}


def step_work(context: int) -> dict[str, Work]:
    """The decode steps that are measured. shared: eight rows over one context."""
    return {
        "batch 1": Work(1, context, context, 1, begun=True),
        "batch 8": Work(8, 8 * context, 8 * context, 8, begun=True),
        "batch 8, shared": Work(8, 8 * context, context, 8, begun=True),
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
        "prefill": Attention(n, n * (n + 1) // 2, n, n),
    }


def attention(device: Device, model: Model, shape: Shape, name: str, reached: Reached = REACHED) -> dict[str, float]:
    """SDPA over ours, of the time of one layer. Two kernels each (stripes, then merging). Ours writes partial results
    in float32 and reads them again; flex also gathers keys and values first, which reads, writes and reads them, in
    some twenty kernels more."""
    memory, found = reached.memory * device.memory, {}
    for case, one in attention_cases(shape.context).items():
        work = 4 * model.heads * model.width * one.pairs
        parts = 2 * 4 * one.rows * model.heads * model.width
        reads = 3 if name == "flex" else 1
        computing = [work / (share * device.arithmetic) for share in (reached.sdpa, reached.triton)]
        theirs = max(computing[0], model.layer_bytes * one.theirs / memory) + 2 * reached.kernel
        ours = max(computing[1], (reads * model.layer_bytes * one.ours + parts) / memory)
        found[f"{name}, {case}: SDPA over it"] = theirs / (ours + (22 if name == "flex" else 2) * reached.kernel)
    return found | {f"{name}, decode of 1: moved over home": 1.0}


def flow(
    device: Device, model: Model, title: str, counted: Mapping[str, Counted], reached: Reached = REACHED
) -> dict[str, float]:
    """Baseline over choreographed, as `evaluation.speed` pools them."""
    before, after = (timed(device, model, counted[name], reached) for name in ("baseline", "choreographed"))
    return {f"{title}: TTFT": before[0] / after[0], f"{title}: end to end": before[1] / after[1]}


def timed(device: Device, model: Model, run: Counted, reached: Reached = REACHED) -> tuple[float, float]:
    """Seconds to the first token, as a mean over the workflow's steps, and to the last."""
    taken = [step_seconds(device, model, work, reached) for work in run.steps]
    return mean_wait(run, taken), sum(taken)


def mean_wait(run: Counted, taken: Sequence[float]) -> float:
    """The mean over groups of decodes of their mean time to first token, when steps took so long."""
    ends = [0.0, *accumulate(taken)]
    return fmean(fmean(ends[last] - ends[first] for first, last in group) for group in run.waits)


def prompt_cache(device: Device, model: Model, shape: Shape, reached: Reached = REACHED) -> dict[str, float]:
    new, length = shape.new, shape.cached + shape.new
    behind = Work(new, new * shape.cached + new * (new + 1) // 2, length, 1)
    cached = step_seconds(device, model, behind, reached) + reached.serving
    whole = run_seconds(device, model, prefill(length, drawn=1), reached) + reached.serving
    return {"Prompt Cache: first token": 1e3 * cached, "Prompt Cache: no reuse over modules": whole / cached}


def partial_prefill(device: Device, model: Model, shape: Shape, reached: Reached = REACHED) -> dict[str, float]:
    """All layers over a quarter of them, of a context that another model has encoded."""
    steps = prefill(shape.cached)
    some = sum(step_seconds(device, model, work, reached, share=0.25) for work in steps)
    return {"DroidSpeak: prefill, all layers over a quarter": run_seconds(device, model, steps, reached) / some}


@dataclass(frozen=True)
class Timed(Machine):
    """A machine whose steps take what is predicted here."""

    seconds: Callable[[Work], float] = lambda work: 0.0

    def step_seconds(self, positions: list[int], sampled: list[int]) -> float:
        seen = sum(positions[row] + 1 for row in sampled)
        decodes = len(positions) == len(sampled)
        return self.seconds(Work(len(positions), sum(positions) + len(positions), seen, len(sampled), begun=decodes))


def machine(device: Device, model: Model, reached: Reached = REACHED) -> Machine:
    """For KVFlow, whose figures come from the real policies on a virtual clock."""
    return Timed(
        name=device.name,
        parameters=model.parameters + model.head,
        weights=model.weight_bytes,
        layers=model.layers,
        width=model.heads * model.width,
        token_bytes=model.token_bytes,
        arithmetic=reached.arithmetic * device.arithmetic,
        memory=reached.memory * device.memory,
        link=reached.link * device.link,
        cache=0.9 * device.size - model.weight_bytes,
        overhead=reached.overhead,
        seconds=lambda work: step_seconds(device, model, work, reached),
    )
