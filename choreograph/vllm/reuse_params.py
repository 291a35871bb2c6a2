"""What a request and its answer say about reuse: `kv_transfer_params["choreograph"]`."""

import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

VERSION = 1
FIELD = "choreograph"  # of `kv_transfer_params`
CONNECTOR_OPTION = (  # of `vllm serve`, as errors show it
    '--kv-transfer-config \'{"kv_connector": "ChoreographConnector", "kv_connector_module_path": "choreograph.vllm", '
    '"kv_role": "kv_both"}\''
)
MAX_ITEMS = 1024  # spans or stores of one request, which the scheduler plans between two steps
MAX_NAMES = 16384
NO_ALIGNMENT = (
    "vLLM's attention has one softmax scale for all keys of a request, so reused ones cannot have another: use repair as "
    "a share from 0 to 1, or an Engine"
)

ReuseKind = Literal["spans", "messages", "exact"]
EntryName = Annotated[str, Field(min_length=1, max_length=256)]
Count = Annotated[int, Field(ge=0, lt=2**31)]
Position = Annotated[int, Field(ge=-(2**31), lt=2**31)]


class RefusedRequestError(ValueError):
    """A request asks for reuse that cannot be done."""


class _Params(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class SpanParams(_Params):
    """Prompt tokens whose keys and values are those of an entry."""

    entry: EntryName
    start: Count = 0  # first token of the entry
    stop: Count  # token of the entry that follows the last one
    at: Count  # index of the first token in the prompt
    position: Position | None = None  # of the first key, where token i of the prompt has position i; None: `at`


class StoreParams(_Params):
    """Tokens of the prompt and the answer that become an entry."""

    entry: EntryName
    start: Count
    stop: Count | None = None  # None: up to the last token that has keys and values

    @model_validator(mode="after")
    def _check_range(self) -> "StoreParams":
        if self.stop is not None and self.stop <= self.start:
            raise ValueError(f"stop={self.stop} must be larger than start={self.start}")
        return self


class ReuseParams(_Params):
    """Reuse that a request asks for."""

    mode: ReuseKind | None = None  # None: "spans" if there are spans or stores, else the server's
    spans: Annotated[list[SpanParams], Field(max_length=MAX_ITEMS)] = []
    store: Annotated[list[StoreParams], Field(max_length=MAX_ITEMS)] = []
    release: Annotated[list[EntryName], Field(max_length=MAX_NAMES)] = []  # forgotten when the request ends
    query: Annotated[list[EntryName], Field(max_length=MAX_NAMES)] = []  # the answer lists those that are not stored
    workflow: str | None = None  # entries are found only in the same workflow
    steps: Annotated[dict[EntryName, Count], Field(max_length=MAX_NAMES)] | Count | None = (
        None  # to the next use of entries; one number: of all of the request
    )
    labels: Annotated[list[str], Field(max_length=64)] = []  # entries are found only under the same labels
    repair: Annotated[float, Field(ge=0, le=1)] = 0.0  # share of every reused run, its first tokens
    alignment: None = None  # of an `Engine`; refused here

    @property
    def is_explicit(self) -> bool:
        return bool(self.spans or self.store)

    @property
    def end(self) -> int:
        """Index of the prompt token behind the last span."""
        return self.spans[-1].at + self.spans[-1].stop - self.spans[-1].start if self.spans else 0

    @field_validator("alignment", mode="before")
    @classmethod
    def _refuse_alignment(cls, value: Any) -> None:
        if value is not None:
            raise ValueError(NO_ALIGNMENT)

    @model_validator(mode="after")
    def _check_spans(self) -> Self:
        end = 0
        for i, span in enumerate(self.spans):
            if span.stop <= span.start or span.at < end:
                raise ValueError(f"spans.{i}: spans are not empty, in order and without overlaps")
            end = span.at + span.stop - span.start
        if self.is_explicit and self.mode not in (None, "spans"):
            raise ValueError(f"mode={self.mode!r} ignores spans and store: use 'spans', or leave them out")
        return self


def new_name() -> str:
    """Return a name of an entry that no other client guesses."""
    return secrets.token_hex(16)


def store_param(entry: str, start: int, stop: int | None) -> dict[str, Any]:
    """Return a range of tokens to store; None for all computed ones."""
    return {"entry": entry, "start": start, "stop": stop}


def transfer_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the field of a request that asks for reuse, for clients of the connector."""
    return {"kv_transfer_params": {FIELD: dict(params)}}


def report_of(answer: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what the connector says in an answer; None if nothing."""
    report: dict[str, Any] | None = (answer.get("kv_transfer_params") or {}).get(FIELD)
    return report


def parse_params(params: Any) -> ReuseParams:
    """Return the reuse that `kv_transfer_params` ask for.

    Raises:
        RefusedRequestError: if a field is unknown or has a wrong value.
    """
    if not isinstance(params, Mapping | None):
        raise RefusedRequestError("kv_transfer_params: not an object")
    given = (params or {}).get(FIELD)
    if given is None:
        return ReuseParams()
    try:
        return ReuseParams.model_validate(given)
    except ValidationError as exc:
        error = exc.errors()[0]
        place = ".".join(map(str, (FIELD, *error["loc"])))
        raise RefusedRequestError(f"kv_transfer_params.{place}: {error['msg']}") from None
