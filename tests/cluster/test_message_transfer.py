"""Messages that travel between replicas: two engines in this process, and a transport that can fail."""

import asyncio
import dataclasses
import random
import threading
from functools import partial

import pytest

pytest.importorskip("ray")

from helpers.inspect_engine import inspect
from helpers.replica_pair import evict_all, message, pair, spec_of
from helpers.transfer_failures import BY_LAYER, FAILURES, HEADER_FAILURES, gone

from choreograph import SamplingParams
from choreograph.cluster import message_transfer
from choreograph.cluster.message_transfer import TransferCosts
from choreograph.server.openai.chat_prompt import Segment


@BY_LAYER
async def test_messages_from_another_replica_give_the_tokens_of_one_process(talker_folder, group_bytes):
    async with pair(talker_folder, group_bytes=group_bytes) as replicas:
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
        await replicas.reader.thread.call(partial(evict_all, replicas.reader))
        replicas.change = gone
        tokens, _, counts = await replicas.run(replicas.reader, spec_of(first, second))
        assert (counts.remote, counts.computed) == (0, 98)
        assert tokens == (await replicas.run(replicas.source, spec_of(first, second)))[0]


@BY_LAYER
async def test_a_received_message_that_was_evicted_is_received_again(talker_folder, group_bytes):
    async with pair(talker_folder, group_bytes=group_bytes) as replicas:
        expected, _, _ = await replicas.run(replicas.source, spec_of(message(1)))
        for _ in range(3):
            tokens, _, counts = await replicas.run(replicas.reader, spec_of(message(1)))
            assert (tokens, counts.remote, counts.computed) == (expected, 48, 2)
            await replicas.reader.thread.call(partial(evict_all, replicas.reader))


@BY_LAYER
async def test_failed_transfers_end_in_computing(talker_folder, monkeypatch, group_bytes):
    monkeypatch.setattr(message_transfer, "TIMEOUT", 0.5)
    async with pair(talker_folder, group_bytes=group_bytes) as replicas:
        replicas.change = gone
        await replicas.run(replicas.reader, spec_of(message(90)))
        for number, (name, change) in enumerate((HEADER_FAILURES | FAILURES).items()):
            spec = spec_of(message(90), message(number))  # the last one is encoded after another
            expected = (await replicas.run(replicas.source, spec))[0]
            replicas.change = change
            tokens, _, counts = await replicas.run(replicas.reader, spec)
            assert (counts.remote, counts.computed, tokens) == (0, 50, expected), name
            assert replicas.fetcher.num_failures == number + 2, name


@BY_LAYER
async def test_what_arrives_twice_is_used_once(talker_folder, group_bytes):
    async def repeated(groups):
        async for group in groups:
            yield group
            yield group

    async with pair(talker_folder, group_bytes=group_bytes) as replicas:
        expected = (await replicas.run(replicas.source, spec_of(message(1))))[0]
        replicas.change = repeated
        tokens, _, counts = await replicas.run(replicas.reader, spec_of(message(1)))
        assert (tokens, counts.remote, counts.computed) == (expected, 48, 2)
        assert replicas.fetcher.num_failures == 0


async def test_a_step_begins_before_all_layers_are_there(talker_folder):
    async with pair(talker_folder, group_bytes=1) as replicas:
        spec = spec_of(message(1), message(2))
        expected = (await replicas.run(replicas.source, spec))[0]
        num_ready, reader = [], inspect(replicas.reader.engine)

        async def after_the_request_is_admitted(groups):
            yield await anext(groups)
            while not reader.running:
                await asyncio.sleep(0.005)
            num_ready.append(reader.offload_manager.num_loads)
            async for group in groups:
                yield group

        replicas.change = after_the_request_is_admitted
        tokens, _, counts = await replicas.run(replicas.reader, spec)
        assert (tokens, counts.remote, counts.computed) == (expected, 96, 2)
        assert num_ready == [2] and replicas.num_groups == reader.hf_model.model_info.layers > 1


async def test_running_requests_go_on_while_layers_are_on_their_way(talker_folder, monkeypatch):
    monkeypatch.setattr(message_transfer, "TIMEOUT", 60.0)
    async with pair(talker_folder, group_bytes=1) as replicas:
        await replicas.run(replicas.source, spec_of(message(1)))
        reader, running_has_ended = inspect(replicas.reader.engine), asyncio.Event()

        async def after_the_running_request(groups):
            yield await anext(groups)
            await running_has_ended.wait()
            async for group in groups:
                yield group

        sampling = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
        long = dataclasses.replace(spec_of(message(2)), sampling=sampling)
        running = asyncio.create_task(replicas.run(replicas.reader, long))
        while not reader.running:
            await asyncio.sleep(0.005)
        replicas.change = after_the_running_request
        waiting = asyncio.create_task(replicas.run(replicas.reader, spec_of(message(1))))
        tokens, *_ = await running
        running_has_ended.set()
        _, _, counts = await waiting
        assert len(tokens) == 100 and (counts.remote, counts.computed) == (48, 2)


async def test_requests_that_read_a_message_that_does_not_arrive_compute_it(talker_folder):
    async with pair(talker_folder, group_bytes=1) as replicas:
        first, second, third = message(1), message(2), message(3)
        await replicas.run(replicas.source, spec_of(first, second))
        replicas.change = FAILURES["corrupted keys"]
        # each message has one context, whichever request computes it
        specs = [spec_of(first, second), spec_of(first), spec_of(first, second, third)]
        specs.append(dataclasses.replace(specs[0], repair=0.3))
        results = await asyncio.gather(*(replicas.run(replicas.reader, spec) for spec in specs))
        replicas.change = gone
        expected = [await replicas.run(replicas.source, spec) for spec in specs]
        assert [tokens for tokens, *_ in results] == [tokens for tokens, *_ in expected]
        assert not any(counts.remote for _, _, counts in results)


async def run_random_requests(folder, group_bytes):
    """Return tokens and the number of received ones of requests whose transfers fail at random.

    Their messages are evicted at random. What a request computes itself depends on when a transfer fails: a request that is
    submitted again finds what it has computed before.
    """
    rng, results = random.Random(7), []
    failures = [change for name, change in FAILURES.items() if name != "slow"]
    async with pair(folder, group_bytes=group_bytes) as replicas:
        for _ in range(16):
            spec = spec_of(*(message(number, 16 + 4 * number) for number in rng.sample(range(14), rng.randint(2, 4))))
            replicas.change = rng.choice(failures) if rng.random() < 0.5 else lambda groups: groups
            if rng.random() < 0.8:
                await replicas.run(replicas.source, spec)
            if rng.random() < 0.3:
                await replicas.reader.thread.call(partial(evict_all, replicas.reader))
            tokens, _, counts = await replicas.run(replicas.reader, spec)
            results.append((tokens, counts.remote))
            await replicas.reader.thread.call(replicas.reader.engine.check)
        return results, replicas.fetcher.num_failures


async def test_arrival_by_layer_is_that_of_whole_messages_under_random_failures(talker_folder):
    results, num_failures = await run_random_requests(talker_folder, 1 << 30)
    assert await run_random_requests(talker_folder, 1) == (results, num_failures)
    assert num_failures > 3 and sum(remote > 0 for _, remote in results) > 3


async def test_two_requests_fetch_a_message_once(talker_folder):
    async with pair(talker_folder) as replicas:
        spec = spec_of(message(1))
        await replicas.run(replicas.source, spec)
        results = await asyncio.gather(*(replicas.run(replicas.reader, spec) for _ in range(3)))
        assert [counts.remote for _, _, counts in results] == [48] * 3 and len(replicas.queries) == 1


async def test_a_request_waits_only_for_messages_that_it_reads(talker_folder):
    async with pair(talker_folder) as replicas:
        first, second = spec_of(message(1)), spec_of(message(2))
        await replicas.run(replicas.source, first)
        await replicas.run(replicas.reader, second)
        others_have_ended = asyncio.Event()

        async def late(groups):
            await others_have_ended.wait()
            async for group in groups:
                yield group

        replicas.change = late
        waiting = [asyncio.create_task(replicas.run(replicas.reader, first)) for _ in range(2)]
        while len(replicas.queries) < 2:  # that for the second message had no answer
            await asyncio.sleep(0.005)
        assert (await replicas.run(replicas.reader, second))[2].computed == 2
        assert not any(task.done() for task in waiting)
        others_have_ended.set()
        assert [counts.remote for _, _, counts in await asyncio.gather(*waiting)] == [48, 48]
        assert len(replicas.queries) == 2


async def test_the_wait_for_a_running_step_is_no_part_of_a_transfer(talker_folder, monkeypatch):
    monkeypatch.setattr(message_transfer, "TIMEOUT", 1.0)
    async with pair(talker_folder, group_bytes=1) as replicas:
        spec, step_ends = spec_of(message(1)), threading.Event()
        await replicas.run(replicas.source, spec)
        step = asyncio.create_task(replicas.reader.thread.call(step_ends.wait))
        request = asyncio.create_task(replicas.run(replicas.reader, spec))
        await asyncio.sleep(1.5)
        assert not request.done()
        step_ends.set()
        await step
        assert (await request)[2].remote == 48 and not replicas.fetcher.num_failures
        assert replicas.fetcher.costs.receiving < 1.0 / 48


async def test_complete_messages_are_sent_while_the_source_computes_a_step(talker_folder):
    async with pair(talker_folder) as replicas:
        spec, step_ends = spec_of(message(1), message(2)), threading.Event()
        expected = (await replicas.run(replicas.source, spec))[0]
        step = asyncio.create_task(replicas.source.thread.call(step_ends.wait))
        tokens, _, counts = await replicas.run(replicas.reader, spec)
        assert (tokens, counts.remote) == (expected, 96) and not step.done()
        step_ends.set()
        await step


async def test_a_message_that_is_evicted_while_it_is_copied_is_not_sent(talker_folder, monkeypatch):
    async with pair(talker_folder) as replicas:
        spec = spec_of(message(1), message(2))
        expected = (await replicas.run(replicas.source, spec))[0]
        await replicas.source.thread.call(replicas.source.engine.run_until_idle)  # its last tokens need its context
        source, num_copies = inspect(replicas.source.engine), 0
        export = source.pool.export_layer

        def export_while_others_write(layer, slots):
            nonlocal num_copies
            num_copies += 1
            if num_copies == 2:  # the second layer of the first message: as a step would, which takes the lock
                stored = replicas.source.planner.store.find(spec.key, (message(1).tokens, 0))
                source.cache_manager.evict_entry(inspect(stored.message).entry)
                source.pool.keys[1][slots] = 7.0
            return export(layer, slots)

        monkeypatch.setattr(source.pool, "export_layer", export_while_others_write)
        tokens, _, counts = await replicas.run(replicas.reader, spec)
        assert (tokens, counts.remote) == (expected, 48)


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
