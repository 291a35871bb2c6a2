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
from choreograph.attention.rope import rotate
from choreograph.lab.evaluation.statistics import mean
from choreograph.lab.evaluation.traces import load_traces
from choreograph.lab.replay.packed_forward import PackedForwardContext, PackedTrace, full_prompt_indices, pack
from choreograph.lab.replay.traced_calls import TracedCall, TraceSlice, as_full_prompts, iter_decodes
from choreograph.lab.training import Trace, make_examples
from choreograph.lab.workflows import find
from choreograph.models.hf_model import HFModel
from choreograph.sampling_params import SamplingParams

from .common import estimate_row, last_result, merge_results, provenance, save
from .distill import PLANS, Plan, fraction_closed, load_engine

RIDGES = (0.01, 0.03, 0.1, 0.3, 1.0)  # of the mean square of each number that a layer reads
PRIVATE_STAGES = {
    "prisoners_dilemma": ("Alice plans", "Bob plans")
}  # what one player alone sees, and another in every game
EQUAL_TOLERANCE = 1e-3  # keys and values that differ by less, of their length, are those that the baseline sees


@dataclass(frozen=True)
class LayerKV:
    """One pass: what every layer read, and the keys (not turned) and values side by side; (L, N, *) both."""

    inputs: Tensor
    kv: Tensor
    logits: Tensor


@dataclass(frozen=True)
class TokenAlignment:
    """One decode and the tokens it attends to."""

    call: TracedCall
    rows: list[int]  # their indices in the pass under reuse
    baseline_rows: list[int]  # their indices in the pass of full prompts
    positions: list[int]  # where the decode attends to them
    stages: list[str]  # stages that generated them


class Correction:
    """The sums of least squares, stage by stage of who wrote what is seen; all layers at once."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Tensor, Tensor]] = {}
        self._maps: dict[tuple[str, float], Tensor] = {}

    def add(self, stage: str, inputs: Tensor, difference: Tensor) -> None:
        x = _with_bias(inputs)
        new = ((x.mT @ x).double(), (x.mT @ difference).double())
        old = self._sums.get(stage)
        self._sums[stage] = new if old is None else (old[0] + new[0], old[1] + new[1])

    def predict(self, stage: str, ridge: float, inputs: Tensor) -> Tensor:
        """How the keys and values differ, as far as can be told. A stage never met is left as it is."""
        if stage not in self._sums:
            return torch.zeros(())
        if (stage, ridge) not in self._maps:
            squares, products = self._sums[stage]
            weight = ridge * squares.diagonal(dim1=-2, dim2=-1) + 1e-6
            weight[:, -1] = 0  # the mean is not held back
            self._maps[stage, ridge] = torch.linalg.solve(squares + torch.diag_embed(weight), products).float()
        return _with_bias(inputs) @ self._maps[stage, ridge]


def _with_bias(inputs: Tensor) -> Tensor:
    return torch.cat([inputs, torch.ones(*inputs.shape[:-1], 1)], dim=-1)


class CorrectionExperiment:
    """The decodes of traces, behind encodings as they are under reuse, on the baseline, or corrected."""

    def __init__(self, engine: Engine) -> None:
        self._hf_model = engine.core.hf_model

    def fit(self, plan: Plan, traces: Sequence[Trace], correction: Correction) -> None:
        for number, (reused, baseline, sights) in enumerate(self._forward_pairs(plan, traces), start=1):
            pairs: dict[tuple[int, int], str] = {}  # readers whose prompts share a beginning see the same
            for sight in sights:
                pairs |= {(r, h): s for r, h, s in zip(sight.rows, sight.baseline_rows, sight.stages, strict=True)}
            stages: dict[str, list[tuple[int, int]]] = defaultdict(list)
            for pair, stage in pairs.items():
                stages[stage].append(pair)
            for stage, some in stages.items():
                rows, home = torch.tensor(some).unbind(1)
                apart = baseline.kv[:, home] - reused.kv[:, rows]
                differs = _differs(apart, reused.kv[:, rows])
                if differs.any():
                    correction.add(stage, reused.inputs[:, rows[differs]], apart[:, differs])
            if number % 10 == 0:
                print(f"... learned from {number} of {len(traces)}", flush=True)

    def measure(
        self, plan: Plan, traces: Sequence[Trace], correction: Correction, ridges: Sequence[float], num_others: int = 0
    ) -> dict[str, list[float]]:
        """The divergence of each trace from the baseline, a token: under reuse, on the baseline, with one encoding for
        all who see it, for each ridge, and as expected by whoever knows the private texts of `others` other traces, for
        each who sees it and for all."""
        result: dict[str, list[float]] = defaultdict(list)
        draw, private = random.Random(0), PRIVATE_STAGES.get(plan.workflow, ())
        for trace, (reused, baseline, sights) in zip(traces, self._forward_pairs(plan, traces), strict=True):
            tokens = sum(len(sight.call.generated or ()) for sight in sights)
            ways: dict[str, list[Tensor]] = defaultdict(list)
            for sight in sights:
                made, read = reused.kv[:, sight.rows], reused.inputs[:, sight.rows]
                true = baseline.kv[:, sight.baseline_rows]
                differs = _differs(true - made, made)
                expected = torch.where(differs[:, None], true, made)
                ways["reused"].append(made)
                ways["baseline"].append(expected)
                for ridge in ridges:
                    corrected = made.clone()
                    for stage in dict.fromkeys(sight.stages):
                        of = differs & torch.tensor([s == stage for s in sight.stages])
                        corrected[:, of] += correction.predict(stage, ridge, read[:, of])
                    ways[str(ridge)].append(corrected)
            ways["one for all"] = _mean_over_readers(sights, ways["baseline"])
            if num_others and private:
                rest = [other for other in traces if other is not trace]
                drawn = draw.sample(rest, min(num_others, len(rest)))
                ways["expected"] = self._expected(trace, drawn, private, ways["baseline"])
                ways["expected, one for all"] = _mean_over_readers(sights, ways["expected"])
            for way, seen in ways.items():
                result[way].append(_divergence(baseline.logits, self._logits_given_kv(sights, seen)) / tokens)
            print(f"... measured {len(result['reused'])} of {len(traces)}", flush=True)
        return dict(result)

    def _forward_pairs(
        self, plan: Plan, traces: Sequence[Trace]
    ) -> Iterator[tuple[LayerKV, LayerKV, list[TokenAlignment]]]:
        adapter = self._hf_model
        sampling = SamplingParams(max_tokens=plan.max_tokens)
        lessons = make_examples(
            adapter, find(plan.workflow), traces, plan.reuse_condition, sampling=sampling, options=plan.options
        )
        for trace, lesson in zip(traces, lessons, strict=True):
            reused, baseline = pack(lesson.calls), pack(as_full_prompts(trace.calls))
            yield (
                compute_layer_kv(adapter, reused),
                compute_layer_kv(adapter, baseline),
                align_decodes(reused, baseline),
            )

    def _expected(
        self, trace: Trace, others: Sequence[Trace], private_stages: Collection[str], baseline_kv: Sequence[Tensor]
    ) -> list[Tensor]:
        """What the decodes see, with what was written by others at its mean over prompts with other private texts."""
        heard = [positions_without_private(trace.calls, call, private_stages) for _, call in iter_decodes(trace.calls)]
        sums = [torch.zeros_like(w[:, h]) for w, h in zip(baseline_kv, heard, strict=True)]
        for other in others:
            calls = replace_private_texts(trace.calls, other.calls, private_stages)
            packed = pack(as_full_prompts(calls))
            made, homes = compute_layer_kv(self._hf_model, packed).kv, full_prompt_indices(packed)
            for (name, call), total in zip(iter_decodes(calls), sums, strict=True):
                rows: list[int] = [
                    homes[name][place] for place in positions_without_private(calls, call, private_stages)
                ]
                total += made[:, rows]
        result = [w.clone() for w in baseline_kv]
        for seen, of, total in zip(result, heard, sums, strict=True):
            seen[:, of] = total / len(others)
        return result

    def _logits_given_kv(self, alignments: Sequence[TokenAlignment], kv: Sequence[Tensor]) -> Tensor:
        """The logits of the decodes, each behind the encodings that are given for it."""
        places = [place for sight in alignments for place in sight.positions]
        past: list[TracedCall] = []  # a call for each slice that a decode attends to
        own: list[TracedCall] = []
        num_slices = sum(len(sight.call.parents) for sight in alignments)
        for sight in alignments:
            parents = [
                TraceSlice(len(past) + i, 0, s.last - s.first, s.offset) for i, s in enumerate(sight.call.parents)
            ]
            past += [TracedCall("", [0] * s.last, s.offset) for s in parents]
            own.append(replace(sight.call, parents=tuple(parents)))
        packed = PackedTrace([*past, *own], num_slices)
        facts = self._hf_model.model_info
        made = torch.cat(list(kv), dim=1)
        width = made.shape[-1] // 2
        kept = {}
        for layer, kind in enumerate(facts.attention_specs):
            keys, values = (
                x.unflatten(-1, (-1, facts.head_dim)).transpose(0, 1)[None]
                for x in (made[layer, :, :width], made[layer, :, width:])
            )
            if kind.rope is not None:
                cos, sin = (torch.from_numpy(table) for table in kind.rope.cos_sin(places))
                keys = rotate(keys, cos, sin, kind.rope.interleaved)
            kept[layer] = [x.split([len(call.tokens) for call in past], dim=2) for x in (keys, values)]
        by_call = [{layer: (keys[n], values[n]) for layer, (keys, values) in kept.items()} for n in range(num_slices)]
        step = PackedForwardContext(packed, facts.attention_specs, facts.device, by_call)
        with torch.no_grad(), self._hf_model.attention_hook():
            return self._hf_model.logits(packed.tokens, packed.positions, step, packed.logits_indices)


def align_decodes(packed: PackedTrace, packed_prompts: PackedTrace) -> list[TokenAlignment]:
    """The decodes in the order of their logits."""
    homes = full_prompt_indices(packed_prompts)
    result = []
    for name, call in iter_decodes(packed.calls):
        tokens = [(s, k) for s in call.parents for k in range(s.first, s.last)]
        result.append(
            TokenAlignment(
                call,
                [packed.first_indices[s.call] + k for s, k in tokens],
                homes[name][: len(tokens)],
                [s.offset + k - s.first for s, k in tokens],
                [packed.calls[s.call].stage for s, _ in tokens],
            )
        )
    return result


@torch.no_grad()
def compute_layer_kv(hf_model: HFModel, packed_trace: PackedTrace) -> LayerKV:
    step = PackedForwardContext(packed_trace, hf_model.model_info.attention_specs, hf_model.model_info.device)
    with _record_projections(hf_model.model) as (read, made), hf_model.attention_hook():
        logits = hf_model.logits(packed_trace.tokens, packed_trace.positions, step, packed_trace.logits_indices)
    both = [torch.cat(kv, dim=-1) for kv in zip(made["k"], made["v"], strict=True)]
    return LayerKV(torch.stack(read), torch.stack(both), logits)


@contextmanager
def _record_projections(model: Any) -> Iterator[tuple[list[Tensor], dict[str, list[Tensor]]]]:
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


def replace_private_texts(
    calls: Sequence[TracedCall], other: Sequence[TracedCall], private_stages: Collection[str]
) -> list[TracedCall]:
    """The calls with another trace's texts at the private stages. Who sees such a text sees the whole of it."""
    texts = {name: call.generated for name, call in iter_decodes(other)}
    names = (name for name, _ in iter_decodes(calls))
    result: list[TracedCall] = []
    for call in calls:
        name = None if call.generated is None else next(names)
        seen = (
            s._replace(last=len(result[s.call].tokens)) if calls[s.call].stage in private_stages else s
            for s in call.parents
        )
        said = texts[name] if name is not None and call.stage in private_stages else call.generated
        result.append(replace(call, generated=said, parents=tuple(seen)))
    return result


def positions_without_private(
    calls: Sequence[TracedCall], call: TracedCall, private_stages: Collection[str]
) -> list[int]:
    """The places in its prompt of what was decoded without sight of the private texts that the call sees."""
    own = {s.call for s in call.parents if calls[s.call].stage in private_stages}
    result: list[int] = []
    at = 0
    for seen in call.parents:
        one, length = calls[seen.call], seen.last - seen.first
        mine = seen.call in own or one.generated is None or any(s.call in own for s in one.parents)
        if own and not mine:
            result += range(at, at + length)
        at += length
    return result


def _mean_over_readers(alignments: Sequence[TokenAlignment], kv: Sequence[Tensor]) -> list[Tensor]:
    """The mean over all who see a token, for each of them."""
    rows = torch.cat([torch.tensor(sight.rows) for sight in alignments])
    all_seen = torch.cat(list(kv), dim=1)
    total = torch.zeros(all_seen.shape[0], int(rows.max()) + 1, all_seen.shape[2]).index_add_(1, rows, all_seen)
    mean_of = total / rows.bincount().clamp_min(1)[:, None]
    return [mean_of[:, sight.rows] for sight in alignments]


def _differs(difference: Tensor, kv: Tensor) -> Tensor:
    return (difference.square().sum((0, 2)) > EQUAL_TOLERANCE**2 * kv.square().sum((0, 2))).cpu()


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
    undoing = CorrectionExperiment(load_engine(given.model))
    for name in given.only:
        splits = ("learn", "check", "test") if given.learn else ("test",)
        traces = {split: load_traces(given.out / model / name / split)[1] for split in splits}
        test = traces["test"][: given.test]
        if given.learn:
            learn = traces["learn"][: given.learn]
            result = run(undoing, PLANS[name], learn, traces["check"], test, given.others)
        else:
            known = last_result("correction")["runs"][f"{name}, {model}"]
            result = known | means(undoing.measure(PLANS[name], test, Correction(), (), given.others))
        runs: Mapping[str, Any] = merge_results("correction", "runs", {f"{name}, {model}": result | {"model": model}})
        rows = [
            estimate_row(f"{title}: divergence undone", one["closed"], "", provenance={k: one[k] for k in provenance()})
            for title, one in runs.items()
        ]
        save("correction", rows, model, runs=runs)


def run(
    experiment: "CorrectionExperiment",
    plan: Plan,
    learn: Sequence[Trace],
    check: Sequence[Trace],
    test: Sequence[Trace],
    num_others: int,
) -> dict[str, Any]:
    """The ridge is the one that does best on the traces for validation."""
    correction = Correction()
    experiment.fit(plan, learn, correction)
    tried = experiment.measure(plan, check, correction, RIDGES)
    ridge = min(RIDGES, key=lambda one: sum(tried[str(one)]))
    result = experiment.measure(plan, test, correction, [ridge], num_others)
    before, after, none = result["reused"], result[str(ridge)], [0.0] * len(test)
    return {
        "before": asdict(mean(before)),
        "after": asdict(mean(after)),
        "on the baseline": asdict(mean(result["baseline"])),
        "closed": asdict(fraction_closed(none, before, after)),
        **means(result),
        "ridge": ridge,
        "tried": {ridge: sum(values) / len(values) for ridge, values in tried.items()},
        "traces": {"learn": len(learn), "check": len(check), "test": len(test)},
        **provenance(),
    }


def means(divergences: Mapping[str, list[float]]) -> dict[str, Any]:
    """What is undone where a token has the same encoding for all who see it, or the one that is to be expected."""
    before = divergences["reused"]
    return {
        way: {
            "closed": asdict(fraction_closed([0.0] * len(before), before, divergences[way])),
            "n": len(before),
            **provenance(),
        }
        for way in ("one for all", "expected", "expected, one for all")
        if way in divergences
    }


if __name__ == "__main__":
    main()
