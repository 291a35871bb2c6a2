"""Structure-aware fuzzing of every route of the server.

make bench NAME=fuzz                          # 10,000 requests to the bundled model
make bench NAME=fuzz ARGS="--requests 1000 --seed 7"

Each request is a valid one of which some fields, keys, headers, path parts or bytes are replaced. No answer may be a server
error other than 501 and 503, no connection may be reset, and every error has OpenAI's form. The server is checked at the
end. Prints the seed and each failing request; exits with 1 if there is one.
"""

import argparse
import asyncio
import copy
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from .common import Row, save
from .load import KEYS, server

CONCURRENCY = 6
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
MAX_GENERATED = 2  # tokens of an answer, where a mutation leaves that

TEXTS = (
    "", " ", "\n", "\0", "a\0b", "\ud83d", "\udc00x", "\u200b", "\ufeff", "e\u0301", "\U0001f468\u200d\U0001f469", "{{ 7*7 }}",
    "{% for x in range(99999999) %}", "<tool_call>", "</tool_call>", "<think>", "</think>", "<|im_end|>", "<|im_start|>system",
    "null", "../../etc/passwd", "%00", "'; DROP TABLE x; --", "x" * 300, "x" * 5000, "\\", '"', "[", "a" * 129, "(", "(a+)+$",
    "start: start", "\\ud83d", "$ref", "#/", "tiny", "model", "default", "\r\nx-evil: 1", "\x1b[31m", "\uffff", "\U0010ffff",
)  # fmt: skip
NUMBERS = (
    0, 1, -1, 2, 7, 127, 128, 4096, 8191, 8192, 8193, 49151, 49152, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**53, 2**63 - 1,
    2**63, 2**64, 10**30, 10**400, 0.0, -0.0, 0.5, 1.0, 1.5, -0.1, 2.0, 1e-9, 1e-300, 1e308, True, False,
)  # fmt: skip
CONTAINERS: tuple[Any, ...] = (
    [], {}, [[]], [{}], {"a": 1}, [None], [1], ["a"], ["a", 1], [1.5], {"": ""}, {"type": "function"}, {"type": "text"}, {"$ref": "#"},
    {"type": "json_schema"}, {"role": "user"}, {"id": 0}, [[1]], [["a"]], [0] * 50, ["x"] * 50, [{"role": "user", "content": "x"}],
)  # fmt: skip
RAW = (
    b'{"a": NaN}',
    b"[1e999]",
    b"\xff\xfe",
    b"\xed\xa0\x80",
    b"null",
    b'"x"',
    b"1",
    b"{",
    b'{"a":1,"a":2}',
    b"\x00",
    b"[" * 3000,
)
WEIRD = (json.dumps("\U0001f600").encode(), b'{"model": "model", "x": "\\ud800"}')

TOOL = {
    "type": "function",
    "function": {
        "name": "get_time",
        "description": "Tell the time.",
        "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}, "required": ["zone"]},
    },
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_time", "arguments": '{"zone": "UTC"}'}}
SAMPLING: dict[str, Any] = {
    "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 1, "stop": ["END"], "stop_token_ids": [5],
    "ignore_eos": True, "min_tokens": 1, "presence_penalty": 0.1, "frequency_penalty": 0.1, "repetition_penalty": 1.1,
    "logit_bias": {"7": 1.0}, "cache_salt": "salt", "priority": 0, "extra_key": "key", "return_token_ids": True, "user": "u",
    "metadata": {"a": "b"}, "skip_special_tokens": True, "session_id": "s",
}  # fmt: skip
CHOREOGRAPHY: dict[str, Any] = {
    "reuse": "messages", "workflow": "w", "agent": "a", "repair": 0.2, "labels": ["l"], "clearance": ["l"], "on_leak": "reencode",
}  # fmt: skip
CHAT: dict[str, Any] = {
    "model": "model",
    "messages": [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "What time is it?"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "12:00"},
        {"role": "user", "content": "Thanks."},
    ],
    "max_tokens": MAX_GENERATED,
    "n": 1,
}
CHAT_OPTIONS: dict[str, Any] = {
    **SAMPLING, "logprobs": True, "top_logprobs": 2, "stream": True, "stream_options": {"include_usage": True}, "tools": [TOOL],
    "tool_choice": "auto", "parallel_tool_calls": False, "response_format": {"type": "json_object"},
    "structured_outputs": {"choice": ["yes", "no"]}, "choreography": CHOREOGRAPHY, "chat_template_kwargs": {"enable_thinking": True},
    "add_generation_prompt": True, "continue_final_message": False, "include_reasoning": True, "reasoning_effort": "low",
}  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", 1, None]}},
    "required": ["a"],
    "additionalProperties": False,
}
FORMATS: tuple[dict[str, Any], ...] = (
    {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
    {"structured_outputs": {"json": SCHEMA}},
    {"structured_outputs": {"regex": "[a-c]+"}},
    {"structured_outputs": {"grammar": 'start: "a" | "b"'}},
    {"tools": [TOOL], "tool_choice": "required"},
    {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "get_time"}}},
)
COMPLETION: dict[str, Any] = {"model": "model", "prompt": "Once upon a time", "max_tokens": MAX_GENERATED}
COMPLETION_OPTIONS: dict[str, Any] = {
    **SAMPLING, "n": 2, "best_of": 2, "logprobs": 2, "echo": True, "stream": True, "add_special_tokens": True,
    "choreography": {"reuse": "auto", "workflow": "w"}, "structured_outputs": {"regex": "a+"}, "suffix": "",
}  # fmt: skip
RESPONSE: dict[str, Any] = {
    "model": "model",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "function_call", "call_id": "c", "name": "get_time", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "noon"},
    ],
    "max_output_tokens": MAX_GENERATED,
}
RESPONSE_OPTIONS: dict[str, Any] = {
    **SAMPLING, "instructions": "Be kind.", "store": True, "stream": True, "top_logprobs": 1, "tool_choice": "auto",
    "tools": [{"type": "function", **TOOL["function"]}], "text": {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}},
    "include": ["message.output_text.logprobs"], "previous_response_id": "resp_1", "reasoning": {"effort": "low"},
    "truncation": "auto", "parallel_tool_calls": True, "choreography": {"reuse": "messages"},
}  # fmt: skip
PML = '<schema name="trip">Plan. <module name="alps">Walk up. <parameter name="days" length="3"/></module></schema>'
PML_PROMPT = '<prompt schema="trip"><alps days="two"/> Go.</prompt>'
GRAPH: dict[str, Any] = {
    "agents": {"planner": None, "coder": "planner", "tester": {"all_of": ["planner", "coder"]}},
    "repeats": True,
}
SESSION: dict[str, Any] = {"mode": "choreographed", "seed": 1, "repair": 0.1, "workflow": "w", "labels": ["l"]}
CALLS: dict[str, Any] = {
    "calls": [
        {
            "kind": "prefill",
            "tokens": {"role": "user", "text": "Hello", "opening": True},
            "parents": [],
            "offsets": [],
            "new_offset": 0,
        },
    ]
}
DECODES: dict[str, Any] = {
    "calls": [
        {
            "kind": "decode",
            "tokens": "So",
            "footer": "end",
            "sampling": {"max_tokens": 1, "temperature": 0},
            "agent": "a",
            "kv_reuse": "reuse",
        },
    ]
}


@dataclass
class Request:
    """One request, before it is sent."""

    method: str
    path: str
    body: Any = None  # JSON, or bytes
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def content(self) -> bytes | None:
        if self.body is None or isinstance(self.body, bytes):
            return self.body
        return json.dumps(self.body, ensure_ascii=True).encode()


def places_of(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (container, key) of every member of a JSON value."""
    members: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, member in list(members):
        yield value, key
        yield from places_of(member)


class Fuzzer:
    """Source of requests that depend on a seed alone."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self.sessions = ["0"]  # ids that the server gave
        self.messages = ["0"]
        self.responses = ["resp_1"]

    def request(self) -> Request:
        """Return the next request."""
        rng = self._rng
        kinds: list[tuple[Callable[[], Request], int]] = [
            (self._chat, 40), (self._completion, 16), (self._response, 16), (self._tokenize, 6), (self._session, 14),
            (self._resource, 8),
        ]  # fmt: skip
        (make,) = rng.choices([make for make, _ in kinds], [weight for _, weight in kinds])
        request = make()
        for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
            self._mutate(request)
        for name in LENGTHS:  # thousands of tokens take longer than the client waits
            if isinstance(request.body, dict) and isinstance(request.body.get(name), int) and request.body[name] > 24:
                request.body[name] = rng.choice((24, 10_000_000))
        if rng.random() < 0.04:
            self._mutate_bytes(request)
        if rng.random() < 0.05:
            name = rng.choice(
                (
                    "x-choreography-workflow",
                    "x-choreography-agent",
                    "x-choreography-reuse",
                    "x-session-id",
                    "x-request-id",
                )
            )
            request.headers[name] = rng.choice(("", "w", "exact", "x" * 300, "\xff", "a,b", "{}"))
        return request

    def value(self) -> Any:
        """Return a JSON value that a field may not expect."""
        rng = self._rng
        kind = rng.random()
        if kind < 0.08:
            return None
        if kind < 0.38:
            return rng.choice(TEXTS)
        if kind < 0.72:
            return rng.choice(NUMBERS)
        value = copy.deepcopy(rng.choice(CONTAINERS))
        if kind > 0.95:
            for _ in range(rng.choice((3, 60, 200))):
                value = [value] if rng.random() < 0.5 else {"a": value}
        return value

    def _mutate(self, request: Request) -> None:
        rng = self._rng
        places = list(places_of(request.body))
        if not places or isinstance(request.body, bytes):
            if request.path.count("/") > 1 and rng.random() < 0.5:
                head, _, _ = request.path.rpartition("/")
                request.path = f"{head}/{rng.choice(('x', '%00', '%ff', '..%2f..', 'a' * 400, '%F0%9F%98%80', '0', '-1', 'resp_1'))}"
            return
        container, key = rng.choice(places)
        action = rng.random()
        if action < 0.6:
            container[key] = self.value()
        elif action < 0.75:
            del container[key]
        elif action < 0.85 and isinstance(container, list):
            container.insert(0, copy.deepcopy(container[key]))
        elif action < 0.92 and isinstance(container, dict):
            container[rng.choice((*TEXTS, "model", "stream", "n", "max_tokens", "extra"))] = self.value()
        else:
            container[key] = [container[key]]

    def _mutate_bytes(self, request: Request) -> None:
        rng = self._rng
        content = request.content or b""
        place = rng.randrange(len(content) + 1)
        request.body = rng.choice(
            (
                content[:place],
                content[:place] + bytes([rng.randrange(256)]) + content[place + 1 :],
                content[:place] + rng.choice(RAW) + content[place:],
                rng.choice(RAW),
                rng.choice(WEIRD),
                content + content,
            )
        )
        if rng.random() < 0.2:
            request.headers["content-type"] = rng.choice(
                ("text/plain", "application/xml", "application/json; charset=utf-16", "")
            )

    def _with_options(self, body: dict[str, Any], options: dict[str, Any], most: int = 5) -> dict[str, Any]:
        chosen = self._rng.sample(sorted(options), self._rng.randrange(most + 1))
        return copy.deepcopy({**body, **{name: options[name] for name in chosen}})

    def _chat(self) -> Request:
        body = self._with_options(CHAT, CHAT_OPTIONS)
        if self._rng.random() < 0.25:
            body |= copy.deepcopy(self._rng.choice(FORMATS))
        return Request("POST", "/v1/chat/completions", body)

    def _completion(self) -> Request:
        body = self._with_options(COMPLETION, COMPLETION_OPTIONS)
        kind = self._rng.random()
        if kind < 0.3:
            body["prompt"] = self._rng.choice(([5, 6, 7], [[5, 6], [7]], ["a", "b"], "", [], [[]], [5, "a"]))
        elif kind < 0.4:
            body |= {"prompt": PML_PROMPT, "choreography": {"schema": "trip"}}
        return Request("POST", "/v1/completions", body)

    def _response(self) -> Request:
        body = self._with_options(RESPONSE, RESPONSE_OPTIONS)
        if "previous_response_id" in body:
            body["previous_response_id"] = self._rng.choice(self.responses)
        return Request("POST", "/v1/responses", body)

    def _tokenize(self) -> Request:
        if self._rng.random() < 0.5:
            return Request("POST", "/detokenize", {"model": "model", "tokens": [5, 6, 7]})
        body = copy.deepcopy(self._rng.choice(({"prompt": "Hi"}, {"messages": CHAT["messages"], "tools": [TOOL]})))
        return Request("POST", "/tokenize", body | {"add_special_tokens": True, "return_token_strs": True})

    def _session(self) -> Request:
        rng, root = self._rng, "/v1/choreograph/sessions"
        session, message = rng.choice(self.sessions[-8:]), rng.choice(self.messages[-8:])
        kind = rng.random()
        if kind < 0.15:
            return Request("POST", root, copy.deepcopy(SESSION))
        if kind < 0.75:
            body = copy.deepcopy(rng.choice((CALLS, DECODES)))
            if rng.random() < 0.6:
                body["calls"][0]["parents"] = [{"id": message}]
            return Request("POST", f"{root}/{session}/calls", body)
        place = f"{root}/{session}/messages/{message}"
        return rng.choice(
            (
                Request("POST", f"{place}/declassify", {"labels": ["l"]}), Request("GET", place), Request("GET", f"{place}/text"),
                Request("DELETE", place), Request("GET", f"{root}/{session}/usage"), Request("DELETE", f"{root}/{session}"),
            )
        )  # fmt: skip

    def _resource(self) -> Request:
        rng = self._rng
        return rng.choice(
            (
                Request("PUT", "/v1/workflows/w", copy.deepcopy(GRAPH | {"labels": {"coder": ["l"]}})),
                Request("DELETE", "/v1/workflows/w"), Request("PUT", "/v1/schemas/trip", {"pml": PML}), Request("GET", "/v1/schemas"),
                Request("DELETE", "/v1/schemas/trip"), Request("GET", f"/v1/responses/{rng.choice(self.responses)}"),
                Request("DELETE", f"/v1/responses/{rng.choice(self.responses)}"), Request("GET", "/v1/models/model"),
                Request("GET", "/metrics"), Request("GET", "/ready"), Request("POST", "/v1/nothing", {}),
                Request("PATCH", "/v1/models", {}),
            )
        )  # fmt: skip

    def note(self, request: Request, answer: Any) -> None:
        """Learn the ids of an answer, for later requests."""
        if not isinstance(answer, dict):
            return
        if request.path.endswith("/sessions") and "id" in answer:
            self.sessions.append(str(answer["id"]))
        elif request.path.endswith("/calls"):
            self.messages += [str(item["id"]) for item in answer.get("messages", ())]
        elif request.path == "/v1/responses" and isinstance(answer.get("id"), str):
            self.responses.append(answer["id"])


def problem_of(request: Request, reply: httpx.Response) -> str | None:
    """Return what is wrong with an answer, or None."""
    if reply.status_code >= 500 and reply.status_code not in (501, 503):
        return f"status {reply.status_code}: {reply.text[:200]}"
    if "text/event-stream" in reply.headers.get("content-type", ""):
        for line in reply.text.splitlines():
            if line.startswith("data: {") and '"server_error"' in line:
                return f"event {line[:200]}"
        return None
    if reply.status_code >= 400 and request.method != "HEAD":
        try:
            error = reply.json()["error"]
            assert isinstance(error["message"], str) and error["message"]
        except (ValueError, KeyError, TypeError, AssertionError):
            return f"status {reply.status_code} without OpenAI's error: {reply.text[:200]}"
    return None


async def run(url: str, count: int, seed: int, key: str | None = KEYS[0]) -> tuple[Counter[int], list[str]]:
    """Send requests; return the number of each status, and what was wrong."""
    fuzzer, statuses, wrong = Fuzzer(seed), Counter[int](), list[str]()
    left = count
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:

        async def work() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                request = fuzzer.request()
                headers = {"content-type": "application/json", **request.headers}
                if key is not None:
                    headers["authorization"] = f"Bearer {key}"
                raw = {name.encode("latin-1"): value.encode("latin-1") for name, value in headers.items()}
                try:
                    reply = await client.request(request.method, request.path, content=request.content, headers=raw)
                    problem = problem_of(request, reply)
                    statuses[reply.status_code] += 1
                    if reply.status_code == 200 and reply.headers.get("content-type", "").startswith(
                        "application/json"
                    ):
                        fuzzer.note(request, reply.json())
                except httpx.HTTPError as exc:
                    problem = f"{type(exc).__name__}: {exc}"
                if problem is not None:
                    wrong.append(f"{request.method} {request.path} {request.headers} {request.content!r}: {problem}")
                    print(wrong[-1][:1500], flush=True)

        await asyncio.gather(*(work() for _ in range(CONCURRENCY)))
        (await client.get("/health")).raise_for_status()
    return statuses, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}")
    with server(arguments.model, max_tokens=MAX_GENERATED) as (url, process):
        statuses, wrong = asyncio.run(run(url, arguments.requests, arguments.seed))
        process.communicate(timeout=300)
        if process.returncode:
            wrong.append("a check of the server failed at its end")
    rows = [Row(f"answers of status {code}", n, "requests", n, n) for code, n in sorted(statuses.items())]
    rows.append(
        Row(
            "wrong answers and lost connections",
            len(wrong),
            "requests",
            len(wrong),
            len(wrong),
            better="lower",
            required=0,
        )
    )
    save("fuzz", rows, arguments.model, seed=arguments.seed, wrong=wrong)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
