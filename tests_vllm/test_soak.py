"""Random traffic in a small cache: reads, stores, evictions, chats, preemptions and aborts at any moment.

CHOREOGRAPH_SOAK_SECONDS=600 runs it for ten minutes.
"""

import itertools
import os
import random
import string
import time
from dataclasses import dataclass

import numpy as np
import psutil
from offline_engine import BLOCK, OfflineEngine, Request, count_preemptions, logprobs_of
from reuse_graphs import Call, View, expected_rows
from test_messages import ANSWER, LETTERS, turn_tokens
from tiny_models import TOKEN_BYTES

SECONDS = float(os.environ.get("CHOREOGRAPH_SOAK_SECONDS", "20"))
TOLERANCE = 2e-4
MAX_GROWTH = 100 * 2**20  # bytes of the process, after it has warmed up
SALTS = (None, "a", "b")
STORED_TOKENS = 500  # about a dozen of the texts below


@dataclass(frozen=True)
class Case:
    """A request, and the log-probabilities of its first token; None: they depend on what is stored."""

    request: Request
    expected: np.ndarray | None = None
    may_fail: bool = False  # entries of its spans may have been evicted


def draw_text(rng: random.Random, length: int) -> list[int]:
    return rng.choices(LETTERS, k=length)


def make_cases(model, rng: random.Random) -> dict[str, list[Case]]:
    """Return requests of each kind. Namespaces use the same names for other texts."""
    stores, readers, plain, calls = [], [], [], []
    for salt in SALTS:
        first = len(calls)
        for i in range(6):
            text = draw_text(rng, rng.randint(5, 80))
            calls.append(Call([], text))
            store = [{"entry": f"text-{i}", "start": 0, "stop": len(text)}]
            stores.append((Request(text, {"store": store}, salt=salt), len(calls) - 1))
        for i in range(6):
            parts, spans, tokens = [], [], []
            for viewed in rng.sample(range(6), rng.randint(1, 3)):
                text, shift = calls[first + viewed].tokens, rng.randint(-50, 50)
                parts.append(View(first + viewed, 0, len(text), len(tokens) + shift))
                span = {"entry": f"text-{viewed}", "start": 0, "stop": len(text), "at": len(tokens)}
                spans.append(span | {"position": len(tokens) + shift})
                tokens += text
                if rng.random() < 0.3:
                    parts.append(tuple(draw_text(rng, 7)))
                    tokens += parts[-1]
            header = draw_text(rng, rng.randint(1, 20))
            calls += [Call(parts, header), Call([], tokens + header)]
            store = [{"entry": f"answer-{i}", "start": len(tokens), "stop": None}]
            reuse = {"spans": spans, "store": store, "steps": {f"text-{i}": rng.randint(0, 3)}}
            options = {"max_tokens": rng.randint(1, 40), "salt": salt}
            readers.append((Request(tokens + header, reuse, **options), len(calls) - 2))
            plain.append((Request(tokens + header, **options), len(calls) - 1))
    rows = expected_rows(model, calls)

    def cases(pairs: list[tuple[Request, int]], may_fail: bool = False) -> list[Case]:
        return [Case(request, rows[call][len(request.tokens) - 1], may_fail) for request, call in pairs]

    turns = [turn_tokens("starts", "user", "".join(rng.choices(string.ascii_letters, k=n))) for n in (12, 30, 50, 60)]
    opening = turn_tokens("starts", "assistant", "", end="")
    chats = [
        Case(
            Request(
                [*itertools.chain(*order), *opening],
                max_tokens=rng.randint(1, 20),
                salt=rng.choice(SALTS),
                options=ANSWER,
            )
        )
        for order in itertools.permutations(turns, 3)
    ]
    return {"store": cases(stores), "read": cases(readers, True), "plain": cases(plain), "chat": chats}


def run_for(engine: OfflineEngine, cases: dict[str, list[Case]], rng: random.Random, seconds: float) -> dict[str, int]:
    """Run random cases, and compare each answer; returns how often each outcome was seen."""
    counts = dict.fromkeys(("finished", "failed", "aborted", *cases), 0)
    live: dict[str, Case] = {}
    vllm, ids, end = engine.llm.llm_engine, itertools.count(), time.monotonic() + seconds
    while live or time.monotonic() < end:
        if time.monotonic() < end and len(live) < 8 and rng.random() < 0.6:
            kind = rng.choices(list(cases), weights=(3, 4, 2, 2))[0]
            case, name = rng.choice(cases[kind]), f"soak-{id(counts)}-{next(ids)}"
            live[name] = case
            engine.add(case.request, name)
            counts[kind] += 1
        elif live and rng.random() < 0.08:
            name = rng.choice(list(live))
            vllm.abort_request([name])
            del live[name]
            counts["aborted"] += 1
        for output in vllm.step():
            if not output.finished or (case := live.pop(output.request_id, None)) is None:
                continue
            if output.outputs[0].finish_reason == "error":
                assert case.may_fail
                counts["failed"] += 1
                continue
            counts["finished"] += 1
            if case.expected is not None:
                assert np.abs(logprobs_of(output)[0] - case.expected).max() < TOLERANCE, case.request
        engine.check()
    return counts


def test_random_traffic_loses_nothing_and_mixes_nothing(start_engine, tiny_model, monkeypatch):
    rng = random.Random(0)
    engine = start_engine(
        "starts",
        fresh=True,
        skip_tokenizer_init=False,
        num_gpu_blocks_override=22,
        max_model_len=12 * BLOCK,
        max_num_batched_tokens=3 * BLOCK,
        connector_options={"store_gib": STORED_TOKENS * TOKEN_BYTES / 2**30},
    )
    preempted = count_preemptions(engine, monkeypatch)
    cases = make_cases(tiny_model("starts").model, rng)
    run_for(engine, cases, rng, SECONDS / 4)
    engine.check_idle()
    resident = psutil.Process().memory_info().rss
    counts = run_for(engine, cases, rng, SECONDS * 3 / 4)
    engine.check_idle()
    growth = psutil.Process().memory_info().rss - resident
    print(f"{counts}, {len(preempted)} preempted, {growth / 2**20:.1f} MiB more")
    assert all(counts.values()) and preempted
    assert engine.scheduler.connector.scheduler.index.num_evicted
    assert engine.num_stored_tokens <= STORED_TOKENS
    assert growth < MAX_GROWTH
