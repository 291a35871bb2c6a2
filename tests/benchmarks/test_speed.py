"""Statistics that only the speed benchmark uses."""

from benchmarks.speed import correlation


def test_correlation_of_lengths_and_times():
    result = correlation([1, 2, 3, 4], [2, 4, 6, 8.5])
    assert result.value > 0.99 and result.p < 0.05
