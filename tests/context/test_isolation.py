"""What a message does not see cannot change it: other messages, freed pages, other clients."""

from helpers import tiny_models
from helpers.hypothesis_profile import many
from helpers.message_graphs import VOCABULARY, Node, graphs
from hypothesis import given, settings
from hypothesis import strategies as st

from choreograph import SamplingParams

EVERYTHING = SamplingParams(logprobs=VOCABULARY, max_tokens=6, temperature=0)


def ancestors(nodes: list[Node], index: int) -> set[int]:
    result = {index}
    for parent in nodes[index].parents:
        result |= ancestors(nodes, parent)
    return result


def last_distribution(engine, nodes: list[Node]):
    """Tokens and log-probabilities of a greedy decode behind the last node."""
    with engine.session() as session:
        messages = []
        for node in nodes:
            messages.append(
                session.prefill(
                    node.all_tokens,
                    parents=[messages[p] for p in node.parents],
                    offsets=node.offsets,
                    new_offset=node.position,
                )
            )
        answer = session.decode([1], parents=[messages[-1]], sampling=EVERYTHING)
        engine.run_until_idle()
        return answer.tokens, [sorted(got.top.items()) for got in answer.logprobs]


@settings(max_examples=many(40), deadline=None)
@given(nodes=graphs(), data=st.data())
def test_only_ancestors_matter(nodes, data):
    before = last_distribution(tiny_models.engine(), nodes)
    strangers = sorted(set(range(len(nodes))) - ancestors(nodes, len(nodes) - 1))
    for index in strangers:
        size = len(nodes[index].tokens)
        nodes[index].tokens = data.draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=size, max_size=size))
    assert last_distribution(tiny_models.engine(), nodes)[0] == before[0]


@settings(max_examples=many(20), deadline=None)
@given(some=st.lists(graphs(max_nodes=4), min_size=2, max_size=4))
def test_freed_and_reused_pages_leak_nothing(some):
    """Freed pages hold NaN, the arena is small enough to be used again, and every answer stays the same."""
    crowded = tiny_models.engine(tokens=512)
    for nodes in some:
        tokens, scores = last_distribution(crowded, nodes)
        crowded.check()
        assert all(value == value for row in scores for _, value in row), "a freed page was read"
        assert tokens == last_distribution(tiny_models.engine(), nodes)[0]


def test_clients_share_nothing():
    engine = tiny_models.engine()
    for mode in ("choreographed", "prefix"):
        used = []
        for client in ("a", "b", "a"):
            with engine.session(mode=mode, client_id=f"{mode} {client}") as session:
                text = session.prefill([1, 2, 3, 4, 5, 6])
                answer = session.decode([7], parents=[text], sampling=SamplingParams(max_tokens=2, temperature=0))
                used.append(text.usage.cached_tokens + answer.usage.cached_tokens)
        assert used[0] == used[1] < used[2]
