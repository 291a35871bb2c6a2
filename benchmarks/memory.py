"""Memory of one cached token by model, in 16-bit numbers (Prompt Cache, Table 2), from the shapes of the models.

`make bench NAME=memory`. The paper counts keys and values of every query head; models that share key-value heads among
query heads keep fewer. `choreograph info --model ...` says the same of any model that is at hand.
"""

from typing import NamedTuple

from .common import Row, save


class Shape(NamedTuple):
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    paper: float  # MB per token in Table 2


SHAPES = {
    "Falcon 1B": Shape(24, 32, 32, 64, 0.18),
    "Llama 7B": Shape(32, 32, 32, 128, 0.50),
    "Llama 13B": Shape(40, 40, 40, 128, 0.78),
    "MPT 30B": Shape(48, 64, 64, 112, 1.31),
    "Falcon 40B": Shape(60, 128, 8, 64, 1.87),
    "Llama 70B": Shape(80, 64, 8, 128, 2.5),
    "Falcon 180B": Shape(80, 232, 8, 64, 4.53),
}


def mebibytes(shape: Shape, heads: int) -> float:
    return 2 * shape.layers * heads * shape.head_dim * 2 / 2**20


def main() -> None:
    rows = []
    for name, shape in SHAPES.items():
        for label, heads in (
            ("every head, as the paper counts", shape.heads),
            ("as the model keeps them", shape.kv_heads),
        ):
            size = mebibytes(shape, heads)
            rows.append(Row(f"{name}: {label}", size, "MiB", size, size, "lower", peer=f"paper {shape.paper} MB"))
    save("memory", rows, "shapes only", shapes={name: shape._asdict() for name, shape in SHAPES.items()})


if __name__ == "__main__":
    main()
