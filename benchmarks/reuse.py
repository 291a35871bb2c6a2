"""DroidSpeak's figures: what partial reuse between models of one family costs in quality and saves in time.

`make bench NAME=reuse ARGS="--model model --data folder"`, with `--only` some of its parts, in this order: profile,
quality, latency, stream, remote, linked, memory; models are trained where they are not there yet. `--out` keeps models,
profiles and records; a part that was stopped goes on. What is measured is written into the results at once.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from peft import PeftModel

from choreograph import CacheConfig, Engine, EngineConfig, LayerPattern, Message
from choreograph.api.session import Session
from choreograph.lab.evaluation.report import format_estimate
from choreograph.lab.evaluation.run_dir import RunDirectory
from choreograph.lab.evaluation.statistics import difference, mean, ratio
from choreograph.lab.profiling.profile_report import SCORE_LABELS, estimate_loss
from choreograph.lab.profiling.profiler import (
    METRICS,
    PairContext,
    ProfileConfig,
    QAExample,
    enable_all_patterns,
    group_by_context,
    measure_service_times,
    profile_pair,
    time_patterns,
    with_timings,
)
from choreograph.layer_reuse import LatencyAwareSelector, ParetoPoint, Profile
from choreograph.layer_reuse.remote import RemoteSender

from .common import (
    FIGURES,
    Row,
    estimate_row,
    greedy,
    last_result,
    merge_results,
    provenance,
    random_tokens,
    ratio_row,
    save,
)
from .plots import pareto_plot
from .reuse_figures import draw_figures, profile_top_layers, transfer_loss
from .reuse_memory import allocated_bytes
from .reuse_models import (
    CONTEXT_ID_SEPARATOR,
    LONG_CONTEXT_DATASETS,
    MAX_EXAMPLE_TOKENS,
    Splits,
    splits,
    train_adapter,
    train_fully,
)
from .reuse_sender import context

PAIRS = {
    "base to full": ("full", "base"),
    "base to adapter": ("adapter", "base"),
    "adapter to full": ("full", "adapter"),
}
VARIANTS = ("own", "partial", "reused", "sent")
DATA = (*LONG_CONTEXT_DATASETS, "nq", "needed")
LENGTHS = (1024, 2048, 4096, 7680)
STREAM_TOKENS, STREAM_ANSWER, STREAM_REQUESTS = 512, 16, 60  # of a context and of an answer; at each rate
STREAM_LIMITS = (3, 1.5)  # objectives of the time to the first token, in full prefills
STREAM_CAPACITY = 81_920  # tokens: all contexts of a stream, from here and from the sender
RATE_FACTORS = (0.3, 0.6, 0.9, 1.2, 1.6, 2.0, 2.5)  # of the rate that full prefills alone would allow


@dataclass(frozen=True)
class Run:
    """What is measured, with what. out: the model's folder. every: patterns begin and end at every so many layers.
    most: the share of the layers that may be computed. by: the data set whose profile tells which. training: tells
    models that were trained in another way apart. pattern: the layers to compute, in place of those of a profile."""

    source: str
    data: Splits
    out: Path
    stride: int
    lengths: Sequence[int]
    strategies: Sequence[str] = ()
    metric: str = "likelihood"
    max_layer_fraction: float | None = None
    selection_dataset: str = "hotpotqa"
    training: str | None = None
    pattern: LayerPattern | None = None

    def title(self, pair: str) -> str:
        """How the results call a pair."""
        return ", ".join([pair, *([self.training] if self.training else []), self.out.name])

    def label(self, pair: str) -> str:
        """How files call it."""
        return "-".join([*pair.split(), *(self.training or "").split()])

    @property
    def profile_config(self) -> ProfileConfig:
        return ProfileConfig(metric=self.metric, stride=self.stride)

    @property
    def answer_config(self) -> ProfileConfig:
        return ProfileConfig(metric="f1", stride=self.stride, max_tokens=16)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--model", required=True)
    options.add_argument("--data", type=Path, required=True)
    options.add_argument("--out", type=Path, default=Path("out/reuse"))
    options.add_argument("--pairs", nargs="*", default=list(PAIRS))
    options.add_argument("--only", nargs="*", default=list(PARTS))
    options.add_argument("--epochs", type=int, default=2)
    options.add_argument("--example-tokens", type=int, default=MAX_EXAMPLE_TOKENS, help="longest text to train on")
    options.add_argument("--every", type=int, default=2, help="patterns begin and end at every so many layers")
    options.add_argument("--inputs", type=int, default=15, help="texts of a profile, of each data set")
    options.add_argument("--lengths", type=int, nargs="*", default=list(LENGTHS), help="of contexts, to time")
    options.add_argument("--ways", nargs="*", default=[], help="of serving the stream, to time; all if none is named")
    options.add_argument("--questions", type=int, default=45, help="of the test, of each data set")
    options.add_argument("--rounds", type=int, default=6, help="contexts of each question in company, of the test")
    options.add_argument("--metric", choices=METRICS, default="likelihood", help="of the profile")
    options.add_argument("--most", type=float, help="the best pattern of such a share of the layers, not the cheapest")
    options.add_argument("--training", help="how the results call these trainings, if not by the model alone")
    options.add_argument("--on", nargs="*", default=[], choices=DATA, help="data sets; all if none is named")
    options.add_argument("--by", choices=DATA, default="hotpotqa", help="the data set whose profile picks the pattern")
    options.add_argument(
        "--layers", type=int, nargs=2, help="the layers to compute: the first, and the one behind them"
    )
    given = options.parse_args()
    name = Path(given.model).name.removesuffix(".gguf")  # folders may have dots in their names
    data = splits(given.data, given.inputs, given.questions, given.rounds).select(given.on or DATA)
    run = Run(
        given.model,
        data,
        given.out / name,
        given.every,
        given.lengths,
        strategies=given.ways,
        metric=given.metric,
        max_layer_fraction=given.most,
        selection_dataset=given.by,
        training=given.training,
        pattern=None if given.layers is None else LayerPattern.from_triplet(0, *given.layers),
    )
    pairs = given.pairs if set(given.only) != {"memory"} else []  # it depends on shapes alone
    engine = load_models(run, pairs, given.epochs, given.example_tokens)
    for part in given.only:
        for pair in given.pairs:
            for result in PARTS[part](engine, pair, run):
                save_part(name, part, run.title(pair), result)


def load_models(run: Run, pairs: Sequence[str], epochs: int, max_tokens: int) -> Engine:
    """The base with the variants that the pairs name, trained where they are not there yet."""
    names = {name for pair in pairs for name in PAIRS[pair]}
    trained = {
        name: train(run.source, run.data, run.out / name, run.profile_config, epochs, max_tokens)
        for name, train in (("adapter", train_adapter), ("full", train_fully))
        if name in names
    }
    config = EngineConfig(cache=CacheConfig(capacity=81_920))
    engine = Engine.from_pretrained(run.source, config=config)
    if "adapter" in trained:
        engine.add_adapter("adapter", trained["adapter"])
    if "full" in trained:
        engine.add_model("full", trained["full"])
    return engine


def save_part(model: str, part: str, title: str, result: Mapping[str, Any]) -> None:
    """Beside what was measured before."""
    runs = merge_results("reuse", "runs", {})
    one = dict(runs.get(title, {}))  # type: ignore[call-overload]
    before = one.get(part, {})
    if "lengths" in result and before.get("pattern") == result["pattern"]:  # they can be measured one by one
        result = {**result, "lengths": before["lengths"] | result["lengths"]}
    one[part] = {**result, **provenance()}
    runs[title] = one
    save("reuse", [row for title, run in runs.items() for row in rows(title, run)], model, runs=runs)


def rows(title: str, run: Any) -> list[Row]:
    """What is held against the paper's figures."""
    result = []
    for length, one in run.get("latency", {}).get("lengths", {}).items():
        facts = {"required": 1.7, "target": 2.6, "provenance": _provenance(one)}
        result.append(ratio_row(f"{title}: prefill of {length}", one["full"], one["partial"], **facts))
    for length, one in run.get("remote", {}).get("lengths", {}).items():
        facts = {"required": 1.7, "target": 2.6, "provenance": _provenance(one)}
        result.append(ratio_row(f"{title}: first token behind {length}, fetched", one["full"], one["partial"], **facts))
    for data, one in run.get("quality", {}).get("data", {}).items():
        made = {"better": "lower", "provenance": _provenance(run["quality"])}
        result.append(estimate_row(f"{title}, {data}: loss, partial", one["partial loss"], "points", **made))
        result.append(estimate_row(f"{title}, {data}: loss, all reused", one["reused loss"], "points", **made))
    return result


def _provenance(part: Mapping[str, Any]) -> dict[str, str]:
    return {key: part[key] for key in ("commit", "date", "hardware")}


# -- profile: Figures 7, 8, 11, 12, 17 ------------------------------------------------------------------------


def profiles(engine: Engine, pair: str, run: Run) -> Iterator[dict[str, Any]]:
    receiver, sender = PAIRS[pair]
    if run.selection_dataset not in run.data.profile:
        raise SystemExit(f"--by {run.selection_dataset}: no profile is made of it; use one of {list(run.data.profile)}")
    result: dict[str, Profile] = {}
    for name, asked in run.data.profile.items():
        folder = run.out / "profiles" / f"{pair.replace(' ', '-')}-{name}"
        tell = lambda record: print(record["id"])  # noqa: E731
        one = profile_pair(engine, receiver, asked, folder, sender=sender, config=run.profile_config, on_done=tell)
        if name == run.selection_dataset:
            counts = [engine.model_info.layers * share // 8 for share in (1, 2, 3, 4, 6)]
            cells = profile_top_layers(engine, receiver, asked, one, counts, sender=sender, config=run.profile_config)
            one = with_timings(engine, receiver, one, 1024, sender=sender)
        result[name] = one
        one.save(folder / "profile.json")
    ours = result[run.selection_dataset]
    label = f"reuse-{run.label(pair)}-{engine.model_info.layers}"
    draw_figures(ours, FIGURES, label)
    own = {name: mean(one.receiver_scores).value for name, one in result.items()}
    blocks = {len(c.pattern.layers): mean(c.values).value for c in best_of_each_size(ours)}
    scattered = [(len(c.pattern.layers), mean(c.values).value) for c in cells]
    series = {"one stretch": sorted(blocks.items()), "the most critical layers": scattered}
    pareto_plot(series, FIGURES / f"{label}-scattered.svg", xlabel="layers computed", ylabel=SCORE_LABELS[run.metric])
    yield {
        "metric": run.metric,
        "inputs": {name: len(one.inputs) for name, one in result.items()},
        "own": own,
        "reused": {name: asdict(estimate_loss(one, one.full_reuse_scores)) for name, one in result.items()},
        "critical": {name: one.critical() for name, one in result.items()},
        "sensitivity": [asdict(estimate_loss(ours, values)) for values in ours.per_layer],
        "critical by": "a tenth of the receiver's F1",
        "own F1": {name: mean(one.receiver_f1).value for name, one in result.items()},
        "sensitivity in F1": [asdict(difference(ours.receiver_f1, values)) for values in ours.per_layer_f1],
        "frontier": [[str(p.pattern), p.loss, p.cost] for p in ours.frontier()],
        "pareto": [[str(p.pattern), p.loss, p.cost] for p in ours.pareto_points()],
        "scattered": scattered,
        "blocks": sorted(blocks.items()),
        "transfer": {
            name: [[str(p.pattern), p.loss, loss] for p, loss in transfer_loss(ours, one)]
            for name, one in result.items()
            if one is not ours
        },
    }


def best_of_each_size(profile: Profile):
    """The best stretch of each number of layers."""
    best: dict[int, Any] = {}
    for cell in profile.ranges:
        if len(cell.pattern.ranges) > 1:
            continue
        size = len(cell.pattern.layers)
        if size not in best or mean(cell.values).value > mean(best[size].values).value:
            best[size] = cell
    return best.values()


# -- quality: Figures 6 and 14 --------------------------------------------------------------------------------


def profile_file(pair: str, run: Run) -> Path:
    return run.out / "profiles" / f"{pair.replace(' ', '-')}-{run.selection_dataset}" / "profile.json"


def select_pattern(pair: str, run: Run) -> LayerPattern:
    """The cheapest pattern whose loss in the profile is a twentieth of what full reuse loses, or less; but of a
    quarter of the layers at least: where full reuse loses nothing, there would be nothing to time. Or, where the run
    says how many layers may be computed, the stretch of so many that loses least; or the layers that the run says."""
    if run.pattern is not None:
        return run.pattern
    result = Profile.load(profile_file(pair, run))
    if run.max_layer_fraction is not None:
        affordable = [c for c in result.ranges if len(c.pattern.layers) <= run.max_layer_fraction * result.layers]
        return max(affordable, key=lambda c: float(np.mean(c.values))).pattern
    limit = 0.05 * max(0.0, estimate_loss(result, result.full_reuse_scores).value)
    enough = (p.pattern for p in result.points() if 4 * len(p.pattern.layers) >= result.layers and p.loss <= limit)
    return next(enough, LayerPattern.from_triplet(0, 0, result.layers))


def quality(engine: Engine, pair: str, run: Run) -> Iterator[dict[str, Any]]:
    """F1 on questions that neither training nor the profile has seen."""
    receiver, sender = PAIRS[pair]
    pattern = select_pattern(pair, run)
    enable_all_patterns(engine, receiver, sender)
    result: dict[str, Any] = {}
    pooled: list[Mapping[str, Any]] = []
    for name, asked in run.data.test.items():
        folder = RunDirectory(run.out / "quality" / f"{pair.replace(' ', '-')}-{name}", {"pattern": str(pattern)})
        known = {record["id"]: record for record in folder.records("answers")}
        for group in group_by_context(asked):
            if not known.keys() >= {one.id for one in group}:
                for record in _answers(engine, group, receiver, sender, pattern, run.answer_config):
                    folder.append("answers", record)
                    known[record["id"]] = record
                print(pair, name, len(known), "of", len(asked), flush=True)
        records = mean_by_question([known[one.id] for one in asked])
        pooled += records
        result[name] = _compare_variants(records)
        print(pair, name, {how: format_estimate(one) for how, one in result[name].items()}, flush=True)
        share = len(pattern.layers) / engine.model_info.layers
        yield {"pattern": str(pattern), "share": share, "data": result, "pooled": _compare_variants(pooled)}


def _compare_variants(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Scores of every way, and what the receiver loses by it, in points of F1."""
    of = {how: [100 * r[how] for r in records] for how in VARIANTS}
    return {
        **{how: asdict(mean([value / 100 for value in values])) for how, values in of.items()},
        "partial loss": asdict(difference(of["own"], of["partial"])),
        "reused loss": asdict(difference(of["own"], of["reused"])),
        "gain over the sender": asdict(difference(of["own"], of["sent"])),
    }


def mean_by_question(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Each question once: the mean of what it scored in all of its contexts."""
    result: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        result.setdefault(record["id"].partition(CONTEXT_ID_SEPARATOR)[0], []).append(record)
    return [{how: float(np.mean([one[how] for one in of])) for how in VARIANTS} for of in result.values()]


def _answers(
    engine: Engine,
    examples: Sequence[QAExample],
    receiver: str,
    sender: str,
    pattern: LayerPattern,
    config: ProfileConfig,
) -> list[dict[str, Any]]:
    """Of questions about one context: the scores of every way."""
    with engine.session(seed=0) as session:
        scene = PairContext(session, examples[0].context, receiver, sender, config)
        seen = {
            "own": (scene.full_prefill, receiver),
            "partial": (scene.compute_variant(pattern), receiver),
            "reused": (scene.sender_message, receiver),
            "sent": (scene.sender_message, sender),
        }
        questions = [scene.make_probe(one) for one in examples]
        said = [{how: question.generate(*seen[how]) for how in VARIANTS} for question in questions]
        return [
            {
                "id": one.id,
                "tokens": scene.sender_message.length,
                **{how: question.compute_score(message) for how, message in answers.items()},
            }
            for one, question, answers in zip(examples, questions, said, strict=True)
        ]


# -- time: Figures 14, 15 and 16 ------------------------------------------------------------------------------


def latency(engine: Engine, pair: str, run: Run) -> Iterator[dict[str, Any]]:
    """Seconds of a prefill by the receiver, alone, computing all layers or the pattern's; the sender's is there."""
    receiver, sender = PAIRS[pair]
    pattern, everything = select_pattern(pair, run), LayerPattern.from_triplet(0, 0, engine.model_info.layers)
    engine.enable_layer_reuse(receiver, sender, pattern=pattern)
    lengths = {}
    for length in run.lengths:
        rounds = 5 if length <= 2048 else 3
        taken = time_patterns(engine, receiver, [everything, pattern], length, sender=sender, rounds=rounds)
        lengths[str(length)] = {"full": taken[str(everything)], "partial": taken[str(pattern)], **provenance()}
        ratio = np.median(taken[str(everything)]) / np.median(taken[str(pattern)])
        print(f"{pair}, {length} tokens: {ratio:.2f}x", flush=True)
        yield {"pattern": str(pattern), "lengths": lengths}


def stream(engine: Engine, pair: str, run: Run) -> Iterator[dict[str, Any]]:
    """Requests at rising rates, each a context that the sender has encoded, a question and an answer of 16 tokens.

    Where some ways were timed before, the others are timed at the same rates.
    """
    receiver, sender = PAIRS[pair]
    everything = LayerPattern.from_triplet(0, 0, engine.model_info.layers)
    result: dict[str, Any] = last_result("reuse")["runs"].get(run.title(pair), {}).get("stream", {}).get("rates", {})
    if result:
        seconds = RATE_FACTORS[0] / result["recompute"][0]["rate"]
    else:
        seconds = float(
            np.mean(time_patterns(engine, receiver, [everything], STREAM_TOKENS, sender=sender)[str(everything)])
        )
    points, times = Profile.load(profile_file(pair, run)).frontier(), measure_service_times(engine, receiver)
    fixed = [ParetoPoint(select_pattern(pair, run), 0.0, 1.0)]
    ways = {
        "recompute": LatencyAwareSelector(fixed, times=times),  # named, not used: kv_reuse="recompute" selects nothing
        "partial": LatencyAwareSelector(fixed, times=times),
        **{
            f"within {prefills:g} full prefills": LatencyAwareSelector(points, times=times, ttft_slo=prefills * seconds)
            for prefills in STREAM_LIMITS
        },
    }
    if unknown := set(run.strategies) - set(ways):
        raise SystemExit(f"--ways {sorted(unknown)}: use some of {list(ways)}")
    for way in run.strategies or ways:
        choice, result[way] = ways[way], []
        engine.enable_layer_reuse(receiver, sender, selector=choice, patterns=choice.patterns)
        share = "recompute" if way == "recompute" else "partial"
        for factor in RATE_FACTORS:
            rate, chosen = factor / seconds, Counter[str]()
            stop = engine.events.subscribe(
                lambda e, chosen=chosen: chosen.update([e.data["pattern"]] if e.kind == "layers_reused" else [])
            )
            result[way].append({"rate": rate, **_serve(engine, receiver, sender, share, rate)})
            stop()
            result[way][-1]["patterns"] = dict(chosen)
            print(pair, way, result[way][-1], flush=True)
        yield {"rates": result, "knee": {share: knee(points) for share, points in result.items()}}
    for what in ("ttft", "tbt", "e2e"):
        series = {share: [(one["rate"], one[what]) for one in points] for share, points in result.items()}
        name = f"reuse-stream-{run.label(pair)}-{what}.svg"
        pareto_plot(series, FIGURES / name, xlabel="requests a second", ylabel=f"{what}, seconds")


def knee(points: Sequence[Mapping[str, float]]) -> float:
    """The highest rate whose time to the first token is below three times that of the lowest."""
    limit = 3 * points[0]["ttft"]
    return max(one["rate"] for one in points if one["ttft"] <= limit)


def _serve(
    engine: Engine, receiver: str, sender: str, kv_reuse: str, rate: float, count: int = STREAM_REQUESTS
) -> dict[str, float]:
    """Uniform arrivals (section 5.3). The sender's encodings are made before the clock starts. Of few requests most are
    served before a queue is felt."""
    engine.clear_cache()
    sampling = greedy(STREAM_ANSWER)
    with engine.session() as session:
        texts = [
            session.prefill(random_tokens(STREAM_TOKENS, seed=i), model=sender).wait_encoded() for i in range(count)
        ]

        def submit(number: int) -> Message:
            header, parents = random_tokens(24, seed=1000 + number), [texts[number]]
            return session.decode(header, parents, model=receiver, kv_reuse=kv_reuse, sampling=sampling)  # type: ignore[call-overload]

        return {**_arrive(engine, submit, rate, count)[0], "requests": count}


def _arrive(
    engine: Engine, submit: Callable[[int], Message], rate: float, count: int
) -> tuple[dict[str, float], float]:
    """Submit requests at a rate and step the engine; return mean seconds of the answers, and those until the last."""
    said: list[Message] = []
    began = time.perf_counter()
    while len(said) < count or not all(m.done for m in said):
        due = int((time.perf_counter() - began) * rate) + 1
        while len(said) < min(due, count):
            said.append(submit(len(said)))
        if not engine.step():
            time.sleep(0.001)
    seconds = time.perf_counter() - began
    timings = [message.timing for message in said]
    ttft, e2e = ([getattr(t, name) for t in timings] for name in ("ttft", "e2e"))
    tbt = [(whole - first) / (STREAM_ANSWER - 1) for whole, first in zip(e2e, ttft, strict=True)]
    means = {name: float(np.mean(values)) for name, values in (("ttft", ttft), ("tbt", tbt), ("e2e", e2e))}
    return means, seconds


# -- another process --------------------------------------------------------------------------------------------


def remote(engine: Engine, pair: str, run: Run, rounds: int = 6) -> Iterator[dict[str, Any]]:
    """Seconds to the first token behind a context and a short question, loading included: the sender computes in
    another process. For the pairs whose sender is the base."""
    receiver, writer = PAIRS[pair]
    if writer != "base":
        return
    pattern, lengths = select_pattern(pair, run), run.lengths
    reader = standalone_engine(run, receiver)
    with linked_sender(reader, run.source, pattern.entry_layers, lengths, rounds) as link:
        reader.enable_layer_reuse("base", "writer", pattern=pattern)
        result: dict[str, dict[str, Any]] = {}
        for length in lengths:
            result[str(length)] = {**_remote_seconds(reader, link, pattern, length, rounds), **provenance()}
            recomputed = reader.events.counts["recomputed"]
            yield {"pattern": str(pattern), "lengths": result, "recomputed": recomputed}


@contextmanager
def linked_sender(
    reader: Engine, model: str, entry_layers: Iterable[int], lengths: Sequence[int], rounds: int
) -> Iterator[RemoteSender]:
    """Yield a link to a process that has contexts of some lengths, encoded by a model.

    Args:
        entry_layers: whose inputs it keeps.
        rounds: contexts of each length, beside one to warm up.
    """
    meeting = Path(tempfile.mkdtemp()) / "meeting"
    asked = ["--model", model, "--meeting", str(meeting), "--rounds", str(rounds)]
    asked += ["--lengths", *map(str, lengths), "--enter", *map(str, sorted(entry_layers))]
    sender = subprocess.Popen([sys.executable, "-m", "benchmarks.reuse_sender", *asked])
    try:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=1, world_size=2)
        dist.barrier()
        with RemoteSender(reader, 0, name="writer", timeout=60) as link:
            yield link
    finally:
        sender.kill()
        dist.destroy_process_group()


def standalone_engine(run: Run, receiver: str, capacity: int = 16_384) -> Engine:
    """A variant in an engine of its own; an adapter is merged into the weights."""
    config = EngineConfig(cache=CacheConfig(capacity=capacity))
    if receiver == "full":
        return Engine.from_pretrained(run.out / "full", config=config)
    engine = Engine.from_pretrained(run.source, config=config)
    merged = PeftModel.from_pretrained(engine.core.hf_model.model, str(run.out / receiver)).merge_and_unload()
    return Engine.from_pretrained(merged, config=config, tokenizer=engine.tokenizer)


def _remote_seconds(
    receiver_engine: Engine, remote_sender: RemoteSender, pattern: LayerPattern, length: int, rounds: int
) -> dict[str, Any]:
    """Seconds to the first token, all layers computed, some fetched, and the same with the sender's KV here already.

    loading: seconds in which bytes were received. hidden: the share of them in which the receiver computed: one minus
    what fetching adds to the time to the first token (Figure 16).
    """
    taken: dict[str, list[float]] = {"full": [], "partial": [], "local": [], "loading": []}
    for number in range(rounds + 1):
        tokens = context(length, number)
        for way in ("full", "partial", "local"):
            if way != "local":
                receiver_engine.clear_cache()
            with receiver_engine.session() as session:
                if way == "local":  # the sender's entry stays, the variant is computed again
                    _drop_partial_entries(receiver_engine)
                received, began = remote_sender.seconds_receiving, time.perf_counter()
                seen = (
                    session.prefill(tokens)
                    if way == "full"
                    else remote_sender.partial_prefill(session, tokens, pattern)
                )
                session.decode(random_tokens(16), [seen], sampling=greedy(1)).result()
                if number:  # the first round warms up
                    taken[way].append(time.perf_counter() - began)
                    if way == "partial":
                        taken["loading"].append(remote_sender.seconds_receiving - received)
    exposed = np.subtract(taken["partial"], taken["local"])
    hidden = ratio(np.subtract(taken["loading"], exposed), taken["loading"])
    print(length, taken, f"hidden: {format_estimate(hidden)}", flush=True)
    return {**taken, "hidden": asdict(hidden)}


def _drop_partial_entries(engine: Engine) -> None:
    manager = engine.core.cache_manager
    for entry in [e for e in manager.entries.values() if e.is_partial and not e.owners]:
        manager.discard(entry)


def linked(engine: Engine, pair: str, run: Run) -> Iterator[dict[str, Any]]:
    """Requests at rising rates, as `stream`, whose contexts another process has: loads compete with prefills.

    For the pairs whose sender is the base. A selector knows the bytes that are queued on the link and its rate so far.
    """
    receiver, writer = PAIRS[pair]
    if writer != "base":
        return
    reader, points = standalone_engine(run, receiver, STREAM_CAPACITY), Profile.load(profile_file(pair, run)).frontier()
    times, fixed = measure_service_times(reader, "base"), [ParetoPoint(select_pattern(pair, run), 0.0, 1.0)]
    seconds = times.per_token * STREAM_TOKENS + times.per_pair * STREAM_TOKENS * (STREAM_TOKENS + 1) / 2
    selectors = {"recompute": None, "partial": LatencyAwareSelector(fixed, times=times)}
    for prefills in STREAM_LIMITS:
        selector = LatencyAwareSelector(points, times=times, ttft_slo=prefills * seconds)
        selectors[f"within {prefills:g} full prefills"] = selector
    every = [pattern for selector in selectors.values() if selector is not None for pattern in selector.patterns]
    entry_layers = frozenset[int]().union(*(pattern.entry_layers for pattern in every))
    result: dict[str, list[dict[str, Any]]] = {}
    with linked_sender(reader, run.source, entry_layers, [STREAM_TOKENS], STREAM_REQUESTS) as link:
        for way, selector in selectors.items():
            if run.strategies and way not in run.strategies:
                continue
            if selector is not None:
                reader.enable_layer_reuse("base", "writer", selector=selector, patterns=selector.patterns)
            rates = [factor / seconds for factor in RATE_FACTORS]
            result[way] = [serve_linked(reader, link, rate, selector, STREAM_REQUESTS) for rate in rates]
            knees = {name: knee(points) for name, points in result.items()}
            print(pair, way, result[way], flush=True)
            yield {"tokens": STREAM_TOKENS, "full prefill": seconds, "rates": result, "knee": knees}


def serve_linked(
    reader: Engine, link: RemoteSender, rate: float, selector: LatencyAwareSelector | None, count: int
) -> dict[str, Any]:
    """Serve requests at a rate whose contexts are behind a link, or computed without a selector.

    Returns:
        Mean seconds, as `_serve`; loading: the share of the time to the last answer in which bytes were received;
        patterns: how often each was chosen; recomputed: prefills that fell back to all layers.
    """
    reader.clear_cache()
    chosen, counts, received = Counter[str](), reader.events.counts.copy(), link.seconds_receiving
    stop = reader.events.subscribe(lambda e: chosen.update([e.data["pattern"]] if e.kind == "layers_reused" else []))

    def submit(session: Session, number: int) -> Message:
        tokens = context(STREAM_TOKENS, number + 1)  # the first one warms up
        text = session.prefill(tokens) if selector is None else link.partial_prefill(session, tokens)
        header = random_tokens(24, seed=1000 + number)
        return session.decode(header, [text], sampling=greedy(STREAM_ANSWER))

    with reader.session() as session:
        timings, seconds = _arrive(reader, partial(submit, session), rate, count)
    stop()
    return {
        "rate": rate,
        **timings,
        "requests": count,
        "loading": (link.seconds_receiving - received) / seconds,
        "patterns": dict(chosen),
        "recomputed": reader.events.counts["recomputed"] - counts["recomputed"],
    }


# -- memory -----------------------------------------------------------------------------------------------------


def memory(engine: Engine, pair: str, run: Run) -> Iterator[dict[str, Any]]:
    """Bytes that caches allocate for models on one context: each its own, or all reusing the sender's.

    Every cache is as large as its contexts need. Layer inputs are allocated for every slot. The formula counts what
    the contexts need alone: no null page.
    """
    pattern, base, length = select_pattern(pair, run), engine.core.hf_model.model, 2048
    ratios, formula, inputs = {}, {}, 0
    for count in (2, 3, 4, 8):
        apart, _ = allocated_bytes(base, pattern, count, length, reuse=False)
        shared, inputs = allocated_bytes(base, pattern, count, length, reuse=True)
        ratios[str(count)] = apart / shared
        formula[str(count)] = memory_ratio(engine, pattern, count)
    by_default, _ = allocated_bytes(base, pattern, 2, length, reuse=True, default_capacity=True)
    yield {
        "pattern": str(pattern),
        "tokens": length,
        "bytes of one": allocated_bytes(base, pattern, 1, length, reuse=False)[0],
        "inputs": inputs,
        "ratio": ratios,
        "formula": formula,
        "bytes of two, default capacity": by_default,
    }


def memory_ratio(engine: Engine, pattern: LayerPattern, num_models: int) -> float:
    """Return keys and values of several models over those of one, the others' in the pattern's layers, and its inputs."""
    pool, config = engine.core.cache_manager.pool, engine.core.hf_model.model.config.get_text_config()
    kv_bytes = sum(tensor[0].nbytes for tensor in (*pool.keys, *pool.values))
    input_bytes = config.hidden_size * engine.model_info.dtype.itemsize * len(pattern.entry_layers)
    share = len(pattern.layers) / engine.model_info.layers
    return num_models * kv_bytes / (kv_bytes + input_bytes + (num_models - 1) * share * kv_bytes)


PARTS: dict[str, Callable[[Engine, str, Run], Iterator[dict[str, Any]]]] = {
    "profile": profiles,
    "quality": quality,
    "latency": latency,
    "stream": stream,
    "remote": remote,
    "linked": linked,
    "memory": memory,
}
if __name__ == "__main__":
    print("measured so far:", list(last_result("reuse").get("runs", {})))
    main()
