"""All pairs of features against the plain engine.

A case is a small program of prefills and decodes with one level of each factor: options of the requests (mode, sampling,
penalties, stop strings, grammar, `n`, log-probabilities, repair, other models and layer reuse, slices, guard, footers) and
of the engine (drafts, memory, tiers, eviction, step size, page size, neighbours, what was computed before). The first
cases are a covering array: every pair of levels of two factors occurs. All later ones are drawn.

The same requests run one at a time on a large, quiet engine without drafts, tiers and neighbours. Promised in float32:
equal tokens, texts and reasons to end, and log-probabilities that differ by rounding at most (`MAX_DIFFERENCE`). Sums of
attention are split by what else is in a step, so bits are promised where nothing else differs: two quiet
engines give equal bits. Where two tokens are so near to equally likely that rounding decides, either is right: the
plain engine is then run with noise on its logits, and has to give the other tokens too.

`try_case(Options(0, seed), index)` tries one case again.
"""

import math
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from choreograph import (
    CacheConfig,
    ChoreographError,
    Engine,
    EngineConfig,
    Message,
    Repair,
    SamplingParams,
    SchedulerConfig,
    Session,
)
from choreograph.errors import InvalidRequestError
from choreograph.server.structured.constraints import (
    GrammarCompiler,
    choice_constraint,
    json_constraint,
    regex_constraint,
)

from . import small_model
from .campaign import Options, Outcome, Tally
from .covering import Row, covering_rows, random_row

MAX_DIFFERENCE = 5e-5  # of a log-probability, by rounding in float32
NOISE, NUM_NOISES = 1e-5, 12  # of logits, and how often a near tie is tried
MAX_PREFILL, MAX_ANSWER = 18, 9  # tokens

STOPS = [chr(code) for code in range(ord("a"), ord("z"), 2)] + ["AB", "BC", "Q"]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yy"]}},
    "required": ["a"],
    "additionalProperties": False,
}
CONSTRAINTS: Mapping[str, Callable[[], Any]] = {
    "regex": lambda: regex_constraint("[a-f]{2,9}"),
    "json": lambda: json_constraint(SCHEMA),
    "choice": lambda: choice_constraint(["red", "green", "reed"]),
}
SAMPLING: Mapping[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "plain": {"temperature": 1.0},
    "truncated": {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
}
PENALTIES: Mapping[str, dict[str, Any]] = {
    "none": {},
    "presence, frequency": {"presence_penalty": 0.7, "frequency_penalty": 0.4},
    "repetition": {"repetition_penalty": 1.3},
    "bias": {"logit_bias": {40: 3.0, 41: -100.0, small_model.END: 1.0}},
}
ENDS: Mapping[str, dict[str, Any]] = {
    "none": {"ignore_eos": True},
    "strings": {"stop": STOPS},
    "tokens": {"stop_token_ids": list(range(20, 60))},
    "minimum": {"stop": STOPS, "stop_token_ids": list(range(20, 40)), "min_tokens": 4},
}
LOGPROBS: Mapping[str, dict[str, Any]] = {
    "chosen": {"logprobs": 0},
    "top": {"logprobs": 4},
    "callback": {},
    "prompt": {"logprobs": 1, "prompt_logprobs": 2},
}
REPAIRS: Mapping[str, Any] = {
    "none": None,
    "first": 0.3,
    "unseen": Repair(0.4, "unseen"),
    "all": 1.0,
    "align": Repair(0, "align", (0.9, 0.8)),
    "deviation": Repair(0.4, "deviation"),
    "attention": Repair(0.4, "attention"),
}
MODELS: Mapping[str, dict[str, Any]] = {
    "base": {},
    "adapter": {"model": "adapter"},
    "recompute": {"model": "sibling", "kv_reuse": "recompute"},
    "partial": {"model": "sibling", "kv_reuse": "partial"},
    "reuse": {"model": "sibling", "kv_reuse": "reuse"},
}
TIERS: Mapping[str, dict[str, Any]] = {
    "none": {},
    "host": {"host_capacity": 128},
    "disk": {"disk_capacity": 256},
    "host and disk": {"host_capacity": 64, "disk_capacity": 512},
}

FACTORS: Mapping[str, Sequence[Any]] = {
    # of the requests, alike on both engines
    "mode": ["choreographed", "prefix", "naive"],
    "sampling": list(SAMPLING),
    "penalties": list(PENALTIES),
    "ends": list(ENDS),
    "grammar": ["none", *CONSTRAINTS],
    "answers": [1, 3],
    "logprobs": list(LOGPROBS),
    "repair": list(REPAIRS),
    "model": list(MODELS),
    "parents": ["whole", "slices", "offsets"],
    "guard": [False, True],
    "footer": [0, 2],
    "backend": ["auto", "sdpa"],
    # of the crowded engine
    "drafts": [0, 3],
    "memory": ["roomy", "tight"],
    "tiers": list(TIERS),
    "eviction": ["lru", "lfu", "fifo", "workflow"],
    "neighbours": [0, 2, 8],
    "step": [1024, 5],
    "page": [1, 4, 16],
    "seqs": [256, 2],
    "skip_loading": [True, False],
    "before": ["nothing", "the same", "cleared"],
}


@dataclass(frozen=True)
class Call:
    """One request of a program."""

    tokens: list[int]
    parents: list[int] = field(default_factory=list)  # indices of earlier calls
    stops: list[int | None] = field(default_factory=list)  # length of the slice of each parent, None: all of it
    options: dict[str, Any] = field(default_factory=dict)
    sampling: SamplingParams | None = None  # None: a prefill
    constraint: Any = None


@dataclass
class Result:
    """What a message of a program was."""

    tokens: list[int]
    text: str = ""
    reason: str | None = None
    logprobs: list[Any] = field(default_factory=list)  # numbers in order, None where there is none


@cache
def compiler() -> GrammarCompiler:
    """Return the compiler of all grammars."""
    return GrammarCompiler(small_model.tokenizer(), len(small_model.tokenizer()))


@cache
def adapter_folder() -> Path:
    """Return the folder of the adapter, which is kept as long as the process."""
    folder = tempfile.TemporaryDirectory()
    stack.callback(folder.cleanup)
    return small_model.save_adapter(Path(folder.name))


stack = ExitStack()  # what is removed at the end of a campaign


def make_engine(row: Row, config: EngineConfig) -> Engine:
    """Return an engine that serves what a case needs."""
    model = row["model"]
    others = {"sibling": small_model.sibling()} if MODELS[model].get("model") == "sibling" else {}
    has_hooks = model == "adapter"  # on the layers of its model, which no other engine shares
    return Engine.from_pretrained(
        small_model.build() if has_hooks else small_model.model(),
        tokenizer=small_model.tokenizer(),
        config=config,
        models=others,
        adapters={"adapter": adapter_folder()} if has_hooks else {},
        layer_reuse={"sibling": (1, 2, 3)} if model == "partial" else {},
    )


def make_plain_engine(model: str, backend: str) -> Engine:
    """Return a large, quiet engine for levels of the factors that both engines have."""
    config = EngineConfig(cache=CacheConfig(capacity=2048, poison_freed_pages=True), backend=backend)
    return make_engine({"model": model}, config)


plain_engine = cache(make_plain_engine)


def draw_program(row: Row, draws: random.Random) -> list[Call]:
    """Return prefills, a decode, answers with all options of the case, and a decode that reads one of them."""
    alphabet = range(len(small_model.SPECIAL), len(small_model.tokenizer()))

    def tokens(most: int) -> list[int]:
        start = draws.choices(alphabet, k=draws.randint(2, most))
        return start + start[: draws.randint(0, 6)]  # repetitions, which drafts find

    def sampling(**options: Any) -> SamplingParams:
        return SamplingParams(max_tokens=draws.randint(4, MAX_ANSWER), seed=draws.randrange(10**6), **options)

    calls = [Call(tokens(MAX_PREFILL), options={"labels": ["secret"]} if row["guard"] else {})]
    for _ in range(draws.randint(1, 3)):
        calls.append(Call(tokens(MAX_PREFILL), _draw_parents(len(calls), draws)))
    calls.append(Call(tokens(3), _draw_parents(len(calls), draws), sampling=sampling(temperature=1.0, logprobs=0)))
    options = {**MODELS[row["model"]]}
    if row["repair"] != "none":
        options["repair"] = REPAIRS[row["repair"]]
    if row["guard"]:
        options["clearance"] = []
    if row["footer"]:
        options["footer"] = tokens(row["footer"])
    constraint = None if row["grammar"] == "none" else CONSTRAINTS[row["grammar"]]()
    ends = ENDS[row["ends"]]
    if constraint is not None:
        ends = {name: value for name, value in ends.items() if name != "min_tokens"}  # a grammar may end before
    parameters = {**SAMPLING[row["sampling"]], **PENALTIES[row["penalties"]], **ends, **LOGPROBS[row["logprobs"]]}
    for _ in range(draws.randint(1, 2)):
        header, parents = tokens(6), _draw_parents(len(calls), draws, least=2, first=int(row["guard"]))
        stops, offsets = [None] * len(parents), {}
        if row["parents"] == "slices":
            stops = [draws.choice([None, 2, 1]) for _ in parents]
        if row["parents"] == "offsets":
            offsets = {"offsets": [draws.choice([None, draws.randrange(200)]) for _ in parents], "new_offset": 250}
        for _ in range(row["answers"]):
            call = Call(header, parents, stops, {**options, **offsets}, sampling(**parameters), constraint)
            calls.append(call)
    calls.append(Call(tokens(4), [len(calls) - 1, 1], options=options, sampling=sampling(**parameters)))
    return calls


def _draw_parents(count: int, draws: random.Random, *, least: int = 0, first: int = 0) -> list[int]:
    """Return some of the calls before a call, from the first that it may read."""
    return draws.sample(range(first, count), draws.randint(min(least, count - first), min(count - first, 3)))


def submit(session: Session, call: Call, messages: list[Message]) -> tuple[Message, list[torch.Tensor]]:
    """Submit a call; return its message and the list that its log-probabilities will be appended to."""
    stops = call.stops or [None] * len(call.parents)
    parents = [messages[p] if stop is None else messages[p][:stop] for p, stop in zip(call.parents, stops, strict=True)]
    rows: list[torch.Tensor] = []
    if call.sampling is None:
        return session.prefill(call.tokens, parents, **call.options), rows
    message = session.decode(call.tokens, parents, sampling=call.sampling, **call.options)
    if call.constraint is not None:
        message.constrain(compiler().masks(call.constraint, 1)[0])
    if call.sampling.logprobs is None:
        message.on_logprobs(rows.append)
    return message, rows


def read(call: Call, message: Message, rows: Sequence[torch.Tensor]) -> Result:
    """Wait for a message and return what it is."""
    tokens = message.tokens
    if call.sampling is None:
        return Result(tokens)
    numbers: list[Any] = [value for row in rows for value in row.tolist()]
    for token in message.logprobs or ():
        numbers += [token.logprob, *sorted(token.top.values())]
    if call.sampling.prompt_logprobs is not None:
        for score in message.prompt_logprobs or ():
            numbers += [None] if score is None else [score.logprob, *sorted(score.top.values())]
    return Result(tokens, message.text, message.finish_reason, numbers)


def run_plain(
    row: Row, calls: Sequence[Call], *, noise: int | None = None, engine: Engine | None = None
) -> list[Result]:
    """Run the calls one at a time on a quiet engine.

    Args:
        noise: seed of the noise on logits; None: no noise.
        engine: the engine; None for the one that all cases share.
    """
    engine = engine or plain_engine(row["model"], row["backend"])
    models = list(engine.core.model_set.by_group.values()) if noise is not None else []
    originals = [model.forward for model in models]
    generator = torch.Generator().manual_seed(noise or 0)
    for model, forward in zip(models, originals, strict=True):
        model.forward = _with_noise(forward, generator)  # type: ignore[method-assign]
    results: list[Result] = []
    try:
        with engine.session(mode=row["mode"], seed=0) as session:
            messages: list[Message] = []
            for call in calls:
                message, rows = submit(session, call, messages)
                messages.append(message)
                results.append(read(call, message, rows))
                engine.run_until_idle()
    finally:
        for model in models:
            del model.forward
        engine.clear_cache()
    return results


def _with_noise(forward: Callable[..., torch.Tensor], generator: torch.Generator) -> Callable[..., torch.Tensor]:
    def noisy(*arguments: Any) -> torch.Tensor:
        logits = forward(*arguments)
        return logits + NOISE * torch.randn(logits.shape, generator=generator)

    return noisy


def run_crowded(
    row: Row, calls: Sequence[Call], num_tokens: Sequence[int], draws: random.Random, tally: Tally
) -> list[Result | ChoreographError]:
    """Run the calls together on an engine with the factors of a case.

    Args:
        num_tokens: length of each message.
    """
    page = row["page"]
    capacity = 1024 if row["memory"] == "roomy" else _tight_capacity(row, calls, num_tokens)
    cache_config = CacheConfig(
        capacity=capacity, page_size=page, eviction=row["eviction"], poison_freed_pages=True, **TIERS[row["tiers"]]
    )
    scheduler = SchedulerConfig(
        max_num_batched_tokens=row["step"], max_num_seqs=row["seqs"], skip_loading=row["skip_loading"]
    )
    config = EngineConfig(cache=cache_config, scheduler=scheduler, backend=row["backend"], draft_tokens=row["drafts"])
    with make_engine(row, config) as engine:
        results = _run_together(engine, row, calls, draws)
        engine.run_until_idle()
        engine.check()
        assert engine.stats().num_referenced_entries == 0, "entries are referenced after every session has closed"
        stats = engine.stats()
        for kind in ("preempted", "resumed", "recomputing", "evicted", "offloaded", "loaded", "demoted", "hit"):
            tally.counts[kind] += stats.events.get(kind, 0)
        tally.counts["accepted drafts"] += stats.num_accepted_tokens
    return results


def _tight_capacity(row: Row, calls: Sequence[Call], num_tokens: Sequence[int]) -> int:
    """Return a capacity that is hardly more than the largest call and its context need."""
    page = row["page"]
    own = [-(-count // page) * page for count in num_tokens]
    encodes_again = row["guard"] or row["repair"] != "none" or row["model"] in ("recompute", "partial")
    context = [sum(own[p] for p in call.parents) * (2 if encodes_again else 1) for call in calls]
    return max(map(sum, zip(own, context, strict=True))) + max(own) + page


def _run_together(
    engine: Engine, row: Row, calls: Sequence[Call], draws: random.Random
) -> list[Result | ChoreographError]:
    def play(session: Session, neighbours: int) -> list[Result | ChoreographError]:
        messages: list[Message] = []
        rows = []
        for index, call in enumerate(calls):
            message, logprobs = submit(session, call, messages)
            messages.append(message)
            rows.append(logprobs)
            for number in range(neighbours):
                if number % len(calls) == index:
                    _add_neighbour(others, call, messages, draws)
            for _ in range(draws.randint(0, 3)):
                engine.step()
            if row["before"] == "cleared" and draws.random() < 0.4:
                engine.clear_cache()
        engine.check()
        order = list(range(len(calls)))
        draws.shuffle(order)
        results: dict[int, Result | ChoreographError] = {}
        for index in order:
            try:
                results[index] = read(calls[index], messages[index], rows[index])
            except ChoreographError as exc:
                results[index] = exc
        return [results[index] for index in range(len(calls))]

    client = draws.choice(["default", "neighbour"])
    with engine.session(mode=draws.choice(["choreographed", "prefix"]), seed=1, client_id=client) as others:
        if row["before"] == "the same":
            with engine.session(mode=row["mode"], seed=0) as session:
                play(session, 0)
        with engine.session(mode=row["mode"], seed=0) as session:
            return play(session, row["neighbours"])


def _add_neighbour(session: Session, call: Call, messages: list[Message], draws: random.Random) -> None:
    """Submit a request of another program, and release one now and then."""
    tokens = draws.choice([call.tokens, [*call.tokens, 9], [30, 31, 32, 33]])
    parents = draws.sample(session.messages, min(len(session.messages), 2))
    options = SamplingParams(temperature=draws.choice([0, 1.0]), max_tokens=draws.randint(1, 20), ignore_eos=True)
    try:
        session.decode(tokens, parents, sampling=options) if draws.random() < 0.6 else session.prefill(tokens, parents)
        if draws.random() < 0.3:
            draws.choice(session.messages).release()
    except ChoreographError:  # its parent has failed for lack of memory
        pass


def compare(expected: Result, result: Result) -> tuple[str, float]:
    """Return what differs, empty for nothing but rounding, and the largest difference of a log-probability."""
    for name in ("tokens", "text", "reason"):
        if (one := getattr(expected, name)) != (other := getattr(result, name)):
            return f"{name} {other!r}, on the plain engine {one!r}", 0
    if len(expected.logprobs) != len(result.logprobs):
        return f"{len(result.logprobs)} log-probabilities, on the plain engine {len(expected.logprobs)}", 0
    largest = 0.0
    for one, other in zip(expected.logprobs, result.logprobs, strict=True):
        if one != other:  # also equal infinities
            difference = math.inf if one is None or other is None else abs(one - other)
            largest = math.inf if math.isnan(difference) else max(largest, difference)
    return (f"log-probabilities differ by {largest:.2g}" if largest > MAX_DIFFERENCE else ""), largest


def is_near_tie(row: Row, calls: Sequence[Call], index: int, result: Result) -> bool:
    """Return whether the plain engine gives these tokens too, with noise on its logits."""
    return any(run_plain(row, calls, noise=noise)[index].tokens == result.tokens for noise in range(NUM_NOISES))


@cache
def covering_array(seed: int) -> list[Row]:
    """Return the rows of the first cases."""
    return covering_rows(FACTORS, random.Random(seed))


def try_case(options: Options, index: int, tally: Tally | None = None) -> Tally:
    """Try one case; return the tally with what it lost."""
    tally = Tally(options) if tally is None else tally
    draws, rows = options.draws(index), covering_array(options.seed)
    row = rows[index] if index < len(rows) else random_row(FACTORS, draws)
    calls = draw_program(row, draws)
    expected = run_plain(row, calls)
    if index % 10 == 0:
        first, second = (run_plain(row, calls, engine=make_plain_engine(row["model"], row["backend"])) for _ in "ab")
        tally.counts["cases run twice for bits"] += 1
        if first != second:
            tally.lose(index, f"two quiet engines give other bits: {row}")
    tally.inputs += 1
    results = run_crowded(row, calls, [len(result.tokens) for result in expected], draws, tally)
    for number, (one, other) in enumerate(zip(expected, results, strict=True)):
        if isinstance(other, ChoreographError):
            tally.counts["messages refused for lack of memory"] += 1
            if row["memory"] == "roomy":
                tally.lose(index, f"message {number}: {other!r}: {row}")
            continue
        what, difference = compare(one, other)
        tally.counts["messages"] += 1
        tally.counts["messages with equal bits"] += not what and not difference
        tally.details["largest difference"] = max(difference, tally.details.get("largest difference", 0.0))  # type: ignore[call-overload]
        if what and one.tokens != other.tokens and is_near_tie(row, calls, number, other):
            tally.counts["near ties"] += 1
            break  # later messages read another text
        if what:
            tally.lose(index, f"message {number}: {what}: {row}")
            break
    return tally


def run(options: Options) -> Outcome:
    """Try cases until the time has passed."""
    tally = Tally(options)
    with stack:
        for index in options.rounds():
            try:
                try_case(options, index, tally)
            except InvalidRequestError as exc:
                if "takes longer than" in str(exc):  # the limit of a grammar's compilation, on a machine that is busy
                    tally.counts["cases refused for a grammar's time"] += 1
                else:
                    tally.lose(index, repr(exc))
            except Exception as exc:
                tally.lose(index, f"{exc!r}: {covering_array(options.seed)[index : index + 1]}")
        tally.details["rows of the covering array"] = len(covering_array(options.seed))
    return tally.outcome()
