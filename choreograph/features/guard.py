"""Labels of messages, clearances of readers, and re-encoding without forbidden context.

A message has labels of its own, which concern its text, and effective ones, which concern its keys and
values: its own and those of everything it attended to. A reader may attend to a message if its
clearance contains all effective labels. If it contains only the own ones, the message is encoded
again from its tokens, without what the reader may not see.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, get_args

from ..context.feature import READY, ContextFeature, Outcome, Parser, RequestDraft
from ..errors import ConfigError, LeakError
from ..messages.handle import MessageHandle, Parent, unwrap_slice
from ..request.request import Request
from .other_models import kv_reuse_of
from .variants import VariantRule, is_usable, parents_of

Labels = frozenset[str]

OnLeak = Literal["reencode", "error"]


def parse_labels(labels: Iterable[str], name: str) -> Labels:
    """Validate a set of labels.

    Args:
        name: name of the argument in error messages.
    """
    names: list[Any] = list(labels) if isinstance(labels, Iterable) and not isinstance(labels, str) else [None]
    if not all(isinstance(label, str) and label for label in names):
        raise ConfigError(f"{name}={labels!r}: use a set of names, as in {{'alice-private'}}")
    return frozenset(names)


def _parse_on_leak(on_leak: OnLeak) -> OnLeak:
    if on_leak not in get_args(OnLeak):
        raise ConfigError(f"on_leak={on_leak!r}: use one of {get_args(OnLeak)}")
    return on_leak


@dataclass
class RequestLabels:
    """Labels of one request."""

    text: Labels = frozenset()  # of the tokens
    effective: Labels = frozenset()  # of the keys and values: `text` and those of everything it attends to


class ReadableVariant(NamedTuple):
    """Key of a variant: equal for clearances with equal results."""

    model: str
    labels: Labels  # of the message, those that its readers may see


def labels_of(request: Request) -> RequestLabels:
    """Return the labels of a request; a value of its own if it has none."""
    return request.extension(RequestLabels) or RequestLabels()


def copy_labels(original: Request, copy: Request) -> None:
    """Give the copy of a message its labels."""
    labels = labels_of(original)
    if labels.effective:
        _assign(copy, labels.text, labels.effective)


class Guard(ContextFeature):
    """Labels and clearances of messages."""

    keeps_options, needs_options = False, True
    options: ClassVar[Mapping[str, Parser]] = {
        "labels": partial(parse_labels, name="labels"),
        "clearance": partial(parse_labels, name="clearance"),
        "on_leak": _parse_on_leak,
    }

    is_active = False  # some request of the engine has labels or a clearance

    def prepare(self, draft: RequestDraft) -> None:
        """Set the labels of the text, and check that the parents may be read.

        Raises:
            LeakError: if a parent must not be read.
        """
        options = draft.options
        if draft.copy_of is not None:
            if text := labels_of(draft.copy_of).text:
                draft.request.extend(RequestLabels(text, text))
            return
        if labels := options.get("labels"):
            self.is_active = True
            draft.request.extend(RequestLabels(labels, labels))
        clearance = options.get("clearance")
        if clearance is not None:
            self.is_active = True
            _check(draft.message, clearance, options.get("on_leak", "reencode"))

    def submit(self, draft: RequestDraft) -> None:
        """Replace parents that must not be read by variants that may."""
        if not self.is_active:
            return
        clearance = draft.options.get("clearance")
        if clearance is not None and draft.copy_of is None and draft.request.mode == "choreographed":
            rule = _readable_rule(draft.session, clearance)
            readable = tuple(map(rule.ensure, draft.message.parents))
            if readable != draft.message.parents:
                draft.message.parents = readable
                draft.request.parents = tuple(unwrap_slice(parent)._request for parent in readable)


class LabelFlow(ContextFeature):
    """Labels of what a request attends to; the last feature, since others may add parents."""

    keeps_options = False

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    def submit(self, draft: RequestDraft) -> None:
        """Let labels flow from the parents to the request.

        Raises:
            LeakError: if a feature added a parent that must not be read.
        """
        if not self._guard.is_active:
            return
        clearance = draft.options.get("clearance")
        if clearance is not None and draft.copy_of is None:
            _check_parents(draft.request, clearance)
        _set_labels(draft.message, draft.request)

    def rewrite(self, request: Request, *, may_load: bool) -> Outcome:
        """Check that no feature has added a parent with other labels.

        The namespace has those of the submission, which `declassify` does not change.
        """
        if self._guard.is_active:
            _check_parents(request, request.namespace.labels)
        return READY


def _readable_rule(session: Any, clearance: Labels) -> VariantRule:
    """Return the rule of variants that saw no label outside of a clearance.

    An ancestor whose text is forbidden is left out.
    """

    def find(message: MessageHandle) -> MessageHandle | None:
        variant = message.variants.get(key(message))
        if labels_of(message._request).effective <= clearance and is_usable(message):
            return message
        return variant if is_usable(variant) else None

    def key(message: MessageHandle) -> ReadableVariant:
        return ReadableVariant(message.model, labels_of(message._request).effective & clearance)

    def parents(message: MessageHandle) -> list[Parent]:
        return [p for p in parents_of(message) if labels_of(unwrap_slice(p)._request).text <= clearance]

    def reencode(message: MessageHandle, parents: tuple[Parent, ...]) -> MessageHandle:
        # the parents follow each other without gaps: positions of the original may tell the length of what is left out
        draft = session.draft_copy(
            message, parents, model=message.model, keeps_positions=False, kv_reuse=kv_reuse_of(message._request)
        )
        (variant,) = session.submit([draft])
        assert isinstance(variant, MessageHandle)
        return variant

    return VariantRule(find, key, reencode, parents)


def _check_parents(request: Request, allowed: Labels) -> None:
    for parent in request.parents:
        if forbidden := _visible_labels(parent) - allowed:
            raise LeakError(
                f"a feature added parent {parent.id} with labels {sorted(forbidden)}; {sorted(allowed)} may be read: "
                "let it choose among the parents of the call"
            )


def _set_labels(message: MessageHandle, request: Request) -> None:
    """Set the effective labels, and separate the cache by them.

    Entries are shared only between messages of equal labels: what a reader finds in the cache
    does not depend on entries that it may not see.
    """
    own = request.extension(RequestLabels)
    text = labels = Labels() if own is None else own.text
    for parent in (*request.parents, *(unwrap_slice(parent)._request for parent in message.parents)):
        labels |= _visible_labels(parent)
    copy = request.reencoding
    if copy is not None and (copy.needs_entry or copy.layers is not None):
        labels |= labels_of(copy.source).effective  # of the layers that are not computed
    if labels:
        _assign(request, text, labels)


def _assign(request: Request, text: Labels, effective: Labels) -> None:
    request.extend(RequestLabels(text, effective))
    if effective != request.namespace.labels:
        request.namespace = replace(request.namespace, labels=effective)


def _visible_labels(request: Request) -> Labels:
    """Return the labels of what a reader gets: text, or KV."""
    labels = request.extension(RequestLabels)
    if labels is None:
        return Labels()
    return labels.effective if request.mode == "choreographed" else labels.text


def _check(message: MessageHandle, clearance: Labels, on_leak: OnLeak) -> None:
    """Check that the clearance contains the labels of all parents."""
    for parent in map(unwrap_slice, message.parents):
        if forbidden := labels_of(parent._request).text - clearance:
            raise LeakError(
                f"parent {parent.id} has labels {sorted(forbidden)} of its own, the clearance is {sorted(clearance)}: "
                "leave it out, raise the clearance, or call its declassify()"
            )
        if on_leak == "error" and (forbidden := _visible_labels(parent._request) - clearance):
            raise LeakError(
                f"parent {parent.id} attended to messages with labels {sorted(forbidden)}, the clearance is "
                f"{sorted(clearance)}: use on_leak='reencode', raise the clearance, or call its declassify()"
            )
