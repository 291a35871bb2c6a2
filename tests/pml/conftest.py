"""A tiny engine over a tokenizer of single characters."""

import pytest
import tiny
from characters import tokenizer

from choreograph import CacheConfig, Engine, EngineConfig

POSITIONS = 400


@pytest.fixture(scope="session")
def characters():
    return tokenizer()


@pytest.fixture(scope="session")
def model(characters):
    return tiny.build(seed=3, vocabulary=len(characters), positions=POSITIONS)


@pytest.fixture
def engine(model, characters):
    """A fresh engine; freed pages are poisoned."""
    config = EngineConfig(cache=CacheConfig(tokens=4096, page_size=4, poison=True))
    engine = Engine.from_pretrained(model, tokenizer=characters, config=config)
    yield engine
    engine.check()
