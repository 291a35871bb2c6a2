"""Identity of cached keys and values: nothing is shared between different namespaces.

Every part has a field of its own. Joined text could be equal for different parts, since clients choose most of
them: a name may contain any separator.
"""

import hashlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, cached_property, lru_cache
from typing import Any

UNSALTED = ("", "")  # salt of a server's requests that name none


@dataclass(frozen=True)
class Client:
    """Client whose sessions share keys and values."""

    tenant: str = "default"  # tenant of a server, or the `client_id` of a session of the library
    salt: tuple[str, ...] = ()  # separates caches of one tenant: `cache_salt` and `extra_key` of a request

    @classmethod
    def of(cls, client_id: "str | Client") -> "Client":
        """Return the client of a session."""
        return client_id if isinstance(client_id, Client) else cls(client_id)


@dataclass(frozen=True)
class Namespace:
    """What two messages must have in common to share keys and values.

    The router of replicas uses it too: `workflow` and `session` separate what it knows of prompts.
    """

    weights: tuple[str, ...] = ()  # fingerprints of the model and its adapter
    client: Client = Client()
    labels: frozenset[str] = frozenset()  # of the keys and values
    layers: frozenset[int] | None = None  # that are computed; None: all
    position: int | None = None  # of the first token, where keys cannot be rotated; None: any
    origin: str | None = None  # content hash of keys and values that another engine computed in its own context
    is_prompt: bool = False  # of the first tokens of whole prompts (prefix mode), not of messages
    workflow: str | None = None  # None: of all workflows
    session: str | None = None  # one of several of a workflow, as a client names it
    features: tuple[tuple[str, Hashable], ...] = ()  # what features separate, by feature

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of all fields, equal in every process."""
        return _digest(self)


@lru_cache(maxsize=4096)  # placements make equal ones again and again
def _digest(namespace: Namespace) -> bytes:
    return hashlib.sha256(serialize(namespace)).digest()


@lru_cache(maxsize=4096)
def shared_namespace(weights: tuple[str, ...], client: Client) -> Namespace:
    """Return the namespace of a session's unlabelled messages.

    It is one object for equal arguments, so that its digest is computed once.
    """
    return Namespace(weights, client)


def serialize(value: Any) -> bytes:
    """Serialize a value; results of different values differ.

    Every part starts with its type and its length.

    Args:
        value: None, bool, int, str, bytes, or tuples, sets and dataclasses of them; lists count as tuples.

    Raises:
        TypeError: if a part is of another type.
    """
    parts: list[bytes] = []
    _append(value, parts)
    return b"".join(parts)


def _append(value: Any, parts: list[bytes]) -> None:
    kind = type(value)
    if kind is str:
        data = value.encode("utf-8", "surrogatepass")
        parts.append(b"s%d:" % len(data))
        parts.append(data)
    elif kind is bytes:
        parts.append(b"b%d:" % len(value))
        parts.append(value)
    elif value is None or kind is bool:
        parts.append(b"N" if value is None else b"T" if value else b"F")
    elif kind is int:
        parts.append(b"i%d:" % value)
    elif kind is tuple or kind is list:
        _append_all(b"(", value, parts)
    elif kind is frozenset or kind is set:
        _append_all(b"{", sorted(map(serialize, value)), parts)
    elif is_dataclass(kind):
        _append_all(b"<", (kind.__name__, *(getattr(value, name) for name in _field_names(kind))), parts)
    else:
        raise TypeError(f"{value!r} cannot be part of a key: use text, whole numbers, tuples, sets or dataclasses")


@cache
def _field_names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def _append_all(kind: bytes, values: Sequence[Any], parts: list[bytes]) -> None:
    parts.append(b"%b%d:" % (kind, len(values)))
    for value in values:
        _append(value, parts)
