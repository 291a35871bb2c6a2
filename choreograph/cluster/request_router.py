"""Ray Serve's request router over a `RoutingPolicy`."""

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from .routing import RouteRequest, choose, create_policy


class PolicyRequestRouter(RequestRouter):
    """Sends requests whose first argument has a `route` where its policy says.

    Args of `initialize_state`: `policy`, a name of `POLICIES`, and its options.
    """

    def initialize_state(self, policy: str = "message", **options: Any) -> None:
        self.policy = create_policy(policy, **options)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        queues = {name: self.replica_queue_len_cache.get(replica.replica_id) or 0 for name, replica in by_name.items()}
        if pending_request is not None:  # without this, full replicas are asked again without a pause
            pending_request.routing_context.should_backoff = True
        route = self._route(pending_request)
        names = choose(self.policy, route, queues)
        if route.is_movable:
            route.sources = self.policy.sources(route)
        # ranks of one replica: inside a rank Ray chooses by the queue alone
        return [[by_name[name]] for name in names]

    @staticmethod
    def _route(pending_request: PendingRequest | None) -> RouteRequest:
        argument = pending_request.args[0] if pending_request is not None and pending_request.args else None
        route = getattr(argument, "route", None)
        return route if isinstance(route, RouteRequest) else RouteRequest()

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        self.policy.on_routed(self._route(pending_request), replica_id.unique_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self.policy.on_removed(replica_id.unique_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        names = {replica.replica_id.unique_id for replica in replicas}
        for replica_id in list(self.curr_replicas):
            if replica_id.unique_id not in names:
                self.policy.on_removed(replica_id.unique_id)
        super().update_replicas(replicas)
