"""Replicas of a simulated H100 on a virtual clock, routed by the policies of `choreograph.cluster.routing` themselves.

    python -m benchmarks.ray_scale [--replicas 4 64 1000] [--seconds 96] [--workloads debate supervisor retrieval]

First all routers under the same load a replica; then message routing with transfers alone: at a number of workflows a
day, at loads near what replicas can run, and behind several gateways, each with a router of its own.

What is simulated: time, caches, transfers and failures. What is not: the policies, their digests, the keys of the
messages. All counts are deterministic.
"""

import argparse
import heapq
import itertools
import math
import random
import zlib
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from choreograph.cluster.routing import POLICIES, RouteRequest, RoutingPolicy, choose, create_policy
from choreograph.namespace import Namespace

from .common import SIMULATED, Row, save
from .ray_workloads import WORKLOADS, Sizes

ARRIVALS = 0.25  # workflows a second and replica, where routers are compared
COMPARED_SECONDS = {1000: 12.0}  # of arrivals; fewer where the number of replicas alone makes many requests
DAYS = (100_000, 1_000_000)  # workflows a day
DAY_SECONDS = 600.0  # of arrivals that are simulated of a day
LOADS, LOAD_SECONDS = (1.0, 1.5, 2.0), 40.0  # workflows a second and replica; seconds of arrivals
GATEWAYS = 16
FAILING = 0.01  # share of the replicas that fail once, evenly in time
RESTART = 60.0  # seconds until a replica that failed is back, empty

Results = dict[str, float]  # by what was measured


@dataclass(frozen=True)
class Machine:
    """What one replica is assumed to do; by default an 8B model in bfloat16 on one H100."""

    prefill: float = 20_000.0  # tokens a second
    transfer: float = 80_000.0  # tokens a second between replicas: 128 KiB a token at 10 GB/s
    step: float = 0.02  # seconds a generated token
    cache_tokens: int = 200_000
    max_concurrent: int = 64  # requests


SIZES, H100 = Sizes(), Machine()


@dataclass
class SimulatedReplica:
    """Cache, queue, links and clock of one replica."""

    name: str
    cache_tokens: int
    cache: OrderedDict[int, int] = field(default_factory=OrderedDict)  # tokens by key, least recently used first
    num_cached: int = 0
    prefill_free: float = 0.0  # when the prefills that were sent are done
    sending_free: float = 0.0  # when its outgoing link is free
    receiving_free: float = 0.0  # when its incoming link is free
    running: dict["SimulatedRequest", None] = field(default_factory=dict)
    computed: int = 0  # tokens of prompts
    generated: int = 0  # tokens
    sent: int = 0  # tokens, to other replicas
    busy: float = 0.0  # seconds of prefills, and of what it received

    def add(self, keys: dict[int, int]) -> list[int]:
        """Return the keys that are not cached; afterwards all are."""
        missing = [key for key in keys if key not in self.cache]
        for key, tokens in keys.items():
            if self.cache.pop(key, None) is None:
                self.num_cached += tokens
            self.cache[key] = tokens
        while self.num_cached > self.cache_tokens:
            self.num_cached -= self.cache.popitem(last=False)[1]
        return missing


@dataclass(eq=False)
class SimulatedRequest:
    """One agent's turn."""

    workflow: int
    turn: int
    answer: int  # key
    sent: float  # when the client sent it
    route: RouteRequest
    policy: RoutingPolicy  # of the gateway that it goes through
    attempt: int = 0
    first_token: float = math.inf  # time, once it is known


class Simulation:
    """Workflows over replicas, on a virtual clock.

    Args:
        create: of the router of one gateway.
        rate: workflows a second.
        transfer: replicas fetch messages from the first source that a policy names.
        gateways: each has a router of its own, which knows what it has routed itself.
        is_sticky: all requests of a session go through one gateway; otherwise through any.
        is_by_team: one session for all workflows of a team; otherwise each has its own.
    """

    def __init__(
        self,
        create: Callable[[], RoutingPolicy],
        num_replicas: int,
        workload: str,
        rate: float,
        *,
        seed: int = 0,
        transfer: bool = False,
        gateways: int = 1,
        is_sticky: bool = True,
        is_by_team: bool = False,
        sizes: Sizes = SIZES,
        machine: Machine = H100,
    ) -> None:
        self.is_by_team, self.sizes, self.machine = is_by_team, sizes, machine
        self.policies = [create() for _ in range(gateways)]
        self.workload, self.rate, self.transfer, self.is_sticky = workload, rate, transfer, is_sticky
        self.seed, self.random = seed, random.Random(seed)
        self.replicas: dict[str, SimulatedReplica] = {}
        self.queues: dict[str, int] = {}
        for number in range(num_replicas):
            self.start(f"r{number}")
        self.events: list[tuple[float, int, str, object]] = []
        self.order = itertools.count()
        self.waiting = deque[SimulatedRequest]()  # at the gateways: all replicas are full
        self.learned = {id(policy): list[tuple[str, dict[int, int]]]() for policy in self.policies}
        self.open_turns = Counter[tuple[int, int]]()
        self.ttft = list[float]()
        self.failed: list[SimulatedReplica] = []
        self.prompt_tokens = self.moved = self.restarted = self.late = self.most_waiting = 0
        self.running_seconds = 0.0  # of all requests
        self.later = deque[int]()  # workflows that start when another one has ended
        self.end_of_arrivals = 0.0

    def at(self, when: float, kind: str, value: object) -> None:
        heapq.heappush(self.events, (when, next(self.order), kind, value))

    def start(self, name: str) -> None:
        self.replicas[name] = SimulatedReplica(name, self.machine.cache_tokens)
        self.set_queue(name, 0)

    def set_queue(self, name: str, length: int) -> None:
        self.queues[name] = length
        for policy in self.policies:
            policy.set_queue(name, length)

    def run(self, num_workflows: int, concurrency: int | None = None) -> Results:
        """Run workflows to their end; return what was measured.

        Args:
            concurrency: so many run at a time, without failures; None: they arrive at random.
        """
        arrivals = np.cumsum(np.random.default_rng(self.seed).exponential(1 / self.rate, num_workflows)).tolist()
        if concurrency is not None:
            self.later.extend(range(concurrency, num_workflows))
            arrivals = [0.0] * min(concurrency, num_workflows)
        self.end_of_arrivals = arrivals[-1]
        for workflow, when in enumerate(arrivals):
            self.at(when, "turn", (workflow, 0))
        count = len(self.replicas)
        num_failing = max(count > 2, round(FAILING * count)) if concurrency is None else 0
        for number in range(num_failing):  # two replicas: for their balance alone
            self.at(self.random.uniform(0.2, 0.8) * self.end_of_arrivals, "fail", number)
        while self.events:
            now, _, kind, value = heapq.heappop(self.events)
            getattr(self, f"on_{kind}")(now, value)
        if concurrency is not None:
            self.end_of_arrivals = now
        return self.results()

    def on_turn(self, now: float, value: tuple[int, int]) -> None:
        workflow, turn = value
        calls = WORKLOADS[self.workload](self.sizes, workflow, turn)
        session = f"team-{workflow // self.sizes.readers}" if self.is_by_team else f"workflow-{workflow}"
        self.open_turns[value] = len(calls)
        for keys, answer in calls:
            number = zlib.crc32(session.encode()) if self.is_sticky else self.random.getrandbits(32)
            policy = self.policies[number % len(self.policies)]
            route = RouteRequest(keys, Namespace(session=session), is_movable=self.transfer)
            self.send(SimulatedRequest(workflow, turn, answer, now, route, policy), now)
        if not calls:
            del self.open_turns[value]
            if self.later:
                self.at(now, "turn", (self.later.popleft(), 0))

    def send(self, request: SimulatedRequest, now: float) -> bool:
        """Route a request; return False, and let it wait, if the replicas that were named are full."""
        policy, route, machine = request.policy, request.route, self.machine
        if learned := self.learned[id(policy)]:
            route.learned, self.learned[id(policy)] = learned, []
        name = next((name for name in choose(policy, route) if self.queues[name] < machine.max_concurrent), None)
        if name is None:
            self.waiting.append(request)
            self.most_waiting = max(self.most_waiting, len(self.waiting))
            return False
        replica, keys = self.replicas[name], route.keys
        sources = policy.sources(route) if route.is_movable else {}
        policy.on_routed(route, name)
        num_computed, begun = 0, max(now, replica.prefill_free)
        for key in replica.add(keys):
            names, tokens = [source for source in sources.get(key, ()) if source != name], keys[key]
            if not names or key not in self.replicas[names[0]].cache:
                num_computed += tokens
                continue
            sender, deadline = self.replicas[names[0]], now + max(0.2, 2 * tokens / machine.prefill)
            arrived = max(now, sender.sending_free, replica.receiving_free) + tokens / machine.transfer
            if arrived > deadline:  # the link of the sender has too much to do
                num_computed, self.late, begun = num_computed + tokens, self.late + 1, max(begun, deadline)
                continue
            sender.sending_free = replica.receiving_free = arrived
            sender.sent, self.moved = sender.sent + tokens, self.moved + tokens
            replica.busy, begun = replica.busy + tokens / machine.transfer, max(begun, arrived)
        seconds = num_computed / machine.prefill
        replica.computed, replica.busy = replica.computed + num_computed, replica.busy + seconds
        self.prompt_tokens += sum(keys.values())
        if num_computed:
            replica.prefill_free = begun + seconds
        request.first_token = begun + seconds
        request.attempt += 1
        replica.running[request] = None
        self.set_queue(name, self.queues[name] + 1)
        end = request.first_token + self.sizes.answer * machine.step
        self.running_seconds += end - now
        self.at(end, "end", (request, request.attempt, name))
        return True

    def on_end(self, now: float, value: tuple[SimulatedRequest, int, str]) -> None:
        request, attempt, name = value
        if request.attempt != attempt:
            return
        self.ttft.append(request.first_token - request.sent)
        replica = self.replicas[name]
        del replica.running[request]
        self.set_queue(name, self.queues[name] - 1)
        replica.generated += self.sizes.answer
        replica.add({request.answer: self.sizes.answer})  # it was generated there: it is in the cache
        self.learned[id(request.policy)].append((name, {request.answer: self.sizes.answer}))
        self.open_turns[request.workflow, request.turn] -= 1
        if not self.open_turns[request.workflow, request.turn]:
            del self.open_turns[request.workflow, request.turn]
            self.at(now, "turn", (request.workflow, request.turn + 1))
        if self.waiting:
            self.send(self.waiting.popleft(), now)

    def on_fail(self, now: float, number: int) -> None:
        name = min(self.replicas, key=lambda name: (-self.queues[name], name))  # the one that hurts most
        failed = self.replicas.pop(name)
        del self.queues[name]
        for policy in self.policies:
            policy.on_removed(name)
        self.failed.append(failed)
        self.at(now + RESTART, "back", f"{name}'")
        for request in failed.running:
            self.restarted += 1
            request.attempt += 1  # events of the earlier attempt are void
            request.route.failed.add(name)
            if request.first_token <= now:  # the client has it: what is late is the rest
                self.ttft.append(request.first_token - request.sent)
                request.sent = math.nan
            self.send(request, now)

    def on_back(self, now: float, name: str) -> None:
        self.start(name)

    def results(self) -> Results:
        """Return what was measured."""
        assert not self.open_turns and not self.waiting, "requests were lost"
        replicas, seconds = list(self.replicas.values()), self.end_of_arrivals
        busy = [replica.busy for replica in replicas if not replica.name.endswith("'")]
        ttft = [value for value in self.ttft if not math.isnan(value)]
        computed = sum(replica.computed for replica in [*replicas, *self.failed])
        return {
            "computed tokens": float(computed),
            "prompt tokens": float(self.prompt_tokens),
            "moved tokens": float(self.moved),
            "hit rate": 1 - (computed + self.moved) / self.prompt_tokens,
            "time to first token p50": float(np.percentile(ttft, 50)),
            "time to first token p99": float(np.percentile(ttft, 99)),
            "imbalance": max(busy) / (sum(busy) / len(busy)) - 1,
            "busy share": sum(busy) / len(busy) / seconds,
            "requests running": self.running_seconds / seconds / len(replicas),
            "link of the busiest sender": max(replica.sent for replica in replicas) / self.machine.transfer / seconds,
            "messages that came too late": float(self.late),
            "most requests waiting at once": float(self.most_waiting),
            "state of the router": float(sum(policy.state_bytes for policy in self.policies)),
            "requests that were repeated": float(self.restarted),
            "requests answered": float(len(ttft)),
        }


UNITS = {"time to first token p50": "s", "time to first token p99": "s", "state of the router": "bytes"}
UNITS |= {f"{kind} tokens": "tokens" for kind in ("computed", "prompt", "moved")}
UNITS |= dict.fromkeys(("hit rate", "imbalance", "busy share", "link of the busiest sender"), "share")
REQUESTS = ("requests that were repeated", "requests answered", "requests running", "most requests waiting at once")
UNITS |= dict.fromkeys(REQUESTS, "requests") | {"messages that came too late": "messages"}

TRANSFERS, BY_TEAM = "message with transfers", "session by team"


def simulate(router: str, num_replicas: int, workload: str, rate: float, seconds: float, **options: Any) -> Results:
    """Simulate arrivals of some seconds, and what follows from them.

    Args:
        rate: workflows a second.
        options: of `Simulation`.
    """
    return create_simulation(router, num_replicas, workload, rate, **options).run(max(1, round(rate * seconds)))


def create_simulation(router: str, num_replicas: int, workload: str, rate: float, **options: Any) -> Simulation:
    """Create a simulation of a policy by its name, of TRANSFERS or of BY_TEAM."""
    name, is_by_team = {TRANSFERS: "message", BY_TEAM: "session"}.get(router, router), router == BY_TEAM
    return Simulation(
        lambda: create_policy(name),
        num_replicas,
        workload,
        rate,
        transfer=router == TRANSFERS,
        is_by_team=is_by_team,
        **options,
    )


def routers_of(workload: str) -> list[str]:
    """Return the routers that are compared.

    Sessions of whole teams are for documents, which teams share.
    """
    return [*sorted(POLICIES), *([BY_TEAM] if workload == "retrieval" else []), TRANSFERS]


def compare(results: Mapping[str, Results]) -> dict[str, float]:
    """Return the computed tokens of message routing with transfers, as a share of those of other routers."""
    own = results[TRANSFERS]["computed tokens"]
    others = {name: result for name, result in results.items() if not name.startswith("message")}
    shares = {"the best other router": min(result["computed tokens"] for result in others.values())}
    balanced = [result["computed tokens"] for result in others.values() if result["imbalance"] <= 0.1]
    if balanced:
        shares["the best other router of at most 10% imbalance"] = min(balanced)
    return {name: own / tokens for name, tokens in shares.items()}


def rows_of(label: str, results: Results, limits: Mapping[str, float]) -> list[Row]:
    """Print results; return their rows.

    Args:
        limits: what a measure must not exceed.
    """
    print(label, {name: round(value, 4) for name, value in results.items()}, flush=True)
    higher = ("requests answered", "hit rate")
    return [
        Row(
            f"{label}: {name}",
            value,
            UNITS[name],
            value,
            value,
            "higher" if name in higher else "lower",
            limits.get(name),
        )
        for name, value in results.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4, 64, 1000])
    parser.add_argument("--seconds", type=float, default=96.0, help="of arrivals, where routers are compared")
    parser.add_argument("--workloads", nargs="+", default=sorted(WORKLOADS))
    arguments = parser.parse_args()
    rows = []
    for count, workload in itertools.product(arguments.replicas, arguments.workloads):
        place, results = f"{workload}, {count} replicas", dict[str, Results]()
        seconds = min(arguments.seconds, COMPARED_SECONDS.get(count, math.inf))
        for router in routers_of(workload):
            results[router] = simulate(router, count, workload, ARRIVALS * count, seconds)
            is_limited = router == TRANSFERS and count not in COMPARED_SECONDS
            rows += rows_of(f"{place}, {router}", results[router], {"imbalance": 0.1} if is_limited else {})
        for name, value in compare(results).items():
            label = f"{place}: computed tokens of {TRANSFERS}, of {name}"
            rows.append(Row(label, value, "share", value, value, "lower", 0.6))
    per_second = {workflows: workflows / 86400 for workflows in DAYS}
    for count, workload, (workflows, rate) in itertools.product(
        [count for count in arguments.replicas if count > 2], arguments.workloads, per_second.items()
    ):
        result = simulate(TRANSFERS, count, workload, rate, DAY_SECONDS)
        rows += rows_of(f"{workload}, {count} replicas, {TRANSFERS}, {workflows:,} workflows a day", result, {})
    count = 64 if 64 in arguments.replicas else arguments.replicas[-1]
    for workload, load in itertools.product(arguments.workloads, LOADS):
        result = simulate(TRANSFERS, count, workload, load * count, LOAD_SECONDS)
        workflows = round(load * count * 86400)
        rows += rows_of(f"{workload}, {count} replicas, {TRANSFERS}, {workflows:,} workflows a day", result, {})
    count, rate = arguments.replicas[-1], DAYS[-1] / 86400
    for workload, is_sticky in itertools.product(arguments.workloads, (True, False)):
        result = simulate(TRANSFERS, count, workload, rate, DAY_SECONDS / 2, gateways=GATEWAYS, is_sticky=is_sticky)
        way = "one for each session" if is_sticky else "any for a request"
        label = f"{workload}, {count} replicas, {TRANSFERS}, {DAYS[-1]:,} workflows a day; {GATEWAYS} gateways, {way}"
        rows += rows_of(label, result, {})
    assumed = asdict(H100) | asdict(SIZES) | {"workflows/s": ARRIVALS, "failing": FAILING}
    save("ray_scale", rows, SIMULATED, assumed=assumed)


if __name__ == "__main__":
    main()
