"""Equal headers over equal parents are encoded once, and nobody can tell but by the count."""

import pytest
from helpers import tiny_models
from helpers.hypothesis_profile import many
from helpers.inspect_engine import inspect
from hypothesis import given, settings
from hypothesis import strategies as st

from choreograph import SamplingParams

BEGINNING = [9, 8, 7, 6, 5, 4]


def ways(seed: int) -> SamplingParams:
    return SamplingParams(temperature=0.9, seed=seed, max_tokens=4, logprobs=0)


def seen(message):
    return message.tokens, [one.logprob for one in message.logprobs]


def alike(one, other):
    """The same tokens, and log-probabilities that differ by rounding."""
    return [t for t, _ in one] == [t for t, _ in other] and all(
        a == pytest.approx(b, abs=1e-4) for (_, a), (_, b) in zip(one, other, strict=True)
    )


headers = st.tuples(st.integers(0, 6), st.lists(st.integers(0, 5), min_size=1, max_size=3))


@given(
    parts=st.lists(st.tuples(headers, st.integers(0, 2), st.booleans()), min_size=2, max_size=7),
    step=st.sampled_from([1, 3, 8, 1024]),
    calls=st.sampled_from([2, 256]),
    tokens=st.sampled_from([96, 2048]),
    host=st.sampled_from([None, 64]),
)
@settings(max_examples=many(25), deadline=None)
def test_decodes_that_begin_alike_equal_each_alone(parts, step, calls, tokens, host):
    """Shared beginnings of every length, over one parent of three at two places, in steps of any size."""

    def run(engine, one_by_one: bool):
        with engine.session() as session:
            roots = [session.prefill([1, 2, 3], new_offset=5 * i) for i in range(2)]
            roots.append(session.prefill([4, 4], [roots[0]]))
            made = []
            for index, ((count, rest), root, moved) in enumerate(parts):
                header = [*BEGINNING[:count], *rest]
                made.append(
                    session.decode(header, [roots[root]], [3 if moved else None], sampling=ways(index), footer=[2])
                )
                if one_by_one:
                    engine.run_until_idle()
                    engine.clear_cache()
                    result = seen(made[-1].result())
                    made[-1].release()
                    made[-1] = result
            for message in made if not one_by_one else []:
                message.result()
                engine.check()
            found = made if one_by_one else [seen(message) for message in made]
            engine.run_until_idle()
            engine.check()
            readers = [] if one_by_one else [session.decode([1], [m], sampling=ways(3)).tokens for m in made]
        return found, readers

    alone, _ = run(tiny_models.engine(), True)
    beside, readers = run(tiny_models.engine(tokens=tokens, host_capacity=host, step=step, calls=calls), False)
    assert alike(beside, alone)
    assert readers == run(tiny_models.engine(), False)[1]


def test_the_second_of_two_equal_headers_computes_one_row():
    engine = tiny_models.engine()
    with engine.session() as session:
        root = session.prefill([1, 2, 3])
        branches = [session.decode([*BEGINNING, 3], [root], sampling=ways(i)) for i in range(3)]
        engine.step()
        assert engine.stats().num_batched_tokens == 3 + 7 + 2
        assert [b.usage.computed_tokens for b in branches] == [7, 1, 1]
        assert [b.usage.cached_tokens for b in branches] == [3, 9, 9]
        later = session.decode([*BEGINNING, 4], [root], sampling=ways(5))
        assert later.usage.computed_tokens == 1
        apart = session.decode([*BEGINNING, 4], [root], new_offset=30, sampling=ways(5))
        assert apart.usage.computed_tokens == 7
        short = session.decode(BEGINNING[:3], [root], sampling=ways(5))
        assert short.usage.computed_tokens == 3
    with engine.session(client_id="other") as session:
        other = session.decode([*BEGINNING, 4], [session.prefill([1, 2, 3])], sampling=ways(5))
        assert other.usage.computed_tokens == 7


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_first_one_may_go_before_the_others_have_begun(when):
    results = []
    for release in (True, False):
        engine = tiny_models.engine(step=4)
        with engine.session() as session:
            root = session.prefill([1, 2, 3])
            first, second = (session.decode([*BEGINNING, 3], [root], sampling=ways(i)) for i in range(2))
            if when == "after":
                engine.step()
            if release:
                first.release()
            engine.check()
            results.append(seen(second.result()))
            engine.run_until_idle()
            engine.check()
    assert alike(results[:1], results[1:])


def test_a_broken_step_borrows_again():
    engine = tiny_models.engine()
    adapter = inspect(engine).hf_model
    healthy = adapter.forward

    def broken(*_):
        raise KeyboardInterrupt

    with engine.session() as session:
        branches = [session.decode([*BEGINNING, 3], sampling=ways(i)) for i in range(2)]
        adapter.forward = broken
        try:
            with pytest.raises(KeyboardInterrupt):
                engine.step()
        finally:
            adapter.forward = healthy
        engine.check()
        result = [seen(b) for b in branches]
    other = tiny_models.engine()
    with other.session() as session:
        alone = [seen(session.decode([*BEGINNING, 3], sampling=ways(i)).result()) for i in range(2)]
    assert alike(result, alone)
