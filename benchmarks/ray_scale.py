"""Replicas of a simulated H100 on a virtual clock, routed by the policies of `choreograph.cluster.routing` themselves.

    python -m benchmarks.ray_scale [--replicas 4 64 1000] [--workflows 24] [--workloads debate supervisor retrieval]

What is simulated: time, caches, transfers and failures. What is not: the policies, their digests, the keys of the
messages. All counts are deterministic.
"""

import argparse
import heapq
import itertools
import random
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from choreograph.cluster.routing import POLICIES, RouteRequest, RoutingPolicy, choose, create_policy

from .common import SIMULATED, Row, save

PREFILL = 20_000.0  # tokens a second of one replica, assumed: an 8B model in bfloat16 on one H100
TRANSFER = 80_000.0  # tokens a second between replicas, assumed: 128 KiB a token at 10 GB/s
STEP = 0.02  # seconds a generated token, assumed
CACHE_TOKENS = 200_000  # of one replica
MAX_CONCURRENT = 64  # requests of one replica
SYSTEM, QUESTION, ANSWER = 400, 800, 200  # tokens of messages
DOCUMENT, DOCUMENTS, TEAM = 1000, 160, 96  # tokens of a document, documents of a team, readers of a team
ARRIVALS = 0.25  # workflows a second and replica
FAILING = 0.01  # share of the replicas that fail once, evenly in time
RESTART = 60.0  # seconds until a replica that failed is back, empty

Call = tuple[dict[int, int], int]  # tokens by key of what is read, and the key of the answer


def message_key(workflow: int, kind: int, number: int) -> int:
    """Key of a message; negative workflows have what several workflows have in common."""
    return hash((workflow, kind, number))  # of integers: equal in every process


def debate(workflow: int, turn: int) -> list[Call]:
    """Three agents over three rounds; each reads its own messages first, so that no two orders are equal."""
    calls: list[Call] = []
    for agent in range(3 if turn < 3 else 0):
        keys = {message_key(-1, 0, agent): SYSTEM, message_key(workflow, 3, 0): QUESTION}
        for speaker in [agent, *(other for other in range(3) if other != agent)]:
            keys |= {message_key(workflow, 4 + earlier, speaker): ANSWER for earlier in range(turn)}
        calls.append((keys, message_key(workflow, 4 + turn, agent)))
    return calls


def supervisor(workflow: int, turn: int) -> list[Call]:
    """A plan, eight workers, each with its task before the common material, and a summary of their answers."""
    material = {message_key(workflow, 0, part): QUESTION for part in range(3)}
    plan, answers = message_key(workflow, 1, 0), {message_key(workflow, 2, worker): ANSWER for worker in range(8)}
    if turn == 0:
        return [({message_key(-1, 0, 8): SYSTEM} | material, plan)]
    if turn == 1:
        read = material | {plan: ANSWER}
        return [({message_key(-1, 0, worker): SYSTEM} | read, key) for worker, key in enumerate(answers)]
    return [({message_key(-1, 0, 8): SYSTEM} | material | {plan: ANSWER} | answers, message_key(workflow, 1, 1))][
        : turn == 2
    ]


def retrieval(workflow: int, turn: int) -> list[Call]:
    """Four questions of a reader, each over three documents that its team has in common, in any order."""
    if turn == 4:
        return []
    generator, team = random.Random(hash((workflow, turn))), workflow // TEAM
    picked = {int(DOCUMENTS * generator.random() ** 2) for _ in range(3)}  # some documents are read often
    keys = {message_key(-1, 0, 9): SYSTEM} | {message_key(-1 - team, 1, document): DOCUMENT for document in picked}
    return [(keys | {message_key(workflow, 3, turn): 60}, message_key(workflow, 4, turn))]


WORKLOADS: dict[str, Callable[[int, int], list[Call]]] = {
    "debate": debate,
    "supervisor": supervisor,
    "retrieval": retrieval,
}


def session_of(workload: str, workflow: int) -> str:
    """Name of the workflow that a client gives: messages are shared inside of it alone."""
    return f"team-{workflow // TEAM}" if workload == "retrieval" else f"workflow-{workflow}"


@dataclass
class SimulatedReplica:
    """Cache, queue and clock of one replica."""

    name: str
    cache: OrderedDict[int, int] = field(default_factory=OrderedDict)  # tokens by key, least recently used first
    num_cached: int = 0
    prefill_free: float = 0.0  # when the prefills that were sent are done
    running: dict[int, "SimulatedRequest"] = field(default_factory=dict)
    computed: int = 0  # tokens
    busy: float = 0.0  # seconds of prefills and transfers

    def add(self, keys: dict[int, int]) -> list[int]:
        """Return the keys that are not cached; afterwards all are."""
        missing = [key for key in keys if key not in self.cache]
        for key, tokens in keys.items():
            if self.cache.pop(key, None) is None:
                self.num_cached += tokens
            self.cache[key] = tokens
        while self.num_cached > CACHE_TOKENS:
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
    attempt: int = 0
    first_token: float | None = None


def simulate(
    policy: RoutingPolicy,
    num_replicas: int,
    num_workflows: int,
    workload: str = "debate",
    seed: int = 0,
    *,
    transfer: bool = False,
) -> dict[str, float]:
    """Run workflows to their end; return what was measured.

    Args:
        transfer: replicas fetch messages from the sources that the policy names.
    """
    generator, order, calls_of = random.Random(seed), itertools.count(), WORKLOADS[workload]
    replicas = {f"r{number}": SimulatedReplica(f"r{number}") for number in range(num_replicas)}
    queues = dict.fromkeys(replicas, 0)
    rate = ARRIVALS * num_replicas
    arrivals = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, num_workflows))
    events: list[tuple[float, int, str, object]] = []

    def at(when: float, kind: str, value: object) -> None:
        heapq.heappush(events, (when, next(order), kind, value))

    for workflow, when in enumerate(arrivals):
        at(float(when), "turn", (workflow, 0))
    for number in range(max(num_replicas > 2, round(FAILING * num_replicas))):  # two replicas: for their balance alone
        at(generator.uniform(0.2, 0.8) * float(arrivals[-1]), "fail", number)
    open_turns = Counter[tuple[int, int]]()
    ttft, prompt_tokens, restarted, moved, learned = list[float](), 0, 0, 0, list[tuple[str, dict[int, int]]]()
    done: list[SimulatedReplica] = []

    def send(request: SimulatedRequest, now: float) -> None:
        nonlocal prompt_tokens, moved, learned
        request.route.learned, learned = learned, []
        ranked = choose(policy, request.route, queues)
        name = next((name for name in ranked if queues[name] < MAX_CONCURRENT), None)
        if name is None:
            at(now + 0.05, "send", request)
            return
        replica, keys = replicas[name], request.route.keys
        sources = policy.sources(request.route) if request.route.is_movable else {}
        policy.on_routed(request.route, name)
        num_computed = num_moved = 0
        for key in replica.add(keys):
            has_copy = any(key in replicas[source].cache for source in sources.get(key, ()) if source != name)
            num_moved, num_computed = num_moved + keys[key] * has_copy, num_computed + keys[key] * (not has_copy)
        seconds = num_computed / PREFILL + num_moved / TRANSFER
        replica.computed, replica.busy, moved = (
            replica.computed + num_computed,
            replica.busy + seconds,
            moved + num_moved,
        )
        prompt_tokens += sum(keys.values())
        replica.prefill_free = max(now, replica.prefill_free) + seconds
        request.attempt += 1
        replica.running[id(request)] = request
        queues[name] += 1
        at(replica.prefill_free, "first", (request, request.attempt))
        at(replica.prefill_free + ANSWER * STEP, "end", (request, request.attempt, name))

    while events:
        now, _, kind, value = heapq.heappop(events)
        if kind == "turn":
            workflow, turn = value  # type: ignore[misc]
            calls = calls_of(workflow, turn)
            open_turns[workflow, turn] = len(calls)
            for keys, answer in calls:
                route = RouteRequest(keys, session_of(workload, workflow), is_movable=transfer)
                send(SimulatedRequest(workflow, turn, answer, now, route), now)
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
            queues[name] -= 1
            replica.add({request.answer: ANSWER})  # it was generated there: it is in the cache
            learned.append((name, {request.answer: ANSWER}))
            open_turns[request.workflow, request.turn] -= 1
            if not open_turns[request.workflow, request.turn]:
                del open_turns[request.workflow, request.turn]
                at(now, "turn", (request.workflow, request.turn + 1))
        elif kind == "fail":
            name = min(replicas, key=lambda name: (-queues[name], name))  # the one that hurts most
            failed = replicas.pop(name)
            del queues[name]
            policy.on_removed(name)
            done.append(failed)
            at(now + RESTART, "back", f"{name}'")
            for request in failed.running.values():
                restarted += 1
                request.attempt += 1  # events of the earlier attempt are void
                request.route.failed.add(name)
                send(request, now)
        else:
            replicas[str(value)], queues[str(value)] = SimulatedReplica(str(value)), 0
    busy = [replica.busy for replica in replicas.values() if not replica.name.endswith("'")]
    return {
        "computed tokens": float(sum(replica.computed for replica in [*replicas.values(), *done])),
        "prompt tokens": float(prompt_tokens),
        "moved tokens": float(moved),
        "time to first token p50": float(np.percentile(ttft, 50)),
        "time to first token p99": float(np.percentile(ttft, 99)),
        "imbalance": max(busy) / (sum(busy) / len(busy)) - 1,
        "state of the router": float(policy.state_bytes),
        "requests that were repeated": float(restarted),
        "requests answered": float(len(ttft)),
    }


UNITS = {"time to first token p50": "s", "time to first token p99": "s", "state of the router": "bytes"}
UNITS |= {f"{kind} tokens": "tokens" for kind in ("computed", "prompt", "moved")} | {"imbalance": "share"}
UNITS |= {"requests that were repeated": "requests", "requests answered": "requests"}

TRANSFERS = "message with transfers"


def compare(results: dict[str, dict[str, float]]) -> dict[str, float]:
    """Return the computed tokens of message routing with transfers, as a share of those of other routers."""
    own = results[TRANSFERS]["computed tokens"]
    others = {name: result for name, result in results.items() if not name.startswith("message")}
    shares = {"the best other router": min(result["computed tokens"] for result in others.values())}
    balanced = [result["computed tokens"] for result in others.values() if result["imbalance"] <= 0.1]
    if balanced:
        shares["the best other router of at most 10% imbalance"] = min(balanced)
    return {name: own / tokens for name, tokens in shares.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4, 64, 1000])
    parser.add_argument("--workflows", type=int, default=24, help="of each replica")
    parser.add_argument("--workloads", nargs="+", default=sorted(WORKLOADS))
    arguments = parser.parse_args()
    rows = []
    for count, workload in itertools.product(arguments.replicas, arguments.workloads):
        results = {}
        for router in [*sorted(POLICIES), TRANSFERS]:
            transfer, label = router == TRANSFERS, f"{workload}, {count} replicas, {router}"
            policy = create_policy("message" if transfer else router)
            results[router] = simulate(policy, count, arguments.workflows * count, workload, transfer=transfer)
            print(label, {name: round(value, 4) for name, value in results[router].items()}, flush=True)
            for name, value in results[router].items():
                better = "higher" if name == "requests answered" else "lower"
                required = 0.1 if transfer and name == "imbalance" else None
                rows.append(Row(f"{label}: {name}", value, UNITS[name], value, value, better, required))
        for name, value in compare(results).items():
            label = f"{workload}, {count} replicas: computed tokens of {TRANSFERS}, of {name}"
            rows.append(Row(label, value, "share", value, value, "lower", 0.6))
    assumed = {"prefill tokens/s": PREFILL, "moved tokens/s": TRANSFER, "s/token": STEP, "cache tokens": CACHE_TOKENS}
    save("ray_scale", rows, SIMULATED, assumed=assumed | {"workflows/s": ARRIVALS, "failing": FAILING})


if __name__ == "__main__":
    main()
