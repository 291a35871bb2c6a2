"""The fake vLLM server with chats, texts and other routes."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from choreograph import Engine
from choreograph.server.openai.chat_prompt import ChatRenderer
from helpers.fake_vllm import FakeVllm, Refused, create_app
from helpers.live_proxy import serving_app

MODEL = "tiny"


class ChatVllm(FakeVllm):
    """State of the server; `key` is the key that clients must send."""

    key: str | None = None
    version: int | None = 1  # of the protocol; None: the server runs no connector
    num_aborted = 0  # streams that a client left
    num_failures = 0  # next completions to end with an internal error

    def tokens_of(self, body: dict[str, Any]) -> list[int]:
        renderer = ChatRenderer(self.engine.chat)
        if "messages" not in body:
            prompt = body["prompt"]
            prompt = prompt[0] if isinstance(prompt[0], (str, list)) and isinstance(prompt, list) else prompt
            return renderer.tokenize(prompt, opening=True) if isinstance(prompt, str) else prompt
        variables, prompts = body.get("chat_template_kwargs"), body.get("add_generation_prompt", True)
        return renderer.prompt(body["messages"], body.get("tools", ()), variables, add_generation_prompt=prompts).tokens

    def answer(self, body: dict[str, Any]) -> Any:
        """Answer a chat or a completion, in vLLM's form."""
        ids, is_chat = self.tokens_of(body), "messages" in body
        head = {
            "id": "cmpl-1",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": 1,
            "model": MODEL,
        }
        runs = [self.deltas(body | {"prompt": ids}, index) for index in range(body.get("n") or 1)]
        if body.get("stream"):
            events = self.events(
                body, ids, head, [delta for run in runs for delta in run] if len(runs) > 1 else runs[0]
            )
            return StreamingResponse(self.watched(events), media_type="text/event-stream")
        try:
            answers = [list(run) for run in runs]
        except Exception as exc:
            return JSONResponse(_error(exc), _error(exc)["error"]["code"])
        choices = [_join(deltas, is_chat, body.get("return_token_ids")) for deltas in answers]
        usage = answers[0][-1]["usage"] | {"prompt_tokens_details": None}
        params = answers[0][-1]["kv_transfer_params"]
        params["choreograph"]["version"] = self.version
        params = params if self.version is not None else None
        prompt_ids = ids if body.get("return_token_ids") else None
        return JSONResponse(
            head | {"choices": choices, "usage": usage, "prompt_token_ids": prompt_ids, "kv_transfer_params": params}
        )

    async def watched(self, events: Iterator[str]) -> AsyncIterator[str]:
        """Yield events in a worker thread; count streams that are not read to their end."""
        is_complete = False
        try:
            while (event := await asyncio.to_thread(next, events, None)) is not None:
                yield event
            is_complete = True
        finally:
            self.num_aborted += not is_complete

    def deltas(self, body: dict[str, Any], index: int) -> Iterator[dict[str, Any]]:
        if self.num_failures:
            self.num_failures -= 1
            raise Refused("an error of the server")
        for delta in self.run(body):
            delta["choices"][0]["index"] = index
            yield delta

    def events(self, body: dict[str, Any], ids: list[int], head: dict[str, Any], deltas: Any) -> Iterator[str]:
        """Yield events as vLLM does: compact, and with the ids of the prompt in the first."""
        is_chat, with_ids, usage = "messages" in body, body.get("return_token_ids"), None
        head = head | {"object": head["object"] + ".chunk"} if is_chat else head
        is_first = True
        try:
            for delta in deltas:
                choice, usage = delta["choices"][0], delta["usage"]
                if is_first and is_chat:
                    first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
                    yield _sse(head | {"choices": [first], "prompt_token_ids": ids if with_ids else None})
                tokens = choice["token_ids"] if with_ids else None
                text = {"delta": {"content": choice["text"]}} if is_chat else {"text": choice["text"]}
                item = {"index": choice["index"], **text, "logprobs": None, "finish_reason": choice["finish_reason"]}
                if not is_chat:
                    item["prompt_token_ids"] = ids if with_ids and is_first else None
                yield _sse(head | {"choices": [item | {"token_ids": tokens}]})
                if is_chat and with_ids:  # a parser holds text back: a chunk that has ids alone
                    yield _sse(head | {"choices": [{"index": 0, "delta": {}, "finish_reason": None, "token_ids": []}]})
                is_first = False
            if (body.get("stream_options") or {}).get("include_usage"):
                yield _sse(head | {"choices": [], "usage": usage | {"prompt_tokens_details": None}})
        except Exception as exc:
            yield _sse(_error(exc))
        yield "data: [DONE]\n\n"


def _sse(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, separators=(',', ':'), ensure_ascii=False)}\n\n"


def _error(exc: Exception) -> dict[str, Any]:
    code = 500 if isinstance(exc, Refused) else 400
    return {"error": {"message": str(exc), "type": "InternalServerError", "param": None, "code": code}}


def _join(deltas: list[dict[str, Any]], is_chat: bool, with_ids: bool | None) -> dict[str, Any]:
    choices = [delta["choices"][0] for delta in deltas]
    text = "".join(choice["text"] for choice in choices)
    content = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
    ids = [token for choice in choices for token in choice["token_ids"]]
    last = {"index": choices[-1]["index"], "logprobs": None, "finish_reason": choices[-1]["finish_reason"]}
    return last | content | {"token_ids": ids if with_ids else None}


def create_chat_app(server: ChatVllm) -> FastAPI:
    """Return the HTTP routes of a server, chats and texts included."""
    app = FastAPI()

    @app.middleware("http")
    async def authenticate(request: Request, call_next: Any) -> Response:
        if server.key is not None and request.headers.get("authorization") != f"Bearer {server.key}":
            return JSONResponse({"error": {"message": "Unauthorized"}}, 401)
        result: Response = await call_next(request)
        return result

    @app.post("/tokenize")
    def tokenize(body: dict[str, Any]) -> Any:
        try:
            tokens = server.tokens_of(body)
        except Exception as exc:
            return JSONResponse(_error(exc), 400)
        return {"tokens": tokens, "count": len(tokens), "max_model_len": server.max_model_len}

    @app.post("/v1/chat/completions")
    @app.post("/v1/completions")
    def complete(body: dict[str, Any]) -> Any:
        try:
            return server.answer(body)
        except Exception as exc:
            return JSONResponse(_error(exc), _error(exc)["error"]["code"])

    @app.api_route("/v1/echo", methods=["GET", "POST", "DELETE"])
    async def echo(request: Request) -> Response:
        body, headers = await request.body(), dict(request.headers)
        headers = {"x-query": str(request.url.query), "x-got": json.dumps(headers), "x-method": request.method}
        return Response(body[::-1], 418, headers, media_type="application/x-thing")

    app.include_router(create_app(server).router)
    return app


@contextmanager
def serving_chats(engine: Engine, *, holes: bool = True) -> Iterator[tuple[str, ChatVllm]]:
    """Serve a fake vLLM; yield its URL and its state."""
    server = ChatVllm(engine, holes=holes, max_model_len=engine.model_info.max_positions)
    with serving_app(create_chat_app(server)) as url:
        yield url, server
    engine.check()
