"""Memory of one cached token by model, in 16-bit numbers (Prompt Cache, Table 2), from the shapes of the models.

`make bench NAME=memory`. The models of the paper, and one of every architecture that is served. The paper counts keys
and values of every query head; models that share key-value heads among query heads keep fewer. `choreograph info
--model ...` says the same of any model that is at hand.
"""

from typing import NamedTuple

from .common import Row, save


class Shape(NamedTuple):
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    paper: float | None = None  # MB per token in Table 2


SHAPES = {
    "Falcon 1B": Shape(24, 32, 32, 64, 0.18),
    "Llama 7B": Shape(32, 32, 32, 128, 0.50),
    "Llama 13B": Shape(40, 40, 40, 128, 0.78),
    "MPT 30B": Shape(48, 64, 64, 112, 1.31),
    "Falcon 40B": Shape(60, 128, 8, 64, 1.87),
    "Llama 70B": Shape(80, 64, 8, 128, 2.5),
    "Falcon 180B": Shape(80, 232, 8, 64, 4.53),
}


FAMILIES = {  # by transformers' `model_type`
    "llama": ("Llama 3 8B", Shape(32, 32, 8, 128)),
    "mistral": ("Mistral 7B", Shape(32, 32, 8, 128)),
    "mixtral": ("Mixtral 8x7B", Shape(32, 32, 8, 128)),
    "qwen2": ("Qwen2.5 7B", Shape(28, 28, 4, 128)),
    "qwen3": ("Qwen3 8B", Shape(36, 32, 8, 128)),
    "qwen3_moe": ("Qwen3 30B-A3B", Shape(48, 32, 4, 128)),
    "phi": ("Phi-2", Shape(32, 32, 32, 80)),
    "phi3": ("Phi-3 mini", Shape(32, 32, 32, 96)),
    "gemma2": ("Gemma 2 9B", Shape(42, 16, 8, 256)),
    "gemma3_text": ("Gemma 3 4B", Shape(34, 8, 4, 256)),
    "olmo2": ("OLMo 2 7B", Shape(32, 32, 32, 128)),
    "granite": ("Granite 3.0 8B", Shape(40, 32, 8, 128)),
    "smollm3": ("SmolLM3 3B", Shape(36, 16, 4, 128)),
    "gpt_neox": ("Pythia 6.9B", Shape(32, 32, 32, 128)),
    "gpt_oss": ("GPT-OSS 20B", Shape(24, 64, 8, 64)),
    "falcon": ("Falcon 7B", Shape(32, 71, 1, 64)),
    "mpt": ("MPT 7B", Shape(32, 32, 32, 128)),
    "bloom": ("BLOOM 7B1", Shape(30, 32, 32, 128)),
    "gpt2": ("GPT-2 124M", Shape(12, 12, 12, 64)),
    "opt": ("OPT 6.7B", Shape(32, 32, 32, 128)),
}


def mebibytes(shape: Shape, heads: int) -> float:
    return 2 * shape.layers * heads * shape.head_dim * 2 / 2**20


def main() -> None:
    rows = []
    shapes = SHAPES | dict(FAMILIES.values())
    for name, shape in shapes.items():
        for label, heads in (
            ("every head, as the paper counts", shape.heads),
            ("as the model keeps them", shape.kv_heads),
        ):
            size = mebibytes(shape, heads)
            peer = None if shape.paper is None else f"paper {shape.paper} MB"
            rows.append(Row(f"{name}: {label}", size, "MiB", size, size, "lower", peer=peer))
    save("memory", rows, "shapes only", shapes={name: shape._asdict() for name, shape in shapes.items()})


if __name__ == "__main__":
    main()
