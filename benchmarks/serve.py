"""The server: three agent programs in `exact` and `auto` and on other servers, and its overhead against the engine.

make bench NAME=serve                                    # about an hour on two cores
make bench NAME=serve ARGS="--only debate --rounds 1 --peers llama.cpp"
make bench NAME=serve ARGS="--only quoting"

The programs have the shapes of those in `examples/serve`: a debate whose speakers quote each other, a supervisor's workers
who read all notes, and a hand-off of one conversation to agents with other instructions. All sides answer each program in
turns, on the same model with the same number of threads; the other servers are stopped meanwhile. Every answer has
`--answer-tokens` tokens on every side: a message of a debate between agents has a few hundred. Results are saved
after each part; a server that fails is left out from then on.

`quoting` tells what reuse of quotes costs, by the length of the shortest quote that is reused, with and without repair: how
much likelier `auto` finds its sampled answers than `exact` does, which estimates the divergence, and how far answers agree
with those of `exact`. `exact` against itself shows the noise of bfloat16. With `--data folder`, the programs are asked questions
of Natural Questions about documents, `retrieval` is another one, answers are greedy and are scored by F1:

make bench NAME=serve ARGS="--only quoting --data folder --rounds 6 --answer-tokens 24"
"""

import argparse
import asyncio
import json
import random
import statistics
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import httpx
import numpy as np
import torch
import uvloop

from choreograph import Engine, SamplingParams
from choreograph.lab.evaluation.metrics import f1
from choreograph.lab.evaluation.statistics import bootstrap
from choreograph.server.app import create_app
from choreograph.server.reuse import span_index
from choreograph.server.server_config import ServerConfig

from .common import (
    Row,
    engine,
    greedy,
    interleaved,
    last_result,
    median_row,
    random_tokens,
    ratio_row,
    row_from_record,
    save,
)
from .serve_peers import PEERS, Server, start_ours

STREAMS, PROMPT_TOKENS, OUTPUT_TOKENS = 32, 64, 64
ANSWER_TOKENS = 256
MIN_SPANS = (16, 32, 64)  # tokens of the shortest quote that is reused
REPAIR = 0.2  # share of reused tokens to compute again
NUM_QUESTIONS, NUM_DOCUMENTS = 10, {"retrieval": 5}  # of `retrieval` in a round; documents in a prompt, of others 2
QUESTION = "Question {}: should a small town build a second bridge over its river, and who should pay for it?"


class Turn(NamedTuple):
    """One answer of a program."""

    text: str
    ttft: float  # seconds
    quotes: bool  # the prompt quotes other answers
    computed: int  # prompt tokens that the server computed; -1: it does not say


class Answer(NamedTuple):
    """One sampled answer."""

    messages: list[dict[str, str]]  # its prompt
    text: str
    f1: float  # of the accepted answers; 0 without any
    tokens: list[int]
    logprobs: list[float]  # of the tokens but special ones, nats
    computed: int  # prompt tokens that the server computed


class Task(NamedTuple):
    """A question, and the answers that are right, if known."""

    text: str
    accepted: tuple[str, ...] = ()


class Side(NamedTuple):
    """A server, and what is added to every request."""

    server: Server
    reuse: str | None = None  # of our server


async def stream(client: httpx.AsyncClient, path: str, body: Mapping[str, Any]) -> tuple[str, float, dict[str, Any]]:
    """(text, seconds to the first text, usage) of a streamed request."""
    start, first, pieces, usage = time.perf_counter(), None, [], {}
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", path, json=body) as reply:
        reply.raise_for_status()
        async for line in reply.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                piece = choice["delta"].get("content") if "delta" in choice else choice["text"]
                if piece:
                    first = first or time.perf_counter() - start
                    pieces.append(piece)
    return "".join(pieces), first or time.perf_counter() - start, usage


def chat_messages(system: str, chat: Sequence[str]) -> list[dict[str, str]]:
    """A system message, then messages of user and assistant in turns."""
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(chat)]
    return [{"role": "system", "content": system}, *turns]


class Run:
    """One run of a program on one side."""

    def __init__(
        self, client: httpx.AsyncClient, model: str, reuse: str | None, workflow: str, max_tokens: int
    ) -> None:
        self._client, self.turns = client, list[Turn]()
        self._max_tokens, self._body = max_tokens, dict[str, Any](model=model, temperature=0)
        self._body |= {"max_tokens": max_tokens, "min_tokens": max_tokens}  # answers of one length on every side
        if reuse is not None:
            self._body["choreography"] = {"reuse": reuse, "workflow": workflow}

    async def ask(self, system: str, *chat: str, quotes: bool = True) -> str:
        """Return the answer to a chat, of user and assistant in turns."""
        messages = chat_messages(system, chat)
        text, ttft, usage = await stream(self._client, "/v1/chat/completions", {**self._body, "messages": messages})
        if usage.get("completion_tokens", self._max_tokens) != self._max_tokens:  # llama.cpp's streams do not say
            raise ValueError(f"an answer of {usage['completion_tokens']} tokens instead of {self._max_tokens}")
        computed = usage.get("choreography", {}).get("computed_tokens", -1)
        if computed < 0 and (details := usage.get("prompt_tokens_details")) is not None:
            computed = usage["prompt_tokens"] - (details.get("cached_tokens") or 0)
        self.turns.append(Turn(text, ttft, quotes, computed))
        return text


class SampledRun(Run):
    """Run that keeps answers to prompts that quote, sampled, or greedy where some answers are right."""

    def __init__(self, *arguments: Any, repair: float, accepted: Sequence[str]) -> None:
        super().__init__(*arguments)
        self._body |= {"seed": 1, "logprobs": True, "return_token_ids": True}
        self._body |= {"min_tokens": 0} if accepted else {"temperature": 1}
        self._body["choreography"]["repair"] = repair
        self._body["cache_salt"] = self._body["choreography"]["workflow"]  # nothing is cached of another run
        self._accepted, self.answers = accepted, list[Answer]()

    async def ask(self, system: str, *chat: str, quotes: bool = True) -> str:
        messages = chat_messages(system, chat)
        reply = await self._client.post("/v1/chat/completions", json={**self._body, "messages": messages})
        record = reply.raise_for_status().json()
        choice, computed = record["choices"][0], record["usage"]["choreography"]["computed_tokens"]
        if quotes:
            logprobs = [item["logprob"] for item in choice["logprobs"]["content"]]
            text = str(choice["message"]["content"])
            self.answers.append(
                Answer(messages, text, f1(text, self._accepted), choice["token_ids"], logprobs, computed)
            )
        return str(choice["message"]["content"])


async def debate(
    run: Run, question: str, says: str = "Argue in a few sentences.", verdict: str = "Name the winner."
) -> None:
    """Three debaters in two rounds, each at the same time, and a judge."""
    roles = [f"You are debater {number}. {says}" for number in (1, 2, 3)]
    speeches = await asyncio.gather(*(run.ask(role, question, quotes=False) for role in roles))
    quoted = [f"Debater {number} said:\n{speech}" for number, speech in enumerate(speeches, 1)]
    prompts = ["\n\n".join([question, *(q for q in quoted if q is not own)]) for own in quoted]
    speeches = await asyncio.gather(*(run.ask(r, p) for r, p in zip(roles, prompts, strict=True)))
    quoted += [f"Debater {number} then said:\n{speech}" for number, speech in enumerate(speeches, 1)]
    await run.ask(f"You judge debates. {verdict}", "\n\n".join([question, *quoted]))


async def supervisor(
    run: Run, question: str, says: str = "Add a few sentences.", report: str = "Write a report."
) -> None:
    """Two workers, twice each, who read all notes so far; a supervisor writes the report."""
    workers = {"historian": "You know the history of towns.", "engineer": "You know how bridges are built."}
    notes = [question]
    for name, role in list(workers.items()) * 2:
        answer = await run.ask(role, "\n\n".join([*notes, says]), quotes=len(notes) > 1)
        notes.append(f"The {name} said:\n{answer}")
    await run.ask(f"You are the supervisor. {report}", "\n\n".join(notes))


async def handoff(run: Run, question: str) -> None:
    """One conversation, handed on to agents with other instructions."""
    agents = ["You welcome visitors of the town hall.", "You are the town's treasurer.", "You are the town's engineer."]
    chat = [question]
    for number, instructions in enumerate([*agents, agents[1]]):
        chat.append(await run.ask(instructions, *chat, quotes=number > 0))
        chat.append("Go on, with other reasons.")


async def retrieval(run: Run, question: str) -> None:
    """An agent who reads documents and a question."""
    await run.ask("You answer questions about documents.", question)


PROGRAMS: dict[str, Callable[[Run, str], Awaitable[None]]] = {
    "debate": debate,
    "supervisor": supervisor,
    "handoff": handoff,
}
QUESTION_PROGRAMS = {  # of questions about documents
    "debate": partial(debate, says="Answer in one sentence.", verdict="Answer the question."),
    "supervisor": partial(supervisor, says="Answer the question in one sentence.", report="Answer the question."),
    "retrieval": retrieval,
}
PARTS = (*PROGRAMS, "overhead", "quoting")


async def run_program(name: str, side: Side, number: int, max_tokens: int) -> list[Turn]:
    async with httpx.AsyncClient(base_url=side.server.url, timeout=600) as client:
        run = Run(client, side.server.model, side.reuse, f"{name}-{number}", max_tokens)
        await PROGRAMS[name](run, QUESTION.format(number))
    return run.turns


def agreement(text: str, other: str) -> float:
    """Share of the longer text up to the first difference."""
    end = next((i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other)))
    return end / max(len(text), len(other), 1)


def program_rows(
    program: str, sides: dict[str, Side], rounds: int, max_tokens: int, failed: dict[str, str]
) -> list[Row]:
    """Rows of one program; a side that fails moves to `failed`."""
    names = ("ttft", "total", "computed", "equal", "agreement")
    samples: dict[str, dict[str, list[float]]] = {side: {name: [] for name in names} for side in sides}
    for number in range(rounds + 1):
        results: dict[str, tuple[float, list[Turn]]] = {}
        names_in_turn = list(sides)
        for name in names_in_turn[number % len(sides) :] + names_in_turn[: number % len(sides)]:
            side, start = sides[name], time.perf_counter()
            try:
                with side.server.running():
                    turns = asyncio.run(run_program(program, side, number, max_tokens))
            except Exception as exc:
                failed[name] = f"{program}: {type(exc).__name__}: {exc}: {side.server.log_tail()}"
                print(f"... {name} failed: {failed[name]}", flush=True)
                del sides[name]
                continue
            results[name] = time.perf_counter() - start, turns
        for name, (seconds, turns) in results.items() if number else ():  # the first round warms up
            texts, reference = (
                [turn.text for turn in turns],
                [turn.text for turn in results.get("exact", (0, turns))[1]],
            )
            quoting = [turn for turn in turns if turn.quotes]
            samples[name]["total"].append(seconds)
            samples[name]["ttft"].append(statistics.mean(turn.ttft for turn in quoting))
            samples[name]["computed"].append(sum(turn.computed for turn in quoting))
            samples[name]["equal"].append(statistics.mean(a == b for a, b in zip(texts, reference, strict=True)))
            samples[name]["agreement"].append(statistics.mean(map(agreement, texts, reference)))
        print(f"... {program}, round {number} of {rounds}", flush=True)
    rows = []
    for name in sides:
        taken = samples[name]
        rows.append(
            median_row(f"{program}: first token where prompts quote, {name}", taken["ttft"], "s", better="lower")
        )
        rows.append(median_row(f"{program}: end to end, {name}", taken["total"], "s", better="lower"))
        if min(taken["computed"]) >= 0:
            measure = f"{program}: prompt tokens computed where prompts quote, {name}"
            rows.append(median_row(measure, taken["computed"], "tokens", better="lower"))
        rows.append(median_row(f"{program}: answers equal to exact, {name}", taken["equal"], "share"))
        rows.append(
            median_row(f"{program}: text equal to exact up to a difference, {name}", taken["agreement"], "share")
        )
    for name in sides:
        if name == "auto" or "auto" not in sides:
            continue
        for measure, key, required in (("first token", "ttft", 3), ("end to end", "total", 1)):
            facts = {"required": required, "peer": name}
            what = f"{program}: {measure}, {name} over auto"
            rows.append(ratio_row(what, samples[name][key], samples["auto"][key], **facts))
    return rows


def tasks_of(program: str, data: Path | None, round_number: int) -> list[Task]:
    """Return what a program is asked in one round; the questions of `retrieval` have documents in common."""
    if data is None:
        return [Task(QUESTION.format(round_number))]
    lines = (data / "nq_oracle.jsonl").read_text().splitlines()
    start = NUM_QUESTIONS * round_number % len(lines)
    records = [json.loads(line) for line in lines[start : start + NUM_QUESTIONS]]
    texts = ["{title}\n{text}".format(**document) for record in records for document in record["documents"]]
    tasks, rng = [], random.Random(round_number)
    for number, record in enumerate(records if program == "retrieval" else records[:1]):
        others = [text for text in texts if text != texts[number]]
        read = [texts[number], *rng.sample(others, NUM_DOCUMENTS.get(program, 2) - 1)]
        rng.shuffle(read)
        question = f"Answer this question with a few words of the documents: {record['question']}"
        tasks.append(Task("\n\n".join([*read, question]), tuple(record["answers"])))
    return tasks


def mean_row(measure: str, samples: Sequence[float], unit: str, **facts: Any) -> Row:
    """The mean of samples with a bootstrap interval."""
    estimate = bootstrap(np.mean, np.asarray(samples, dtype=float))
    return Row(measure, estimate.value, unit, estimate.low, estimate.high, **facts)


async def sample_answers(
    local: Engine, program: str, reuse: str, repair: float, tasks: Sequence[Task], max_tokens: int
) -> list[Answer]:
    """Answers to the prompts of a program that quote, from a server in this process; tasks follow each other."""
    app = create_app(local, ServerConfig(served_model_name="local", request_timeout=3600))
    transport, workflow, answers = httpx.ASGITransport(app), uuid.uuid4().hex, list[Answer]()
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://local", timeout=3600) as client,
    ):
        for task in tasks:
            run = SampledRun(client, "local", reuse, workflow, max_tokens, repair=repair, accepted=task.accepted)
            await (QUESTION_PROGRAMS if task.accepted else PROGRAMS)[program](run, task.text)
            answers += run.answers
    return answers


def exact_logprob(local: Engine, answer: Answer) -> float:
    """Mean log-probability of an answer's tokens but special ones in prefix mode."""
    prompt = local.tokenizer.apply_chat_template(answer.messages, add_generation_prompt=True, return_dict=False)
    sampling = SamplingParams(temperature=0, max_tokens=len(answer.tokens), logprobs=0)
    with local.session(mode="prefix") as session:
        scores = session.decode(prompt, sampling=sampling, forced_tokens=answer.tokens).logprobs
    return statistics.mean(item.logprob for item in scores if local.tokenizer.decode([item.token], True))


def quoting_rows(rounds: int, max_tokens: int, data: Path | None) -> list[Row]:
    """Divergence and agreement of `auto` and `exact`, and prompt tokens computed, by the length of the shortest quote."""
    local, rows, default = engine(), list[Row](), span_index.MIN_SPAN
    sides = [("exact", "exact", default, 0.0)]
    for length in MIN_SPANS:
        what = f"quotes from {length} tokens on"
        sides += [(what, "auto", length, 0.0), (f"{what}, repair {REPAIR:g}", "auto", length, REPAIR)]
    for program in PROGRAMS if data is None else QUESTION_PROGRAMS:
        answers: dict[str, list[list[Answer]]] = {what: [] for what, *_ in sides}  # of every round
        for number in range(rounds):
            for what, reuse, length, repair in random.Random(number).sample(sides, len(sides)):
                span_index.MIN_SPAN = length
                tasks = tasks_of(program, data, number)
                answers[what].append(asyncio.run(sample_answers(local, program, reuse, repair, tasks, max_tokens)))
            print(f"... quoting: {program}, round {number + 1} of {rounds}", flush=True)
        reference = [answer for part in answers["exact"] for answer in part]
        for what, *_ in sides:
            every = [answer for part in answers[what] for answer in part]
            place = f"quoting: {program}{', documents' if data else ''}"
            above = [statistics.mean(answer.logprobs) - exact_logprob(local, answer) for answer in every]
            agreements = [agreement(answer.text, other.text) for answer, other in zip(every, reference, strict=True)]
            computed = [sum(answer.computed for answer in part) for part in answers[what]]
            rows += [
                mean_row(f"{place}, log-probability above that in exact, {what}", above, "nats/token", better="lower"),
                mean_row(f"{place}, text equal to exact up to a difference, {what}", agreements, "share"),
                median_row(f"{place}, prompt tokens computed, {what}", computed, "tokens", better="lower"),
            ]
            if data is not None:
                scores = [answer.f1 for answer in every]
                over = [score - other.f1 for score, other in zip(scores, reference, strict=True)]
                rows.append(mean_row(f"{place}, F1, {what}", scores, "share"))
                rows.append(mean_row(f"{place}, F1 above that of exact, {what}", over, "share"))
    span_index.MIN_SPAN = default
    return rows


class Reader(asyncio.Protocol):
    """Client of one request that keeps the reply unparsed: it shares the cores with the server."""

    def __init__(self, request: bytes) -> None:
        self._request, self._data = request, bytearray()
        self.reply = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.WriteTransport, transport).write(self._request)  # uvloop's transports have no base class

    def data_received(self, data: bytes) -> None:
        self._data += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.reply.set_result(bytes(self._data))


async def read_stream(url: str, body: Mapping[str, Any]) -> bytes:
    """Reply of a streamed completion."""
    host, _, port = url.removeprefix("http://").partition(":")
    data = json.dumps({**body, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    request = f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data
    _, reader = await asyncio.get_running_loop().create_connection(lambda: Reader(request), host, int(port))
    reply: bytes = await reader.reply
    return reply


def overhead_rows(server: Server, rounds: int) -> list[Row]:
    """Tokens per second of the server and of the engine in process, at STREAMS streams."""
    local, seeds = engine(), iter(range(1 << 30))

    def tokens_per_second(run: Callable[[list[list[int]]], object]) -> float:
        seed = next(seeds) * STREAMS
        prompts = [random_tokens(PROMPT_TOKENS, seed + number) for number in range(STREAMS)]
        start = time.perf_counter()
        run(prompts)
        return STREAMS * OUTPUT_TOKENS / (time.perf_counter() - start)

    def in_process(prompts: list[list[int]]) -> None:
        with local.session(mode="prefix") as session:
            for message in [session.decode(prompt, sampling=greedy(OUTPUT_TOKENS)) for prompt in prompts]:
                message.result()

    async def over_http(prompts: list[list[int]]) -> None:
        body = {"model": server.model, "temperature": 0, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
        answers = await asyncio.gather(*(read_stream(server.url, {**body, "prompt": p}) for p in prompts))
        assert all(b"data: [DONE]" in answer for answer in answers)

    def served(prompts: list[list[int]]) -> None:
        with server.running():
            uvloop.run(over_http(prompts))  # reads cost less than in asyncio's own loop

    sides = (lambda: tokens_per_second(served), lambda: tokens_per_second(in_process))
    interleaved(1, *sides)  # warms up
    server_rates, engine_rates = interleaved(rounds, *sides)
    what = f"{STREAMS} streams"
    return [
        median_row(f"overhead: server, {what}", server_rates, "tokens/s"),
        median_row(f"overhead: engine in process, {what}", engine_rates, "tokens/s"),
        ratio_row(f"overhead: server over engine in process, {what}", server_rates, engine_rates, required=0.95),
    ]


def start(peers: list[str], failed: dict[str, str]) -> dict[str, Server]:
    """Start our server and the peers' at the same time; those that fail are left out."""
    servers, threads = {"choreograph": start_ours(torch.get_num_threads())}, torch.get_num_threads()
    for name in peers:
        try:
            servers[name] = PEERS[name](threads)
        except Exception as exc:
            failed[name] = str(exc)
    for name, server in list(servers.items()):
        try:
            server.wait()
        except RuntimeError as exc:
            failed[name] = str(exc)
            servers.pop(name).close()
    for server in servers.values():
        server.pause()
    return servers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--answer-tokens", type=int, default=ANSWER_TOKENS, help="of every answer, on every side")
    parser.add_argument("--only", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--data", type=Path, help="folder with questions for `quoting`")
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=list(PEERS))
    arguments = parser.parse_args()
    parts: dict[str, list[Row]] = {part: [] for part in PARTS}
    for record in last_result("serve").get("rows", []):
        if (part := record["measure"].partition(":")[0]) in parts:
            parts[part].append(row_from_record(record))
    failed: dict[str, str] = {}
    needs_servers = set(arguments.only) != {"quoting"}
    servers = start(arguments.peers if set(arguments.only) & set(PROGRAMS) else [], failed) if needs_servers else {}
    peers = {name: server for name, server in servers.items() if name != "choreograph"}
    try:
        sides = {reuse: Side(servers["choreograph"], reuse) for reuse in ("exact", "auto") if servers}
        sides |= {name: Side(server) for name, server in peers.items()}
        for part in (part for part in PARTS if part in arguments.only):
            if part == "overhead":
                for server in peers.values():  # their idle threads may compete
                    server.close()
                parts[part] = overhead_rows(servers["choreograph"], 2 * arguments.rounds + 1)
            elif part == "quoting":
                rows = quoting_rows(arguments.rounds, arguments.answer_tokens, arguments.data)
                measured = {row.measure for row in rows}  # with data or without: both are kept
                parts[part] = [row for row in parts[part] if row.measure not in measured] + rows
            else:
                parts[part] = program_rows(part, sides, arguments.rounds, arguments.answer_tokens, failed)
            rows = [row for name in PARTS for row in parts[name]]
            save("serve", rows, failed=failed, answer_tokens=arguments.answer_tokens)
    finally:
        for server in servers.values():
            server.close()
    for name, reason in failed.items():
        print(f"{name} failed: {reason}")


if __name__ == "__main__":
    main()
