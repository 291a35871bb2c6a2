"""Replicas of a simulated H100 on a virtual clock, routed by the policies of `choreograph.cluster.routing` themselves.

    python -m benchmarks.ray_scale [--replicas 4 64 1000] [--workflows 24]

What is simulated: time, caches and failures. What is not: the policies, their digests, the keys of the messages.
Every workflow is a debate: a question, then rounds of agents that read everything said, their own messages first.
"""

import argparse
import heapq
import itertools
import random
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass, field

import numpy as np

from choreograph.cluster.routing import POLICIES, RouteRequest, RoutingPolicy, choose, create_policy

from .common import SIMULATED, Row, save

PREFILL = 20_000.0  # tokens a second of one replica, assumed: an 8B model in bfloat16 on one H100
STEP = 0.02  # seconds a generated token, assumed
CACHE_TOKENS = 200_000  # of one replica
MAX_CONCURRENT = 64  # requests of one replica
SYSTEM, QUESTION, ANSWER = 400, 800, 200  # tokens of messages
AGENTS, ROUNDS = 3, 3
ARRIVALS = 0.25  # workflows a second and replica
FAILING = 0.01  # share of the replicas that fail once, evenly in time
RESTART = 60.0  # seconds until a replica that failed is back, empty


@dataclass
class SimulatedReplica:
    """Cache, queue and clock of one replica."""

    name: str
    cache: OrderedDict[int, int] = field(default_factory=OrderedDict)  # tokens by key, least recently used first
    num_cached: int = 0
    prefill_free: float = 0.0  # when the prefills that were sent are done
    running: dict[int, "SimulatedRequest"] = field(default_factory=dict)
    computed: int = 0  # tokens

    def compute(self, keys: dict[int, int]) -> int:
        """Return the tokens that are not cached; afterwards all are."""
        missing = sum(tokens for key, tokens in keys.items() if key not in self.cache)
        for key, tokens in keys.items():
            if self.cache.pop(key, None) is None:
                self.num_cached += tokens
            self.cache[key] = tokens
        while self.num_cached > CACHE_TOKENS:
            self.num_cached -= self.cache.popitem(last=False)[1]
        return missing


@dataclass
class SimulatedRequest:
    """One agent's turn."""

    workflow: int
    agent: int
    turn: int
    sent: float  # when the client sent it
    route: RouteRequest
    attempt: int = 0
    first_token: float | None = None


def message_key(workflow: int, turn: int, agent: int) -> int:
    """Key of a message; workflow -1 holds what all workflows have in common."""
    return hash((workflow, turn, agent))


def turn_keys(workflow: int, turn: int, agent: int) -> dict[int, int]:
    """What an agent reads: its own messages first, then those of the others, so that no two orders are equal."""
    keys = {message_key(-1, -1, agent): SYSTEM, message_key(workflow, -1, -1): QUESTION}
    for speaker in [agent, *(other for other in range(AGENTS) if other != agent)]:
        keys |= {message_key(workflow, earlier, speaker): ANSWER for earlier in range(turn)}
    return keys


def simulate(policy: RoutingPolicy, num_replicas: int, num_workflows: int, seed: int = 0) -> dict[str, float]:
    """Run workflows to their end; return what was measured."""
    generator, order = random.Random(seed), itertools.count()
    replicas = {f"r{number}": SimulatedReplica(f"r{number}") for number in range(num_replicas)}
    rate = ARRIVALS * num_replicas
    arrivals = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, num_workflows))
    events: list[tuple[float, int, str, object]] = []

    def at(when: float, kind: str, value: object) -> None:
        heapq.heappush(events, (when, next(order), kind, value))

    for workflow, when in enumerate(arrivals):
        at(float(when), "turn", (workflow, 0))
    for number in range(max(1, round(FAILING * num_replicas))):
        at(generator.uniform(0.2, 0.8) * float(arrivals[-1]), "fail", number)
    open_turns = Counter[tuple[int, int]]()
    ttft, prompt_tokens, restarted, route_seconds, num_routed = list[float](), 0, 0, 0.0, 0
    done: list[SimulatedReplica] = []

    def send(request: SimulatedRequest, now: float) -> None:
        nonlocal prompt_tokens, route_seconds, num_routed
        began = time.perf_counter()
        queues = {name: len(replica.running) for name, replica in replicas.items()}
        ranked = choose(policy, request.route, queues)
        name = next((name for name in ranked if queues[name] < MAX_CONCURRENT), None)
        if name is not None:
            policy.on_routed(request.route, name)
        route_seconds, num_routed = route_seconds + time.perf_counter() - began, num_routed + 1
        if name is None:
            at(now + 0.05, "send", request)
            return
        replica = replicas[name]
        missing = replica.compute(request.route.keys)
        replica.computed += missing
        prompt_tokens += sum(request.route.keys.values())
        replica.prefill_free = max(now, replica.prefill_free) + missing / PREFILL
        request.attempt += 1
        replica.running[id(request)] = request
        at(replica.prefill_free, "first", (request, request.attempt))
        at(replica.prefill_free + ANSWER * STEP, "end", (request, request.attempt, name))

    while events:
        now, _, kind, value = heapq.heappop(events)
        if kind == "turn":
            workflow, turn = value  # type: ignore[misc]
            open_turns[workflow, turn] = AGENTS
            for agent in range(AGENTS):
                route = RouteRequest(turn_keys(workflow, turn, agent), f"workflow-{workflow}")
                send(SimulatedRequest(workflow, agent, turn, now, route), now)
        elif kind == "send":
            send(value, now)  # type: ignore[arg-type]
        elif kind == "first":
            request, attempt = value  # type: ignore[misc]
            if request.attempt == attempt and request.first_token is None:
                request.first_token = now
                ttft.append(now - request.sent)
        elif kind == "end":
            request, attempt, name = value  # type: ignore[misc]
            if request.attempt != attempt:
                continue
            replica = replicas[name]
            del replica.running[id(request)]
            answer = {message_key(request.workflow, request.turn, request.agent): ANSWER}
            replica.compute(answer)  # it was generated there: it is in the cache
            policy.on_routed(RouteRequest(learned=[(name, answer)]), name)
            open_turns[request.workflow, request.turn] -= 1
            if not open_turns[request.workflow, request.turn] and request.turn + 1 < ROUNDS:
                at(now, "turn", (request.workflow, request.turn + 1))
        elif kind == "fail":
            name = min(replicas, key=lambda name: (-len(replicas[name].running), name))  # the one that hurts most
            failed = replicas.pop(name)
            policy.on_removed(name)
            done.append(failed)
            at(now + RESTART, "back", f"{name}'")
            for request in failed.running.values():
                restarted += 1
                request.attempt += 1  # events of the earlier attempt are void
                request.route.failed.add(name)
                send(request, now)
        else:
            replicas[str(value)] = SimulatedReplica(str(value))
    computed = [replica.computed for replica in [*replicas.values(), *done]]
    alive = [replica.computed for replica in replicas.values() if not replica.name.endswith("'")]
    return {
        "hit rate": 1 - sum(computed) / prompt_tokens,
        "time to first token p50": float(np.percentile(ttft, 50)),
        "time to first token p99": float(np.percentile(ttft, 99)),
        "imbalance": max(alive) / (sum(alive) / len(alive)) - 1,
        "state of the router": float(policy.state_bytes),
        "requests that were repeated": float(restarted),
        "requests answered": float(len(ttft)),
        "routing, measured": 1e6 * route_seconds / num_routed,
    }


UNITS = {"time to first token p50": "s", "time to first token p99": "s", "state of the router": "bytes"}
UNITS |= {"routing, measured": "us", "hit rate": "share", "imbalance": "share"}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, nargs="+", default=[4, 64, 1000])
    parser.add_argument("--workflows", type=int, default=24, help="of each replica")
    parser.add_argument("--routers", nargs="+", default=sorted(POLICIES))
    arguments = parser.parse_args()
    rows = []
    for count in arguments.replicas:
        for router in arguments.routers:
            result = simulate(create_policy(router), count, arguments.workflows * count)
            print(count, router, {name: round(value, 4) for name, value in result.items()}, flush=True)
            for name, value in result.items():
                better = "higher" if name in ("hit rate", "requests answered") else "lower"
                rows.append(
                    Row(f"{count} replicas, {router}: {name}", value, UNITS.get(name, ""), value, value, better)
                )
    assumed = {"prefill tokens/s": PREFILL, "s/token": STEP, "cache tokens": CACHE_TOKENS, "workflows/s": ARRIVALS}
    save("ray_scale", rows, SIMULATED, assumed=assumed)


if __name__ == "__main__":
    main()
