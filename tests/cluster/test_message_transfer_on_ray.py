"""Messages are transferred through Ray's object store, also where the replica that has them stops or dies."""

import asyncio
import os
import signal
import time

import pytest
from helpers.replica_calls import generate, items_of, messages, spec_of
from ray import serve

from choreograph.cluster.message_transfer import MessageQuery
from choreograph.cluster.routing import RouteRequest
from choreograph.kv_cache.container import Header

pytestmark = pytest.mark.slow


async def loads():
    """Return the state of both replicas, once there are two."""
    handle, end = serve.get_deployment_handle("engine", "choreograph"), time.monotonic() + 120
    while True:
        results = await handle.broadcast("load").results_async(timeout_s=60, return_exceptions=True)
        if len(results) == 2 and not any(isinstance(load, Exception) for load in results):
            return results
        assert time.monotonic() < end
        await asyncio.sleep(0.5)


async def num_batched(name):
    return next(load.stats.num_batched_tokens for load in await loads() if load.name == name)


async def test_a_replica_takes_messages_of_another_one(ray_cluster):
    source, reader = (load.name for load in await loads())
    expected, _ = await generate(spec_of(*messages(1000)), source)
    before = await num_batched(reader)
    tokens, counts = await generate(spec_of(*messages(1000)), reader, source)
    assert (counts.remote, counts.computed, tokens) == (192, 2, expected)
    assert await num_batched(reader) - before < 20


async def test_a_model_reuses_layers_of_what_another_replica_has_computed_with_the_base(ray_cluster):
    source, reader = (load.name for load in await loads())
    await generate(spec_of(*messages(6000)), source)
    asked = spec_of(*messages(6000), model="math")
    expected, counts = await generate(asked, source)
    assert (counts.other_model, counts.computed) == (192, 2)
    tokens, counts = await generate(asked, reader, source)
    assert (counts.remote, counts.computed, tokens) == (192, 2, expected)


async def test_layers_pass_through_ray_in_groups(ray_cluster):
    source, spec = (await loads())[0].name, spec_of(*messages(5000))
    await generate(spec, source)
    contents = [segment.tokens for segment in spec.prompts[0].segments]
    handle = serve.get_deployment_handle("engine", "choreograph").options(method_name="export", stream=True)
    query = MessageQuery(RouteRequest(pinned=source), spec.key, contents, group_bytes=1)
    first, *groups = [group async for group in handle.remote(query)]
    header = Header.parse(first.header, "what came", "")
    assert [entry.tokens for entry in header.entries] == [list(tokens) for tokens in contents]
    for number, group in enumerate([first, *groups]):
        infos = [header.blocks[header.verify(block).number] for block in group.blocks]
        layers = [(info.entry, info.layer) for info in infos if "keys" in info.kinds]
        assert layers == [(0, number), (1, number)]
    assert groups and not any(group.header for group in groups)


async def test_a_replica_that_dies_while_it_is_asked_for_messages_ends_in_computing(ray_cluster):
    source, reader = await loads()
    expected, _ = await generate(spec_of(*messages(2000)), source.name)
    os.kill(source.process_id, signal.SIGSTOP)  # it is asked, and does not answer
    task = asyncio.create_task(generate(spec_of(*messages(2000)), reader.name, source.name))
    await asyncio.sleep(1.0)
    assert not task.done()
    os.kill(source.process_id, signal.SIGKILL)
    tokens, counts = await task
    assert (counts.remote, counts.computed, tokens) == (0, 194, expected)


async def test_a_replica_refuses_requests_that_were_prepared_for_another_model(ray_cluster):
    name = (await loads())[0].name
    _, error = await items_of(spec_of(*messages(3000)), name, version="another")
    assert error.status == 503 and error.is_retryable
