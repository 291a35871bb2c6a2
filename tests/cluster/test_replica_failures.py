"""Streams and messages outlive the machines and processes that hold them."""

import asyncio
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from helpers.hypothesis_profile import only_thorough
from helpers.near_ties import answers_with_margins
from helpers.replica_calls import generate, messages, spec_of
from helpers.replica_streams import (
    assert_unbroken,
    join,
    read_all,
    read_stream,
    running_loads,
    start_streams,
    wait_for_replicas,
)

pytestmark = pytest.mark.slow

SAMPLED = {"temperature": 0.9, "extra_body": {"ignore_eos": True, "top_k": 8}}  # few candidates: rounding decides less

MARGIN = 1e-4  # of answers that are compared; rounding in another batch changes log-probabilities by less than 1e-5


def ask(number, **options):
    return {"messages": [{"role": "user", "content": f"Describe bridge {number}."}], "temperature": 0} | options


async def test_streams_continue_and_messages_are_computed_after_the_loss_of_a_node(ray_nodes, ray_cluster, single):
    options = [ask(number) for number in range(6)] + [ask(number, seed=5, **SAMPLED) for number in range(2)]
    expected = await asyncio.to_thread(read_all, single, options)
    loads = await asyncio.to_thread(wait_for_replicas)
    node = next(iter(ray_nodes.worker_nodes))
    (raylet,) = [info.process.pid for info in node.all_processes["raylet"]]
    loads.sort(key=lambda load: psutil.Process(load.process_id).ppid() == raylet)
    other, lost = loads
    assert psutil.Process(lost.process_id).ppid() == raylet != psutil.Process(other.process_id).ppid()
    specs = [spec_of(*messages(start)) for start in (4000, 4500)]
    expected_tokens = [(await generate(spec, lost.name))[0] for spec in specs]
    results, events, threads = start_streams(f"{ray_cluster.url}/v1", options)
    for event in events:
        assert await asyncio.to_thread(event.wait, 120)
    (state,) = [load for load in await asyncio.to_thread(running_loads) if load.name == lost.name]
    assert state.stats.num_running > 0
    await asyncio.to_thread(ray_nodes.remove_node, node, allow_graceful=False)
    try:
        tokens, _ = await generate(specs[0], other.name, lost.name)  # its process may answer for a second
        assert tokens == expected_tokens[0]
        await asyncio.to_thread(join, threads)
        assert_unbroken(results, expected)
        tokens, counts = await generate(specs[1], other.name, lost.name)
        assert (counts.remote, tokens) == (0, expected_tokens[1])
    finally:
        ray_nodes.add_node(num_cpus=1, object_store_memory=100 << 20)
    assert lost.name not in [load.name for load in await asyncio.to_thread(wait_for_replicas)]


@pytest.mark.slow
@only_thorough
def test_200_streams_are_unbroken_while_replicas_are_killed_at_random_moments(ray_cluster, talker):
    rng = random.Random(0)
    options = [ask(number, max_tokens=48) for number in range(300)]
    options = [option | (SAMPLED | {"seed": n} if n % 2 else {}) for n, option in enumerate(options)]
    answers = answers_with_margins(talker, options)
    chosen = [n for n, (_, margin) in enumerate(answers) if margin > MARGIN][:200]
    options, expected = [options[n] for n in chosen], [[(answers[n][0], "", "length")] for n in chosen]
    assert len(options) == 200
    killed, results = [], [[] for _ in options]
    is_done = threading.Event()

    def kill():
        moments = sorted(rng.sample(range(400, 8000), 6))  # chunks that clients have
        while moments and not is_done.wait(0.02):
            if sum(map(len, results)) >= moments[0]:
                moments.pop(0)
                replica = rng.choice(wait_for_some())
                os.kill(replica.process_id, signal.SIGKILL)
                killed.append(replica.name)

    def wait_for_some():
        while not (loads := running_loads()):
            time.sleep(0.5)
        return loads

    wait_for_replicas()
    with ThreadPoolExecutor(16) as pool:
        thread = threading.Thread(target=kill)
        thread.start()
        url = f"{ray_cluster.url}/v1"
        list(pool.map(lambda n: read_stream(url, options[n], results[n], threading.Event()), range(200)))
        is_done.set()
        thread.join(120)
    assert_unbroken(results, expected)
    assert len(set(killed)) >= 4
    wait_for_replicas()
