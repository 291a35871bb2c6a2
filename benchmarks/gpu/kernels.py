"""One layer's attention alone, on the device alone: our kernels over slots of the arena against SDPA on plain
contiguous input. A pass goes over as many arenas as the model has layers, in one graph, so that no cache helps."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from choreograph.attention import triton_backend as triton
from choreograph.attention.metadata import AttentionCall, AttentionMetadata, AttentionSpec, KVRead, build_metadata
from choreograph.attention.rope import Rope

from ..common import interleaved
from . import flex
from .bench import Bench, Measure, PartResult, as_cuda_graph, device_seconds

Work = Callable[[], object]
KERNELS = {"triton": triton.attend, "flex": flex.attend}
FLASH = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]


class Case(NamedTuple):
    """plan: for us. calls: sequences of SDPA's batch, over which the plan's rows are divided."""

    metadata: AttentionMetadata
    calls: int
    causal: bool = False


def measure(name: str) -> Measure:
    """The part that measures one of our kernels."""
    return lambda bench, allowance: against_sdpa(bench, name)


def against_sdpa(bench: Bench, name: str) -> PartResult:
    n, result = bench.shape.context, {}
    for title, case in cases(n).items():
        theirs, mine = time_in_graphs(bench, sdpa_attention(bench, case), choreograph_attention(bench, case, name))
        result[f"{name}, {title}: SDPA over it"] = [a / b for a, b in zip(theirs, mine, strict=True)]
    away, home = time_in_graphs(
        bench, *(choreograph_attention(bench, Case(decodes(1, n, shift=shift), 1), name) for shift in (3, 0))
    )
    return result | {f"{name}, decode of 1: moved over home": [a / b for a, b in zip(away, home, strict=True)]}


def time_in_graphs(bench: Bench, *works: Work) -> list[list[float]]:
    """Seconds of passes, in turns."""
    sides = [partial(device_seconds, as_cuda_graph(work)) for work in works]
    return interleaved(bench.shape.max_rounds if bench.trial else 4 * bench.shape.max_rounds, *sides)


def cases(n: int) -> dict[str, Case]:
    whole = build_metadata(list(range(n)), [KVRead(0, 0, n, 0, 1, 1, 0)], list(range(n)))
    return {
        "decode of 1": Case(decodes(1, n), 1),
        "decode of 8": Case(decodes(8, n, separate_contexts=True), 8),
        "decode of 8, shared": Case(decodes(8, n), 8),
        "decode of 32": Case(decodes(32, n, separate_contexts=True), 32),
        "prefill": Case(whole, 1, causal=True),
    }


def decodes(batch: int, n: int, *, separate_contexts: bool = False, shift: int = 0) -> AttentionMetadata:
    """Rows of one token, each behind n - 1 tokens and itself: one context for all, or one each."""
    own, stands = (batch if separate_contexts else 1) * n, n - 1 + shift
    reads = [KVRead(row * n * separate_contexts, row, row + 1, shift, n - 1, 0, shift) for row in range(batch)]
    reads += [KVRead(own + row, row, row + 1, 0, 1, 1, stands) for row in range(batch)]
    return build_metadata([own + row for row in range(batch)], reads, [stands] * batch)


def choreograph_attention(bench: Bench, case: Case, name: str) -> Work:
    c, width = bench.shape.config, bench.shape.head_dim
    kind = AttentionSpec(Rope(tuple(5e5 ** (-2 * i / width) for i in range(width // 2))))
    query, key, value = (
        bench.noise(heads, case.metadata.num_tokens, width)
        for heads in (c.num_attention_heads, c.num_key_value_heads, c.num_key_value_heads)
    )
    attend = KERNELS[name]
    slots = max(int(case.metadata.slots.max()), int(case.metadata.kv_runs[:, 1].max())) + 1
    arenas = [[bench.noise(slots, c.num_key_value_heads, width) for _ in range(2)] for _ in range(c.num_hidden_layers)]

    def work() -> None:
        for keys, values in arenas:
            attend(AttentionCall(case.metadata, query, key, value, keys, values, width**-0.5, kind))

    return work


def sdpa_attention(bench: Bench, case: Case) -> Work:
    """The flash kernels alone: what torch would fall back to is no opponent."""
    c, n, width = bench.shape.config, bench.shape.context, bench.shape.head_dim
    query = bench.noise(case.calls, c.num_attention_heads, case.metadata.num_tokens // case.calls, width)
    layers = [
        [bench.noise(case.calls, c.num_key_value_heads, n, width) for _ in range(2)] for _ in range(c.num_hidden_layers)
    ]

    def work() -> None:
        with sdpa_kernel(FLASH, set_priority=True) if bench.device.type == "cuda" else nullcontext():
            for keys, values in layers:
                scaled_dot_product_attention(query, keys, values, is_causal=case.causal, enable_gqa=True)

    return work
