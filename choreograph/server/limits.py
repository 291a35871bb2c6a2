"""Limits of one tenant: an equal share of those of the server."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from .api_errors import overloaded
from .server_config import ServerConfig


@dataclass(frozen=True)
class TenantShare:
    """Limits of one tenant.

    A server without keys has one tenant.
    """

    requests: int  # running and waiting
    sessions: int  # open ones of `choreograph.connect`
    schemas: int  # of Prompt Cache
    workflows: int  # with a declared step graph
    workflow_tokens: int  # of messages kept for later requests
    responses: int  # of /v1/responses with `store`
    response_bytes: int  # of these

    @classmethod
    def of(cls, config: ServerConfig) -> "TenantShare":
        """Divide the limits of a server by the number of its keys."""
        count = max(1, len(config.api_keys))

        def share(limit: int) -> int:
            return max(1, limit // count) if limit else 0

        return cls(
            requests=share(config.max_requests),
            sessions=share(config.max_sessions),
            schemas=share(config.max_schemas),
            workflows=share(config.max_workflows),
            workflow_tokens=share(config.max_workflow_tokens),
            responses=share(config.max_stored_responses),
            response_bytes=share(config.max_stored_bytes),
        )


class RequestSlots:
    """Requests of each tenant that are being answered.

    Used in the event loop.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit  # of one tenant
        self._used: Counter[object] = Counter()

    @contextmanager
    def hold(self, key: object) -> Iterator[None]:
        """Hold a slot of a tenant inside the block.

        Raises:
            ApiError: of status 429, if the tenant holds as many as it may.
        """
        if self._used[key] >= self._limit:
            raise overloaded(self._limit)
        self._used[key] += 1
        try:
            yield
        finally:
            self._used[key] -= 1
            if not self._used[key]:
                del self._used[key]
