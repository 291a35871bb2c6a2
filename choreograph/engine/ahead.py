"""The step that comes next, worked on while a device computes another one. Owns a guess: that every decode goes on.

Once a step is on its way, the next one is planned. Where small steps are graphs it is begun as well, behind the first
and on the tokens that this chooses, before the host has seen them: the device need not wait for Python. What was begun
is taken for the calls that did go on. The rows of those that ended write into slots that were theirs when it was begun;
whoever is given these slots since writes behind it, on the same stream.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

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
        self._full = False  # memory did not hold the results of two steps
        self.forget()

    def forget(self) -> None:
        self._foreseen: _Foreseen | None = None
        self._begun: _Begun | None = None
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

    def begin(self, choice: Choice) -> None:
        """Lets the device go on with what was foreseen, unless a call is sure to end, or likely to take another token
        than the device's."""
        if self._foreseen is None or self._full:
            return
        batch, _, step = self._foreseen
        calls = [take.call for take in batch.takes]
        if any(c.ends_next or (c.generation and c.generation.host_chooses) for c in calls):
            return
        try:
            tokens = choice.tokens.clamp(min=0)
            logits = self._family.of(batch.models[0]).begin(tokens, batch.positions, step, batch.models)
        except torch.OutOfMemoryError:
            self._full = True
            warnings.warn("no memory for the results of two steps: none is begun ahead any more", stacklevel=2)
            return
        if logits is not None:
            self._begun = _Begun(self._foreseen, choice, logits, _event(logits.device))

    def wanted(self) -> list[Call]:
        """The calls whose rows of the step that was begun are what they compute next."""
        if self._begun is None:
            return []
        if self._begun.event is not None:  # where another stream is used now
            torch.cuda.current_stream(self._begun.logits.device).wait_event(self._begun.event)
        good = self._begun.good
        self._begun = self._begun._replace(rows={take.call.id: take.row0 for take in good}) if good else None
        return [take.call for take in good]

    def logits_of(self, batch: Batch) -> "Tensor | None":
        """What was begun, where a batch is of calls that `wanted` it alone; it is given once."""
        begun, self._begun, self._computed = self._begun, None, None
        if begun is None or not batch.takes:
            return None
        rows = [begun.rows.get(take.call.id) for take in batch.takes]
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
    """A step that a device computes. choice: gave its tokens. event: the device has done it. rows: by the calls that
    want them, once that is known."""

    foreseen: _Foreseen
    choice: Choice
    logits: "Tensor"
    event: Any
    rows: Mapping[int, int] = MappingProxyType({})

    @property
    def good(self) -> list[Take]:
        """Its rows that are what their calls need: the next token of a decode that went on as foreseen."""
        if not self.choice.told:  # whoever read it was interrupted
            return []
        return [take for i, take in enumerate(self.foreseen.batch.takes) if self._is_next(i, take.call)]

    def _is_next(self, i: int, call: Call) -> bool:
        batch, sights, _ = self.foreseen
        if call.state is not State.RUNNING or call.abandoned or call.sights is not sights[i]:
            return False
        work, at = call.work, batch.takes[i].token0
        there = work.encoded == at and work.slot(at) == batch.slots[i] and work.start + at == batch.positions[i]
        return there and work.tokens[at:] == [self.choice.told[i]]


def _event(device: torch.device) -> Any:
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
