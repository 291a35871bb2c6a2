"""Tokens to text one by one: what comes out is what the tokenizer decodes, whatever the tokens are."""

import itertools
import random

import pytest
from helpers import tiny_models
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from choreograph import Engine, SamplingParams
from choreograph.engine.text import make_detokenizer

WORDS = ["▁", "a", "b", "▁a", "▁b", "ab", "é", "日", "本", ".", "!"]
SPECIAL = ["<unk>", "<s>", "</s>"]
VOCABULARY = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]


def bytewise() -> PreTrainedTokenizerFast:
    """Tokens of the kind that Llama 2, Mistral and Gemma have: what has no token of its own is bytes."""
    ids = {token: number for number, token in enumerate(VOCABULARY)}
    backend = Tokenizer(models.BPE(vocab=ids, merges=[], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


class Slow:
    """A tokenizer without a backend."""

    is_fast = False

    def __init__(self) -> None:
        self.decode = bytewise().decode


def ids(*tokens: str) -> list[int]:
    return [VOCABULARY.index(token) for token in tokens]


def streamed(tokenizer, tokens: list[int]) -> str:
    stream = make_detokenizer(tokenizer)
    return "".join([stream.step(token) for token in tokens]) + stream.flush()


def expected(tokens: list[int]) -> str:
    """Of a run of bytes, the longest beginning that is UTF-8 came out as text: each byte behind it is replaced."""
    parts = []
    for is_byte, run in itertools.groupby(tokens, lambda token: len(SPECIAL) <= token < len(SPECIAL) + 256):
        if not is_byte:
            parts.append("".join(VOCABULARY[token] for token in run).replace("▁", " "))
            continue
        values = bytes(token - len(SPECIAL) for token in run)
        sound = max(n for n in range(len(values) + 1) if values[:n].decode(errors="ignore").encode() == values[:n])
        parts.append(values[:sound].decode() + "\ufffd" * (len(values) - sound))
    return "".join(parts).removeprefix(" ")


@pytest.mark.parametrize("make", [bytewise, Slow])
def test_bytes_that_turn_out_not_to_be_text_are_replaced(make):
    tokenizer = make()
    assert streamed(tokenizer, ids("<0x31>", "<0xE6>", "▁a", "▁b")) == "1\ufffd a b"
    assert streamed(tokenizer, ids("<0xE6>", "<0x97>", "<0xA5>", "a")) == "日a"
    assert streamed(tokenizer, ids("<0xE6>", "<0x31>", "a")) == tokenizer.decode(ids("<0xE6>", "<0x31>", "a"))
    assert streamed(tokenizer, ids("a", "<0x31>", "<0xE6>")) == "a1\ufffd"


@pytest.mark.parametrize("make", [bytewise, Slow])
def test_any_tokens_have_a_text(make):
    tokenizer, chance = make(), random.Random(0)
    frequent = ids("<0xE6>", "<0x97>", "<0xA5>", "<0x31>", "<0x0A>", "▁a", "日")
    for _ in range(600):
        tokens = [
            chance.choice([chance.randrange(len(SPECIAL), len(VOCABULARY)), *frequent])
            for _ in range(chance.randrange(1, 10))
        ]
        assert streamed(tokenizer, tokens) == expected(tokens)
        mixed = [token if chance.random() < 0.7 else chance.randrange(len(SPECIAL)) for token in tokens]
        streamed(tokenizer, mixed)


def test_a_decoder_that_contradicts_itself_breaks_no_stream(monkeypatch):
    class Broken:
        def __init__(self, **_) -> None: ...

        def step(self, *_):
            raise Exception("Invalid prefix encountered while decoding stream")

    monkeypatch.setattr("choreograph.engine.text.DecodeStream", Broken)
    assert streamed(bytewise(), ids("a", "<0xE6>", "<0x97>", "<0xA5>")) == "a\ufffd\ufffd\ufffd"


def test_bytes_of_one_message_disturb_no_other():
    model = tiny_models.build(vocabulary=len(VOCABULARY))
    options = SamplingParams(temperature=0, max_tokens=4)
    with Engine.from_pretrained(model).session() as session:
        alone = session.decode(ids("b"), sampling=options).output_token_ids
    engine = Engine.from_pretrained(model, tokenizer=bytewise())
    with engine.session() as session:
        odd = session.decode(ids("a"), forced_tokens=ids("<0x31>", "<0xE6>", "a", "b"))
        other = session.decode(ids("b"), sampling=options)
        assert other.output_token_ids == alone
        assert odd.text == "1\ufffdab"
        assert "".join(odd.stream()) == odd.text
    engine.check()
