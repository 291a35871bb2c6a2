"""Contexts with questions, from records of reading tasks. Knows no model."""

import hashlib
import json
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from ..config import CacheConfig, EngineConfig
from ..engine.cross_model import LayerPattern
from ..engine.engine import Engine
from ..engine.message import Message
from ..engine.session import Session
from ..errors import ConfigError, DataError, InvalidRequestError
from ..evaluation.datasets import error_context, parse_example, prepend_context, records
from ..evaluation.metrics import f1
from ..evaluation.run_dir import RunDirectory, RunRecord
from ..outputs import BASE_MODEL
from ..sampling_params import SamplingParams
from .profile import PatternScores, Profile


@dataclass(frozen=True)
class QAExample:
    """A context that the sender encodes, and a question about it for the receiver."""

    id: str
    context: str
    question: str
    answers: tuple[str, ...]

    @property
    def digest(self) -> str:
        said = json.dumps([self.context, self.question, self.answers], ensure_ascii=False)
        return hashlib.sha256(said.encode()).hexdigest()[:16]


def load_qa_examples(
    path: Path, *, limit: int | None = None, seed: int | None = None, offset: int = 0
) -> list[QAExample]:
    """From a .jsonl file of questions with `documents` or a `context`, and answers. Takes `limit` from `first` on,
    after shuffling if a seed is given."""
    result = []
    for number, record in enumerate(records(path)):
        with error_context(str(path)):
            result.append(parse_qa_example(record, number))
    if seed is not None:
        random.Random(seed).shuffle(result)
    result = result[offset:] if limit is None else result[offset : offset + limit]
    if not result:
        raise DataError(f"{path}: no records from number {offset} on")
    return result


def parse_qa_example(record: Mapping[str, Any], number: int) -> QAExample:
    """A record as a context and a question."""
    with error_context(f"record {number}"):
        context = prepend_context("", record)
        question = record.get("question") or record.get("input")
        if not context or not question:
            raise DataError(f"needs a question, and documents or a context; has {sorted(record)}")
    answers = tuple(parse_example({**record, "question": question}, number).reference.get("answers") or ())
    if not answers:
        raise DataError(f"record {number}: has no answers to compare with")
    return QAExample(str(record.get("id", number)), context, str(question), answers)


METRICS = ("f1", "likelihood", "agreement")

CACHE_TOKENS = 32_768


@dataclass(frozen=True)
class ProfileConfig:
    """metric: "f1" of the greedy answer, "likelihood", the mean log-probability of the first known answer's tokens, or
    "agreement", that of what the receiver says greedily where it computes everything: how much of its behaviour is
    kept, whether or not that is right.

    every: begins and ends of stretches lie so many layers apart. system: what stands before every context.
    """

    metric: str = "likelihood"
    stride: int = 1
    max_tokens: int = 16
    system: str = "Read the text and answer the question in as few words as you can."

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            raise ConfigError(f"metric={self.metric!r}: use one of {METRICS}")
        if self.stride < 1 or self.max_tokens < 1:
            raise ConfigError("stride and max_tokens: use 1 or more")


def layer_edges(layers: int, stride: int) -> list[int]:
    """The layers where stretches may begin and end."""
    return [*range(0, layers, stride), layers]


def layer_ranges(layers: int, stride: int) -> list[LayerPattern]:
    """Every stretch between two boundaries, but for all layers at once."""
    edges = layer_edges(layers, stride)
    result = [LayerPattern.from_triplet(0, a, b) for a in edges for b in edges if a < b]
    return [pattern for pattern in result if len(pattern.layers) < layers]


def enable_all_patterns(
    engine: Engine, receiver: str, sender: str, stride: int = 1, *, capacity: int | None = None
) -> None:
    """Lets the receiver begin at every boundary."""
    layers = engine.model_info.layers
    single = [LayerPattern.from_layers(set(range(layers)) - {layer}) for layer in range(layers)]
    patterns = [*layer_ranges(layers, stride), *single, *(LayerPattern.from_layers({layer}) for layer in range(layers))]
    engine.enable_layer_reuse(
        receiver,
        sender,
        selector=lambda load: LayerPattern.from_triplet(0, 0, layers),
        patterns=patterns,
        capacity=capacity,
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
    """Measures every input under every stretch of layers; one that is in `out` is not measured again. Inputs of one
    context that follow each other share its prefills. Times in the pair's `profile.json` in `out` are kept."""
    config = config or ProfileConfig()
    if len({one.id for one in examples}) != len(examples):
        raise ConfigError("two inputs have the same id")
    names = {
        "receiver": engine.core.model_set.fingerprint(receiver),
        "sender": engine.core.model_set.fingerprint(sender),
    }
    enable_all_patterns(engine, receiver, sender, config.stride)
    folder = RunDirectory(out, {**names, **asdict(config)})
    done = {record["id"]: record for record in folder.records("inputs")}
    for group in group_by_context(examples):
        if missing := [one for one in group if one.id not in done]:
            for record in _score_examples(engine, missing, receiver, sender, config):
                done[record["id"]] = record
                folder.append("inputs", record)
                on_done(record)
        for one in group:
            if done[one.id]["digest"] != one.digest:
                raise ConfigError(f"{out} holds another input of the id {one.id!r}: use another folder")
    result = _build_profile([done[one.id] for one in examples], engine.model_info.layers, config, names)
    return _keep_timings(result, out / "profile.json")


def _build_profile(
    records: Sequence[RunRecord], layers: int, config: ProfileConfig, names: Mapping[str, str]
) -> Profile:
    cells = (
        PatternScores(p, tuple(r["stretches"][str(p)] for r in records)) for p in layer_ranges(layers, config.stride)
    )
    return Profile(
        receiver=names["receiver"],
        sender=names["sender"],
        layers=layers,
        metric=config.metric,
        inputs=tuple(r["id"] for r in records),
        receiver_scores=tuple(r["own"] for r in records),
        full_reuse_scores=tuple(r["reused"] for r in records),
        sender_scores=tuple(r["sent"] for r in records),
        per_layer=tuple(tuple(r["single"][layer] for r in records) for layer in range(layers)),
        ranges=tuple(cells),
        facts=asdict(config),
    )


def _keep_timings(profile: Profile, file: Path) -> Profile:
    """The profile with the times that an earlier one of the pair has in its file."""
    try:
        known = Profile.load(file)
    except DataError:
        return profile
    if not known.costs or (known.receiver, known.sender) != (profile.receiver, profile.sender):
        return profile
    return replace(profile, costs=known.costs, facts={**profile.facts, "timed": known.facts.get("timed")})


def profile_top_layers(
    engine: Engine,
    receiver: str,
    examples: Sequence[QAExample],
    profile: Profile,
    counts: Sequence[int],
    *,
    sender: str = BASE_MODEL,
    config: ProfileConfig | None = None,
) -> Profile:
    """The profile with Figure 11's other side: so many of its most critical layers, wherever they are, each stretch of
    them begun from the sender's inputs. asked: the same inputs."""
    config = config or ProfileConfig()
    if tuple(one.id for one in examples) != profile.inputs:
        raise ConfigError("scattered layers are compared on the inputs of the profile: give the same ones")
    enable_all_patterns(engine, receiver, sender, config.stride)
    worst = sorted(range(profile.layers), key=lambda layer: -profile.sensitivity()[layer].value)
    patterns = [LayerPattern.from_layers(worst[:count]) for count in counts]
    values: list[list[float]] = [[] for _ in patterns]
    for group in group_by_context(examples):
        with engine.session(seed=0) as session:
            scene = PairContext(session, group[0].context, receiver, sender, config)
            versions = [scene.compute_variant(p) for p in patterns]
            for one in group:
                for known, value in zip(values, scene.make_probe(one).score_all(versions), strict=True):
                    known.append(value)
    cells = tuple(PatternScores(pattern, tuple(known)) for pattern, known in zip(patterns, values, strict=True))
    return replace(profile, top_layers=cells)


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
    """Seconds of a receiver's prefill of `tokens` tokens that the sender has encoded, of every pattern, by its name: of
    all rounds, in which patterns take turns. Timed alone; what the sender's encoding cost is not counted."""
    words = [3 + (7 * i) % 50 for i in range(num_tokens)]
    seconds: dict[str, list[float]] = {str(p): [] for p in patterns}
    for number in range(rounds + 1):
        for pattern in patterns:
            engine.clear_cache()
            with engine.session() as session:
                text = session.prefill([2 + number, *words[1:]], model=sender).wait_encoded()
                began = clock()
                ensure_partial(session.partial_prefill(text, pattern, model=receiver), pattern)
                if number:  # the first round warms up
                    seconds[str(pattern)].append(clock() - began)
    return seconds


def _score_examples(
    engine: Engine, examples: Sequence[QAExample], receiver: str, sender: str, config: ProfileConfig
) -> list[RunRecord]:
    """Inputs of one context under every stretch, and with every single layer reused."""
    layers = engine.model_info.layers
    edges = layer_edges(layers, config.stride)
    with engine.session(seed=0) as session:
        scene = PairContext(session, examples[0].context, receiver, sender, config)
        own = scene.full_prefill
        questions = [scene.make_probe(one) for one in examples]
        singles = [LayerPattern.from_layers(set(range(layers)) - {layer}) for layer in range(layers)]
        result: list[dict[str, Any]] = [
            {"id": one.id, "digest": one.digest, "tokens": scene.sender_message.length}
            | {
                "own": question.score(own),
                "reused": question.score(scene.sender_message),
                "sent": question.score(scene.sender_message, sender),
            }
            | {"stretches": {}}
            for one, question in zip(examples, questions, strict=True)
        ]
        narrow = scene.restrict_layers(own, singles)
        for record, question in zip(result, questions, strict=True):
            record["single"] = question.score_all(narrow)
        release_all(one for one in narrow if one is not scene.sender_message)  # of a model of one layer nothing is left
        for begin in edges[:-1]:
            ends = [
                LayerPattern.from_triplet(0, begin, end) for end in edges if end > begin and (begin or end < layers)
            ]
            whole = own if not begin else scene.compute_variant(LayerPattern.from_triplet(0, begin, layers))
            narrow = scene.restrict_layers(whole, ends)
            for record, question in zip(result, questions, strict=True):
                record["stretches"] |= {str(p): v for p, v in zip(ends, question.score_all(narrow), strict=True)}
            release_all(narrow)
            if whole is not own:
                whole.release()
    return result


def group_by_context(examples: Iterable[QAExample]) -> Iterator[list[QAExample]]:
    """Inputs of one context that follow each other, together."""
    for _, group in groupby(examples, lambda one: one.context):
        yield list(group)


def release_all(messages: Iterable[Message]) -> None:
    for message in messages:
        message.release()


class PairContext:
    """One context in a session, encoded by the sender, and the receiver's versions of it."""

    def __init__(self, session: Session, context: str, receiver: str, sender: str, config: ProfileConfig) -> None:
        self.session = session
        self.receiver = receiver
        self.config = config
        self.sender_message = session.prefill(session.user(f"{config.system}\n\n{context}"), model=sender)

    def compute_variant(self, pattern: LayerPattern) -> Message:
        return ensure_partial(self.session.partial_prefill(self.sender_message, pattern, model=self.receiver), pattern)

    def restrict_layers(self, variant: Message, patterns: Iterable[LayerPattern]) -> list[Message]:
        return [self.session._variants.restrict_layers(self.sender_message, variant, pattern) for pattern in patterns]

    @cached_property
    def full_prefill(self) -> Message:
        """What the receiver computes in all layers."""
        return self.compute_variant(LayerPattern.from_triplet(0, 0, self.session.engine.model_info.layers))

    def make_probe(self, example: QAExample) -> "QualityProbe":
        if self.config.metric == "likelihood":
            known = self.session.engine.tokenizer.encode(example.answers[0], add_special_tokens=False)
            return QualityProbe(self, example, known)
        if self.config.metric == "agreement":
            answer = QualityProbe(self, example).generate(self.full_prefill)
            said = answer.output_token_ids
            answer.release()
            return QualityProbe(self, example, said)
        return QualityProbe(self, example)


class QualityProbe:
    """About a scene. said: the answer whose likelihood is asked for, if one is."""

    def __init__(
        self, pair_context: PairContext, example: QAExample, forced_tokens: Sequence[int] | None = None
    ) -> None:
        self._pair_context = pair_context
        self._example = example
        self._forced_tokens = forced_tokens

    def score_all(self, variants: Sequence[Message]) -> list[float]:
        """The quality of every version; all are asked in the same steps."""
        answers = [self.generate(version) for version in variants]
        values = [self.compute_score(answer) for answer in answers]
        release_all(answers)
        return values

    def score(self, variant: Message, model: str | None = None) -> float:
        """The quality of one version."""
        answer = self.generate(variant, model)
        value = self.compute_score(answer)
        answer.release()
        return value

    def generate(self, variant: Message, model: str | None = None) -> Message:
        """By the receiver, if no other model is named. Does not wait for it."""
        session, model = self._pair_context.session, model or self._pair_context.receiver
        question = session.prefill(session.user(self._example.question), [variant], model=model, kv_reuse="reuse")
        return session.decode(
            session.assistant(),
            [variant, question],
            sampling=SamplingParams(temperature=0, max_tokens=self._pair_context.config.max_tokens, logprobs=0),
            forced_tokens=self._forced_tokens,
            model=model,
            kv_reuse="reuse",
        )

    def compute_score(self, answer: Message) -> float:
        if self._forced_tokens is None:
            return f1(answer.text, self._example.answers)
        logprobs = answer.logprobs or []
        return sum(one.logprob for one in logprobs) / len(logprobs)


def ensure_partial(variant: Message, pattern: LayerPattern) -> Message:
    """A version that is complete and was computed in these layers: one that had to be computed whole says nothing of a
    pattern."""
    layers = variant.wait_encoded().computed_layers
    if layers is None and 0 < len(pattern.layers) < variant._core.hf_model.model_info.layers:
        raise InvalidRequestError(
            f"message {variant.id} was computed in all layers, not in {pattern}: call engine.enable_layer_reuse first"
        )
    return variant


def with_timings(
    engine: Engine, receiver: str, profile: Profile, num_tokens: int, *, sender: str = BASE_MODEL, rounds: int = 3
) -> Profile:
    """The profile with the time of the patterns on its frontier, over that of a full prefill of so many tokens."""
    check_timing_tokens(engine, num_tokens)
    whole = LayerPattern.from_triplet(0, 0, profile.layers)
    points = replace(profile, costs={}).frontier()  # by layers: what was timed before says nothing of others
    patterns = [whole, *(p.pattern for p in points if 0 < len(p.pattern.layers) < profile.layers)]
    engine.enable_layer_reuse(receiver, sender, selector=lambda load: whole, patterns=patterns)
    seconds = time_patterns(engine, receiver, patterns, num_tokens, sender=sender, rounds=rounds)
    middle = {name: statistics.median(times) for name, times in seconds.items()}
    costs = {name: value / middle[str(whole)] for name, value in middle.items()}
    return replace(profile, costs=costs, facts={**profile.facts, "timed": num_tokens})


def check_timing_tokens(engine: Engine, num_tokens: int) -> None:
    """Raises ConfigError where no prompt of so many tokens could be timed; to be asked before hours of measuring."""
    most = engine.model_info.max_positions
    if not 1 <= num_tokens <= most:
        raise ConfigError(
            f"time_tokens={num_tokens}: {engine.model_info.name} has {most} positions: use 1 to {most} tokens"
        )


def load_pair(model: str, receiver: str, sender: str | None, dtype: str) -> tuple[Engine, tuple[str, str]]:
    """An engine over a base, a receiver and, if it is not the base, a sender; and their names in it."""
    config = EngineConfig(cache=CacheConfig(capacity=CACHE_TOKENS))  # the inputs of every layer are kept of so many
    engine = Engine.from_pretrained(model, dtype=dtype, config=config)
    add_model_or_adapter(engine, "receiver", receiver)
    if sender is not None:
        add_model_or_adapter(engine, "sender", sender)
    return engine, ("receiver", "sender" if sender is not None else BASE_MODEL)


def add_model_or_adapter(engine: Engine, name: str, source: str) -> None:
    """Serves a model beside the base: an adapter where the source is a folder that `peft` saved, else weights."""
    if (Path(source).expanduser() / "adapter_config.json").is_file():
        engine.add_adapter(name, source)
    else:
        engine.add_model(name, source)
