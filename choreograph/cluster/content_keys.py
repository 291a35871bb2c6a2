"""Content keys: hashes of a prompt's parts, to find their replicas."""

import hashlib
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from ..namespace import Client, Namespace
from ..server.openai.chat_prompt import ChatPrompt, Segment
from ..server.server_config import ReuseMode

if TYPE_CHECKING:
    from ..server.running_request import GenerationSpec

BLOCK = 64  # tokens of a part of a prompt that is not cut into messages

WINDOW, ANCHOR_DISTANCE = 16, 32  # tokens of a hashed window, and mean tokens between chosen windows

ContentKeys = dict[int, int]  # number of tokens by key

_MULTIPLIERS = np.random.default_rng(0).integers(0, 1 << 63, WINDOW, dtype=np.uint64) | np.uint64(1)


def prompt_keys(mode: ReuseMode, scope: Namespace, prompts: Iterable[ChatPrompt]) -> ContentKeys:
    """Return the keys of everything in prompts that a cache may have.

    Args:
        scope: what separates caches; keys of two scopes differ.
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


def _message_key(scope: Namespace, segment: Segment) -> int:
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


def scope_of(spec: "GenerationSpec", model: str | None = None) -> Namespace:
    """Return what separates the caches that a request may use.

    Args:
        model: None: the request's.
    """
    key = spec.key if model is None else spec.key._replace(model=model)
    # prefixes are found by all workflows of a client
    return _scope(key.client, key.model, None if spec.reuse == "exact" else key.workflow)


@lru_cache(maxsize=4096)  # a digest is computed once
def _scope(client: Client, model: str, workflow: str | None) -> Namespace:
    return Namespace((model,), client, workflow=workflow)


def answer_keys(mode: ReuseMode, scope: Namespace, tokens: Sequence[int], contents: Iterable[str]) -> ContentKeys:
    """Return the keys under which a generated answer is found.

    Args:
        contents: what a client may send back of it.
    """
    if mode == "auto":
        return anchor_keys(scope, tokens)
    return {content_key(scope, content): len(tokens) for content in contents} if mode == "messages" else {}


def content_key(scope: Namespace, content: str | Sequence[int], parent: int | None = None) -> int:
    """Return a 64-bit hash of a scope and a content.

    Args:
        parent: key of what comes before it; None: that makes no difference.
    """
    digest = hashlib.blake2b(scope.digest, digest_size=8)
    digest.update(b"any " if parent is None else b"next" + parent.to_bytes(8, "little"))
    if isinstance(content, str):
        digest.update(b"text" + content.encode("utf-8", "surrogatepass"))
    else:
        digest.update(b"ids." + np.asarray(content, dtype=np.int64).tobytes())
    return int.from_bytes(digest.digest(), "little")


def prefix_keys(scope: Namespace, prompt: ChatPrompt) -> ContentKeys:
    """Return a key of every prefix of whole messages or blocks."""
    parts = [segment.tokens for segment in prompt.segments]
    rest = prompt.tokens[sum(map(len, parts)) :]
    parts += [tuple(rest[start : start + BLOCK]) for start in range(0, len(rest) - BLOCK + 1, BLOCK)]
    keys, parent = ContentKeys(), 0  # of no part
    for part in parts:
        parent = content_key(scope, part, parent)
        keys[parent] = len(part)
    return keys


def anchor_keys(scope: Namespace, tokens: Sequence[int]) -> ContentKeys:
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
