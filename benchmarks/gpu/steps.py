"""Decode steps against the bytes that must move, and moved against home placement: whole steps of the engine, host and
all, from the tokens of one until those of the next."""

from statistics import median

from choreograph import Message, Session

from ..common import greedy, interleaved, random_tokens, seconds
from . import plain_loop, predictions
from .bench import Bench, PartResult, now
from .budget import Allowance

NUM_PARTS, LATER_STEPS = 4, 8  # messages that are moved; steps behind a first token


def measure(bench: Bench, allowance: Allowance) -> PartResult:
    model, result = predictions.Model.from_shape(bench.shape), {}
    for name, work in predictions.step_work(bench.shape.context).items():
        taken = decode_steps(bench, work.rows, shared_context=work.kv_tokens_read < work.pairs)
        least = predictions.moved_bytes(model, work) / bench.bandwidth
        result[f"decode step, {name}"] = [1e3 * t for t in taken]
        result[f"decode step, {name}: share of the limit"] = [least / t for t in taken]
        if name == "batch 32":
            loop = plain_loop.decode_seconds(bench, work.rows)
            result[f"decode step, {name}: a plain loop over it"] = [loop / t for t in taken]
    return result | moved(bench, allowance)


def decode_steps(bench: Bench, batch: int, *, shared_context: bool) -> list[float]:
    """Seconds of steps of so many calls, behind a context each, or one for all."""
    engine, shape, rounds = bench.engine, bench.shape, 4 * bench.shape.max_rounds
    with engine.session(seed=0) as session:
        contexts = [session.prefill(random_tokens(shape.context, i)) for i in range(1 if shared_context else batch)]
        engine.run_until_idle()
        for i in range(batch):
            session.decode([5 + i], [contexts[i % len(contexts)]], sampling=greedy(rounds + 8))
        for _ in range(2 if bench.trial else 5):
            engine.step()
        taken = [seconds(engine.step) for _ in range(rounds)]
    engine.clear_cache()
    return taken


def moved(bench: Bench, allowance: Allowance) -> PartResult:
    """Behind the same messages where they were encoded, and in the opposite order."""
    engine, size = bench.engine, bench.shape.context // NUM_PARTS
    with engine.session(seed=0) as session:
        parents = [session.prefill(random_tokens(size, i), new_offset=i * size) for i in range(NUM_PARTS)]
        engine.run_until_idle()
        away = [(NUM_PARTS - 1 - i) * size for i in range(NUM_PARTS)]
        firsts: list[list[float]] = [[], []]
        steps: list[list[float]] = [[], []]

        def side(index: int, offsets: list[int] | None) -> float:
            first, step = call(bench, session, parents, offsets)
            firsts[index].append(first)
            steps[index].append(step)
            return first

        if not bench.trial:  # the first call of either kind may compile
            call(bench, session, parents, None), call(bench, session, parents, away)
        for _ in allowance.rounds(bench.shape.max_rounds):
            interleaved(1, lambda: side(0, None), lambda: side(1, away))
    engine.clear_cache()
    pairs = {"decode step": steps, "first token": firsts}
    return {f"{name}, moved over home": [b / a for a, b in zip(*both, strict=True)] for name, both in pairs.items()}


def call(bench: Bench, session: Session, parents: list[Message], offsets: list[int] | None) -> tuple[float, float]:
    """Seconds to the first token, and of a later step: until the host has a token, not until the device has done the
    step that is begun behind it."""
    engine, later = bench.engine, 1 if bench.trial else LATER_STEPS
    messages: list[Message] = []

    def begin() -> None:
        new_offset, sampling = bench.shape.context, greedy(later + 1)
        messages.append(session.decode([1, 520, 198], parents, offsets, new_offset=new_offset, sampling=sampling))
        engine.step()

    now()
    first = seconds(begin)
    taken = [seconds(engine.step) for _ in range(later)]
    engine.run_until_idle()
    messages[0].release()
    return first, median(taken)
