"""Requests to one replica, past the gateway."""

from ray import serve

from choreograph import SamplingParams
from choreograph.cluster.content_keys import segment_key
from choreograph.cluster.replica import ReplicaCall, ReplicaError
from choreograph.cluster.routing import RouteRequest
from choreograph.namespace import Client
from choreograph.outputs import BASE_MODEL
from choreograph.server.openai.chat_prompt import ChatPrompt, Segment
from choreograph.server.reuse.message_store import WorkflowKey
from choreograph.server.running_request import GenerationSpec

HEADER = [901, 902]


def messages(start):
    """Return two messages of 96 tokens."""
    return [Segment(tuple(range(first, first + 96))) for first in (start, start + 200)]


def spec_of(*segments, model=BASE_MODEL):
    tokens = [token for segment in segments for token in segment.tokens] + HEADER
    key = WorkflowKey(Client("team"), "travel", model)
    sampling = SamplingParams(max_tokens=6, temperature=0.0)
    return GenerationSpec(key, "messages", [ChatPrompt(tokens, list(segments), HEADER)], sampling)


async def items_of(spec, replica, source=None, version=None):
    """Run a request on a replica; return what it sends. The source has the messages of the base."""
    keys = [segment_key(spec, segment, BASE_MODEL) for segment in spec.prompts[0].segments]
    route = RouteRequest(pinned=replica, sources={key: [source] for key in keys if source})
    handle = serve.get_deployment_handle("engine", "choreograph").options(method_name="generate", stream=True)
    return [item async for item in handle.remote(ReplicaCall(route, spec, version=version))]


async def generate(spec, replica, source=None):
    """Run a request on a replica; return its tokens and counts."""
    name, *items = await items_of(spec, replica, source)
    assert name == replica and not any(isinstance(item, ReplicaError) for item in items)
    return [token for item in items for choice in item.choices for token in choice.token_ids], items[-1].counts
