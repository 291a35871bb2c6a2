"""What weight-only quantisation costs: mean log-loss of ordinary text, and the time of a step, against float32 weights.

The text is this repository's own: its documents and licence, in pieces of 512 tokens. `--model` takes other models.
"""

import argparse
import time
from pathlib import Path

import torch

from choreograph import CacheConfig, Engine, EngineConfig
from choreograph.models.loader import DEFAULT_MODEL

from .common import last_result, median_row, row_from_record, save

ROOT = Path(__file__).parents[1]
TEXTS = ("README.md", "docs/concepts.md", "docs/architecture.md", "docs/results.md", "LICENSE")
VARIANTS = {
    "float32": ("float32", None),
    "bfloat16": ("bfloat16", None),
    "int4 weights": ("bfloat16", "int4"),
}


@torch.no_grad()
def losses(engine: Engine, pieces: list[list[int]]) -> list[float]:
    model, result = engine.core.hf_model.model, []
    for piece in pieces:
        ids = torch.tensor([piece])
        logits = model(ids, use_cache=False).logits[0, :-1].float()
        result.append(float(torch.nn.functional.cross_entropy(logits, ids[0, 1:])))
    return result


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
    options.add_argument("--model", default=DEFAULT_MODEL)
    options.add_argument("--pieces", type=int, default=24, help="how many pieces of text")
    given = options.parse_args()
    text = "\n\n".join((ROOT / name).read_text() for name in TEXTS)
    result, times, name, pieces = {}, {}, "", []
    for way, (dtype, quantization) in VARIANTS.items():
        config = EngineConfig(cache=CacheConfig(capacity=2048), quantization=quantization)
        engine = Engine.from_pretrained(given.model, dtype=dtype, config=config)
        if not pieces:
            name, ids = engine.model_info.name, engine.tokenizer(text)["input_ids"]
            pieces = [ids[i : i + 512] for i in range(0, len(ids) - 511, 512)][: given.pieces]
        result[way] = losses(engine, pieces)
        times[way] = step_times(engine, pieces[0])
    rows = [
        median_row(f"{name}: log-loss per token, {way}", some, "nats", better="lower") for way, some in result.items()
    ]
    for way in list(VARIANTS)[1:]:
        extra = [a - b for a, b in zip(result[way], result["float32"], strict=True)]
        rows.append(median_row(f"{name}: added log-loss, {way}", extra, "nats", better="lower", peer="float32"))
    rows += [median_row(f"{name}: a decode step, {way}", some, "ms", better="lower") for way, some in times.items()]
    before = [
        row_from_record(row)
        for row in last_result("quantization").get("rows", [])
        if not row["measure"].startswith(f"{name}:")
    ]
    save("quantization", [*before, *rows], name)


if __name__ == "__main__":
    main()
