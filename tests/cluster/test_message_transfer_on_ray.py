"""Messages are transferred through Ray's object store, also where the replica that has them stops or dies."""

import asyncio
import os
import signal
import time

from ray import serve

from choreograph import SamplingParams
from choreograph.cluster.content_keys import segment_key
from choreograph.cluster.replica import ReplicaCall, ReplicaError
from choreograph.cluster.routing import RouteRequest
from choreograph.outputs import BASE_MODEL
from choreograph.server.chat_prompt import ChatPrompt, Segment
from choreograph.server.message_store import WorkflowKey
from choreograph.server.service import GenerationSpec

HEADER = [901, 902]


def spec_of(*segments):
    tokens = [token for segment in segments for token in segment.tokens] + HEADER
    key = WorkflowKey("team", "travel", BASE_MODEL)
    sampling = SamplingParams(max_tokens=6, temperature=0.0)
    return GenerationSpec(key, "messages", [ChatPrompt(tokens, list(segments), HEADER)], sampling)


async def generate(spec, replica, source=None):
    """Run a request on a replica; return its tokens and counts."""
    keys = [segment_key(spec, segment) for segment in spec.prompts[0].segments]
    route = RouteRequest(pinned=replica, sources={key: [source] for key in keys if source})
    handle = serve.get_deployment_handle("engine", "choreograph").options(method_name="generate", stream=True)
    items = [item async for item in handle.remote(ReplicaCall(route, spec))]
    assert items.pop(0) == replica and not any(isinstance(item, ReplicaError) for item in items)
    return [token for item in items for choice in item.choices for token in choice.token_ids], items[-1].counts


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


def messages(start):
    return [Segment(tuple(range(first, first + 96))) for first in (start, start + 200)]


async def test_a_replica_takes_messages_of_another_one(ray_cluster):
    source, reader = (load.name for load in await loads())
    expected, _ = await generate(spec_of(*messages(1000)), source)
    before = await num_batched(reader)
    tokens, counts = await generate(spec_of(*messages(1000)), reader, source)
    assert (counts.remote, counts.computed, tokens) == (192, 2, expected)
    assert await num_batched(reader) - before < 20


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
