"""A vLLM server with the connector's protocol, over the project's own engine.

Entries are messages of the engine and spans are parents with offsets, so a client is tested without vLLM. Implements
what clients of this project use of `/v1/models` and `/v1/completions`, with vLLM's field names.
"""

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse, StreamingResponse

from choreograph import Engine, Message, SamplingParams

from .inspect_engine import inspect

SAMPLING = [
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "min_tokens",
    "logprobs",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
]


class Piece(NamedTuple):
    """Consecutive tokens of an entry or of a prompt that one message computed."""

    message: Message
    start: int  # of the message's tokens
    stop: int
    at: int  # of the first one, in the entry or the prompt
    shift: int  # its position minus `at`, in the coordinates of the entry or the prompt

    def part(self, start: int, stop: int) -> "Piece | None":
        """Return the part in [start, stop) of the entry or prompt, which becomes [0, ...) of another."""
        first, last = max(start, self.at), min(stop, self.at + self.stop - self.start)
        begin = self.start + first - self.at
        return None if first >= last else Piece(self.message, begin, begin + last - first, first - start, self.shift)


class Refused(Exception):
    """Request that vLLM would end with an error."""


class FakeVllm:
    """State of the server; tests read and change it.

    Args:
        holes: the server computes prompt tokens between two spans.
    """

    def __init__(self, engine: Engine, *, holes: bool = True, root: str | None = None, max_model_len: int) -> None:
        self.engine, self.holes, self.root, self.max_model_len = engine, holes, root, max_model_len
        self.entries: dict[tuple[Any, ...], list[Piece]] = {}  # by namespace and name
        self.bodies: list[dict[str, Any]] = []  # of all completions
        self.hides_errors = False  # of streams without a token yet, as vLLM before 0.32
        self.delay = 0.0  # seconds before a request is admitted
        self.max_in_flight = self._in_flight = 0
        self._references: Counter[int] = Counter()  # of messages by entries
        self._session = engine.session()
        self._lock = threading.RLock()

    @property
    def names(self) -> set[str]:
        """Names of all stored entries."""
        return {key[-1] for key in self.entries}

    def evict(self, *names: str) -> None:
        """Forget entries, as a full store or a restart does; without names all."""
        with self._lock:
            for key in [key for key in self.entries if not names or key[-1] in names]:
                self._forget(key)

    def _forget(self, key: tuple[Any, ...]) -> None:
        for piece in self.entries.pop(key, ()):
            self._references[piece.message.id] -= 1
            if not self._references[piece.message.id]:
                piece.message.release()

    def spans_sent(self) -> list[list[dict[str, Any]]]:
        """Return the spans of every completion so far."""
        return [_params(body).get("spans", []) for body in self.bodies]

    def run(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the deltas of a completion, the last with everything known."""
        self.bodies.append(body)
        self._in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self._in_flight)
        time.sleep(self.delay)
        messages: list[Message] = []
        try:
            with self._lock:
                request = Completion(self, body, messages)
            while not request.is_final:
                with self._lock:
                    delta = request.step()
                yield delta
        finally:
            self._in_flight -= 1
            with self._lock:
                for message in messages:
                    if not self._references[message.id]:
                        message.release()

    def store(self, key: tuple[Any, ...], pieces: list[Piece]) -> None:
        for piece in pieces:
            self._references[piece.message.id] += 1
        self._forget(key)
        self.entries[key] = pieces


class Completion:
    """One admitted request.

    Args:
        messages: receives all messages that it computes.
    """

    def __init__(self, server: FakeVllm, body: dict[str, Any], messages: list[Message]) -> None:
        self.server, self.params, self.prompt = server, _params(body), body["prompt"]
        self.namespace = body.get("cache_salt"), body["model"], tuple(sorted(self.params.get("labels", ())))
        self.is_final, self.num_chars, self.generated = False, 0, list[int]()
        self.max_tokens = body.get("max_tokens", 16)
        if len(self.prompt) + (self.max_tokens or 1) > server.max_model_len:
            raise ValueError(f"This model's maximum context length is {server.max_model_len} tokens")
        spans = [] if self.params.get("mode") == "exact" else self.params.get("spans", [])
        self._check(spans)
        self.pieces, self.reused = list[Piece](), 0
        position = min([0, *(span.get("position", span["at"]) for span in spans)])
        self._origin = -position  # positions of the engine are not negative
        at = 0
        for span in spans:
            if not server.holes and span["at"] > at:
                break
            if span["at"] > at:
                self._prefill(at, span["at"], messages)
            at = self._reuse(span, messages)
        sampling = {name: body[name] for name in SAMPLING if body.get(name) is not None}
        sampling |= {"max_tokens": self.max_tokens}
        if body.get("logit_bias"):
            sampling["logit_bias"] = {int(token): bias for token, bias in body["logit_bias"].items()}
        self.message = self._session.decode(
            self.prompt[at:],
            [piece.message[piece.start : piece.stop] for piece in self.pieces],
            [self._origin + piece.at + piece.shift for piece in self.pieces],
            self._origin + at,
            sampling=SamplingParams(**sampling),
            footer=[],
            forced_tokens=body.get("allowed_token_ids"),
        )
        messages.append(self.message)
        self.pieces.append(Piece(self.message, 0, 1 << 40, at, 0))
        for name in self.params.get("release", ()):
            server._forget((*self.namespace, name))

    @property
    def _session(self) -> Any:
        return self.server._session

    def _check(self, spans: list[dict[str, Any]]) -> None:
        end = 0
        for span in spans:
            length = span["stop"] - span["start"]
            if length <= 0 or span["start"] < 0 or span["at"] < end or span["at"] + length >= len(self.prompt):
                raise Refused(f"spans {spans} do not fit a prompt of {len(self.prompt)} tokens")
            end = span["at"] + length
            pieces = self.server.entries.get((*self.namespace, span["entry"]))
            if pieces is None:
                raise Refused(f"entry {span['entry']} is not stored")
            tokens = [t for piece in pieces for t in piece.message.tokens[piece.start : piece.stop]]
            if tokens[span["start"] : span["stop"]] != self.prompt[span["at"] : end]:
                raise Refused(f"entry {span['entry']} has other tokens")

    def _prefill(self, start: int, stop: int, messages: list[Message]) -> None:
        message = self._session.prefill(
            self.prompt[start:stop],
            [piece.message[piece.start : piece.stop] for piece in self.pieces],
            [self._origin + piece.at + piece.shift for piece in self.pieces],
            self._origin + start,
        )
        messages.append(message)
        self.pieces.append(Piece(message, 0, stop - start, start, 0))

    def _reuse(self, span: dict[str, Any], messages: list[Message]) -> int:
        """Place a span; return its end in the prompt."""
        at, shift = span["at"], span.get("position", span["at"]) - span["at"]
        for piece in self.server.entries[(*self.namespace, span["entry"])]:
            part = piece.part(span["start"], span["stop"])
            if part is None:
                continue
            if any(part.message is p.message and part.start < p.stop and p.start < part.stop for p in self.pieces):
                m = part.message  # the engine refuses a parent twice: an equal prefill shares its KV
                copy = self._session.prefill(m.tokens, m.parents, m.offsets, m.position)
                messages.append(copy)
                part = part._replace(message=copy)
            self.pieces.append(part._replace(at=at + part.at, shift=part.shift + shift))
        self.reused += span["stop"] - span["start"]
        return at + span["stop"] - span["start"]

    def step(self) -> dict[str, Any]:
        """Return what is new since the last step, after one step of the engine."""
        if not self.message.done and self.message.error is None:
            self.server.engine.step()
        if self.message.error is not None:
            raise self.message.error
        progress = self.message.progress(self.num_chars, len(self.generated))
        self.num_chars += len(progress.text)
        self.generated += progress.token_ids
        self.is_final = progress.is_final
        choice: dict[str, Any] = {"index": 0, "text": progress.text, "token_ids": progress.token_ids}
        choice |= {"finish_reason": None, "stop_reason": None}
        if progress.logprobs:
            choice["logprobs"] = {
                "tokens": [f"token_id:{item.token}" for item in progress.logprobs],
                "token_logprobs": [item.logprob for item in progress.logprobs],
                "top_logprobs": [
                    {f"token_id:{token}": value for token, value in {item.token: item.logprob, **item.top}.items()}
                    for item in progress.logprobs
                ],
            }
        return {"choices": [choice], "usage": None, **(self._finish(choice) if self.is_final else {})}

    def _finish(self, choice: dict[str, Any]) -> dict[str, Any]:
        state, message = inspect(self.message).decode_state, self.message
        choice["finish_reason"] = "stop" if message.finish_reason == "stop" else "length"
        if choice["finish_reason"] == "stop" and self.generated[-1] not in state.stop_tokens:
            choice["stop_reason"] = next(iter(state.sampling.stop), None)
        stored = self.params.get("store", ())
        end = len(self.prompt) + len(self.generated) - 1
        for item in stored:
            stop = end if item.get("stop") is None else item["stop"]
            pieces = [part for piece in self.pieces if (part := piece.part(item["start"], min(stop, end)))]
            self.server.store((*self.namespace, item["entry"]), pieces)
        answer = {"version": 1, "mode": self.params.get("mode", "spans"), "holes": self.server.holes}
        answer |= {"reused_tokens": self.reused, "computed_tokens": len(self.prompt) - self.reused}
        answer |= {"stored": [item["entry"] for item in stored]}
        if missing := [n for n in self.params.get("query", ()) if (*self.namespace, n) not in self.server.entries]:
            answer["missing"] = missing
        usage = {"prompt_tokens": len(self.prompt), "completion_tokens": len(self.generated)}
        usage["prompt_tokens_details"] = {"cached_tokens": self.reused}
        return {"usage": usage, "kv_transfer_params": {"choreograph": answer}}


def _params(body: dict[str, Any]) -> dict[str, Any]:
    return (body.get("kv_transfer_params") or {}).get("choreograph") or {}


def create_app(server: FakeVllm) -> FastAPI:
    """Return the HTTP routes of a server."""
    app = FastAPI()

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        model = {"id": "tiny", "root": server.root, "parent": None, "max_model_len": server.max_model_len}
        return {"object": "list", "data": [model]}

    @app.post("/v1/completions")
    def completions(body: dict[str, Any]) -> Any:
        deltas = server.run(body)
        if body.get("stream"):
            return StreamingResponse(_events(deltas, hides_errors=server.hides_errors), media_type="text/event-stream")
        try:
            return _joined(list(deltas))
        except Exception as exc:
            return JSONResponse(_error(exc), _error(exc)["error"]["code"])

    return app


def _error(exc: Exception) -> dict[str, Any]:
    code = 400 if isinstance(exc, ValueError) else 500
    text = "Internal server error" if isinstance(exc, Refused) else str(exc)  # vLLM hides what the connector says
    return {"error": {"message": text, "type": type(exc).__name__, "param": None, "code": code}}


def _events(deltas: Iterator[dict[str, Any]], *, hides_errors: bool) -> Iterator[str]:
    """Yield server-sent events; a stream has no `kv_transfer_params`."""
    usage = None
    try:
        for delta in deltas:
            usage = delta.pop("usage")
            delta.pop("kv_transfer_params", None)
            yield f"data: {json.dumps(delta)}\n\n"
        yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"
    except Exception as exc:
        if usage is not None or not hides_errors:
            yield f"data: {json.dumps(_error(exc))}\n\n"
    yield "data: [DONE]\n\n"


def _joined(deltas: list[dict[str, Any]]) -> dict[str, Any]:
    """Join the deltas of a completion into one answer."""
    result, choices = deltas[-1], [delta["choices"][0] for delta in deltas]
    choice = choices[-1]
    choice["text"] = "".join(c["text"] for c in choices)
    choice["token_ids"] = [token for c in choices for token in c["token_ids"]]
    parts = [c["logprobs"] for c in choices if c.get("logprobs")]
    choice["logprobs"] = {k: [v for part in parts for v in part[k]] for k in parts[0]} if parts else None
    return result


@contextmanager
def serving_vllm(
    engine: Engine, *, holes: bool = True, root: str | None = None, max_model_len: int | None = None
) -> Iterator[tuple[str, FakeVllm]]:
    """Serve a fake vLLM on a free port; yield its URL and its state."""
    length = max_model_len or engine.model_info.max_positions
    fake = FakeVllm(engine, holes=holes, root=root, max_model_len=length)
    server = uvicorn.Server(uvicorn.Config(create_app(fake), port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", fake
    finally:
        server.should_exit = True
        thread.join(30)
    assert not thread.is_alive()
    engine.check()
