"""Agents of workflows in mode `exact` (KVFlow): what is needed next stays in the cache of a running server."""

import math
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from helpers.inspect_engine import fixed_prefix_hashes, inspect
from helpers.live_server import make_engine, serving

from choreograph.kv_cache.eviction import workflow_aware
from choreograph.server.reuse import agent_tracking

NAMES = ("planner", "coder", "tester", "reviewer")
GRAPH = {"agents": dict(zip(NAMES, (None, *NAMES), strict=False)), "repeats": True}
CAPACITY = 1900  # tokens: the roles have 4 * 200, a request of another client nearly 1000


def role_of(name):
    lines = (f"As the {name} of crew {name[:2]} you keep rule {number} of the {name}s." for number in range(12))
    return {"role": "system", "content": " ".join(lines)}


class Server:
    """Chats of a workflow of four agents, and of a client that fills the cache."""

    def __init__(self, live, client):
        self.live, self._client, self._num_others = live, client, 0

    def ask(self, messages, **choreography):
        """Return the answer, and the tokens that were cached and that the engine computed."""
        self.live.wait_until_idle()
        before = self.live.engine.stats().num_batched_tokens
        answer = self._client.chat.completions.create(
            model="tiny",
            messages=messages,
            max_tokens=6,
            temperature=0,
            extra_body={"ignore_eos": True, "choreography": choreography},
        )
        self.live.wait_until_idle()
        self.live.engine.check()
        self.live.app.state.service.planner.store.check()
        num_computed = self.live.engine.stats().num_batched_tokens - before
        return answer.choices[0].message.content, answer.usage.prompt_tokens_details.cached_tokens, num_computed

    def fill_cache(self):
        """Let another client compute a long prompt that is never asked again."""
        self._num_others += 1
        words = " ".join(f"wave {self._num_others} {number}" for number in range(130))
        self.ask([{"role": "user", "content": words}])

    def run_rounds(self, count, **choreography):
        """Return the answers, and the tokens computed by every turn of each round."""
        answers, computed = [], []
        for turn in range(count):
            computed.append([])
            for name in NAMES:
                self.fill_cache()
                messages = [role_of(name), {"role": "user", "content": f"Turn {turn}: what do you do, {name}?"}]
                text, _, num_computed = self.ask(messages, agent=name, workflow="team", **choreography)
                answers.append(text)
                computed[-1].append(num_computed)
        return answers, computed


@pytest.fixture
def served(talker_folder):
    """Returns a server with an eviction policy."""
    started = []

    def start(eviction, tokens=CAPACITY, **options):
        context = serving(make_engine(talker_folder, tokens, eviction=eviction, **options))
        live = context.__enter__()
        client = openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)
        started.append((context, client))
        return Server(live, client)

    yield start
    for context, client in started:
        client.close()
        context.__exit__(None, None, None)


FEW = 40  # tokens: the varying end of a prompt, and its answer


def declare(server, graph=GRAPH, workflow="team"):
    assert httpx.put(f"{server.live.url}/v1/workflows/{workflow}", json=graph).status_code == 200


def test_nothing_that_a_declared_graph_needs_is_computed_again_and_lru_computes_all(served):
    lru, workflow = served("lru"), served("workflow")
    declare(workflow)
    expected, computed = lru.run_rounds(3, fixed_messages=1)  # accepted, without effect
    assert all(count > 150 for turns in computed for count in turns)
    answers, computed = workflow.run_rounds(3, fixed_messages=1)
    assert answers == expected
    assert all(count <= FEW for turns in computed[1:] for count in turns)


def test_a_policy_of_the_user_sees_the_steps_of_agents(served):
    steps = set()

    def farthest_first(candidates):
        steps.update(candidate.steps_to_execution for candidate in candidates)
        return workflow_aware(candidates)

    server = served(farthest_first)
    declare(server)
    _, computed = server.run_rounds(3, fixed_messages=1)
    assert all(count <= FEW for turns in computed[1:] for count in turns)
    assert {None, 1, 2, 3} <= steps


def test_without_a_mark_the_fixed_part_is_known_after_two_turns(served):
    server = served("workflow")
    declare(server)
    _, computed = server.run_rounds(4)
    assert all(count > 150 for count in computed[1])
    assert all(count <= FEW for turns in computed[2:] for count in turns)


def test_without_a_graph_steps_are_learned(served):
    _, computed = served("workflow").run_rounds(4, fixed_messages=1)
    assert all(count <= FEW for turns in computed[2:] for count in turns)


def test_what_is_needed_next_is_loaded_ahead_from_host_memory(served):
    server = served("workflow", tokens=1200, host_capacity=4000)
    declare(server)
    _, computed = server.run_rounds(3, fixed_messages=1)
    assert all(count <= FEW for turns in computed[1:] for count in turns)
    assert server.live.engine.events.counts["prefetch"]


def test_steps_of_the_client_replace_those_of_the_graph(served):
    """Room for one of two roles; the steps say which one is needed first."""
    for kept, dropped in (("coder", "tester"), ("tester", "coder")):
        server = served("workflow", tokens=1200)
        steps = {kept: 1, dropped: 9, "planner": None}
        for name in ("coder", "tester", "planner"):
            messages = [role_of(name), {"role": "user", "content": "Begin."}]
            server.ask(messages, agent=name, workflow="team", fixed_messages=1, steps=steps)
        server.fill_cache()
        counts = {}
        for name in (kept, dropped):
            messages = [role_of(name), {"role": "user", "content": "Go on."}]
            counts[name] = server.ask(messages, agent=name, workflow="team", fixed_messages=1, steps=steps)[2]
        assert counts[kept] <= FEW and counts[dropped] > 150


@pytest.mark.parametrize("reuse", ["messages", "auto"])
def test_marks_and_steps_are_taken_in_every_mode(served, reuse):
    server = served("workflow", tokens=8192)
    steps = {"coder": 3, "tester": 1}
    messages = [role_of("coder"), {"role": "user", "content": "Begin."}]
    server.ask(messages, agent="coder", workflow="team", fixed_messages=1, steps=steps, reuse=reuse)
    (workflow,) = server.live.app.state.service.planner.store.workflows
    assert workflow.tracker.steps == steps
    assert fixed_prefix_hashes(workflow.tracker._workflow, "coder")


def test_a_completion_marks_its_first_tokens(served):
    server, role = served("workflow"), list(range(100, 300))
    for turn in range(3):
        server.fill_cache()
        body = {"model": "tiny", "prompt": [*role, 1000 + turn, 7], "max_tokens": 4, "temperature": 0}
        body["choreography"] = {"agent": "reader", "workflow": "texts", "fixed_tokens": 200}
        answer = httpx.post(f"{server.live.url}/v1/completions", json=body, timeout=60).json()
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == (200 if turn else 0)


def test_answers_do_not_depend_on_agents_and_requests_without_one_are_not_tracked(served):
    server = served("workflow")
    messages = [role_of("coder"), {"role": "user", "content": "Begin."}]
    expected = server.ask(messages)
    sessions = server.live.app.state.service.planner.store.agent_sessions
    assert len(sessions) == 0
    answer = server.ask(messages, agent="coder", fixed_messages=2)
    assert answer[0] == expected[0] and answer[1] == expected[1] + expected[2] - 5 - 1 and len(sessions) == 1


def test_agents_of_several_models_and_labels_share_a_workflow_and_no_prefix(talker_folder, math_folder):
    engine = make_engine(talker_folder, math=math_folder, eviction="workflow")
    body = {"messages": [role_of("coder"), {"role": "user", "content": "Begin."}], "max_tokens": 6, "temperature": 0}
    kinds = [("tiny", []), ("math", []), ("tiny", ["secret"]), ("math", ["secret"])]
    with serving(engine) as live:

        def ask(model, labels, **choreography):
            choreography |= {"labels": labels, "workflow": "team"}
            request = body | {"model": model, "choreography": choreography}
            answer = httpx.post(f"{live.url}/v1/chat/completions", json=request, timeout=60).json()
            live.wait_until_idle()
            engine.check()
            live.app.state.service.planner.store.check()
            return answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

        first = [ask(*kind, agent="coder", fixed_messages=1) for kind in kinds]
        assert [cached for _, cached in first] == [0] * 4  # nothing of another model, or with other labels
        assert len(live.app.state.service.planner.store.agent_sessions) == 1
        again = [ask(*kind) for kind in kinds]
        assert [text for text, _ in again] == [text for text, _ in first] and min(cached for _, cached in again) > 200


@pytest.mark.parametrize(
    ("choreography", "param"),
    [
        ({"agent": "a", "steps": {"a": -1}}, "choreography.steps.a"),
        ({"agent": "a", "steps": {"a": "soon"}}, "choreography.steps.a"),
        ({"agent": "a", "steps": {"a": True}}, "choreography.steps.a"),
        ({"agent": "a", "steps": {"": 1}}, None),
        ({"agent": "a", "steps": {f"a{number}": 1 for number in range(257)}}, "choreography.steps"),
        ({"agent": "a", "fixed_messages": 0}, "choreography.fixed_messages"),
        ({"agent": "a", "fixed_messages": 3}, "fixed_messages"),
        ({"agent": "a", "fixed_tokens": 10_000}, "fixed_tokens"),
        ({"agent": "a", "fixed_tokens": 1.5}, "choreography.fixed_tokens"),
        ({"agent": "a", "fixed_tokens": 2, "fixed_messages": 1}, "fixed_messages"),
        ({"steps": {"a": 1}}, "steps"),
        ({"fixed_tokens": 2}, "fixed_tokens"),
        ({"agent": ""}, "choreography.agent"),
        ({"agent": "a" * 257}, "choreography.agent"),
    ],
)
def test_options_that_say_nothing_useful_are_refused_by_name(live, choreography, param):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}] * 2, "choreography": choreography}
    answer = httpx.post(f"{live.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 400
    assert param is None or answer.json()["error"]["param"] == param


def test_fixed_messages_need_messages(live):
    body = {"model": "tiny", "prompt": "Hi", "choreography": {"agent": "a", "fixed_messages": 1}}
    answer = httpx.post(f"{live.url}/v1/completions", json=body, timeout=60)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "fixed_messages")


def test_a_header_names_an_agent_of_at_most_256_characters(live):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    answers = [
        httpx.post(f"{live.url}/v1/chat/completions", json=body, headers={"x-choreography-agent": "a" * count})
        for count in (256, 257)
    ]
    assert [answer.status_code for answer in answers] == [200, 400]


def ask_as(server, key, workflow, agent, **choreography):
    """Send a short chat with a key; return the answer's status."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": f"I am {agent}."}], "max_tokens": 1}
    body["choreography"] = {"workflow": workflow, "agent": agent, **choreography}
    answer = httpx.post(
        f"{server.url}/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"}, timeout=60
    )
    server.wait_until_idle()
    server.app.state.service.planner.store.check()
    return answer.status_code


KEYS = ("key-of-one", "key-of-two")


@pytest.fixture
def guarded(talker_folder):
    with serving(make_engine(talker_folder, eviction="workflow"), api_keys=KEYS) as server:
        yield server


def test_workflows_that_are_tracked_are_bounded_for_each_tenant(guarded, monkeypatch):
    monkeypatch.setattr(agent_tracking, "MAX_WORKFLOWS", 2)
    sessions = guarded.app.state.service.planner.store.agent_sessions
    assert ask_as(guarded, KEYS[0], "first", "reader", fixed_messages=1) == 200
    for number in range(5):
        assert ask_as(guarded, KEYS[1], f"w{number}", "reader") == 200
    assert len(sessions) == 3  # those of the first tenant stay
    monkeypatch.setattr(agent_tracking, "MAX_PROMPT_TOKENS", 0)
    assert ask_as(guarded, KEYS[1], "w9", "reader") == 200
    assert len(sessions) == 2  # nothing is kept of the first tenant's prompt, whose fixed part is marked
    monkeypatch.setattr(agent_tracking, "IDLE_SECONDS", -1.0)
    assert ask_as(guarded, KEYS[1], "w9", "reader", reuse="messages") == 200
    assert len(sessions) == 0 and inspect(guarded.engine).num_hint_sources == 1  # that of the messages


@pytest.mark.parametrize("reuse", ["exact", "messages"])
def test_a_workflow_of_too_many_agents_starts_anew(guarded, monkeypatch, reuse):
    monkeypatch.setattr(agent_tracking, "MAX_AGENTS", 4)
    store = guarded.app.state.service.planner.store
    for number in range(10):
        assert ask_as(guarded, KEYS[0], "w", f"agent-{number}", reuse=reuse) == 200
        workflow = next(iter(store.workflows or store.agent_sessions._workflows.values()))
        assert len(workflow.tracker.steps) <= 4


def test_graphs_are_bounded_in_size_and_number_for_each_tenant(guarded, monkeypatch):
    def put(key, name, body):
        headers = {"authorization": f"Bearer {key}"}
        return httpx.put(f"{guarded.url}/v1/workflows/{name}", json=body, headers=headers).status_code

    assert put(KEYS[0], "large", {f"a{number}": None for number in range(1025)}) == 400
    assert put(KEYS[0], "large", {"a": {"any_of": ["a"] * 1025}}) == 400
    assert put(KEYS[0], "large", {"agents": {"a": None}, "labels": {"a": ["x"] * 1025}}) == 400
    assert put(KEYS[0], "long", {"a" * 257: None}) == 400
    monkeypatch.setattr(guarded.app.state.service.planner.store, "_max_graphs", 3)
    assert [put(KEYS[0], f"w{number}", {"a": None}) for number in range(4)] == [200, 200, 200, 429]
    assert put(KEYS[0], "w0", {"b": None}) == put(KEYS[1], "w0", {"b": None}) == 200  # changed; another tenant
    assert ask_as(guarded, KEYS[0], "w0", "b") == 200 and ask_as(guarded, KEYS[0], "w0", "a") == 400


def test_a_graph_that_changes_between_turns_counts_from_then_on(guarded):
    headers = {"authorization": f"Bearer {KEYS[0]}"}
    sessions = guarded.app.state.service.planner.store.agent_sessions
    for graph, steps in (
        ({"a": None, "b": "a"}, {"a": math.inf, "b": 1}),
        ({"a": None, "c": "a"}, {"a": math.inf, "c": 1}),
    ):
        assert httpx.put(f"{guarded.url}/v1/workflows/w", json=graph, headers=headers).status_code == 200
        assert ask_as(guarded, KEYS[0], "w", "a") == 200
        (workflow,) = sessions._workflows.values()
        assert workflow.tracker.steps == steps
    assert httpx.delete(f"{guarded.url}/v1/workflows/w", headers=headers).status_code == 200
    assert len(sessions) == 0


def test_concurrent_turns_of_clients_that_leave_lose_nothing(served):
    """Streams are closed after their first event; the invariants hold when all have ended."""
    server = served("workflow")
    declare(server)
    url = f"{server.live.url}/v1/chat/completions"

    def leave(number):
        name = NAMES[number % 4]
        body = {"model": "tiny", "messages": [role_of(name)], "max_tokens": 200, "stream": True, "ignore_eos": True}
        body["choreography"] = {"agent": name, "workflow": "team", "fixed_messages": 1}
        with httpx.stream("POST", url, json=body, timeout=60) as stream:
            assert stream.status_code == 200
            next(stream.iter_lines())

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(leave, range(12)))
    server.live.wait_until_idle()
    server.live.engine.check()
    store = server.live.app.state.service.planner.store
    store.check()
    (workflow,) = store.agent_sessions._workflows.values()
    assert not workflow.num_active and not workflow.session.messages
    assert min(workflow.tracker.steps.values()) == 1  # all turns have ended
