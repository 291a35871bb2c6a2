"""Child of `peer_engines.VLLM`: serves token ids with vLLM. Runs in vLLM's own environment, without our engine."""

import json
import sys
import time
from multiprocessing.connection import Connection
from typing import Any


def main() -> None:
    from vllm import LLM

    handle, model, dtype, connector = sys.argv[1:]
    transfer = json.loads(connector)
    llm = LLM(
        model=model,
        dtype=dtype,
        max_model_len=8192,
        max_num_batched_tokens=8192,
        max_num_seqs=64,
        enable_prefix_caching=True,
        **({} if transfer is None else {"kv_transfer_config": transfer}),
    )
    pipe = Connection(int(handle))
    pipe.send("ready")
    serial = 0
    while (asked := pipe.recv()) is not None:
        if not asked:
            if not llm.reset_prefix_cache(reset_connector=True):
                raise RuntimeError("the prefix cache cannot be emptied: blocks are in use")
            pipe.send("reset")
            continue
        pipe.send(_generate(llm.llm_engine, *asked, serial))
        serial += len(asked[0])


def _generate(
    engine: Any, prompts: list[list[int]], count: int, transfers: list[dict[str, Any] | None], serial: int
) -> tuple[list[list[int]], list[list[float]], list[dict[str, Any]]]:
    """Return the fields of `peer_engines.Generated`."""
    from vllm import SamplingParams

    began, tokens, times = time.perf_counter(), [[] for _ in prompts], [[] for _ in prompts]
    reports: list[dict[str, Any]] = [{} for _ in prompts]
    for i, (prompt, transfer) in enumerate(zip(prompts, transfers, strict=True)):
        extra = None if transfer is None else {"kv_transfer_params": transfer}
        sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False, extra_args=extra)
        engine.add_request(str(serial + i), {"prompt_token_ids": prompt}, sampling)
    while engine.has_unfinished_requests():
        outputs, now = engine.step(), time.perf_counter() - began
        for output in outputs:
            i = int(output.request_id) - serial
            tokens[i] = list(output.outputs[0].token_ids)
            times[i] += [now] * (len(tokens[i]) - len(times[i]))
            if output.finished:
                reports[i] = output.kv_transfer_params or {}
    # Like the loop of a server: what a connector reads of finished requests is read, and their pages are freed.
    scheduler = engine.engine_core.engine_core.scheduler
    while scheduler.has_requests():
        engine.step()
    if any(len(output) != count for output in tokens):
        raise RuntimeError(f"answers of {[len(output) for output in tokens]} tokens instead of {count}: {reports}")
    return tokens, times, reports


if __name__ == "__main__":
    main()
