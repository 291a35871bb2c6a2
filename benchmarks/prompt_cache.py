"""Time to first token from cached modules against computing the whole prompt (Prompt Cache, sections 5.2 and 5.4).

Also the time of later tokens and of whole answers, of copying keys and values of 5,000 tokens (section 5.4), and to the
first token of the use cases (section 5.6), which are those of `examples/`.

`make bench NAME=prompt_cache`. Prompts of the same tokens, in turns: from modules; on the same engine without reuse
(mode "naive"); and through Hugging Face's own model, in float32 where that is faster. Times are from handing
over the prompt to the first token, PML, planning and all.
"""

import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from choreograph import Engine, SamplingParams
from choreograph.prompt_cache import Import, Prompt, PromptCache, module, schema
from examples import code_generation, personalization, trip_planning

from .common import FIGURES, Row, eager_dtype, engine, interleaved, median_row, ratio_row, save, seconds
from .peer_engines import HuggingFace
from .plots import ttft_plot
from .prompt_cache_longbench import answer_times

EXAMPLES = Path(__file__).parents[1] / "examples"

NUM_CACHED_TOKENS, NUM_NEW_TOKENS = 5120, (8, 32, 64, 128)
LENGTHS = (512, 1024, 2048, 4096, 7680)
NUM_MODULES = 5
NUM_ANSWER_TOKENS = 32
NUM_COPIED_TOKENS = 5000
ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1)


def text_of(e: Engine, tokens: int, seed: int) -> str:
    """Words that are one token each, behind a blank, in random order: exactly so many tokens."""
    vocabulary = e.tokenizer.get_vocab()
    words = sorted(w for w in vocabulary if w[0] == "\u0120" and w[1:].isascii() and w[1:].isalpha())[:4000]
    picked = np.random.default_rng(seed).choice(words, tokens)
    text = "".join(picked).replace("\u0120", " ")
    assert len(e.chat.encode_text(text, opening=False)) == tokens
    return text


def document_cache(e: Engine, tokens: int) -> PromptCache:
    """A schema of so many tokens in five modules, all of them encoded."""
    parts = [
        module(f"part-{i}", text_of(e, tokens // NUM_MODULES + (tokens % NUM_MODULES) * (i == 0), i))
        for i in range(NUM_MODULES)
    ]
    cache = PromptCache(e, schema("documents", *parts))
    cache.warmup()
    return cache


def make_prompt(cache: PromptCache, num_new_tokens: int, seed: int) -> Prompt:
    imports = tuple(Import(child.name) for child in cache.schema.children)
    return Prompt("documents", (*imports, text_of(cache.engine, num_new_tokens, 1000 + seed)))


def first_token(cache: PromptCache, mode: str, num_new_tokens: int) -> Callable[[], float]:
    """Seconds to the first token of a prompt that was never asked before."""
    seeds = iter(range(1, 1 << 20))

    def measure() -> float:
        prompt = make_prompt(cache, num_new_tokens, next(seeds))
        with cache.engine.session(mode=mode) as session:
            began = time.perf_counter()
            cache.generate(session, prompt, sampling=ONE_TOKEN).result()
            taken = time.perf_counter() - began
        cache.engine.run_until_idle()
        return taken

    return measure


@functools.cache
def hugging_face_model() -> torch.nn.Module:
    return HuggingFace(eager_dtype()).model


def hugging_face(cache: PromptCache, num_new_tokens: int) -> Callable[[], float]:
    model = hugging_face_model()
    tokens = cache.resolve(make_prompt(cache, num_new_tokens, 0)).flatten(cache.layout)

    def measure() -> float:
        began = time.perf_counter()
        with torch.no_grad():
            logits = model(torch.tensor([tokens]), use_cache=True, logits_to_keep=1).logits
            int(logits[0, -1].argmax())
        return time.perf_counter() - began

    return measure


def main() -> None:
    e = engine(tokens=40960)
    cache = document_cache(e, NUM_CACHED_TOKENS)
    rows: list[Row] = []
    for new in NUM_NEW_TOKENS:
        sides = [first_token(cache, "choreographed", new), first_token(cache, "naive", new), hugging_face(cache, new)]
        rounds = 7 if new == 32 else 4
        for side in sides[:1]:
            side()
        cached, whole, theirs = interleaved(rounds, *sides)
        label = f"{NUM_CACHED_TOKENS} cached, {new} new"
        facts = {"required": 60.0} if new == 32 else {}
        rows += [
            ratio_row(f"{label}: against no reuse", whole, cached, **facts),
            ratio_row(f"{label}: against Hugging Face", theirs, cached, **facts),
            median_row(f"{label}: from modules", [t * 1e3 for t in cached], "ms", better="lower"),
            median_row(f"{label}: no reuse", [t * 1e3 for t in whole], "ms", better="lower"),
            median_row(f"{label}: Hugging Face", [t * 1e3 for t in theirs], "ms", better="lower"),
        ]
        print(f"{label}: {rows[-5].value:.1f}x, {rows[-4].value:.1f}x", flush=True)
    rows += whole_answers(cache)
    rows += from_host(e)
    cache.close()
    rows += copies(e) + use_cases(e)
    points = over_length(e)
    rows += slopes(points)
    save("prompt_cache", rows, points=points)
    ttft_plot(points, FIGURES / "prompt-cache-growth.svg", num_new_tokens=32)


def from_host(e: Engine) -> list[Row]:
    """Modules that wait in host memory and are copied in for every prompt."""
    with (
        document_cache(e, NUM_CACHED_TOKENS) as held,
        PromptCache(e, held.schema, location="host", client_id="host") as cache,
    ):
        cache.warmup()

        def measure() -> float:
            e.clear_cache()
            with e.session(client_id="host") as session:
                began = time.perf_counter()
                cache.generate(session, make_prompt(cache, 32, 5), sampling=ONE_TOKEN).result()
                return time.perf_counter() - began

        taken, resident = interleaved(5, measure, first_token(held, "choreographed", 32))
    label = f"{NUM_CACHED_TOKENS} cached, 32 new"
    return [
        median_row(f"{label}: modules copied in from host memory", [t * 1e3 for t in taken], "ms", better="lower"),
        ratio_row(f"{label}: copied in against resident", taken, resident, better="lower"),
    ]


def whole_answers(cache: PromptCache) -> list[Row]:
    """Later tokens, which take the same time, and whole answers, which gain less than first tokens."""
    prompts = [make_prompt(cache, 32, 1 << 21 | seed) for seed in range(6)]
    pairs = [
        (
            answer_times(cache, "choreographed", one, NUM_ANSWER_TOKENS),
            answer_times(cache, "naive", one, NUM_ANSWER_TOKENS),
        )
        for one in prompts
    ][1:]
    cached, whole = zip(*pairs, strict=True)
    label = f"{NUM_CACHED_TOKENS} cached, 32 new, {NUM_ANSWER_TOKENS} generated"
    return [
        ratio_row(f"{label}: end to end against no reuse", [t.total for t in whole], [t.total for t in cached]),
        *(
            median_row(f"{label}: {name}, {side}", [1e3 * getattr(t, field) for t in times], "ms", better="lower")
            for field, name in (("next_token", "each later token"), ("total", "end to end"))
            for side, times in (("from modules", cached), ("no reuse", whole))
        ),
    ]


def copies(e: Engine) -> list[Row]:
    """Copying keys and values, between the memories that there are."""
    info = e.model_info
    shape = (info.layers, 2, NUM_COPIED_TOKENS, info.kv_heads, info.head_dim)
    has_gpu = torch.cuda.is_available()
    host = torch.zeros(shape, dtype=info.dtype, pin_memory=has_gpu)
    routes = {"host to host": (host, torch.zeros(shape, dtype=info.dtype))}
    if has_gpu:
        device = host.cuda()
        routes |= {"host to device": (host, device), "device to device": (device, torch.zeros_like(device))}

    def copy(source: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)
        if has_gpu:
            torch.cuda.synchronize()

    rows = []
    for name, route in routes.items():
        samples = [1e3 * seconds(lambda route=route: copy(*route)) for _ in range(12)][2:]
        rows.append(median_row(f"copy of {NUM_COPIED_TOKENS} tokens, {name}", samples, "ms", better="lower"))
    return rows


def use_cases(e: Engine) -> list[Row]:
    """The paper's use cases, in the form of our examples."""
    folder = EXAMPLES / "pml"
    cases: dict[str, tuple[PromptCache, list[Prompt | str]]] = {
        "code": (PromptCache(e, folder / "game" / "game.pml"), list(code_generation.PROMPTS)),
        "personalization": (
            PromptCache(e, folder / "reader.pml"),
            [personalization.prompt(traits) for traits in personalization.READERS.values()],
        ),
        "parameters": (
            PromptCache(e, trip_planning.trip.schema),
            [trip_planning.trip(trip_planning.ASK, plan=True, days="one week", place="coast", season="summer")],
        ),
    }
    rows = []
    for name, (cache, prompts) in cases.items():
        with cache:
            cache.warmup()

            def measure(mode: str, cache: PromptCache = cache, prompts: list[Prompt | str] = prompts) -> float:
                with e.session(mode=mode) as session:
                    answers = [cache.generate(session, prompt, sampling=ONE_TOKEN).result() for prompt in prompts]
                e.run_until_idle()
                return statistics.mean(answer.timing.ttft for answer in answers)

            cached, whole = interleaved(5, lambda: measure("choreographed"), lambda: measure("naive"))
        label = f"use case, {name}"
        rows += [
            ratio_row(f"{label}: against no reuse", whole[1:], cached[1:]),
            median_row(f"{label}: from modules", [t * 1e3 for t in cached[1:]], "ms", better="lower"),
            median_row(f"{label}: no reuse", [t * 1e3 for t in whole[1:]], "ms", better="lower"),
        ]
    return rows


def over_length(e: Engine) -> dict[str, list[tuple[int, float]]]:
    """Figure 5: milliseconds over cached tokens, 32 new ones behind them."""
    points: dict[str, list[tuple[int, float]]] = {"from modules": [], "no reuse": []}
    for length in LENGTHS:
        with document_cache(e, length) as cache:
            sides = [first_token(cache, "choreographed", 32), first_token(cache, "naive", 32)]
            sides[0]()
            cached, whole = interleaved(3, *sides)
        e.clear_cache()
        points["from modules"].append((length, 1e3 * float(np.median(cached))))
        points["no reuse"].append((length, 1e3 * float(np.median(whole))))
        print(f"{length}: {points['from modules'][-1][1]:.1f} ms, {points['no reuse'][-1][1]:.0f} ms", flush=True)
    return points


def slopes(points: dict[str, list[tuple[int, float]]]) -> list[Row]:
    """A straight line through the cached points; how much of the whole prefill grows with the square."""
    rows = []
    for label, measured in points.items():
        x, y = (np.array(one, dtype=float) / s for one, s in zip(zip(*measured, strict=True), (1000, 1), strict=True))
        slope, level = np.polyfit(x, y, 1)
        square, linear, _ = np.polyfit(x, y, 2)
        rows.append(Row(f"growth, {label}: line through all points", slope, "ms per 1k tokens", slope, slope, "lower"))
        share = square * x[-1] ** 2 / (square * x[-1] ** 2 + linear * x[-1])
        rows.append(
            Row(f"growth, {label}: share of the square term at {LENGTHS[-1]}", share, "", share, share, "lower")
        )
        rows.append(Row(f"growth, {label}: where the line starts", level, "ms", level, level, "lower"))
    return rows


if __name__ == "__main__":
    main()
