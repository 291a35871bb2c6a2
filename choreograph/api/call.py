"""Calls of `prefill` and `decode`: the one list of their arguments, and how they are taken apart."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Generic, Literal, TypedDict, TypeVar, Unpack, overload

from ..errors import InvalidRequestError
from ..outputs import KVReuse
from ..sampling_params import SamplingParams
from .chat import ChatTurns, Turn

if TYPE_CHECKING:  # not for clients of a server, which do without torch
    from ..features.budget import Budget
    from ..features.guard import OnLeak
    from ..features.repair.options import Repair

Offsets = Sequence[int | None] | None
PromptInput = str | Sequence[int] | Turn | Sequence[Turn]


class FeatureOptions(TypedDict, total=False):
    """Options of the library's features, of a call or of a whole session.

    None, or leaving one out, takes the session's.
    """

    kv_reuse: KVReuse | None
    """For parents computed by another model. "recompute" (the default) prefills them again with this model, once per
    session; "partial" does so only in the layers given to `Engine.enable_layer_reuse` and reuses the others; "reuse"
    reuses all layers."""

    repair: "float | Repair | None"
    """Share of the parents' tokens to compute again in this context, 0 to 1, or a `Repair` (`docs/repair.md`)."""

    labels: Iterable[str] | None
    """Labels of the message's text (`docs/guard.md`)."""

    clearance: Iterable[str] | None
    """Labels that the message may attend to; None for all of them."""

    on_leak: "OnLeak | None"
    """"reencode" (the default) encodes parents that saw other labels again, "error" refuses them."""

    warn_blocked: bool | None
    """False: no warning of a user turn that saw nothing of what it is read with (`docs/concepts.md`); else one a
    session, in the log "choreograph"."""


class CallOptions(FeatureOptions, total=False):
    """Options of `Session.prefill`; features add theirs (`ContextFeature.options`)."""

    model: str | None
    """Model or adapter of the engine; None for the session's."""

    priority: int
    """Requests with a lower number are admitted first and preempted last; 0 by default."""


class SessionOptions(FeatureOptions, total=False):
    """Options of `Engine.session` that features read."""

    max_kl: "float | Budget | None"
    """In place of `repair`: divergence from prefix mode to stay within, in nats a token; a `Budget` learns which calls
    may reuse, a number alone computes every context."""


class DecodeOptions(CallOptions, total=False):
    """Options of `Session.decode`.

    Fields of `SamplingParams` are options too, as in max_tokens=4: they replace those of `sampling`.
    """

    sampling: SamplingParams
    """Sampling parameters."""

    footer: PromptInput | None
    """Tokens appended to the generated ones; None for the chat template's, if any."""

    forced_tokens: Sequence[int] | None
    """Taken one by one instead of sampling, at the full cost of decoding."""


CallKind = Literal["prefill", "decode"]

PROMPT_NAMES: Mapping[CallKind, str] = {"prefill": "tokens", "decode": "header"}  # of the first argument

SAMPLING_FIELDS = tuple(parameter.name for parameter in fields(SamplingParams))

# names of the options that the library itself has
OPTION_NAMES: Mapping[CallKind, tuple[str, ...]] = {
    "prefill": tuple(CallOptions.__annotations__),
    "decode": (*DecodeOptions.__annotations__, *SAMPLING_FIELDS),
}


# names that no feature's option may have
RESERVED_NAMES = {*PROMPT_NAMES.values(), "parents", "offsets", "new_offset", *OPTION_NAMES["decode"]}
RESERVED_NAMES |= {"mode", "seed", "client_id", *SessionOptions.__annotations__}


@dataclass(slots=True)
class Call:
    """One call, as a program made it."""

    kind: CallKind
    prompt: Any  # `PromptInput`, not validated yet, as the rest
    parents: Any = ()
    offsets: Any = None
    new_offset: Any = None
    options: dict[str, Any] = field(default_factory=dict)


MessageT = TypeVar("MessageT")
ParentT = TypeVar("ParentT")


class SessionAPI(ChatTurns, ABC, Generic[MessageT, ParentT]):
    """`prefill` and `decode` of sessions, of this process or of a server."""

    @overload
    def prefill(self, tokens: list[dict[str, Any]]) -> list[MessageT]: ...
    @overload
    def prefill(
        self,
        tokens: PromptInput,
        parents: Iterable[ParentT] = (),
        offsets: Offsets = None,
        new_offset: int | None = None,
        **options: Unpack[CallOptions],
    ) -> MessageT: ...
    @overload
    def prefill(self, tokens: PromptInput, *placement: Any, **options: Any) -> MessageT: ...
    def prefill(self, tokens, parents=(), offsets=None, new_offset=None, **options):
        """Prefill `tokens`, attending to all of `parents` and to themselves causally.

        Args:
            tokens: text, token ids, a chat turn or a list of turns; or a list of requests (dicts of
                these arguments), which returns a list of messages computed together.
            parents: messages, or slices of them (`message[start:stop]`).
            offsets: position of the first token of each parent; None follows the previous parent.
            new_offset: position of the first new token; None follows the last parent.
            options: see `CallOptions`.
        """
        return self._run(Call("prefill", tokens, parents, offsets, new_offset, options))

    @overload
    def decode(self, header: list[dict[str, Any]]) -> list[MessageT]: ...
    @overload
    def decode(
        self,
        header: PromptInput,
        parents: Iterable[ParentT] = (),
        offsets: Offsets = None,
        new_offset: int | None = None,
        **options: Unpack[DecodeOptions],
    ) -> MessageT: ...
    @overload
    def decode(self, header: PromptInput, *placement: Any, **options: Any) -> MessageT: ...
    def decode(self, header, parents=(), offsets=None, new_offset=None, **options):
        """Generate a message that starts with `header` and ends with a footer.

        Args:
            header: never empty, else as `tokens` of `prefill`. Of a list of turns the last one is
                generated and the others are complete; all of them attend to the parents, as in
                [session.user(question), session.assistant()].
            options: see `DecodeOptions`; fields of `SamplingParams` are options too.

        The other arguments are those of `prefill`.
        """
        return self._run(Call("decode", header, parents, offsets, new_offset, options))

    def _run(self, call: Call) -> Any:
        names = self._option_names(call.kind)
        if not is_batch(call.prompt):
            _check_names(call.kind, call.options, names)
            return self._submit_calls([call])[0]
        return self._submit_calls(_calls_of_batch(call, names))

    def _option_names(self, kind: CallKind) -> Collection[str]:
        """Return the names of all options of a call."""
        return OPTION_NAMES[kind]

    @abstractmethod
    def _submit_calls(self, calls: list[Call]) -> list[MessageT]:
        """Submit all calls or none."""


def is_batch(value: object) -> bool:
    """True if `value` is a list of argument dicts, maybe empty."""
    if not isinstance(value, (list, tuple)):
        return False
    for request in value:  # noqa: SIM110 - no generator: this runs for every request
        if not isinstance(request, Mapping):
            return False
    return True


def _calls_of_batch(call: Call, names: Collection[str]) -> list[Call]:
    """Return the calls of a list.

    Raises:
        InvalidRequestError: if a request has an unknown or missing argument, or if arguments are
            passed next to the list, where they would be ignored.
    """
    _check_names(call.kind, call.options, names)
    beside = {"parents": call.parents, "offsets": call.offsets, "new_offset": call.new_offset, **call.options}
    defaults = {"parents": (), "kv_reuse": "recompute", "priority": 0}
    for name, value in beside.items():
        default = defaults.get(name)
        if value is not default and not (type(value) is type(default) and value == default):
            hint = "put it into each request" if call.prompt else "give at least one token"
            raise InvalidRequestError(f"{name}={value!r} with a list of {len(call.prompt)} requests: {hint}")
    first, calls = PROMPT_NAMES[call.kind], []
    for request in call.prompt:
        options = dict(request)
        placement = options.pop("parents", ()), options.pop("offsets", None), options.pop("new_offset", None)
        prompt = options.pop(first, None)
        _check_names(call.kind, options, names)
        if prompt is None:
            raise InvalidRequestError(f"{request!r}: a request needs {first!r}")
        calls.append(Call(call.kind, prompt, *placement, options))
    return calls


def _check_names(kind: CallKind, options: Mapping[str, Any], names: Collection[str]) -> None:
    for name in options:
        if name not in names:
            is_turn = name in ("role", "content")
            known = [PROMPT_NAMES[kind], "parents", "offsets", "new_offset", *names]
            hint = "for a chat turn use session.user(text)" if is_turn else f"known: {known}"
            raise InvalidRequestError(f"{name}={options[name]!r:.60}: no such argument; {hint}")
