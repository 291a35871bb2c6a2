"""A message: the handle that a caller holds on one `prefill` or `decode`. Owns nothing but the way to ask.

Handles are lazy: submitting is free, and reading a value that is not known yet runs the engine until it is. All
that was submitted in the meantime runs in the same steps, so sequential code batches itself.
"""

import asyncio
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .engine.call import Call, State
from .engine.copies import Copy, copy_out, pin, unpin
from .engine.modes import resolve_offsets
from .engine.runner import Runner
from .errors import BadPosition, CallError, ConfigError
from .kv.store import MOMENT
from .types import FinishReason, Share, Timing, TokenLogprob, Usage, whole_number

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Part:
    """Tokens first <= k < last of a message, as a parent."""

    message: "Message"
    first: int
    last: int

    @property
    def id(self) -> int:
        return self.message.id

    @property
    def model(self) -> str:
        return self.message.model

    @property
    def length(self) -> int:
        return self.last - self.first

    @property
    def start(self) -> int:
        """Logical position of its first token where the message was encoded."""
        return self.message.start + self.first


class Message:
    """One message of a session, complete or not."""

    def __init__(self, call: Call, runner: Runner, decode_text: Callable[[list[int]], str] | None) -> None:
        self._call = call
        self._runner = runner
        self._decode_text = decode_text
        self.parents: tuple[Message | Part, ...] = ()
        self.origin: Message | None = None  # of a borrowed message: whose encoding it is
        self.share: Share = "recompute"  # what becomes of parents that another model encoded
        self.versions: dict[tuple[str, str], Message] = {}  # the same for other models, by model and way of sharing
        self.on_release: Callable[[Message], None] | None = None

    def __repr__(self) -> str:
        kind = "decode" if self._call.is_decode else "prefill"
        return f"<Message {self.id} {kind} {self._call.state.value}>"

    @property
    def id(self) -> int:
        """Its number, which no other message of the engine has."""
        return self._call.id

    @property
    def kind(self) -> str:
        """ "prefill" or "decode"."""
        return "decode" if self._call.is_decode else "prefill"

    @property
    def model(self) -> str:
        """What encodes it: "base", or another model of the engine."""
        return self._call.model

    @property
    def layers(self) -> tuple[int, ...] | None:
        """The layers that are computed where others are those of another model's encoding; None: all of them."""
        return None if self._call.layers is None else tuple(sorted(self._call.layers))

    @property
    def tokens(self) -> list[int]:
        """All token ids: of a decode, header + generated + footer."""
        self._wait_known()
        return list(self._call.tokens)

    @property
    def generated(self) -> list[int]:
        """What a decode generated, the stop token included; feed it to `forced_tokens` to repeat the content."""
        self._wait_known()
        return list(self._call.generation.tokens) if self._call.generation else []

    @property
    def text(self) -> str:
        """Of a decode, what it generated, without header, stop and footer; of a prefill, its text."""
        self._wait_known()
        if self._decode_text is None:
            raise ConfigError("text needs a tokenizer: give one to Engine.from_pretrained(tokenizer=...)")
        if self._call.generation is None:
            return self._decode_text(self._call.prompt)
        return self._call.generation.text

    @property
    def length(self) -> int:
        """The number of its tokens."""
        return len(self.tokens)

    def part(self, first: int, last: int) -> Part:
        """Tokens first <= k < last, to be a parent in place of the whole message."""
        begin, end = whole_number(first), whole_number(last)
        for name, given, value in (("first", first, begin), ("last", last, end)):
            if value is None:
                raise BadPosition(f"{name}={given!r}: use a whole number")
        assert begin is not None and end is not None
        if not 0 <= begin < end:
            raise BadPosition(f"part {begin}:{end}: use 0 <= first < last")
        return Part(self, begin, end)

    @property
    def start(self) -> int:
        """Logical position of the first token."""
        self._wait_placed()
        return self._call.start  # type: ignore[return-value]

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each parent stands in this message's view."""
        self._wait_placed()
        return self._call.placed

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        """One entry for each generated token, if `SamplingParams.logprobs` asked for them."""
        self._wait_known()
        generation = self._call.generation
        return list(generation.logprobs) if generation and generation.sampling.logprobs is not None else None

    def watch(self, hear: Callable[["Tensor"], None]) -> None:
        """Gives `hear` the model's own log-probabilities, float32 of shape (V,), behind every generated token.

        To be called before the message is computed. `hear` runs when a step is published, before the next one: it must
        not use the engine. If it raises, this message fails (`CallFailed`, with the problem as its cause) and no other.
        """
        generation = self._call.generation
        if generation is None or generation.tokens:
            raise CallError(f"message {self.id}: watch a decode before anything of it is generated")
        generation.watch = hear

    @property
    def finish_reason(self) -> FinishReason | None:
        """Of a decode "stop", "length" or "forced", of a prefill "encoded", or "cached" where equal work was found."""
        self._wait_done()
        return self._call.finish_reason

    @property
    def usage(self) -> Usage:
        """How many tokens were found, encoded and generated."""
        self._wait_done()
        return self._call.usage

    @property
    def timing(self) -> Timing:
        """How long it waited and ran, in seconds."""
        self._wait_done()
        return self._call.timing

    @property
    def done(self) -> bool:
        """Whether every token is known; never runs the engine."""
        return self._known()

    @property
    def error(self) -> Exception | None:
        """Why it failed; never runs the engine."""
        return self._call.error

    def result(self) -> "Message":
        """Runs the engine until the message is complete; returns it, or raises its error."""
        self._wait_done()
        return self

    def stream(self) -> Iterator[str]:
        """The generated text piece by piece, as it becomes certain (a stop string can take nothing back)."""
        generation = self._call.generation
        if generation is None:
            yield self.text
            return
        if self._decode_text is None:
            raise ConfigError("stream needs a tokenizer: give one to Engine.from_pretrained(tokenizer=...)")
        sent = 0
        while not self._known():
            before = len(generation.tokens)
            self._wait(lambda: self._known() or len(generation.tokens) > before)  # noqa: B023 - used at once
            text = generation.text if self._known() else generation.settled_text
            if len(text) > sent:
                yield text[sent:]
                sent = len(text)
        if len(generation.text) > sent:
            yield generation.text[sent:]

    def encode(self) -> "Message":
        """Runs the engine until every token is encoded, the last ones of a decode too; returns the message. What is
        text alone in its mode is not encoded."""
        call = self._call
        if self._is_text:
            return self.result()
        self._wait(lambda: call.tokens_known and call.encoding is not None and call.encoding.settled)
        return self

    def copy_out(self) -> Copy:
        """Its keys and values in host memory; `Session.restore` takes them back. For choreographed messages."""
        if self._is_text:
            raise CallError(
                f"message {self.id} is text alone in {self._call.mode} mode: it has no encoding to copy out"
            )
        return copy_out(self._runner, self.encode()._call)

    @property
    def where(self) -> str:
        """Where its encoding is: device, host, disk, loading, offloading, dropped; "nowhere" without one."""
        encoding = self._call.encoding
        return "nowhere" if encoding is None or self._is_text else encoding.state

    def pin(self, seconds: float | None = None, *, owner: str | None = None) -> "Message":
        """Brings the encoding to the device and keeps it there for some seconds, or until `unpin` or the session's end.

        Owners do not undo each other's pins; the session is the owner where none is named. What is text alone in its
        mode has nothing to pin.
        """
        if seconds is not None and (
            isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0
        ):
            raise ConfigError(f"seconds={seconds!r}: use a positive number or None")
        if not self.encode()._is_text:
            pin(self._runner, self._call, owner, None if seconds is None else float(seconds))
        return self

    def unpin(self, *, owner: str | None = None) -> None:
        """Ends an owner's pin; without one does nothing."""
        unpin(self._runner, self._call, owner)

    def release(self) -> None:
        """Gives the encoding up. Unfinished work that nobody else needs is cancelled; known values stay readable."""
        self._let_go()
        self._runner.events.deliver()

    def _let_go(self) -> None:
        """`release`, of which listeners hear later."""
        for version in self.versions.values():
            if version is not self:  # another model may take it as it is
                version._let_go()
        self._runner.release(self._call)
        if self.on_release is not None:
            self.on_release(self)

    def __await__(self) -> Generator[Any, None, "Message"]:
        return self._drive().__await__()

    async def _drive(self) -> "Message":
        """Runs steps, giving other tasks their turn in between, so that awaited messages share steps."""
        runner = self._runner
        while not self._finished() and self._call.state not in (State.FAILED, State.CANCELLED):
            hopeless = not runner.store.busy  # asked before the step, which takes note of what has ended
            if runner.step(wait=not runner.real_time):
                await asyncio.sleep(0)
            elif hopeless:
                break
            else:  # a transfer or a pin: other tasks go on, and may lift it
                await asyncio.sleep(MOMENT)
        self._wait_done()
        return self

    # -- waiting ------------------------------------------------------------------------------------------

    @property
    def _is_text(self) -> bool:
        """Whether its mode keeps no encoding of it: of nothing in naive mode, in prefix mode of what decodes saw."""
        mode = self._call.mode
        return mode == "naive" or (mode == "prefix" and not self._call.is_decode)

    def _known(self) -> bool:
        return self._call.tokens_known

    def _finished(self) -> bool:
        """A decode is finished with its last token, a prefill with its encoding."""
        return self._known() if self._call.is_decode else self._call.state is State.DONE

    def _wait(self, done: Callable[[], bool]) -> None:
        self._runner.run_until(self._call, done)

    def _wait_placed(self) -> None:
        call = self._call
        if call.start is None and call.mode != "choreographed" and not call.is_decode:
            lengths = [parent.length for parent in self.parents]  # a text: nobody places it but the default rule
            call.placed, call.start = resolve_offsets(lengths, (None,) * len(lengths), None)
        self._wait(lambda: call.start is not None)

    def _wait_known(self) -> None:
        self._wait(self._known)

    def _wait_done(self) -> None:
        self._wait(self._finished)


def whole(parent: Message | Part) -> Message:
    return parent.message if isinstance(parent, Part) else parent
