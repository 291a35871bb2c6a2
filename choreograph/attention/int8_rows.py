"""Keys and values in int8: the stored format, its encoding and decoding.

A row holds a key or value of one token and head: D numbers, rounded to -127 ... 127 steps, and the size of a step as
the four bytes of a float32. Rows are copied like those of any other dtype; only attention decodes them.
"""

import torch
from jaxtyping import Float, Int8
from torch import Tensor

SCALE_BYTES = 4  # of a row, after its D numbers

MAX_STEPS = 127

MIN_MAGNITUDE = 1e-30  # rows of smaller numbers become zeros


# keys or values of all slots, as numbers or encoded: W = D + 4
StoredRows = Float[Tensor, "S G D"] | Int8[Tensor, "S G W"]


def encode(x: Float[Tensor, "*rows D"]) -> Int8[Tensor, "*rows W"]:
    """Round rows to multiples of 1/127 of their largest magnitude, half to even.

    D must be a multiple of 4. The error is at most half a step. A row with infinity or NaN decodes to NaN.
    """
    x = x.float()
    scales = x.abs().amax(-1, keepdim=True).clamp(min=MIN_MAGNITUDE) / MAX_STEPS
    return torch.cat([(x / scales).round().to(torch.int8), scales.view(torch.int8)], dim=-1)


def decode(rows: Int8[Tensor, "*rows W"]) -> Float[Tensor, "*rows D"]:
    """Return the float32 numbers of encoded rows."""
    return rows[..., :-SCALE_BYTES] * rows[..., -SCALE_BYTES:].view(torch.float32)


def to_float(rows: Tensor) -> Tensor:
    """Return stored rows as numbers, decoded if they are int8."""
    return decode(rows) if rows.dtype == torch.int8 else rows
