"""`Session`: prefill and decode over its own messages."""

import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..context.feature import RequestDraft
from ..context.placement import check_positions
from ..core.core import EngineCore
from ..errors import (
    ChoreographError,
    ConfigError,
    InvalidRequestError,
    MessageReleasedError,
    NotAMessageError,
    SessionClosedError,
    WrongSessionError,
)
from ..features.agent_tags import current_tag
from ..features.blocked_turns import log_warning
from ..features.budget import Budget
from ..features.guard import copy_labels, labels_of
from ..features.layer_variants import with_layers
from ..features.variants import TextOrigin
from ..kv_cache.entry import KVEntry
from ..kv_cache.pool import KVPool
from ..kv_cache.tiers import TransferOps
from ..layer_pattern import LayerPattern, parse_layer_pattern
from ..messages.handle import MessageHandle, MessageSlice, Parent
from ..messages.kv_export import KVSnapshot, attach_entry, import_kv, unpin_session, wait_encoded
from ..namespace import Client, Namespace, shared_namespace
from ..outputs import BASE_MODEL, Mode, Usage
from ..request.decode_state import DecodeState
from ..request.request import Reencoding, Request
from ..sampling_params import SamplingParams
from ..utils import call_all, close_after
from .call import OPTION_NAMES, SAMPLING_FIELDS, Call, CallKind, Offsets, PromptInput, SessionAPI
from .chat import ChatTemplate, turns_of
from .message import Message
from .validation import (
    check_offsets,
    check_parents,
    check_position,
    check_rows,
    check_sampling,
    create_decode_state,
    follows_system_turn,
    join_turns,
    override_sampling,
    parents_of,
    require_chat_template,
    tokenize_input,
)

if TYPE_CHECKING:
    from .engine import Engine

DEFAULT_SAMPLING = SamplingParams()
SAMPLING_NAMES = frozenset(SAMPLING_FIELDS)


class Session(SessionAPI[Message, Message | MessageSlice]):
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
        options: Mapping[str, Any],
    ) -> None:
        self.engine: Engine = None  # type: ignore[assignment]  # the Engine that opened it
        self.core = core
        self._chat_template = chat_template
        self._tokenizer = core.hf_model.tokenizer
        self._vocabulary = chat_template, core.hf_model.model_info.vocab_size
        self.mode, self.client_id, self._client = mode, client_id, Client.of(client_id)
        self.model = self.resolve_model(model)
        self.id = core.new_id()
        self._messages: dict[int, Message] = {}  # by id, not released yet, in order
        self._released_usage = Usage()  # of released messages that are not in `_released`
        self._released: list[Request] = []  # released, not in `_released_usage`; others may attend to unfinished ones
        self._max_released = 8  # of them, before the finished ones are removed
        self.closed = False
        self.on_close: list[Callable[[], None]] = []
        self.on_warning: Callable[[str], None] = log_warning
        self._seed_rng = random.Random(seed)
        self.budget: Budget | None = None  # chooses the repair of calls that give none
        self.defaults = core.features.parse_defaults(options)  # options of calls that give none
        self._names = {kind: dict.fromkeys((*names, *core.features.parsers)) for kind, names in OPTION_NAMES.items()}
        for feature in core.features.all:
            feature.opened(self)

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
        with self.core.lock:
            requests = [*self._released, *(message._request for message in self._messages.values())]
            return sum((request.current_usage for request in requests), self._released_usage)

    def close(self) -> None:
        """Release every message, the youngest first. Final values stay readable.

        An error does not stop the release of other messages; the first error is raised afterwards.
        """
        self.closed = True
        errors = call_all(list(self.on_close))
        errors += call_all(message._release_quietly for message in reversed(self.messages))
        unpin_session(self.core, self.id)  # other threads cannot pin released messages
        for exc in errors + call_all([self.core.events.dispatch]):
            raise exc

    # -- messages from elsewhere ----------------------------------------------------------------------------

    def import_message(self, message: Message) -> Message:
        """Import a complete message of another session of the same client.

        Costs nothing. In choreographed mode both share the KV entry, otherwise the text.
        """
        self._check_open()
        if not isinstance(message, Message):
            raise NotAMessageError(f"{message!r} is not a message: give what prefill or decode returned")
        original = message._request
        namespace = replace(original.namespace, labels=frozenset(), features=())
        if message._core is not self.core or namespace != self._namespace(original.model):
            raise WrongSessionError(f"message {message.id} belongs to another engine or client: make it here")
        if original.released:
            raise MessageReleasedError(f"message {message.id} was released: keep it until its last use")
        if self.mode != "choreographed" or original.mode != "choreographed":
            return self.prefill(message.tokens, labels=labels_of(original).text or None)
        message.result()
        draft = self.bare_draft(message.tokens, new_offset=message.position, model=original.model)
        request, copy = draft.request, draft.message
        copy.roles, copy.imported_from = message.roles, message.imported_from or message
        request.position = message.position
        request.extend(TextOrigin(original))
        if original.layers is not None:  # can be recomputed as the original was
            assert original.reencoding is not None
            request.reencoding = replace(original.reencoding, is_placed=False)
            request.parents, request.parent_slices = original.parents, original.parent_slices
        copy_labels(original, request)
        self.core.features.keep_options(original, request)
        return self.attach(draft, original.entry)

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
        draft = self.build(Call("prefill", tokens, parents, offsets, new_offset, {"model": model}))
        if self.mode != "choreographed":
            return self.submit([draft])[0]
        self.core.features.submit(draft)
        for parent in draft.request.parents:
            wait_encoded(self.core, parent)
        if import_kv(self.core, draft.request, snapshot, check=check):
            return self.register([draft.message])[0]
        return self.queue([draft])[0]

    def import_encoded(
        self,
        tokens: list[int],
        snapshot: KVSnapshot,
        load: Callable[[KVPool, KVEntry], TransferOps] | None = None,
    ) -> Message | None:
        """Return a message with KV that another engine computed.

        Its context may be unknown here. Returns None without capacity for it. If it is evicted, it is computed
        again on its own.

        Args:
            load: as in `messages.kv_export.import_kv`.
        """
        draft = self.build(Call("prefill", tokens))
        self.core.features.submit(draft)
        # a prefill of equal tokens must not find it
        request = draft.request
        request.namespace = replace(request.namespace, origin=snapshot.content_hash)
        if not import_kv(self.core, request, snapshot, check=False, any_context=True, load=load):
            return None
        return self.register([draft.message])[0]

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
        variant = with_layers(self, message, self.resolve_model(model), parse_layer_pattern(pattern))
        assert isinstance(variant, Message)
        return variant

    # -- building requests: everything is checked before anything is changed --------------------------------

    def _option_names(self, kind: CallKind) -> Collection[str]:
        return self._names[kind]

    def _submit_calls(self, calls: list[Call]) -> list[Message]:
        return self.submit([self.build(call) for call in calls])

    def build(self, call: Call) -> RequestDraft:
        """Check a call and build its request, without submitting it."""
        self._check_open()
        parents, options = self.check_parents(call.parents), call.options
        after_system = follows_system_turn(parents)
        state: DecodeState | None = None
        own, given = dict[str, Any](), dict[str, Any]()  # sampling parameters, options of features
        for name, value in options.items():
            if name in SAMPLING_NAMES:
                own[name] = value
            elif value is not None and name in self.core.features.parsers:
                given[name] = value
        if call.kind == "decode":
            ids, state = self._build_decode(call.prompt, bool(parents), after_system, options, own)
        else:
            ids = tokenize_input(call.prompt, *self._vocabulary, opening=not parents, after_system=after_system)
        request = self._new_request(
            ids, parents, call.offsets, call.new_offset, state, options.get("model"), options.get("priority", 0)
        )
        message = self._handle(request, parents)
        message.roles = tuple(turn.role for turn in turns_of(call.prompt))
        return self.core.features.draft(request, message, self, given, self.defaults)

    def _build_decode(
        self,
        header: PromptInput,
        has_parents: bool,
        after_system: bool,
        options: Mapping[str, Any],
        sampling_options: dict[str, Any],
    ) -> tuple[list[int], DecodeState]:
        """Return the token ids of a header and the sampling state of its decode."""
        sampling = override_sampling(options.get("sampling", DEFAULT_SAMPLING), sampling_options)
        footer, forced_tokens = options.get("footer"), options.get("forced_tokens")
        footer_ids, turns = list[int](), turns_of(header)
        if turns:
            encoded = require_chat_template(self._chat_template).encode_turns(
                turns, opening=not has_parents, after_system=after_system, opens_last=True
            )
            ids, footer_ids = join_turns(encoded), list(encoded[-1].footer_ids)
            if not ids:
                raise ConfigError("the chat template writes nothing before an answer: give the turn its first words")
            check_rows(ids + footer_ids, "header", *self._vocabulary)
        else:
            ids = tokenize_input(header, *self._vocabulary, opening=not has_parents, name="header")
        if footer is not None:
            footer_ids = tokenize_input(footer, *self._vocabulary, opening=False, name="footer", allow_empty=True)
        check_sampling(sampling, self.core.hf_model.model_info.vocab_size, has_tokenizer=self._tokenizer is not None)
        if forced_tokens is not None:
            forced_tokens = tokenize_input(forced_tokens, *self._vocabulary, opening=False, name="forced_tokens")
        eos_token_ids = () if sampling.ignore_eos else self.core.hf_model.eos_token_ids
        state = create_decode_state(ids, sampling, eos_token_ids, forced_tokens, *self._vocabulary, footer_ids)
        state.is_chat_turn = bool(turns) and footer is None
        return ids, state

    def _new_request(
        self,
        ids: list[int],
        parents: tuple[Parent, ...],
        offsets: Offsets,
        new_offset: int | None,
        state: DecodeState | None,
        model: str | None,
        priority: int,
    ) -> Request:
        core, max_positions = self.core, self.core.hf_model.model_info.max_positions
        if type(priority) is not int:
            raise InvalidRequestError(f"priority={priority!r}: use a whole number; the lowest is served first")
        if model is not None and model != self.model and model not in core.model_set.remote:
            model = self.resolve_model(model)
        model = model or self.model
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
            decode_state=state,
            priority=priority,
            model=model,
            weights_group=core.model_set.weights_group(model),
        )
        if ids:  # else the tokens of another message, which may not be known yet
            check_positions(request, lengths, max_positions)
        return request

    def _namespace(self, model: str) -> Namespace:
        return shared_namespace(self.core.model_set.weights_key(model), self._client)

    def _handle(self, request: Request, parents: tuple[Parent, ...]) -> Message:
        message = self.message_type(request, self.core, self._tokenizer)
        message.parents = parents
        return message

    def check_parents(self, parents: Iterable[Parent]) -> tuple[Parent, ...]:
        """Check that parents are messages of this session, or slices that do not overlap."""
        return check_parents(parents, self.core, self.id)

    def resolve_model(self, model: str | None) -> str:
        """Return `model` if the engine serves it; the session's model for None."""
        name, names = self.model if model is None else model, self.core.model_set.names
        if name not in names:
            raise ConfigError(
                f"model={name!r}: use one of {list(names)}, or give the engine a model or an adapter of that name"
            )
        return name

    def _check_open(self) -> None:
        if self.closed:
            raise SessionClosedError("the session is closed: open a new one")

    # -- what features build --------------------------------------------------------------------------------

    def draft_copy(
        self,
        message: MessageHandle,
        parents: tuple[Parent, ...],
        offsets: Offsets = None,
        new_offset: int | None = None,
        *,
        model: str,
        priority: int = 0,
        keeps_positions: bool = True,
        is_call: bool = False,
        **options: Any,
    ) -> RequestDraft:
        """Build a prefill of a message's tokens over other parents.

        Args:
            keeps_positions: of the message and its parents; else they follow each other, or `offsets`.
            is_call: a program asks for it: the session's options apply to it.
            options: of features.
        """
        source = (message.imported_from or message)._request
        ids = list(source.tokens) if source.tokens_final and not keeps_positions else []
        request = self._new_request(ids, parents, offsets, new_offset, None, model, priority)
        if (
            keeps_positions or is_call or not ids
        ):  # else nothing but its tokens is taken: a failure of it concerns no reader
            request.reencoding = Reencoding(source, keeps_positions)
        handle = self._handle(request, parents)
        handle.roles = message.roles
        return self.core.features.draft(
            request, handle, self, options, self.defaults, None if is_call else message._request
        )

    def bare_draft(
        self,
        tokens: list[int],
        parents: tuple[Parent, ...] = (),
        offsets: Offsets = None,
        new_offset: int | None = None,
        *,
        model: str,
    ) -> RequestDraft:
        """Build a prefill that is never queued: it gets a KV entry otherwise."""
        request = self._new_request(tokens, parents, offsets, new_offset, None, model, 0)
        return RequestDraft(request, self._handle(request, parents), self, {}, {})

    def attach(self, draft: RequestDraft, entry: KVEntry) -> Message:
        """Complete a prefill with an existing KV entry."""
        attach_entry(self.core, draft.request, entry)
        return self.register([draft.message])[0]

    # -- submission -----------------------------------------------------------------------------------------

    def submit(self, drafts: list[RequestDraft]) -> list[Message]:
        """Submit all requests or none; a refused one consumes no session seed."""
        for draft in drafts:
            self.core.features.submit(draft)
        return self.queue(drafts)

    def queue(self, drafts: list[RequestDraft]) -> list[Message]:
        """Queue requests that features have submitted."""
        self.core.add_requests([draft.request for draft in drafts], self._seed_rng)
        return self.register([draft.message for draft in drafts])

    def register(self, messages: list[Message]) -> list[Message]:
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
        self.core.events.dispatch()
        return messages

    def _unregister(self, message: MessageHandle) -> None:
        with self.core.lock:
            if self._messages.pop(message.id, None) is None:
                return
            released = self._released
            released.append(message._request)
            if len(released) > self._max_released:  # twice what is left: a release costs the same for any number
                self._released_usage = sum((r.current_usage for r in released if r.is_finished), self._released_usage)
                released[:] = [request for request in released if not request.is_finished]
                self._max_released = 2 * len(released) + 8
