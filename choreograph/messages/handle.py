"""`MessageHandle`: the lazy handle of one `prefill` or `decode`.

Submitting computes nothing. Reading a value that is not final runs the engine until it is. All
requests submitted before that run in the same steps, so sequential code is batched automatically.
"""

import asyncio
from collections.abc import Callable, Generator, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from torch import Tensor

from ..config import as_int
from ..context.placement import resolve_offsets
from ..core.core import EngineCore
from ..errors import ConfigError, InvalidPositionError, InvalidRequestError
from ..kv_cache.manager import POLL_SECONDS
from ..outputs import FinishReason, Timing, TokenLogprob, Usage
from ..request.decode_state import TokenMask
from ..request.request import Request, RequestState
from .kv_export import KVSnapshot, export_kv, pin, unpin, wait_encoded


@dataclass(frozen=True)
class MessageSlice:
    """Tokens [start, stop) of a message, used as a parent."""

    message: "MessageHandle"
    start: int
    stop: int

    @property
    def id(self) -> int:
        return self.message.id

    @property
    def model(self) -> str:
        return self.message.model

    @property
    def length(self) -> int:
        return self.stop - self.start

    @property
    def position(self) -> int:
        """Logical position of the slice's first token in its message."""
        return self.message.position + self.start


class DecodeProgress(NamedTuple):
    """What a decode has generated since the last look at it."""

    text: str  # that no stop string can truncate anymore
    token_ids: list[int]  # the stop token included
    logprobs: list[TokenLogprob]  # of these tokens, if requested
    is_final: bool  # nothing follows


class MessageHandle:
    """Handle of one message of a session, complete or not."""

    def __init__(self, request: Request, core: EngineCore, tokenizer: Any) -> None:
        self._request = request
        self._core = core
        self._tokenizer = tokenizer
        self.parents: tuple[MessageHandle | MessageSlice, ...] = ()
        self.roles: tuple[str, ...] = ()  # of the chat turns that the call gave
        self.imported_from: MessageHandle | None = None  # the original of an imported message
        # the same text, encoded under other rules, and messages that those need; released with this one
        self.variants: dict[Hashable, MessageHandle] = {}
        self.on_release: Callable[[MessageHandle], None] | None = None

    def __repr__(self) -> str:
        kind = "decode" if self._request.is_decode else "prefill"
        return f"<Message {self.id} {kind} {self._request.state.value}>"

    @property
    def id(self) -> int:
        """Number that is unique in the engine."""
        return self._request.id

    @property
    def kind(self) -> str:
        """ "prefill" or "decode"."""
        return "decode" if self._request.is_decode else "prefill"

    @property
    def role(self) -> str | None:
        """Role of the last chat turn; None for text and token ids."""
        return self.roles[-1] if self.roles else None

    @property
    def model(self) -> str:
        """Model that computes the message: "base", an adapter or another model."""
        return self._request.model

    @property
    def tokens(self) -> list[int]:
        """All token ids; of a decode, header + generated + footer."""
        self._wait_tokens_final()
        return list(self._request.tokens)

    @property
    def output_token_ids(self) -> list[int]:
        """Generated token ids of a decode, the stop token included.

        Pass them as `forced_tokens` to repeat the content.
        """
        self._wait_tokens_final()
        return list(self._request.decode_state.tokens) if self._request.decode_state else []

    @property
    def text(self) -> str:
        """Generated text of a decode; text of a prefill.

        Excludes header, stop tokens and footer of a decode.
        """
        self._wait_tokens_final()
        if self._tokenizer is None:
            raise ConfigError("text needs a tokenizer: give one to Engine.from_pretrained(tokenizer=...)")
        if self._request.decode_state is None:
            text: str = self._tokenizer.decode(self._request.prompt, skip_special_tokens=True)
            return text
        return self._request.decode_state.text

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.tokens)

    def __getitem__(self, tokens: slice) -> MessageSlice:
        """Return the slice [start:stop] of the message, as a parent.

        `stop` defaults to the length; the engine runs until that is final.
        """
        if not isinstance(tokens, slice) or tokens.step is not None:
            raise InvalidPositionError(f"message[{tokens!r}]: use message[start:stop]")
        start = 0 if tokens.start is None else as_int(tokens.start)
        stop = self.length if tokens.stop is None else as_int(tokens.stop)
        if start is None or stop is None or not 0 <= start < stop:
            raise InvalidPositionError(f"message[{tokens.start}:{tokens.stop}]: use integers, 0 <= start < stop")
        return MessageSlice(self, start, stop)

    @property
    def position(self) -> int:
        """Logical position of the first token."""
        self._wait_position()
        return self._request.position  # type: ignore[return-value]

    @property
    def offsets(self) -> tuple[int, ...]:
        """Position of each parent's first token in this message's context."""
        self._wait_position()
        return self._request.parent_positions

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        """One entry per generated token; None unless `SamplingParams.logprobs` is set."""
        self._wait_tokens_final()
        decode_state = self._request.decode_state
        return list(decode_state.logprobs) if decode_state and decode_state.sampling.logprobs is not None else None

    @property
    def prompt_logprobs(self) -> list[TokenLogprob | None] | None:
        """One entry per token before the generated ones; the first is None.

        These are the tokens of context and header. Each is given what the decode reads before it: reused
        tokens as they are in the cache. None unless `SamplingParams.prompt_logprobs` is set.
        """
        scorer = self._request.decode_state.prompt_scorer if self._request.decode_state else None
        if scorer is None:
            return None
        self._wait(lambda: scorer.is_complete)
        return list(scorer.scores)

    def drop_prompt_logprobs(self) -> None:
        """Free the memory of `prompt_logprobs`; they are empty afterwards."""
        if self._request.decode_state is not None and self._request.decode_state.prompt_scorer is not None:
            self._request.decode_state.prompt_scorer.drop()

    def on_logprobs(self, callback: Callable[[Tensor], None]) -> None:
        """Call `callback` with the model's log-probabilities for every generated token.

        Args:
            callback: gets a float32 tensor of shape (V,), before sampling options are applied. Runs
                after each step and must not use the engine. If it raises, only this message fails
                (`RequestFailedError` with that exception as its cause).

        Raises:
            InvalidRequestError: if the message is no decode, or has generated tokens already.
        """
        decode_state = self._request.decode_state
        with self._core.lock:  # a step of another thread may be generating its first token
            if decode_state is None or decode_state.tokens:
                raise InvalidRequestError(f"message {self.id}: watch a decode before anything of it is generated")
            decode_state.on_logprobs = callback

    def constrain(self, mask: TokenMask) -> None:
        """Sample only tokens that `mask` allows, as for structured outputs.

        Raises:
            InvalidRequestError: if the message is no decode, or has generated tokens already.
        """
        decode_state = self._request.decode_state
        with self._core.lock:  # as in `on_logprobs`
            if decode_state is None or decode_state.tokens:
                raise InvalidRequestError(f"message {self.id}: constrain a decode before anything of it is generated")
            decode_state.token_mask = mask

    def progress(self, num_chars: int = 0, num_tokens: int = 0) -> DecodeProgress:
        """Return what a decode generated after a prefix; never runs the engine.

        Args:
            num_chars: characters to leave out.
            num_tokens: tokens to leave out.
        """
        state, is_final = self._request.decode_state, self._tokens_final()
        if state is None:
            raise InvalidRequestError(f"message {self.id} is a prefill: only a decode generates")
        text = state.text if is_final else state.stable_text
        return DecodeProgress(text[num_chars:], state.tokens[num_tokens:], state.logprobs[num_tokens:], is_final)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Finish reason: of a decode "stop", "length" or "forced".

        Of a prefill "encoded", or "cached" if an equal KV entry existed.
        """
        self._wait_finished()
        return self._request.finish_reason

    @property
    def usage(self) -> Usage:
        """Number of cached, computed and generated tokens."""
        self._wait_finished()
        return self._request.usage

    @property
    def timing(self) -> Timing:
        """Queue and run times in seconds."""
        self._wait_finished()
        return self._request.timing

    @property
    def done(self) -> bool:
        """True if every token is final; never runs the engine."""
        return self._tokens_final()

    @property
    def error(self) -> Exception | None:
        """Error of a failed message; never runs the engine."""
        return self._request.error

    def result(self) -> Self:
        """Run the engine until the message is complete.

        Returns the message, or raises its error.
        """
        self._wait_finished()
        return self

    def stream(self) -> Iterator[str]:
        """Yield the generated text piecewise.

        Text is yielded once no stop string can truncate it.
        """
        decode_state = self._request.decode_state
        if decode_state is None:
            yield self.text
            return
        if self._tokenizer is None:
            raise ConfigError("stream needs a tokenizer: give one to Engine.from_pretrained(tokenizer=...)")
        num_sent = 0
        while not self._tokens_final():
            num_tokens = len(decode_state.tokens)
            self._wait(lambda: self._tokens_final() or len(decode_state.tokens) > num_tokens)  # noqa: B023 - used at once
            text = decode_state.text if self._tokens_final() else decode_state.stable_text
            if len(text) > num_sent:
                yield text[num_sent:]
                num_sent = len(text)
        if len(decode_state.text) > num_sent:
            yield decode_state.text[num_sent:]

    def wait_encoded(self) -> Self:
        """Run the engine until the KV of every token is computed.

        This includes the last tokens of a decode. A message without KV in its mode is only
        completed. Returns the message.
        """
        if self._has_no_kv:
            return self.result()
        wait_encoded(self._core, self._request)
        return self

    def export_kv(self) -> KVSnapshot:
        """Copy the keys and values to host memory, for `Session.import_kv`.

        Raises:
            InvalidRequestError: if the message has no KV entry of its own (not choreographed).
        """
        if self._has_no_kv:
            raise InvalidRequestError(
                f"message {self.id} has no KV entry of its own in {self._request.mode} mode: export works in choreographed mode"
            )
        return export_kv(self._core, self.wait_encoded()._request)

    @property
    def kv_location(self) -> str:
        """Location of the KV entry.

        One of device, host, disk, loading, offloading, dropped; "nowhere" without an entry.
        """
        entry = self._request.entry
        return "nowhere" if entry is None or self._has_no_kv else entry.location

    def pin(self, seconds: float | None = None, *, owner: str | None = None) -> Self:
        """Load the KV entry onto the device and keep it there.

        Pins of different owners are independent. A message without KV in its mode is only
        completed.

        Args:
            seconds: duration; None until `unpin` or the end of the session.
            owner: name of the pin; None for the session's own.
        """
        if seconds is not None and (
            isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0
        ):
            raise ConfigError(f"seconds={seconds!r}: use a positive number or None")
        if not self.wait_encoded()._has_no_kv:
            pin(self._core, self._request, owner, None if seconds is None else float(seconds))
        return self

    def unpin(self, *, owner: str | None = None) -> None:
        """Remove an owner's pin, if there is one."""
        unpin(self._core, self._request, owner)

    def release(self) -> None:
        """Release the message's KV entry. Final values stay readable.

        An unfinished message is cancelled unless other requests depend on it.
        """
        self._release_quietly()
        self._core.events.dispatch()

    def _release_quietly(self) -> None:
        """Release without dispatching events."""
        for variant in self.variants.values():
            if variant is not self:  # another model may reuse it unchanged
                variant._release_quietly()
        self._core.release(self._request)
        if self.on_release is not None:
            self.on_release(self)

    def __await__(self) -> Generator[Any, None, Self]:
        return self._await_result().__await__()

    async def _await_result(self) -> Self:
        """Run steps until complete; yield between them so awaited messages share steps."""
        core = self._core
        while not self._is_finished() and self._request.state not in (RequestState.FAILED, RequestState.CANCELLED):
            is_stuck = not core.cache_manager.has_pending  # before the step, which polls transfers
            if core.step(wait=not core.wall_clock):
                await asyncio.sleep(0)
            elif is_stuck:
                break
            else:  # a transfer or a pin blocks: let other tasks run
                await asyncio.sleep(POLL_SECONDS)
        self._wait_finished()
        return self

    # -- waiting ------------------------------------------------------------------------------------------

    @property
    def _has_no_kv(self) -> bool:
        """True if the message has no KV entry in its mode.

        That is every message in naive mode, and prefills (text only) in prefix mode.
        """
        mode = self._request.mode
        return mode == "naive" or (mode == "prefix" and not self._request.is_decode)

    def _tokens_final(self) -> bool:
        return self._request.tokens_final

    def _is_finished(self) -> bool:
        """True if the message is complete.

        A decode is finished with its last token, a prefill with its computed KV.
        """
        return self._tokens_final() if self._request.is_decode else self._request.state is RequestState.DONE

    def _wait(self, condition: Callable[[], bool]) -> None:
        self._core.run_until(self._request, condition)

    def _wait_position(self) -> None:
        request = self._request
        if request.position is None and request.mode != "choreographed" and not request.is_decode:
            lengths = [parent.length for parent in self.parents]  # text only: default positions
            request.parent_positions, request.position = resolve_offsets(lengths, (None,) * len(lengths), None)
        self._wait(lambda: request.position is not None)

    def _wait_tokens_final(self) -> None:
        self._wait(self._tokens_final)

    def _wait_finished(self) -> None:
        self._wait(self._is_finished)


Parent = MessageHandle | MessageSlice


def unwrap_slice(parent: Parent) -> MessageHandle:
    """Return the message of a slice, or the message itself."""
    return parent.message if isinstance(parent, MessageSlice) else parent
