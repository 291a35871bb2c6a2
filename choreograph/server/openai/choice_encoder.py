"""Parts of the JSON of chats and text completions: choices, token counts and the end of streams."""

import time
import uuid
from typing import Any

from .answer_loop import AnswerLoop, ParsedAnswer
from .event_stream import SSE_END, sse
from .protocol import ChatCompletionRequest, CompletionRequest
from .scored_prompts import prompt_logprobs_of


class ChoiceEncoder:
    """Base of the encoders whose responses have choices.

    Args:
        prefix: of the response's id.
        kind: `object` of a response.
        event_kind: `object` of an event.
    """

    def __init__(
        self, loop: AnswerLoop, body: ChatCompletionRequest | CompletionRequest, prefix: str, kind: str, event_kind: str
    ) -> None:
        self.id = f"{prefix}-{uuid.uuid4().hex}"
        options = body.stream_options
        self._loop, self._returns_ids, self._num_prompt_logprobs = loop, body.return_token_ids, body.prompt_logprobs
        self._has_usage = options is not None and bool(options.include_usage)
        self._has_running_usage = options is not None and self._has_usage and bool(options.continuous_usage_stats)
        self.is_plain = not (loop.has_logprobs or body.return_token_ids or self._has_running_usage)
        self._head = {"id": self.id, "object": kind, "created": int(time.time()), "model": body.model}
        self._event_head = self._head | {"object": event_kind}

    def _response(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "choices": choices, "usage": self._loop.usage()}

    def _event(self, answer: ParsedAnswer, choice: dict[str, Any], **fields: Any) -> str:
        """Return the event of one choice."""
        if self._has_running_usage:
            counts = {"prompt_tokens": len(self._loop.prompt_of(answer).tokens)}
            counts["completion_tokens"] = answer.num_generated
            fields["usage"] = {**counts, "total_tokens": sum(counts.values())}
        elif self._has_usage:
            fields["usage"] = None
        return sse({**self._event_head, "choices": [choice], **fields})

    def end(self) -> str:
        """Return the token counts, if they are requested, and the end."""
        counts = {**self._event_head, "choices": [], "usage": self._loop.usage()} if self._has_usage else None
        return (sse(counts) if counts else "") + SSE_END

    def _prompt_ids(self, answer: ParsedAnswer) -> dict[str, Any]:
        return {"prompt_token_ids": self._loop.prompt_of(answer).tokens} if self._returns_ids else {}

    def _prompt_logprobs(self, answer: ParsedAnswer) -> dict[str, Any]:
        """Return vLLM's field of one answer; empty if not requested."""
        if self._num_prompt_logprobs is None:
            return {}
        scores = self._loop.running.prompt_scores(answer.index)
        return {"prompt_logprobs": prompt_logprobs_of(scores, self._num_prompt_logprobs, self._loop.token_bytes)}
