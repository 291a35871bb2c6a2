"""Reuse over HTTP, with scheduler and worker in vLLM's own processes."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
from helpers import message_graphs
from helpers.oracle_families import brute_force
from hypothesis import given
from reuse_graphs import Call, View, expected_rows, largest_difference
from tiny_models import VOCABULARY, random_tokens
from vllm_server import MODEL, VllmServer

from choreograph import Engine, SamplingParams, connect
from choreograph.lab.workflows import find
from choreograph.lab.workflows.run import WorkflowResult, run_workflow
from examples import examples

TOLERANCE = 2e-4
TEXTS = [random_tokens(seed, length) for seed, length in enumerate((70, 45, 33))]
HEADER = random_tokens(9, 5)
EVERYTHING = SamplingParams(temperature=0, logprobs=100, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def server(tiny_model):
    result = VllmServer(tiny_model("starts").folder)
    result.start()
    yield result
    result.stop()


def store_texts(server: VllmServer, name: str, **body) -> None:
    for i, text in enumerate(TEXTS):
        store = [{"entry": f"{name}-{i}", "start": 0, "stop": len(text)}]
        report = server.complete(text, {"store": store}, **body)["kv_transfer_params"]["choreograph"]
        assert report["stored"] == [f"{name}-{i}"]


def reading(name: str, order: list[int], shift: int = 0) -> tuple[list[int], dict, Call]:
    """Return prompt and spans that read the texts in an order, and the call of the oracle."""
    tokens, spans, views = [], [], []
    for i in order:
        at, length = len(tokens), len(TEXTS[i])
        spans.append({"entry": f"{name}-{i}", "start": 0, "stop": length, "at": at, "position": at + shift})
        views.append(View(i, 0, length, at + shift))
        tokens += TEXTS[i]
    return tokens + HEADER, {"spans": spans}, Call(views, HEADER)


def rows_of(answer: dict) -> np.ndarray:
    top = answer["choices"][0]["logprobs"]["top_logprobs"]
    return np.array([[row[f"token_id:{token}"] for token in range(VOCABULARY)] for row in top])


def test_texts_in_any_order_equal_brute_force(server, tiny_model):
    store_texts(server, "http")
    calls, found = [Call([], text) for text in TEXTS], []
    for order, shift in (([2, 0, 1], 0), ([1, 2], 40), ([2, 0, 1], -9)):
        tokens, reuse, call = reading("http", order, shift)
        answer = server.complete(tokens, reuse)
        report = answer["kv_transfer_params"]["choreograph"]
        assert report["reused_tokens"] == len(tokens) - len(HEADER)
        calls.append(call)
        found.append({len(tokens) - 1: rows_of(answer)[0]})
    assert largest_difference(found, expected_rows(tiny_model("starts").model, calls)[3:]) < TOLERANCE


def test_a_stream_is_the_answer(server):
    store_texts(server, "stream")
    tokens, reuse, _ = reading("stream", [2, 1, 0])
    body = {"max_tokens": 12, "return_token_ids": True}
    whole = server.complete(tokens, reuse, **body)["choices"][0]["token_ids"]
    options = body | {"model": MODEL, "prompt": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    options["kv_transfer_params"] = {"choreograph": reuse}
    streamed: list[int] = []
    with httpx.stream("POST", f"{server.url}/v1/completions", json=options, timeout=60) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    streamed += choice.get("token_ids") or []
    assert streamed == whole


def test_chats_reuse_turns_in_another_order(server):
    system = {"role": "system", "content": "You compare two texts."}
    one, two = ({"role": "user", "content": text * 12} for text in ("one text ", "another "))

    def chat(*turns: dict, **reuse) -> dict:
        body = {"messages": [system, *turns], "max_tokens": 6, "logprobs": True, "top_logprobs": 5}
        body |= {"kv_transfer_params": {"choreograph": reuse}} if reuse else {}
        reply = server.post("/v1/chat/completions", **body)
        assert reply.is_success, reply.text
        return reply.json()

    chat(one, two)
    reused = chat(two, one)
    assert reused["kv_transfer_params"]["choreograph"]["reused_tokens"] > 200
    exact, repaired = chat(two, one, mode="exact"), chat(two, one, repair=1)
    assert exact["kv_transfer_params"]["choreograph"]["reused_tokens"] == 0
    assert repaired["choices"][0]["message"] == exact["choices"][0]["message"]


def test_bad_reuse_is_a_bad_request(server):
    tokens, reuse, _ = reading("bad", [0])
    for change in ({"at": -1}, {"stop": "all"}, {"place": 4}):
        spans = [reuse["spans"][0] | change]
        reply = server.post("/v1/completions", prompt=tokens, kv_transfer_params={"choreograph": {"spans": spans}})
        assert reply.status_code == 400
        assert next(iter(change)) in reply.json()["error"]["message"]


def test_concurrent_readers_get_what_they_get_alone(server):
    store_texts(server, "many")
    orders = [[0, 1], [1, 0], [2, 0], [0, 2, 1], [1, 2, 0], [2], [1], [0]]
    prompts = [reading("many", order, shift) for order in orders for shift in (0, 30)]

    def rows(prompt: tuple) -> np.ndarray:
        return rows_of(server.complete(prompt[0], prompt[1], max_tokens=6))

    alone = [rows(prompt) for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(rows, prompts))
    assert max(np.abs(a - b).max() for a, b in zip(alone, together, strict=True)) < TOLERANCE


def test_disconnected_clients_leave_no_page(server):
    store_texts(server, "leave")
    server.wait_until_idle()
    options = {"model": MODEL, "max_tokens": 400, "ignore_eos": True, "stream": True, "temperature": 0}

    def leave(number: int) -> None:
        tokens, reuse, _ = reading("leave", [number % 3, (number + 1) % 3], number)
        store = [{"entry": f"left-{number}", "start": len(tokens) - 5, "stop": None}]
        body = options | {"prompt": tokens, "kv_transfer_params": {"choreograph": reuse | {"store": store}}}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as reply:
            for count, _ in enumerate(reply.iter_lines()):
                if count > number:
                    return

    threads = [threading.Thread(target=leave, args=(number,)) for number in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    server.wait_until_idle()
    tokens, reuse, _ = reading("leave", [0, 1])
    report = server.complete(tokens, reuse)["kv_transfer_params"]["choreograph"]
    assert report["reused_tokens"] == len(tokens) - len(HEADER)


@pytest.fixture(scope="module")
def client(server):
    with connect(server.url, engine="vllm") as engine:
        yield engine


@examples(24)
@given(nodes=message_graphs.graphs())
def test_sessions_of_the_client_equal_brute_force(nodes, client, tiny_model):
    """Random message graphs by `prefill` and `decode`: default and given offsets, gaps, overlaps, forced tokens."""
    last = list(range(len(nodes)))[-3:]
    nodes = [*nodes, message_graphs.Node([1, 7, 2], last, [None] * len(last), generated=[0])]
    with client.session(seed=0) as session:
        messages = []
        for node in nodes:
            parents = [messages[index] for index in node.parents]
            args = node.tokens, parents, node.offsets, node.position
            if node.generated is None:
                messages.append(session.prefill(*args))
            else:
                options = {"sampling": EVERYTHING, "footer": node.footer}
                forced = {} if node is nodes[-1] else {"forced_tokens": node.generated}
                messages.append(session.decode(*args, **options, **forced))
        nodes[-1].generated = messages[-1].output_token_ids
        expected = brute_force(tiny_model("starts").model, nodes, message_graphs.default_placements(nodes))
        for node, message, rows in zip(nodes, messages, expected, strict=True):
            assert len(message.logprobs or ()) == len(node.generated or ())
            for i, entry in enumerate(message.logprobs or ()):
                assert len(entry.top) == 100
                row = rows[len(node.tokens) - 1 + i]
                assert max(abs(row[token] - value) for token, value in entry.top.items()) < TOLERANCE


WORKFLOWS = {
    "tree_of_thoughts": ("What is 3 + 4?", {"branches": 3, "voters": 2}),
    "debate_iterative": ("What is 3 + 4?", {"rounds": 2}),
    "debate_parallel": ("What is 3 + 4?", {"rounds": 2}),
    "multi_qa": (["What is the capital of France?", "Who wrote Hamlet?"], {"topology": "parallel"}),
    "branch_solve_merge": (["dog", "run", "sea", "stone"], {"topology": "parallel"}),
    "prisoners_dilemma": ("Alice", {"guard": True}),
}


@pytest.fixture(scope="module")
def in_process(tiny_model):
    return Engine.from_pretrained(str(tiny_model("starts").folder), dtype="float32", device="cpu")


@pytest.mark.parametrize("mode", ["choreographed", "prefix"])
@pytest.mark.parametrize("name", WORKFLOWS)
def test_workflows_have_the_logprobs_of_the_engine_in_process(name, mode, client, in_process):
    """The engine in process replays the tokens that vLLM generated."""
    task, options = WORKFLOWS[name]
    sampling = SamplingParams(temperature=0, max_tokens=6, logprobs=3)
    logprobs: list[list] = []

    def run(engine, **replay) -> WorkflowResult:
        def note(calls) -> None:
            logprobs.append([list(call.message.logprobs) for call in calls if call.message.kind == "decode"])

        return run_workflow(
            engine, find(name), task, mode=mode, sampling=sampling, options=options, on_finish=note, **replay
        )

    transcript = run(client).run.transcript()
    assert run(in_process, replay=transcript).run.transcript() == transcript
    remote, local = logprobs
    for entries, others in zip(remote, local, strict=True):
        assert [entry.logprob for entry in entries] == pytest.approx([other.logprob for other in others], abs=TOLERANCE)


def test_after_a_restart_entries_are_missing_and_sessions_compute_theirs_again(server, client):
    def ask(session, *parents) -> list[int]:
        return session.decode([5, 6], list(parents), sampling=EVERYTHING).output_token_ids

    store_texts(server, "restart")
    tokens, reuse, _ = reading("restart", [1, 0])
    before = rows_of(server.complete(tokens, reuse))
    with client.session(seed=0) as session:
        first, second = session.prefill(TEXTS[0]), session.prefill(TEXTS[1])
        third = session.prefill(TEXTS[2], [second])
        answer = ask(session, third, first)
        server.stop()
        server.start()
        assert ask(session, third, first) == answer
    reply = server.post("/v1/completions", prompt=tokens, max_tokens=1, kv_transfer_params={"choreograph": reuse})
    assert reply.status_code == 500
    names = ["restart-0", "restart-1", "restart-2"]
    query = server.complete([0], {"query": names})["kv_transfer_params"]["choreograph"]
    assert query["missing"] == names
    store_texts(server, "restart")
    assert np.abs(rows_of(server.complete(tokens, reuse)) - before).max() < TOLERANCE


def test_no_hook_of_the_connector_failed(server):
    assert "choreograph/vllm/connector.py" not in server.log.read_text()  # in a stack trace
