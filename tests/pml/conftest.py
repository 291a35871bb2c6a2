"""A tokenizer of single characters with a chat template, and a tiny engine over it."""

import pytest
import tiny
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from tokenizers.decoders import Fuse
from transformers import PreTrainedTokenizerFast

from choreograph import CacheConfig, Engine, EngineConfig

SPECIAL = ["<unk>", "<end>", "<bos>", "<|system|>", "<|user|>", "<|assistant|>"]
TEMPLATE = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<end>' }}{% endfor %}"
POSITIONS = 400


@pytest.fixture(scope="session")
def characters():
    letters = [chr(code) for code in range(32, 127)] + ["\n"]
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *letters])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("(.|\n)"), "isolated")
    backend.decoder = Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="<end>")
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL[2:]})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


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
