"""Two workers, each with half of the heads."""

from hypothesis import given
from reuse_graphs import expected_rows, graphs, largest_difference, run_graph

from examples import examples


@examples(12)
@given(calls=graphs(holes=True))
def test_random_graphs_equal_brute_force(calls, start_engine, tiny_model):
    engine = start_engine(tensor_parallel_size=2)
    found = run_graph(engine, calls)
    assert largest_difference(found, expected_rows(tiny_model().model, calls)) < 2e-4
    engine.check_idle()
