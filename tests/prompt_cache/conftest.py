"""A tiny engine over a tokenizer of single characters."""

import pytest
from helpers import tiny_models
from helpers.char_tokenizer import tokenizer

from choreograph import CacheConfig, Engine, EngineConfig

POSITIONS = 400


@pytest.fixture(scope="session")
def characters():
    return tokenizer()


@pytest.fixture(scope="session")
def model(characters):
    return tiny_models.build(seed=3, vocabulary=len(characters), positions=POSITIONS)


@pytest.fixture
def engine(model, characters):
    """A fresh engine; freed pages are poisoned."""
    config = EngineConfig(cache=CacheConfig(capacity=4096, page_size=4, poison_freed_pages=True))
    engine = Engine.from_pretrained(model, tokenizer=characters, config=config)
    yield engine
    engine.check()
