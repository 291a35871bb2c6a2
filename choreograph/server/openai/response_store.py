"""Responses that later requests continue, by tenant."""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from ..api_errors import ApiError


@dataclass(frozen=True)
class StoredResponse:
    """Response that a later request can continue."""

    response: dict[str, Any]
    messages: list[dict[str, Any]]  # of the chat up to its answer, without instructions
    num_bytes: int  # of the request and its answer


@dataclass
class _TenantResponses:
    """Responses of one tenant, the oldest first."""

    by_id: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)
    num_bytes: int = 0

    def pop(self, response_id: str) -> None:
        self.num_bytes -= self.by_id.pop(response_id).num_bytes


class ResponseStore:
    """Stored responses by tenant and id; a tenant's oldest are dropped.

    Args:
        max_responses: of one tenant.
        max_bytes: of one tenant's requests and answers.
    """

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._tenants: dict[str, _TenantResponses] = {}

    def add(self, tenant: str, stored: StoredResponse) -> None:
        responses = self._tenants.setdefault(tenant, _TenantResponses())
        responses.by_id[stored.response["id"]] = stored
        responses.num_bytes += stored.num_bytes
        while len(responses.by_id) > self._max_responses or responses.num_bytes > self._max_bytes:
            responses.pop(next(iter(responses.by_id)))

    def get(self, tenant: str, response_id: str, param: str | None = None) -> StoredResponse:
        """Return a response, or raise an ApiError of status 404."""
        responses = self._tenants.get(tenant)
        stored = None if responses is None else responses.by_id.get(response_id)
        if stored is None:
            raise ApiError(404, f"Response with id '{response_id}' not found.", param=param, code="not_found")
        return stored

    def remove(self, tenant: str, response_id: str) -> None:
        self.get(tenant, response_id)
        self._tenants[tenant].pop(response_id)
