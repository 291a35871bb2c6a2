"""The engine's thread: which requests share its steps."""

import asyncio

from helpers.live_server import make_engine

from choreograph.server import engine_thread
from choreograph.server.engine_thread import EngineThread, Generation


def test_requests_that_arrive_together_share_their_first_step(talker_folder, monkeypatch):
    monkeypatch.setattr(engine_thread, "GATHER_SECONDS", 60)
    engine = make_engine(talker_folder)
    session = engine.session(mode="prefix", seed=0)

    def generation(number):
        return Generation(
            lambda: [session.decode([100 + number], max_tokens=3, ignore_eos=True)], lambda is_complete: None
        )

    async def run():
        thread = EngineThread(engine)
        thread.start(asyncio.get_running_loop())
        generations = [generation(number) for number in range(4)]
        for item in generations:
            thread.submit(item)
            await asyncio.sleep(0)  # the next one is submitted in another turn of the loop
        for item in generations:
            while (await item.updates.get())[-1].finish_reason is None:  # updates that wait are joined
                pass
        await thread.stop()

    asyncio.run(run())
    assert engine.stats().num_steps == 3
    session.close()
    engine.check()


def test_the_first_text_is_sent_before_the_next_step(talker_folder, monkeypatch):
    monkeypatch.setattr(engine_thread, "GATHER_SECONDS", 60)
    engine = make_engine(talker_folder)
    session = engine.session(mode="prefix", seed=0)

    async def run():
        thread = EngineThread(engine)
        thread.start(asyncio.get_running_loop())
        item = Generation(lambda: [session.decode([100], max_tokens=3, ignore_eos=True)], lambda is_complete: None)
        thread.submit(item)
        await item.updates.get()
        for _ in range(4):  # turns of the loop that a server needs to write
            await asyncio.sleep(0)
        assert engine.stats().num_steps == 1
        await thread.stop()

    asyncio.run(run())
    session.close()
    engine.check()


def test_what_follows_a_call_that_gathers_shares_the_next_step(talker_folder, monkeypatch):
    monkeypatch.setattr(engine_thread, "GATHER_SECONDS", 60)
    engine = make_engine(talker_folder)
    session = engine.session(mode="prefix", seed=0)

    async def run():
        thread = EngineThread(engine)
        thread.start(asyncio.get_running_loop())
        item = Generation(lambda: [session.decode([100], max_tokens=60, ignore_eos=True)], lambda is_complete: None)
        thread.submit(item)
        for _ in range(10):
            await item.updates.get()
            num_steps = await thread.call(lambda: engine.stats().num_steps, gather=True)
            for _ in range(4):  # turns of the loop until the next call
                await asyncio.sleep(0)
            assert await thread.call(lambda: engine.stats().num_steps) == num_steps
        assert num_steps < 60
        await thread.stop()

    asyncio.run(run())
    session.close()
    engine.check()
