"""The virtual clock: steps, loads and their overlap take what one works out by hand."""

import time

import pytest
from helpers.inspect_engine import inspect

from benchmarks.simulator import HardwareModel, SimClock, simulated_engine
from choreograph import CacheConfig, EngineConfig, SamplingParams, SchedulerConfig

MACHINE = HardwareModel(
    name="round numbers", parameters=1e6, weights=2e6, layers=4, width=1, token_bytes=1000, arithmetic=2e6, memory=2e6,
    link=1e6, cache=1e6,
)  # fmt: skip
# a prefilled token takes 1 s and its attention 8 us a token seen; a decode step 1 s and more for its context; a token
# moves in 1 ms


def make(**options):
    cache = {"capacity": 80, **{k: v for k, v in options.items() if k != "aware"}}
    config = EngineConfig(
        cache=CacheConfig(page_size=4, **cache), scheduler=SchedulerConfig(skip_loading=options.get("aware", True)),
        backend="reference",
    )  # fmt: skip
    return simulated_engine(MACHINE, config)


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count)


def sent_away(engine, session):
    """A message of 40 tokens in host memory, and nothing else on the device."""
    root = session.prefill([1] * 40).result()
    session.prefill([3] * 60).result().release()
    engine.clear_cache()
    assert root.kv_location == "host" and engine.stats().num_free_pages == 20
    return root


def test_prefill_takes_its_arithmetic_and_decode_its_reading():
    engine, clock = make()
    with engine.session() as session:
        root = session.prefill([1] * 40).result()
        assert clock.now == pytest.approx(40 + 16 * 40 * 41 / 2 / 2e6)
        before = clock.now
        session.decode([2], [root], sampling=greedy(3)).result()
        reading = sum(1 + 1e3 * seen / 2e6 for seen in (41, 42, 43))
        assert clock.now - before == pytest.approx(reading, rel=1e-3)


@pytest.mark.parametrize(("aware", "speed"), [(True, 1), (False, 1), (False, 1000)])
def test_a_load_takes_the_link_and_hides_under_a_step_layer_by_layer(aware, speed):
    engine, clock = make(host_capacity=400, aware=aware)
    inspect(engine).hf_model.executor._hardware = HardwareModel(**{**vars(MACHINE), "link": MACHINE.link / speed})
    with engine.session() as session:
        root = sent_away(engine, session)
        before = clock.now
        session.decode([2], [root], sampling=greedy(1)).result()
        load = 0.04 * speed
        step = 1 + 1e3 * 41 / 2e6
        hidden = max(load + step / 4, step + load / 4)
        assert clock.now - before == pytest.approx(hidden, rel=1e-3)


def test_others_compute_while_a_context_is_loading():
    engine, clock = make(host_capacity=400)
    inspect(engine).hf_model.executor._hardware = HardwareModel(**{**vars(MACHINE), "link": 1e4})  # 4 s for 40 tokens
    with engine.session() as session:
        root = sent_away(engine, session)
        before = clock.now
        late = session.decode([2], [root], sampling=greedy(1))
        soon = session.decode([4], sampling=greedy(3)).result()
        assert clock.now - before == pytest.approx(3, rel=1e-2) and not late.done
        late.result()
        assert clock.now - before == pytest.approx(5, rel=3e-2)
        assert soon.output_token_ids == [0, 0, 0]


def test_processor_time_of_the_host_passes_too_where_it_is_charged():
    clock = SimClock(charge_host=True)
    spend = time.thread_time() + 0.02
    while time.thread_time() < spend:
        pass
    charged = clock.now
    assert charged >= 0.02
    with clock.uncharged():
        spend = time.thread_time() + 0.02
        while time.thread_time() < spend:
            pass
    assert clock.now < charged + 0.02
    clock.advance(5)
    assert clock.now >= charged + 5
