"""Turns of chats are found in the token ids of many families' templates. Needs no vLLM."""

import re

import pytest
from helpers import chat_templates
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from choreograph.vllm.turn_boundaries import TurnBoundaries

# template, special tokens, end of the text, and what the pieces of a chat begin with
FAMILIES = {
    "chatml": (chat_templates.CHATML, ["<|im_start|>", "<|im_end|>"], "<|im_end|>", "<|im_start|>"),
    "llama 3": (
        chat_templates.LLAMA_3,
        ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        "<|eot_id|>",
        "<|start_header_id|>",
    ),
    "gemma 2": (chat_templates.GEMMA_2, ["<bos>", "<start_of_turn>", "<end_of_turn>"], "<eos>", "<start_of_turn>"),
    "qwen 2.5": (chat_templates.QWEN_2_5, ["<|im_start|>", "<|im_end|>"], "<|im_end|>", "<|im_start|>"),
    "qwen 3": (
        chat_templates.QWEN_3,
        ["<|im_start|>", "<|im_end|>", "<think>", "</think>"],
        "<|im_end|>",
        "<|im_start|>",
    ),
    "phi 3": (chat_templates.PHI_3, ["<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"], "<|endoftext|>", "<|"),
}


def make_tokenizer(template: str, special: list[str], eos: str) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes, with special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    base = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    base.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    base.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=base, eos_token=eos, bos_token=special[0])
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("family", FAMILIES)
def test_each_turn_is_one_piece_with_its_header_and_footer(family):
    template, special, eos, start = FAMILIES[family]
    tokenizer = make_tokenizer(template, special, eos)
    boundaries = TurnBoundaries.of_tokenizer(tokenizer)
    assert boundaries is not None
    chat = [
        {"role": "user", "content": "How are you?"},
        {"role": "assistant", "content": "Fine, thanks."},
        {"role": "user", "content": "Good."},
    ]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    bounds = boundaries.split(ids)
    pieces = [tokenizer.decode(ids[a:b]) for a, b in zip(bounds, [*bounds[1:], len(ids)], strict=True)]
    texts = [piece for piece in pieces if re.search(r"How are you|Fine, thanks|Good", piece)]
    assert len(texts) == 3 and len(pieces) in (4, 5)  # some templates write a system turn
    assert all(piece.startswith(start) for piece in pieces[1:])
    footers = {piece.rpartition(text)[2] for piece, text in zip(texts, ("?", "thanks.", "Good."), strict=True)}
    assert len(footers) == 1  # a turn ends with its footer, which belongs to no other


def test_a_text_without_turns_is_one_piece():
    tokenizer = make_tokenizer(*FAMILIES["chatml"][:3])
    assert TurnBoundaries.of_tokenizer(tokenizer).split(tokenizer.encode("no chat")) == [0]


def test_turns_without_special_tokens_are_not_guessed():
    template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    assert TurnBoundaries.of_tokenizer(make_tokenizer(template, ["<s>"], "</s>")) is None
