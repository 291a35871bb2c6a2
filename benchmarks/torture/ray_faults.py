"""Failures of replicas, the gateway and nodes of a server on Ray, while clients read streams.

A Ray of two nodes is started for the campaign, with a replica on each, and stopped at its end. Promised: every answer that
goes on has the tokens of one quiet engine; a client that loses its connection, or that is refused, sees one clear error;
after each fault the server gets ready again, answers rightly, and no replica keeps a request. Adding or removing one of
n replicas moves at most about 1/n of the sessions.
"""

import asyncio
import json
import os
import random
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil

from choreograph import CacheConfig, Engine, EngineConfig, SamplingParams
from choreograph.cluster.routing import RouteRequest, create_policy
from choreograph.namespace import Namespace

from .campaign import Options, Outcome, Tally
from .fault_case import BrokenPromise, expect, open_engine
from .rounding import LIMIT, Margins, first_difference
from .tiny_family import save_family, tokenizer

MAX_REQUESTS = 8  # of a replica
NUM_STREAMS = 6
MAX_TOKENS = 150  # of a stream
STARTED_CHUNKS = 5  # of a stream, before a fault is injected
NUM_CANCELLED = 300
READY_SECONDS = 240.0  # on a busy machine
NODE_OPTIONS: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 100 << 20}
NUM_SESSIONS = 4000
ANSWERED, REFUSED, BROKEN = "answered", "refused", "broken"


def open_replica(folder: Path) -> Engine:
    """Load the engine of a replica."""
    cache = CacheConfig(capacity=8192, page_size=8, poison_freed_pages=True)
    return Engine.from_pretrained(folder, config=EngineConfig(cache=cache), dtype="float32", device="cpu")


@dataclass
class Stream:
    """What a client got of one stream."""

    text: str
    token_ids: list[int] = field(default_factory=list)
    num_chunks: int = 0
    ids: set[str] = field(default_factory=set)  # of its chunks
    end: str | None = None  # ANSWERED, REFUSED or BROKEN
    detail: str = ""


@dataclass
class Cluster:
    """A running Ray, and the server on it."""

    nodes: Any  # ray.cluster_utils.Cluster
    url: str
    quiet: Engine
    rng: random.Random
    tally: Tally

    # -- clients --------------------------------------------------------------------------------------------

    def start_streams(self, count: int = NUM_STREAMS) -> tuple[list[Stream], list[threading.Thread]]:
        """Start to read streams; return when each has some chunks or has ended."""
        streams = [Stream("".join(self.rng.choices("abcdefgh ", k=self.rng.randint(4, 60)))) for _ in range(count)]
        threads = [threading.Thread(target=self.read, args=(stream,)) for stream in streams]
        for thread in threads:
            thread.start()
        end = time.monotonic() + READY_SECONDS
        while any(stream.end is None and stream.num_chunks < STARTED_CHUNKS for stream in streams):
            expect(time.monotonic() < end, "streams do not start")
            time.sleep(0.02)
        return streams, threads

    def read(self, stream: Stream) -> None:
        body = {"model": "base", "prompt": stream.text, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
        body |= {"stream": True, "return_token_ids": True}
        try:
            with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=READY_SECONDS) as reply:
                if reply.is_error:
                    stream.detail = f"{reply.status_code}: {reply.read()[:300]!r}"
                    stream.end = REFUSED if reply.status_code in (429, 503) else BROKEN
                    return
                for line in reply.iter_lines():
                    self._take(stream, line)
        except httpx.HTTPError as exc:
            stream.detail = f"{type(exc).__name__}: {exc}"
        stream.end = stream.end or BROKEN

    @staticmethod
    def _take(stream: Stream, line: str) -> None:
        if line == "data: [DONE]":
            stream.end = ANSWERED
        if not line.startswith("data: {"):
            return
        event = json.loads(line[6:])
        if "error" in event:
            stream.detail = str(event["error"]["message"])
            return
        stream.num_chunks += 1
        stream.ids.add(event["id"])
        for choice in event["choices"]:
            stream.token_ids += choice.get("token_ids") or []

    def check(
        self, streams: list[Stream], threads: list[threading.Thread], allowed: tuple[str, ...] = (ANSWERED,)
    ) -> None:
        """Wait for streams; compare what they got with a quiet engine."""
        for thread in threads:
            thread.join(READY_SECONDS)
            expect(not thread.is_alive(), "a stream does not end")
        for stream in streams:
            self.tally.counts[f"streams {stream.end}"] += 1
            expect(
                stream.end in allowed, f"a stream was {stream.end} after {stream.num_chunks} chunks: {stream.detail}"
            )
            expected, margins = self._expected(stream.text)
            got = stream.token_ids
            place = first_difference(got, expected)
            is_whole = got == expected if stream.end == ANSWERED else got == expected[: len(got)]
            is_rounding = place < min(len(got), len(margins)) and margins[place] < LIMIT
            self.tally.counts["rounding"] += is_rounding and not is_whole
            expect(
                is_whole or is_rounding,
                f"{got[place - 2 : place + 9]} instead of {expected[place - 2 : place + 9]} at {place}",
            )
            expect(len(stream.ids) <= 1, f"a stream has the ids {stream.ids}")

    def _expected(self, text: str) -> tuple[list[int], list[float]]:
        sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True)
        with self.quiet.session(mode="prefix") as session:
            message = session.decode(tokenizer()(text)["input_ids"], sampling=sampling, footer=[])
            margins = Margins(message, sampling)
            result = message.output_token_ids
        self.quiet.run_until_idle()
        self.quiet.clear_cache()
        return result, margins.values

    # -- replicas -------------------------------------------------------------------------------------------

    def loads(self) -> list[Any]:
        """Return the state of every replica that answers."""
        from ray import serve

        handle = serve.get_deployment_handle("engine", "choreograph")
        results = handle.broadcast("load").results(timeout_s=60, return_exceptions=True)
        return [result for result in results if not isinstance(result, Exception)]

    def wait(self, condition: Callable[[], object], what: str) -> None:
        end = time.monotonic() + READY_SECONDS
        while True:
            with suppress(Exception):  # while a part is away
                if condition():
                    return
            expect(time.monotonic() < end, what)
            time.sleep(0.3)

    def wait_until_well(self) -> None:
        """Wait for two idle replicas and a ready server; then it answers rightly."""
        self.wait(lambda: len(self.loads()) == 2, "two replicas do not come back")
        self.wait(
            lambda: httpx.get(f"{self.url}/ready", timeout=60).status_code == 200, "the server does not get ready"
        )
        self.wait(
            lambda: not any(load.stats.num_running or load.stats.num_waiting for load in self.loads()),
            "a replica keeps a request",
        )
        self.check(*self.start_streams(2))

    # -- faults ---------------------------------------------------------------------------------------------

    def kill_replica(self) -> None:
        """A replica that computes is killed with SIGKILL: all streams go on."""
        streams, threads = self.start_streams()
        busy = max(self.loads(), key=lambda load: load.stats.num_running)
        os.kill(busy.process_id, signal.SIGKILL)
        self.check(streams, threads)

    def kill_gateway(self) -> None:
        """The gateway is killed: its streams end with an error, and the replicas end their requests."""
        streams, threads = self.start_streams()
        found = [
            process for process in psutil.Process().children(recursive=True) if "gateway" in " ".join(process.cmdline())
        ]
        expect(found, "there is no process of the gateway")
        for process in found:
            process.kill()
        self.check(streams, threads, (ANSWERED, BROKEN))

    def kill_node(self) -> None:
        """A node is lost with its replica: all streams go on."""
        streams, threads = self.start_streams()
        node = next(iter(self.nodes.worker_nodes))
        self.nodes.remove_node(node, allow_graceful=False)
        try:
            self.check(streams, threads)
        finally:
            self.nodes.add_node(**NODE_OPTIONS)

    def drain_node(self) -> None:
        """A node is drained: all streams go on, and its replica moves to another node."""
        import ray
        from ray.core.generated import autoscaler_pb2

        streams, threads = self.start_streams()
        node = next(iter(self.nodes.worker_nodes))
        self.nodes.add_node(**NODE_OPTIONS)
        client = ray._raylet.GcsClient(address=self.nodes.address)
        reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        is_accepted, why = client.drain_node(node.node_id, reason, "a test", int((time.time() + 60) * 1000))
        expect(is_accepted, f"the node was not drained: {why}")
        self.check(streams, threads)
        self.wait(lambda: len(self.loads()) == 2, "two replicas do not come back")
        self.check(*self.start_streams())
        self.nodes.remove_node(node, allow_graceful=True)

    def resize(self) -> None:
        """A replica is added under load, and one is removed under load: all streams go on."""
        streams, threads = self.start_streams()
        self.nodes.add_node(**NODE_OPTIONS)
        self._set_replicas(3)
        self.check(streams, threads)
        self.wait(lambda: len(self.loads()) == 3, "no replica is added")
        streams, threads = self.start_streams()
        self._set_replicas(2)
        self.check(streams, threads)
        self.wait(lambda: len(self.loads()) == 2, "no replica is removed")
        used = {psutil.Process(load.process_id).ppid() for load in self.loads()}
        for node in list(self.nodes.worker_nodes):
            if node.all_processes["raylet"][0].process.pid not in used:
                self.nodes.remove_node(node, allow_graceful=True)

    @staticmethod
    def _set_replicas(count: int) -> None:
        """Change the number of replicas of the running application, as Serve's REST interface does."""
        import ray
        from ray.serve._private.common import DeploymentID
        from ray.serve.context import _get_global_client

        controller = _get_global_client()._controller
        ray.get(controller.update_deployment_replicas.remote(DeploymentID("engine", "choreograph"), count))

    def cancel(self) -> None:
        """Clients leave while replicas admit their requests: nothing of them is left."""
        body = {"model": "base", "max_tokens": 500, "temperature": 0, "ignore_eos": True, "stream": True}
        rng, num_left = self.rng, 0

        async def leave(client: httpx.AsyncClient) -> None:
            nonlocal num_left
            text = "".join(rng.choices("abcdefgh ", k=rng.randint(4, 60)))
            with suppress(TimeoutError, httpx.HTTPError):
                await asyncio.wait_for(client.post("/v1/completions", json=body | {"prompt": text}), rng.random() * 0.3)
            num_left += 1

        async def main() -> None:
            async with httpx.AsyncClient(base_url=self.url, timeout=60) as client:
                for _ in range(NUM_CANCELLED // 12):
                    await asyncio.gather(*(leave(client) for _ in range(12)))

        asyncio.run(main())
        self.tally.counts["cancelled requests"] += num_left

    def fill(self) -> None:
        """All replicas are full: the rest is refused with status 429, and what was accepted is answered."""
        streams = [Stream("".join(self.rng.choices("abcdefgh ", k=20))) for _ in range(5 * MAX_REQUESTS)]
        threads = [threading.Thread(target=self.read, args=(stream,)) for stream in streams]
        for thread in threads:
            thread.start()
        self.check(streams, threads, (ANSWERED, REFUSED))
        expect(any(stream.end == ANSWERED for stream in streams), "a full server answers nothing")


FAULTS: Mapping[str, Callable[[Cluster], None]] = {
    "killed replica": Cluster.kill_replica,
    "cancelled requests": Cluster.cancel,
    "full replicas": Cluster.fill,
    "killed gateway": Cluster.kill_gateway,
    "killed node": Cluster.kill_node,
    "drained node": Cluster.drain_node,
    "added and removed replicas": Cluster.resize,
}


def check_moves(policy: str, count: int, rng: random.Random) -> float:
    """Add a replica to some, and remove another; return the largest share of sessions that moved, times the replicas.

    Raises:
        BrokenPromise: if a session moved between two replicas that were there all the time.
    """
    router = create_policy(policy)
    names = [f"replica-{rng.getrandbits(30)}" for _ in range(count)]
    for name in names:
        router.set_queue(name, 0)
    routes = [
        RouteRequest({number: 400}, Namespace(workflow=f"{rng.getrandbits(40)}")) for number in range(NUM_SESSIONS)
    ]

    def places() -> list[str]:
        return [router.rank(route)[0] for route in routes]

    before = []
    for route in routes:
        before.append(router.rank(route)[0])
        router.on_routed(route, before[-1])
    router.set_queue("added", 0)
    between = places()
    lost = rng.choice(names)
    router.on_removed(lost)
    after = places()
    for old, new, last in zip(before, between, after, strict=True):
        expect(new in (old, "added"), f"{policy}: a session moved from {old} to {new} when another replica was added")
        expect(last == new or new == lost, f"{policy}: a session moved from {new} to {last} when {lost} was removed")
    shares = [sum(map(str.__ne__, *pair)) / NUM_SESSIONS for pair in ((before, between), (between, after))]
    return max(shares[0] * (count + 1), shares[1] * count)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_nodes(attempts: int = 5) -> Any:
    """Start a Ray of two nodes; a busy machine may need several attempts."""
    from ray.cluster_utils import Cluster as RayCluster

    while True:
        nodes, attempts = RayCluster(), attempts - 1
        try:
            nodes.add_node(**NODE_OPTIONS, include_dashboard=False)
            nodes.add_node(**NODE_OPTIONS)
            return nodes
        except Exception:  # Ray waits 30 s for a node, and raises no type of its own
            nodes.shutdown()
            if not attempts:
                raise


@contextmanager
def running_cluster(options: Options, tally: Tally) -> Iterator[Cluster]:
    """Start a Ray of two nodes and the server; stop them and all of their processes."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "180"}
    os.environ["RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT"] = "1000"  # replicas are killed before Serve has seen them run
    root = str(Path(__file__).parents[2])
    os.environ["PYTHONPATH"] = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])  # of the workers
    import ray
    from ray import serve

    from choreograph.cluster import deployment
    from choreograph.server.server_config import ServerConfig

    before = {process.pid for process in psutil.Process().children(recursive=True)}
    with tempfile.TemporaryDirectory() as folder:
        family, nodes = save_family(Path(folder)), start_nodes()
        try:
            ray.init(address=nodes.address, log_to_driver=False)
            app = deployment.bind_app(
                partial(open_replica, family.base),
                ServerConfig(
                    served_model_name="base",
                    max_requests=MAX_REQUESTS,
                    drain_timeout=240,
                    replica_timeout=READY_SECONDS,
                ),
                deployment.ClusterConfig(replicas=2, transfer="always"),
            )
            address: dict[str, Any] = {"host": "127.0.0.1", "port": _free_port()}
            serve.start(proxy_location="HeadOnly", http_options=address)
            serve.run(app, name=deployment.APP_NAME, route_prefix="/", external_scaler_enabled=True)
            url, quiet = f"http://127.0.0.1:{address['port']}", open_engine(capacity=8192)
            yield Cluster(nodes, url, quiet, random.Random(options.seed), tally)
            quiet.close()
        finally:
            started = [p for p in psutil.Process().children(recursive=True) if p.pid not in before]
            serve.shutdown()
            ray.shutdown()
            nodes.shutdown()
    _, left = psutil.wait_procs(started, timeout=60)
    for process in left:
        tally.lose(0, f"process {' '.join(process.cmdline()[:2])} is left")
        process.kill()


def run(options: Options) -> Outcome:
    """Inject one kind of fault after the other into one server."""
    tally = Tally(options)
    for index, count in enumerate((2, 3, 8, 32)):
        for policy in ("session", "message", "prefix"):
            try:
                share = check_moves(policy, count, options.draws(index))
                expect(
                    share < 1.5,
                    f"{policy}: adding or removing one of {count + 1} replicas moves {share:.2f}/n of all sessions",
                )
                tally.details[f"moved sessions, {policy}, {count} replicas, times n"] = round(share, 3)
            except BrokenPromise as exc:
                tally.lose(index, str(exc))
        tally.inputs += 1
    with running_cluster(options, tally) as cluster:
        cluster.wait_until_well()
        kinds = list(FAULTS)
        for index in options.rounds():
            name = kinds[index % len(kinds)]
            try:
                FAULTS[name](cluster)
                cluster.wait_until_well()
            except Exception as exc:
                tally.lose(index, f"{name}: {type(exc).__name__}: {exc}")
            tally.inputs += 1
            tally.faults += NUM_CANCELLED if name == "cancelled requests" else 1
            tally.counts[f"faults: {name}"] += 1
    return tally.outcome()
