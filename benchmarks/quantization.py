"""What weight-only quantisation costs: mean log-loss of ordinary text, and the time of a step, against float32 weights.

The text is this repository's own: its documents and licence, in pieces of 512 tokens. `--model` takes other models.
"""

import argparse
import time
from pathlib import Path

import torch

from choreograph import CacheConfig, Engine, EngineConfig
from choreograph.models.load import EMBEDDED

from .common import Row, last, median_row, save

ROOT = Path(__file__).parents[1]
TEXTS = ("README.md", "docs/concepts.md", "docs/architecture.md", "docs/results.md", "LICENSE")
WAYS = {
    "float32": ("float32", None),
    "bfloat16": ("bfloat16", None),
    "int8 weights": ("bfloat16", "int8"),
    "int4 weights": ("bfloat16", "int4"),
}


@torch.no_grad()
def losses(engine: Engine, pieces: list[list[int]]) -> list[float]:
    model, found = engine.runner.adapter.model, []
    for piece in pieces:
        ids = torch.tensor([piece])
        logits = model(ids, use_cache=False).logits[0, :-1].float()
        found.append(float(torch.nn.functional.cross_entropy(logits, ids[0, 1:])))
    return found


def step_times(engine: Engine, prompt: list[int], steps: int = 20) -> list[float]:
    """Milliseconds of every decode step behind a prompt, the first two not counted."""
    times: list[float] = []
    with engine.session() as session:
        message = session.decode(prompt, forced_tokens=prompt[: steps + 2])
        engine.step()
        for _ in range(steps + 1):
            began = time.perf_counter()
            engine.step()
            times.append((time.perf_counter() - began) * 1e3)
        message.result()
    return times[1:]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--model", default=EMBEDDED)
    options.add_argument("--pieces", type=int, default=24, help="how many pieces of text")
    given = options.parse_args()
    text = "\n\n".join((ROOT / name).read_text() for name in TEXTS)
    found, times, name, pieces = {}, {}, "", []
    for way, (dtype, quantization) in WAYS.items():
        config = EngineConfig(cache=CacheConfig(tokens=2048), quantization=quantization)
        engine = Engine.from_pretrained(given.model, dtype=dtype, config=config)
        if not pieces:
            name, ids = engine.facts.name, engine.tokenizer(text)["input_ids"]
            pieces = [ids[i : i + 512] for i in range(0, len(ids) - 511, 512)][: given.pieces]
        found[way] = losses(engine, pieces)
        times[way] = step_times(engine, pieces[0])
    rows = [
        median_row(f"{name}: log-loss per token, {way}", some, "nats", better="lower") for way, some in found.items()
    ]
    for way in list(WAYS)[1:]:
        extra = [a - b for a, b in zip(found[way], found["float32"], strict=True)]
        rows.append(median_row(f"{name}: added log-loss, {way}", extra, "nats", better="lower", peer="float32"))
    rows += [median_row(f"{name}: a decode step, {way}", some, "ms", better="lower") for way, some in times.items()]
    before = [Row(**row) for row in last("quantization").get("rows", []) if not row["measure"].startswith(f"{name}:")]
    save("quantization", [*before, *rows], name)


if __name__ == "__main__":
    main()
