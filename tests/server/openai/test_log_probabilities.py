"""Log-probabilities and token ids of answers: the bytes of the text, to its end and no further."""

import json
import re
from itertools import pairwise

import httpx
import pytest
from helpers.forced_answers import ASK, chat, forced
from helpers.hypothesis_profile import many
from helpers.live_server import serving
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from tokenizers.decoders import ByteFallback, Fuse, Replace, Sequence, Strip
from transformers import PreTrainedTokenizerFast

from choreograph import Engine, EngineConfig
from choreograph.api.chat import ChatTemplate
from choreograph.server.openai.token_text import TokenBytes, TokenPlacer, label

TEXTS = ["ok 😀 é 日本 👨‍👩", "😀é😀", " leading", "\n\nlines\n", "plain", "a\u0301 \ufffd b"]
BOTH = pytest.mark.parametrize("stream", [False, True])


def unlabel(text):
    """The bytes that a token's text stands for."""
    if text.startswith("bytes:"):
        return bytes(int(code, 16) for code in re.findall(r"\\x(..)", text))
    return text.encode()


@BOTH
@pytest.mark.parametrize("text", TEXTS)
def test_the_bytes_of_tokens_join_to_the_content(client, text, stream):
    choice = chat(client, text, stream=stream, logprobs=True, top_logprobs=4)
    items = choice.logprobs.content
    assert b"".join(bytes(item.bytes) for item in items) == choice.message.content.encode() == text.encode()
    assert all(len(item.top_logprobs) == 4 for item in items)
    assert all(unlabel(entry.token) == bytes(entry.bytes) for item in items for entry in (item, *item.top_logprobs))
    response = client.responses.create(
        model="tiny", input="Hi", temperature=0, top_logprobs=2, extra_body=forced(text), stream=stream
    )
    response = list(response)[-1].response if stream else response
    (part,) = response.output[0].content
    assert b"".join(bytes(item.bytes) for item in part.logprobs) == text.encode()


@BOTH
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("count", [0, 3, 20])
def test_tokens_of_a_completion_join_to_its_text(client, text, stream, count):
    options = {"model": "tiny", "prompt": "Hi", "max_tokens": 60, "temperature": 0, "logprobs": count}
    result = client.completions.create(**options, extra_body=forced(text), stream=stream)
    parts = [chunk.choices[0] for chunk in result] if stream else [result.choices[0]]
    assert "".join(part.text for part in parts) == text
    tokens, offsets, tops = [], [], []
    for part in parts:
        tokens += part.logprobs.tokens
        offsets += part.logprobs.text_offset
        tops += part.logprobs.top_logprobs
    assert b"".join(map(unlabel, tokens)) == text.encode()
    data = b""
    for token, offset, top in zip(tokens, offsets, tops, strict=True):
        assert offset == len(data.decode(errors="ignore")) < len(text)  # of the character that the token begins in
        data += unlabel(token)
        assert token in top and max(count, 1) <= len(top) <= count + 1


def test_a_cut_inside_a_character_keeps_its_bytes(client):
    choice = chat(client, "😀", logprobs=True, max_tokens=1)
    (item,) = choice.logprobs.content
    assert "😀".encode().startswith(bytes(item.bytes)) and choice.message.content == "\ufffd"
    assert choice.finish_reason == "length" and item.token.startswith("bytes:")


def stopped(live, path, stream, text, **options):
    """Text, log-probabilities' texts and token ids of an answer."""
    body = {"model": "tiny", "max_tokens": 60, "temperature": 0, "stream": stream, **forced(text), **options}
    body |= {"prompt": "x"} if path == "completions" else {"messages": ASK, "top_logprobs": 1}
    body |= {"logprobs": 1 if path == "completions" else True, "return_token_ids": True}
    answer = httpx.post(f"{live.url}/v1/{path}", json=body, timeout=60).raise_for_status()
    bodies = [answer.json()] if not stream else openai_chunks(answer.text)
    texts, tokens, ids = "", [], []
    for (choice,) in (body["choices"] for body in bodies):
        texts += choice.get("text") or (choice.get("message") or choice.get("delta") or {}).get("content") or ""
        logprobs = choice["logprobs"] or {}
        tokens += logprobs.get("tokens") or [item["token"] for item in logprobs.get("content", ())]
        ids += choice.get("token_ids", ())
    return texts, tokens, ids


def openai_chunks(text):
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


@pytest.fixture(scope="module")
def drafting(talker_folder):
    config = EngineConfig(draft_tokens=5)
    engine = Engine.from_pretrained(talker_folder, config=config, dtype="float32", device="cpu")
    with serving(engine) as live:
        yield live


@BOTH
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
@pytest.mark.parametrize("server", ["live", "drafting"])
@pytest.mark.parametrize(
    ("text", "stop"),
    [
        ("alpha beta STOP gamma", "STOP"), ("alpha beta STOP gamma", " STOP gam"), ("alpha beta STOP", "a"),
        ("one 😀 two", "😀"), ("x y STOP STOP STOP STOP", "STOP STOP S"), ("no stop here", "absent"),
    ],
)  # fmt: skip
def test_tokens_end_where_a_stop_string_ends_the_text(request, server, path, stream, text, stop):
    live = request.getfixturevalue(server)
    content, tokens, ids = stopped(live, path, stream, text, stop=[stop])
    assert content == text.partition(stop)[0]
    joined = b"".join(map(unlabel, tokens))
    assert joined.startswith(content.encode())
    if stop in text and tokens:  # the last one is in the text
        assert len(joined) - len(unlabel(tokens[-1])) < len(content.encode())
    tokenizer = live.engine.tokenizer
    if stop in text:
        assert len(ids) == len(tokens) and tokenizer.eos_token_id not in ids
    else:
        assert ids[-1] == tokenizer.eos_token_id and len(ids) == len(tokens) + 1


@BOTH
def test_tokens_of_accepted_drafts_end_where_a_stop_string_ends_the_text(live, drafting, stream):
    words = "one two three four"
    bias = {str(token): 30 for token in live.engine.tokenizer.encode(words)}  # the model repeats what it has read
    options = {
        "messages": [{"role": "user", "content": f"{words} " * 6}],
        "logit_bias": bias,
        "structured_outputs": None,
    }
    text, *_ = stopped(live, "chat/completions", stream, "", max_tokens=48, **options)
    num_accepted = drafting.engine.stats().num_accepted_tokens
    for start in (len(text) // 3, len(text) // 2, len(text) - 9):
        stop = [text[start : start + 8]]
        results = [
            stopped(server, "chat/completions", stream, "", max_tokens=48, stop=stop, **options)
            for server in (live, drafting)
        ]
        assert results[0] == results[1]
        content, tokens, ids = results[0]
        assert content == text.partition(stop[0])[0] and len(ids) == len(tokens)
        assert "".join(tokens).startswith(content)
        assert not tokens or len("".join(tokens[:-1])) < len(content)
    drafting.wait_until_idle()
    assert drafting.engine.stats().num_accepted_tokens > num_accepted


@BOTH
def test_a_stop_token_is_in_no_text_and_no_log_probability(live, stream):
    tokenizer = live.engine.tokenizer
    (token,) = tokenizer.encode(" beta")
    for options in ({}, {"stop": ["absent"]}):
        content, tokens, ids = stopped(
            live, "chat/completions", stream, "alpha beta gamma", stop_token_ids=[token],
            skip_special_tokens=False, **options,
        )  # fmt: skip
        assert content == "alpha" == "".join(tokens) and ids[-1] == token


@BOTH
@pytest.mark.parametrize("options", [{}, {"skip_special_tokens": False}, {"ignore_eos": True, "max_tokens": 2}])
def test_an_echoed_text_lists_every_generated_token(live, options, stream):
    end = live.engine.tokenizer.eos_token_id
    options = {"echo": True, "logit_bias": {str(end): 100}, "structured_outputs": None} | options
    text, tokens, ids = stopped(live, "completions", stream, "", **options)
    assert text == "x" and tokens == ["x"] + [""] * len(ids) and set(ids) == {end}


def byte_fallback_tokenizer():
    """A tokenizer of SentencePiece's kind: bytes of characters without a token, and a leading space."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "\u2581",
        *"abcdeo",
        "\u2581a",
        "\u2581be",
    ]
    backend = Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True, unk_token="<unk>")
    )
    backend.decoder = Sequence([Replace("\u2581", " "), ByteFallback(), Fuse(), Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


FALLBACK = byte_fallback_tokenizer()


@settings(max_examples=many(200), deadline=None)
@given(
    text=st.text(st.sampled_from("ab éd😀日\ufffd"), max_size=8),
    header=st.sampled_from([[], [1], ["b"], ["\u2581"]]),
    extra=st.lists(st.sampled_from([0xF0, 0x9F, 0x80, 0x41, 0xC3]), max_size=3),
)
def test_tokens_have_their_bytes_with_byte_fallback(text, header, extra):
    ids = dict(FALLBACK.get_vocab())
    tokens = []
    for char in text:
        piece = "\u2581" if char == " " else char
        tokens += [ids[piece]] if piece in ids else [ids[f"<0x{byte:02X}>"] for byte in char.encode()]
    tokens += [ids[f"<0x{byte:02X}>"] for byte in extra]
    header = [ids.get(item, item) for item in header]
    placer = TokenPlacer(TokenBytes(ChatTemplate(FALLBACK)), header, skip_special=True)
    placed = [item for token in tokens for item in placer.add(token)] + placer.finish()
    shown = FALLBACK.decode([*header, *tokens], skip_special_tokens=True)
    expected = shown[len(FALLBACK.decode(header, skip_special_tokens=True)) :]
    assert [item.id for item in placed] == tokens
    data = b"".join(item.data for item in placed)
    assert data.decode(errors="replace") == expected or "\ufffd" in expected
    assert all(0 <= item.start <= item.end <= len(expected) for item in placed)
    assert all(first.start <= second.start for first, second in pairwise(placed))


@pytest.fixture(scope="module")
def byte_tokens(talker):
    """The vocabulary's tokens of single bytes."""
    token_bytes = TokenBytes(talker.chat)
    tokens = [token for token in range(len(talker.tokenizer)) if token not in token_bytes.special_ids]
    return {token_bytes.of(token): token for token in tokens if len(token_bytes.of(token)) == 1}


@settings(max_examples=many(100), deadline=None)
@given(data=st.lists(st.tuples(st.integers(0, 300), st.booleans()), max_size=40))
def test_bytes_that_are_no_text_belong_to_their_tokens(talker, byte_tokens, data):
    parts = [list(byte_tokens)[number % len(byte_tokens)] for number, _ in data]
    tokens = []
    for part, (_, has_special) in zip(parts, data, strict=True):
        tokens += [talker.tokenizer.eos_token_id] * has_special + [byte_tokens[part]]
    placer = TokenPlacer(TokenBytes(talker.chat), [5], skip_special=True)
    placed = [item for token in tokens for item in placer.add(token)] + placer.finish()
    assert [item.id for item in placed] == tokens
    assert b"".join(item.data for item in placed) == b"".join(parts)


def test_texts_of_tokens_are_unique_for_parts_of_characters():
    assert label(b"\xf0\x9f") == "bytes:\\xf0\\x9f" and label("é".encode()) == "é" and label(b"") == ""
