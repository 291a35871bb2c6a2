"""Measure which sender layers a receiver must recompute (DroidSpeak §4.3)."""

import hashlib
import json
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import combinations, groupby
from pathlib import Path
from typing import Any

from ...api.engine import Engine
from ...api.message import Message
from ...api.session import Session
from ...config import CacheConfig, EngineConfig
from ...errors import ConfigError, DataError, InvalidRequestError
from ...features.layer_variants import restrict_layers
from ...layer_pattern import LayerPattern
from ...layer_reuse.profile import VERSION, PatternScores, Profile, ServiceTimes
from ...outputs import BASE_MODEL
from ...sampling_params import SamplingParams
from ..evaluation.datasets import error_context, parse_example, prepend_context, records
from ..evaluation.metrics import f1
from ..evaluation.run_dir import RunDirectory, RunRecord

METRICS = ("f1", "likelihood", "agreement")

CACHE_TOKENS = 32_768  # tokens; the inputs of every layer are cached for all of them


@dataclass(frozen=True)
class QAExample:
    """A question about a context, with its accepted answers."""

    id: str
    context: str
    question: str
    answers: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Hash of all fields except `id`."""
        text = json.dumps([self.context, self.question, self.answers], ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def load_qa_examples(
    path: Path, *, limit: int | None = None, seed: int | None = None, offset: int = 0
) -> list[QAExample]:
    """Read a JSONL file of questions with accepted answers and a context.

    The context is in `documents` or `context`. Takes `limit` examples from index `offset` on, after
    shuffling if a seed is given.
    """
    result = []
    for number, record in enumerate(records(path)):
        with error_context(str(path)):
            result.append(parse_qa_example(record, number))
    if seed is not None:
        random.Random(seed).shuffle(result)
    result = result[offset:] if limit is None else result[offset : offset + limit]
    if not result:
        raise DataError(f"{path}: has no records from number {offset} on: use a smaller offset, or give more records")
    return result


def parse_qa_example(record: Mapping[str, Any], number: int) -> QAExample:
    """Convert a record to an example; `number` replaces a missing id."""
    with error_context(f"record {number}"):
        context = prepend_context("", record)
        question = record.get("question") or record.get("input")
        if not context or not question:
            raise DataError(f"needs a question, and documents or a context; has {sorted(record)}")
    answers = tuple(parse_example({**record, "question": question}, number).reference.get("answers") or ())
    if not answers:
        raise DataError(f"record {number}: has no answers to compare with: give `answers`")
    return QAExample(str(record.get("id", number)), context, str(question), answers)


def group_by_context(examples: Iterable[QAExample]) -> Iterator[list[QAExample]]:
    """Group consecutive examples that have the same context."""
    for _, group in groupby(examples, lambda example: example.context):
        yield list(group)


@dataclass(frozen=True)
class ProfileConfig:
    """Settings of a profile measurement.

    Metrics:
        "f1": F1 of the greedy answer.
        "likelihood": mean log-probability of the first accepted answer's tokens.
        "agreement": mean log-probability of the receiver's own greedy answer with all layers
            recomputed. Measures how much of its behavior is preserved, right or wrong.
    """

    metric: str = "likelihood"  # one of METRICS
    stride: int = 1  # ranges begin and end at multiples of it, in layers
    head_stride: int | None = None  # the same of patterns with a head; None: an eighth of the layers, `stride` at least
    max_tokens: int = 16  # of an answer
    system: str = "Read the text and answer the question in as few words as you can."  # before every context

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            raise ConfigError(f"metric={self.metric!r}: use one of {METRICS}")
        for name in ("stride", "max_tokens", "head_stride"):
            if (getattr(self, name) or 1) < 1 or getattr(self, name) == 0:
                raise ConfigError(f"{name}={getattr(self, name)}: use 1 or more")


def layer_ranges(layers: int, stride: int) -> list[LayerPattern]:
    """Return all contiguous layer ranges aligned to `stride`, except the full range."""
    edges = [*range(0, layers, stride), layers]
    return [LayerPattern.from_triplet(0, a, b) for a in edges for b in edges if a < b and (a or b < layers)]


def head_patterns(layers: int, stride: int) -> list[LayerPattern]:
    """Return all patterns [a, b, c] with a head, aligned to `stride`."""
    edges = [*range(stride, layers, stride), layers]
    return [LayerPattern.from_triplet(*triplet) for triplet in combinations(edges, 3)]


def all_but(layers: int, layer: int) -> LayerPattern:
    """Return the pattern that reuses one layer."""
    return LayerPattern.from_layers(set(range(layers)) - {layer})


def profiled_patterns(layers: int, config: ProfileConfig) -> list[LayerPattern]:
    """Return the ranges, then the patterns with a head, of a profile."""
    return [
        *layer_ranges(layers, config.stride),
        *head_patterns(layers, config.head_stride or max(config.stride, layers // 8)),
    ]


def enable_all_patterns(engine: Engine, receiver: str, sender: str) -> None:
    """Enable layer reuse for partial prefills of any pattern."""
    layers = engine.model_info.layers
    patterns = [LayerPattern.from_layers({layer}) for layer in range(layers)]
    engine.enable_layer_reuse(
        receiver, sender, selector=lambda load: LayerPattern.from_triplet(0, 0, layers), patterns=patterns
    )


def profile_pair(
    engine: Engine,
    receiver: str,
    examples: Sequence[QAExample],
    out: Path,
    *,
    sender: str = BASE_MODEL,
    config: ProfileConfig | None = None,
    on_done: Callable[[RunRecord], None] = lambda record: None,
) -> Profile:
    """Score each example for every recomputed layer range and every reused layer.

    Consecutive examples about one context share its prefills.

    Args:
        out: directory of the scores. Examples with stored scores are not measured again; times in its
            `profile.json` are retained.
        on_done: called with the record of each measured example.
    """
    config = config or ProfileConfig()
    if len({example.id for example in examples}) != len(examples):
        raise ConfigError("two inputs have the same id: give each its own")
    model_set, layers = engine.core.model_set, engine.model_info.layers
    pair = {"receiver": model_set.fingerprint(receiver), "sender": model_set.fingerprint(sender)}
    enable_all_patterns(engine, receiver, sender)
    run_dir = RunDirectory(out, {"version": VERSION, **pair, **asdict(config)})
    done = {record["id"]: record for record in run_dir.records("inputs")}
    for group in group_by_context(examples):
        if missing := [example for example in group if example.id not in done]:
            for record in _score_examples(engine, missing, receiver, sender, config):
                done[record["id"]] = record
                run_dir.append("inputs", record)
                on_done(record)
        for example in group:
            if done[example.id]["digest"] != example.digest:
                raise ConfigError(f"{out} holds another input of the id {example.id!r}: use another folder")
    results = [done[example.id] for example in examples]

    def column(kind: str, pattern: LayerPattern) -> tuple[float, ...]:
        return tuple(record[kind][str(pattern)] for record in results)

    profile = Profile(
        receiver=pair["receiver"],
        sender=pair["sender"],
        layers=layers,
        metric=config.metric,
        inputs=tuple(record["id"] for record in results),
        receiver_scores=tuple(record["receiver"] for record in results),
        full_reuse_scores=tuple(record["full_reuse"] for record in results),
        sender_scores=tuple(record["sender"] for record in results),
        per_layer=tuple(column("scores", all_but(layers, layer)) for layer in range(layers)),
        receiver_f1=tuple(record["receiver_f1"] for record in results),
        per_layer_f1=tuple(column("f1", all_but(layers, layer)) for layer in range(layers)),
        ranges=tuple(
            PatternScores(pattern, column("scores", pattern)) for pattern in profiled_patterns(layers, config)
        ),
        facts=asdict(config),
    )
    try:
        previous = Profile.load(out / "profile.json")
    except DataError:
        return profile
    if not previous.costs or (previous.receiver, previous.sender) != (profile.receiver, profile.sender):
        return profile
    return replace(profile, costs=previous.costs, facts={**profile.facts, "timed": previous.facts.get("timed")})


def _score_examples(
    engine: Engine, examples: Sequence[QAExample], receiver: str, sender: str, config: ProfileConfig
) -> list[RunRecord]:
    """Score examples that share a context, for all variants of `profile_pair`."""
    layers = engine.model_info.layers
    with engine.session(seed=0) as session:
        pair_context = PairContext(session, examples[0].context, receiver, sender, config)
        probes = [pair_context.make_probe(example) for example in examples]
        f1_probes = [QualityProbe(pair_context, example) for example in examples]
        result: list[dict[str, Any]] = [
            {
                "id": probe.example.id,
                "digest": probe.example.digest,
                "tokens": pair_context.sender_message.length,
                "receiver": probe.score(pair_context.full_prefill),
                "receiver_f1": f1_probe.score(pair_context.full_prefill),
                "full_reuse": probe.score(pair_context.sender_message),
                "sender": probe.score(pair_context.sender_message, sender),
                "scores": {},
                "f1": {},
            }
            for probe, f1_probe in zip(probes, f1_probes, strict=True)
        ]
        single = {all_but(layers, layer) for layer in range(layers)}
        patterns = sorted({*profiled_patterns(layers, config), *single}, key=lambda pattern: pattern.ranges[::-1])
        # ranges from one layer on are prefixes of the longest, and heads of the full prefill: their keys and
        # values serve all patterns
        for first, group in groupby(patterns, lambda pattern: pattern.ranges[-1][0]):
            whole = LayerPattern.from_triplet(0, first, layers)
            variant = pair_context.compute_variant(whole) if first else pair_context.full_prefill
            composed = {pattern: pair_context.compose(variant, pattern) for pattern in group}
            for kind, scorers in (("scores", probes), ("f1", f1_probes)):
                shown = {p: message for p, message in composed.items() if kind == "scores" or p in single}
                for record, probe in zip(result, scorers, strict=True):
                    scores = probe.score_all(list(shown.values()))
                    record[kind] |= {str(pattern): score for pattern, score in zip(shown, scores, strict=True)}
            _release(composed.values())
            if first:
                variant.release()
    return result


class PairContext:
    """One context prefilled by the sender, and its variants for the receiver."""

    def __init__(self, session: Session, context: str, receiver: str, sender: str, config: ProfileConfig) -> None:
        self.session = session
        self.receiver = receiver
        self.config = config
        self.sender_message = session.prefill(session.user(f"{config.system}\n\n{context}"), model=sender)

    def compute_variant(self, pattern: LayerPattern) -> Message:
        """Return a variant with the pattern's layers recomputed by the receiver."""
        return _ensure_partial(self.session.partial_prefill(self.sender_message, pattern, model=self.receiver), pattern)

    def compose(self, variant: Message, pattern: LayerPattern) -> Message:
        """Return a variant that is used in the pattern's layers only.

        Layers from 0 on are those of the full prefill, the last range is that of `variant`.
        """
        head, last = pattern.ranges[:-1], pattern.ranges[-1:]
        below = self.sender_message
        if head:
            below = self._restrict(self.full_prefill, LayerPattern(head), below)
        return self._restrict(variant, LayerPattern(last), below)

    def _restrict(self, variant: Message, pattern: LayerPattern, below: Message) -> Message:
        restricted = restrict_layers(self.session, self.sender_message, variant, pattern, below)
        assert isinstance(restricted, Message)
        return restricted

    @cached_property
    def full_prefill(self) -> Message:
        """Message of the receiver with all layers recomputed, the quality reference."""
        return self.compute_variant(LayerPattern.from_triplet(0, 0, self.session.engine.model_info.layers))

    def make_probe(self, example: QAExample) -> "QualityProbe":
        """Create a probe that scores variants with the example's question."""
        if self.config.metric == "likelihood":
            tokens = self.session.engine.tokenizer.encode(example.answers[0], add_special_tokens=False)
            return QualityProbe(self, example, tokens)
        if self.config.metric == "agreement":
            answer = QualityProbe(self, example).generate(self.full_prefill)
            tokens = answer.output_token_ids
            answer.release()
            return QualityProbe(self, example, tokens)
        return QualityProbe(self, example)


class QualityProbe:
    """Scorer of context variants by the answer to one question.

    Args:
        forced_tokens: token ids of the answer whose log-probability is the score; None: the score is
            F1 of the generated answer.
    """

    def __init__(
        self, pair_context: PairContext, example: QAExample, forced_tokens: Sequence[int] | None = None
    ) -> None:
        self.example = example
        self._pair_context = pair_context
        self._forced_tokens = forced_tokens

    def score_all(self, variants: Sequence[Message], model: str | None = None) -> list[float]:
        """Score several variants in one batch; `model` (default: the receiver) answers."""
        answers = [self.generate(variant, model) for variant in variants]
        scores = [self.compute_score(answer) for answer in answers]
        _release(answers)
        return scores

    def score(self, variant: Message, model: str | None = None) -> float:
        """Score one variant."""
        return self.score_all([variant], model)[0]

    def generate(self, variant: Message, model: str | None = None) -> Message:
        """Submit the question and the decode of its answer without waiting."""
        session, model = self._pair_context.session, model or self._pair_context.receiver
        question = session.prefill(session.user(self.example.question), [variant], model=model, kv_reuse="reuse")
        return session.decode(
            session.assistant(),
            [variant, question],
            sampling=SamplingParams(temperature=0, max_tokens=self._pair_context.config.max_tokens, logprobs=0),
            forced_tokens=self._forced_tokens,
            model=model,
            kv_reuse="reuse",
        )

    def compute_score(self, answer: Message) -> float:
        """Return F1 or mean token log-probability of a generated answer."""
        if self._forced_tokens is None:
            return f1(answer.text, self.example.answers)
        return statistics.fmean(token.logprob for token in answer.logprobs or [])


def _release(messages: Iterable[Message]) -> None:
    for message in messages:
        message.release()


def _ensure_partial(variant: Message, pattern: LayerPattern) -> Message:
    """Wait for a variant; raise InvalidRequestError after a fallback to full prefill."""
    layers = variant.wait_encoded().computed_layers
    if layers is None and 0 < len(pattern.layers) < variant._core.hf_model.model_info.layers:
        raise InvalidRequestError(
            f"message {variant.id} was computed in all layers, not in {pattern}: call engine.enable_layer_reuse first"
        )
    return variant


def time_patterns(
    engine: Engine,
    receiver: str,
    patterns: Sequence[LayerPattern],
    num_tokens: int,
    *,
    sender: str = BASE_MODEL,
    rounds: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Return the seconds of repeated partial prefills, by str(pattern).

    The context has `num_tokens` tokens. Patterns alternate in `rounds` rounds, after one to warm up.
    The sender's prefill is not timed.
    """
    tokens = [3 + (7 * i) % 50 for i in range(num_tokens)]
    seconds: dict[str, list[float]] = {str(pattern): [] for pattern in patterns}
    for number in range(rounds + 1):
        for pattern in patterns:
            engine.clear_cache()
            with engine.session() as session:
                context = session.prefill([2 + number, *tokens[1:]], model=sender).wait_encoded()
                start = clock()
                _ensure_partial(session.partial_prefill(context, pattern, model=receiver), pattern)
                if number:
                    seconds[str(pattern)].append(clock() - start)
    return seconds


def check_timing_tokens(engine: Engine, num_tokens: int) -> None:
    """Raise ConfigError unless `num_tokens` is 1 to the model's maximum positions."""
    max_tokens = engine.model_info.max_positions
    if not 1 <= num_tokens <= max_tokens:
        raise ConfigError(
            f"time_tokens={num_tokens}: {engine.model_info.name} has {max_tokens} positions: use 1 to {max_tokens} tokens"
        )


def with_timings(
    engine: Engine, receiver: str, profile: Profile, num_tokens: int, *, sender: str = BASE_MODEL, rounds: int = 3
) -> Profile:
    """Return the profile with Pareto points timed on `num_tokens` context tokens."""
    check_timing_tokens(engine, num_tokens)
    whole = LayerPattern.from_triplet(0, 0, profile.layers)
    points = replace(profile, costs={}).pareto_points()  # times of some patterns must not select which are timed now
    patterns = [whole, *(point.pattern for point in points if 0 < len(point.pattern.layers) < profile.layers)]
    engine.enable_layer_reuse(receiver, sender, selector=lambda load: whole, patterns=patterns)
    seconds = time_patterns(engine, receiver, patterns, num_tokens, sender=sender, rounds=rounds)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    costs = {name: median / medians[str(whole)] for name, median in medians.items()}
    return replace(profile, costs=costs, facts={**profile.facts, "timed": num_tokens})


def measure_service_times(
    engine: Engine,
    model: str,
    lengths: tuple[int, int] = (256, 1024),
    *,
    rounds: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> ServiceTimes:
    """Time full prefills of two lengths and decode steps.

    Returns the coefficients that fit the medians.
    """
    prefills: dict[int, list[float]] = {length: [] for length in lengths}
    steps = []
    sampling = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    for number in range(rounds + 1):
        for length, seconds in prefills.items():
            engine.clear_cache()
            with engine.session(model=model) as session:
                start = clock()
                context = session.prefill([2 + number] * length).wait_encoded()
                middle = clock()
                answer = session.decode([3], [context], sampling=sampling)
                answer.result()
                if number:  # the first round warms up
                    seconds.append(middle - start)
                    steps.append((clock() - middle) / len(answer.output_token_ids))
    (short, long), (least, most) = lengths, (statistics.median(seconds) for seconds in prefills.values())
    per_pair = max(0.0, 2 * (most / long - least / short) / (long - short))
    return ServiceTimes(max(most / long - per_pair * (long + 1) / 2, 1e-9), per_pair, statistics.median(steps))


def load_pair(model: str, receiver: str, sender: str | None, dtype: str) -> tuple[Engine, tuple[str, str]]:
    """Load an engine with base, receiver and sender models.

    Returns the engine and the names of receiver and sender; the sender is the base if `sender` is
    None. A directory that `peft` saved is an adapter, everything else a model.
    """
    engine = Engine.from_pretrained(model, dtype=dtype, config=EngineConfig(cache=CacheConfig(capacity=CACHE_TOKENS)))
    for name, path in (("receiver", receiver), ("sender", sender)):
        if path is not None:
            is_adapter = (Path(path).expanduser() / "adapter_config.json").is_file()
            (engine.add_adapter if is_adapter else engine.add_model)(name, path)
    return engine, ("receiver", BASE_MODEL if sender is None else "sender")
