"""Description of a tokenizer for grammars.

llguidance reads the text of an added token as that token alone, which no grammar of text accepts. Tags such as
`</think>` are added tokens of some models: for grammars they are ordinary text. Special tokens, which end an answer, are
none: a grammar that writes their text gets it from other tokens.
"""

import json
from collections.abc import Mapping
from copy import copy
from typing import Any

from transformers import PreTrainedTokenizerFast

from ...errors import InvalidRequestError

_HIDDEN = "\ue000"  # private use: before names of special tokens, which no text then matches


def tokenizer_options(tokenizer: Any, vocab_size: int) -> dict[str, Any]:
    """Return the arguments of `llguidance.LLTokenizer`, which are JSON.

    Raises:
        InvalidRequestError: if the tokenizer is not a fast one.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise InvalidRequestError("structured_outputs: the model's tokenizer is not a fast one: leave it out")
    backend = copy(tokenizer.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    data: dict[str, Any] = json.loads(backend.to_str())
    vocabulary = data["model"]["vocab"]
    if isinstance(vocabulary, dict):
        data["added_tokens"] = [_hide(token, vocabulary) for token in data["added_tokens"] if token["special"]] + [
            token for token in data["added_tokens"] if not token["special"] and not _is_text(token, vocabulary)
        ]
    return {
        "tokenizer": json.dumps(data),
        "n_vocab": max(vocab_size, len(tokenizer)),
        "eos_token": tokenizer.eos_token_id,
    }


def _hide(token: Mapping[str, Any], vocabulary: dict[str, int]) -> dict[str, Any]:
    """Rename a special token."""
    name = _HIDDEN + token["content"]
    if vocabulary.pop(token["content"], None) is not None:
        vocabulary[name] = token["id"]
    return {**token, "content": name}


def _is_text(token: Mapping[str, Any], vocabulary: dict[str, int]) -> bool:
    """Make an added token one of the vocabulary, if it can be."""
    if not token["content"].isascii() or " " in token["content"] or not token["content"].isprintable():
        return False  # vocabularies of bytes write other characters differently
    vocabulary[token["content"]] = token["id"]
    return True
