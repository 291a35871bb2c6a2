"""Child of `peer_engines.VLLM`: serves token ids with vLLM. Runs in vLLM's own environment, without this package."""

import sys
import time
from multiprocessing.connection import Client
from typing import Any


def main() -> None:
    from vllm import LLM, SamplingParams

    address, model, dtype = sys.argv[1:]
    llm = LLM(
        model=model,
        dtype=dtype,
        max_model_len=8192,
        max_num_batched_tokens=8192,
        max_num_seqs=64,
        enable_prefix_caching=True,
        skip_tokenizer_init=True,
    )
    pipe = Client(address, "AF_UNIX")
    pipe.send("ready")
    serial = 0
    while (asked := pipe.recv()) is not None:
        if not asked:
            llm.reset_prefix_cache()
            pipe.send("reset")
            continue
        prompts, count = asked
        sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        pipe.send(_generate(llm.llm_engine, prompts, sampling, serial))
        serial += len(prompts)


def _generate(
    engine: Any, prompts: list[list[int]], sampling: Any, serial: int
) -> tuple[list[list[int]], list[list[float]]]:
    """Tokens of every prompt, and the seconds at which each token appeared."""
    began, tokens, times = time.perf_counter(), [[] for _ in prompts], [[] for _ in prompts]
    for i, prompt in enumerate(prompts):
        engine.add_request(str(serial + i), {"prompt_token_ids": prompt}, sampling)
    while engine.has_unfinished_requests():
        outputs, now = engine.step(), time.perf_counter() - began
        for output in outputs:
            i = int(output.request_id) - serial
            tokens[i] = list(output.outputs[0].token_ids)
            times[i] += [now] * (len(tokens[i]) - len(times[i]))
    return tokens, times


if __name__ == "__main__":
    main()
