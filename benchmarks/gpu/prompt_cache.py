"""Time to first token from cached modules against computing the whole prompt, PML, planning and all."""

from ..common import interleaved
from ..prompt_cache import document_cache, first_token
from .bench import Bench, PartResult
from .budget import Allowance


def measure(bench: Bench, allowance: Allowance) -> PartResult:
    with document_cache(bench.engine, bench.shape.num_cached_tokens) as cache:
        sides = [first_token(cache, mode, bench.shape.num_new_tokens) for mode in ("choreographed", "naive")]
        if not bench.trial:
            interleaved(1, *sides)
        pairs = [[times[0] for times in interleaved(1, *sides)] for _ in allowance.rounds(bench.shape.max_rounds)]
    bench.engine.clear_cache()
    return {
        "Prompt Cache: first token": [1e3 * cached for cached, _ in pairs],
        "Prompt Cache: no reuse over modules": [whole / cached for cached, whole in pairs],
    }
