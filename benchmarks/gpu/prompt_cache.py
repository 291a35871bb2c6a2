"""Time to first token from cached modules against computing the whole prompt, PML, planning and all."""

from ..common import in_turns
from ..prompt_cache import documents, first_token
from .bench import Bench, Found
from .budget import Allowance


def measure(bench: Bench, allowance: Allowance) -> Found:
    with documents(bench.engine, bench.shape.cached) as cache:
        sides = [first_token(cache, mode, bench.shape.new) for mode in ("choreographed", "naive")]
        if not bench.trial:
            in_turns(1, *sides)
        pairs = [[times[0] for times in in_turns(1, *sides)] for _ in allowance.rounds(bench.shape.most)]
    bench.engine.clear_cache()
    return {
        "Prompt Cache: first token": [1e3 * cached for cached, _ in pairs],
        "Prompt Cache: no reuse over modules": [whole / cached for cached, whole in pairs],
    }
