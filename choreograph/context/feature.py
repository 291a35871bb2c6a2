"""The interface of features: what changes which keys and values a request reads.

The core calls features when a request is built, submitted, admitted and finished, never for a token. A feature knows
requests, their parents and namespaces; it knows nothing of queues and batches.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

from ..errors import ConfigError, InvalidRequestError
from ..namespace import Namespace
from ..request.request import Request
from .placement import resolve_offsets

Parser = Callable[[Any], Any]  # returns the valid value of an option, or raises a ChoreographError


@dataclass(frozen=True)
class Ready:
    """The request can be placed."""


@dataclass(frozen=True)
class Wait:
    """The request is looked at again in the next step."""

    for_capacity: bool = True  # later requests may pass over it a bounded number of times


@dataclass(frozen=True)
class Prefills:
    """Requests to compute before the request is looked at again.

    New ones, or finished ones whose keys and values are lost.
    """

    requests: Sequence[Request]


READY = Ready()

Outcome = Ready | Wait | Prefills


@dataclass(slots=True)
class RequestDraft:
    """Request that is being built from a call of a session."""

    request: Request
    message: Any  # handle of the request
    session: Any  # that builds it
    options: dict[str, Any]  # of features: of the call, else of the session, else None
    given: Mapping[str, Any]  # of features: of the call itself
    copy_of: Request | None = None  # message whose tokens are encoded again, not for a call


class ContextFeature:
    """Base class of features; an engine has one instance of each.

    `Engine(features=[...])` registers them. State of a request lives in `Request.extensions`.
    """

    # parsers by name of the options of `prefill`, `decode` and `Engine.session`; None is never parsed: not given
    options: ClassVar[Mapping[str, Parser]] = {}
    session_options: ClassVar[Mapping[str, Parser]] = {}  # of `Engine.session` alone
    # a copy of a message, as the guard and other models make them, is prepared with the options of its call
    keeps_options: ClassVar[bool] = True
    needs_options: ClassVar[bool] = False  # `prepare` is called only where some option of a feature is set
    rewrites_again: ClassVar[bool] = False  # `rewrite` is called at each try to admit, also after `Ready`

    def attach(self, core: Any) -> None:
        """Take what the feature needs of an engine."""

    def opened(self, session: Any) -> None:
        """Prepare a session that was opened with its options (`session.defaults`)."""

    def prepare(self, draft: RequestDraft) -> None:
        """Check the options of a call and set the state of its request.

        Nothing else may change: a later call of the same list may be refused.
        """

    def submit(self, draft: RequestDraft) -> None:
        """Replace the parents of a request, if needed by others that are submitted first."""

    def namespace(self, request: Request) -> Hashable:
        """Return what separates the request's keys and values; None shares them.

        It is text, a number, bytes, or tuples, sets and dataclasses of these.
        """
        return None

    def rewrite(self, request: Request, *, may_load: bool) -> Outcome:
        """Replace parents, slices or offsets of a request whose parents are final.

        Called before the request is placed, until it returns `Ready`. Your features see the parents that the call
        names; the library's repair comes after them. Prefills that a feature asks for are not rewritten.

        Args:
            may_load: False while an earlier request waits for capacity: load nothing.

        Raises:
            CacheFullError: if there is no capacity at the moment; the request waits.
            ChoreographError: any other one fails the request.
        """
        return READY

    def admitted(self, request: Request) -> None:
        """Take note of a request that has a new KV entry."""

    def finished(self, request: Request) -> None:
        """Drop what only a running request needs."""


@dataclass
class _KeptOptions:
    """Options of a call that copies of its message have too."""

    values: dict[str, Any]


class _NamedParents(NamedTuple):
    """Parents that a call names."""

    parents: tuple[Request, ...]
    slices: tuple[tuple[int, int] | None, ...]
    offsets: tuple[int | None, ...]

    @property
    def positions(self) -> tuple[int, ...]:
        pairs = zip(self.parents, self.slices, strict=True)
        lengths = [len(parent.tokens) if part is None else part[1] - part[0] for parent, part in pairs]
        return resolve_offsets(lengths, self.offsets, None)[0]


def _named_parents(request: Request) -> _NamedParents:
    return _NamedParents(request.parents, request.parent_slices, request.offsets)


@dataclass
class Rewriting:
    """How far the features are with one request."""

    named: _NamedParents
    ready: set[ContextFeature] = field(default_factory=set)


class FeatureSet:
    """Features of one engine, in the order in which they are called."""

    def __init__(self, features: Iterable[ContextFeature]) -> None:
        self.all = tuple(features)
        self.parsers: dict[str, Parser] = {}  # by name, of the options of a call
        self.session_parsers: dict[str, Parser] = {}  # by name, of the options of a session
        for feature in self.all:
            if not isinstance(feature, ContextFeature):
                raise ConfigError(f"features: {feature!r} is no ContextFeature: give instances of subclasses")
            if sum(type(other) is type(feature) for other in self.all) > 1:
                raise ConfigError(
                    f"features: two are of type {type(feature).__qualname__}: give one, or make a subclass"
                )
            for name in (*feature.options, *feature.session_options):
                if name in self.session_parsers:
                    raise ConfigError(f"features: two have the option {name!r}: rename one")
            self.parsers |= feature.options
            self.session_parsers |= {**feature.options, **feature.session_options}
        self._kept = [name for feature in self.all if feature.keeps_options for name in feature.options]
        self.preparing, self.submitting = self._with("prepare"), self._with("submit")
        self.rewriting, self.naming = self._with("rewrite"), self._with("namespace")
        self.admitting, self.finishing = self._with("admitted"), self._with("finished")

    def _with(self, method: str) -> tuple[ContextFeature, ...]:
        """Return the features that have a method of their own."""
        base = getattr(ContextFeature, method)
        return tuple(feature for feature in self.all if getattr(type(feature), method) is not base)

    def get(self, kind: type[Any]) -> Any:
        """Return the feature of a type."""
        return next(feature for feature in self.all if type(feature) is kind)

    def attach(self, core: Any) -> None:
        for feature in self.all:
            feature.attach(core)

    def parse_defaults(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Validate the options of a session.

        Raises:
            ConfigError: if there is no option of a name, or a value is invalid.
        """
        for name in options:
            if name not in self.session_parsers:
                raise ConfigError(
                    f"{name}={options[name]!r}: a session has no such option: use {[*self.session_parsers]}"
                )
        return {name: self.session_parsers[name](value) for name, value in options.items() if value is not None}

    def draft(
        self,
        request: Request,
        message: Any,
        session: Any,
        options: Mapping[str, Any],
        defaults: Mapping[str, Any],
        copy_of: Request | None = None,
    ) -> RequestDraft:
        """Let the features prepare a request.

        Args:
            options: of the call, set and with names that are known.
            defaults: valid options of the session.
        """
        given = {name: self.parsers[name](value) for name, value in options.items()} if options else {}
        values = {**defaults, **given}
        if copy_of is not None and (kept := copy_of.extension(_KeptOptions)) is not None:
            values |= kept.values
        if values and self._kept and (own := {name: values[name] for name in self._kept if name in values}):
            request.extend(_KeptOptions(own))
        draft = RequestDraft(request, message, session, values, given, copy_of)
        for feature in self.preparing:
            if values or copy_of is not None or not feature.needs_options:
                feature.prepare(draft)
        return draft

    def rewrite(self, request: Request, *, may_load: bool) -> Outcome:
        """Let the features replace parents, in order; the first one that is not ready decides."""
        state = request.extension(Rewriting)
        if state is None:
            request.extend(state := Rewriting(_named_parents(request)))
        for feature in self.rewriting:
            if feature in state.ready:
                continue
            outcome = feature.rewrite(request, may_load=may_load)
            if _named_parents(request) != state.named and not request.parent_positions:
                request.parent_positions = state.named.positions
            if not isinstance(outcome, Ready):
                return outcome
            if not feature.rewrites_again:
                state.ready.add(feature)
        return READY

    def submit(self, draft: RequestDraft) -> None:
        """Let the features replace parents, and separate the cache."""
        for feature in self.submitting:
            feature.submit(draft)
        self.set_namespace(draft.request)

    def keep_options(self, original: Request, copy: Request) -> None:
        """Give a copy of a message that shares its KV what features keep of it."""
        if (kept := original.extension(_KeptOptions)) is not None:
            copy.extend(kept)
        if original.namespace.features:
            copy.namespace = replace(copy.namespace, features=original.namespace.features)

    def set_namespace(self, request: Request) -> None:
        """Add what features separate to the request's namespace."""
        if self.naming:
            parts = tuple(
                (f"{type(feature).__module__}.{type(feature).__qualname__}", part)
                for feature in self.naming
                if (part := feature.namespace(request)) is not None
            )
            if parts:
                request.namespace = _with_parts(request.namespace, parts)


def _with_parts(namespace: Namespace, parts: tuple[tuple[str, Hashable], ...]) -> Namespace:
    extended = replace(namespace, features=parts)
    try:
        _ = extended.digest
    except TypeError as exc:
        raise InvalidRequestError(f"namespace of a feature: {exc}") from None
    return extended
