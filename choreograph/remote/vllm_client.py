"""HTTP client of a vLLM server, with a thread for its loop."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..errors import ConfigError, RequestFailedError
from ..outputs import TokenLogprob
from ..utils import require
from ..vllm.reuse_params import CONNECTOR_OPTION, VERSION, report_of, transfer_params

T = TypeVar("T")


class ServerRefusedError(RequestFailedError):
    """Request that the server ended with an error."""

    def __init__(self, message: str, *, may_lack_entries: bool) -> None:
        super().__init__(message)
        self.may_lack_entries = may_lack_entries  # perhaps since entries of its spans are not stored


@dataclass
class Completion:
    """Answer of `/v1/completions`, or a part of it."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)  # of these tokens, if requested
    finish_reason: str | None = None  # vLLM's
    cached_tokens: int = 0  # of the prompt, if the server reports them
    report: dict[str, Any] | None = None  # of the connector; None in streams

    @classmethod
    def parse(cls, reply: Mapping[str, Any], num_logprobs: int | None) -> "Completion":
        """Read an answer or an event of a stream.

        Args:
            num_logprobs: most likely tokens to keep for each token.
        """
        result = cls()
        for choice in reply.get("choices") or ():
            result.token_ids = list(choice.get("token_ids") or ())
            result.finish_reason = choice.get("finish_reason")
            if num_logprobs is not None and choice.get("logprobs"):
                result.logprobs = _parse_logprobs(choice["logprobs"], num_logprobs)
        details = (reply.get("usage") or {}).get("prompt_tokens_details") or {}
        result.cached_tokens = details.get("cached_tokens") or 0
        result.report = report_of(reply)
        return result


def _parse_logprobs(values: Mapping[str, Sequence[Any]], num_logprobs: int) -> list[TokenLogprob]:
    """Return log-probabilities by token id.

    vLLM adds the sampled token to the likeliest.
    """

    def token_id(name: str) -> int:
        return int(name.removeprefix("token_id:"))

    result = []
    for name, logprob, top in zip(values["tokens"], values["token_logprobs"], values["top_logprobs"], strict=True):
        likeliest = sorted((top or {}).items(), key=lambda item: -item[1])[:num_logprobs]
        result.append(TokenLogprob(token_id(name), logprob, {token_id(key): value for key, value in likeliest}))
    return result


class VllmClient:
    """Client of one server, whose coroutines run in a thread.

    Args:
        timeout: seconds to wait for an answer, or for the next event of a stream.
    """

    def __init__(self, url: str, api_key: str | None, timeout: float) -> None:
        httpx: Any = require("httpx", "remote")
        self._error, self.url = httpx.HTTPError, url.rstrip("/")
        self._client = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=timeout,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        )
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="vllm client", daemon=True)
        self._thread.start()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the client's thread; wait for its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def close(self) -> None:
        """Cancel all requests and end the thread."""
        if not self.loop.is_closed():
            self.call(self._shut_down())
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
            self.loop.close()

    async def _shut_down(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.aclose()

    async def models(self) -> list[dict[str, Any]]:
        """Return what `/v1/models` lists, the base model first."""
        models: list[dict[str, Any]] = (await self._request("GET", "/v1/models"))["data"]
        return sorted(models, key=lambda model: model.get("parent") is not None)

    async def query(self, body: Mapping[str, Any], names: Sequence[str]) -> tuple[set[str], bool]:
        """Return missing entries, and whether the server computes holes.

        Args:
            body: model and `cache_salt` of the entries.
            names: names of entries.
        """
        report = (await self.complete(control_body(body, query=list(names)))).report
        if report is None or report.get("version") != VERSION:
            raise ConfigError(
                f"{self.url} runs no ChoreographConnector of version {VERSION}: start it with {CONNECTOR_OPTION}"
            )
        return set(report.get("missing") or ()), bool(report.get("holes"))

    async def complete(
        self, body: Mapping[str, Any], on_part: Callable[[Completion], bool] | None = None
    ) -> Completion:
        """Generate.

        Args:
            on_part: called with every event of a stream, until it returns True.

        Returns:
            The answer, or the last event of the stream.

        Raises:
            ServerRefusedError: if the server answers with an error.
            RequestFailedError: if the server cannot be reached.
        """
        num_logprobs = body.get("logprobs")
        if on_part is None:
            result = Completion.parse(await self._request("POST", "/v1/completions", body), num_logprobs)
            _check_finished(result)
            return result
        result, num_tokens, is_answered = Completion(), 0, False
        stream = self._events({**body, "stream": True, "stream_options": {"include_usage": True}})
        try:
            async for event in stream:
                if "error" in event:
                    raise _refusal(event["error"].get("message"), may_lack_entries=not num_tokens)
                result = Completion.parse(event, num_logprobs)
                _check_finished(result)
                num_tokens += len(result.token_ids)
                is_answered |= bool(result.token_ids) or result.finish_reason is not None
                if on_part(result):
                    break
            if not is_answered:  # vLLM before 0.32 says nothing of an error that comes before the first token
                raise _refusal("the stream ended without an answer", may_lack_entries=True)
        finally:
            await stream.aclose()  # type: ignore[attr-defined]
        return result

    async def _request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        try:
            reply = await self._client.request(method, path, json=body)
        except self._error as exc:
            raise self._unreachable(exc) from None
        _check_status(reply)
        result: dict[str, Any] = reply.json()
        return result

    async def _events(self, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        try:
            async with self._client.stream("POST", "/v1/completions", json=body) as reply:
                if not reply.is_success:
                    await reply.aread()
                    _check_status(reply)
                async for line in reply.aiter_lines():
                    if line.startswith("data:") and (data := line[5:].strip()) != "[DONE]":
                        yield json.loads(data)
        except self._error as exc:
            raise self._unreachable(exc) from None

    def _unreachable(self, exc: Exception) -> RequestFailedError:
        return RequestFailedError(f"{self.url}: {exc or type(exc).__name__}")


def identity(salt: str | None, model: str) -> dict[str, Any]:
    """Return the fields that name the namespace of entries."""
    return {"model": model} if salt is None else {"model": model, "cache_salt": salt}


def control_body(body: Mapping[str, Any], **params: Any) -> dict[str, Any]:
    """Return a request that generates one token, for what its parameters do."""
    return {**body, "prompt": [0], "max_tokens": 1, **transfer_params(params)}


def _check_status(reply: Any) -> None:
    if not reply.is_success:
        message = None
        with suppress(ValueError, KeyError, TypeError):
            message = reply.json()["error"]["message"]
        raise _refusal(message or f"status {reply.status_code}", may_lack_entries=reply.status_code >= 500)


def _check_finished(result: Completion) -> None:
    if result.finish_reason in ("error", "abort"):
        raise _refusal(f"finish reason {result.finish_reason!r}", may_lack_entries=True)


def _refusal(message: str | None, *, may_lack_entries: bool) -> ServerRefusedError:
    return ServerRefusedError(f"the vLLM server refused a request: {message}", may_lack_entries=may_lack_entries)
