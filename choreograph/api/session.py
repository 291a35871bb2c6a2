"""`Session`: prefill and decode over its own messages, with argument validation."""

import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, overload

from ..context.placement import check_positions
from ..core.core import EngineCore
from ..errors import ChoreographError, ConfigError, InvalidRequestError, SessionClosedError
from ..features.cross_model import LayerPattern, parse_layer_pattern
from ..features.guard import UNGUARDED, CallGuard, LabelGuard, Labels, OnLeak
from ..features.repair.strategy import Repair
from ..namespace import Client, Namespace, shared_namespace
from ..outputs import BASE_MODEL, KV_REUSE, KVReuse, Mode, Usage
from ..request.request import DecodeState, Request
from ..sampling_params import SamplingParams
from ..utils import call_all, close_after
from .chat import ChatTemplate, ChatTurns, Turn
from .kv_export import KVSnapshot, unpin_session
from .message import Message, MessageSlice
from .message_variants import MessageVariants
from .request_tag import current_tag
from .validation import (
    Offsets,
    PromptInput,
    build_each,
    check_offsets,
    check_parents,
    check_position,
    check_rows,
    check_sampling,
    create_decode_state,
    follows_system_turn,
    is_batch,
    override_sampling,
    parents_of,
    require_chat_template,
    tokenize_input,
)

if TYPE_CHECKING:
    from ..features.budget import Budget
    from .engine import Engine

DEFAULT_SAMPLING = SamplingParams()


class Session(ChatTurns):
    """Messages of one workflow in one mode; use as context manager."""

    message_type = Message

    def __init__(
        self,
        core: EngineCore,
        chat_template: ChatTemplate | None,
        *,
        mode: Mode,
        seed: int | None,
        client_id: str | Client,
        model: str = BASE_MODEL,
        repair: float | Repair | None = None,
        guard: CallGuard = UNGUARDED,
    ) -> None:
        self.engine: Engine = None  # type: ignore[assignment]  # the Engine that opened it
        self._core = core
        self._chat_template = chat_template
        self._tokenizer = core.hf_model.tokenizer
        self._vocabulary = chat_template, core.hf_model.model_info.vocab_size
        self.mode, self.client_id, self._client = mode, client_id, Client.of(client_id)
        self.model = self._resolve_model(model)
        self.id = core.new_id()
        self._messages: dict[int, Message] = {}  # by id, not released yet, in order
        self._released_usage = Usage()  # of released messages that are not in `_released`
        self._released: list[Request] = []  # released, not in `_released_usage`; others may attend to unfinished ones
        self._max_released = 8  # of them, before the finished ones are removed
        self.closed, self._repair = False, Repair.parse(repair)
        self.on_close: list[Callable[[], None]] = []
        self._variants, self._guard = MessageVariants(self), LabelGuard(self, *guard)
        self._seed_rng = random.Random(seed)
        self.budget: Budget | None = None  # chooses the repair of calls that give none

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, exc_type: object, exc: BaseException | None, *_: object) -> None:
        close_after(self.close, exc)

    @property
    def messages(self) -> list[Message]:
        """Messages that are not released yet, in order of submission."""
        return list(self._messages.values())

    @property
    def usage(self) -> Usage:
        """Sum of the usage of all messages, including released and failed ones.

        Completes the messages first. Comparable between modes: outside of choreographed mode a
        prefill costs nothing, and its tokens count in every decode that includes them.
        """
        for message in self.messages:
            with suppress(ChoreographError):  # reading the message raises it
                message.result()
        with self._core.lock:
            requests = [*self._released, *(message._request for message in self._messages.values())]
            return sum((request.current_usage for request in requests), self._released_usage)

    def close(self) -> None:
        """Release every message, the youngest first. Final values stay readable.

        An error does not stop the release of other messages; the first error is raised afterwards.
        """
        self.closed = True
        errors = call_all(list(self.on_close))
        errors += call_all(message._release_quietly for message in reversed(self.messages))
        unpin_session(self._core, self.id)  # other threads cannot pin released messages
        for exc in errors + call_all([self._core.events.dispatch]):
            raise exc

    # -- requests -----------------------------------------------------------------------------------------

    @overload
    def prefill(self, tokens: list[dict[str, Any]]) -> list[Message]: ...
    @overload
    def prefill(
        self,
        tokens: PromptInput,
        parents: Iterable[Message | MessageSlice] = (),
        offsets: Offsets = None,
        new_offset: int | None = None,
        *,
        model: str | None = None,
        kv_reuse: KVReuse = "recompute",
        priority: int = 0,
        repair: float | Repair | None = None,
        labels: Iterable[str] | None = None,
        clearance: Iterable[str] | None = None,
        on_leak: OnLeak | None = None,
    ) -> Message: ...
    def prefill(
        self,
        tokens,
        parents=(),
        offsets=None,
        new_offset=None,
        *,
        model=None,
        kv_reuse="recompute",
        priority=0,
        repair=None,
        labels=None,
        clearance=None,
        on_leak=None,
    ):
        """Prefill `tokens`, attending to all of `parents` and to themselves causally.

        Args:
            tokens: text, token ids or a chat turn; or a list of requests (dicts of these
                arguments), which returns a list of messages computed together.
            parents: messages, or slices of them (`message[start:stop]`).
            offsets: position of the first token of each parent; None follows the previous parent.
            new_offset: position of the first new token; None follows the last parent.
            model: model or adapter of the engine; None for the session's.
            kv_reuse: for parents computed by another model. "recompute" prefills them again with
                this model, once per session; "partial" does so only in the layers given to
                `Engine.enable_layer_reuse` and reuses the others; "reuse" reuses all layers.
            priority: requests with a lower number are admitted first and preempted last.
            repair: share of the parents' tokens to compute again in this context, 0 to 1, or a
                `Repair` (`docs/repair.md`); None for the session's.
            labels: labels of the message's text (`docs/guard.md`), as also the next two; None for
                the session's.
            clearance: labels that the message may attend to; None for all of them.
            on_leak: "reencode" encodes parents that saw other labels again, "error" refuses them.
        """
        args = {"parents": parents, "offsets": offsets, "new_offset": new_offset}
        args |= {"model": model, "kv_reuse": kv_reuse, "priority": priority, "repair": repair}
        args |= {"labels": labels, "clearance": clearance, "on_leak": on_leak}
        if is_batch(tokens):
            return self._submit(build_each(tokens, self._build_prefill, args))
        return self._submit([self._build_prefill(tokens, **args)])[0]

    @overload
    def decode(self, header: list[dict[str, Any]]) -> list[Message]: ...
    @overload
    def decode(
        self,
        header: PromptInput,
        parents: Iterable[Message | MessageSlice] = (),
        offsets: Offsets = None,
        new_offset: int | None = None,
        *,
        sampling: SamplingParams = ...,
        footer: PromptInput | None = None,
        forced_tokens: Sequence[int] | None = None,
        model: str | None = None,
        kv_reuse: KVReuse = "recompute",
        priority: int = 0,
        repair: float | Repair | None = None,
        labels: Iterable[str] | None = None,
        clearance: Iterable[str] | None = None,
        on_leak: OnLeak | None = None,
        **sampling_options: Any,
    ) -> Message: ...
    def decode(
        self,
        header,
        parents=(),
        offsets=None,
        new_offset=None,
        *,
        sampling=DEFAULT_SAMPLING,
        footer=None,
        forced_tokens=None,
        model=None,
        kv_reuse="recompute",
        priority=0,
        repair=None,
        labels=None,
        clearance=None,
        on_leak=None,
        **sampling_options,
    ):
        """Generate a message that starts with `header` and ends with `footer`.

        Args:
            header: never empty, else as `tokens` of `prefill`; a list of requests returns a list of
                messages.
            sampling: sampling parameters.
            sampling_options: fields of `SamplingParams` that replace those of `sampling`, as in
                max_tokens=4.
            footer: tokens appended to the generated ones; None for the chat template's, if any.
            forced_tokens: taken one by one instead of sampling, at the full cost of decoding.

        The other arguments are those of `prefill`.
        """
        args = {"parents": parents, "offsets": offsets, "new_offset": new_offset, "sampling": sampling}
        args |= {"footer": footer, "forced_tokens": forced_tokens, "model": model, "kv_reuse": kv_reuse}
        args |= {"priority": priority, "repair": repair, "labels": labels, "clearance": clearance, "on_leak": on_leak}
        args |= sampling_options
        if is_batch(header):
            return self._submit(build_each(header, self._build_decode, args))
        return self._submit([self._build_decode(header, **args)])[0]

    def import_message(self, message: Message) -> Message:
        """Import a complete message of another session of the same client.

        Costs nothing. In choreographed mode both share the KV entry, otherwise the text.
        """
        self._check_open()
        return self._variants.import_message(message)

    def import_kv(
        self,
        tokens: Sequence[int],
        snapshot: KVSnapshot,
        parents: Iterable[Message | MessageSlice] = (),
        offsets: Offsets = None,
        new_offset: int | None = None,
        *,
        model: str | None = None,
        check: bool = True,
    ) -> Message:
        """Run `prefill` with exported keys and values (`Message.export_kv`), computing nothing.

        Completes the parents first. Without capacity for the KV at the moment, the message is
        computed.

        Args:
            snapshot: result of `Message.export_kv`.
            check: verify the checksum; False for snapshots that are trusted to be undamaged.

        Raises:
            InvalidRequestError: if the snapshot is of other tokens or parents, or is damaged.
        """
        message = self._build_prefill(tokens, parents, offsets, new_offset, model)
        if self.mode == "choreographed" and self._variants.import_kv(message, snapshot, check=check):
            return message
        return self._submit([message])[0]

    def partial_prefill(
        self, message: Message, pattern: LayerPattern | Sequence[int], *, model: str | None = None
    ) -> Message:
        """Recompute some layers of another model's message (DroidSpeak §4.2).

        The same layers are recomputed for its context; all others are reused from the other model.
        Starts from the layer's input hidden states, which are cached for the layers given to
        `Engine.enable_layer_reuse`; without them all layers are computed. Requests with
        kv_reuse="partial" do this automatically.

        Args:
            pattern: a `LayerPattern` or its three integers.
        """
        return self._variants.with_layers(message, self._resolve_model(model), parse_layer_pattern(pattern))

    # -- building requests: everything is checked before anything is changed --------------------------------

    def _build_prefill(
        self,
        tokens,
        parents=(),
        offsets=None,
        new_offset=None,
        model=None,
        kv_reuse="recompute",
        priority=0,
        repair=None,
        labels=None,
        clearance=None,
        on_leak=None,
    ) -> Message:
        self._check_open()
        parents = check_parents(parents, self._core, self.id)
        ids = tokenize_input(tokens, *self._vocabulary, opening=not parents, after_system=follows_system_turn(parents))
        guard = labels, clearance, on_leak
        message = self._build_request(
            ids, parents, offsets, new_offset, None, None, model, kv_reuse, priority, repair, guard
        )
        message.role = tokens.role if isinstance(tokens, Turn) else None
        return message

    def _build_decode(
        self,
        header,
        parents=(),
        offsets=None,
        new_offset=None,
        sampling=DEFAULT_SAMPLING,
        footer=None,
        forced_tokens=None,
        model=None,
        kv_reuse="recompute",
        priority=0,
        repair=None,
        labels=None,
        clearance=None,
        on_leak=None,
        **sampling_options,
    ) -> Message:
        self._check_open()
        if sampling_options:
            sampling = override_sampling(sampling, sampling_options, self._build_decode)
        parents, footer_ids = check_parents(parents, self._core, self.id), list[int]()
        if isinstance(header, Turn):
            ids, footer_ids = require_chat_template(self._chat_template).open_turn(
                header, opening=not parents and header.opening, after_system=follows_system_turn(parents)
            )
            if not ids:
                raise ConfigError("the chat template writes nothing before an answer: give the turn its first words")
            check_rows(ids + footer_ids, "header", *self._vocabulary)
        else:
            ids = tokenize_input(header, *self._vocabulary, opening=not parents, name="header")
        if footer is not None:
            footer_ids = tokenize_input(footer, *self._vocabulary, opening=False, name="footer", allow_empty=True)
        check_sampling(sampling, self._core.hf_model.model_info.vocab_size, has_tokenizer=self._tokenizer is not None)
        if forced_tokens is not None:
            forced_tokens = tokenize_input(forced_tokens, *self._vocabulary, opening=False, name="forced_tokens")
        eos_token_ids = () if sampling.ignore_eos else self._core.hf_model.eos_token_ids
        decode_state = create_decode_state(ids, sampling, eos_token_ids, forced_tokens, *self._vocabulary)
        decode_state.is_chat_turn = isinstance(header, Turn) and footer is None
        guard = labels, clearance, on_leak
        message = self._build_request(
            ids, parents, offsets, new_offset, decode_state, footer_ids, model, kv_reuse, priority, repair, guard
        )
        message.role = header.role if isinstance(header, Turn) else None
        return message

    def _build_request(
        self,
        ids: list[int],
        parents: tuple[Message | MessageSlice, ...],
        offsets: Offsets,
        new_offset: int | None,
        decode_state: DecodeState | None = None,
        footer: list[int] | None = None,
        model: str | None = None,
        kv_reuse: KVReuse = "recompute",
        priority: int = 0,
        repair: float | Repair | None = None,
        guard: CallGuard | None = None,
    ) -> Message:
        """Build a validated request and its handle, without submitting it."""
        core, max_positions = self._core, self._core.hf_model.model_info.max_positions
        if kv_reuse not in KV_REUSE:
            raise ConfigError(f"kv_reuse={kv_reuse!r}: use one of {KV_REUSE}")
        if type(priority) is not int:
            raise InvalidRequestError(f"priority={priority!r}: use a whole number; the lowest is served first")
        if model is not None and model != self.model and model not in core.model_set.remote:
            model = self._resolve_model(model)
        model, tag = model or self.model, current_tag(self)
        parent_requests, parent_slices, lengths = parents_of(parents)
        request = Request(
            id=core.new_id(),
            session_id=self.id,
            mode=self.mode,
            namespace=self._namespace(model),
            prompt=ids,
            parents=parent_requests,
            parent_slices=parent_slices,
            offsets=(None,) * len(parents) if offsets is None else check_offsets(offsets, len(parents), max_positions),
            new_offset=None if new_offset is None else check_position("new_offset", new_offset, max_positions),
            decode_state=decode_state,
            footer=footer or [],
            priority=priority,
            model=model,
            weights_group=core.model_set.weights_group(model),
            agent_key=None if tag is None else tag.agent_key,
        )
        if parents and self.mode == "choreographed":
            request.repair = self._repair if repair is None else Repair.parse(repair)
            if self.budget is not None and repair is None:
                request.repair = self.budget.choose(request)
        if ids:  # else the tokens of its source, which may not be known yet
            check_positions(request, lengths, max_positions)
        message = self.message_type(request, core, self._tokenizer)
        message.parents, message.kv_reuse = parents, kv_reuse
        if guard is not None and (guard != UNGUARDED or self._guard.is_active):
            self._guard.set_options(message, guard)
        return message

    def _namespace(self, model: str, labels: Labels = frozenset()) -> Namespace:
        """Return the namespace of a model's messages with these labels."""
        return shared_namespace(self._core.model_set.weights_key(model), self._client, labels)

    def _resolve_model(self, model: str | None) -> str:
        """Return `model` if the engine serves it; the session's model for None."""
        name, names = self.model if model is None else model, self._core.model_set.names
        if name not in names:
            raise ConfigError(
                f"model={name!r}: use one of {list(names)}, or give the engine a model or an adapter of that name"
            )
        return name

    def _check_open(self) -> None:
        if self.closed:
            raise SessionClosedError("the session is closed: open a new one")

    # -- submission -----------------------------------------------------------------------------------------

    def _submit(self, messages: list[Message]) -> list[Message]:
        """Submit all messages or none; a refused request consumes no session seed."""
        requests = []
        if self._guard.is_active:
            self._guard.apply(messages)
        for message in messages:
            request = message._request
            for parent in request.parents:
                if parent.model != request.model:
                    self._variants.resolve_parents(message)
                    break
            requests.append(request)
        self._core.add_requests(requests, self._seed_rng)
        self._register(messages)
        return messages

    def _register(self, messages: list[Message]) -> None:
        """Track messages until released or the session closes; dispatch the events."""
        tag = current_tag(self)
        for message in messages:
            message.on_release = self._unregister
            self._messages[message._request.id] = message
            if tag is not None:
                tag.on_message(message)
        if self.closed:  # concurrently, possibly before these were registered
            for message in messages:
                message._release_quietly()
            self._check_open()
        self._core.events.dispatch()

    def _unregister(self, message: Message) -> None:
        with self._core.lock:
            if self._messages.pop(message.id, None) is None:
                return
            released = self._released
            released.append(message._request)
            if len(released) > self._max_released:  # twice what is left: a release costs the same for any number
                self._released_usage = sum((r.current_usage for r in released if r.is_finished), self._released_usage)
                released[:] = [request for request in released if not request.is_finished]
                self._max_released = 2 * len(released) + 8
