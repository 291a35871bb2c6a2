"""An interrupt between two lines that belong together waits for the end of the step; one in the model does not."""

import asyncio
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers import tiny_models
from helpers.inspect_engine import inspect

from choreograph import SamplingParams
from choreograph.core.core import EngineCore
from choreograph.core.lifecycle import Lifecycle
from choreograph.core.scheduler import Scheduler
from choreograph.kv_cache.manager import KVCacheManager
from choreograph.models.hf_model import HFModel
from choreograph.utils import DeferSigintLock, allow_sigint

pytestmark = pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(), reason="signals come to the main thread alone"
)


def is_free(lock: DeferSigintLock) -> bool:
    """Return whether another thread gets the lock."""

    def take() -> bool:
        acquired = lock.acquire(blocking=False)
        if acquired:
            lock.release()
        return acquired

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(take).result()


LONG = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


@pytest.fixture(autouse=True)
def handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler, "the handler is put back"


def interrupted(work: Callable) -> Callable:
    """The same, with Ctrl+C before it and after it."""

    def both(*given, **named):
        signal.raise_signal(signal.SIGINT)
        result = work(*given, **named)
        signal.raise_signal(signal.SIGINT)
        return result

    return both


def test_an_interrupt_waits_until_the_lock_is_given_back():
    lock, other, seen = DeferSigintLock(), DeferSigintLock(), []

    def work() -> None:
        with lock:
            with lock, other:
                signal.raise_signal(signal.SIGINT)
                seen.append("still here")
            seen.append("and here")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert seen == ["still here", "and here"] and is_free(lock) and is_free(other)


def test_an_event_loop_hears_of_an_interrupt_once():
    heard = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, lambda: heard.append(1))
        with DeferSigintLock():
            signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(0.05)
        loop.remove_signal_handler(signal.SIGINT)

    asyncio.run(main())
    assert heard == [1]


def test_an_interrupt_outside_of_bookkeeping_is_immediate():
    lock, seen = DeferSigintLock(), []

    def work() -> None:
        with lock:
            with allow_sigint(), allow_sigint():
                signal.raise_signal(signal.SIGINT)
            seen.append("never")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert not seen and is_free(lock)


def test_who_waits_for_another_thread_can_be_interrupted():
    lock, held, done = DeferSigintLock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            done.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(20)
    killer = threading.Timer(0.1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    killer.start()
    began = time.perf_counter()
    with pytest.raises(KeyboardInterrupt), lock:
        pass
    assert time.perf_counter() - began < 10
    assert not lock.acquire(blocking=False) and not lock.acquire(timeout=0.01)
    done.set()
    thread.join()
    assert lock.acquire()
    lock.release()


def test_sleep_lets_others_in_and_interrupts_through():
    lock = DeferSigintLock()
    threading.Timer(0.05, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt), lock, lock:
        lock.sleep(20)
    assert is_free(lock)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Scheduler, "commit"),
        (EngineCore, "_append_token"),
        (Lifecycle, "finish_generation"),
        (KVCacheManager, "free_unused_pages"),
    ],
)
def test_a_step_that_is_interrupted_is_whole(owner, name, monkeypatch):
    """Each of these stands between lines that belong together: before, an engine was broken by it."""

    def said(engine) -> list[list[int]]:
        with engine.session(seed=1) as session:
            root = session.prefill(list(range(20)))
            parts = [session.decode([30 + i], [root], sampling=LONG, footer=[7]) for i in range(2)]
            last = session.decode([9], [parts[1], root], sampling=LONG)
            while not last.done:
                try:
                    engine.step()
                except KeyboardInterrupt:
                    count.append(1)
                engine.check()
            return [message.tokens for message in (*parts, last)]

    count: list[int] = []
    want = said(tiny_models.engine())
    engine = tiny_models.engine()
    monkeypatch.setattr(owner, name, interrupted(getattr(owner, name)))
    assert said(engine) == want and count


def test_an_interrupted_model_is_its_owners_as_before(monkeypatch):
    engine = tiny_models.engine()
    model = inspect(engine).model
    before, forward = model.config._attn_implementation, type(model).forward
    with engine.session() as session:
        message = session.prefill([1, 2, 3])
        for where, name in ((type(model), "forward"), (HFModel, "logits")):
            with monkeypatch.context() as patch:
                patch.setattr(where, name, interrupted(getattr(where, name)))
                with pytest.raises(KeyboardInterrupt):
                    message.result()
            assert model.config._attn_implementation == before and type(model).forward is forward
        message.result()
    engine.check()
