"""Content keys: hashes of a prompt's parts, to find their replicas."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..server.chat_prompt import ChatPrompt, Segment
from ..server.server_config import ReuseMode

if TYPE_CHECKING:
    from ..server.service import GenerationSpec

BLOCK = 64  # tokens of a part of a prompt that is not cut into messages

WINDOW, ANCHOR_DISTANCE = 16, 32  # tokens of a hashed window, and mean tokens between chosen windows

ContentKeys = dict[int, int]  # number of tokens by key

_MULTIPLIERS = np.random.default_rng(0).integers(0, 1 << 63, WINDOW, dtype=np.uint64) | np.uint64(1)


def prompt_keys(mode: ReuseMode, scope: Sequence[str], prompts: Iterable[ChatPrompt]) -> ContentKeys:
    """Return the keys of everything in prompts that a cache may have.

    Args:
        scope: what separates caches, such as the tenant; keys of two scopes differ.
    """
    keys: ContentKeys = {}
    for prompt in prompts:
        if mode == "auto":
            keys |= anchor_keys(scope, prompt.tokens)
        elif mode == "messages":
            for segment in prompt.segments:
                keys[_message_key(scope, segment)] = len(segment.tokens)
        else:
            keys |= prefix_keys(scope, prompt)
    return keys


def _message_key(scope: Sequence[str], segment: Segment) -> int:
    return content_key(scope, segment.tokens if segment.answer_key is None else segment.answer_key)


def segment_key(spec: "GenerationSpec", segment: Segment, model: str | None = None) -> int:
    """Return the key of a message in `prompt_keys` of a request.

    Args:
        model: that reads it; None: the request's.
    """
    return _message_key(scope_of(spec, model), segment)


def alternative_keys(spec: "GenerationSpec", models: Sequence[str]) -> dict[int, list[int]]:
    """Return keys of a request's messages in other models, by its own.

    Args:
        models: those whose layers the request's model reuses.
    """
    if not models or spec.reuse != "messages":
        return {}
    segments = [segment for prompt in spec.prompts for segment in prompt.segments]
    return {segment_key(spec, item): [segment_key(spec, item, model) for model in models] for item in segments}


def scope_of(spec: "GenerationSpec", model: str | None = None) -> Sequence[str]:
    """Return what separates the caches that a request may use.

    Args:
        model: None: the request's.
    """
    key = spec.key if model is None else spec.key._replace(model=model)
    # prefixes are found by all workflows of a client
    return (key.client_id, key.model) if spec.reuse == "exact" else (key.client_id, key.model, key.workflow)


def answer_keys(mode: ReuseMode, scope: Sequence[str], tokens: Sequence[int], contents: Iterable[str]) -> ContentKeys:
    """Return the keys under which a generated answer is found.

    Args:
        contents: what a client may send back of it.
    """
    if mode == "auto":
        return anchor_keys(scope, tokens)
    return {content_key(scope, content): len(tokens) for content in contents} if mode == "messages" else {}


def content_key(scope: Sequence[str], content: str | Sequence[int]) -> int:
    """Return a 64-bit hash of a scope and a content."""
    digest = hashlib.blake2b(digest_size=8)
    for name in scope:
        digest.update(len(name).to_bytes(8, "little") + name.encode("utf-8", "surrogatepass"))
    if isinstance(content, str):
        digest.update(b"text" + content.encode("utf-8", "surrogatepass"))
    else:
        digest.update(b"ids." + np.asarray(content, dtype=np.int64).tobytes())
    return int.from_bytes(digest.digest(), "little")


def prefix_keys(scope: Sequence[str], prompt: ChatPrompt) -> ContentKeys:
    """Return a key of every prefix of whole messages or blocks."""
    parts = [segment.tokens for segment in prompt.segments]
    rest = prompt.tokens[sum(map(len, parts)) :]
    parts += [tuple(rest[start : start + BLOCK]) for start in range(0, len(rest) - BLOCK + 1, BLOCK)]
    keys, parent = ContentKeys(), ""
    for part in parts:
        key = content_key([*scope, parent], part)
        keys[key], parent = len(part), str(key)
    return keys


def anchor_keys(scope: Sequence[str], tokens: Sequence[int]) -> ContentKeys:
    """Return keys of windows that are chosen by their content.

    Equal text gives equal keys at any position of any prompt, so quotes are found inside other texts.
    """
    if len(tokens) < WINDOW:
        return {}
    windows = np.lib.stride_tricks.sliding_window_view(np.asarray(tokens, dtype=np.uint64), WINDOW)
    hashes = (windows * _MULTIPLIERS).sum(-1, dtype=np.uint64)
    hashes ^= hashes >> np.uint64(29)
    hashes *= np.uint64(0x9E3779B97F4A7C15)
    hashes ^= hashes >> np.uint64(32)
    salt = np.uint64(content_key(scope, ""))
    return {int(value ^ salt): ANCHOR_DISTANCE for value in hashes[hashes % np.uint64(ANCHOR_DISTANCE) == 0]}
