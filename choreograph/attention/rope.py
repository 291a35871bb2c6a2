"""Rotary embeddings: rotation by a difference of positions.

A key that was rotated to base position b is read at position b + shift by rotating the query by -shift;
the stored key is not modified (Prompt Choreography §2.4). Angles are computed in float64, so a shift of
thousands of positions costs no accuracy. A shift of zero multiplies by exactly one.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Rope:
    """Rotary parameters of a model.

    Only the first 2 * half_dim dimensions of a head are rotated. An attention factor (YaRN) is
    already in the stored keys and in the query, so a shift does not apply it again.
    """

    inv_freq: tuple[float, ...]  # inverse frequencies in radians per token, one per rotated pair
    interleaved: bool = False  # pairs are (0, 1), (2, 3), ... instead of (i, i + half_dim)

    @cached_property
    def _inv_freq64(self) -> np.ndarray:
        return np.asarray(self.inv_freq, dtype=np.float64)

    @property
    def half_dim(self) -> int:
        return len(self.inv_freq)

    def cos_sin(self, shifts: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return cos and sin of every shift, (len(shifts), half_dim) float32 each."""
        angles = np.asarray(shifts, dtype=np.float64)[:, None] * self._inv_freq64
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rotate(
    x: Float[Tensor, "*B D"], cos: Float[Tensor, "*#B half"], sin: Float[Tensor, "*#B half"], interleaved: bool
) -> Float[Tensor, "*B D"]:
    """Rotate the first 2 * half dimensions, in the dtype of `cos`."""
    half = cos.shape[-1]
    rotated, rest = x[..., : 2 * half].to(cos.dtype), x[..., 2 * half :].to(cos.dtype)
    if interleaved:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
        result = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = rotated[..., :half], rotated[..., half:]
        result = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return torch.cat((result, rest), dim=-1) if rest.shape[-1] else result
