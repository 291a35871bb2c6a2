"""Results do not depend on what else runs: batches, chunks, order of submission and of reading."""

import random

import pytest
from helpers import tiny_models
from helpers.hypothesis_profile import many
from helpers.message_graphs import Node, graphs
from hypothesis import given, settings
from hypothesis import strategies as st

from choreograph import SamplingParams


def ways(draw_seed: int, node: Node, index: int) -> SamplingParams:
    """Uneven lengths, greedy and sampled, some with stops."""
    pick = random.Random(draw_seed * 100 + index)
    return SamplingParams(
        temperature=pick.choice([0.0, 0.7, 1.3]),
        top_p=pick.choice([1.0, 0.9]),
        top_k=pick.choice([0, 7]),
        seed=draw_seed + index,
        max_tokens=pick.randint(1, 12),
        stop_token_ids=pick.sample(range(tiny_models.VOCABULARY), pick.choice([0, 6])),
        frequency_penalty=pick.choice([0.0, 0.5]),
    )


def run(nodes: list[Node], seed: int, *, one_by_one: bool, step: int = 1024, calls: int = 256, order=None) -> list:
    engine = tiny_models.engine(step=step, calls=calls)
    with engine.session() as session:
        messages = []
        for index, node in enumerate(nodes):
            place = {
                "parents": [messages[p] for p in node.parents],
                "offsets": node.offsets,
                "new_offset": node.position,
            }
            if node.generated is None:
                message = session.prefill(node.tokens, **place)
            else:
                message = session.decode(node.tokens, **place, sampling=ways(seed, node, index), footer=node.footer)
            messages.append(message.result() if one_by_one else message)
        for index in order or range(len(messages)):
            messages[index].result()
            engine.check()
        engine.run_until_idle()
        engine.check()
        return [message.tokens for message in messages]


@settings(max_examples=many(40), deadline=None)
@given(nodes=graphs(), seed=st.integers(0, 99), data=st.data())
def test_parallel_equals_serial(nodes, seed, data):
    alone = run(nodes, seed, one_by_one=True)
    order = data.draw(st.permutations(range(len(nodes))))
    step, calls = data.draw(st.sampled_from([1, 2, 5, 1024])), data.draw(st.sampled_from([1, 2, 256]))
    assert run(nodes, seed, one_by_one=False, step=step, calls=calls, order=order) == alone


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_batch_of_branches_equals_each_branch_alone(temperature):
    """Same seeds, uneven stops; the batch takes the steps of its longest branch."""

    def branch(session, problem, seed):
        ways = SamplingParams(temperature=temperature, seed=seed, max_tokens=5 + 3 * seed, stop_token_ids=[seed])
        return session.decode([9, seed], [problem], sampling=ways)

    engine = tiny_models.engine()
    with engine.session() as session:
        problem = session.prefill([3, 1, 4, 1, 5, 9, 2, 6])
        together = [branch(session, problem, seed) for seed in range(8)]
        engine.run_until_idle()
        assert engine.stats().num_steps <= 5 + 3 * 7 + 1
    for seed in range(8):
        other = tiny_models.engine()
        with other.session() as session:
            alone = branch(session, session.prefill([3, 1, 4, 1, 5, 9, 2, 6]), seed)
            other.run_until_idle()
        assert alone.tokens == together[seed].tokens


def test_reading_interleaved_streams_changes_nothing(embedded):
    """Two streams read in turns give what each gives alone."""

    def start(session, text):
        return session.decode(text, sampling=SamplingParams(temperature=0, max_tokens=12))

    with embedded.session() as session:
        streams = [start(session, "The sun is").stream(), start(session, "A triangle has").stream()]
        pieces: list[list[str]] = [[], []]
        for _ in range(20):
            for at, stream in enumerate(streams):
                pieces[at] += [piece for piece in [next(stream, None)] if piece]
        together = ["".join(some) for some in pieces]
    embedded.clear_cache()
    with embedded.session() as session:
        assert together == [start(session, text).text for text in ("The sun is", "A triangle has")]
