"""Each line of the table of determinism in `docs/reliability.md`.

A round draws programs and runs each of them twice: alone on a quiet engine, and with the one thing changed that a line
names. What is compared is what the line promises: bits (tokens and log-probabilities are equal), tokens (log-probabilities
differ by rounding) or a distribution. Programs are in float32, as in the campaign `pairs`, which changes everything at once.

`try_line(Options(0, seed), index)` tries one line again.
"""

import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, Literal

import torch
from scipy.stats import chi2

from choreograph import CacheConfig, Engine, EngineConfig, Message, SamplingParams
from choreograph.api.concurrency import run_concurrently
from choreograph.attention.cpp_backend import INSTRUCTION_SETS, ISA_VARIABLE, cpu_flags
from choreograph.server.running_request import ForcedPrefix

from . import pairs, small_model
from .campaign import Options, Outcome, Tally
from .covering import Row
from .pairs import Call, Result

Promise = Literal["bits", "tokens", "distribution"]
Check = Callable[[random.Random, Tally], str]  # returns what differs beyond what is promised

REQUEST_FACTORS = (
    "mode",
    "sampling",
    "penalties",
    "ends",
    "grammar",
    "answers",
    "logprobs",
    "repair",
    "model",
    "parents",
)
QUIET: Row = {name: levels[0] for name, levels in pairs.FACTORS.items()}
NUM_SAMPLES = 400  # answers whose first tokens are counted at a time
MIN_EXPECTED = 5.0  # answers that a class of tokens has at least, for the test of counts
MIN_P = 1e-6  # of one test of counts; a campaign makes hundreds
MAX_REDUCED = 0.2  # of a log-probability, in bfloat16 or over keys and values in int8
NUM_PROGRAMS = 4  # of a worker process


@dataclass(frozen=True)
class Line:
    """One line of the table."""

    promise: Promise
    check: Check
    every: int = 1  # rounds, since some lines start processes


def draw_row(draws: random.Random, **changes: Any) -> Row:
    """Return options of requests that are drawn, on a quiet engine, with some changes."""
    drawn = {name: draws.choice(pairs.FACTORS[name]) for name in REQUEST_FACTORS}
    return {**QUIET, **drawn, **changes}


def changed(**changes: Any) -> Check:
    """Return a check of programs that run together on an engine with other levels of factors."""

    def check(draws: random.Random, tally: Tally) -> str:
        row = draw_row(draws, **{name: draws.choice(levels) for name, levels in changes.items()})
        calls = pairs.draw_program(row, draws)
        expected = pairs.run_plain(row, calls)
        results = pairs.run_crowded(row, calls, [len(result.tokens) for result in expected], draws, tally)
        return _difference(row, calls, expected, results, tally)

    return check


def _difference(
    row: Row, calls: Sequence[Call], expected: Sequence[Result], results: Sequence[Any], tally: Tally
) -> str:
    """Return the first difference that is neither rounding nor a near tie."""
    for index, (one, other) in enumerate(zip(expected, results, strict=True)):
        if isinstance(other, Exception):
            tally.counts["messages refused for lack of memory"] += 1
            continue
        what, _ = pairs.compare(one, other)
        if what and one.tokens != other.tokens and pairs.is_near_tie(row, calls, index, other):
            tally.counts["near ties"] += 1
            return ""
        if what:
            return f"message {index}: {what}: {row}"
    return ""


# -- bits -------------------------------------------------------------------------------------------------------------


def check_again(draws: random.Random, tally: Tally) -> str:
    row = draw_row(draws)
    calls = pairs.draw_program(row, draws)
    first, second = (
        pairs.run_plain(row, calls, engine=pairs.make_plain_engine(row["model"], row["backend"])) for _ in "ab"
    )
    return "" if first == second else f"two engines give other bits: {row}"


def check_together_again(draws: random.Random, tally: Tally) -> str:
    """Run concurrent programs twice, on two engines."""
    row = draw_row(draws, model="base")
    programs = [pairs.draw_program(row, draws) for _ in range(3)]

    def run_all() -> list[list[Result]]:
        engine = pairs.make_plain_engine("base", row["backend"])

        def program(calls: Sequence[Call]) -> Callable[[], list[Result]]:
            def run_program() -> list[Result]:
                with engine.session(mode=row["mode"], seed=0) as session:
                    messages: list[Message] = []
                    results = []
                    for call in calls:
                        message, rows = pairs.submit(session, call, messages)
                        messages.append(message)
                        results.append(pairs.read(call, message, rows))
                    return results

            return run_program

        items = sorted(run_concurrently(engine, map(program, programs)), key=lambda item: item.index)
        for item in items:
            if item.error is not None:
                raise item.error
        return [item.value for item in items]

    first, second = run_all(), run_all()
    if first != second:
        return f"concurrent programs give other bits when they run again: {row}"
    for calls, results in zip(programs, first, strict=True):
        if what := _difference(row, calls, pairs.run_plain(row, calls), results, tally):
            return what
    return ""


def check_tier_bytes(draws: random.Random, tally: Tally) -> str:
    """Compare keys and values before they leave the device with what comes back."""
    tiers = draws.choice([name for name in pairs.TIERS if name != "none"])
    cache_config = CacheConfig(capacity=64, page_size=4, poison_freed_pages=True, **pairs.TIERS[tiers])
    with pairs.make_engine({"model": "base"}, EngineConfig(cache=cache_config)) as engine, engine.session() as session:
        messages = [session.prefill(draws.choices(range(4, 200), k=20)) for _ in range(2)]
        before = [message.export_kv() for message in messages]
        session.prefill(draws.choices(range(4, 200), k=50)).result()  # the others leave
        after = [message.export_kv() for message in messages]
        events = engine.stats().events
        tally.counts["loaded"] += events.get("loaded", 0)
        computed = events.get("recomputing", 0)
    equal = [
        all(torch.equal(x, y) for a, b in zip(one.layers, other.layers, strict=True) for x, y in zip(a, b, strict=True))
        for one, other in zip(before, after, strict=True)
    ]
    return "" if all(equal) or computed else f"keys and values from {tiers} have other bytes"


def _worker_results(seed: int, environment: Mapping[str, str]) -> list[list[Result]]:
    """Return the results of `NUM_PROGRAMS` programs in a process of its own."""
    command = [sys.executable, "-m", __spec__.name, str(seed)]  # type: ignore[name-defined]
    output = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=True)
    return [[Result(**result) for result in program] for program in json.loads(output.stdout.splitlines()[-1])]


def _worker_programs(seed: int) -> list[tuple[Row, list[Call]]]:
    draws = random.Random(seed)
    rows = [draw_row(draws, grammar="none") for _ in range(NUM_PROGRAMS)]
    return [(row, pairs.draw_program(row, draws)) for row in rows]


def _compare_workers(first: Mapping[str, str], second: Mapping[str, str], *, bits: bool) -> Check:
    """Return a check of processes with two environments."""

    def check(draws: random.Random, tally: Tally) -> str:
        seed = draws.randrange(10**9)
        results = [_worker_results(seed, environment) for environment in (first, second)]
        if bits:
            return "" if results[0] == results[1] else f"other bits with {first} and {second}: programs {seed}"
        for (row, calls), one, other in zip(_worker_programs(seed), *results, strict=True):
            if what := _difference(row, calls, one, other, tally):
                return f"{second}, programs {seed}: {what}"
        return ""

    return check


def check_instructions(draws: random.Random, tally: Tally) -> str:
    """Limit the instructions of kernels and libraries, as `.ci/test_isa.py` does."""
    flags = cpu_flags().split()
    hidden = [n for n, isa in INSTRUCTION_SETS.items() if any(flag.startswith(isa.hidden) for flag in flags)]
    names = [name for name in hidden if isa_limits(name)]
    if not names:
        return ""
    name = draws.choice(names)
    tally.counts[f"limited to {name}"] += 1
    return _compare_workers({"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "1", **isa_limits(name)}, bits=False)(
        draws, tally
    )


def isa_limits(name: str) -> dict[str, str]:
    """Return the variables that limit kernels, PyTorch, oneDNN and MKL to an instruction set."""
    limits = {
        "avx2": ("avx2", "AVX2", "AVX2"),
        "avx512": ("avx512", "AVX512_CORE", "AVX512"),
        "avx512_bf16": ("avx512", "AVX512_CORE_BF16", "AVX512_E3"),
    }
    if name not in limits:
        return {}
    variables = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
    return {**dict(zip(variables, limits[name], strict=True)), ISA_VARIABLE: name}


# -- tokens -----------------------------------------------------------------------------------------------------------


def check_order(draws: random.Random, tally: Tally) -> str:
    """Submit the calls of several programs in an order in which they take turns."""
    row = draw_row(draws)
    programs = [pairs.draw_program(row, draws) for _ in range(2)]
    engine = pairs.make_plain_engine(row["model"], row["backend"])
    with engine.session(mode=row["mode"], seed=0) as session:
        messages: list[list[Message]] = [[] for _ in programs]
        rows: list[list[list[torch.Tensor]]] = [[] for _ in programs]
        turns = [number for number, calls in enumerate(programs) for _ in calls]
        draws.shuffle(turns)
        for number in turns:
            call = programs[number][len(messages[number])]
            message, logprobs = pairs.submit(session, call, messages[number])
            messages[number].append(message)
            rows[number].append(logprobs)
        results = [
            [pairs.read(*item) for item in zip(calls, messages[number], rows[number], strict=True)]
            for number, calls in enumerate(programs)
        ]
    for calls, result in zip(programs, results, strict=True):
        if what := _difference(row, calls, pairs.run_plain(row, calls), result, tally):
            return what
    return ""


def check_callers(draws: random.Random, tally: Tally) -> str:
    """Let two threads submit and read programs on one engine."""
    row = draw_row(draws, logprobs="top", grammar="none")  # a mask is set before anything is generated
    programs = [pairs.draw_program(row, draws) for _ in range(2)]
    engine = pairs.make_plain_engine(row["model"], row["backend"])
    results: dict[int, list[Result]] = {}

    def run_program(number: int) -> None:
        with engine.session(mode=row["mode"], seed=0) as session:
            messages: list[Message] = []
            found = []
            for call in programs[number]:
                message, rows = pairs.submit(session, call, messages)
                messages.append(message)
                found.append(pairs.read(call, message, rows))
            results[number] = found

    threads = [threading.Thread(target=run_program, args=(number,)) for number in range(len(programs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, calls in enumerate(programs):
        if number not in results:
            return f"a thread has failed: {row}"
        if what := _difference(row, calls, pairs.run_plain(row, calls), results[number], tally):
            return what
    return ""


def check_continuation(draws: random.Random, tally: Tally) -> str:
    """Continue answers on another engine after some of their tokens, as replicas do."""
    row = draw_row(draws, logprobs="chosen")
    calls = pairs.draw_program(row, draws)
    expected = pairs.run_plain(row, calls)
    engine = pairs.make_plain_engine(row["model"], row["backend"])
    vocab_size = len(small_model.tokenizer())
    results = []
    with engine.session(mode=row["mode"], seed=0) as session:
        messages: list[Message] = []
        for call, result in zip(calls, expected, strict=True):
            message, rows = pairs.submit(session, call, messages)
            messages.append(message)
            if call.sampling is not None:
                generated = result.tokens[len(call.tokens) : len(result.tokens) - len(call.options.get("footer", ()))]
                mask = pairs.compiler().masks(call.constraint, 1)[0] if call.constraint is not None else None
                message.constrain(ForcedPrefix(generated[: draws.randint(0, len(generated))], vocab_size, mask))
            results.append(pairs.read(call, message, rows))
    return _difference(row, calls, expected, results, tally)


def check_full_repair(draws: random.Random, tally: Tally) -> str:
    """Compare messages that are repaired whole with prefix mode."""
    row = draw_row(draws, mode="prefix", repair="none", parents="whole", model=draws.choice(["base", "adapter"]))
    calls = pairs.draw_program(row, draws)
    repaired = [
        call if call.sampling is None else Call(**{**vars(call), "options": {**call.options, "repair": 1.0}})
        for call in calls
    ]
    expected = pairs.run_plain(row, calls)
    return _difference(row, calls, expected, pairs.run_plain({**row, "mode": "choreographed"}, repaired), tally)


# -- distributions ----------------------------------------------------------------------------------------------------


def check_samples(draws: random.Random, tally: Tally) -> str:
    """Compare the first tokens of many answers with the distribution that the model reports."""
    options = draws.choice(
        [{"temperature": 1.0}, {"temperature": 0.7, "top_k": 20}, {"temperature": 1.0, "top_p": 0.8}]
    )
    engine = drafting_engine()
    tokens = draws.choices(range(4, 200), k=12)
    rows: list[torch.Tensor] = []
    with engine.session(seed=draws.randrange(10**9)) as session:
        prompt = session.prefill(tokens)
        first = session.decode(tokens[:3], [prompt], temperature=0, max_tokens=1, ignore_eos=True)
        first.on_logprobs(rows.append)
        first.result()
        count = {"max_tokens": 1, "ignore_eos": True}
        answers = [session.decode(tokens[:3], [prompt], **options, **count) for _ in range(NUM_SAMPLES)]
        sampled = [answer.output_token_ids[0] for answer in answers]
    engine.clear_cache()
    probabilities = _truncate(rows[0], SamplingParams(**options))
    tally.counts["samples"] += NUM_SAMPLES
    p = counts_p(sampled, probabilities.tolist())
    return "" if p > MIN_P else f"{NUM_SAMPLES} samples with {options} have p = {p:.2g}"


@cache
def drafting_engine() -> Engine:
    """Return an engine that also drafts, which may not change a distribution."""
    config = EngineConfig(cache=CacheConfig(capacity=8192), draft_tokens=3)
    return pairs.make_engine({"model": "base"}, config)


def _truncate(logprobs: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Return the distribution of a token: temperature, then top-k, then top-p."""
    scores = logprobs.double() / sampling.temperature
    if sampling.top_k > 0:
        scores[scores < scores.topk(sampling.top_k).values[-1]] = -torch.inf
    probabilities, order = scores.softmax(-1).sort(descending=True)
    probabilities[probabilities.cumsum(-1) - probabilities >= sampling.top_p] = 0
    result = torch.zeros_like(probabilities)
    result[order] = probabilities / probabilities.sum()
    return result


def counts_p(sampled: Sequence[int], probabilities: Sequence[float]) -> float:
    """Return the p-value of tokens under a distribution: chi-square, rare tokens in one class."""
    counts = [0] * len(probabilities)
    for token in sampled:
        counts[token] += 1
    if any(count and not p for count, p in zip(counts, probabilities, strict=True)):
        return 0.0
    classes = [(c, len(sampled) * p) for c, p in zip(counts, probabilities, strict=True)]
    frequent = [item for item in classes if item[1] >= MIN_EXPECTED]
    rare = [item for item in classes if 0 < item[1] < MIN_EXPECTED]
    if rare:
        frequent.append((sum(c for c, _ in rare), sum(e for _, e in rare)))
    statistic = sum((c - e) ** 2 / e for c, e in frequent)
    return float(chi2.sf(statistic, len(frequent) - 1)) if len(frequent) > 1 else 1.0


def check_reduced(kind: Literal["bfloat16", "int8"]) -> Check:
    """Return a check of batches in bfloat16, or over keys and values in int8: distributions are close."""

    def check(draws: random.Random, tally: Tally) -> str:
        config = CacheConfig(capacity=1024, kv_cache_dtype="int8" if kind == "int8" else "auto")
        forced, parents = draws.choices(range(4, 200), k=8), draws.choices(range(4, 200), k=20)

        def run_one(neighbours: int) -> list[torch.Tensor]:
            engine = Engine.from_pretrained(
                reduced_model() if kind == "bfloat16" else small_model.model(), config=EngineConfig(cache=config)
            )
            rows: list[torch.Tensor] = []
            with engine.session() as session:
                parent = session.prefill(parents)
                others = [session.decode([9, i], [parent], temperature=0, max_tokens=8) for i in range(neighbours)]
                message = session.decode([7, 8], [parent], forced_tokens=forced)
                message.on_logprobs(rows.append)
                for other in (*others, message):
                    other.result()
            return rows

        alone, again, together = run_one(0), run_one(0), run_one(6)
        if not all(torch.equal(a, b) for a, b in zip(alone, again, strict=True)):
            return f"{kind}: two engines give other bits"
        pairs_of_rows = zip(alone, together, strict=True)
        largest = max(float(((a - b).abs() * a.exp()).sum()) for a, b in pairs_of_rows)
        key = f"largest mean change of a log-probability, {kind}"
        tally.details[key] = max(largest, tally.details.get(key, 0.0))  # type: ignore[call-overload]
        return "" if largest <= MAX_REDUCED else f"{kind}: log-probabilities differ by {largest:.2g} on average"

    return check


@cache
def reduced_model() -> Any:
    """Return the model in bfloat16."""
    return small_model.build().to(torch.bfloat16)


ONE, TWO = {"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "2"}

LINES: Mapping[str, Line] = {
    "the same program, another engine": Line("bits", check_again),
    "the same concurrent programs": Line("bits", check_together_again),
    "keys and values back from a tier": Line("bits", check_tier_bytes),
    "batch": Line("tokens", changed(neighbours=[2, 8])),
    "order of arrival": Line("tokens", check_order),
    "threads that call": Line("tokens", check_callers),
    "size of steps": Line("tokens", changed(step=[5], seqs=[256, 2])),
    "page size": Line("tokens", changed(page=[4, 16])),
    "what was computed before": Line("tokens", changed(before=["the same", "cleared"])),
    "eviction and preemption": Line("tokens", changed(memory=["tight"], page=[1, 4], eviction=["lru", "lfu", "fifo"])),
    "tiers": Line("tokens", changed(memory=["tight"], tiers=["host", "disk", "host and disk"], page=[1, 4])),
    "drafts": Line("tokens", changed(drafts=[1, 3], neighbours=[0, 2])),
    "another replica continues": Line("tokens", check_continuation),
    "repair of everything and prefix mode": Line("tokens", check_full_repair),
    "samples of many seeds": Line("distribution", check_samples),
    "batch in bfloat16": Line("distribution", check_reduced("bfloat16"), every=5),
    "batch over keys and values in int8": Line("distribution", check_reduced("int8"), every=5),
    "the same program, another process": Line("bits", _compare_workers(ONE, ONE, bits=True), every=10),
    "number of threads": Line("tokens", _compare_workers(ONE, TWO, bits=False), every=10),
    "instructions of the processor": Line("tokens", check_instructions, every=10),
}


def try_line(options: Options, index: int, tally: Tally | None = None) -> Tally:
    """Try one line once; indices go round the lines."""
    tally = Tally(options) if tally is None else tally
    names = list(LINES)
    name, turn = names[index % len(names)], index // len(names)
    line = LINES[name]
    if turn % line.every:
        return tally
    tally.inputs += 1
    tally.counts[name] += 1
    try:
        what = line.check(options.draws(index), tally)
    except Exception as exc:
        what = repr(exc)
    if what:
        tally.lose(index, f"{name}: {what}")
    return tally


def run(options: Options) -> Outcome:
    """Try all lines in turns until the time has passed."""
    tally = Tally(options)
    with pairs.stack:
        for index in options.rounds():
            try_line(options, index, tally)
    return tally.outcome()


if __name__ == "__main__":
    found = [
        pairs.run_plain(row, calls, engine=pairs.make_plain_engine(row["model"], row["backend"]))
        for row, calls in _worker_programs(int(sys.argv[1]))
    ]
    print(json.dumps([[asdict(result) for result in program] for program in found]))
