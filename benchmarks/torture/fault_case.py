"""One input of the campaign of faults: an engine, programs, and the tokens that they have without faults."""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from choreograph import CacheConfig, ChoreographError, Engine, EngineConfig, Message, SamplingParams, Session
from choreograph.models.hf_model import HFModel

from .campaign import Tally, leftovers
from .rounding import LIMIT, Margins, first_difference
from .soak_programs import KINDS, Program, compare_outputs
from .tiny_family import SPECIAL, Family, build_model, tokenizer

PAGE_SIZE = 8
CAPACITY = 1024  # tokens: fewer than the programs of a group use together
NO_FAMILY = Family(Path(), Path(), ())  # these programs load no model
PROGRAMS = ("revisits", "revisits", "revisits", "together", "agents", "guard", "modules", "stream")


class BrokenPromise(Exception):
    """What was promised does not hold."""


class Injected(Exception):
    """The fault itself."""


def expect(is_kept: object, what: str) -> None:
    """Raise BrokenPromise unless a promise is kept."""
    if not is_kept:
        raise BrokenPromise(what)


@cache
def the_model() -> Any:
    return build_model()


def open_engine(**cache_options: Any) -> Engine:
    """Return an engine over the tiny model; its cache is too small for the programs."""
    options = {"capacity": CAPACITY, "page_size": PAGE_SIZE, "poison_freed_pages": True, **cache_options}
    return Engine.from_pretrained(the_model(), tokenizer=tokenizer(), config=EngineConfig(cache=CacheConfig(**options)))


@cache
def quiet_engine() -> Engine:
    return open_engine(capacity=16384)


@dataclass(frozen=True)
class Node:
    """One call of a graph."""

    tokens: list[int]
    parents: list[int]
    sampling: SamplingParams | None  # of a decode


Result = list[int] | Exception  # tokens of a message, or its error


@dataclass
class Case:
    """One input: what is drawn, counted and written."""

    rng: random.Random
    tally: Tally
    folder: Path  # empty, of this input alone

    def inject(self, name: str, number: int = 1) -> None:
        """Count faults."""
        self.tally.faults += number
        self.tally.counts[f"faults: {name}"] += number

    # -- programs, none of whose requests may fail ----------------------------------------------------------

    def run_programs(self, engine: Engine, kind: str | None = None) -> None:
        """Run a group of programs and compare their tokens with those of a quiet engine."""
        seed, kind = self.rng.getrandbits(40), kind or self.rng.choice(PROGRAMS)
        program = Program(engine, NO_FAMILY, random.Random(seed), "0", is_quiet=False)
        KINDS[kind][0](program)
        quiet = Program(quiet_engine(), NO_FAMILY, random.Random(seed), "0", is_quiet=True)
        KINDS[kind][0](quiet)
        quiet_engine().run_until_idle()
        quiet_engine().clear_cache()
        self.tally.counts["programs"] += 1
        self.tally.counts["requests"] += program.num_requests
        differences, _ = compare_outputs(program.outputs, quiet.outputs)
        expect(not differences, f"{kind}, {differences}")

    # -- graphs, some of whose requests may fail ------------------------------------------------------------

    def draw_graph(self, most: int = 12) -> list[Node]:
        """Return a random graph of messages."""
        rng, graph = self.rng, list[Node]()
        for index in range(rng.randint(3, most)):
            parents = rng.sample(range(index), min(index, rng.randrange(3)))
            tokens = [rng.randrange(len(SPECIAL), len(tokenizer())) for _ in range(rng.randint(1, 30))]
            sampling = None
            if rng.random() < 0.7:
                is_greedy = rng.random() < 0.5
                kind = {"temperature": 0} if is_greedy else {"temperature": 1.0, "top_k": 8}
                options: dict[str, Any] = {"max_tokens": rng.randint(1, 12), "seed": rng.getrandbits(30), **kind}
                sampling = SamplingParams(**options)
            graph.append(Node(tokens, parents, sampling))
        return graph

    def check_graph(self, graph: Sequence[Node], results: Sequence[Result]) -> set[int]:
        """Compare what did not fail with a quiet run; return what failed with no parent that failed.

        Raises:
            BrokenPromise: if tokens differ, a request failed with an error of another library, or one that attends to a
                failed one did not fail.
        """
        failed = {index for index, result in enumerate(results) if isinstance(result, Exception)}
        for index in failed:
            expect(isinstance(results[index], ChoreographError), f"message {index} failed with {results[index]!r}")
        for index, node in enumerate(graph):
            expect(index in failed or not failed & set(node.parents), f"message {index} attends to a failed one")
        margins = dict[int, Margins]()

        def watch(index: int, message: Message) -> None:
            sampling = graph[index].sampling
            assert sampling is not None
            margins[index] = Margins(message, sampling)

        quiet = run_graph(quiet_engine(), graph, skipped=failed, prepare=watch)
        quiet_engine().clear_cache()
        rounded = set[int]()  # messages that read other tokens because of rounding, or differ by it
        for index, node in enumerate(graph):
            result, expected = results[index], quiet[index]
            if isinstance(result, Exception) or isinstance(expected, Exception) or result == expected:
                continue
            place = first_difference(result, expected)
            values = margins[index].values if index in margins else []
            is_rounding = place < len(values) and values[place] < LIMIT
            if is_rounding or rounded & set(node.parents):
                rounded.add(index)
            expect(index in rounded, f"message {index}: {result} instead of {expected}")
        self.tally.counts["requests"] += len(graph)
        return {index for index in failed if not failed & set(graph[index].parents)}

    def finish(self, engine: Engine) -> None:
        """Check that nothing is left in an engine; close it."""
        left, events = leftovers(engine), engine.stats().events
        expect(not left, f"left: {left}")
        for kind in ("offloaded", "loaded", "recomputing", "failed_transfer", "demoted", "failed"):
            self.tally.counts[f"events: {kind}"] += events.get(kind, 0)
        engine.close()

    @contextmanager
    def engine(self, **cache_options: Any) -> Iterator[Engine]:
        """Open an engine; check at the end that nothing is left."""
        engine = open_engine(**cache_options)
        yield engine
        self.finish(engine)


def run_graph(
    engine: Engine,
    graph: Sequence[Node],
    *,
    skipped: Iterable[int] = (),
    prepare: Callable[[int, Message], None] = lambda index, message: None,
    attempt: Callable[[Callable[[], Any]], Any] = lambda function: function(),
) -> list[Result]:
    """Run a graph in one session; return tokens or the error of each message.

    Args:
        skipped: messages to leave out, with those that attend to them; their result is an empty list.
        prepare: called for each decode before it is computed.
        attempt: calls a function until it returns.
    """
    skipped, messages = set(skipped), dict[int, Message]()
    results: list[Result] = [[] for _ in graph]
    session = attempt(lambda: engine.session(seed=1))
    for index, node in enumerate(graph):
        if index in skipped:
            continue
        try:
            messages[index] = attempt(lambda: submit(session, node, messages))  # noqa: B023 - called at once
        except ChoreographError as exc:  # a parent has failed
            results[index] = exc
            skipped |= {index}
            continue
        if node.sampling is not None:
            prepare(index, messages[index])
    for index, message in messages.items():
        try:
            results[index] = list(attempt(lambda: message.result().output_token_ids))  # noqa: B023
        except ChoreographError as exc:
            results[index] = exc
    attempt(session.close)
    return results


def submit(session: Session, node: Node, messages: Mapping[int, Message]) -> Message:
    parents = [messages[parent] for parent in node.parents if parent in messages]
    if node.sampling is None:
        return session.prefill(node.tokens, parents)
    return session.decode(node.tokens, parents, sampling=node.sampling)


def hf_model_of(engine: Engine) -> HFModel:
    return engine.core.hf_model
