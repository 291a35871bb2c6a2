"""What weight-only int8 costs in quality: mean log-loss of ordinary text, against bfloat16 and float32.

The text is this repository's own: its documents and licence, in pieces of 512 tokens.
"""

from pathlib import Path

import torch
from transformers import PreTrainedModel

from choreograph import Engine, EngineConfig

from .common import median_row, save

ROOT = Path(__file__).parents[1]


@torch.no_grad()
def losses(model: PreTrainedModel, pieces: list[list[int]]) -> list[float]:
    found = []
    for piece in pieces:
        ids = torch.tensor([piece])
        logits = model(ids, use_cache=False).logits[0, :-1].float()
        found.append(float(torch.nn.functional.cross_entropy(logits, ids[0, 1:])))
    return found


def main() -> None:
    exact = Engine.from_pretrained(dtype="float32")
    text = "\n\n".join(
        (ROOT / name).read_text() for name in ("README.md", "docs/concepts.md", "docs/architecture.md", "LICENSE")
    )
    ids = exact.tokenizer(text)["input_ids"]
    pieces = [ids[i : i + 512] for i in range(0, len(ids) - 511, 512)]
    models = {
        "float32": exact,
        "bfloat16": Engine.from_pretrained(),
        "int8 weights": Engine.from_pretrained(config=EngineConfig(quantization="int8")),
    }
    found = {name: losses(e.runner.adapter.model, pieces) for name, e in models.items()}
    rows = [median_row(f"log-loss per token, {name}", some, "nats", better="lower") for name, some in found.items()]
    for name in ("bfloat16", "int8 weights"):
        extra = [a - b for a, b in zip(found[name], found["float32"], strict=True)]
        rows.append(median_row(f"{name}: added log-loss", extra, "nats", better="lower", peer="float32"))
    save("int8", rows)


if __name__ == "__main__":
    main()
