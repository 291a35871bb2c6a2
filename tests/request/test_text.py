"""Tokens to text one by one: what comes out is what the tokenizer decodes, whatever the tokens are."""

import random

import pytest
from helpers import tiny_models
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from choreograph import Engine, SamplingParams
from choreograph.api.chat import ChatTemplate
from choreograph.request.detokenizer import Detokenizer

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


def characterwise() -> PreTrainedTokenizerFast:
    """Byte-level BPE, as GPT-2, Llama 3 and Qwen have: a token is some bytes of UTF-8."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(sorted(alphabet))}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def wordwise() -> PreTrainedTokenizerFast:
    """WordPiece, as BERT has: spaces between tokens come from the decoder."""
    words = ["[UNK]", "a", "b", "##a", "##b", ".", ",", "don", "'", "t", "日"]
    backend = Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")


def ids(*tokens: str) -> list[int]:
    return [VOCABULARY.index(token) for token in tokens]


def streamed(tokenizer, tokens: list[int], header: list[int] = ()) -> str:
    stream = Detokenizer(tokenizer, list(header), ChatTemplate(tokenizer).byte_token_ids)
    return "".join([stream.step(token) for token in tokens]) + stream.flush()


def test_bytes_that_turn_out_not_to_be_text_are_replaced():
    tokenizer = bytewise()
    for tokens in (("<0x31>", "<0xE6>", "▁a", "▁b"), ("<0xE6>", "<0x31>", "a"), ("a", "<0x31>", "<0xE6>")):
        assert streamed(tokenizer, ids(*tokens)) == tokenizer.decode(ids(*tokens))
    assert streamed(tokenizer, ids("<0xE6>", "<0x97>", "<0xA5>", "a")) == "日a"


@pytest.mark.parametrize("make", [bytewise, characterwise, wordwise])
def test_any_tokens_have_the_text_that_the_tokenizer_decodes(make):
    tokenizer, chance = make(), random.Random(0)
    size = len(tokenizer)
    frequent = ids("<0xE6>", "<0x97>", "<0xA5>", "<0x31>", "<0x0A>", "▁a", "日") if make is bytewise else [1, 2]
    for _ in range(600):
        tokens = [chance.choice([chance.randrange(size), *frequent]) for _ in range(chance.randrange(1, 30))]
        assert streamed(tokenizer, tokens) == tokenizer.decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize("make", [bytewise, characterwise, wordwise])
def test_generated_text_continues_the_header(make):
    tokenizer, chance = make(), random.Random(1)
    for _ in range(300):
        header, tokens = ([chance.randrange(len(tokenizer)) for _ in range(chance.randrange(1, 20))] for _ in range(2))
        whole = tokenizer.decode(header + tokens, skip_special_tokens=True)
        start = tokenizer.decode(header, skip_special_tokens=True)
        if whole.startswith(start) and "\ufffd" not in start:
            assert streamed(tokenizer, tokens, header) == whole[len(start) :]


def test_a_space_between_header_and_answer_is_kept():
    tokenizer = bytewise()
    assert streamed(tokenizer, ids("▁a"), ids("b", ".")) == " a"


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
        assert odd.text == bytewise().decode(ids("<0x31>", "<0xE6>", "a", "b"))
        assert "".join(odd.stream()) == odd.text
    engine.check()


def test_tokens_without_final_text_cost_the_same_after_any_number_of_others(talker):
    """A run of bytes that are no text, of replacement characters, or of special tokens is not decoded as a whole."""
    chat, tokenizer = talker.chat, talker.tokenizer
    replaced, broken = tokenizer("\ufffd")["input_ids"], tokenizer("é")["input_ids"][-1:]
    vocabulary = tokenizer.get_vocab()
    for run in (replaced * 300, [vocabulary["\u0123"]] * 900, broken * 900, [tokenizer.eos_token_id] * 900):
        stream = Detokenizer(
            tokenizer, [], chat.byte_token_ids, skipped_ids=chat.special_tokens.ids
        )  # fmt: skip
        num_decoded, decode = [], stream._decode_ids
        stream._decode_ids = lambda ids, *, decode=decode, num_decoded=num_decoded, **options: (
            num_decoded.append(len(ids)) or decode(ids, **options)
        )
        tokens = [*tokenizer("a")["input_ids"], *run, *tokenizer(" b")["input_ids"]]
        assert "".join([stream.step(token) for token in tokens]) + stream.flush() == tokenizer.decode(
            tokens, skip_special_tokens=True
        )
        assert max(num_decoded) < 40


@pytest.mark.parametrize("make", [bytewise, characterwise])
def test_long_runs_of_bytes_have_the_text_that_the_tokenizer_decodes(make):
    tokenizer, pick = make(), random.Random(5)
    character = list(tokenizer("日本é" if make is bytewise else "日é")["input_ids"])
    for _ in range(200):
        tokens = [
            token
            for _ in range(pick.randint(1, 30))
            for token in pick.choice(
                [character, [pick.randrange(3, 200)], [pick.randrange(3, 200)] * pick.randint(1, 20)]
            )
        ]
        assert streamed(tokenizer, tokens) == tokenizer.decode(tokens)
