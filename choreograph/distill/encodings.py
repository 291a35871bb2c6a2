"""How far encodings that are reused are from what readers would have without reuse: something to learn that is not the
texts' alone.

Under reuse a message has one encoding for all who see it; without, it has another one in the prompt of every reader.
The best that one encoding can be is their mean. Where a little is lost here and there, traces agree on next to nothing
in what was said with which probability, and fairly well on that: every layer of every token that is seen has its say.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..models.adapter import Adapter
from ..onepass.calls import TracedCall, as_prompts
from ..onepass.packed import Encoding, KeysValues, encoded, pack
from ..onepass.sights import sights_of
from ..ops.kind import Kind
from ..ops.rope import turn


@dataclass(frozen=True)
class Wanted:
    """rows: of a lesson's pass, those that are seen; layers: their keys, turned to where they stand, and values, as the
    mean over the decodes that see them, each with its whole prompt."""

    rows: Int[Tensor, "R"]
    layers: list[KeysValues]  # (G, R, D) each


@torch.no_grad()
def wanted_of(adapter: Adapter, calls: Sequence[TracedCall], behind: int = 0) -> Wanted:
    """By the base model, whatever is being trained. behind: rows that the pass has before its own. To be called inside
    `adapter.hooked()`."""
    reused, prompts = pack(calls), as_prompts(calls)
    whole = pack(prompts)
    pairs = [
        (row, home)
        for sight in sights_of(calls, reused, prompts, whole)
        for row, home in zip(sight.rows, sight.homes, strict=True)
        if row >= behind
    ]
    if not pairs:
        return Wanted(torch.zeros(0, dtype=torch.long), [])
    made, kinds = encoded(adapter, whole), adapter.facts.kinds
    shifts = [reused.positions[row] - whole.positions[home] for row, home in pairs]
    seen, homes = torch.tensor(pairs, device=adapter.facts.device).unbind(1)
    rows, of = seen.unique(return_inverse=True)
    return Wanted(
        rows - behind,
        [
            (_mean(_turned(keys[0, :, homes], shifts, kinds[layer]), of), _mean(values[0, :, homes], of))
            for layer, (keys, values) in sorted(made.items())
        ],
    )


def apart(made: Encoding, wanted: Wanted) -> Tensor:
    """The square of the difference over that of what is wanted: the mean over keys and values of all layers."""
    found = [
        (some[0, :, wanted.rows].float() - other).square().sum() / other.square().sum()
        for layer, both in enumerate(wanted.layers)
        for some, other in zip(made[layer], both, strict=True)
    ]
    return torch.stack(found).mean() if found else torch.zeros(())


def _turned(keys: Float[Tensor, "G P D"], shifts: Sequence[int], kind: Kind) -> Float[Tensor, "G P D"]:
    if kind.rotary is None:
        return keys
    cos, sin = (torch.from_numpy(table).to(keys.device) for table in kind.rotary.table(list(shifts)))
    return turn(keys, cos, sin, kind.rotary.interleaved)


def _mean(seen: Float[Tensor, "G P D"], of: Int[Tensor, "P"]) -> Float[Tensor, "G R D"]:
    """Over those that are of one row."""
    count = of.bincount()
    total = torch.zeros(seen.shape[0], len(count), seen.shape[2], device=seen.device)
    return total.index_add_(1, of, seen.float()) / count[:, None]
