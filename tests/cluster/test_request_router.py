"""Ray's request router over a policy, with replicas that only have a name; no Ray runs."""

from types import SimpleNamespace

import pytest

pytest.importorskip("ray")

from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID
from ray.serve.request_router import PendingRequest

from choreograph.cluster.request_router import PolicyRequestRouter
from choreograph.cluster.routing import RouteRequest


class NamedReplica:
    def __init__(self, name):
        self.replica_id = ReplicaID(unique_id=name, deployment_id=DeploymentID(name="engine", app_name="test"))
        self.max_ongoing_requests = 8

    async def get_queue_len(self, *, deadline_s):
        return 0


def router_of(*replicas):
    router = PolicyRequestRouter(
        DeploymentID(name="engine", app_name="test"), DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True
    )
    router.initialize_state(policy="message", slack=0)
    router.update_replicas(list(replicas))
    return router


def pending(route):
    return PendingRequest(args=[SimpleNamespace(route=route)], kwargs={}, metadata=SimpleNamespace())


async def first_choice(router, route):
    ranks = await router.choose_replicas(list(router.curr_replicas.values()), pending(route))
    assert all(len(rank) == 1 for rank in ranks)
    return ranks[0][0].replica_id.unique_id


async def test_lengths_of_queues_follow_what_ray_counts():
    a, b = NamedReplica("a"), NamedReplica("b")
    router = router_of(a, b)
    assert router.policy.queues == {"a": 0, "b": 0}
    router.on_new_queue_len_info(a.replica_id, 5)
    router.on_new_queue_len_info(b.replica_id, 0)
    router.on_send_request(a.replica_id)
    assert router.policy.queues == {"a": 6, "b": 0}
    router.decrement_queue_len_cache(a.replica_id)
    assert router.policy.queues == {"a": 5, "b": 0}
    assert await first_choice(router, RouteRequest({1: 10})) == "b"
    router.policy.check()


async def test_a_request_goes_to_the_replica_that_was_routed_its_messages():
    a, b = NamedReplica("a"), NamedReplica("b")
    router = router_of(a, b)
    router.on_request_routed(pending(RouteRequest({1: 1000})), b.replica_id, None)
    route = RouteRequest({1: 1000, 2: 10}, is_movable=True)
    assert await first_choice(router, route) == "b"
    assert route.sources == {1: ["b"]}


async def test_replicas_that_die_or_are_stopped_are_forgotten_and_new_ones_are_chosen():
    a, b, c = (NamedReplica(name) for name in "abc")
    router = router_of(a, b)
    router.on_request_routed(pending(RouteRequest({1: 1000})), a.replica_id, None)
    router.on_replica_actor_died(a.replica_id)
    assert await first_choice(router, RouteRequest({1: 1000})) == "b"
    router.on_new_queue_len_info(a.replica_id, 3)  # late news of a replica that is gone
    router.update_replicas([c])
    assert router.policy.queues == {"c": 0}
    assert await first_choice(router, RouteRequest({1: 1000}, pinned="a")) == "c"


async def test_lengths_that_probes_changed_are_read_when_replicas_are_chosen():
    a, b = NamedReplica("a"), NamedReplica("b")
    router = router_of(a, b)
    router.on_new_queue_len_info(a.replica_id, 8)
    router.replica_queue_len_cache.update(a.replica_id, 0)  # as a probe does
    await first_choice(router, RouteRequest())
    assert router.policy.queues["a"] == 0


def forget(router, *replicas):
    """Let Ray's lengths of queues expire."""
    for replica in replicas:
        router.replica_queue_len_cache.invalidate_key(replica.replica_id)


async def test_a_length_that_ray_has_forgotten_is_that_of_the_requests_that_run():
    a, b = NamedReplica("a"), NamedReplica("b")
    router = router_of(a, b)
    for replica, length in ((a, 0), (b, 2)):
        router.on_new_queue_len_info(replica.replica_id, length)
    for _ in range(4):
        router.on_send_request(a.replica_id)
    forget(router, a)
    assert await first_choice(router, RouteRequest()) == "b"
    router.on_send_request(a.replica_id)  # Ray alone would count from zero
    assert router.policy.queues["a"] == router.replica_queue_len_cache.get(a.replica_id) == 5
    forget(router, a)
    for number in range(4):
        router.on_request_completed(a.replica_id, str(number))
    assert router.policy.queues["a"] == 1
    assert await first_choice(router, RouteRequest()) == "a"
    router.policy.check()


async def test_a_replica_that_never_told_its_length_is_neither_first_nor_last():
    a, b, c = (NamedReplica(name) for name in "abc")
    router = router_of(a, b)
    router.on_new_queue_len_info(a.replica_id, 1)
    router.on_new_queue_len_info(b.replica_id, 5)
    router.update_replicas([a, b, c])
    assert router.policy.queues == {"a": 1, "b": 5, "c": 3}
    assert await first_choice(router, RouteRequest()) == "a"
    router.replica_queue_len_cache.update(c.replica_id, 0)  # as the probe of a new replica does
    assert await first_choice(router, RouteRequest()) == "c"
    forget(router, c)  # it is idle since: nothing was sent there
    assert await first_choice(router, RouteRequest()) == "c"


async def test_requests_of_a_replica_that_died_are_not_counted_for_its_successor():
    a, b = NamedReplica("a"), NamedReplica("b")
    router = router_of(a)
    router.on_send_request(a.replica_id)
    router.on_replica_actor_died(a.replica_id)
    router.on_request_completed(a.replica_id, "1")  # late news
    router.update_replicas([b])
    assert router.policy.queues == {"b": 0}
