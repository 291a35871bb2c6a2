"""What the gateway knows of replicas: who answers, and sums that never fall; no Ray runs."""

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("ray")

from helpers.live_server import make_engine
from ray.exceptions import ActorDiedError
from ray.serve.exceptions import RayServeException

from choreograph.cluster import replica_monitor
from choreograph.cluster.gateway import ReplicatedService
from choreograph.cluster.replica import ReplicaInfo, ReplicaLoad
from choreograph.cluster.replica_monitor import COUNTERS, MAX_GONE, ReplicaMonitor, ReplicaReports
from choreograph.outputs import EngineStats
from choreograph.server.app import create_service_app
from choreograph.server.server_config import ServerConfig


def load(name, count, pages=10, process=1):
    """A report in which every counter is `count`, and every gauge `pages`."""
    values = dict.fromkeys(EngineStats.__dataclass_fields__, pages) | dict.fromkeys(COUNTERS, count)
    values |= {"tier_tokens": {"host": pages}, "events": {"evicted": count, f"only-{name}": count}}
    return ReplicaLoad(name, process, EngineStats(**values))


def counters_of(stats):
    return {name: getattr(stats, name) for name in COUNTERS} | dict(stats.events)


def test_counters_stay_and_gauges_go_with_a_replica():
    reports = ReplicaReports()
    reports.add(load("a", 5))
    reports.add(load("b", 7))
    assert (reports.total.num_steps, reports.total.num_pages, reports.total.events["evicted"]) == (12, 20, 12)
    reports.keep([("b", 1)])
    total = reports.total
    assert (total.num_steps, total.num_pages, total.tier_tokens) == (12, 10, {"host": 10})
    assert total.events == {"evicted": 12, "only-a": 5, "only-b": 7}
    reports.add(load("c", 2))  # in its place
    assert (reports.total.num_steps, reports.total.num_pages) == (14, 20)


def test_a_replica_that_answers_late_is_counted_once():
    reports = ReplicaReports()
    reports.add(load("a", 5))
    reports.keep([])
    assert (reports.total.num_steps, reports.total.num_pages) == (5, 0)
    reports.add(load("a", 6))
    assert (reports.total.num_steps, reports.total.num_pages) == (6, 10)
    reports.add(load("a", 4))  # sent before
    assert reports.total.num_steps == 6
    reports.add(load("a", 1, process=2))  # starts again under its name
    assert reports.total.num_steps == 7


def test_without_replicas_the_sum_is_zero():
    assert set(counters_of(ReplicaReports().total).values()) == {0} and ReplicaReports().total.num_pages == 0


REPLICAS = st.sampled_from([f"r{number}" for number in range(6)])
STEPS = st.lists(
    st.tuples(st.just("report"), REPLICAS, st.integers(0, 5), st.integers(0, 9))
    | st.tuples(st.just("late"), REPLICAS)
    | st.tuples(st.just("death"), REPLICAS)
    | st.tuples(st.just("restart"), REPLICAS),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(STEPS, st.sampled_from([0, 2, MAX_GONE]))
def test_counters_never_fall_and_gauges_are_those_of_the_living(steps, max_gone):
    """Reports in any order, deaths, late answers, and new processes under old names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica_monitor, "MAX_GONE", max_gone)
        reports, before, expected_pages = ReplicaReports(), {}, {}
        highest, processes, old = {}, {}, {}
        for kind, name, *values in steps:
            process = processes.setdefault(name, 1)
            key = name, process
            if kind == "restart":
                processes[name] += 1
                expected_pages.pop(key, None)
            elif kind == "death":
                expected_pages.pop(key, None)
            else:
                if kind == "report":
                    count, pages = highest.get(key, 0) + values[0], values[1]
                    old.setdefault(key, (count, pages))
                elif key in old:
                    count, pages = old[key]  # the first report again
                else:
                    continue
                reports.add(load(name, count, pages, process))
                highest[key], expected_pages[key] = max(count, highest.get(key, 0)), pages
            reports.keep(list(expected_pages))
            total = reports.total
            counters = counters_of(total)
            assert all(counters.get(name, 0) >= value for name, value in before.items())
            assert total.num_pages == sum(expected_pages.values())
            if max_gone == MAX_GONE:
                assert total.num_steps == total.events.get("evicted", 0) == sum(highest.values())
            before = counters


class Replicas:
    """Handle of a deployment whose replicas answer, hang or have died."""

    def __init__(self):
        self.answers, self.num_broadcasts, self.num_cancelled = {}, 0, 0

    def broadcast(self, method_name):
        self.num_broadcasts += 1

        async def answer(value):
            if value == "hangs":
                await asyncio.Event().wait()
            if isinstance(value, Exception):
                raise value
            return value

        def cancel():
            self.num_cancelled += 1

        async def results():
            if not self.answers:
                raise RayServeException("no replica runs")
            return [
                SimpleNamespace(get_async=lambda value=value: answer(value), cancel=cancel)
                for value in self.answers.values()
            ]

        return SimpleNamespace(_fetch_replica_results_async=results)

    def options(self, method_name, stream=False):
        return SimpleNamespace(remote=lambda call: Waiting())


class Waiting:
    """Stream of a request that no replica takes."""

    is_cancelled = False

    def __aiter__(self):
        return self

    async def __anext__(self):
        await asyncio.Event().wait()

    def cancel(self):
        self.is_cancelled = True


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


async def test_a_replica_that_hangs_hides_no_other_and_is_dropped_after_a_while(monkeypatch):
    monkeypatch.setattr(replica_monitor, "ANSWER_SECONDS", 0.05)
    replicas, clock = Replicas(), Clock()
    monitor = ReplicaMonitor(replicas, clock)
    assert not monitor.is_answering
    replicas.answers = {"a": load("a", 1), "b": load("b", 2)}
    await monitor.refresh()
    assert monitor.is_answering and monitor.reports.total.num_pages == 20
    replicas.answers = {"a": load("a", 4), "b": "hangs"}
    clock.now = 10.0
    await monitor.refresh()
    assert monitor.is_answering and replicas.num_cancelled == 1
    assert (monitor.reports.total.num_steps, monitor.reports.total.num_pages) == (6, 20)  # it may answer late
    clock.now = 20.0
    await monitor.refresh()
    assert (monitor.reports.total.num_steps, monitor.reports.total.num_pages) == (6, 10)
    replicas.answers = {"a": "hangs", "b": load("b", 3)}  # it was only late
    await monitor.refresh()
    assert monitor.is_answering and (monitor.reports.total.num_steps, monitor.reports.total.num_pages) == (7, 20)


async def test_replicas_that_have_all_died_answer_no_more_until_one_is_back():
    replicas, clock = Replicas(), Clock()
    monitor = ReplicaMonitor(replicas, clock)
    replicas.answers = {"a": load("a", 1)}
    await monitor.refresh()
    replicas.answers = {"a": ActorDiedError()}
    clock.now = 3.0
    await monitor.refresh()
    assert not monitor.is_answering and monitor.silent_seconds == 3.0
    replicas.answers = {}
    await monitor.refresh()
    assert not monitor.is_answering and monitor.reports.total.num_steps == 1
    replicas.answers = {"b": load("b", 1)}
    await monitor.refresh()
    assert monitor.is_answering and monitor.silent_seconds == 0 and monitor.reports.total.num_steps == 2


async def test_anything_that_a_replica_sends_is_an_answer():
    clock = Clock()
    monitor = ReplicaMonitor(Replicas(), clock)
    monitor.note_answer("a")
    assert monitor.is_answering
    monitor.note_failure("a")
    assert not monitor.is_answering
    monitor.note_answer("b")
    clock.now = 100.0
    assert not monitor.is_answering and monitor.silent_seconds == 100.0


async def test_calls_at_once_share_a_probe():
    replicas = Replicas()
    replicas.answers = {"a": load("a", 1)}
    monitor = ReplicaMonitor(replicas)
    await asyncio.gather(*(monitor.refresh() for _ in range(50)))
    assert replicas.num_broadcasts == 2  # the second one for all that came during the first
    await monitor.refresh()
    assert replicas.num_broadcasts == 3


@asynccontextmanager
async def gateway_of(replicas, folder, **options):
    """A client of a gateway's application."""
    engine = make_engine(folder)
    info = ReplicaInfo(engine.model_info, engine.tokenizer, engine.models, 16, engine.stats(), "", ())
    service = ReplicatedService(info, ServerConfig(served_model_name="tiny", **options), replicas)
    transport = httpx.ASGITransport(create_service_app(service))
    service.start()
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            yield client
    finally:
        await service.stop()
        engine.close()


async def wait_for_status(client, path, status):
    async with asyncio.timeout(20):
        while (answer := await client.get(path)).status_code != status:
            await asyncio.sleep(0.02)
    return answer


async def test_a_gateway_without_replicas_lives_is_not_ready_and_refuses_requests(talker_folder, monkeypatch):
    monkeypatch.setattr(replica_monitor, "PROBE_SECONDS", 0.05)
    replicas = Replicas()
    replicas.answers = {"a": load("a", 3)}
    async with gateway_of(replicas, talker_folder, replica_timeout=0.2) as client:
        assert (await client.get("/ready")).status_code == 200
        before = (await client.get("/metrics")).text
        assert 'choreograph:computed_tokens_total{model_name="tiny"} 3.0' in before
        assert "choreograph:kv_cache_usage_perc{" in before
        replicas.answers = {}
        answer = await wait_for_status(client, "/ready", 503)
        assert answer.json()["error"]["code"] == "no_replica" and answer.headers["retry-after"] == "5"
        assert (await client.head("/ready")).status_code == 503
        assert (await client.get("/health")).status_code == 200
        after = (await client.get("/metrics")).text
        assert 'choreograph:computed_tokens_total{model_name="tiny"} 3.0' in after
        assert "choreograph:kv_cache_usage_perc{" not in after
        for body in ({"stream": False}, {"stream": True}):
            chat = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4} | body
            async with asyncio.timeout(20):
                answer = await client.post("/v1/chat/completions", json=chat)
            assert answer.status_code == 503 and answer.headers["retry-after"] == "5"
            assert answer.json()["error"]["code"] == "no_replica"
        replicas.answers = {"b": load("b", 1)}
        await wait_for_status(client, "/ready", 200)
