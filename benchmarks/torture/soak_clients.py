"""Clients of the soak's server: all routes, three tenants, streams, and requests that the client leaves.

Every answer has to be whole. A share of them is compared with the answer of a quiet server, letter by letter.
"""

import asyncio
import json
import random
import re
import string
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import httpx
import numpy as np
import torch

from choreograph import connect

from .rounding import LIMIT, first_difference
from .soak_programs import GRAPH, SCHEMA, SIBLING
from .soak_worker import KEYS, SWAPPED, SWAPPED_FOLDERS
from .tiny_family import tokenizer

ABORTED = 0.12  # share of requests that the client aborts
COMPARED = 0.2  # share of the comparable requests that are compared
WORKFLOWS = 4  # of each tenant
TIMEOUT = 900.0  # seconds; a request may wait for minutes on a busy machine
TOP = 20  # likeliest tokens to ask for where answers differ
ANSWER_SCHEMA = {
    "type": "object",
    "properties": {"day": {"enum": ["monday", "friday"]}, "size": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["day", "size"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "get_time", "parameters": ANSWER_SCHEMA}}
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


class Clients:
    """Clients and what became of their requests."""

    def __init__(self, url: str, quiet_url: str, seed: int, end: float) -> None:
        self._url, self._quiet_url, self._seed, self._end = url, quiet_url, seed, end
        self._next, self._quiet_lock = 0, asyncio.Lock()
        self._quotes: dict[tuple[str, str], list[str]] = {}  # answers of every tenant's workflow
        self._responses: dict[str, list[str]] = {key: [] for key in KEYS}  # ids
        self.counts: Counter[str] = Counter()
        self.lost: list[str] = []

    async def run(self, num_clients: int) -> None:
        """Run all clients until the time is over."""
        limits = httpx.Limits(max_connections=None)
        remotes = {key: connect(self._url, api_key=key, timeout=TIMEOUT) for key in KEYS}
        async with (
            httpx.AsyncClient(base_url=self._url, timeout=TIMEOUT, limits=limits) as self._client,
            httpx.AsyncClient(base_url=self._quiet_url, timeout=TIMEOUT, limits=limits) as self._quiet,
        ):
            await asyncio.gather(*(self._run_client(remotes) for _ in range(num_clients)))
        for remote in remotes.values():
            remote.close()

    async def _run_client(self, remotes: Mapping[str, Any]) -> None:
        kinds = {
            self._chat: 10,
            self._completion: 4,
            self._response: 3,
            self._modules: 2,
            self._swapped: 2,
            self._others: 2,
        }
        while time.monotonic() < self._end:
            index, self._next = self._next, self._next + 1
            rng = random.Random(f"{self._seed} client {index}")
            key = rng.choice(KEYS)
            try:
                if rng.random() < 0.1:
                    await asyncio.to_thread(self._session, rng, remotes[key])
                else:
                    (kind,) = rng.choices(list(kinds), list(kinds.values()))
                    await kind(rng, key)
            except Exception as exc:
                self.counts["lost"] += 1
                if len(self.lost) < 50:
                    self.lost.append(f"seed {self._seed}, client request {index}: {type(exc).__name__}: {exc}"[:800])

    # -- kinds of requests ----------------------------------------------------------------------------------

    async def _chat(self, rng: random.Random, key: str) -> None:
        workflow = f"workflow-{rng.randrange(WORKFLOWS)}"
        quotes = rng.sample(past := self._quotes.get((key, workflow), []), min(len(past), rng.randrange(3)))
        speaker, times = rng.randrange(4), rng.randrange(12)
        system = f"You are speaker {speaker} of a debate about the harbour. " + "Be brief. " * times
        # a question belongs to one system turn: messages are found behind other ones too, with other keys and values
        question = "\n\n".join(
            [
                f"Speaker {speaker}, {times}: what of case {rng.randrange(20)}?",
                *(f"Another agent said:\n{text}" for text in quotes),
            ]
        )
        body: dict[str, Any] = {
            "model": rng.choice(("base", "base", "base", "adapter-0", "adapter-1", SIBLING)),
            "messages": [{"role": "system", "content": system}, {"role": "user", "content": question}],
            "max_tokens": rng.randint(1, 32),
            "stream": rng.random() < 0.5,
            **_sampling(rng),
        }
        reuse = rng.choice(("exact", "exact", "messages", "auto"))
        choreography: dict[str, Any] = {"reuse": reuse, "workflow": workflow}
        body["choreography"] = choreography
        is_comparable = reuse == "exact" or (reuse == "messages" and not quotes)
        kind = rng.random()
        if kind < 0.08:
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "s", "schema": ANSWER_SCHEMA}}
            body["max_tokens"] = 60
        elif kind < 0.16:
            body |= {"tools": [TOOL], "tool_choice": "required", "max_tokens": 120}
        elif kind < 0.22:
            body["structured_outputs"] = {"regex": "[a-e]{2,8}"}
        elif kind < 0.30 and reuse == "messages":
            choreography |= {"repair": rng.choice((0.3, 1.0))}
        elif kind < 0.36 and reuse != "exact":
            choreography |= {"max_kl": 0.5}
        elif kind < 0.42 and reuse == "messages":
            choreography |= {"labels": ["secret"]} if rng.random() < 0.5 else {"clearance": []}
        elif kind < 0.50:
            body["n"] = 2
        elif kind < 0.60:
            body |= {"logprobs": True, "top_logprobs": rng.randrange(3)}
        elif kind < 0.65:
            choreography["agent"] = rng.choice("abcd")
        elif kind < 0.70:
            body["frequency_penalty"] = 0.5
        elif kind < 0.75:
            body["cache_salt"] = rng.choice("xy")
        is_plain = kind >= 0.42 and not 0.65 <= kind < 0.70
        answer = await self._ask(rng, CHAT, key, body)
        if answer is None:
            return
        texts = [choice["text"] for choice in answer]
        if kind < 0.08 and answer[0]["finish_reason"] == "stop":
            _check_answer(texts[0])
        elif 0.08 <= kind < 0.16 and answer[0]["finish_reason"] == "tool_calls":
            _check_answer("".join(answer[0]["arguments"]))
        elif 0.16 <= kind < 0.22 and not re.fullmatch("[a-e]{0,8}", texts[0]):
            raise ValueError(f"{texts[0]!r} is not of the expression")
        self._quotes.setdefault((key, workflow), []).extend(text for text in texts if text.strip())
        del self._quotes[key, workflow][:-8]
        if is_plain and is_comparable and rng.random() < COMPARED:
            await self._compare(rng, CHAT, key, body, texts)

    async def _completion(self, rng: random.Random, key: str) -> None:
        texts = [
            "".join(rng.choices(string.ascii_lowercase + " ", k=rng.randint(1, 80))) for _ in range(rng.randint(1, 2))
        ]
        body: dict[str, Any] = {"model": "base", "prompt": texts, "max_tokens": rng.randint(1, 24), **_sampling(rng)}
        body |= {"stream": rng.random() < 0.4, "ignore_eos": rng.random() < 0.3}
        if rng.random() < 0.2:
            body["logprobs"] = 2
        if rng.random() < 0.1 and not body["stream"]:
            body["echo"] = True
        answer = await self._ask(rng, COMPLETIONS, key, body)
        if answer is not None and rng.random() < COMPARED:
            await self._compare(rng, COMPLETIONS, key, body, [choice["text"] for choice in answer])

    async def _response(self, rng: random.Random, key: str) -> None:
        past = self._responses[key]
        body: dict[str, Any] = {"model": "base", "input": f"Case {rng.randrange(20)}", "temperature": 0}
        body |= {"max_output_tokens": rng.randint(1, 24), "instructions": "Be kind.", "stream": rng.random() < 0.4}
        if past and rng.random() < 0.5:
            body["previous_response_id"] = rng.choice(past)
        self.counts["sent"] += 1
        reply = await self._client.post(RESPONSES, json=body, headers=_headers(key))
        if reply.status_code == 404 and "previous_response_id" in body:  # forgotten: a tenant keeps a bounded number
            self.counts["forgotten"] += 1
            return
        reply.raise_for_status()
        if body["stream"]:
            events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
            result = events[-1].get("response")
            if result is None:
                raise ValueError(f"the stream ended with {events[-1]}")
        else:
            result = reply.json()
        if result["status"] not in ("completed", "incomplete"):
            raise ValueError(f"status {result['status']}")
        self.counts["completed"] += 1
        past.append(result["id"])
        del past[:-8]
        if rng.random() < 0.1:
            (await self._client.delete(f"{RESPONSES}/{past.pop()}", headers=_headers(key))).read()

    async def _modules(self, rng: random.Random, key: str) -> None:
        reply = await self._client.put("/v1/schemas/trip", json={"pml": SCHEMA}, headers=_headers(key))
        reply.raise_for_status()
        imports = "".join(f"<{name}/>" for name in rng.sample(("alps", "coast", "city"), rng.randint(1, 2)))
        body = {"model": "base", "prompt": f'<prompt schema="trip">{imports}Case {rng.randrange(9)}?</prompt>'}
        body |= {"max_tokens": 12, "temperature": 0, "choreography": {"schema": "trip"}}
        self.counts["sent"] += 1
        reply = await self._client.post(COMPLETIONS, json=body, headers=_headers(key))
        if reply.status_code in (404, 409):  # another client has deleted or replaced it meanwhile
            self.counts["no schema"] += 1
            return
        reply.raise_for_status()
        self.counts["completed"] += 1
        if rng.random() < COMPARED:
            async with self._quiet_lock:
                (
                    await self._quiet.put("/v1/schemas/trip", json={"pml": SCHEMA}, headers=_headers(key))
                ).raise_for_status()
            await self._compare(rng, COMPLETIONS, key, body, [reply.json()["choices"][0]["text"]])

    async def _swapped(self, rng: random.Random, key: str) -> None:
        """Ask an adapter that is replaced meanwhile: the answer is that of one of its versions."""
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": f"Case {rng.randrange(50)}"}],
            "temperature": 0,
        }
        body |= {"model": SWAPPED, "max_tokens": 16, "choreography": {"reuse": "exact"}, "ignore_eos": True}
        self.counts["sent"] += 1
        reply = await self._client.post(CHAT, json=body, headers=_headers(key))
        if reply.status_code in (400, 404) and SWAPPED in reply.text:  # it is not there at the moment
            self.counts["no adapter"] += 1
            return
        reply.raise_for_status()
        self.counts["completed"] += 1
        text, expected = reply.json()["choices"][0]["message"]["content"], []
        for number in SWAPPED_FOLDERS:
            version = body | {"model": f"adapter-{number}"}
            async with self._quiet_lock:
                other = (await self._quiet.post(CHAT, json=version, headers=_headers(key))).raise_for_status().json()
            expected.append(other["choices"][0]["message"]["content"])
            if text == expected[-1] or await self._is_rounding(CHAT, key, version, text, expected[-1]):
                self.counts["compared"] += 1
                return
        raise ValueError(f"{text!r} is the answer of no version of the adapter: {expected}")

    async def _others(self, rng: random.Random, key: str) -> None:
        workflow = f"/v1/workflows/workflow-{rng.randrange(WORKFLOWS)}"
        method, path, body = rng.choice(
            (
                ("PUT", workflow, GRAPH), ("DELETE", workflow, None), ("GET", "/metrics", None), ("GET", "/v1/models", None),
                ("POST", "/tokenize", {"model": "base", "prompt": "some words"}), ("GET", "/health", None),
                ("DELETE", "/v1/schemas/trip", None), ("POST", CHAT, {"model": "base", "messages": []}),
                ("POST", CHAT, {"model": "nothing", "messages": [{"role": "user", "content": "x"}]}),
            )
        )  # fmt: skip
        reply = await self._client.request(method, path, json=body, headers=_headers(key))
        if reply.status_code >= 500:
            raise ValueError(f"{method} {path}: status {reply.status_code}")
        self.counts["others"] += 1

    def _session(self, rng: random.Random, remote: Any) -> None:
        """Run a workflow of the library over HTTP."""
        workflow = f"workflow-{rng.randrange(WORKFLOWS)}"
        with remote.session(seed=rng.getrandbits(30), workflow=workflow) as session:
            root = session.prefill(f"You are one of a team of {rng.randrange(4)}. " * 3)
            said: list[Any] = []
            for name in "abcd"[: rng.randint(1, 4)]:
                options: dict[str, Any] = {"agent": name, "max_tokens": rng.randint(1, 16), "ignore_eos": True}
                if said and rng.random() < 0.3:
                    options["repair"] = 0.5
                said.append(session.decode(f"Case {rng.randrange(9)}:", [root, *said[-2:]], **options))
                self.counts["sent"] += 1
                if rng.random() < 0.1:
                    said.pop().release()
                    self.counts["aborted"] += 1
            for message in said:
                pieces = "".join(message.stream()) if rng.random() < 0.3 else None
                if pieces is not None and pieces != message.text:
                    raise ValueError(f"the stream gave {pieces!r}, the message has {message.text!r}")
                if message.result().finish_reason != "length":
                    raise ValueError(f"finish reason {message.finish_reason}")
                self.counts["completed"] += 1

    # -- asking and comparing -------------------------------------------------------------------------------

    async def _ask(self, rng: random.Random, path: str, key: str, body: dict[str, Any]) -> list[dict[str, Any]] | None:
        """Send a request for choices; return them, or None if the client left."""
        is_aborted = rng.random() < ABORTED
        self.counts["sent"] += 1
        num = body.get("n", 1) * (len(body["prompt"]) if path == COMPLETIONS else 1)
        if body["stream"]:
            choices = await self._read_stream(path, key, body, num, rng.randrange(8) if is_aborted else None)
        else:
            request = self._client.post(path, json=body, headers=_headers(key))
            if is_aborted:
                with suppress(TimeoutError):
                    await asyncio.wait_for(request, rng.random() * 0.3)
                self.counts["aborted"] += 1
                return None
            reply = await request
            if reply.is_error:
                raise ValueError(f"status {reply.status_code}: {reply.text[:300]}")
            choices = [_choice(choice) for choice in reply.json()["choices"]]
        if choices is None:
            self.counts["aborted"] += 1
            return None
        if len(choices) != num or not all(choice["finish_reason"] for choice in choices):
            raise ValueError(f"{len(choices)} answers of {num}: {choices}")
        self.counts["completed"] += 1
        return choices

    async def _read_stream(
        self, path: str, key: str, body: dict[str, Any], num: int, left: int | None
    ) -> list[dict[str, Any]] | None:
        choices: list[dict[str, Any]] = [{"text": "", "finish_reason": None, "arguments": []} for _ in range(num)]
        is_done = False
        async with self._client.stream("POST", path, json=body, headers=_headers(key)) as reply:
            if reply.is_error:
                raise ValueError(f"status {reply.status_code}: {(await reply.aread())[:300]!r}")
            async for line in reply.aiter_lines():
                if left is not None and (left := left - 1) < 0:
                    return None
                is_done |= line == "data: [DONE]"
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise ValueError(event["error"]["message"])
                for choice in event["choices"]:
                    part, whole = _choice(choice), choices[choice["index"]]
                    whole["text"] += part["text"]
                    whole["arguments"] += part["arguments"]
                    whole["finish_reason"] = part["finish_reason"] or whole["finish_reason"]
        if not is_done:
            raise ValueError("the stream ended early")
        return choices

    async def _compare(
        self, rng: random.Random, path: str, key: str, body: dict[str, Any], texts: Sequence[str]
    ) -> None:
        """Compare with the answers of the quiet server."""
        body = {**body, "stream": False}
        if "workflow" in body.get("choreography", {}):
            body["choreography"] = body["choreography"] | {"workflow": f"quiet-{rng.getrandbits(40)}"}
        async with self._quiet_lock:
            reply = await self._quiet.post(path, json=body, headers=_headers(key))
        expected = [_choice(choice)["text"] for choice in reply.raise_for_status().json()["choices"]]
        self.counts["compared"] += len(texts)
        for index, (text, other) in enumerate(zip(texts, expected, strict=True)):
            if text != other and not await self._is_rounding(path, key, body, text, other, index):
                raise ValueError(f"{text!r} instead of {other!r} for {json.dumps(body)}")

    async def _is_rounding(
        self, path: str, key: str, body: dict[str, Any], text: str, other: str, index: int = 0
    ) -> bool:
        """Return whether the first other letter was as likely, up to rounding."""
        asked = (
            {**body, "logprobs": True, "top_logprobs": TOP}
            if path == CHAT
            else {**body, "logprobs": TOP, "echo": False}
        )
        async with self._quiet_lock:
            reply = await self._quiet.post(path, json=asked, headers=_headers(key))
        choice = reply.raise_for_status().json()["choices"][index]
        if path == CHAT:
            tops = [
                {one["token"]: one["logprob"] for one in token["top_logprobs"]}
                for token in choice["logprobs"]["content"]
            ]
        else:
            tops = choice["logprobs"]["top_logprobs"]
        place = first_difference([ord(letter) for letter in text], [ord(letter) for letter in other])
        margins = _margins(tops, body)
        is_rounding = any(margin < LIMIT for margin in margins[place : place + 2])  # a token may have no text
        self.counts["rounding"] += is_rounding
        return is_rounding


def _margins(tops: Sequence[Mapping[str, float]], body: Mapping[str, Any]) -> list[float]:
    """Return by how much the likeliest tokens had to change for another answer."""
    generator, result = torch.Generator().manual_seed(body.get("seed", 0)), list[float]()
    for top in tops:
        uniform = float(torch.rand(1, generator=generator, dtype=torch.float64))
        tokens = sorted(top, key=lambda token: -top[token])
        values = np.asarray([top[token] for token in tokens])
        if not body["temperature"]:
            result.append(float(values[0] - values[1]))
            continue
        count = body["top_k"]
        weights = np.exp((values[:count] - values[0]) / body["temperature"])
        order = np.argsort(tokenizer().convert_tokens_to_ids(tokens[:count]))
        edges = (weights[order] / weights.sum()).cumsum()[:-1]
        result.append(min([float(values[count - 1] - values[count]), *np.abs(edges - uniform).tolist()]))
    return result


def _sampling(rng: random.Random) -> dict[str, Any]:
    if rng.random() < 0.6:
        return {"temperature": 0}
    return {"temperature": rng.choice((0.5, 1.0)), "top_k": rng.randint(2, TOP - 1), "seed": rng.getrandbits(40)}


def _headers(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def _choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    """Return text, arguments of calls and finish reason of a choice, whole or a part."""
    message = choice.get("message") or choice.get("delta") or {}
    calls = message.get("tool_calls") or []
    text = choice["text"] if "text" in choice else message.get("content") or ""
    arguments = [call["function"].get("arguments") or "" for call in calls]
    return {"text": text, "finish_reason": choice.get("finish_reason"), "arguments": arguments}


def _check_answer(text: str) -> None:
    value = json.loads(text)
    if set(value) != {"day", "size"} or value["day"] not in ("monday", "friday") or not 0 <= value["size"] <= 99:
        raise ValueError(f"{text!r} is not of the schema")
