"""Messages that travel between replicas: two engines in this process, and a transport that can fail."""

import asyncio
import dataclasses
from contextlib import asynccontextmanager

import numpy as np
import pytest

pytest.importorskip("ray")

from helpers.live_server import make_engine

from choreograph import SamplingParams
from choreograph.cluster import message_transfer
from choreograph.cluster.content_keys import segment_key
from choreograph.cluster.message_transfer import MessageFetcher, SentMessage, TransferCosts, export_messages
from choreograph.cluster.replica import _Connection
from choreograph.outputs import BASE_MODEL
from choreograph.server.app import create_app
from choreograph.server.chat_prompt import ChatPrompt, Segment
from choreograph.server.message_store import WorkflowKey
from choreograph.server.server_config import ServerConfig
from choreograph.server.service import GenerationSpec


def message(seed, length=48):
    return Segment(tuple(np.random.default_rng(seed).integers(100, 5000, length).tolist()))


def spec_of(*segments, client="team", workflow="debate", labels=frozenset()):
    header = [901, 902]
    tokens = [token for segment in segments for token in segment.tokens] + header
    key = WorkflowKey(client, workflow, BASE_MODEL, labels)
    prompt = ChatPrompt(tokens, list(segments), header)
    sampling = SamplingParams(max_tokens=6, temperature=0.0)
    return GenerationSpec(key, "messages", [prompt], sampling, keys_of=lambda text: [text])


class Pair:
    """A replica that has messages, and one that fetches them."""

    def __init__(self, folder, mode="always"):
        config = ServerConfig(max_tokens=16)
        self.source, self.reader = (create_app(make_engine(folder), config).state.service for _ in range(2))
        self.queries = []
        self.fetcher = MessageFetcher(self.reader, self.ask, "reader", mode)
        self.change = lambda sent: sent  # what happens to messages on their way

    async def ask(self, source, query):
        assert source == query.route.pinned == "source"
        self.queries.append(query)
        changed = self.change(await export_messages(self.source, query))
        return await changed if asyncio.iscoroutine(changed) else changed

    async def run(self, service, spec):
        """Return tokens and counts of an answer; the reader asks the source for every message."""
        if service is self.reader:
            sources = {segment_key(spec, segment): ["reader", "source"] for segment in spec.prompts[0].segments}
            await self.fetcher.fetch_missing(spec, sources)
        running = service.submit(_Connection(), spec)
        updates = (await running.complete())[0]
        tokens = [token for update in updates for token in update.token_ids]
        return tokens, "".join(update.text for update in updates), running.counts


@asynccontextmanager
async def pair(folder, mode="always"):
    result = Pair(folder, mode)
    for service in (result.source, result.reader):
        service.start()
    try:
        yield result
        for service in (result.source, result.reader):
            await service.thread.call(service.engine.check)
            await service.thread.call(service.planner.store.check)
    finally:
        for service in (result.source, result.reader):
            await service.stop()
            service.engine.close()


async def test_messages_from_another_replica_give_the_tokens_of_one_process(talker_folder):
    async with pair(talker_folder) as replicas:
        first, second, question = message(1), message(2), message(3, 20)
        _, text, _ = await replicas.run(replicas.source, spec_of(first, second))
        answer = Segment((7, 8, 9), text)  # found by its text
        reordered = spec_of(second, answer, first, question)  # at other positions
        tokens, _, counts = await replicas.run(replicas.reader, reordered)
        num_computed = replicas.reader.engine.stats().num_batched_tokens
        expected, _, own = await replicas.run(replicas.source, reordered)
        assert tokens == expected and len(tokens) == 6
        assert (counts.remote, counts.computed) == (own.message + own.prefix, own.computed)
        assert counts.remote > 96 and num_computed < 40
        again, _, counts = await replicas.run(replicas.reader, reordered)
        assert again == expected and len(replicas.queries) == 1 and counts.remote > 96


async def test_what_the_other_replica_lacks_is_computed(talker_folder):
    async with pair(talker_folder) as replicas:
        first, second = message(1), message(2)
        await replicas.run(replicas.source, spec_of(first))
        tokens, _, counts = await replicas.run(replicas.reader, spec_of(first, second))
        assert (counts.remote, counts.computed) == (48, 50)
        assert tokens == (await replicas.run(replicas.source, spec_of(first, second)))[0]


async def test_another_tenant_workflow_or_label_receives_nothing(talker_folder):
    async with pair(talker_folder) as replicas:
        first = message(1)
        await replicas.run(replicas.source, spec_of(first))
        for other in ({"client": "others"}, {"workflow": "w"}, {"labels": frozenset({"private"})}):
            _, _, counts = await replicas.run(replicas.reader, spec_of(first, **other))
            assert replicas.queries.pop() and (counts.remote, counts.computed) == (0, 50)


async def test_a_received_message_that_was_evicted_is_computed_in_the_context_of_its_request(talker_folder):
    async with pair(talker_folder) as replicas:
        first, second = message(1), message(2)
        await replicas.run(replicas.source, spec_of(first, second))
        await replicas.run(replicas.reader, spec_of(second))
        core, key = replicas.reader.engine.core, spec_of(second).key
        stored = replicas.reader.planner.store.find(key, (second.tokens, 0))
        await replicas.reader.thread.call(lambda: core.cache_manager.evict_entry(stored.message._request.entry))
        replicas.change = gone
        tokens, _, counts = await replicas.run(replicas.reader, spec_of(first, second))
        assert (counts.remote, counts.computed) == (0, 98)
        assert tokens == (await replicas.run(replicas.source, spec_of(first, second)))[0]


def damaged(sent, position):
    """Return messages with one byte of one array changed."""
    arrays = [array.copy() for array in sent[0].arrays]
    arrays[position].flat[5] ^= 1
    return [dataclasses.replace(sent[0], arrays=arrays)]


async def slow(sent):
    await asyncio.sleep(60)
    return sent


def gone(sent):
    raise ConnectionError("the replica is gone")


FAILURES = {
    "corrupted keys": lambda sent: damaged(sent, 0),
    "corrupted values": lambda sent: damaged(sent, -1),
    "corrupted tokens": lambda sent: [dataclasses.replace(sent[0], tokens=[5, *sent[0].tokens[1:]])],
    "truncated array": lambda sent: [dataclasses.replace(sent[0], arrays=[a[:-1] for a in sent[0].arrays])],
    "truncated layers": lambda sent: [dataclasses.replace(sent[0], arrays=sent[0].arrays[:-2])],
    "another model": lambda sent: [
        SentMessage.of(sent[0].content_keys, sent[0].tokens, sent[0].to_snapshot()._replace(model_hash="other"))
    ],
    "fewer layers": lambda sent: [
        SentMessage.of(
            sent[0].content_keys,
            sent[0].tokens,
            sent[0].to_snapshot()._replace(layers=sent[0].to_snapshot().layers[1:]),
        )
    ],
    "slow": slow,
    "dead": gone,
}


async def test_failed_transfers_end_in_computing(talker_folder, monkeypatch):
    monkeypatch.setattr(message_transfer, "TIMEOUT", 0.3)
    async with pair(talker_folder) as replicas:
        for number, change in enumerate(FAILURES.values()):
            spec = spec_of(message(number))
            expected = (await replicas.run(replicas.source, spec))[0]
            replicas.change = change
            tokens, _, counts = await replicas.run(replicas.reader, spec)
            assert (counts.remote, counts.computed, tokens) == (0, 50, expected)
            assert replicas.fetcher.num_failures == number + 1


async def test_two_requests_fetch_a_message_once(talker_folder):
    async with pair(talker_folder) as replicas:
        spec = spec_of(message(1))
        await replicas.run(replicas.source, spec)
        results = await asyncio.gather(*(replicas.run(replicas.reader, spec) for _ in range(3)))
        assert [counts.remote for _, _, counts in results] == [48] * 3 and len(replicas.queries) == 1


def test_the_faster_of_computing_and_receiving_is_chosen_and_measured_again():
    costs = TransferCosts()
    assert not costs.is_worth_fetching(10) and costs.is_worth_fetching(100)  # nothing is measured
    costs.observe_computing(100, 1.0)
    costs.observe_receiving(100, 0.5)
    assert costs.is_worth_fetching(100) and costs.timeout(100) == 2.0
    costs.observe_receiving(100, 20.0)
    choices = [costs.is_worth_fetching(100) for _ in range(40)]
    assert not choices[0] and choices[-1]
    assert TransferCosts().timeout(100) == 5.0


async def test_short_messages_and_other_modes_are_not_fetched(talker_folder):
    async with pair(talker_folder, "auto") as replicas:
        await replicas.run(replicas.source, spec_of(message(1)))
        await replicas.run(replicas.reader, spec_of(message(1)))
        exact = dataclasses.replace(spec_of(message(2, 100)), reuse="exact")
        await replicas.run(replicas.reader, exact)
        assert not replicas.queries
