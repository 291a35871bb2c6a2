"""Rotary facts of a model, and rotation by a *difference* of positions. Knows no slots and no messages.

A key that was rotated to its home position h is read at position h + shift by rotating the query by -shift
(Prompt Choreography, section 2.4, without touching the stored key). Angles are taken in float64, so a shift
of thousands of positions costs no accuracy; a shift of zero is the identity and multiplies by exactly one.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Rotary:
    """inverse_frequencies: one per rotated pair. interleaved: pairs are (0,1),(2,3).. instead of (i, i+half).

    Only the first 2 * len(inverse_frequencies) dimensions of a head turn; an attention factor (YaRN) is
    already in the stored keys and in the query, so a shift never applies it again.
    """

    inverse_frequencies: tuple[float, ...]
    interleaved: bool = False

    @cached_property
    def _inverse(self) -> np.ndarray:
        return np.asarray(self.inverse_frequencies, dtype=np.float64)

    @property
    def half(self) -> int:
        return len(self.inverse_frequencies)

    def table(self, shifts: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """cos and sin of every shift: two float32 arrays of shape (len(shifts), half)."""
        angles = np.asarray(shifts, dtype=np.float64)[:, None] * self._inverse
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def turn(
    x: Float[Tensor, "*B D"], cos: Float[Tensor, "*#B half"], sin: Float[Tensor, "*#B half"], interleaved: bool
) -> Float[Tensor, "*B D"]:
    """Rotates the first 2 * half dimensions of `x` by the angles given, in the type of cos and sin."""
    half = cos.shape[-1]
    rotated, rest = x[..., : 2 * half].to(cos.dtype), x[..., 2 * half :].to(cos.dtype)
    if interleaved:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = rotated[..., :half], rotated[..., half:]
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned
