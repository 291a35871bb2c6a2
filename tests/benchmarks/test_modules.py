"""Benchmarks that share functions can be imported."""

from importlib import import_module

import pytest


@pytest.mark.parametrize("name", ["align", "budget", "quality", "repair", "rules"])
def test_a_benchmark_of_quality_can_be_imported(name):
    assert import_module(f"benchmarks.{name}").main
