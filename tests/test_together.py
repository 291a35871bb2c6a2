"""Programs that share steps: the same results as alone, in a fixed order, and nothing left behind."""

import asyncio
import threading

import pytest
import tiny
from greenlet import GreenletExit, greenlet

from choreograph import SamplingParams
from choreograph.errors import ConfigError
from choreograph.together import together

BRIEF = SamplingParams(max_tokens=8, ignore_eos=True)


def program(engine, number, rounds=3):
    """Some rounds of decodes, each reading the one before, so that the program waits several times."""

    def run():
        with engine.session(seed=number) as s:
            last = s.prefill([1 + number % 7, 2, 3])
            found = []
            for k in range(rounds):
                message = s.decode([4 + k], [last], sampling=SamplingParams(max_tokens=3 + number % 5, logprobs=0))
                found.append(message.generated)
                last = message
            return found

    return run


@pytest.mark.parametrize(("at_once", "calls"), [(1, 1), (3, 2), (20, 128)])
def test_as_if_alone(at_once, calls):
    engine = tiny.engine()
    alone = [program(engine, n)() for n in range(12)]
    found = list(together(engine, (program(engine, n) for n in range(12)), at_once=at_once, calls=calls))
    assert {o.index: o.value for o in found} == dict(enumerate(alone))
    engine.check()


def test_they_share_steps_and_always_the_same_ones():
    def run():
        engine = tiny.engine()
        order = [o.index for o in together(engine, [program(engine, n) for n in range(8)], at_once=4)]
        return order, engine.runner.steps

    (order, steps), again = run(), run()
    assert (order, steps) == again
    engine = tiny.engine()
    for n in range(8):
        program(engine, n)()
    assert steps < engine.runner.steps / 2


def test_what_waits_for_parents_keeps_no_other_program_from_starting():
    def chain(number):
        def run():
            live.add(number)
            most.append(len(live))
            with engine.session(seed=number) as s:
                last = s.prefill([1, 2, 3])
                for k in range(6):  # nothing is read before all are submitted
                    last = s.decode([4 + k], [last], sampling=SamplingParams(max_tokens=4, ignore_eos=True))
                last.result()
            live.discard(number)

        return run

    engine, live, most = tiny.engine(), set(), []
    list(together(engine, map(chain, range(8)), at_once=6, calls=12))
    assert max(most) == 6  # two calls of each can compute, five wait for what another has yet to say


def test_an_error_ends_its_own_program_only():
    engine = tiny.engine()

    def broken():
        with engine.session() as s:
            s.decode([1], sampling=SamplingParams(max_tokens=2)).result()
            raise ValueError("no")

    found = sorted(together(engine, [program(engine, 0), broken, program(engine, 2)]), key=lambda o: o.index)
    assert [type(o.error) for o in found] == [type(None), ValueError, type(None)]
    assert found[2].value == program(engine, 2)()


def test_leaving_early_closes_every_session():
    engine = tiny.engine()
    running = together(engine, [program(engine, n, rounds=6) for n in range(6)], at_once=6)
    next(running)
    running.close()
    engine.drain()
    assert not engine.runner.scheduler.unfinished
    engine.clear_cache()
    engine.check()
    assert program(engine, 1)() == program(engine, 1)()


def test_what_ends_early_may_still_read():
    engine, said = tiny.engine(), []
    alone = read(engine)

    def reads_in_the_end():
        try:
            read(engine)
        finally:
            said.append(read(engine))

    def goes_on():
        for _ in range(3):
            try:
                said.append(read(engine))
            except BaseException as problem:
                said.append(type(problem))

    running = together(engine, [reads_in_the_end, goes_on, reads_in_the_end, lambda: None])
    next(running)
    running.close()
    assert said == [alone, GreenletExit, alone, alone, alone]
    engine.clear_cache()
    engine.check()
    assert list(together(engine, [])) == []


def test_a_program_that_breaks_while_it_ends_keeps_no_other_from_ending():
    engine, ended = tiny.engine(), []

    def breaks():
        try:
            read(engine)
        finally:
            ended.append(len(ended))
            raise ValueError("no")

    running = together(engine, [breaks, breaks, lambda: None])
    next(running)
    with pytest.raises(ValueError, match="no"):
        running.close()
    assert ended == [0, 1] and list(together(engine, [])) == []
    engine.clear_cache()
    engine.check()


def test_leaving_early_comes_back_to_whoever_left():
    engine = tiny.engine()
    running = together(engine, [program(engine, 0), lambda: None])
    next(running)
    leaving = greenlet(running.close)
    leaving.switch()
    assert leaving.dead and list(together(engine, [])) == []


def in_a_loop(engine, number):
    """A program of tasks, which read and await."""

    async def task(k):
        with engine.session(seed=number) as s:
            first = s.decode([7, k], sampling=BRIEF)
            return first.generated, (await s.decode([8, k], [first], sampling=BRIEF)).generated

    async def tasks():
        return await asyncio.gather(task(1), task(2))

    return lambda: asyncio.run(tasks())


def test_programs_may_run_event_loops():
    engine = tiny.engine()
    programs = [make(engine, n) for n in range(3) for make in (in_a_loop, program)]
    alone = [one() for one in programs]
    found = list(together(engine, programs))
    assert {o.index: o.value for o in found} == dict(enumerate(alone))
    engine.check()


def test_inside_an_event_loop_they_share_the_same_steps():
    def run():
        engine = tiny.engine()
        return [o.index for o in together(engine, [program(engine, n) for n in range(8)])], engine.runner.steps

    async def inside():
        return run()

    assert asyncio.run(inside()) == run()


def elsewhere(act):
    """What comes of an act in another thread."""
    found = []

    def run():
        try:
            found.append(act())
        except Exception as problem:
            found.append(problem)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("act", ["__next__", "close"])
def test_another_thread_is_refused_and_nothing_happens(act):
    engine = tiny.engine()
    alone = [program(engine, n)() for n in range(4)]
    running = together(engine, [program(engine, n) for n in range(4)])
    values = {(first := next(running)).index: first.value}
    refused = elsewhere(getattr(running, act))
    assert isinstance(refused, ConfigError) and "MainThread" in str(refused)
    values |= {o.index: o.value for o in running}
    assert values == dict(enumerate(alone))
    engine.clear_cache()
    engine.check()
    given = together(engine, [program(engine, 0)])
    assert elsewhere(lambda: [o.value for o in given]) == alone[:1]  # it may begin anywhere


def test_where_its_thread_has_gone_the_engine_is_free():
    engine = tiny.engine()
    running = together(engine, [program(engine, 0), lambda: None])
    elsewhere(lambda: next(running))
    with pytest.raises(ValueError, match="different thread"):  # greenlet's own word
        running.close()
    assert [o.value for o in together(engine, [program(engine, 0)])] == [program(engine, 0)()]


def test_one_set_at_a_time_and_sane_numbers():
    engine = tiny.engine()
    running = together(engine, [program(engine, n) for n in range(3)])
    next(running)
    with pytest.raises(ConfigError, match="already"):
        next(together(engine, [program(engine, 9)]))
    running.close()
    with pytest.raises(ConfigError, match="at_once=0"):
        next(together(engine, [], at_once=0))
    assert list(together(engine, [])) == []


def read(engine):
    """What somebody else than a program reads, by a session of its own."""
    with engine.session(seed=5) as s:
        return s.decode([3], sampling=BRIEF).generated


def test_who_takes_the_outcomes_may_read_between_them():
    engine = tiny.engine()
    alone, said = [program(engine, n)() for n in range(5)], read(engine)
    values = {}
    for outcome in together(engine, [program(engine, n) for n in range(5)]):
        values[outcome.index] = outcome.value
        assert read(engine) == said
    assert values == dict(enumerate(alone))
    engine.check()


def test_a_listener_may_read_between_steps():
    engine, heard = tiny.engine(), []
    alone, said = [program(engine, n)() for n in range(3)], read(engine)

    def listen(event):
        if event.kind == "finished" and not heard:
            heard.append(None)  # its own reading makes events too
            heard[0] = read(engine)

    engine.events.listen(listen)
    found = list(together(engine, [program(engine, n) for n in range(3)]))
    assert {o.index: o.value for o in found} == dict(enumerate(alone)) and heard == [said]


def test_other_threads_may_read_meanwhile():
    engine, found = tiny.engine(), []
    alone, said = [program(engine, n)() for n in range(4)], read(engine)

    def in_a_thread():
        thread = threading.Thread(target=lambda: found.append(read(engine)))
        thread.start()
        return thread

    def starts_one():
        value = program(engine, 3)()
        in_a_thread().join()
        return value

    running = together(engine, [program(engine, 0), program(engine, 1), program(engine, 2), starts_one])
    values = {(first := next(running)).index: first.value}
    thread = in_a_thread()
    values |= {o.index: o.value for o in running}
    thread.join()
    assert values == dict(enumerate(alone)) and found == [said, said]
    engine.check()
