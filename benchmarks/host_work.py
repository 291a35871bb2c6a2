"""Host work of a plain decode step: everything but the model's own kernels, for 1 and 32 requests.

The bundled model's shapes, greedy, without a temperature. Method: the forward pass of the model (`HFModel.logits`, called
once a step) is replaced by one that returns logits made beforehand after building the same input tensors, so a step does
all of the engine's work but no kernel of the model, and the attention metadata is built as the kernel needs it. What is
timed is the whole `Engine.step` in processor time of its thread. Sampling is in it: the argmax over the logits of every row
is a kernel too, so its time, measured apart on the same logits, is given in a row of its own and not subtracted.

Beside the times, calls of the package's own functions are counted: those of a step, and those of submitting a decode.
"""

import argparse
import cProfile
import pstats
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import choreograph
from choreograph import Engine
from choreograph.attention import cpp_backend

from .common import Row, engine, greedy, median_row, random_tokens, save

BOUNDS = {1: (0.5, 0.2), 32: (1.5, 0.8)}


def replace_forward(e: Engine, num_rows: int) -> torch.Tensor:
    """Let steps skip the model; return the logits that they take."""
    hf_model, vocab_size = e.core.hf_model, e.model_info.vocab_size
    spec, heads = e.model_info.attention_specs[0], e.model_info.query_heads
    logits = torch.randn(num_rows, vocab_size)

    def forward(tokens, positions, forward_context, logits_indices, **_):
        torch.tensor([*tokens, *positions, *logits_indices])
        metadata = forward_context.metadata
        if not metadata.cache.get(f"native {id(spec)}"):  # what the first layer prepares for all
            query = torch.empty(heads, len(tokens), 1)
            keys, values = forward_context.keys[0], forward_context.values[0]
            call = cpp_backend.AttentionCall(metadata, query, query, query, keys, values, 1.0, spec)
            cpp_backend._cache_c_metadata(call)
        return logits[: len(logits_indices)]

    hf_model.logits = forward
    return logits


def count_calls(function: Callable[[], object]) -> Counter[str]:
    """Run `function`; return the calls of the package's own functions, by "file:function"."""
    package, calls = str(Path(choreograph.__file__).parent), Counter[str]()

    def record(frame: Any, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            calls[f"{frame.f_code.co_filename[len(package) + 1 :]}:{frame.f_code.co_qualname}"] += 1

    sys.setprofile(record)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def count_rows() -> list[Row]:
    """Count the calls of a submission and of a plain decode step; print where they are."""
    e = engine(compile=False, tokens=4096)
    with e.session(seed=0) as session:
        question = session.prefill([1, 2, 3])
        context = session.prefill([4, 5, 6, 7], [question])
        session.decode([9], sampling=greedy(20)).result()  # computes what is kept: the end tokens of the model
        submission = count_calls(lambda: session.decode([8, 9], [question, context], sampling=greedy(20)))
        for _ in range(5):  # admission, the header, and steps that build the plan of the next one
            e.step()
        step = count_calls(e.step)
    rows = []
    for name, calls in (("submission of a decode", submission), ("decode step, 1 request", step)):
        files = {call.partition(":")[0] for call in calls}
        print(f"{name}: {calls.total()} calls of {len(calls)} functions in {len(files)} files")
        print("\n".join(f"  {count:3d} {call}" for call, count in sorted(calls.items())))
        rows.append(Row(f"calls of a {name}", calls.total(), "", calls.total(), calls.total(), better="lower"))
    return rows


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--steps", type=int, default=300)
    options.add_argument("--profile", action="store_true", help="print where the time goes; nothing is saved")
    given = options.parse_args()
    torch.set_num_threads(1)
    rows = []
    for num_requests, (required, target) in BOUNDS.items():
        e = engine(compile=False, tokens=65536)
        with e.session(seed=0) as session:
            for index in range(num_requests):
                session.decode(random_tokens(256, index), sampling=greedy(given.steps + 100))
            for _ in range(8):
                e.step()
            logits = replace_forward(e, num_requests)
            for _ in range(40):
                e.step()
            if given.profile:
                profile = cProfile.Profile()
                profile.runcall(lambda e=e: [e.step() for _ in range(given.steps)])
                pstats.Stats(profile).sort_stats("tottime").print_stats(45)
                continue
            steps, maxima = [], []
            for _ in range(given.steps):
                began = time.thread_time()
                e.step()
                middle = time.thread_time()
                logits.numpy().argmax(-1)
                steps.append((middle - began) * 1e3)
                maxima.append((time.thread_time() - middle) * 1e3)
        name = f"{num_requests} request{'s' if num_requests > 1 else ''}"
        bounds = {"required": required, "target": target}
        rows.append(median_row(f"host work of a decode step, {name}", steps, "ms", better="lower", **bounds))
        rows.append(median_row(f"of it the search for the largest logits, {name}", maxima, "ms", better="lower"))
    if rows:
        save("host_work", [*rows, *count_rows()])


if __name__ == "__main__":
    main()
