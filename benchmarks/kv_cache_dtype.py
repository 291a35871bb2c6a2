"""What a KV cache in int8 costs and saves: log-loss of ordinary text, paired by piece, and bytes of a token.

The text is that of `quantization`. Every token attends to the keys and values of those before it as they are stored.
"""

import argparse

import numpy as np

from choreograph import CacheConfig, Engine, EngineConfig, SamplingParams
from choreograph.models.loader import DEFAULT_MODEL

from .common import Row, save
from .quantization import ROOT, TEXTS

DTYPES = ("float32", "bfloat16")
KV_DTYPES = ("auto", "int8")
SCORED = SamplingParams(max_tokens=1, prompt_logprobs=0)


def open_engine(model: str, dtype: str, kv_cache_dtype: str, tokens: int) -> Engine:
    cache = CacheConfig(capacity=2 * tokens, kv_cache_dtype=kv_cache_dtype)
    return Engine.from_pretrained(model, dtype=dtype, config=EngineConfig(cache=cache))


def losses(engine: Engine, pieces: list[list[int]]) -> list[float]:
    """Mean log-loss of the tokens of each piece, without the first."""
    result = []
    for piece in pieces:
        with engine.session(seed=0) as session:
            scores = session.decode(piece, sampling=SCORED).prompt_logprobs or []
            result.append(-float(np.mean([score.logprob for score in scores if score is not None])))
    return result


def mean_row(measure: str, samples: list[float], **facts: str) -> Row:
    """The mean of samples with a bootstrap interval."""
    data = np.asarray(samples)
    picks = np.random.default_rng(0).integers(0, len(data), (10000, len(data)))
    low, high = np.percentile(data[picks].mean(axis=1), [2.5, 97.5])
    return Row(measure, float(data.mean()), "nats", float(low), float(high), better="lower", **facts)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--model", default=DEFAULT_MODEL)
    options.add_argument("--pieces", type=int, default=24, help="most pieces of text")
    options.add_argument("--tokens", type=int, default=512, help="tokens of a piece")
    options.add_argument("--dtypes", nargs="+", default=DTYPES, help="of the model")
    given = options.parse_args()
    text = "\n\n".join((ROOT / name).read_text() for name in TEXTS)
    rows: list[Row] = []
    for dtype in given.dtypes:
        result = {}
        for kv_dtype in KV_DTYPES:
            engine = open_engine(given.model, dtype, kv_dtype, given.tokens)
            ids, size = engine.tokenizer(text)["input_ids"], given.tokens
            pieces = [ids[i : i + size] for i in range(0, len(ids) - size + 1, size)][: given.pieces]
            name = f"{engine.model_info.name} in {dtype}, cache in {dtype if kv_dtype == 'auto' else kv_dtype}"
            result[kv_dtype] = losses(engine, pieces)
            num_bytes = engine.core.cache_manager.pool.bytes_per_token
            rows.append(Row(f"{name}: KV of a token", num_bytes, "bytes", num_bytes, num_bytes, better="lower"))
            rows.append(mean_row(f"{name}: log-loss of a token", result[kv_dtype]))
        added = [b - a for a, b in zip(result["auto"], result["int8"], strict=True)]
        rows.append(mean_row(f"{name}: added log-loss of a token", added, peer=f"cache in {dtype}"))
    save("kv_cache_dtype", rows, given.model, options={"pieces": len(pieces), "tokens": given.tokens})


if __name__ == "__main__":
    main()
