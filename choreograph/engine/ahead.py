"""The step that comes next, worked on while a device computes another one. Owns a guess: that every decode goes on.

Once a step is on its way, the next one is planned. Where small steps are graphs it is begun as well, behind the first
and on the tokens that this chooses, before the host has seen them: the device need not wait for Python. What was begun
is taken for the calls that did go on. Those that ended lose nothing by it: the slots that were written are their own.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..kv.encoding import Sight
from ..models.family import Family
from ..ops.attend import Step
from ..ops.crossing import sent
from .call import Call, State
from .sampling import Choice
from .scheduler import Batch, Take

if TYPE_CHECKING:
    from torch import Tensor


class Ahead:
    """At most one step is foreseen, and at most one is begun: the one that was foreseen."""

    def __init__(self, family: Family, make_step: Callable[[Batch], Step]) -> None:
        self._family, self._make_step = family, make_step
        self._foreseen: _Foreseen | None = None
        self._begun: _Begun | None = None
        self._good: list[Take] = []  # the rows of what was begun that are wanted
        self._computed: _Foreseen | None = None  # the step that is being computed, if it was foreseen

    def foresee(self, batch: Batch) -> None:
        """Plans the step behind a batch as it is if every call that has a token chosen goes on, and nobody else."""
        computed, self._computed = self._computed, None
        calls = [call for call, _ in batch.samples]
        if not calls or any(take.call.beginning is not None for take in batch.takes):
            return
        coming = Batch(tokens=[0] * len(calls), models=[call.model for call in calls])
        for row, call in enumerate(calls):
            token = len(call.work.tokens)
            if token >= len(call.work.pages) * call.work.page_size:
                return
            coming.positions.append(call.work.start + token)
            coming.slots.append(call.work.slot(token))
            coming.takes.append(Take(call, row, token, token + 1))
        sights = [call.sights for call in calls]
        goes_on = computed is not None and computed.goes_on(coming, sights)
        step = computed.step.advanced() if computed is not None and goes_on else self._make_step(coming)
        step.arrivals = batch.arrivals
        self._family.of(coming.models[0]).prepare(step)
        self._foreseen = _Foreseen(coming, sights, step)

    def step_of(self, batch: Batch) -> Step | None:
        """The plan of a batch, where it is what was foreseen."""
        foreseen, self._foreseen = self._foreseen, None
        if foreseen is None or not foreseen.is_of(batch):
            return None
        self._computed = foreseen
        return replace(foreseen.step, arrivals=batch.arrivals)

    def begin(self, choice: Choice, running: Sequence[Call]) -> None:
        """Lets the device go on with what was foreseen, unless somebody else has something to compute then, or a call
        is sure to end."""
        if self._foreseen is None:
            return
        batch, _, step = self._foreseen
        mine = {take.call.id for take in batch.takes}
        others = any(call.work.scheduled < len(call.work.tokens) for call in running if call.id not in mine)
        if others or step.arrivals or any(take.call.ends_next for take in batch.takes):
            return
        adapter = self._family.of(batch.models[0])
        logits = adapter.begin(choice.tokens.clamp(min=0), batch.positions, step, batch.models)
        if logits is not None:
            self._begun = _Begun(self._foreseen, choice, logits)

    def wanted(self) -> list[Call]:
        """The calls whose rows of the step that was begun are what they compute next."""
        self._good = self._begun.good if self._begun is not None else []
        return [take.call for take in self._good]

    def logits_of(self, batch: Batch) -> "Tensor | None":
        """What was begun, where a batch is of nothing else; it is given once."""
        begun, self._begun = self._begun, None
        if begun is None or not batch.takes:
            return None
        known = {take.call.id: take.row0 for take in self._good}
        rows = [known.get(take.call.id) for take in batch.takes]
        if None in rows:
            return None
        self._foreseen = None
        if rows == list(range(len(begun.logits))):
            self._computed = begun.foreseen
            return begun.logits
        return begun.logits[sent(rows, torch.long, begun.logits.device)]


class _Foreseen(NamedTuple):
    """A step that was planned. sights: what each of its calls saw then."""

    batch: Batch
    sights: list[tuple[Sight, ...]]
    step: Step

    def is_of(self, batch: Batch) -> bool:
        """Whether it is the step of a batch: the same rows of the same calls, which see the same."""
        mine = self.batch
        return (mine.takes, mine.slots, mine.positions) == (batch.takes, batch.slots, batch.positions) and all(
            old is take.call.sights for old, take in zip(self.sights, batch.takes, strict=True)
        )

    def goes_on(self, batch: Batch, sights: list[tuple[Sight, ...]]) -> bool:
        """Whether a batch is the same calls one token later, each in the slot behind."""
        mine = self.batch
        return (
            len(batch.takes) == len(mine.takes)
            and all(new.call is old.call for new, old in zip(batch.takes, mine.takes, strict=True))
            and all(new is old for new, old in zip(sights, self.sights, strict=True))
            and batch.slots == [slot + 1 for slot in mine.slots]
        )


class _Begun(NamedTuple):
    """A step that a device computes. choice: gave its tokens."""

    foreseen: _Foreseen
    choice: Choice
    logits: "Tensor"

    @property
    def good(self) -> list[Take]:
        """Its rows that are what their calls need: the next token of a decode that went on as foreseen."""
        batch, sights, _ = self.foreseen
        rows = zip(batch.takes, sights, batch.slots, batch.positions, self.choice.told, strict=False)
        return [row[0] for row in rows if _is_next(*row)]


def _is_next(take: Take, sights: tuple[Sight, ...], slot: int, position: int, token: int) -> bool:
    call, _, at, _ = take
    if call.state is not State.RUNNING or call.abandoned or call.sights is not sights:
        return False
    work = call.work
    place = work.encoded == at and work.slot(at) == slot and work.start + at == position
    return place and work.tokens[at:] == [token]
