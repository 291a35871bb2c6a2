"""Prefill of 1024 tokens: the engine's whole step against llama.cpp and Hugging Face, in turns."""

import torch

from choreograph import Engine

from .common import engine, interleaved, median_row, random_tokens, ratio_row, save, seconds
from .peer_engines import HuggingFace, LlamaCpp

COUNT, ROUNDS = 1024, 15


def ours(e: Engine) -> float:
    with e.session() as session:
        taken = seconds(lambda: session.prefill(random_tokens(COUNT)).result())
    e.clear_cache()
    return taken


def main() -> None:
    llama, hf, e = LlamaCpp(torch.get_num_threads()), HuggingFace("bfloat16"), engine(compile=False)
    sides = (lambda: llama.prefill(COUNT), lambda: hf.prefill(COUNT), lambda: ours(e))
    interleaved(2, *sides)
    a, b, c = interleaved(ROUNDS, *sides)
    llama.close()
    rows = [
        median_row(f"prefill of {COUNT}, {label}", [COUNT / t for t in times], "tokens/s")
        for label, times in (("llama.cpp Q4_1", a), ("Hugging Face", b), ("choreograph bf16", c))
    ]
    rows.append(ratio_row(f"prefill of {COUNT} tokens", a, c, required=2, target=3, peer="llama.cpp"))
    rows.append(ratio_row(f"prefill of {COUNT} tokens", b, c, peer="Hugging Face eager"))
    save("prefill", rows)


if __name__ == "__main__":
    main()
