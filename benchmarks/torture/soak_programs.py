"""Programs of the soak: short random workflows, each of which depends on a seed alone.

A program gives the same tokens on a crowded engine as on a quiet one. Each kind is a function in `KINDS`.
"""

import asyncio
import random
import string
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, get_args

import torch

from choreograph import Budget, ChoreographError, Engine, Message, Repair, SamplingParams, Session
from choreograph.agents import StepGraph, Workflow
from choreograph.api.concurrency import run_concurrently
from choreograph.errors import ConfigError
from choreograph.outputs import Mode
from choreograph.prompt_cache import PromptCache

from .rounding import LIMIT, Margins, first_difference
from .tiny_family import SPECIAL, Family, tokenizer

TENANTS = ("north", "south", "west")
SIBLING = "sibling"
MODES = get_args(Mode)
STRATEGIES = ("first", "unseen", "deviation", "attention")
GRAPH = {"agents": {"a": None, "b": "a", "c": "a", "d": {"all_of": ["b", "c"]}}, "repeats": True}
SCHEMA = (
    '<schema name="trip">Plan a trip. <module name="alps">Walk up and rest.</module>'
    '<module name="coast">Swim far and sleep in a tent.</module><module name="city">See all of the museums.</module></schema>'
)
NUM_DOCUMENTS = 10
REMOVE_SECONDS = 60.0  # until the last request of an adapter has left the engine

_TOGETHER = threading.Lock()  # an engine runs one group of programs at a time


@dataclass
class Output:
    """What one message of a program generated."""

    name: str
    tokens: list[int]
    margins: Margins | None  # of a quiet run


def compare_outputs(outputs: Sequence[Output], quiet: Sequence[Output]) -> tuple[list[str], bool]:
    """Return what differs from a quiet run by more than rounding, and whether rounding decided a token.

    What follows such a token in the program reads other tokens: it is not compared.
    """
    if len(outputs) != len(quiet):
        return [f"{len(outputs)} results instead of {len(quiet)}"], False
    differences = []
    for output, other in zip(outputs, quiet, strict=True):
        if output.tokens == other.tokens:
            continue
        place = first_difference(output.tokens, other.tokens)
        margins = (other.margins.values if other.margins is not None else [])[place : place + 1]
        if margins and margins[0] < LIMIT:
            return differences, True
        differences.append(f"{output.name}: {output.tokens} instead of {other.tokens}, margins {margins}")
    return differences, False


@dataclass
class Program:
    """One run of a program on one engine."""

    engine: Engine
    family: Family
    rng: random.Random
    place: str  # of the thread, in names that no other thread uses
    is_quiet: bool
    outputs: list[Output] = field(default_factory=list)
    num_requests: int = 0
    _watched: list[tuple[Message, Margins | None]] = field(default_factory=list)

    # -- calls that every kind makes ------------------------------------------------------------------------

    def ids(self, most: int = 60) -> list[int]:
        """Return random token ids."""
        return [self.rng.randrange(len(SPECIAL), len(tokenizer())) for _ in range(self.rng.randint(1, most))]

    def document(self, number: int) -> list[int]:
        """Return one of a few long texts that programs share."""
        rng = random.Random(number)
        return [rng.randrange(len(SPECIAL), len(tokenizer())) for _ in range(100 + 20 * number)]

    def text(self, most: int = 40) -> str:
        return "".join(self.rng.choices(string.ascii_lowercase + " ", k=self.rng.randint(1, most)))

    def sampling(self, most: int = 16) -> SamplingParams:
        """Return random sampling parameters whose result depends on the seed alone."""
        rng = self.rng
        options: dict[str, Any] = {"max_tokens": rng.randint(1, most), "seed": rng.getrandbits(40)}
        if rng.random() < 0.6:
            options["temperature"] = 0
        else:
            options |= {"temperature": rng.choice((0.5, 1.0, 1.5)), "top_k": rng.randint(1, 20)}
        if rng.random() < 0.3:
            options["ignore_eos"] = True
        if rng.random() < 0.15:
            options |= {"presence_penalty": rng.choice((-0.5, 1.0)), "frequency_penalty": rng.choice((0.0, 0.7))}
        if rng.random() < 0.15:
            options["logprobs"] = rng.randrange(4)
        if rng.random() < 0.1:
            options["prompt_logprobs"] = rng.randrange(3)
        if rng.random() < 0.15:
            options["stop"] = ["e", "xq"]
        if rng.random() < 0.15:
            options["stop_token_ids"] = [rng.randrange(len(SPECIAL), len(tokenizer()))]
        if rng.random() < 0.1:
            options["logit_bias"] = {rng.randrange(len(tokenizer())): -100.0}
        return SamplingParams(**options)

    def prefill(self, session: Session, *args: Any, **options: Any) -> Message:
        self.num_requests += 1
        return session.prefill(*args, **options)

    def decode(self, session: Session, *args: Any, sampling: SamplingParams, **options: Any) -> Message:
        """Submit a decode whose tokens are compared."""
        message = session.decode(*args, sampling=sampling, **options)
        self.watch(message, sampling)
        return message

    def watch(self, message: Message, sampling: SamplingParams) -> None:
        """Note a decode, nothing of which is generated yet, for the comparison."""
        self.num_requests += 1
        margins = None
        if self.is_quiet:
            with suppress(ChoreographError):  # another way to submit it has started it
                margins = Margins(message, sampling)
        self._watched.append((message, margins))

    def read(self, message: Message) -> None:
        """Complete a watched decode and keep its tokens."""
        margins = next(margins for other, margins in self._watched if other is message)
        self.outputs.append(Output(f"message {len(self.outputs)}", list(message.output_token_ids), margins))

    def session(self, **options: Any) -> Session:
        client = self.rng.choice(TENANTS)
        return self.engine.session(seed=self.rng.getrandbits(30), client_id=client, **options)


def _graph(program: Program, *, models: Sequence[str] = ("base",), **session_options: Any) -> None:
    """A random graph of messages, some of which are released early."""
    rng = program.rng
    mode = rng.choice(MODES)
    with program.session(mode=mode, **session_options) as session:
        numbers = rng.sample(range(NUM_DOCUMENTS), rng.randint(0, 2))
        alive = [program.prefill(session, program.document(number)) for number in numbers]
        decodes: list[Message] = []
        for _ in range(rng.randint(2, 8)):
            parents: list[Any] = rng.sample(alive, min(len(alive), rng.randint(0, 3)))
            options: dict[str, Any] = {"model": rng.choice(models), "priority": rng.choice((0, 0, 0, -1, 3))}
            if rng.random() < 0.5 and parents and mode == "choreographed":
                options["repair"] = rng.choice((0.2, 1.0, *(Repair(0.3, name) for name in STRATEGIES)))
            if rng.random() < 0.2 and parents and mode == "choreographed":
                parents[0] = parents[0][: rng.randint(1, parents[0].length)]
            if len(models) > 1:
                ways = ("recompute", "reuse", "partial") if options["model"] == SIBLING else ("recompute", "reuse")
                options["kv_reuse"] = rng.choice(ways)
            if rng.random() < 0.5:
                alive.append(program.prefill(session, program.ids(), parents, **options))
                continue
            footer = program.ids(2) if rng.random() < 0.3 else None
            decodes.append(
                program.decode(session, program.ids(9), parents, sampling=program.sampling(), footer=footer, **options)
            )
            alive.append(decodes[-1])
        if rng.random() < 0.3 and mode == "choreographed":
            program.rng.choice(alive).pin(0.01 if rng.random() < 0.5 else None)
        dropped = rng.choice(alive) if rng.random() < 0.3 else None
        if dropped is not None:
            dropped.release()
        for message in decodes:
            if message is not dropped:
                program.read(message)


def _revisits(program: Program) -> None:
    """Questions on documents that do not all fit on the device."""
    rng = program.rng
    with program.session(mode=rng.choice(("choreographed", "choreographed", "prefix"))) as session:
        documents = [program.prefill(session, program.document(number)) for number in range(NUM_DOCUMENTS)]
        for _ in range(rng.randint(3, 12)):
            chosen = rng.sample(documents, rng.randint(1, 2))
            program.read(program.decode(session, program.ids(4), chosen, sampling=program.sampling(6)))


def _stream(program: Program) -> None:
    """Streams of text; some readers leave half-way."""
    with program.session() as session:
        system = program.prefill(session, session.system(program.text(60)))
        sampling = program.sampling(24)
        chat = [session.user(program.text()), session.assistant()]
        answers = [program.decode(session, chat, [system], sampling=sampling) for _ in range(2)]
        left = program.rng.choice((None, *answers))
        for answer in answers:
            pieces = answer.stream()
            if answer is left:
                next(pieces, None)
                del pieces
                answer.release()
                continue
            text = "".join(pieces)
            if text != answer.text:
                raise AssertionError(f"a stream gave {text!r}, the message has {answer.text!r}")
            program.read(answer)


def _aborts(program: Program) -> None:
    """Long requests that end after a few steps."""
    with program.session() as session:
        root = program.prefill(session, program.ids(120))
        for _ in range(program.rng.randint(1, 6)):
            program.num_requests += 1
            session.decode(program.ids(20), [root], max_tokens=200, ignore_eos=True)
        for _ in range(program.rng.randint(0, 4)):
            program.engine.step()
        if program.rng.random() < 0.5:
            root.release()


def _guard(program: Program) -> None:
    """Messages with labels, and readers that may not see all of them."""
    rng = program.rng
    with program.session() as session:
        public = program.prefill(session, program.ids())
        secret = program.prefill(session, program.ids(), [public], labels={"secret"})
        summary = program.decode(session, program.ids(5), [public, secret], sampling=program.sampling())
        plan = program.prefill(session, program.ids(), [summary])
        readers = [
            program.decode(
                session, program.ids(5), [public, summary, plan], sampling=program.sampling(), clearance=labels
            )
            for labels in rng.sample([set(), {"secret"}, {"other"}], 2)
        ]
        for message in (summary, *readers):
            program.read(message)


def _budget(program: Program) -> None:
    """Sessions whose repair is chosen by measured divergence."""
    budget = Budget(program.rng.choice((0.0, 0.5, 5.0)), shadow_calls=1.0, shadow_tokens=10.0, seed=1)
    tenant = program.rng.choice(TENANTS)
    for _ in range(3):
        with program.engine.session(seed=1, client_id=tenant, max_kl=budget) as session:
            roots = [program.prefill(session, program.ids(30)) for _ in range(2)]
            answer = program.decode(session, program.ids(4), roots, sampling=program.sampling(6))
            program.read(answer)


def _agents(program: Program) -> None:
    """Turns of agents with fixed prompts and a declared step graph."""
    rng = program.rng
    graph = StepGraph.read(GRAPH) if rng.random() < 0.7 else None
    with program.session() as session, Workflow(session, graph) as team:
        fixed = {name: program.ids(80) for name in "abcd"}
        said: list[Message] = []
        for _ in range(rng.randint(1, 3)):
            for name in "abcd":
                with team.agent(name) as agent:
                    role = agent.prefill_fixed(fixed[name])
                    said.append(
                        program.decode(session, program.ids(4), [role, *said[-3:]], sampling=program.sampling(8))
                    )
        for message in said:
            program.read(message)


def _modules(program: Program) -> None:
    """Prompts over the modules of a schema."""
    rng = program.rng
    tenant, location = rng.choice(TENANTS), rng.choice(("device", "host"))
    with (
        PromptCache(program.engine, SCHEMA, client_id=tenant, location=location) as modules,
        program.engine.session(seed=1, client_id=tenant) as session,
    ):
        for _ in range(rng.randint(1, 3)):
            imports = "".join(f"<{name}/>" for name in rng.sample(("alps", "coast", "city"), rng.randint(1, 2)))
            prompt = f'<prompt schema="trip">{imports}{program.text()}</prompt>'
            sampling = program.sampling()
            answer = modules.generate(session, prompt, sampling=sampling)
            program.watch(answer, sampling)
            program.read(answer)


def _adapters(program: Program) -> None:
    """Adapters that are added, replaced under the same name, and removed."""
    name = f"adapter-{program.place}"
    for folder in program.rng.sample(program.family.adapters, 2):
        program.engine.add_adapter(name, folder)
        try:
            _graph(program, models=("base", name))
        finally:
            _remove_adapter(program.engine, name)


def _remove_adapter(engine: Engine, name: str) -> None:
    end = time.monotonic() + REMOVE_SECONDS
    while True:  # the last KV of closed sessions may still be computed
        try:
            engine.remove_adapter(name)
            return
        except ConfigError:
            if time.monotonic() > end:
                raise
        engine.step()


def _siblings(program: Program) -> None:
    """Two models that read each other's messages, with some layers of the other's reused."""
    _graph(program, models=("base", SIBLING))


def _together(program: Program) -> None:
    """Programs that run in one thread."""
    seeds = [program.rng.getrandbits(30) for _ in range(4)]
    parts: list[Program] = []

    def part(seed: int) -> Callable[[], None]:
        own = Program(program.engine, program.family, random.Random(seed), program.place, program.is_quiet)
        parts.append(own)
        return lambda: _graph(own)

    functions = [part(seed) for seed in seeds]
    with _TOGETHER:
        for result in run_concurrently(program.engine, functions):
            if result.error is not None:
                raise result.error
    for own in parts:
        program.outputs += own.outputs
        program.num_requests += own.num_requests


def _tasks(program: Program) -> None:
    """Tasks of an event loop, one of which is cancelled."""
    rng = program.rng

    async def run() -> None:
        with program.session() as session:
            root = program.prefill(session, program.ids())
            answers = [program.decode(session, program.ids(4), [root], sampling=program.sampling()) for _ in range(3)]
            lost = session.decode(program.ids(4), [root], max_tokens=40, ignore_eos=True)

            async def wait(message: Message) -> Message:
                return await message

            task = asyncio.create_task(wait(lost))
            others = [asyncio.create_task(wait(answer)) for answer in answers]
            for _ in range(rng.randint(0, 5)):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(*others)
            with suppress(asyncio.CancelledError):
                await task
            for answer in answers:
                program.read(answer)

    asyncio.run(run())


def _moved_kv(program: Program) -> None:
    """Keys and values that are exported and imported by another session."""
    tenant = program.rng.choice(TENANTS)
    with (
        program.engine.session(seed=1, client_id=tenant) as first,
        program.engine.session(seed=2, client_id=tenant) as second,
    ):
        tokens = program.ids(50)
        snapshot = program.prefill(first, tokens).export_kv()
        copy = second.import_kv(tokens, snapshot)
        answer = program.decode(second, program.ids(4), [copy], sampling=program.sampling())
        program.read(answer)
        imported = first.import_message(answer)
        program.read(program.decode(first, program.ids(4), [imported], sampling=program.sampling()))


class _Letters:
    """Mask that allows lower-case letters."""

    def __init__(self) -> None:
        ids = tokenizer().convert_tokens_to_ids(list(string.ascii_lowercase))
        self._mask = torch.zeros(len(tokenizer()), dtype=torch.bool)
        self._mask[ids] = True

    def allowed(self) -> torch.Tensor:
        return self._mask

    def advance(self, token: int) -> None:
        if not self._mask[token]:
            raise AssertionError(f"token {token} is not allowed")


def _constrained(program: Program) -> None:
    """Decodes with a mask of tokens, and with given tokens."""
    with program.session() as session:
        root = program.prefill(session, program.ids())
        sampling = SamplingParams(max_tokens=12, temperature=0)
        with program.engine.core.lock:  # no thread computes it meanwhile
            answer = session.decode(program.ids(4), [root], sampling=sampling)
            answer.constrain(_Letters())
        forced = program.ids(8)
        repeated = session.decode(program.ids(4), [root], sampling=sampling, forced_tokens=forced)
        if not set(answer.text) <= set(string.ascii_lowercase):
            raise AssertionError(f"a constrained decode gave {answer.text!r}")
        if repeated.output_token_ids != forced:
            raise AssertionError(f"given tokens {forced} became {repeated.output_token_ids}")
        program.num_requests += 2


Kind = Callable[[Program], None]
KINDS: dict[str, tuple[Kind, int]] = {  # weights
    "graph": (_graph, 8),
    "revisits": (_revisits, 3),
    "stream": (_stream, 4),
    "aborts": (_aborts, 3),
    "guard": (_guard, 3),
    "budget": (_budget, 2),
    "agents": (_agents, 3),
    "modules": (_modules, 2),
    "adapters": (_adapters, 3),
    "siblings": (_siblings, 3),
    "tasks": (_tasks, 2),
    "moved_kv": (_moved_kv, 2),
    "constrained": (_constrained, 2),
    "together": (_together, 2),
}


def draw_kind(rng: random.Random) -> str:
    return rng.choices(list(KINDS), [weight for _, weight in KINDS.values()])[0]
