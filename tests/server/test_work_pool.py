"""Worker threads: results, turns among tenants, cancellation and panics."""

import asyncio
import threading

import pytest

from choreograph.errors import RequestFailedError
from choreograph.server.work_pool import SMALL_BYTES, WorkPool


@pytest.fixture
def pool():
    result = WorkPool()
    yield result
    result.close()


class Gate:
    """Work that waits until it is opened, and notes who ran."""

    def __init__(self):
        self.opened, self.ran = threading.Event(), []

    def work(self, name):
        def run():
            assert self.opened.wait(30)
            self.ran.append(name)
            return name

        return run


async def test_results_and_errors_are_returned(pool):
    assert await pool.run("a", 0, lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        await pool.run("a", 0, lambda: 1 / 0)


async def test_small_work_does_not_wait_for_large_work(pool):
    gate = Gate()
    large = [asyncio.create_task(pool.run("a", SMALL_BYTES + 1, gate.work(i))) for i in range(3)]
    await asyncio.sleep(0)
    assert await pool.run("a", SMALL_BYTES, lambda: "small") == "small"
    gate.opened.set()
    assert await asyncio.gather(*large) == [0, 1, 2]


async def test_tenants_take_turns_in_the_work_pool(pool):
    gate = Gate()
    tasks = [asyncio.create_task(pool.run("busy", SMALL_BYTES + 1, gate.work(f"busy {i}"))) for i in range(6)]
    await asyncio.sleep(0.05)
    tasks += [asyncio.create_task(pool.run("other", SMALL_BYTES + 1, gate.work(f"other {i}"))) for i in range(2)]
    await asyncio.sleep(0.05)
    gate.opened.set()
    await asyncio.gather(*tasks)
    assert gate.ran.index("other 0") <= 2 and gate.ran.index("other 1") <= 4


async def test_work_whose_caller_left_frees_its_thread_when_it_ends(pool):
    gate = Gate()
    tasks = [asyncio.create_task(pool.run("a", SMALL_BYTES + 1, gate.work(i))) for i in range(4)]
    await asyncio.sleep(0.05)
    for task in tasks[:3]:  # one that runs, two that wait
        task.cancel()
    await asyncio.sleep(0.05)
    assert not tasks[3].done()
    gate.opened.set()
    assert await tasks[3] == 3
    assert gate.ran == [0, 3]
    assert await pool.run("a", SMALL_BYTES + 1, lambda: "next") == "next"


async def test_a_panic_of_a_library_is_an_ordinary_error(pool):
    class Panic(BaseException):
        pass

    def panic():
        raise Panic("index out of bounds")

    with pytest.raises(RequestFailedError, match="Panic: index out of bounds"):
        await pool.run("a", 0, panic)
    assert await pool.run("a", 0, lambda: 1) == 1
