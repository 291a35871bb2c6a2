"""The engine's thread: which requests share its steps."""

import asyncio

from helpers.live_server import make_engine

from choreograph.server import engine_thread
from choreograph.server.engine_thread import EngineThread, Generation


def run_with_thread(folder, monkeypatch, scenario):
    """Run a coroutine over an engine, its session and its thread; return the engine."""
    monkeypatch.setattr(engine_thread, "GATHER_SECONDS", 60)
    engine = make_engine(folder)
    session = engine.session(mode="prefix", seed=0)

    async def run():
        thread = EngineThread(engine)
        thread.start(asyncio.get_running_loop())
        await scenario(engine, session, thread)
        await thread.stop()

    asyncio.run(run())
    session.close()
    engine.check()
    return engine


def generation_of(session, token, max_tokens):
    return Generation(
        lambda: [session.decode([token], max_tokens=max_tokens, ignore_eos=True)], lambda is_complete: None
    )


def test_requests_that_arrive_together_share_their_first_step(talker_folder, monkeypatch):
    async def scenario(engine, session, thread):
        generations = [generation_of(session, 100 + number, 3) for number in range(4)]
        for item in generations:
            thread.submit(item)
            await asyncio.sleep(0)  # the next one is submitted in another turn of the loop
        for item in generations:
            while (await item.updates.get())[-1].finish_reason is None:  # updates that wait are joined
                pass

    assert run_with_thread(talker_folder, monkeypatch, scenario).stats().num_steps == 3


def test_the_first_text_is_sent_before_the_next_step(talker_folder, monkeypatch):
    async def scenario(engine, session, thread):
        item = generation_of(session, 100, 3)
        thread.submit(item)
        await item.updates.get()
        for _ in range(4):  # turns of the loop that a server needs to write
            await asyncio.sleep(0)
        assert engine.stats().num_steps == 1

    run_with_thread(talker_folder, monkeypatch, scenario)


def test_what_follows_a_call_that_gathers_shares_the_next_step(talker_folder, monkeypatch):
    async def scenario(engine, session, thread):
        item = generation_of(session, 100, 60)
        thread.submit(item)
        for _ in range(10):
            await item.updates.get()
            num_steps = await thread.call(lambda: engine.stats().num_steps, gather=True)
            for _ in range(4):  # turns of the loop until the next call
                await asyncio.sleep(0)
            assert await thread.call(lambda: engine.stats().num_steps) == num_steps
        assert num_steps < 60

    run_with_thread(talker_folder, monkeypatch, scenario)
