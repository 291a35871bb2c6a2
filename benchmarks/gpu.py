"""The GPU path in one table, within minutes: decode steps against the bytes that must move, the attention kernels
against SDPA, moved against home placement, first tokens behind cached messages, partial prefill. Not run on a GPU yet.

`make bench NAME=gpu`. Weights are random, in the exact shape of Llama-3.1-8B: times depend on shapes alone. `--tiny`
runs everything once in a small shape, on a CPU through Triton's interpreter (`TRITON_INTERPRET=1`): a trial.

Predicted, for a device that moves B bytes a second: a step reads all weights and each visible key and value once, so it
takes (weights + seen) / B; a moved parent adds a rotation of one query row for each layer and parent, below 1%; the
first token behind cached messages takes a step; a partial prefill takes the share of layers that it computes.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig, LlamaForCausalLM

from choreograph import CacheConfig, Engine, EngineConfig
from choreograph.ops.attend import make_backend
from choreograph.ops.kind import Kind
from choreograph.ops.plan import Plan, Read, make_plan
from choreograph.ops.rope import Rotary

from .common import Row, greedy, in_turns, median_row, ratio_row, save, some_tokens


@dataclass(frozen=True)
class Shape:
    """A model's shape, and how much is measured."""

    name: str
    config: LlamaConfig
    context: int
    cached: int
    rounds: int


ROPE = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPE |= {"original_max_position_embeddings": 8192}
FULL = Shape(
    "shape of Llama-3.1-8B, random weights",
    LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131_072,
        rope_parameters=ROPE,
        tie_word_embeddings=False,
        eos_token_id=None,
    ),
    context=2048,
    cached=5120,
    rounds=12,
)
TINY = Shape(
    "tiny shape, a trial",
    LlamaConfig(
        vocab_size=50_000,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        rope_parameters=ROPE,
        eos_token_id=None,
    ),
    context=64,
    cached=80,
    rounds=1,
)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--tiny", action="store_true")
    shape = TINY if options.parse_args().tiny else FULL
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(shape.config).to(torch.bfloat16)
    config = EngineConfig(cache=CacheConfig(tokens=16 * shape.context), backend="triton")
    engine = Engine.from_pretrained(model, config=config)
    rows = [*steps(engine, shape, bandwidth(device)), *kernels(shape, device), *first_tokens(engine, shape)]
    rows += partial(engine, model, shape)
    if shape is FULL:
        save("gpu", rows, shape.name)
    else:
        print(*rows, sep="\n")


def timed(work: Callable[[], object]) -> float:
    """Seconds until the device has done it."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def bandwidth(device: torch.device) -> float:
    """Bytes a second that a plain copy reads and writes."""
    big = torch.empty(1 << (30 if device.type == "cuda" else 24), dtype=torch.uint8, device=device)
    other = torch.empty_like(big)
    return 2 * len(big) / min(timed(lambda: other.copy_(big)) for _ in range(10))


def steps(engine: Engine, shape: Shape, speed: float) -> list[Row]:
    """Decode steps of one call and of eight over one context, against the bytes that must move."""
    facts, rows = engine.facts, []
    weights = facts.parameters * facts.dtype.itemsize
    for batch in (1, 8):
        with engine.session(seed=0) as session:
            context = session.prefill(some_tokens(shape.context))
            for i in range(batch):
                session.decode([5 + i], [context], sampling=greedy(shape.rounds + 8))
            for _ in range(5):
                engine.step()
            taken = [timed(engine.step) for _ in range(shape.rounds)]
        least = (weights + shape.context * facts.kv_bytes_per_token) / speed
        name = f"decode step, {batch} over {shape.context} tokens"
        rows.append(median_row(name, [t * 1e3 for t in taken], "ms", better="lower"))
        rows.append(
            median_row(f"{name}: share of the bytes' limit", [least / t for t in taken], "", must=0.6, aim=0.85)
        )
    return rows


def kernels(shape: Shape, device: torch.device) -> list[Row]:
    """Attention alone, on contiguous input for SDPA: decode of one, of eight that share, moved, and prefill."""
    c = shape.config
    heads, groups, width = c.num_attention_heads, c.num_key_value_heads, c.hidden_size // c.num_attention_heads
    kind = Kind(Rotary(tuple(5e5 ** (-2 * i / width) for i in range(width // 2))))
    work, n = make_backend("triton", width, torch.bfloat16, device)[0], shape.context
    slots = 9 * n

    def noise(*size: int) -> Tensor:
        return torch.randn(*size, device=device, dtype=torch.bfloat16)

    keys, values = noise(slots, groups, width), noise(slots, groups, width)
    cases: dict[str, tuple[Plan, int, bool]] = {
        "decode of 1": (_decodes(1, n, 0), 1, False),
        "decode of 1, moved": (_decodes(1, n, 3), 1, False),
        "decode of 8 over one context": (_decodes(8, n, 0), 8, False),
        "prefill": (make_plan(list(range(n)), [Read(0, 0, n, 0, 1, 1, 0)], list(range(n))), 1, True),
    }
    rows, taken = [], {}
    for name, (plan, batch, causal) in cases.items():
        q, k, v = noise(heads, plan.rows, width), noise(groups, plan.rows, width), noise(groups, plan.rows, width)
        plain = [noise(batch, h, n, width) for h in (groups, groups)]
        query = noise(batch, heads, plan.rows // batch, width)
        sides = (
            lambda: timed(
                lambda: scaled_dot_product_attention(query, *plain, is_causal=causal, enable_gqa=True)  # noqa: B023
            ),
            lambda: timed(lambda: work(plan, q, k, v, keys, values, width**-0.5, kind)),  # noqa: B023
        )
        in_turns(2, *sides)
        theirs, mine = in_turns(shape.rounds, *sides)
        taken[name] = mine
        rows.append(median_row(f"attention, {name}", [t * 1e6 for t in mine], "us", better="lower"))
        rows.append(ratio_row(f"attention, {name}", theirs, mine, must=0.7, aim=1.0, peer="SDPA"))
    moved = ratio_row("attention, moved over home", taken["decode of 1, moved"], taken["decode of 1"], better="lower")
    return [*rows, moved]


def _decodes(batch: int, context: int, shift: int) -> Plan:
    reads = [Read(0, row, row + 1, shift, context, 0, shift) for row in range(batch)]
    reads += [Read(context + row, row, row + 1, 0, 1, 1, context) for row in range(batch)]
    return make_plan([context + row for row in range(batch)], reads, [context + shift] * batch)


def first_tokens(engine: Engine, shape: Shape) -> list[Row]:
    """Time to the first token behind cached messages, at home, moved, and where all of it is encoded."""
    parts, size = 4, shape.cached // 4
    with engine.session() as session:
        texts = [some_tokens(size, seed=i) for i in range(parts)]
        parents = [session.prefill(text, new_offset=i * size) for i, text in enumerate(texts)]
        engine.drain()
        moved = [(parts - 1 - i) * size for i in range(parts)]

        def first(offsets: list[int] | None) -> float:
            message = session.decode([1, 5], parents, offsets, new_offset=parts * size, sampling=greedy(1))
            return timed(message.result)

        def fresh() -> float:
            with engine.session(mode="naive") as other:
                asked = [other.prefill(text) for text in texts]
                return timed(other.decode([1, 5], asked, sampling=greedy(1)).result)

        sides = (lambda: first(None), lambda: first(moved), fresh)
        in_turns(1, *sides)
        home, away, whole = in_turns(shape.rounds, *sides)
    return [
        median_row(f"first token behind {shape.cached} cached", [t * 1e3 for t in home], "ms", better="lower"),
        ratio_row("the same, every message moved, over home", away, home, better="lower", must=1.05, aim=1.0),
        ratio_row(f"first token: all {shape.cached} encoded, over cached", whole, home, must=8, aim=20),
    ]


def partial(engine: Engine, model: LlamaForCausalLM, shape: Shape) -> list[Row]:
    """Prefill of a context that the base encoded, computed by its twin in a quarter of the layers."""
    layers = engine.facts.layers
    engine.add_model("twin", model)
    engine.share("twin", pattern=[0, layers // 2, layers // 2 + max(1, layers // 4)])

    def side(share: str) -> float:
        engine.clear_cache()
        with engine.session() as session:
            context = session.prefill(some_tokens(shape.cached))
            engine.drain()
            return timed(session.decode([1, 5], [context], model="twin", share=share, sampling=greedy(1)).result)

    sides = (lambda: side("recompute"), lambda: side("partial"))
    in_turns(1, *sides)
    full, some = in_turns(max(1, shape.rounds // 2), *sides)
    return [ratio_row(f"prefill of {shape.cached}: all layers over a quarter", full, some, must=1.7, aim=3)]


if __name__ == "__main__":
    main()
