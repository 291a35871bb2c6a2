"""What a message is to models that did not encode it: encoded again, in all layers or in some, or taken as it is.

Versions hang on the message, one for each model and way of sharing, and go with it.
"""

from collections.abc import Callable
from typing import Protocol

from .arguments import Offsets
from .engine.copies import share as share_encoding
from .engine.runner import Runner
from .errors import CallError
from .message import Message, Part, whole
from .pattern import Pattern
from .types import Share

Parent = Message | Part
Again = Callable[[Message, tuple[Parent, ...]], Message]


class Make(Protocol):
    """A handle on a call of the session that is not submitted yet."""

    def __call__(
        self, ids: list[int], parents: tuple[Parent, ...], offsets: Offsets, new_offset: int | None, *, model: str
    ) -> Message: ...


class Versions:
    """Of the messages of one session."""

    def __init__(
        self,
        runner: Runner,
        make: Make,
        submit: Callable[[list[Message]], list[Message]],
        keep: Callable[[Message], Message],
    ) -> None:
        self._runner = runner
        self._make = make
        self._submit = submit
        self._keep = keep

    def show(self, message: Message) -> tuple[Parent, ...]:
        """What a message sees of its parents: in place of those that another model encoded, what they are to its own
        model, unless it reuses. Its parents stay what they are."""
        model, share = message.model, message.share
        if share == "reuse" or message._call.mode != "choreographed":
            return message.parents
        if share == "partial":
            self._refuse_unknown_pairs(message, model)

        def again(parent: Message, parents: tuple[Parent, ...]) -> Message:
            return self._again(parent, parents, model, self._chosen(parent, model, share))

        seen = tuple(p if p.model == model else _under(model, share, p, again) for p in message.parents)
        message._call.parents = tuple(whole(parent)._call for parent in seen)
        return seen

    def _refuse_unknown_pairs(self, message: Message, model: str) -> None:
        """Before anything is submitted, everything that the message sees is looked at, as deep as versions will go."""
        waiting, seen = [whole(p) for p in message.parents], set[int]()
        while waiting:
            parent = waiting.pop()
            if parent.id in seen or _version(parent, model, "partial") is not None:
                continue
            seen.add(parent.id)
            self._runner.sharing.refuse_unknown(model, parent.model)
            waiting += [whole(p) for p in (parent.origin or parent).parents]

    def partial(self, message: Message, model: str, pattern: Pattern) -> Message:
        """The message for a model that computes these layers of it, and these of what it sees."""
        layers = self._runner.adapter.facts.layers
        if message.model == model:
            raise CallError(f"message {message.id} was encoded by {model!r} itself")
        pattern.check(layers)

        def again(parent: Message, parents: tuple[Parent, ...]) -> Message:
            return self._again(parent, parents, model, pattern)

        return whole(_under(model, f"only {pattern}", message, again))

    def narrowed(self, message: Message, version: Message, pattern: Pattern) -> Message:
        """A version of a message, seen in these layers alone; in the others, the message itself is. Computes nothing
        but the version. For asking how well a pattern serves without computing it again."""
        known = version.encode()._call.layers
        if version._call.source is not message._call or (known is not None and not pattern.layers <= known):
            raise CallError(f"message {version.id} is no version of {message.id} that has the layers {pattern}")
        if not pattern.layers:
            return message
        made = self._make([], version.parents, None, None, model=version.model)
        made._call.source, made._call.start = message._call, version.start
        made._call.layers = pattern.layers
        share_encoding(self._runner, made._call, version._call.work)
        return self._keep(made)

    def elsewhere(self, plain: Message, model: str) -> Message:
        """A prefill that is not submitted, as a message that a model in another process has encoded: to be kept once
        it has."""
        call = plain._call
        return self._make(list(call.prompt), plain.parents, call.offsets, call.new_offset, model=model)

    def among(self, context: Message, plain: Message, pattern: Pattern) -> Message:
        """The version of `context`, with sight of what a prefill that is not submitted sees."""
        self._keep(context)
        version = self._again(context, self.show(plain), plain.model, pattern)
        if version is not context:
            version.versions[context.model, "sent"] = context  # goes with it
        return version

    def _chosen(self, message: Message, model: str, share: Share) -> Pattern | None:
        """The layers to compute of a message; None: all of them."""
        if share == "recompute":
            return None
        with self._runner.lock:
            return self._runner.sharing.choose(model, message.model, message._call)

    def _again(self, message: Message, parents: tuple[Parent, ...], model: str, pattern: Pattern | None) -> Message:
        if pattern is not None and not pattern.layers:
            return message
        version = self._make([], parents, None, None, model=model)
        version._call.source = (message.origin or message)._call
        version.share = "reuse"  # its parents are chosen: another model's too, where nothing of them is computed
        if pattern is not None and len(pattern.layers) < self._runner.adapter.facts.layers:
            version._call.layers = pattern.layers
        return self._submit([version])[0]


def _under(model: str, how: str, parent: Parent, again: Again) -> Parent:
    """What a parent is to a model: itself where the model encoded it, else a version of it that is made for the model,
    with sight of its parents as they are to the model. `again` makes what is not there yet, the oldest first."""
    waiting = [whole(parent)]
    while waiting:
        message = waiting[-1]
        parents = (message.origin or message).parents
        missing = [whole(p) for p in parents if _version(whole(p), model, how) is None]
        if _version(message, model, how) is not None:
            waiting.pop()
        elif missing:
            waiting += missing
        else:
            seen = tuple(_as_seen(p, model, how) for p in parents)
            message.versions[model, how] = again(message, seen)
    return _as_seen(parent, model, how)


def _version(message: Message, model: str, how: str) -> Message | None:
    """The message as a model may see it, if there is such a one. Computed in all layers is better than shared."""
    ways = ("recompute", how) if how == "partial" else (how,)
    known = [message] if message.model == model else []
    known += [message.versions[model, way] for way in ways if (model, way) in message.versions]
    return next((one for one in known if not one._call.released), None)


def _as_seen(parent: Parent, model: str, how: str) -> Parent:
    version = _version(whole(parent), model, how)
    assert version is not None
    return Part(version, parent.first, parent.last) if isinstance(parent, Part) else version
