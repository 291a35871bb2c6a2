"""The table of memory per token has every architecture that is served."""

import pytest

from benchmarks.memory import FAMILIES, SHAPES, mebibytes
from choreograph.models.architectures import SUPPORTED_ARCHITECTURES


def test_every_architecture_has_a_model_in_the_table():
    assert FAMILIES.keys() == SUPPORTED_ARCHITECTURES.keys()


def test_a_token_takes_keys_and_values_of_two_bytes_in_every_layer():
    assert mebibytes(SHAPES["Llama 7B"], SHAPES["Llama 7B"].heads) == pytest.approx(0.5)
    for _, shape in FAMILIES.values():
        assert shape.heads % shape.kv_heads == 0
