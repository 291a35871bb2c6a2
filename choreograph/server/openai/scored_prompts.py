"""Log-probabilities of prompts in answers: vLLM's `prompt_logprobs`, and OpenAI's `echo` with `logprobs`."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from ...errors import InvalidRequestError
from ...outputs import TokenLogprob
from ..running_request import RunningRequest
from ..service import InferenceService
from .chat_prompt import ChatPrompt
from .protocol import ChatCompletionRequest, CompletionRequest
from .token_text import MIN_LOGPROB, PlacedToken, TokenBytes, TokenPlacer, label

MAX_SCORES = 1 << 16  # log-probabilities of prompts in one response; a prompt with one alternative always fits


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


def check_scored_size(
    service: InferenceService,
    body: ChatCompletionRequest | CompletionRequest,
    prompts: Sequence[ChatPrompt],
    num_copies: int = 1,
) -> None:
    """Raise an error if the response would have too many log-probabilities.

    Args:
        num_copies: of the scores of each prompt in the response.
    """
    num_top, limit = body.num_prompt_logprobs, max(MAX_SCORES, 2 * service.max_model_len)
    if num_top is None or (body.prompt_logprobs is None and body.logprobs is None):
        return  # at most the text is echoed
    num_tokens = num_copies * sum(len(prompt.tokens) for prompt in prompts)
    if num_tokens * (1 + num_top) > limit:
        name = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
        raise InvalidRequestError(
            f"{name}: {num_tokens} tokens of prompts, with {num_top} alternatives each, exceed the {limit} "
            "log-probabilities of a response: ask for fewer alternatives, or send fewer prompts at once"
        )


def prompt_logprobs_of(
    scores: Sequence[TokenLogprob | None], num_top: int, token_bytes: TokenBytes
) -> list[dict[str, Any] | None]:
    """Return vLLM's `prompt_logprobs`."""
    text_of = cache(lambda token: label(token_bytes.of(token)))  # the likeliest tokens are often the same
    return [None if item is None else _by_token(_with_top(item, num_top), text_of) for item in scores]


def _by_token(item: TokenLogprob, text_of: Callable[[int], str]) -> dict[str, Any]:
    """Return log-probabilities and ranks by token id, the prompt's token first."""
    ranks: dict[int, tuple[float, int | None]] = {item.token: (item.logprob, item.rank)}
    for rank, (token, logprob) in enumerate(item.top.items(), 1):
        ranks.setdefault(token, (logprob, rank))
    return {
        str(token): {"logprob": max(logprob, MIN_LOGPROB), "rank": rank, "decoded_token": text_of(token)}
        for token, (logprob, rank) in ranks.items()
    }


def echoed_tokens(
    body: CompletionRequest, running: RunningRequest, index: int, token_bytes: TokenBytes
) -> list[PlacedToken]:
    """Return the tokens of an answer's echoed prompt, with their scores.

    The first token has no log-probability: what its entry contains means nothing.
    """
    number = index // running.spec.num_answers
    tokens = running.spec.prompts[number].tokens
    scores = running.prompt_scores(index)[1:]
    items = [TokenLogprob(tokens[0], 0.0, {}), *(_with_top(item, body.logprobs or 0) for item in scores if item)]
    placer = TokenPlacer(token_bytes, (), skip_special=False)
    placed = [token for item in items for token in placer.add(item.token, item)] + placer.finish()
    num_added = num_added_characters(token_bytes.tokenizer, body.prompts[number], tokens[0])
    for token in placed:
        token.start, token.end = max(0, token.start - num_added), max(0, token.end - num_added)
    return placed


def num_added_characters(tokenizer: Any, prompt: str | Sequence[int], first_token: int) -> int:
    """Return the length of a first token outside of the text.

    Some tokenizers open each text with a token of their own.
    """
    if not isinstance(prompt, str) or first_token not in tokenizer.all_special_ids:
        return 0
    text: str = tokenizer.decode([first_token])
    return 0 if prompt.startswith(text) else len(text)


def _with_top(item: TokenLogprob, num_top: int) -> TokenLogprob:
    """Return a score with the likeliest tokens of a request alone."""
    return replace(item, top=dict(list(item.top.items())[:num_top]))
