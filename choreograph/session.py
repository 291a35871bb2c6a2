"""A session: `prefill` and `decode` over its own messages. Owns validation and tokens; the runner computes."""

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, overload

import torch

from . import arguments
from .arguments import (
    Offsets,
    check_offsets,
    check_parents,
    check_position,
    check_shares,
    check_tokens,
    is_calls,
    make_each,
    refuse_empty,
)
from .chat import ChatFormat, Turn, Turns
from .engine.call import Call
from .engine.copies import Copy, copy_in, share, unpin_all
from .engine.generation import Generation
from .engine.runner import Runner
from .engine.text import make_detokenizer
from .errors import (
    BadTokens,
    CallError,
    ConfigError,
    ForeignMessage,
    ReleasedMessage,
    SessionClosed,
    UnknownMessage,
)
from .makers import maker_of
from .message import Message, Part, whole
from .pattern import Pattern, read_pattern
from .spite import call_all, close_behind
from .types import BASE, SHARES, Mode, SamplingParams, Share
from .versions import Versions

Text = str | Sequence[int] | Turn
DEFAULTS = SamplingParams()


class Session(Turns):
    """Messages of one workflow in one mode. Use as a context manager, or call `close`."""

    def __init__(
        self,
        runner: Runner,
        chat: ChatFormat | None,
        *,
        mode: Mode,
        seed: int | None,
        client_id: str,
        model: str = BASE,
    ) -> None:
        self.engine: Any = None  # the Engine that opened it
        self._runner = runner
        self._format = chat
        self._tokenizer = runner.adapter.tokenizer
        self.mode = mode
        self.model = self._known(model)
        self.id = runner.new_id()
        self._messages: dict[int, Message] = {}  # not released yet, in order
        self.closed = False
        self.on_close: list[Callable[[], None]] = []
        self.client_id = client_id
        self.versions = Versions(runner, self._message, self._submit, self._keep)
        self._seeds = random.Random(seed)

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, kind: object, problem: BaseException | None, *_: object) -> None:
        close_behind(self.close, problem)

    @property
    def messages(self) -> list[Message]:
        """The messages that are not released yet, in order."""
        return list(self._messages.values())

    def close(self) -> None:
        """Releases every message, the youngest first. Values that are known stay readable.

        What goes wrong keeps nothing from being released; the first problem is raised when all is."""
        self.closed = True
        problems = call_all(list(self.on_close))
        problems += call_all(message._let_go for message in reversed(self.messages))
        unpin_all(self._runner, self.id)  # of what is released, another thread pins nothing more
        for problem in problems + call_all([self._runner.events.deliver]):
            raise problem

    # -- calls --------------------------------------------------------------------------------------------

    @overload
    def prefill(self, tokens: list[dict[str, Any]]) -> list[Message]: ...
    @overload
    def prefill(
        self,
        tokens: Text,
        parents: Iterable[Message | Part] = (),
        offsets: Offsets = None,
        new_offset: int | None = None,
        *,
        model: str | None = None,
        share: Share = "recompute",
    ) -> Message: ...
    def prefill(self, tokens, parents=(), offsets=None, new_offset=None, *, model=None, share="recompute"):
        """Encodes `tokens` with attention to all of `parents`, and to themselves causally.

        Parent i is placed from position offsets[i] on, the message from `new_offset` on; None follows the
        parent before. A parent is a message or a part of one (`Message.part`). A list of calls (dicts of these
        arguments) gives a list of messages, computed together.

        `model` is the session's, unless another one of the engine is named. Parents that another model encoded are
        encoded again by this one, each once a session; share="partial" does so in the layers that `Engine.share` has
        named and takes the others as they are, share="reuse" takes all as they are.
        """
        beside = {"parents": parents, "offsets": offsets, "new_offset": new_offset, "model": model, "share": share}
        if is_calls(tokens):
            return self._submit(make_each(tokens, self._prefill_call, beside))
        return self._submit([self._prefill_call(tokens, **beside)])[0]

    @overload
    def decode(self, header: list[dict[str, Any]]) -> list[Message]: ...
    @overload
    def decode(
        self,
        header: Text,
        parents: Iterable[Message | Part] = (),
        offsets: Offsets = None,
        new_offset: int | None = None,
        *,
        sampling: SamplingParams = ...,
        footer: Text | None = None,
        forced_tokens: Sequence[int] | None = None,
        model: str | None = None,
        share: Share = "recompute",
    ) -> Message: ...
    def decode(
        self,
        header,
        parents=(),
        offsets=None,
        new_offset=None,
        *,
        sampling=DEFAULTS,
        footer=None,
        forced_tokens=None,
        model=None,
        share="recompute",
    ):
        """Generates a message that starts with `header` (never empty) and ends with `footer`.

        The footer of a chat turn is its template's own unless one is given. `forced_tokens` are taken one by
        one instead of sampled, at the full cost of decoding. `model` and `share` are those of `prefill`. A list of
        calls gives a list of messages.
        """
        beside = {"parents": parents, "offsets": offsets, "new_offset": new_offset, "model": model, "share": share}
        beside |= {"sampling": sampling, "footer": footer, "forced_tokens": forced_tokens}
        if is_calls(header):
            return self._submit(make_each(header, self._decode_call, beside))
        return self._submit([self._decode_call(header, **beside)])[0]

    def borrow(self, message: Message) -> Message:
        """A complete message of another session of this client, as one of this session's. Costs nothing.

        What it means depends on the mode: the same encoding when choreographed, else the same text.
        """
        self._check_open()
        if not isinstance(message, Message):
            raise UnknownMessage(f"{message!r} is not a message")
        if message._runner is not self._runner or message._call.salt != self._salt(message._call.model):
            raise ForeignMessage(f"message {message.id} belongs to another engine or client: make it here")
        if message._call.released:
            raise ReleasedMessage(f"message {message.id} was released: keep it until its last use")
        if self.mode != "choreographed" or message._call.mode != "choreographed":
            return self.prefill(message.tokens)
        message.result()
        copy = self._message(message.tokens, (), None, message.start, model=message._call.model)
        copy.origin, copy._call.start = message.origin or message, message.start
        if message._call.layers is not None:  # it can be made again, as it was
            made = message._call
            copy._call.layers, copy._call.source = made.layers, made.source
            copy._call.parents, copy._call.cuts = made.parents, made.cuts
        share(self._runner, copy._call, message._call.work)
        return self._keep(copy)

    def restore(
        self,
        tokens: Sequence[int],
        copy: Copy,
        parents: Iterable[Message | Part] = (),
        offsets: Offsets = None,
        new_offset: int | None = None,
        *,
        model: str | None = None,
        check: bool = True,
    ) -> Message:
        """`prefill` with keys and values that were copied out before (`Message.copy_out`); computes nothing.

        Raises CallError for a copy of anything else than these tokens in sight of these parents, and for a damaged one;
        check=False does not read it for damage: of one that never left this process, or that others vouch for.
        Completes the parents first. Falls back to computing where there is no room just now.
        """
        message = self._prefill_call(tokens, parents, offsets, new_offset, model)
        if self.mode == "choreographed":
            for parent in self.versions.show(message):
                whole(parent).encode()
            if copy_in(self._runner, message._call, copy, check=check):
                return self._keep(message)
        return self._submit([message])[0]

    def partial_prefill(
        self, message: Message, pattern: Pattern | Sequence[int], *, model: str | None = None
    ) -> Message:
        """A message for a model that did not encode it, and computes these layers of it and of what it sees: the others
        are those of the model that did (DroidSpeak, section 4.2). pattern: a `Pattern` or its three integers.

        Begins in the middle from what came into a layer then, which is kept where `Engine.share` named the layer;
        elsewhere all layers are computed. In calls with share="partial" this happens by itself.
        """
        if isinstance(message, Part):
            raise CallError("a part is no message of its own: give the whole, and see a part of its version")
        check_parents([message], self._runner, self.id)
        check_shares(self.mode)
        return self.versions.partial(message, self._known(model), read_pattern(pattern))

    # -- validation: everything is checked before anything is changed ---------------------------------------

    def _prefill_call(
        self, tokens, parents=(), offsets=None, new_offset=None, model=None, share="recompute"
    ) -> Message:
        parents, model = self._parents(parents), self._known(model)
        ids = self._tokens(tokens, opening=not parents)
        return self._message(ids, parents, offsets, new_offset, model=model, share=share)

    def _decode_call(
        self,
        header,
        parents=(),
        offsets=None,
        new_offset=None,
        sampling=DEFAULTS,
        footer=None,
        forced_tokens=None,
        model=None,
        share="recompute",
    ) -> Message:
        parents, model = self._parents(parents), self._known(model)
        if isinstance(header, Turn):
            ids, own_footer = self._chat().open(header, opening=not parents and header.opening)
            refuse_empty(ids, "header")
        else:
            ids, own_footer = self._tokens(header, opening=not parents, what="header"), []
        footer = own_footer if footer is None else self._tokens(footer, opening=False, what="footer", empty=True)
        generation = self._generation(ids, sampling, forced_tokens)
        return self._message(ids, parents, offsets, new_offset, generation, footer, model, share)

    def _message(
        self,
        ids: list[int],
        parents: tuple[Message | Part, ...],
        offsets: Offsets,
        new_offset: int | None,
        generation: Generation | None = None,
        footer: list[int] | None = None,
        model: str | None = None,
        share: Share = "recompute",
    ) -> Message:
        """A handle on a valid call that is not submitted yet."""
        runner = self._runner
        most = runner.adapter.facts.max_positions
        if share not in SHARES:
            raise ConfigError(f"share={share!r}: use one of {SHARES}")
        placed = check_offsets(offsets, len(parents), most)
        new_offset = check_position("new_offset", new_offset, most)
        call = Call(
            id=runner.new_id(),
            session=self.id,
            mode=self.mode,
            salt=self._salt(model or self.model),
            prompt=ids,
            parents=tuple(whole(p)._call for p in parents),
            cuts=tuple((p.first, p.last) if isinstance(p, Part) else None for p in parents),
            offsets=placed,
            new_offset=new_offset,
            generation=generation,
            footer=footer or [],
            model=model or self.model,
            group=maker.group if (maker := maker_of(self)) else None,
        )
        message = Message(call, runner, self._decode_text)
        message.parents, message.share = parents, share
        return message

    def _salt(self, model: str) -> str:
        """What a call's encodings are found by: whoever computes them, and for whom."""
        return f"{self._runner.family.fingerprint(model)}\0{self.client_id}"

    def _known(self, model: str | None) -> str:
        """A model that calls may ask for; the session's own where none is named."""
        name, known = self.model if model is None else model, self._runner.family.names
        if name not in known:
            raise ConfigError(
                f"model={name!r}: use one of {list(known)}, or give the engine a model or an adapter of that name"
            )
        return name

    def _submit(self, messages: list[Message]) -> list[Message]:
        """All or none; a refused call takes no seed from the session."""
        for message in messages:
            self.versions.show(message)
        calls = [message._call for message in messages]
        self._runner.submit(*calls, accepted=lambda: self._seed(calls))
        self._enter(*messages)
        self._runner.events.deliver()
        return messages

    def _seed(self, calls: Iterable[Call]) -> None:
        for generation in (call.generation for call in calls):
            if generation is not None:
                own = generation.sampling.seed
                seed = self._seeds.getrandbits(63) if own is None else int(own)
                generation.random.manual_seed(seed % (1 << 63))

    def _keep(self, message: Message) -> Message:
        """Of a message that needs no computing."""
        self._enter(message)
        self._runner.events.deliver()
        return message

    def _enter(self, *messages: Message) -> None:
        """The session releases them with itself, whatever becomes of them: listeners hear of them afterwards."""
        for message in messages:
            message.on_release = self._forget
            self._messages[message.id] = message
            if maker := maker_of(self):
                maker.on_message(message)
        if self.closed:  # by another thread, which may have seen none of them
            for message in messages:
                message._let_go()
            self._check_open()

    def _forget(self, message: Message) -> None:
        self._messages.pop(message.id, None)

    def _parents(self, parents: Iterable[Message | Part]) -> tuple[Message | Part, ...]:
        self._check_open()
        return check_parents(parents, self._runner, self.id)

    def _check_open(self) -> None:
        if self.closed:
            raise SessionClosed("the session is closed: open a new one")

    def _tokens(self, given: Text, *, opening: bool, what: str = "tokens", empty: bool = False) -> list[int]:
        if isinstance(given, Turn):
            ids = self._chat().encode(given, opening=opening and given.opening)
        elif isinstance(given, str):
            ids = self._chat().plain(given, opening=opening and bool(given))
        elif isinstance(given, bytes) or not isinstance(given, Iterable) or getattr(given, "ndim", 1) == 0:
            raise BadTokens(f"{what}={given!r}: give a string, token ids or a chat turn")
        else:
            size = self._runner.adapter.facts.vocab_size
            ids = check_tokens(given, what, size)
        if not empty:
            refuse_empty(ids, what)
        return ids

    def _chat(self) -> ChatFormat:
        if self._format is None:
            raise ConfigError("text needs a tokenizer: give one to Engine.from_pretrained, or use token ids")
        return self._format

    def _generation(self, header: list[int], sampling: SamplingParams, forced: Sequence[int] | None) -> Generation:
        arguments.check_sampling(sampling, self._runner.adapter.facts.vocab_size, text=self._tokenizer is not None)
        if forced is not None:
            forced = self._tokens(forced, opening=False, what="forced_tokens")
        eos = () if sampling.ignore_eos else self._runner.adapter.end_tokens
        return Generation(
            sampling=sampling,
            prompt=header,
            stop_tokens=frozenset((*eos, *sampling.stop_token_ids)),
            random=torch.Generator(),
            forced=forced,
            detokenizer=make_detokenizer(self._tokenizer),
        )

    @property
    def _decode_text(self) -> Callable[[list[int]], str] | None:
        tokenizer = self._tokenizer
        return None if tokenizer is None else lambda ids: tokenizer.decode(ids, skip_special_tokens=True)
