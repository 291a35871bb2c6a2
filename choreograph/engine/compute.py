"""Computes a batch: makes the step's plans, hands it to the model, picks tokens. Changes the arena, decides nothing."""

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
from .call import Call
from .sampling import choose
from .scheduler import Batch

if TYPE_CHECKING:
    from torch import Tensor


def compute(batch: Batch, rows: list[int], family: Family, arena: Arena, backend: Backend) -> "Tensor | None":
    """The logits of some rows; None for rows that are computed in some layers only."""
    adapter = family.of(batch.models[0])
    plan, others = _plans(batch, len(arena.keys))
    step = Step(plan, arena.keys, arena.values, adapter.facts.kinds, backend, batch.arrivals, others)
    if batch.layers is None:
        step.kept = arena.inputs
        with _alike(batch, rows, adapter.ranks):
            return adapter.forward(batch.tokens, batch.positions, step, rows, batch.models)
    for first, end in Pattern.of_layers(batch.layers).stretches:
        step.given = {first: _inputs(batch, arena, first)} if first else {}
        adapter.run_layers(first, end, batch.tokens, batch.positions, step, batch.models)
    return None


def pick(logits: "Tensor", calls: list[Call], ranks: Ranks | None) -> list[int | None]:
    """The next token of each call, as `choose`; of several processes, the first one's choice and its probabilities."""
    generations = [call.generation for call in calls if call.generation is not None]
    chosen = choose(logits, generations)
    if ranks is None:
        return chosen
    said = ranks.say("tokens", list(zip(chosen, (g.next_logprob for g in generations), strict=True)))
    for generation, (_, logprob) in zip(generations, said, strict=True):
        generation.next_logprob = logprob
    return [token for token, _ in said]


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
