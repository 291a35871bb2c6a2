"""Remote sessions: `prefill` and `decode` over HTTP (extra `remote`).

>>> from choreograph import connect
>>> engine = connect("http://127.0.0.1:8000")
>>> with engine.session(seed=0) as session:
...     print(session.decode(session.assistant("The sky is"), max_tokens=8).text)
"""

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, overload

from .. import errors
from ..api.call import OPTION_NAMES, SAMPLING_FIELDS, Call, CallKind, SessionAPI
from ..api.chat import turns_of
from ..errors import ChoreographError, ConfigError, InvalidRequestError, MessageReleasedError, SessionClosedError
from ..outputs import BASE_MODEL, FinishReason, Mode, Timing, TokenLogprob, Usage
from ..sampling_params import SamplingParams
from ..utils import require

if TYPE_CHECKING:
    from .vllm_session import VllmEngine

_log = logging.getLogger("choreograph")

REMOTE_OPTIONS = ("agent", "schema")  # of calls, besides those of sessions in process


@overload
def connect(
    url: str, *, api_key: str | None = None, timeout: float = 600.0, engine: Literal["choreograph"] = "choreograph"
) -> "RemoteEngine": ...
@overload
def connect(
    url: str,
    *,
    api_key: str | None = None,
    timeout: float = 600.0,
    engine: Literal["vllm"],
    tokenizer: Any = None,
) -> "VllmEngine": ...
def connect(url, *, api_key=None, timeout=600.0, engine="choreograph", tokenizer=None):
    """Connect to a server.

    Args:
        url: address of the server, without a path.
        timeout: seconds to wait for one value.
        engine: what serves there: "choreograph" (`choreograph serve`), or "vllm" (vLLM with the connector of
            `choreograph.vllm`).
        tokenizer: of a model that vLLM serves: a tokenizer, a folder or a Hub id; None for the model's own.
    """
    if engine == "vllm":
        from .vllm_session import VllmEngine

        return VllmEngine(url, api_key, timeout, tokenizer)
    if engine != "choreograph":
        raise ConfigError(f"engine={engine!r}: use 'choreograph' or 'vllm'")
    if tokenizer is not None:
        raise ConfigError(f"tokenizer={tokenizer!r}: a choreograph server has its own: leave it out")
    return RemoteEngine(url, api_key, timeout)


class RemoteEngine:
    """Engine of a server."""

    def __init__(self, url: str, api_key: str | None, timeout: float) -> None:
        httpx: Any = require("httpx", "remote")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.Client(base_url=f"{url.rstrip('/')}/v1/choreograph", headers=headers, timeout=timeout)
        self._error = httpx.HTTPError

    def session(
        self, *, mode: Mode = "choreographed", seed: int | None = None, model: str = BASE_MODEL, **options: Any
    ) -> "RemoteSession":
        """Open a session, as `Engine.session`.

        Args:
            options: see `SessionOptions`, as JSON; `workflow` names the step graph (`PUT /v1/workflows/{workflow}`)
                of the agents that calls name.
        """
        reply = self.request("POST", "/sessions", {"mode": mode, "seed": seed, "model": model, **_json_body(options)})
        return RemoteSession(self, reply["id"], mode, reply["options"])

    def request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send a request; raise the error that the library would raise."""
        try:
            reply = self._client.request(method, path, json=body)
        except self._error as exc:
            raise errors.RequestFailedError(f"{self._client.base_url}: {exc or type(exc).__name__}") from None
        if not reply.is_success:
            raise _error_of(reply)
        result: dict[str, Any] = reply.json()
        return result

    def lines(self, path: str) -> Iterator[Any]:
        """Yield the JSON values of a streamed answer.

        Raises the error that the library would raise.
        """
        try:
            with self._client.stream("GET", path) as reply:
                if not reply.is_success:
                    reply.read()
                    raise _error_of(reply)
                for line in reply.iter_lines():
                    value = json.loads(line)
                    if isinstance(value, dict):
                        raise _named_error(value["error"])
                    yield value
        except self._error as exc:
            raise errors.RequestFailedError(f"{self._client.base_url}: {exc or type(exc).__name__}") from None

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> "RemoteEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _error_of(reply: Any) -> ChoreographError:
    """Return the library's error of an answer that is not a success."""
    try:
        return _named_error(reply.json()["error"])
    except (ValueError, KeyError, TypeError):
        return errors.RequestFailedError(f"the server answered with status {reply.status_code}")


def _named_error(error: Mapping[str, Any]) -> ChoreographError:
    kind = getattr(errors, str(error["code"]), None)
    is_known = isinstance(kind, type) and issubclass(kind, ChoreographError)
    return (kind if is_known and kind is not None else errors.RequestFailedError)(error["message"])


class RemoteSlice:
    """Tokens [start, stop) of a message, used as a parent."""

    def __init__(self, message: "RemoteMessage", start: int, stop: int) -> None:
        self.message, self.start, self.stop = message, start, stop
        self.id, self.length = message.id, stop - start


class RemoteMessage:
    """Handle of one message of a server, complete or not."""

    def __init__(self, session: "RemoteSession", kind: str, parents: tuple[Any, ...], reply: Mapping[str, Any]) -> None:
        self._session, self.kind, self.parents = session, kind, parents
        self.id: str = reply["id"]
        self.model: str = reply["model"]
        self.role: str | None = reply["role"]
        self.labels = frozenset[str](reply["labels"])
        self._is_released = False

    def __repr__(self) -> str:
        return f"<RemoteMessage {self.id} {self.kind}>"

    @cached_property
    def _values(self) -> dict[str, Any]:
        if self._is_released:
            raise MessageReleasedError(f"message {self.id} was released before it was read: read it first")
        return self._session._request("GET", f"/messages/{self.id}")

    @property
    def tokens(self) -> list[int]:
        return list(self._values["tokens"])

    @property
    def output_token_ids(self) -> list[int]:
        return list(self._values["output_token_ids"])

    @property
    def text(self) -> str:
        text: str = self._values["text"]
        return text

    @property
    def length(self) -> int:
        return len(self._values["tokens"])

    @property
    def position(self) -> int:
        position: int = self._values["position"]
        return position

    @property
    def offsets(self) -> tuple[int, ...]:
        return tuple(self._values["offsets"])

    @property
    def finish_reason(self) -> FinishReason | None:
        reason: FinishReason | None = self._values["finish_reason"]
        return reason

    @property
    def usage(self) -> Usage:
        return Usage(**self._values["usage"])

    @property
    def timing(self) -> Timing:
        return Timing(**self._values["timing"])

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        items = self._values["logprobs"]
        return None if items is None else list(map(_token_logprob, items))

    @property
    def prompt_logprobs(self) -> list[TokenLogprob | None] | None:
        items = self._values["prompt_logprobs"]
        return None if items is None else [item and _token_logprob(item) for item in items]

    def __getitem__(self, tokens: slice) -> RemoteSlice:
        start = tokens.start or 0
        return RemoteSlice(self, start, self.length if tokens.stop is None else tokens.stop)

    def result(self) -> "RemoteMessage":
        """Wait until the message is complete; raise its error."""
        _ = self._values
        return self

    def stream(self) -> Iterator[str]:
        """Yield the text of a decode in pieces."""
        if self.kind != "decode" or "_values" in self.__dict__ or self._is_released:
            yield self.text
        else:
            yield from self._session._lines(f"/messages/{self.id}/text")

    def declassify(self, *labels: str) -> "RemoteMessage":
        """Remove labels from the message, for its later readers."""
        reply = self._session._request("POST", f"/messages/{self.id}/declassify", {"labels": list(labels)})
        self.labels = frozenset(reply["labels"])
        return self

    def release(self) -> None:
        """Release the message; values that were read stay readable."""
        if not self._is_released:
            self._is_released = True
            self._session._request("DELETE", f"/messages/{self.id}")


class RemoteSession(SessionAPI[RemoteMessage, RemoteMessage | RemoteSlice]):
    """Session of a server, with the calls of `Session`.

    Two options more: `agent` names the agent whose turn it is, for eviction by the step graph; `schema` names a
    Prompt Cache schema of the server, and the header of a decode is then a prompt in PML.

    Args:
        options: names of those of the server's features.
    """

    def __init__(self, engine: RemoteEngine, session_id: str, mode: Mode, options: Iterable[str]) -> None:
        self._engine, self.id, self.mode = engine, session_id, mode
        self._names = {
            kind: list(dict.fromkeys((*names, *REMOTE_OPTIONS, *options))) for kind, names in OPTION_NAMES.items()
        }
        self.closed = False

    def _request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        if self.closed:
            raise SessionClosedError("the session is closed: open a new one")
        return self._engine.request(method, f"/sessions/{self.id}{path}", body)

    def _lines(self, path: str) -> Iterator[Any]:
        if self.closed:
            raise SessionClosedError("the session is closed: open a new one")
        return self._engine.lines(f"/sessions/{self.id}{path}")

    def _option_names(self, kind: CallKind) -> list[str]:
        return self._names[kind]

    def _submit_calls(self, calls: list[Call]) -> list[RemoteMessage]:
        parents = [tuple(call.parents) for call in calls]
        bodies = [_call_body(call, its_parents) for call, its_parents in zip(calls, parents, strict=True)]
        reply = self._request("POST", "/calls", {"calls": bodies}) if calls else {"messages": [], "warnings": []}
        for text in reply["warnings"]:
            _log.warning(text)
        kinds = [call.kind for call in calls]
        return [RemoteMessage(self, *each) for each in zip(kinds, parents, reply["messages"], strict=True)]

    @property
    def usage(self) -> Usage:
        """Sum of the usage of all messages."""
        return Usage(**self._request("GET", "/usage"))

    def close(self) -> None:
        """Release every message."""
        if not self.closed:
            self._request("DELETE", "")
            self.closed = True

    def __enter__(self) -> "RemoteSession":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _token_logprob(item: Sequence[Any]) -> TokenLogprob:
    token, logprob, top, rank = item
    return TokenLogprob(token, logprob, dict(map(tuple, top)), rank)


def _call_body(call: Call, parents: Sequence[Any]) -> dict[str, Any]:
    """Return a call as JSON."""
    options = dict(call.options)
    fields = {name: options.pop(name) for name in SAMPLING_FIELDS if name in options}
    sampling, footer = options.pop("sampling", SamplingParams()), options.pop("footer", None)
    placement = {"offsets": call.offsets, "new_offset": call.new_offset}
    body = {"kind": call.kind, "tokens": _prompt_body(call.prompt), **_json_body(placement | options)}
    body["parents"] = [_parent_body(parent) for parent in parents]
    if call.kind == "decode":
        body["sampling"] = asdict(replace(sampling, **fields))
        body["footer"] = None if footer is None else _prompt_body(footer)
    return body


def _json_body(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that were given as JSON; the server checks them."""
    body = {}
    for name, value in options.items():
        if value is not None:
            body[name] = sorted(value) if isinstance(value, (set, frozenset)) else value
            try:
                json.dumps(body[name])
            except TypeError:
                raise InvalidRequestError(
                    f"{name}={value!r:.80}: a server takes JSON: use a number, a text or a list of them"
                ) from None
    return body


def _prompt_body(prompt: Any) -> Any:
    if turns := turns_of(prompt):
        return [asdict(turn) for turn in turns]
    return prompt if isinstance(prompt, str) else [int(token) for token in prompt]


def _parent_body(parent: Any) -> dict[str, Any]:
    if isinstance(parent, RemoteSlice):
        return {"id": parent.id, "start": parent.start, "stop": parent.stop}
    if not isinstance(parent, RemoteMessage):
        raise errors.NotAMessageError(
            f"{parent!r} is not a message of this session: give what its prefill or decode returned"
        )
    return {"id": parent.id}
