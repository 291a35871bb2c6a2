"""Computes a batch: plans it, ahead where it can, hands it to the model, picks tokens. Decides nothing else."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..kv.arena import Arena
from ..kv.view import layers_alike
from ..models.family import Family
from ..models.parallel import Ranks
from ..ops.attend import Backend, Step
from ..ops.plan import Plan, make_plan
from ..pattern import Pattern
from ..types import TokenLogprob
from .ahead import Ahead
from .call import Call
from .sampling import choose
from .scheduler import Batch

if TYPE_CHECKING:
    from torch import Tensor


class Computer:
    """goes_ahead: while a device computes a step, the next one is worked on."""

    def __init__(self, family: Family, arena: Arena, backend: Backend) -> None:
        self.goes_ahead = arena.keys[0].device.type == "cuda"
        self._family, self._arena = family, arena
        self.backend = backend
        self._ahead = Ahead(family, self._make_step)

    def wanted(self) -> list[Call]:
        """Calls whose next row is being computed already; a batch of these alone costs no more."""
        return self._ahead.wanted()

    def forget(self) -> None:
        """Nothing runs: lets go of what was begun."""
        self._ahead.forget()

    def __call__(self, batch: Batch, rows: list[int]) -> "Tensor | None":
        """The logits of some rows; None for rows that are computed in some layers only."""
        logits = self._ahead.logits_of(batch)
        if logits is not None:
            self._ahead.foresee(batch)
            return logits
        adapter = self._family.of(batch.models[0])
        step = self._ahead.step_of(batch) or self._make_step(batch)
        if batch.layers is None:
            with _alike(batch, rows, adapter.ranks):
                logits = adapter.forward(batch.tokens, batch.positions, step, rows, batch.models)
            if self.goes_ahead:
                self._ahead.foresee(batch)
            return logits
        for first, end in Pattern.of_layers(batch.layers).stretches:
            step.given = {first: _inputs(batch, self._arena, first)} if first else {}
            adapter.run_layers(first, end, batch.tokens, batch.positions, step, batch.models)
        return None

    def pick(self, logits: "Tensor", calls: list[Call], *, go_on: bool) -> list[int | None]:
        """The next token of each call; of several processes, the first one's choice and its probabilities. go_on:
        whether nobody else could compute now."""
        generations = [call.generation for call in calls if call.generation is not None]
        choice = choose(logits, generations)
        if go_on:
            self._ahead.begin(choice)
        chosen, ranks = choice.read(), self._family.of(calls[0].model).ranks
        if ranks is None:
            return chosen
        behind = [g.next_logprob and [g.next_logprob.logprob, list(g.next_logprob.top.items())] for g in generations]
        said = ranks.say("tokens", [chosen, behind])
        for generation, token, given in zip(generations, *said, strict=True):
            generation.next_logprob = given and TokenLogprob(token, given[0], dict(map(tuple, given[1])))
        tokens: list[int | None] = said[0]
        return tokens

    def _make_step(self, batch: Batch) -> Step:
        arena, facts = self._arena, self._family.of(batch.models[0]).facts
        plan, others = _plans(batch, len(arena.keys))
        kept = {}
        if batch.layers is None and arena.inputs:
            kept = {layer: arena.inputs[layer] for layer in self._family.keeps(batch.models[0], arena.inputs)}
        return Step(plan, arena.keys, arena.values, facts.kinds, self.backend, batch.arrivals, others, kept)


@contextmanager
def _alike(batch: Batch, rows: list[int], ranks: Ranks | None) -> Iterator[None]:
    """Of several processes, computes only what is the same in all of them."""
    if ranks is None:
        yield
        return
    for arrive in batch.arrivals:  # what could not be loaded is known, and taken back, before anybody computes
        arrive(0)
    with ranks.step((batch.tokens, batch.positions, batch.slots, rows, list(batch.reads()))):
        yield


def _plans(batch: Batch, layers: int) -> tuple[Plan, dict[int, Plan]]:
    """The plan of most steps, or of layer 0; and those of the layers where the rows see something else."""
    first, *more = layers_alike(batch.sights, layers)
    others: dict[int, Plan] = {}
    for alike in more:
        plan = make_plan(batch.slots, batch.reads(alike[0]), batch.positions)
        others |= dict.fromkeys(alike, plan)
    return make_plan(batch.slots, batch.reads(first[0]), batch.positions), others


def _inputs(batch: Batch, arena: Arena, layer: int) -> "Tensor":
    """What came into a layer where the rows' tokens were computed first: (1, N, E)."""
    for arrive in batch.arrivals:
        arrive(layer)
    slots = []
    for take in batch.takes:
        lender = take.call.work.lender
        assert lender is not None and layer in lender.inputs
        slots += [lender.slot(token) for token in range(take.token0, take.token1)]
    return arena.inputs[layer][slots][None]
