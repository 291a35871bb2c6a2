"""Log-probabilities of prompts in answers: vLLM's `prompt_logprobs`, and OpenAI's `echo` with `logprobs`."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ..errors import InvalidRequestError
from ..outputs import TokenLogprob
from .protocol import ChatCompletionRequest, CompletionRequest
from .service import RunningRequest

Describe = Callable[[int, float], dict[str, Any]]  # text and log-probability of a token, as in a chat's answer


def check_prompt_scoring(body: ChatCompletionRequest | CompletionRequest) -> None:
    """Raise an error for options that do not go together."""
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequestError(
            "prompt_logprobs: not available with stream=true; leave stream out, or send echo and logprobs to /v1/completions"
        )
    for name in ("max_completion_tokens", "max_tokens"):
        if getattr(body, name, None) == 0 and body.num_prompt_logprobs is None:
            raise InvalidRequestError(
                f"{name}=0: nothing would be generated: use 1 or more, or ask for prompt_logprobs"
            )


def prompt_logprobs_of(
    body: ChatCompletionRequest | CompletionRequest, running: RunningRequest, describe: Describe, index: int = 0
) -> dict[str, Any]:
    """Return vLLM's field of one answer; empty if not requested."""
    num_top = body.prompt_logprobs
    if num_top is None:
        return {}
    return {
        "prompt_logprobs": [
            item and _by_token(_with_top(item, num_top), describe) for item in running.prompt_scores(index)
        ]
    }


def _by_token(item: TokenLogprob, describe: Describe) -> dict[str, Any]:
    """Return log-probabilities and ranks by token id, the prompt's token first."""
    ranks: dict[int, tuple[float, int | None]] = {item.token: (item.logprob, item.rank)}
    for rank, (token, logprob) in enumerate(item.top.items(), 1):
        ranks.setdefault(token, (logprob, rank))
    result = {}
    for token, (logprob, rank) in ranks.items():
        entry = describe(token, logprob)
        result[str(token)] = {"logprob": entry["logprob"], "rank": rank, "decoded_token": entry["token"]}
    return result


def echoed_logprobs(body: CompletionRequest, running: RunningRequest, index: int) -> list[TokenLogprob]:
    """Return the scores of an answer's echoed prompt, if requested.

    The first token has no log-probability: what its entry contains means nothing.
    """
    if not body.echo or body.logprobs is None:
        return []
    prompt = running.spec.prompts[index // running.spec.num_answers]
    scores = running.prompt_scores(index)[1:]
    return [TokenLogprob(prompt.tokens[0], 0.0, {}), *(_with_top(item, body.logprobs) for item in scores if item)]


def num_added_characters(tokenizer: Any, prompt: str | Sequence[int], first_token: int) -> int:
    """Return the length of a first token outside of the text.

    Some tokenizers open each text with a token of their own.
    """
    text: str = tokenizer.decode([first_token])
    return len(text) if isinstance(prompt, str) and not prompt.startswith(text[:1]) else 0


def _with_top(item: TokenLogprob, num_top: int) -> TokenLogprob:
    """Return a score with the likeliest tokens of a request alone."""
    return replace(item, top=dict(list(item.top.items())[:num_top]))
