"""Steps whose memory stays where it is, so that a graph of kernels can be recorded once and played for every step.

A `Fixed` step stands in for steps of one number of rows, of works up to one size. What differs from step to step
(slots, work, turns) is sent into its tensors before the graph is played; the host is asked nothing while it plays.
"""

from collections.abc import Sequence
from typing import Any
from weakref import ref

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from . import triton
from .attend import Step
from .crossing import Sent
from .kind import Kind
from .plan import Plan
from .tiles import Arrays

SIZES = 4  # of works that graphs are made for; each has room for four times as much as the one before
ITEMS, PIECES, READS, PARTIALS, SHIFTS = 64, 256, 1024, 256, 64  # of the smallest


def size_of(made: Sequence[Arrays], plans: Sequence[Plan]) -> int | None:
    """The smallest size with room for all of these; None where no graph is made for so much."""
    most = max(len(plan.shifts) / SHIFTS for plan in plans)
    for one in made:
        shares = (len(one.items) / ITEMS, len(one.pieces) / PIECES, len(one.reads) / READS, len(one.rows) / PARTIALS)
        most = max(most, *shares)
    return next((size for size in range(SIZES) if most <= 4**size), None)


class Board:
    """The work of all layers of a kind that see alike, at addresses that stay."""

    def __init__(self, kind: Kind, rows: int, tile: int, size: int, device: torch.device) -> None:
        room = 4**size
        counts = {
            "items": (ITEMS * room, 4),
            "pieces": (PIECES * room, 4),
            "reads": (READS * room, 3),
            "rows": (PARTIALS * room, 2),
            "order": (PARTIALS * room,),
            "starts": (rows + 1,),
        }
        half = kind.rotary.half if kind.rotary is not None else 0
        self._numbers = Sent(sum(int(np.prod(shape)) for shape in counts.values()), torch.int32, device)
        self._turns = Sent(2 * SHIFTS * room * half, torch.float32, device)
        self._kind, self._parts, views, at = kind, {}, [], 0
        for name, shape in counts.items():
            size = int(np.prod(shape))
            self._parts[name] = self._numbers.host[at : at + size].reshape(shape)
            views.append(self._numbers.there[at : at + size].view(shape))
            at += size
        cos, sin = self._turns.there.view(2, SHIFTS * room, half)
        self._tables = self._turns.host.reshape(2, SHIFTS * room, half)
        slopes = torch.from_numpy(triton.slopes_of(kind)).to(device)
        items, pieces, reads, rows_, order, starts = views
        self.work = triton.Work(items, pieces, reads, rows_, order, starts, cos, sin, slopes, tile, direct=False)

    def fill(self, made: Arrays, plan: Plan) -> None:
        self._numbers.wait()
        self._parts["items"][:] = 0  # an item of no rows does nothing
        for name, part in self._parts.items():
            given = getattr(made, name)
            part[: len(given)] = given
        self._numbers.send()
        turns = plan.turns(self._kind.rotary)
        self._turns.wait()
        for table, given in zip(self._tables, turns, strict=True):
            table[: len(given)] = given
        self._turns.send()


class Fixed:
    """Travels through a model in a step's place. which: of every layer, its board. It does not keep the arena's
    tensors: one that gives way to a larger one has to go at once."""

    def __init__(self, like: Step, rows: int, boards: Sequence[Board], which: Sequence[int], device: torch.device):
        self._arena = [(ref(keys), ref(values)) for keys, values in zip(like.keys, like.values, strict=True)]
        self._kinds, self.boards, self._which = like.kinds, boards, which
        self._inputs = Sent(3 * rows, torch.int64, device)
        ids, positions, self._slots = self._inputs.there.view(3, rows)
        self.ids, self.positions = ids[None], positions[None]

    def same_arena(self, step: Step) -> bool:
        """Whether a step's keys lie where this one's do."""
        return all(keys() is new for (keys, _), new in zip(self._arena, step.keys, strict=True))

    def fill(self, tokens: Sequence[int], positions: Sequence[int], plan: Plan) -> None:
        self._inputs.wait()
        sides: tuple[Any, ...] = (tokens, positions, plan.slots)
        for row, given in zip(self._inputs.host.reshape(3, -1), sides, strict=True):
            row[:] = 0
            row[: len(given)] = given
        self._inputs.send()

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "1 H N D"],
        key: Float[Tensor, "1 G N D"],
        value: Float[Tensor, "1 G N D"],
        scale: float,
        sinks: Float[Tensor, "H"] | None = None,
    ) -> Float[Tensor, "1 N H D"]:
        (keys, values), work = (there() for there in self._arena[layer]), self.boards[self._which[layer]].work
        assert keys is not None and values is not None
        triton.write(self._slots, key[0], value[0], keys, values)
        return triton.run(work, query[0], keys, values, scale, self._kinds[layer], sinks)[None]


def layers_by_board(step: Step) -> tuple[list[tuple[Plan, Kind]], tuple[int, ...]]:
    """The plans and kinds that the layers of a step have, and which of them each layer has."""
    known: dict[tuple[int, int], int] = {}
    pairs: list[tuple[Plan, Kind]] = []
    which = []
    for layer, kind in enumerate(step.kinds):
        plan = step.others.get(layer, step.plan)
        place = known.setdefault((id(plan), id(kind)), len(known))
        if place == len(pairs):
            pairs.append((plan, kind))
        which.append(place)
    return pairs, tuple(which)
