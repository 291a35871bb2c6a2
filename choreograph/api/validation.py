"""Validation of request arguments, before any state changes."""

import dataclasses
from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch

from ..config import as_int
from ..errors import (
    ConfigError,
    DuplicateParentError,
    InvalidPositionError,
    InvalidRequestError,
    InvalidTokensError,
    MessageReleasedError,
    NotAMessageError,
    SamplingError,
    WrongSessionError,
)
from ..execution.prompt_scoring import PromptScorer
from ..messages.handle import MessageHandle, MessageSlice, Parent, unwrap_slice
from ..request.decode_state import DecodeState
from ..request.detokenizer import Detokenizer
from ..request.request import Request, RequestState
from ..sampling_params import SamplingParams
from .call import Offsets, PromptInput
from .chat import ChatTemplate, EncodedTurn, turns_of


def override_sampling(sampling: object, options: dict[str, Any]) -> SamplingParams:
    """Replace single sampling parameters.

    Raises:
        SamplingError: if `sampling` or the value of an option is invalid.
    """
    if not isinstance(sampling, SamplingParams):
        raise SamplingError(f"sampling={sampling!r}: use SamplingParams(...)")
    return dataclasses.replace(sampling, **options) if options else sampling


def check_parents(parents: Iterable[Parent], core: object, session_id: int) -> tuple[Parent, ...]:
    """Check that parents are messages of this session, or non-overlapping slices."""
    if isinstance(parents, (MessageHandle, MessageSlice)):
        raise InvalidRequestError("parents is one message: put it into a list")
    if not isinstance(parents, Iterable):
        raise InvalidRequestError(f"parents={parents!r}: use a list of messages")
    parents = tuple(parents)
    seen: dict[int, list[tuple[int, int]]] = {}
    for index, arg in enumerate(parents):
        parent, label = arg.message if isinstance(arg, MessageSlice) else arg, f"parents[{index}]"
        if not isinstance(parent, MessageHandle):
            raise NotAMessageError(
                f"{label}={parent!r} is not a message of this session: give what its prefill or decode returned"
            )
        if parent._core is not core or parent._request.session_id != session_id:
            raise WrongSessionError(f"{label} (message {parent.id}) belongs to another session or engine: make it here")
        if parent._request.released:
            raise MessageReleasedError(f"{label} (message {parent.id}) was released: keep it until its last use")
        if parent._request.state is RequestState.FAILED:
            raise InvalidRequestError(f"{label} (message {parent.id}) failed: {parent._request.error}")
        start, stop = (arg.start, arg.stop) if isinstance(arg, MessageSlice) else (0, 1 << 40)
        for other_start, other_stop in seen.setdefault(parent._request.id, []):
            if start < other_stop and other_start < stop:
                part = f" in part ({start}:{stop})" if isinstance(arg, MessageSlice) else ""
                raise DuplicateParentError(
                    f"{label} (message {parent.id}) is given twice{part}: prefill it again to use it twice"
                )
        seen[parent._request.id].append((start, stop))
    return parents


def check_offsets(offsets: Offsets, count: int, max_positions: int) -> tuple[int | None, ...]:
    """Validate the offsets of parents; return one per parent.

    None is the default offset. Others are in [0, max_positions).
    """
    if offsets is None:
        return (None,) * count
    if not isinstance(offsets, Iterable) or getattr(offsets, "ndim", 1) == 0:
        raise InvalidPositionError(f"offsets={offsets!r}: give a list, one for each parent")
    positions = tuple(offsets)
    if len(positions) != count:
        raise InvalidPositionError(f"{len(positions)} offsets for {count} parents: give one each, None for the default")
    return tuple(check_position(f"offsets[{index}]", offset, max_positions) for index, offset in enumerate(positions))


def check_position(name: str, position: object, max_positions: int) -> int | None:
    """Validate a position; return it as an int, None unchanged.

    Args:
        name: name of the argument in error messages.

    Raises:
        InvalidPositionError: if it is not an integer in [0, max_positions).
    """
    if position is None:
        return None
    value = as_int(position)
    if value is None:
        raise InvalidPositionError(f"{name}={position!r}: use a whole number or None")
    if not 0 <= value < max_positions:
        raise InvalidPositionError(f"{name}={value}: positions are 0 to {max_positions - 1} for this model")
    return value


def check_tokens(tokens: Iterable[object], name: str, vocab_size: int) -> list[int]:
    """Validate token ids; return them as ints below `vocab_size`."""
    ids: list[int] = []
    iterator = iter(tokens)
    while chunk := list(islice(iterator, 4096)):  # checked per chunk of ints: 10x faster than one by one
        ints: Any = chunk if set(map(type, chunk)) == {int} else ()
        is_valid = ints and min(ints) >= 0 and max(ints) < vocab_size
        ids += ints if is_valid else [check_token(token, name, vocab_size) for token in chunk]
    return ids


def check_token(token: object, name: str, vocab_size: int) -> int:
    """Validate a token id; return it as an int below `vocab_size`."""
    value = as_int(token)
    if value is None:
        raise InvalidTokensError(f"{name}: {token!r} is not a token id; give a string, token ids or chat turns")
    if not 0 <= value < vocab_size:
        raise InvalidTokensError(f"{name}: token id {value} is outside the vocabulary of {vocab_size}")
    return value


def check_rows(ids: list[int], name: str, chat_template: ChatTemplate | None, vocab_size: int) -> None:
    """Check that the model's embedding covers the token ids of the tokenizer."""
    if ids and max(ids) >= vocab_size:
        token = require_chat_template(chat_template).tokenizer.convert_ids_to_tokens(max(ids))
        raise InvalidTokensError(
            f"{name}: token {token!r} (id {max(ids)}) has no row in the model's embedding of {vocab_size}: "
            "resize the embedding, or remove the token from the text"
        )


def tokenize_input(
    prompt: PromptInput,
    chat_template: ChatTemplate | None,
    vocab_size: int,
    *,
    opening: bool,
    after_system: bool = False,
    name: str = "tokens",
    allow_empty: bool = False,
) -> list[int]:
    """Return the token ids of text, of chat turns or token ids.

    Every id has a row in the model's embedding.

    Args:
        opening: the input opens a conversation: its first turn includes the template's prefix, text the BOS
            token.
        after_system: the input follows a system turn.
        name: name of the argument in error messages.
        allow_empty: accept an input without tokens.
    """
    turns = turns_of(prompt)
    if turns or isinstance(prompt, str):
        chat_template = require_chat_template(chat_template)
        if isinstance(prompt, str):
            ids = chat_template.encode_text(prompt, opening=opening and bool(prompt))
        else:
            ids = join_turns(chat_template.encode_turns(turns, opening=opening, after_system=after_system))
        check_rows(ids, name, chat_template, vocab_size)
    elif isinstance(prompt, bytes) or not isinstance(prompt, Iterable) or getattr(prompt, "ndim", 1) == 0:
        raise InvalidTokensError(f"{name}={prompt!r}: give a string, token ids or chat turns")
    else:
        ids = check_tokens(prompt, name, vocab_size)
    if not ids and not allow_empty:
        raise InvalidTokensError(f"{name} is empty: give at least one token")
    return ids


def join_turns(turns: Iterable[EncodedTurn]) -> list[int]:
    """Return the token ids of turns that follow each other."""
    return [token for turn in turns for token in turn.token_ids]


def require_chat_template(chat_template: ChatTemplate | None) -> ChatTemplate:
    """Return the chat template; raise ConfigError if the engine has no tokenizer."""
    if chat_template is None:
        raise ConfigError("text needs a tokenizer: give one to Engine.from_pretrained, or use token ids")
    return chat_template


def follows_system_turn(parents: tuple[Parent, ...]) -> bool:
    """Return whether the parents' last chat turn is a system turn."""
    for parent in reversed(parents):
        role = unwrap_slice(parent).role
        if role is not None:
            return role == "system"
    return False


def check_sampling(sampling: object, vocab_size: int, *, has_tokenizer: bool) -> None:
    """Check sampling parameters against tokenizer and vocabulary.

    Token ids must be in the vocabulary; stop strings need a tokenizer.
    """
    if not isinstance(sampling, SamplingParams):
        raise SamplingError(f"sampling={sampling!r}: use SamplingParams(...)")
    for name, ids in (("stop_token_ids", sampling.stop_token_ids), ("logit_bias", sampling.logit_bias)):
        for token in ids:
            if token >= vocab_size:
                raise SamplingError(f"{name}: token id {token} is outside the vocabulary of {vocab_size}")
    if sampling.stop and not has_tokenizer:
        raise SamplingError(f"stop={sampling.stop!r}: stop strings need a tokenizer")


def parents_of(
    parents: Iterable[Parent],
) -> tuple[tuple[Request, ...], tuple[tuple[int, int] | None, ...], list[int]]:
    """Return requests, slices and current lengths of parents."""
    requests: list[Request] = []
    slices: list[tuple[int, int] | None] = []
    lengths: list[int] = []  # tokens that are final
    for parent in parents:
        if isinstance(parent, MessageSlice):
            requests.append(parent.message._request)
            slices.append((parent.start, parent.stop))
            lengths.append(parent.stop - parent.start)
        else:
            request = parent._request
            requests.append(request)
            slices.append(None)
            is_final_decode = request.decode_state is not None and request.tokens_final
            lengths.append(len(request.tokens if is_final_decode else request.prompt))
    return tuple(requests), tuple(slices), lengths


def create_decode_state(
    header: list[int],
    sampling: SamplingParams,
    eos_token_ids: Iterable[int],
    forced_tokens: list[int] | None,
    chat_template: ChatTemplate | None,
    vocab_size: int,
    footer: list[int],
) -> DecodeState:
    """Create the sampling state of a decode whose arguments were checked."""
    stop_tokens, detokenizer = {*sampling.stop_token_ids, *eos_token_ids}, None
    if chat_template is not None:
        special_tokens = chat_template.special_tokens
        detokenizer = Detokenizer(
            chat_template.tokenizer,
            header,
            chat_template.byte_token_ids,
            skip_special=sampling.skip_special_tokens,
            skipped_ids=special_tokens.ids if sampling.skip_special_tokens else frozenset(),
        )
        if sampling.stop:
            by_text = special_tokens.by_text
            stop_tokens.update(by_text[text] for text in sampling.stop if text in by_text)
    return DecodeState(
        sampling=sampling,
        prompt=header,
        stop_tokens=frozenset(stop_tokens),
        generator=torch.Generator(),
        forced_tokens=forced_tokens,
        footer=footer,
        detokenizer=detokenizer,
        prompt_scorer=None if sampling.prompt_logprobs is None else PromptScorer(sampling.prompt_logprobs, vocab_size),
    )
