"""Two replicas in the test process: one has messages, the other fetches them over a transport that can fail."""

from contextlib import asynccontextmanager
from functools import partial

import numpy as np

from choreograph import SamplingParams
from choreograph.cluster.content_keys import segment_key
from choreograph.cluster.message_transfer import GROUP_BYTES, MessageFetcher, export_messages, run_request
from choreograph.cluster.replica import _Connection
from choreograph.namespace import Client
from choreograph.outputs import BASE_MODEL
from choreograph.server.app import create_app
from choreograph.server.openai.chat_prompt import ChatPrompt, Segment
from choreograph.server.reuse.message_store import WorkflowKey
from choreograph.server.running_request import GenerationSpec
from choreograph.server.server_config import ServerConfig
from helpers.live_server import make_engine

from .inspect_engine import inspect


def message(seed, length=48):
    return Segment(tuple(np.random.default_rng(seed).integers(100, 5000, length).tolist()))


async def updates_of(running):
    """Return all updates of a request with one answer."""
    return [update async for updates in running.updates() for update in updates]


def spec_of(*segments, client="team", workflow="debate", model=BASE_MODEL, labels=frozenset()):
    header = [901, 902]
    tokens = [token for segment in segments for token in segment.tokens] + header
    key = WorkflowKey(Client(client), workflow, model, labels)
    prompt = ChatPrompt(tokens, list(segments), header)
    sampling = SamplingParams(max_tokens=6, temperature=0.0)
    return GenerationSpec(key, "messages", [prompt], sampling, keys_of=lambda text: [text])


class Pair:
    """A replica that has messages, and one that fetches them."""

    def __init__(self, make_engine, mode="always", group_bytes=GROUP_BYTES):
        config = ServerConfig(max_tokens=16)
        self.source, self.reader = (create_app(make_engine(), config).state.service for _ in range(2))
        self.queries = []
        self.fetcher = MessageFetcher(self.reader, self.ask, "reader", mode, group_bytes)
        self.change = lambda groups: groups  # what happens to messages on their way
        self.num_groups = 0

    async def ask(self, source, query):
        assert source == query.route.pinned == "source"
        self.queries.append(query)
        async for group in self.change(export_messages(self.source, query)):
            self.num_groups += 1
            yield group

    async def run(self, service, spec):
        """Return tokens and counts of an answer; the reader asks the source for every message."""
        if service is self.reader:
            sources = {
                segment_key(spec, segment, model): ["reader", "source"]
                for segment in spec.prompts[0].segments
                for model in service.engine.models
            }
            await self.fetcher.fetch_missing(spec, sources)
        tokens, text = [], ""
        async for running, updates in run_request(service, _Connection(), spec):
            for update in updates:  # those that wait are joined
                tokens, text, counts = tokens + update.token_ids, text + update.text, running.counts
        return tokens, text, counts


def _check_idle(service):
    service.engine.run_until_idle()  # the last tokens of answers
    service.engine.check()
    service.planner.store.check()
    assert not inspect(service.engine).num_unfinished, "a request never ends"
    assert not any(workflow.num_active for workflow in service.planner.store.workflows), "a request was not closed"


def evict_all(service):
    """Free the pages of everything that no request uses; runs in the engine's thread."""
    internals = inspect(service.engine)
    while internals.num_unfinished:  # the last tokens of an answer reference its context
        internals.step()
    for is_partial in (False, True):
        for entry in internals.cache_manager.evictable(partial=is_partial):
            internals.cache_manager.evict_entry(entry)


@asynccontextmanager
async def pair(folder, mode="always", group_bytes=GROUP_BYTES, make_engine=make_engine):
    result = Pair(partial(make_engine, folder), mode, group_bytes)
    for service in (result.source, result.reader):
        service.start()
    try:
        yield result
        for service in (result.source, result.reader):
            await service.thread.call(partial(_check_idle, service))
    finally:
        for service in (result.source, result.reader):
            await service.stop()
            service.engine.close()
