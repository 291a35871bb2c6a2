"""How much of what reuse loses a linear correction of the encodings undoes: what of it is systematic.

`make bench NAME=correction ARGS="--model model.gguf --only name"`: for a plan of `benchmarks/distill.py`, which has
drawn the traces. The keys and values that a decode sees under reuse stand beside those of the same tokens in its own
prompt. On some traces a linear map is fitted, by least squares, from what a layer reads there to how both differ; on
others the decodes are computed behind corrected encodings. The map of a stage is of full rank and leaves what a
message's own writer sees as it was, neither of which an adapter can do: it encodes a message once, for all its readers.

What that alone costs is measured beside it: every token gets one encoding, the mean of what it is in the baseline's
prompts of all decodes that see it, which takes knowing all of them.

Where readers have texts of their own (PRIVATE), the best that anybody can do who has not seen these is measured too:
what others said is encoded as the mean over prompts of the same reader in which such texts are those of other traces.
And so is the best of what a message can be that has one encoding for all: the mean of that over all who see it.

`--learn 0` measures these alone.
"""

import argparse
import random
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from choreograph import Engine
from choreograph.choreographies import find
from choreograph.distill import Trace, lessons_of
from choreograph.distill.traces import read_traces
from choreograph.evaluation.statistics import mean
from choreograph.models.adapter import Adapter
from choreograph.onepass.calls import TracedCall, as_prompts, decodes_of
from choreograph.onepass.packed import Pack, PackedStep, Run, Span, pack
from choreograph.onepass.sights import Sight, homes_of, sights_of
from choreograph.ops.rope import turn
from choreograph.types import SamplingParams

from .common import estimate_row, last, merged, provenance, save
from .distill import PLANS, Plan, closed, opened

RIDGES = (0.01, 0.03, 0.1, 0.3, 1.0)  # of the mean square of each number that a layer reads
PRIVATE = {"prisoners_dilemma": ("Alice plans", "Bob plans")}  # what one player alone sees, and another in every game
SAME = 1e-3  # keys and values that differ by less, of their length, are those that the baseline sees


@dataclass(frozen=True)
class Encoded:
    """One pass: what every layer read, and the keys (not turned) and values side by side; (L, N, *) both."""

    read: Tensor
    made: Tensor
    logits: Tensor


class Correction:
    """The sums of least squares, stage by stage of who wrote what is seen; all layers at once."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Tensor, Tensor]] = {}
        self._maps: dict[tuple[str, float], Tensor] = {}

    def add(self, stage: str, read: Tensor, apart: Tensor) -> None:
        x = _with_one(read)
        new = ((x.mT @ x).double(), (x.mT @ apart).double())
        old = self._sums.get(stage)
        self._sums[stage] = new if old is None else (old[0] + new[0], old[1] + new[1])

    def of(self, stage: str, ridge: float, read: Tensor) -> Tensor:
        """How the keys and values differ, as far as can be told. A stage never met is left as it is."""
        if stage not in self._sums:
            return torch.zeros(())
        if (stage, ridge) not in self._maps:
            squares, products = self._sums[stage]
            weight = ridge * squares.diagonal(dim1=-2, dim2=-1) + 1e-6
            weight[:, -1] = 0  # the mean is not held back
            self._maps[stage, ridge] = torch.linalg.solve(squares + torch.diag_embed(weight), products).float()
        return _with_one(read) @ self._maps[stage, ridge]


def _with_one(read: Tensor) -> Tensor:
    return torch.cat([read, torch.ones(*read.shape[:-1], 1)], dim=-1)


class Undoing:
    """The decodes of traces, behind encodings as they are under reuse, on the baseline, or corrected."""

    def __init__(self, engine: Engine) -> None:
        self._adapter = engine.runner.adapter

    def learn(self, plan: Plan, traces: Sequence[Trace], correction: Correction) -> None:
        for number, (reused, baseline, sights) in enumerate(self._passes(plan, traces), start=1):
            pairs: dict[tuple[int, int], str] = {}  # readers whose prompts share a beginning see the same
            for sight in sights:
                pairs |= {(r, h): s for r, h, s in zip(sight.rows, sight.homes, sight.stages, strict=True)}
            stages: dict[str, list[tuple[int, int]]] = defaultdict(list)
            for pair, stage in pairs.items():
                stages[stage].append(pair)
            for stage, some in stages.items():
                rows, home = torch.tensor(some).unbind(1)
                apart = baseline.made[:, home] - reused.made[:, rows]
                differs = _differs(apart, reused.made[:, rows])
                if differs.any():
                    correction.add(stage, reused.read[:, rows[differs]], apart[:, differs])
            if number % 10 == 0:
                print(f"... learned from {number} of {len(traces)}", flush=True)

    def measure(
        self, plan: Plan, traces: Sequence[Trace], correction: Correction, ridges: Sequence[float], others: int = 0
    ) -> dict[str, list[float]]:
        """The divergence of each trace from the baseline, a token: under reuse, on the baseline, with one encoding for
        all who see it, for each ridge, and as expected by whoever knows the private texts of `others` other traces, for
        each who sees it and for all."""
        found: dict[str, list[float]] = defaultdict(list)
        draw, private = random.Random(0), PRIVATE.get(plan.workflow, ())
        for trace, (reused, baseline, sights) in zip(traces, self._passes(plan, traces), strict=True):
            tokens = sum(len(sight.call.generated or ()) for sight in sights)
            ways: dict[str, list[Tensor]] = defaultdict(list)
            for sight in sights:
                made, read = reused.made[:, sight.rows], reused.read[:, sight.rows]
                true = baseline.made[:, sight.homes]
                differs = _differs(true - made, made)
                wanted = torch.where(differs[:, None], true, made)
                ways["reused"].append(made)
                ways["baseline"].append(wanted)
                for ridge in ridges:
                    corrected = made.clone()
                    for stage in dict.fromkeys(sight.stages):
                        of = differs & torch.tensor([s == stage for s in sight.stages])
                        corrected[:, of] += correction.of(stage, ridge, read[:, of])
                    ways[str(ridge)].append(corrected)
            ways["one for all"] = _shared(sights, ways["baseline"])
            if others and private:
                rest = [other for other in traces if other is not trace]
                drawn = draw.sample(rest, min(others, len(rest)))
                ways["expected"] = self._expected(trace, drawn, private, ways["baseline"])
                ways["expected, one for all"] = _shared(sights, ways["expected"])
            for way, seen in ways.items():
                found[way].append(_divergence(baseline.logits, self._behind(sights, seen)) / tokens)
            print(f"... measured {len(found['reused'])} of {len(traces)}", flush=True)
        return dict(found)

    def _passes(self, plan: Plan, traces: Sequence[Trace]) -> Iterator[tuple[Encoded, Encoded, list[Sight]]]:
        adapter = self._adapter
        sampling = SamplingParams(max_tokens=plan.max_tokens)
        lessons = lessons_of(adapter, find(plan.workflow), traces, plan.reused, sampling=sampling, options=plan.options)
        for trace, lesson in zip(traces, lessons, strict=True):
            prompts = as_prompts(trace.calls)
            reused, baseline = pack(lesson.calls), pack(prompts)
            yield (
                encoded(adapter, reused),
                encoded(adapter, baseline),
                list(sights_of(lesson.calls, reused, prompts, baseline)),
            )

    def _expected(
        self, trace: Trace, others: Sequence[Trace], private: Collection[str], wanted: Sequence[Tensor]
    ) -> list[Tensor]:
        """What the decodes see, with what was written by others at its mean over prompts with other private texts."""
        heard = [heard_by(trace.calls, call, private) for _, call in decodes_of(trace.calls)]
        sums = [torch.zeros_like(w[:, h]) for w, h in zip(wanted, heard, strict=True)]
        for other in others:
            calls = retold(trace.calls, other.calls, private)
            prompts = as_prompts(calls)
            packed = pack(prompts)
            made, homes = encoded(self._adapter, packed).made, homes_of(prompts, packed)
            for (name, call), total in zip(decodes_of(calls), sums, strict=True):
                rows: list[int] = [homes[name][place] for place in heard_by(calls, call, private)]
                total += made[:, rows]
        found = [w.clone() for w in wanted]
        for seen, of, total in zip(found, heard, sums, strict=True):
            seen[:, of] = total / len(others)
        return found

    def _behind(self, sights: Sequence[Sight], seen: Sequence[Tensor]) -> Tensor:
        """The logits of the decodes, each behind the encodings that are given for it."""
        places = [place for sight in sights for place in sight.places]
        past = Pack([0] * len(places), places, (Span(0, len(places), ()),), [], [])
        tokens, positions, spans, rows, targets = [], [], [], [], []
        at, own = 0, len(places)
        for sight in sights:
            call, first = sight.call, len(tokens)
            generated = call.generated or []
            spans.append(Span(own, own + len(call.tokens), (Run(at, at + len(sight.places), 0),)))
            rows += range(first + len(call.prompt) - 1, first + len(call.prompt) - 1 + len(generated))
            targets += generated
            tokens += call.tokens
            positions += range(call.start, call.start + len(call.tokens))
            at, own = at + len(sight.places), own + len(call.tokens)
        packed = Pack(tokens, positions, tuple(spans), rows, targets, past)
        facts = self._adapter.facts
        made = torch.cat(list(seen), dim=1)
        width = made.shape[-1] // 2
        kept = {}
        for layer, kind in enumerate(facts.kinds):
            keys, values = (
                x.unflatten(-1, (-1, facts.head_dim)).transpose(0, 1)[None]
                for x in (made[layer, :, :width], made[layer, :, width:])
            )
            if kind.rotary is not None:
                cos, sin = (torch.from_numpy(table) for table in kind.rotary.table(places))
                keys = turn(keys, cos, sin, kind.rotary.interleaved)
            kept[layer] = keys, values
        step = PackedStep(packed, facts.kinds, facts.device, [kept])
        with torch.no_grad(), self._adapter.hooked():
            return self._adapter.logits(tokens, positions, step, rows)


@torch.no_grad()
def encoded(adapter: Adapter, packed: Pack) -> Encoded:
    step = PackedStep(packed, adapter.facts.kinds, adapter.facts.device)
    with _tapped(adapter.model) as (read, made), adapter.hooked():
        logits = adapter.logits(packed.tokens, packed.positions, step, packed.rows)
    both = [torch.cat(kv, dim=-1) for kv in zip(made["k"], made["v"], strict=True)]
    return Encoded(torch.stack(read), torch.stack(both), logits)


@contextmanager
def _tapped(model: Any) -> Iterator[tuple[list[Tensor], dict[str, list[Tensor]]]]:
    """What goes into, and comes out of, the projections to keys and values, layer by layer."""
    read: list[Tensor] = []
    made: dict[str, list[Tensor]] = {"k": [], "v": []}

    def tap(which: str) -> Any:
        def keep(module: Any, given: tuple[Tensor, ...], out: Tensor) -> None:
            made[which].append(out[0])
            if which == "k":
                read.append(given[0][0])

        return keep

    taken = [
        layer.self_attn.get_submodule(f"{which}_proj").register_forward_hook(tap(which))
        for layer in model.get_decoder().layers
        for which in made
    ]
    try:
        yield read, made
    finally:
        for one in taken:
            one.remove()


def retold(calls: Sequence[TracedCall], other: Sequence[TracedCall], private: Collection[str]) -> list[TracedCall]:
    """The calls with another trace's texts at the private stages. Who sees such a text sees the whole of it."""
    texts = {name: call.generated for name, call in decodes_of(other)}
    names = (name for name, _ in decodes_of(calls))
    found: list[TracedCall] = []
    for call in calls:
        name = None if call.generated is None else next(names)
        seen = (
            s._replace(last=len(found[s.call].tokens)) if calls[s.call].stage in private else s for s in call.parents
        )
        said = texts[name] if name is not None and call.stage in private else call.generated
        found.append(replace(call, generated=said, parents=tuple(seen)))
    return found


def heard_by(calls: Sequence[TracedCall], call: TracedCall, private: Collection[str]) -> list[int]:
    """The places in its prompt of what was decoded without sight of the private texts that the call sees."""
    own = {s.call for s in call.parents if calls[s.call].stage in private}
    found: list[int] = []
    at = 0
    for seen in call.parents:
        one, length = calls[seen.call], seen.last - seen.first
        mine = seen.call in own or one.generated is None or any(s.call in own for s in one.parents)
        if own and not mine:
            found += range(at, at + length)
        at += length
    return found


def _shared(sights: Sequence[Sight], seen: Sequence[Tensor]) -> list[Tensor]:
    """The mean over all who see a token, for each of them."""
    rows = torch.cat([torch.tensor(sight.rows) for sight in sights])
    all_seen = torch.cat(list(seen), dim=1)
    total = torch.zeros(all_seen.shape[0], int(rows.max()) + 1, all_seen.shape[2]).index_add_(1, rows, all_seen)
    mean_of = total / rows.bincount().clamp_min(1)[:, None]
    return [mean_of[:, sight.rows] for sight in sights]


def _differs(apart: Tensor, made: Tensor) -> Tensor:
    return (apart.square().sum((0, 2)) > SAME**2 * made.square().sum((0, 2))).cpu()


def _divergence(before: Tensor, after: Tensor) -> float:
    old, new = before.log_softmax(-1), after.log_softmax(-1)
    return float((old.exp() * (old - new)).sum(-1).clamp_min(0).sum())


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--model", required=True)
    options.add_argument("--out", type=Path, default=Path("out/distill"), help="where distill left traces")
    options.add_argument("--only", nargs="*", default=["prisoners_dilemma", "branch_solve_merge, serial"])
    options.add_argument("--learn", type=int, default=150, help="traces to learn from; 0: measure the means alone")
    options.add_argument("--test", type=int, default=30, help="traces to measure on")
    options.add_argument(
        "--others", type=int, default=8, help="private texts that an expected encoding is the mean over"
    )
    options.add_argument("--name", help="how to call the model in the results")
    given = options.parse_args()
    model = given.name or Path(given.model).stem
    undoing = Undoing(opened(given.model))
    for name in given.only:
        splits = ("learn", "check", "test") if given.learn else ("test",)
        traces = {split: read_traces(given.out / model / name / split)[1] for split in splits}
        test = traces["test"][: given.test]
        if given.learn:
            learn = traces["learn"][: given.learn]
            found = run(undoing, PLANS[name], learn, traces["check"], test, given.others)
        else:
            known = last("correction")["runs"][f"{name}, {model}"]
            found = known | means(undoing.measure(PLANS[name], test, Correction(), (), given.others))
        runs: Mapping[str, Any] = merged("correction", "runs", {f"{name}, {model}": found | {"model": model}})
        rows = [
            estimate_row(f"{title}: divergence undone", one["closed"], "", made={k: one[k] for k in provenance()})
            for title, one in runs.items()
        ]
        save("correction", rows, model, runs=runs)


def run(
    undoing: "Undoing", plan: Plan, learn: Sequence[Trace], check: Sequence[Trace], test: Sequence[Trace], others: int
) -> dict[str, Any]:
    """The ridge is the one that does best on the traces for validation."""
    correction = Correction()
    undoing.learn(plan, learn, correction)
    tried = undoing.measure(plan, check, correction, RIDGES)
    ridge = min(RIDGES, key=lambda one: sum(tried[str(one)]))
    found = undoing.measure(plan, test, correction, [ridge], others)
    before, after, none = found["reused"], found[str(ridge)], [0.0] * len(test)
    return {
        "before": asdict(mean(before)),
        "after": asdict(mean(after)),
        "on the baseline": asdict(mean(found["baseline"])),
        "closed": asdict(closed(none, before, after)),
        **means(found),
        "ridge": ridge,
        "tried": {ridge: sum(values) / len(values) for ridge, values in tried.items()},
        "traces": {"learn": len(learn), "check": len(check), "test": len(test)},
        **provenance(),
    }


def means(found: Mapping[str, list[float]]) -> dict[str, Any]:
    """What is undone where a token has the same encoding for all who see it, or the one that is to be expected."""
    before = found["reused"]
    return {
        way: {"closed": asdict(closed([0.0] * len(before), before, found[way])), "n": len(before), **provenance()}
        for way in ("one for all", "expected", "expected, one for all")
        if way in found
    }


if __name__ == "__main__":
    main()
