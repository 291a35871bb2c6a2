"""One prompt answered from modules or as plain text, timed from handing it over."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..outputs import Mode
from ..sampling_params import SamplingParams
from .cache import PromptCache
from .schema import Prompt


@dataclass(frozen=True)
class Answer:
    """ttft: seconds to the first token. cached: tokens of modules that were not computed again."""

    text: str
    ttft: float
    cached: int
    generated: int


def answer(
    cache: PromptCache,
    prompt: Prompt | str | Path,
    mode: Mode,
    *,
    sampling: SamplingParams,
    seed: int = 0,
    on_text: Callable[[str], None] | None = None,
) -> Answer:
    """mode "choreographed" answers from modules, "naive" computes the same text anew. on_text hears the answer."""
    first: list[float] = []
    with cache.engine.session(mode=mode, seed=seed, client_id=cache.client_id) as session:
        reused = cache.count_cached_tokens(prompt) if mode == "choreographed" else None
        began = time.perf_counter()
        message = cache.generate(session, prompt, sampling=sampling)
        message.on_logprobs(lambda _: first.append(time.perf_counter() - began) if not first else None)
        for piece in message.stream():
            if on_text is not None:
                on_text(piece)
        cached = message.usage.cached_tokens if reused is None else reused
        return Answer(message.text, first[0], cached, message.usage.completion_tokens)


def side_by_side(cache: PromptCache, prompt: Prompt | str | Path, *, max_tokens: int = 48) -> str:
    """Both answers, greedy, and what they cost, as text for people."""
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens)
    cache.warmup()
    lines = []
    for how, mode in (("from modules", "choreographed"), ("as plain text", "naive")):
        result = answer(cache, prompt, mode, sampling=sampling)  # type: ignore[arg-type]
        cost = f"first token after {result.ttft * 1e3:.0f} ms, {result.cached} tokens reused"
        lines.append(f"-- {how}: {cost}\n{result.text.strip()}\n")
    return "\n".join(lines)
