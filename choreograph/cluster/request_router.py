"""Ray Serve's request router over a `RoutingPolicy`."""

import math
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from .routing import RouteRequest, choose, create_policy

SYNCHRONIZE_SECONDS = 10.0  # as long as Ray believes in the length of a queue


class PolicyRequestRouter(RequestRouter):
    """Sends requests whose first argument has a `route` where its policy says.

    Args of `initialize_state`: `policy`, a name of `POLICIES`, and its options.
    """

    def initialize_state(self, policy: str = "message", **options: Any) -> None:
        self.policy = create_policy(policy, **options)
        self._running: Counter[ReplicaID] = Counter()  # requests that were sent and have not ended
        self._unheard: set[ReplicaID] = set()  # replicas of which no length was ever known
        self._synchronized = 0.0  # when all queues were last read

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is not None:  # without this, full replicas are asked again without a pause
            pending_request.routing_context.should_backoff = True
        if time.monotonic() - self._synchronized > SYNCHRONIZE_SECONDS:
            self._synchronize()
        for replica_id in list(self._unheard):  # probes of Ray call no hook
            self._note_queue(replica_id)
        route = self._route(pending_request)
        names = choose(self.policy, route)
        for name in names:
            self._note_queue(self._by_name[name].replica_id)
        if route.is_movable:
            route.sources = self.policy.sources(route)
        # ranks of one replica: inside a rank Ray chooses by the queue alone
        return [[self._by_name[name]] for name in names]

    def _synchronize(self) -> None:
        """Read all queues."""
        self._synchronized = time.monotonic()
        for replica_id in self.curr_replicas:
            self._note_queue(replica_id)

    def _note_queue(self, replica_id: ReplicaID) -> None:
        if replica_id in self.curr_replicas:
            self.policy.set_queue(replica_id.unique_id, self._queue_of(replica_id))

    def _queue_of(self, replica_id: ReplicaID) -> int:
        """Return the length of a replica's queue, or an estimate.

        Ray forgets a length after a while, and then counts from zero. What was sent there and has not ended is there
        in any case. A replica of which nothing was ever known counts as the mean of the others: it may be idle, or
        hang.
        """
        known, num_running = self.replica_queue_len_cache.get(replica_id), self._running[replica_id]
        if known is None and not num_running and replica_id in self._unheard:
            if replica_id.unique_id in self.policy.queues:
                return self.policy.queues[replica_id.unique_id]  # as it was estimated first
            others = [self.policy.queues[name] for name in self._heard_names() if name in self.policy.queues]
            return math.ceil(sum(others) / len(others)) if others else 0
        self._unheard.discard(replica_id)
        return max(known or 0, num_running)

    def _heard_names(self) -> Iterator[str]:
        return (replica_id.unique_id for replica_id in self.curr_replicas if replica_id not in self._unheard)

    def on_new_queue_len_info(self, replica_id: ReplicaID, num_ongoing_requests: int) -> None:
        super().on_new_queue_len_info(replica_id, num_ongoing_requests)
        self._note_queue(replica_id)

    def on_send_request(self, replica_id: ReplicaID) -> None:
        if self.replica_queue_len_cache.get(replica_id) is None and self._running[replica_id]:
            self.replica_queue_len_cache.update(replica_id, self._running[replica_id])
        super().on_send_request(replica_id)
        self._running[replica_id] += 1
        self._note_queue(replica_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Note the end of a request that was sent."""
        if self._running[replica_id] > 1:
            self._running[replica_id] -= 1
        else:
            del self._running[replica_id]
        self._note_queue(replica_id)

    def decrement_queue_len_cache(self, replica_id: ReplicaID) -> None:
        super().decrement_queue_len_cache(replica_id)
        self._note_queue(replica_id)

    @staticmethod
    def _route(pending_request: PendingRequest | None) -> RouteRequest:
        argument = pending_request.args[0] if pending_request is not None and pending_request.args else None
        route = getattr(argument, "route", None)
        return route if isinstance(route, RouteRequest) else RouteRequest()

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        self.policy.on_routed(self._route(pending_request), replica_id.unique_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._forget(replica_id)

    def _forget(self, replica_id: ReplicaID) -> None:
        self.policy.on_removed(replica_id.unique_id)
        self._running.pop(replica_id, None)
        self._unheard.discard(replica_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        self._by_name = {replica.replica_id.unique_id: replica for replica in replicas}
        for replica_id in list(self.curr_replicas):
            if replica_id.unique_id not in self._by_name:
                self._forget(replica_id)
        self._unheard |= {replica.replica_id for replica in replicas} - self.curr_replicas.keys()
        super().update_replicas(replicas)
        self._synchronize()
