"""Warning of a question that saw nothing of what it is read with.

A turn that was prefilled on its own and is then read behind other messages was encoded without them: a question about
documents does not know which words of theirs it asks about (information blockage).
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple
from weakref import WeakSet

from ..context.feature import ContextFeature, Parser, RequestDraft
from ..errors import ConfigError
from ..messages.handle import MessageHandle, unwrap_slice
from .repair.planner import repair_of
from .variants import parents_of

MAX_NAMES = 3  # messages that a sentence lists

# `docs/quality.md`: Qwen 0.5B, Natural Questions
MEASURED = "of 40 questions about five documents each, a model of 0.5B then answered 35% instead of 15% right"

log_warning = logging.getLogger("choreograph").warning


class BlockedTurn(NamedTuple):
    """User turn that a decode answers, and what it did not see."""

    reader: MessageHandle
    turn: MessageHandle
    unseen: tuple[MessageHandle, ...]  # parents of the reader before the turn

    def advice(self, names: Mapping[int, str] | None = None) -> str:
        """Return a sentence that says what to do.

        Args:
            names: what it calls the messages, by id; "message <id>" for others.
        """
        reader, turn = (name_of(message.id, names or {}) for message in (self.reader, self.turn))
        unseen = list_names((message.id for message in self.unseen), names or {})
        return (
            f"{reader} answers {turn}, a user turn that saw nothing of {unseen} before it: give the turn in the header, "
            f"decode([session.user(...), session.assistant()], parents=[...]), or prefill it with these parents; {MEASURED}"
        )


def blocked_turn(message: MessageHandle) -> BlockedTurn | None:
    """Return the user turn that a message answers, if that turn saw nothing of what it is read with.

    None unless the message is a choreographed decode whose header is an assistant turn alone, and its last parent a
    prefilled user turn. Parents directly before it that the turn attended to belong to it. Of those before them,
    system turns and what all later parents attended to do not count. The turn must have attended to none of the
    others, not through other messages either.
    """
    if message.roles != ("assistant",) or message.kind != "decode" or message._request.mode != "choreographed":
        return None
    parents = [unwrap_slice(parent) for parent in message.parents]
    if len(parents) < 2 or parents[-1].role != "user" or parents[-1].kind == "decode":
        return None
    *before, turn = parents
    known = _seen_by(turn)
    while before and _id(before[-1]) in known:
        before.pop()
    if not before:
        return None
    seen = [_seen_by(parent) for parent in parents]
    unseen = [
        parent
        for number, parent in enumerate(before, 1)
        if parent.role != "system" and not all(_id(parent) in later for later in seen[number:])
    ]
    return BlockedTurn(message, turn, tuple(unseen)) if unseen and not _has_seen(turn, unseen) else None


def _has_seen(message: MessageHandle, others: Sequence[MessageHandle]) -> bool:
    """Return whether a message attended to one of others or its equal, or to what is not known."""
    ids, contents, queue, known = set(map(_id, others)), set(map(_content, others)), [message], {_id(message)}
    for reader in queue:  # grows during iteration
        if _id(reader) in ids or reader._request.namespace.origin is not None:  # computed elsewhere
            return True
        for parent in map(unwrap_slice, parents_of(reader)):
            if _id(parent) not in known:
                known.add(_id(parent))
                queue.append(parent)
    return any(_content(ancestor) in contents for ancestor in queue[1:])


def _id(message: MessageHandle) -> int:
    return (message.imported_from or message).id


def _seen_by(message: MessageHandle) -> set[int]:
    """Return the ids of what a message attended to directly."""
    return {_id(unwrap_slice(parent)) for parent in parents_of(message)}


def _content(message: MessageHandle) -> object:
    """Return what equal prefills have in common."""
    request = (message.imported_from or message)._request
    return request.id if request.is_decode else tuple(request.prompt)


def name_of(message: int, names: Mapping[int, str]) -> str:
    return names.get(message, f"message {message}")


def list_names(messages: Iterable[int], names: Mapping[int, str]) -> str:
    """Return a list of names, shortened, without repetitions."""
    unique = [name_of(message, names) for message in dict.fromkeys(messages)]
    rest = len(unique) - MAX_NAMES
    return ", ".join(unique[:MAX_NAMES]) + (f" and {rest} more" if rest > 0 else "")


def _parse_warn_blocked(value: bool) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"warn_blocked={value!r}: use True or False")
    return value


class BlockedTurns(ContextFeature):
    """Warns once a session of a user turn that saw nothing of what it is read with."""

    keeps_options = False
    options: ClassVar[Mapping[str, Parser]] = {"warn_blocked": _parse_warn_blocked}

    def __init__(self) -> None:
        self._warned: WeakSet[Any] = WeakSet()  # sessions

    def submit(self, draft: RequestDraft) -> None:
        """Warn of a call, unless a repair that computes tokens or a budget looks after it."""
        session, repair = draft.session, repair_of(draft.request)
        if not draft.options.get("warn_blocked", True) or (found := blocked_turn(draft.message)) is None:
            return
        if session not in self._warned and session.budget is None and (repair is None or repair.share == 0):
            self._warned.add(session)
            session.on_warning(f"{found.advice()}; warn_blocked=False turns this warning off")
