"""Programs that share steps: the same results as alone, in a fixed order, and nothing left behind."""

import asyncio
import threading

import pytest
from greenlet import GreenletExit, greenlet
from helpers import tiny_models
from helpers.inspect_engine import inspect

from choreograph import SamplingParams
from choreograph.api.concurrency import run_concurrently
from choreograph.errors import ConfigError, InvalidRequestError

BRIEF = SamplingParams(max_tokens=8, ignore_eos=True)


def program(engine, number, rounds=3):
    """Some rounds of decodes, each reading the one before, so that the program waits several times."""

    def run():
        with engine.session(seed=number) as s:
            last = s.prefill([1 + number % 7, 2, 3])
            result = []
            for k in range(rounds):
                message = s.decode([4 + k], [last], sampling=SamplingParams(max_tokens=3 + number % 5, logprobs=0))
                result.append(message.output_token_ids)
                last = message
            return result

    return run


@pytest.mark.parametrize(("at_once", "calls"), [(1, 1), (3, 2), (20, 128)])
def test_programs_that_share_steps_give_the_results_of_programs_alone(at_once, calls):
    engine = tiny_models.engine()
    alone = [program(engine, n)() for n in range(12)]
    result = list(
        run_concurrently(engine, (program(engine, n) for n in range(12)), max_programs=at_once, max_requests=calls)
    )
    assert {o.index: o.value for o in result} == dict(enumerate(alone))
    engine.check()


def test_programs_share_steps_and_always_the_same_ones():
    def run():
        engine = tiny_models.engine()
        order = [o.index for o in run_concurrently(engine, [program(engine, n) for n in range(8)], max_programs=4)]
        return order, engine.stats().num_steps

    (order, steps), again = run(), run()
    assert (order, steps) == again
    engine = tiny_models.engine()
    for n in range(8):
        program(engine, n)()
    assert steps < engine.stats().num_steps / 2


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

    engine, live, most = tiny_models.engine(), set(), []
    list(run_concurrently(engine, map(chain, range(8)), max_programs=6, max_requests=12))
    assert max(most) == 6  # two calls of each can compute, five wait for what another has yet to say


def test_an_error_ends_its_own_program_only():
    engine = tiny_models.engine()

    def broken():
        with engine.session() as s:
            s.decode([1], sampling=SamplingParams(max_tokens=2)).result()
            raise ValueError("no")

    result = sorted(run_concurrently(engine, [program(engine, 0), broken, program(engine, 2)]), key=lambda o: o.index)
    assert [type(o.error) for o in result] == [type(None), ValueError, type(None)]
    assert result[2].value == program(engine, 2)()


def test_leaving_early_closes_every_session():
    engine = tiny_models.engine()
    running = run_concurrently(engine, [program(engine, n, rounds=6) for n in range(6)], max_programs=6)
    next(running)
    running.close()
    engine.run_until_idle()
    assert not inspect(engine).num_unfinished
    engine.clear_cache()
    engine.check()
    assert program(engine, 1)() == program(engine, 1)()


def test_a_program_that_ends_early_may_still_read_its_messages():
    engine, said = tiny_models.engine(), []
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
            except BaseException as exc:
                said.append(type(exc))

    running = run_concurrently(engine, [reads_in_the_end, goes_on, reads_in_the_end, lambda: None])
    next(running)
    running.close()
    assert said == [alone, GreenletExit, alone, alone, alone]
    engine.clear_cache()
    engine.check()
    assert list(run_concurrently(engine, [])) == []


def test_a_program_that_breaks_while_it_ends_keeps_no_other_from_ending():
    engine, ended = tiny_models.engine(), []

    def breaks():
        try:
            read(engine)
        finally:
            ended.append(len(ended))
            raise ValueError("no")

    running = run_concurrently(engine, [breaks, breaks, lambda: None])
    next(running)
    with pytest.raises(ValueError, match="no"):
        running.close()
    assert ended == [0, 1] and list(run_concurrently(engine, [])) == []
    engine.clear_cache()
    engine.check()


def test_leaving_early_comes_back_to_whoever_left():
    engine = tiny_models.engine()
    running = run_concurrently(engine, [program(engine, 0), lambda: None])
    next(running)
    leaving = greenlet(running.close)
    leaving.switch()
    assert leaving.dead and list(run_concurrently(engine, [])) == []


def in_a_loop(engine, number):
    """A program of tasks, which read and await."""

    async def task(k):
        with engine.session(seed=number) as s:
            first = s.decode([7, k], sampling=BRIEF)
            return first.output_token_ids, (await s.decode([8, k], [first], sampling=BRIEF)).output_token_ids

    async def tasks():
        return await asyncio.gather(task(1), task(2))

    return lambda: asyncio.run(tasks())


def test_programs_may_run_event_loops():
    engine = tiny_models.engine()
    programs = [make(engine, n) for n in range(3) for make in (in_a_loop, program)]
    alone = [one() for one in programs]
    result = list(run_concurrently(engine, programs))
    assert {o.index: o.value for o in result} == dict(enumerate(alone))
    engine.check()


def test_inside_an_event_loop_they_share_the_same_steps():
    def run():
        engine = tiny_models.engine()
        return [
            o.index for o in run_concurrently(engine, [program(engine, n) for n in range(8)])
        ], engine.stats().num_steps

    async def inside():
        return run()

    assert asyncio.run(inside()) == run()


def elsewhere(act):
    """What comes of an act in another thread."""
    result = []

    def run():
        try:
            result.append(act())
        except Exception as exc:
            result.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return result[0]


@pytest.mark.parametrize("act", ["__next__", "close"])
def test_another_thread_is_refused_and_nothing_happens(act):
    engine = tiny_models.engine()
    alone = [program(engine, n)() for n in range(4)]
    running = run_concurrently(engine, [program(engine, n) for n in range(4)])
    values = {(first := next(running)).index: first.value}
    refused = elsewhere(getattr(running, act))
    assert isinstance(refused, ConfigError) and "MainThread" in str(refused)
    values |= {o.index: o.value for o in running}
    assert values == dict(enumerate(alone))
    engine.clear_cache()
    engine.check()
    given = run_concurrently(engine, [program(engine, 0)])
    assert elsewhere(lambda: [o.value for o in given]) == alone[:1]  # it may begin anywhere


def test_where_its_thread_has_gone_the_engine_is_free():
    engine = tiny_models.engine()
    running = run_concurrently(engine, [program(engine, 0), lambda: None])
    elsewhere(lambda: next(running))
    with pytest.raises(ValueError, match="different thread"):  # greenlet's own word
        running.close()
    assert [o.value for o in run_concurrently(engine, [program(engine, 0)])] == [program(engine, 0)()]


def test_one_set_at_a_time_and_sane_numbers():
    engine = tiny_models.engine()
    running = run_concurrently(engine, [program(engine, n) for n in range(3)])
    next(running)
    with pytest.raises(ConfigError, match="already"):
        next(run_concurrently(engine, [program(engine, 9)]))
    running.close()
    with pytest.raises(ConfigError, match="max_programs=0"):
        next(run_concurrently(engine, [], max_programs=0))
    assert list(run_concurrently(engine, [])) == []


def read(engine):
    """What somebody else than a program reads, by a session of its own."""
    with engine.session(seed=5) as s:
        return s.decode([3], sampling=BRIEF).output_token_ids


def test_who_takes_the_outcomes_may_read_between_them():
    engine = tiny_models.engine()
    alone, said = [program(engine, n)() for n in range(5)], read(engine)
    values = {}
    for outcome in run_concurrently(engine, [program(engine, n) for n in range(5)]):
        values[outcome.index] = outcome.value
        assert read(engine) == said
    assert values == dict(enumerate(alone))
    engine.check()


def test_a_listener_may_read_between_steps():
    engine, heard = tiny_models.engine(), []
    alone, said = [program(engine, n)() for n in range(3)], read(engine)

    def listen(event):
        if event.kind == "finished" and not heard:
            heard.append(None)  # its own reading makes events too
            heard[0] = read(engine)

    engine.events.subscribe(listen)
    result = list(run_concurrently(engine, [program(engine, n) for n in range(3)]))
    assert {o.index: o.value for o in result} == dict(enumerate(alone)) and heard == [said]


def test_other_threads_may_read_meanwhile():
    engine, result = tiny_models.engine(), []
    alone, said = [program(engine, n)() for n in range(4)], read(engine)

    def in_a_thread():
        thread = threading.Thread(target=lambda: result.append(read(engine)))
        thread.start()
        return thread

    def starts_one():
        value = program(engine, 3)()
        in_a_thread().join()
        return value

    running = run_concurrently(engine, [program(engine, 0), program(engine, 1), program(engine, 2), starts_one])
    values = {(first := next(running)).index: first.value}
    thread = in_a_thread()
    values |= {o.index: o.value for o in running}
    thread.join()
    assert values == dict(enumerate(alone)) and result == [said, said]
    engine.check()


@pytest.mark.parametrize("name", ["constrain", "on_logprobs"])
def test_a_decode_is_not_constrained_or_watched_while_another_thread_generates_its_first_token(name, monkeypatch):
    engine = tiny_models.engine()
    forward, computing, may_go_on = inspect(engine).hf_model.forward, threading.Event(), threading.Event()

    def slow_forward(*arguments):
        computing.set()
        may_go_on.wait(20)
        return forward(*arguments)

    monkeypatch.setattr(inspect(engine).hf_model, "forward", slow_forward)
    with engine.session(seed=1) as session:
        message = session.decode([1, 2], sampling=BRIEF)
        stepping = threading.Thread(target=engine.step)
        stepping.start()
        computing.wait(20)
        threading.Timer(0.1, may_go_on.set).start()
        with pytest.raises(InvalidRequestError, match="before anything of it is generated"):
            getattr(message, name)(print)
        stepping.join()
        assert len(message.output_token_ids) == 8
