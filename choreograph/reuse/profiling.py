"""Measures what a pair of models loses by sharing (DroidSpeak, sections 3.2 and 4.3). Owns the run and its records.

Every stretch that begins at one layer is measured from a single partial prefill to the last layer: a stretch that ends
earlier has the same keys and values, and is that prefill seen in fewer layers.
"""

import hashlib
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from ..config import CacheConfig, EngineConfig
from ..core import Engine
from ..errors import CallError, ConfigError, DataError
from ..evaluation.folder import Folder, Record
from ..evaluation.scores import f1
from ..message import Message
from ..pattern import Pattern
from ..session import Session
from ..types import BASE, SamplingParams
from .profile import Cell, Profile

METRICS = ("f1", "likelihood", "agreement")
ROOM = 32_768


@dataclass(frozen=True)
class Asked:
    """A context that the sender encodes, and a question about it for the receiver."""

    id: str
    context: str
    question: str
    answers: tuple[str, ...]

    @property
    def digest(self) -> str:
        said = json.dumps([self.context, self.question, self.answers], ensure_ascii=False)
        return hashlib.sha256(said.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Setting:
    """metric: "f1" of the greedy answer, "likelihood", the mean log-probability of the first known answer's tokens, or
    "agreement", that of what the receiver says greedily where it computes everything: how much of its behaviour is
    kept, whether or not that is right.

    every: begins and ends of stretches lie so many layers apart. system: what stands before every context.
    """

    metric: str = "likelihood"
    every: int = 1
    max_tokens: int = 16
    system: str = "Read the text and answer the question in as few words as you can."

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            raise ConfigError(f"metric={self.metric!r}: use one of {METRICS}")
        if self.every < 1 or self.max_tokens < 1:
            raise ConfigError("every and max_tokens: use 1 or more")


def boundaries(layers: int, every: int) -> list[int]:
    """The layers where stretches may begin and end."""
    return [*range(0, layers, every), layers]


def stretches(layers: int, every: int) -> list[Pattern]:
    """Every stretch between two boundaries, but for all layers at once."""
    edges = boundaries(layers, every)
    found = [Pattern.of(0, a, b) for a in edges for b in edges if a < b]
    return [pattern for pattern in found if len(pattern.layers) < layers]


def prepare(engine: Engine, receiver: str, sender: str, every: int = 1, *, tokens: int | None = None) -> None:
    """Lets the receiver begin at every boundary."""
    layers = engine.facts.layers
    single = [Pattern.of_layers(set(range(layers)) - {layer}) for layer in range(layers)]
    patterns = [*stretches(layers, every), *single, *(Pattern.of_layers({layer}) for layer in range(layers))]
    engine.share(receiver, sender, choose=lambda load: Pattern.of(0, 0, layers), patterns=patterns, tokens=tokens)


def measure(
    engine: Engine,
    receiver: str,
    asked: Sequence[Asked],
    out: Path,
    *,
    sender: str = BASE,
    setting: Setting | None = None,
    on_done: Callable[[Record], None] = lambda record: None,
) -> Profile:
    """Measures every input under every stretch of layers; one that is in `out` is not measured again. Inputs of one
    context that follow each other share its prefills. Times in the pair's `profile.json` in `out` are kept."""
    setting = setting or Setting()
    if len({one.id for one in asked}) != len(asked):
        raise ConfigError("two inputs have the same id")
    names = {"receiver": engine.runner.family.fingerprint(receiver), "sender": engine.runner.family.fingerprint(sender)}
    prepare(engine, receiver, sender, setting.every)
    folder = Folder(out, {**names, **asdict(setting)})
    done = {record["id"]: record for record in folder.records("inputs")}
    for group in by_context(asked):
        if missing := [one for one in group if one.id not in done]:
            for record in _measure(engine, missing, receiver, sender, setting):
                done[record["id"]] = record
                folder.add("inputs", record)
                on_done(record)
        for one in group:
            if done[one.id]["digest"] != one.digest:
                raise ConfigError(f"{out} holds another input of the id {one.id!r}: use another folder")
    found = _profile([done[one.id] for one in asked], engine.facts.layers, setting, names)
    return _with_known_times(found, out / "profile.json")


def _profile(records: Sequence[Record], layers: int, setting: Setting, names: Mapping[str, str]) -> Profile:
    cells = (Cell(p, tuple(r["stretches"][str(p)] for r in records)) for p in stretches(layers, setting.every))
    return Profile(
        receiver=names["receiver"],
        sender=names["sender"],
        layers=layers,
        metric=setting.metric,
        inputs=tuple(r["id"] for r in records),
        own=tuple(r["own"] for r in records),
        reused=tuple(r["reused"] for r in records),
        sent=tuple(r["sent"] for r in records),
        single=tuple(tuple(r["single"][layer] for r in records) for layer in range(layers)),
        stretches=tuple(cells),
        facts=asdict(setting),
    )


def _with_known_times(found: Profile, file: Path) -> Profile:
    """The profile with the times that an earlier one of the pair has in its file."""
    try:
        known = Profile.load(file)
    except DataError:
        return found
    if not known.costs or (known.receiver, known.sender) != (found.receiver, found.sender):
        return found
    return replace(found, costs=known.costs, facts={**found.facts, "timed": known.facts.get("timed")})


def measure_scattered(
    engine: Engine,
    receiver: str,
    asked: Sequence[Asked],
    found: Profile,
    counts: Sequence[int],
    *,
    sender: str = BASE,
    setting: Setting | None = None,
) -> Profile:
    """The profile with Figure 11's other side: so many of its most critical layers, wherever they are, each stretch of
    them begun from the sender's inputs. asked: the same inputs."""
    setting = setting or Setting()
    if tuple(one.id for one in asked) != found.inputs:
        raise ConfigError("scattered layers are compared on the inputs of the profile: give the same ones")
    prepare(engine, receiver, sender, setting.every)
    worst = sorted(range(found.layers), key=lambda layer: -found.sensitivity()[layer].value)
    patterns = [Pattern.of_layers(worst[:count]) for count in counts]
    values: list[list[float]] = [[] for _ in patterns]
    for group in by_context(asked):
        with engine.session(seed=0) as session:
            scene = Scene(session, group[0].context, receiver, sender, setting)
            versions = [scene.version(p) for p in patterns]
            for one in group:
                for known, value in zip(values, scene.about(one).ask_all(versions), strict=True):
                    known.append(value)
    cells = tuple(Cell(pattern, tuple(known)) for pattern, known in zip(patterns, values, strict=True))
    return replace(found, scattered=cells)


def measure_costs(
    engine: Engine,
    receiver: str,
    patterns: Sequence[Pattern],
    tokens: int,
    *,
    sender: str = BASE,
    rounds: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of a receiver's prefill of `tokens` tokens that the sender has encoded, of every pattern, by its name: of
    all rounds, in which patterns take turns. Timed alone; what the sender's encoding cost is not counted."""
    words = [3 + (7 * i) % 50 for i in range(tokens)]
    seconds: dict[str, list[float]] = {str(p): [] for p in patterns}
    for number in range(rounds + 1):
        for pattern in patterns:
            engine.clear_cache()
            with engine.session() as session:
                text = session.prefill([2 + number, *words[1:]], model=sender).encode()
                began = clock()
                checked(session.partial_prefill(text, pattern, model=receiver), pattern)
                if number:  # the first round warms up
                    seconds[str(pattern)].append(clock() - began)
    return seconds


def _measure(engine: Engine, asked: Sequence[Asked], receiver: str, sender: str, setting: Setting) -> list[Record]:
    """Inputs of one context under every stretch, and with every single layer reused."""
    layers = engine.facts.layers
    edges = boundaries(layers, setting.every)
    with engine.session(seed=0) as session:
        scene = Scene(session, asked[0].context, receiver, sender, setting)
        own = scene.own
        questions = [scene.about(one) for one in asked]
        singles = [Pattern.of_layers(set(range(layers)) - {layer}) for layer in range(layers)]
        found: list[dict[str, Any]] = [
            {"id": one.id, "digest": one.digest, "tokens": scene.text.length}
            | {"own": question.ask(own), "reused": question.ask(scene.text), "sent": question.ask(scene.text, sender)}
            | {"stretches": {}}
            for one, question in zip(asked, questions, strict=True)
        ]
        narrow = scene.narrowed(own, singles)
        for record, question in zip(found, questions, strict=True):
            record["single"] = question.ask_all(narrow)
        release(one for one in narrow if one is not scene.text)  # of a model of one layer nothing is left
        for begin in edges[:-1]:
            ends = [Pattern.of(0, begin, end) for end in edges if end > begin and (begin or end < layers)]
            whole = own if not begin else scene.version(Pattern.of(0, begin, layers))
            narrow = scene.narrowed(whole, ends)
            for record, question in zip(found, questions, strict=True):
                record["stretches"] |= {str(p): v for p, v in zip(ends, question.ask_all(narrow), strict=True)}
            release(narrow)
            if whole is not own:
                whole.release()
    return found


def by_context(asked: Iterable[Asked]) -> Iterator[list[Asked]]:
    """Inputs of one context that follow each other, together."""
    for _, group in groupby(asked, lambda one: one.context):
        yield list(group)


def release(messages: Iterable[Message]) -> None:
    for message in messages:
        message.release()


class Scene:
    """One context in a session, encoded by the sender, and the receiver's versions of it."""

    def __init__(self, session: Session, context: str, receiver: str, sender: str, setting: Setting) -> None:
        self.session = session
        self.receiver = receiver
        self.setting = setting
        self.text = session.prefill(session.user(f"{setting.system}\n\n{context}"), model=sender)

    def version(self, pattern: Pattern) -> Message:
        return checked(self.session.partial_prefill(self.text, pattern, model=self.receiver), pattern)

    def narrowed(self, version: Message, patterns: Iterable[Pattern]) -> list[Message]:
        return [self.session.versions.narrowed(self.text, version, pattern) for pattern in patterns]

    @cached_property
    def own(self) -> Message:
        """What the receiver computes in all layers."""
        return self.version(Pattern.of(0, 0, self.session.engine.facts.layers))

    def about(self, one: Asked) -> "Question":
        if self.setting.metric == "likelihood":
            known = self.session.engine.tokenizer.encode(one.answers[0], add_special_tokens=False)
            return Question(self, one, known)
        if self.setting.metric == "agreement":
            answer = Question(self, one).answer(self.own)
            said = answer.generated
            answer.release()
            return Question(self, one, said)
        return Question(self, one)


class Question:
    """About a scene. said: the answer whose likelihood is asked for, if one is."""

    def __init__(self, scene: Scene, one: Asked, said: Sequence[int] | None = None) -> None:
        self._scene = scene
        self._one = one
        self._said = said

    def ask_all(self, versions: Sequence[Message]) -> list[float]:
        """The quality of every version; all are asked in the same steps."""
        answers = [self.answer(version) for version in versions]
        values = [self.quality(answer) for answer in answers]
        release(answers)
        return values

    def ask(self, version: Message, model: str | None = None) -> float:
        """The quality of one version."""
        answer = self.answer(version, model)
        value = self.quality(answer)
        answer.release()
        return value

    def answer(self, version: Message, model: str | None = None) -> Message:
        """By the receiver, if no other model is named. Does not wait for it."""
        session, model = self._scene.session, model or self._scene.receiver
        question = session.prefill(session.user(self._one.question), [version], model=model, share="reuse")
        return session.decode(
            session.assistant(),
            [version, question],
            sampling=SamplingParams(temperature=0, max_tokens=self._scene.setting.max_tokens, logprobs=0),
            forced_tokens=self._said,
            model=model,
            share="reuse",
        )

    def quality(self, answer: Message) -> float:
        if self._said is None:
            return f1(answer.text, self._one.answers)
        logprobs = answer.logprobs or []
        return sum(one.logprob for one in logprobs) / len(logprobs)


def checked(version: Message, pattern: Pattern) -> Message:
    """A version that is complete and was computed in these layers: one that had to be computed whole says nothing of a
    pattern."""
    layers = version.encode().layers
    if layers is None and 0 < len(pattern.layers) < version._runner.adapter.facts.layers:
        raise CallError(f"message {version.id} was computed in all layers, not in {pattern}: call engine.share first")
    return version


def timed(
    engine: Engine, receiver: str, found: Profile, tokens: int, *, sender: str = BASE, rounds: int = 3
) -> Profile:
    """The profile with the time of the patterns on its frontier, over that of a full prefill of so many tokens."""
    check_timed(engine, tokens)
    whole = Pattern.of(0, 0, found.layers)
    points = replace(found, costs={}).frontier()  # by layers: what was timed before says nothing of others
    patterns = [whole, *(p.pattern for p in points if 0 < len(p.pattern.layers) < found.layers)]
    engine.share(receiver, sender, choose=lambda load: whole, patterns=patterns)
    seconds = measure_costs(engine, receiver, patterns, tokens, sender=sender, rounds=rounds)
    middle = {name: statistics.median(times) for name, times in seconds.items()}
    costs = {name: value / middle[str(whole)] for name, value in middle.items()}
    return replace(found, costs=costs, facts={**found.facts, "timed": tokens})


def check_timed(engine: Engine, tokens: int) -> None:
    """Raises ConfigError where no prompt of so many tokens could be timed; to be asked before hours of measuring."""
    most = engine.facts.max_positions
    if not 1 <= tokens <= most:
        raise ConfigError(f"timed={tokens}: {engine.facts.name} has {most} positions: use 1 to {most} tokens")


def open_pair(model: str, receiver: str, sender: str | None, dtype: str) -> tuple[Engine, tuple[str, str]]:
    """An engine over a base, a receiver and, if it is not the base, a sender; and their names in it."""
    config = EngineConfig(cache=CacheConfig(tokens=ROOM))  # the inputs of every layer are kept of so many
    engine = Engine.from_pretrained(model, dtype=dtype, config=config)
    add(engine, "receiver", receiver)
    if sender is not None:
        add(engine, "sender", sender)
    return engine, ("receiver", "sender" if sender is not None else BASE)


def add(engine: Engine, name: str, source: str) -> None:
    """Serves a model beside the base: an adapter where the source is a folder that `peft` saved, else weights."""
    if (Path(source).expanduser() / "adapter_config.json").is_file():
        engine.add_adapter(name, source)
    else:
        engine.add_model(name, source)
