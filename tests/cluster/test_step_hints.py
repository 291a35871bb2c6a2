"""Step graphs over replicas: what runs next is prefetched where it will run; gateway and replicas in this process."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")

from helpers.inspect_engine import inspect
from helpers.live_server import make_engine
from helpers.replica_pair import message, spec_of, updates_of

from choreograph.agents import StepGraph
from choreograph.cluster import step_hints
from choreograph.cluster.gateway import ReplicatedService
from choreograph.cluster.message_transfer import MessageFetcher, export_messages, load_stored
from choreograph.cluster.replica import EngineReplica, ReplicaInfo, _Connection
from choreograph.cluster.routing import choose, create_policy
from choreograph.cluster.step_hints import StepHints
from choreograph.namespace import Namespace
from choreograph.server.app import create_app
from choreograph.server.openai.chat_prompt import ChatPrompt, Segment
from choreograph.server.server_config import ServerConfig

GRAPH = StepGraph.read({"agents": {"writer": None, "reviewer": "writer"}, "repeats": True})


def request(agent, *segments, **options):
    return replace(spec_of(*segments, **options), agent=agent)


def expected(specs):
    """Return agents and messages of expected requests."""
    return {spec.agent: [segment.tokens for prompt in spec.prompts for segment in prompt.segments] for spec in specs}


def test_the_next_agent_is_expected_with_its_last_prompt_and_the_answers_that_it_waits_for():
    hints = StepHints()
    writer, reviewer = request("writer", message(1)), request("reviewer", message(2))
    assert hints.start(writer, GRAPH) == []  # nothing is known of the reviewer
    answer = hints.end(writer, GRAPH, [("text", [1, 2, 3])])
    assert expected(answer) == {"reviewer": [(1, 2, 3)]} and answer[0].prompts[0].segments[0].answer_key == "text"
    assert expected(hints.start(reviewer, GRAPH)) == {"writer": [message(1).tokens]}
    assert expected(hints.end(reviewer, GRAPH, [("other", [4])])) == {"writer": [message(1).tokens, (4,)]}
    assert expected(hints.start(writer, GRAPH)) == {"reviewer": [message(2).tokens, (1, 2, 3)]}
    assert hints.end(writer, GRAPH, [("text", [1, 2, 3])]) == []  # the same was sent before


def test_an_agent_that_waits_for_another_one_is_not_expected_before_that_runs():
    graph, hints = StepGraph.read({"a": None, "b": "a", "c": {"all_of": ["a", "b"]}}), StepHints()
    for agent in "abc":
        assert not hints.start(request(agent, message(ord(agent))), graph) or agent == "b"
        hints.end(request(agent, message(ord(agent))), graph, [])
    run = StepHints()
    run.start(request("a", message(1)), graph)
    assert expected(run.end(request("a", message(1)), graph, [("x", [7])])) == {"b": [(7,)]}
    assert expected(run.start(request("b", message(2)), graph)) == {"c": [(7,)]}


def test_failed_requests_and_workflows_without_a_graph_are_followed_without_error():
    hints, spec = StepHints(), request("writer", message(1))
    assert hints.start(spec, None) == hints.end(spec, GRAPH, []) == []
    assert hints.start(request("stranger", message(1)), GRAPH) == []
    assert hints.start(replace(spec, reuse="auto"), GRAPH) == []
    hints.start(spec, GRAPH)
    assert hints.end(spec, None, []) == hints.end(spec, GRAPH, []) == []
    hints.start(spec, GRAPH)
    assert hints.end(spec, GRAPH, [("text", [1])])[0].agent == "reviewer"
    other = hints.start(request("writer", message(1), client="others"), GRAPH)
    assert other == []  # of another tenant nothing is known


def test_in_exact_the_start_of_the_next_prompt_and_the_steps_are_known():
    hints = StepHints()
    writer, reviewer = (
        replace(request(agent, message(number)), reuse="exact", agent=agent)
        for agent, number in (("writer", 1), ("reviewer", 2))
    )
    assert hints.start(writer, GRAPH) == [] and hints.steps(writer, GRAPH) == {"writer": 2, "reviewer": 1}
    assert hints.end(writer, GRAPH, [("text", [1])]) == []  # nothing is known of the reviewer's prompt
    (first,) = hints.start(reviewer, GRAPH)
    assert (first.agent, first.prompts, first.steps) == ("writer", writer.prompts, {"writer": 1, "reviewer": 0})
    assert hints.end(reviewer, GRAPH, []) == []  # the same was sent before
    (again,) = hints.start(writer, GRAPH)
    assert again.prompts == reviewer.prompts
    own = replace(reviewer, steps={"writer": 7})
    hints.end(writer, GRAPH, [])
    hints.start(own, GRAPH)
    assert hints.steps(own, GRAPH) == {"writer": 7}  # what the client knows


def test_workflows_that_are_followed_are_bounded_for_each_tenant(monkeypatch):
    monkeypatch.setattr(step_hints, "MAX_RUNS_OF_TENANT", 3)
    hints = StepHints()
    hints.start(request("writer", message(1), client="others"), GRAPH)
    specs = [request("writer", message(1)) for _ in range(5)]
    specs = [replace(spec, key=spec.key._replace(workflow=f"w{number}")) for number, spec in enumerate(specs)]
    for spec in specs:
        hints.start(spec, GRAPH)
    assert [hints.steps(spec, GRAPH) is not None for spec in specs] == [False, False, True, True, True]
    assert hints.steps(request("writer", message(1), client="others"), GRAPH) is not None


class LocalReplica(EngineReplica):
    """A replica in this process."""

    def __init__(self, folder, name, transport, **cache):
        engine = make_engine(folder, **cache)
        self._service, self._name = create_app(engine, ServerConfig(max_tokens=16)).state.service, name
        self._version = ""
        self._fetcher = MessageFetcher(self._service, transport, name, "always")

    def __del__(self):
        pass


class LocalCluster:
    """Replicas without Ray, and the handle that a gateway has of them."""

    def __init__(self, folder, **cache):
        self.policy, self.sent, self.queries, self.num_open = create_policy("message"), [], [], 0
        self.sessions = []  # of the requests that were routed
        self.replicas = {name: LocalReplica(folder, name, self._ask, **cache) for name in "ab"}
        for name in self.replicas:
            self.policy.set_queue(name, 0)
        engine = self.replicas["a"]._service.engine
        info = ReplicaInfo(engine.model_info, engine.tokenizer, engine.models, 16, engine.stats(), "", ())
        self.gateway = ReplicatedService(info, ServerConfig(max_tokens=16), self, has_transfers=True)

    def _ask(self, source, query):
        self.queries.append(query)
        return export_messages(self.replicas[source]._service, query)

    def options(self, method_name, stream=False):
        return SimpleNamespace(remote=partial(self._generate if stream else self._prefetch))

    def _route(self, kind, call):
        route = replace(call.route)
        self.sessions.append(route.session)
        name = choose(self.policy, route)[0]
        route.sources = self.policy.sources(route)
        self.policy.on_routed(route, name)
        self.policy.set_queue(name, self.policy.queues[name] + 1)
        self.num_open += 1
        self.sent.append((kind, call.spec.agent, name))
        return name, replace(call, route=route)

    def _end(self, name):
        self.num_open -= 1
        self.policy.set_queue(name, self.policy.queues[name] - 1)

    def _generate(self, call):
        return self._run(*self._route("request", call))

    async def _run(self, name, call):
        async for item in self.replicas[name].generate(call):
            yield item
        self._end(name)

    def broadcast(self, method_name):
        async def results():
            return [SimpleNamespace(get_async=replica.load) for replica in self.replicas.values()]

        return SimpleNamespace(_fetch_replica_results_async=results)

    async def _prefetch(self, call):
        name, call = self._route("hint", call)
        await self.replicas[name].prefetch(call)
        self._end(name)

    async def run(self, spec):
        """Return the answer as a message that a client sends back, its counts and its replica."""
        running = self.gateway.submit(_Connection(), spec)
        updates = await updates_of(running)
        tokens = tuple(token for update in updates for token in update.token_ids)
        name = next(name for kind, _, name in reversed(self.sent) if kind == "request")
        while self.num_open or self.gateway.thread._hints:
            await asyncio.sleep(0.01)
        return Segment(tokens, "".join(update.text for update in updates)), running.counts, name


@asynccontextmanager
async def local_cluster(folder, **cache):
    result = LocalCluster(folder, **cache)
    services = [result.gateway, *(replica._service for replica in result.replicas.values())]
    for service in services:
        service.start()
    try:
        yield result
        for service in services[1:]:
            await service.thread.call(service.engine.check)
            await service.thread.call(service.planner.store.check)
    finally:
        for service in services:
            await service.stop()
        for service in services[1:]:
            service.engine.close()


async def test_the_next_step_runs_where_its_messages_were_prefetched_unless_that_replica_is_overloaded(talker_folder):
    async with local_cluster(talker_folder) as cluster:
        key = spec_of().key
        cluster.gateway.planner.store.set_graph(key.tenant, key.workflow, GRAPH)
        _, _, first = await cluster.run(request("writer", message(1)))
        _, _, second = await cluster.run(request("reviewer", message(2)))
        assert second != first
        answer, _, _ = await cluster.run(request("writer", message(1), message(3)))
        assert cluster.sent[-3:] == [
            ("request", "writer", first),
            ("hint", "reviewer", second),  # while the writer runs: what the reviewer read
            ("hint", "reviewer", second),  # and the answer, once it is there
        ]
        cluster.queries.clear()
        _, counts, name = await cluster.run(request("reviewer", message(2), answer))  # encoded with its header of two
        assert name == second and first not in {query.route.pinned for query in cluster.queries}
        assert counts.remote == len(answer.tokens) + 2 and counts.message + counts.prefix == 48
        cluster.policy.set_queue(second, 60)
        _, counts, name = await cluster.run(request("reviewer", message(2), answer))
        assert name == first and counts.computed == 2  # the header; the rest was fetched


async def test_in_exact_hints_load_the_fixed_part_of_the_next_agent_where_it_is(talker_folder):
    async with local_cluster(talker_folder, tokens=640, eviction="workflow", host_capacity=4096) as cluster:
        key = spec_of().key
        cluster.gateway.planner.store.set_graph(key.tenant, key.workflow, GRAPH)
        role = {"writer": list(range(100, 260)), "reviewer": list(range(300, 460))}

        async def turn(agent, number):
            tokens = [*role[agent], *range(1000 * number, 1000 * number + 8)]
            spec = replace(request(agent), prompts=[ChatPrompt(tokens, header=tokens)], reuse="exact")
            _, counts, name = await cluster.run(replace(spec, fixed_tokens=160))
            return counts.computed, name

        assert (await turn("writer", 1))[0] == (await turn("reviewer", 2))[0] == 168
        (writer,) = {name for _, agent, name in cluster.sent if agent == "writer"}
        (reviewer,) = {name for _, agent, name in cluster.sent if agent == "reviewer"}
        assert writer != reviewer
        (workflow,) = cluster.replicas[reviewer]._service.planner.store.agent_sessions._workflows.values()
        assert workflow.tracker.steps == {"writer": 1, "reviewer": 2}  # though the writer never ran there
        for number in range(3, 6):
            for name, replica in cluster.replicas.items():  # fills the caches
                other = replace(request(None, client=f"other-{number}-{name}"), reuse="exact")
                tokens = list(range(5000 + 400 * number, 5400 + 400 * number))
                other = replace(other, prompts=[ChatPrompt(tokens, header=tokens)])
                await updates_of(replica._service.submit(_Connection(), other))
            agent = ("writer", "reviewer")[number % 2 == 0]
            cluster.sent.clear()
            assert await turn(agent, number) == (8, {"writer": writer, "reviewer": reviewer}[agent])
            assert ("hint", "reviewer" if agent == "writer" else "writer") in [event[:2] for event in cluster.sent]


async def test_a_session_header_names_one_of_several_sessions_of_a_workflow(talker_folder):
    async with local_cluster(talker_folder) as cluster:
        for headers in ({}, {"x-session-id": "reader-1"}, {"x-choreography-workflow": "other"}):
            connection = _Connection()
            connection.headers = headers
            await updates_of(cluster.gateway.submit(connection, request(None, message(1))))
        key = spec_of().key
        workflow, session = (
            Namespace(client=key.client, workflow=key.workflow),
            Namespace(client=key.client, session="reader-1"),
        )
        assert cluster.sessions == [workflow, session, workflow]


async def test_hints_belong_to_the_session_of_the_step_before(talker_folder):
    async with local_cluster(talker_folder) as cluster:
        key = spec_of().key
        cluster.gateway.planner.store.set_graph(key.tenant, key.workflow, GRAPH)
        for session in ("first", "second", "first"):
            connection = _Connection()
            connection.headers = {"x-session-id": session}
            for agent in ("writer", "reviewer"):
                await updates_of(cluster.gateway.submit(connection, request(agent, message(ord(agent[0])))))
        while cluster.num_open or cluster.gateway.thread._hints:
            await asyncio.sleep(0.01)
        sent = [(kind, place.session) for (kind, *_), place in zip(cluster.sent, cluster.sessions, strict=True)]
        assert len(cluster.gateway.hints._runs) == 2 and {name for _, name in sent} == {"first", "second"}
        second = sent.index(("request", "second"))
        assert ("hint", "first") in sent[:second] and ("hint", "second") not in sent[:second]


async def test_stored_messages_of_an_expected_request_are_loaded_from_host_memory(talker_folder):
    engine = make_engine(talker_folder, host_capacity=4096)
    service = create_app(engine, ServerConfig(max_tokens=16)).state.service
    service.start()
    try:
        spec = request("writer", message(1))
        await updates_of(service.submit(_Connection(), spec))
        await updates_of(service.submit(_Connection(), request("writer", message(9))))  # its step ends the first answer
        stored = service.planner.store.find(spec.key, (message(1).tokens, 0))
        manager = inspect(engine).cache_manager
        await service.thread.call(lambda: manager.evict_entry(inspect(stored.message).entry))
        for _ in range(200):
            await service.thread.call(manager.poll_transfers)
            if stored.message.kv_location == "host":
                break
            await asyncio.sleep(0.02)
        assert stored.message.kv_location == "host"
        await service.thread.call(lambda: load_stored(service, spec))
        assert stored.message.kv_location in ("loading", "device")
        await service.thread.call(engine.check)
    finally:
        await service.stop()
        engine.close()
