"""What a decode sees under reuse, token by token, beside the same tokens in its own whole prompt. Computes nothing."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .calls import TracedCall, decodes_of
from .packed import Pack


@dataclass(frozen=True)
class Sight:
    """One decode. rows: where what it sees stands in the pass under reuse; homes: in that of whole prompts; places: the
    positions that it is seen at; stages: who wrote it."""

    call: TracedCall
    rows: list[int]
    homes: list[int]
    places: list[int]
    stages: list[str]


def sights_of(calls: Sequence[TracedCall], reused: Pack, prompts: Sequence[TracedCall], whole: Pack) -> Iterator[Sight]:
    """The decodes in the order of their logits. reused, whole: the calls, and the prompts, in one sequence each."""
    homes = homes_of(prompts, whole)
    for name, call in decodes_of(calls):
        rows = [reused.spans[s.call].lo + k for s in call.parents for k in range(s.first, s.last)]
        places = [s.offset + k - s.first for s in call.parents for k in range(s.first, s.last)]
        stages = [calls[s.call].stage for s in call.parents for _ in range(s.first, s.last)]
        home = homes[name][: len(rows)]
        assert [reused.tokens[r] for r in rows] == [whole.tokens[r] for r in home], f"{name}: another prompt"
        yield Sight(call, rows, home, places, stages)


def homes_of(prompts: Sequence[TracedCall], whole: Pack) -> dict[tuple[str, int], list[int]]:
    """Where the tokens of each decode, its prompt and what it says, stand in the pass of whole prompts."""
    return {
        name: [*(r for run in span.sees for r in range(run.lo, run.hi)), *range(span.lo, span.hi)]
        for (name, _), span in zip(decodes_of(prompts), whole.spans, strict=True)
    }
