"""Labels of messages, clearances of readers, and re-encoding without forbidden context.

A message has labels of its own, which concern its text, and effective ones, which concern its keys and
values: its own and those of everything it attended to. A reader may attend to a message if its
clearance contains all effective labels. If it contains only the own ones, the message is encoded
again from its tokens, without what the reader may not see.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

from ..api.message import Message, MessageSlice, Parent, unwrap_slice
from ..errors import ConfigError, LeakError
from ..request.request import Request

if TYPE_CHECKING:
    from ..api.session import Session

Labels = frozenset[str]

OnLeak = Literal["reencode", "error"]

CallGuard = tuple[Iterable[str] | None, Iterable[str] | None, OnLeak | None]  # labels, clearance, on_leak

UNGUARDED: CallGuard = (None, None, None)


def parse_labels(labels: Iterable[str], name: str) -> Labels:
    """Validate a set of labels.

    Args:
        name: name of the argument in error messages.
    """
    names: list[Any] = list(labels) if isinstance(labels, Iterable) and not isinstance(labels, str) else [None]
    if not all(isinstance(label, str) and label for label in names):
        raise ConfigError(f"{name}={labels!r}: use a set of names, as in {{'alice-private'}}")
    return frozenset(names)


class LabelGuard:
    """Labels and clearances of one session's messages."""

    def __init__(
        self,
        session: "Session",
        labels: Iterable[str] | None = None,
        clearance: Iterable[str] | None = None,
        on_leak: OnLeak | None = None,
    ) -> None:
        self._session = session
        self._defaults: tuple[Labels, Labels | None, OnLeak] = (Labels(), None, "reencode")
        self._defaults = self._parse(labels, clearance, on_leak)
        self.is_active = self._defaults[:2] != (Labels(), None)  # some message has labels or a clearance

    def set_options(self, message: Message, options: CallGuard) -> None:
        """Set labels and clearance of a new message; None for the session's."""
        message._request.text_labels, message.clearance, message.on_leak = self._parse(*options)
        self.is_active = True

    def _parse(
        self, labels: Iterable[str] | None, clearance: Iterable[str] | None, on_leak: OnLeak | None
    ) -> tuple[Labels, Labels | None, OnLeak]:
        """Validate options; None for the default."""
        if on_leak is not None and on_leak not in get_args(OnLeak):
            raise ConfigError(f"on_leak={on_leak!r}: use one of {get_args(OnLeak)}")
        return (
            self._defaults[0] if labels is None else parse_labels(labels, "labels"),
            self._defaults[1] if clearance is None else parse_labels(clearance, "clearance"),
            on_leak or self._defaults[2],
        )

    def apply(self, messages: Sequence[Message]) -> None:
        """Replace parents that must not be read, and let labels flow.

        Raises:
            LeakError: if a parent must not be read; nothing was submitted.
        """
        for message in messages:
            if message.clearance is not None:
                _check(message, message.clearance)
        for message in messages:
            if message.clearance is not None and message._request.mode == "choreographed":
                self._replace_parents(message, message.clearance)
            self._set_labels(message)

    def _replace_parents(self, message: Message, clearance: Labels) -> None:
        """Replace the parents that saw forbidden labels by variants that did not."""
        readable = tuple(self._readable(parent, clearance) for parent in message.parents)
        if readable != message.parents:
            message.parents = readable
            message._request.parents = tuple(unwrap_slice(parent)._request for parent in readable)

    def _readable(self, parent: Parent, clearance: Labels) -> Parent:
        """Return the parent or its variant for a clearance.

        The clearance contains the labels of its text. Missing variants of the message and its ancestors
        are created, the oldest first. An ancestor whose text is forbidden is left out.
        """
        stack = [unwrap_slice(parent)]
        while stack:
            message = stack[-1]
            seen = [p for p in _parents_of(message) if unwrap_slice(p)._request.text_labels <= clearance]
            if _find_readable(message, clearance) is not None:
                stack.pop()
            elif missing := [m for m in map(unwrap_slice, seen) if _find_readable(m, clearance) is None]:
                stack += missing
            else:
                parents = tuple(_readable_slice(p, clearance) for p in seen)
                message.variants[_variant_key(message, clearance)] = self._reencode(message, parents)
        return _readable_slice(parent, clearance)

    def _reencode(self, message: Message, parents: tuple[Parent, ...]) -> Message:
        """Submit a prefill of the message's tokens over other parents.

        They follow each other without gaps: positions of the original may tell the length of what
        is left out.
        """
        session, original = self._session, (message.imported_from or message)._request
        tokens = list(original.tokens) if original.tokens_final else []
        variant = session._build_request(tokens, parents, None, None, model=message.model)
        if not original.tokens_final:
            variant._request.source, variant._request.keeps_positions = original, False
        variant.role, variant.kv_reuse = message.role, message.kv_reuse
        variant._request.text_labels = message._request.text_labels
        return session._submit([variant])[0]

    def _set_labels(self, message: Message) -> None:
        """Set the effective labels, and separate the cache by them.

        Entries are shared only between messages of equal labels: what a reader finds in the cache
        does not depend on entries that it may not see.
        """
        request = message._request
        labels = request.text_labels
        for parent in message.parents:
            labels |= _visible_labels(unwrap_slice(parent))
        if request.source is not None and (request.computed_layers is not None or request.selects_from is not None):
            labels |= request.source.labels  # of the layers that are not computed
        self._assign(request, request.text_labels, labels)

    def copy_labels(self, original: Request, copy: Request) -> None:
        """Give the copy of a message its labels."""
        if original.labels:
            self._assign(copy, original.text_labels, original.labels)
            self.is_active = True

    def _assign(self, request: Request, text_labels: Labels, labels: Labels) -> None:
        request.text_labels, request.labels = text_labels, labels
        if labels != request.namespace.labels:
            request.namespace = self._session._namespace(request.model, labels)


def _parents_of(message: Message) -> tuple[Parent, ...]:
    """Return what the message attended to."""
    return (message.imported_from or message).parents


def _variant_key(message: Message, clearance: Labels) -> tuple[str, Labels]:
    """Return the key in `Message.variants`; equal for clearances with equal results."""
    return message.model, message.labels & clearance


def _find_readable(message: Message, clearance: Labels) -> Message | None:
    """Return the message or its unreleased variant for a clearance, or None."""
    candidate = message if message.labels <= clearance else message.variants.get(_variant_key(message, clearance))
    if candidate is not None and candidate._request.released:
        candidate = message.variants.get(_variant_key(message, clearance))
    return None if candidate is None or candidate._request.released else candidate


def _readable_slice(parent: Parent, clearance: Labels) -> Parent:
    readable = _find_readable(unwrap_slice(parent), clearance)
    assert readable is not None
    return MessageSlice(readable, parent.start, parent.stop) if isinstance(parent, MessageSlice) else readable


def _visible_labels(parent: Message) -> Labels:
    """Return the labels of what a reader gets: text, or KV."""
    request = parent._request
    return request.labels if request.mode == "choreographed" else request.text_labels


def _check(message: Message, clearance: Labels) -> None:
    """Check that the clearance contains the labels of all parents."""
    for parent in map(unwrap_slice, message.parents):
        if forbidden := parent._request.text_labels - clearance:
            raise LeakError(
                f"parent {parent.id} has labels {sorted(forbidden)} of its own, the clearance is {sorted(clearance)}: "
                "leave it out, raise the clearance, or call its declassify()"
            )
        if message.on_leak == "error" and (forbidden := _visible_labels(parent) - clearance):
            raise LeakError(
                f"parent {parent.id} attended to messages with labels {sorted(forbidden)}, the clearance is "
                f"{sorted(clearance)}: use on_leak='reencode', raise the clearance, or call its declassify()"
            )
