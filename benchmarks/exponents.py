"""Time of a step, of submitting, of admission and of a look-up against messages, sessions and cache slots.

A tiny model, so that nearly all of the time is the engine's own. Every population is made through the public API: a
million finished messages of two tokens in a cache of a fixed size, so that most of them are evicted; messages that wait
for their parent; open sessions with a message each; a fragmented cache of single pages. At every size, each operation is
timed `--samples` times while the population exists, in processor time of the thread, which other processes do not lengthen. An
exponent is the slope of log(time) over log(size), fitted to the mean time at every size; its interval is a bootstrap over
the samples. A flat cost has the exponent 0, a linear one 1; a logarithmic one appears as less than 0.16 from 10 to a million.
"""

import argparse
import gc
import itertools
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from choreograph import CacheConfig, Engine, EngineConfig, SamplingParams, SchedulerConfig

from .common import Row, save

VOCABULARY = 2048
REQUIRED = 0.16  # a logarithmic cost over these sizes
ENDLESS = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)


def build(slots: int, page_size: int = 16) -> Engine:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=4096,
    )
    model = LlamaForCausalLM(config).float().eval()
    cache = CacheConfig(capacity=slots, page_size=page_size)
    return Engine.from_pretrained(model, config=EngineConfig(cache=cache, scheduler=SchedulerConfig(max_num_seqs=1024)))


def distinct_pairs() -> Iterator[list[int]]:
    """Prompts of two tokens, none twice."""
    return ([first, second] for first in range(3, VOCABULARY) for second in range(3, VOCABULARY))


class Operations:
    """The four operations, each timed once per call, in seconds, on a populated engine."""

    def __init__(self, engine: Engine, prompts: Iterator[list[int]]) -> None:
        self.engine, self.prompts = engine, prompts
        self.session = engine.session()
        self.known = next(prompts)
        self.session.prefill(self.known).result()
        self.schedule_seconds = 0.0
        schedule = engine.core.scheduler.schedule

        def timed(*args: object) -> object:
            began = time.thread_time()
            try:
                return schedule(*args)  # type: ignore[arg-type]
            finally:
                self.schedule_seconds += time.thread_time() - began

        engine.core.scheduler.schedule = timed  # type: ignore[method-assign]

    def sample(self, count: int) -> dict[str, list[float]]:
        """Time every operation `count` times, in turns; a decode runs meanwhile, whose plain steps are timed."""
        times: dict[str, list[float]] = {"step": [], "submit": [], "admission": [], "look-up": []}
        decode = self.session.decode([5], sampling=ENDLESS)
        for _ in range(8):
            self.engine.step()
        for _ in range(count):
            times["step"].append(seconds(self.engine.step))
            began = time.thread_time()
            message = self.session.prefill(next(self.prompts))
            times["submit"].append(time.thread_time() - began)
            times["admission"].append(self._schedule(message))
            self.engine.step()
            began = time.thread_time()
            again = self.session.prefill(self.known)
            submitted = time.thread_time() - began
            times["look-up"].append(submitted + self._schedule(again))
            for one in (message, again):
                one.release()
        decode.release()
        return times

    def _schedule(self, message: object) -> float:
        """Seconds of the scheduler in the step that admits a message."""
        self.schedule_seconds = 0.0
        self.engine.step()
        assert message._request.entry is not None  # type: ignore[attr-defined]
        return self.schedule_seconds


def seconds(work: Callable[[], object]) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began


def finished_messages(sizes: list[int], samples: int) -> Iterator[tuple[int, dict[str, list[float]]]]:
    """Finished messages of one session that stay referenced; a cache of 65,536 slots."""
    engine, prompts = build(65_536), distinct_pairs()
    operations = Operations(engine, prompts)
    session, done = engine.session(), 0
    for size in sizes:
        while done < size:
            part = min(512, size - done)
            for prompt in itertools.islice(prompts, part):
                session.prefill(prompt)
            engine.run_until_idle()
            done += part
        yield size, operations.sample(samples)


def waiting_messages(sizes: list[int], samples: int) -> Iterator[tuple[int, dict[str, list[float]]]]:
    """Prefills that wait for a decode, which runs as long as they are measured."""
    engine, prompts = build(65_536), distinct_pairs()
    operations = Operations(engine, prompts)
    session, done = engine.session(), 0
    parent = session.decode([7], sampling=ENDLESS)
    for size in sizes:
        for prompt in itertools.islice(prompts, size - done):
            session.prefill(prompt, [parent])
        done = size
        yield size, operations.sample(samples)


def open_sessions(sizes: list[int], samples: int) -> Iterator[tuple[int, dict[str, list[float]]]]:
    """Open sessions, each with a finished message, and a pin on it in every tenth."""
    engine, prompts = build(524_288), distinct_pairs()
    operations, sessions = Operations(engine, prompts), []
    for size in sizes:
        while len(sessions) < size:
            session = engine.session(client_id=f"client {len(sessions)}")
            message = session.prefill(next(prompts))
            if not len(sessions) % 10:
                message.pin(3600)
            sessions.append(session)
        engine.run_until_idle()
        times = operations.sample(samples)
        times["open and close a session"] = [
            seconds(lambda: engine.session(client_id="another").close()) for _ in range(samples)
        ]
        yield size, times


def cache_slots(sizes: list[int], samples: int) -> Iterator[tuple[int, dict[str, list[float]]]]:
    """A full cache of messages of a page each; every second one is released, so that no two free pages touch."""
    for size in sizes:
        engine, prompts = build(size), distinct_pairs()
        operations = Operations(engine, prompts)
        session = engine.session()
        messages = []
        for _ in range(size // 16 - 16):
            messages.append(session.prefill(next(prompts)))
            if len(messages) % 512 == 0:
                engine.run_until_idle()
        engine.run_until_idle()
        for message in messages[::2]:
            message.release()
        engine.clear_cache()
        yield size, operations.sample(samples)


def slope(sizes: list[int], samples: list[list[float]], draws: int = 500) -> tuple[float, float, float]:
    """Exponent of the mean time over the size, with its 95% bootstrap interval."""
    generator, logs = np.random.default_rng(0), np.log(sizes)
    arrays = [np.asarray(part) for part in samples]

    def fit(parts: list[np.ndarray]) -> float:
        return float(np.polyfit(logs, np.log([trimmed_mean(part) for part in parts]), 1)[0])

    drawn = [fit([generator.choice(part, len(part)) for part in arrays]) for _ in range(draws)]
    low, high = np.percentile(drawn, [2.5, 97.5])
    return fit(arrays), float(low), float(high)


def trimmed_mean(samples: np.ndarray) -> float:
    """Mean without the slowest twentieth: interruptions by other processes. Rare costs of the engine's own are in it
    where they come at least once in twenty times."""
    return float(np.sort(samples)[: max(1, len(samples) * 19 // 20)].mean())


POPULATIONS = {
    "messages": (finished_messages, (10, 100, 1_000, 10_000, 100_000, 1_000_000)),
    "waiting messages": (waiting_messages, (10, 100, 1_000, 10_000, 100_000)),
    "sessions": (open_sessions, (1, 10, 100, 1_000, 10_000)),
    "cache slots": (cache_slots, (1_024, 8_192, 65_536, 524_288)),
}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--samples", type=int, default=200)
    options.add_argument("--largest", type=int, default=1_000_000, help="leave out larger populations")
    options.add_argument("--only", choices=list(POPULATIONS), help="one population; nothing is saved")
    given = options.parse_args()
    torch.set_num_threads(1)  # a second thread would spin, in this thread's time
    rows, times = [], {}
    for name, (measure, all_sizes) in POPULATIONS.items():
        if given.only not in (None, name):
            continue
        gc.collect()
        gc.freeze()  # what earlier populations left is not visited again
        began, results = time.perf_counter(), {}
        for size, samples in measure([size for size in all_sizes if size <= given.largest], given.samples):
            results[size] = samples
            means = {operation: trimmed_mean(np.asarray(part)) * 1e6 for operation, part in samples.items()}
            print(f"{name} {size:,}: " + ", ".join(f"{op} {us:.0f} us" for op, us in means.items()), flush=True)
            times[f"{name} {size}"] = means
        print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)
        for operation in next(iter(results.values())):
            value, low, high = slope(list(results), [part[operation] for part in results.values()])
            label = f"exponent of {operation} over {name}"
            rows.append(Row(label, value, "", low, high, "lower", required=REQUIRED, target=0.0))
    if given.only is None:
        save("exponents", rows, "a random model of one layer", microseconds=times, samples=given.samples)
    for row in rows:
        print(f"{row.measure}: {row.value:.3f} ({row.low:.3f} to {row.high:.3f})")


if __name__ == "__main__":
    main()
