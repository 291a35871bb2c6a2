"""Bodies of /v1/choreograph: sessions of the library over HTTP.

The options of sessions and calls are those of `api/call.py`. Other fields are options of registered features, which
check them.
"""

from collections.abc import Collection, Iterable
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, JsonValue, create_model

from ...api.call import CallOptions, SessionOptions
from ...errors import ConfigError
from ...features.budget import Budget
from ...features.guard import OnLeak
from ...features.repair.options import Repair
from ...outputs import BASE_MODEL, Mode
from ..request_body import MAX_NAME_CHARS, Items, LabelNames

MAX_CALLS, MAX_MESSAGES, MAX_TURNS = 256, 4096, 32  # of one request, of one session, of one prompt

_NAMES = {"Budget": Budget, "OnLeak": OnLeak, "Repair": Repair}  # in annotations of `api/call.py`


class _StrictBody(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _OptionsBody(BaseModel):
    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, JsonValue]

    def check_options(self, names: Collection[str]) -> None:
        """Check that fields of no other kind are options of features.

        Raises:
            ConfigError: if one is not.
        """
        for name, value in (self.model_extra or {}).items():
            if name not in names:
                what = "a session" if isinstance(self, SessionBody) else "a call"
                raise ConfigError(f"{name}={value!r:.60}: {what} has no such option: use {sorted(names)}")

    @property
    def options(self) -> dict[str, Any]:
        """Options of the library and of features, if they are set."""
        fields = type(self).__annotations__  # those of the class itself are no options
        return {name: value for name, value in self if name not in fields and value is not None}


def _json_type(annotation: Any) -> Any:
    """Return the type of an option without what JSON has not."""
    if get_origin(annotation) is Iterable:
        return LabelNames
    arguments = get_args(annotation)
    if arguments and get_origin(annotation) is not Literal:
        return Union[tuple(_json_type(item) for item in arguments if item not in (Budget, Repair))]  # noqa: UP007
    return annotation


def _body_of(options: Any) -> Any:
    """Return the class of bodies that have some options."""
    hints = get_type_hints(options, localns=_NAMES)
    fields: dict[str, Any] = {name: (_json_type(hint) | None, None) for name, hint in hints.items()}
    return create_model(options.__name__, __base__=_OptionsBody, **fields)


class SessionBody(_body_of(SessionOptions)):  # type: ignore[misc]  # a class that is made
    """Options of `Engine.session`."""

    mode: Mode = "choreographed"
    seed: int | None = None
    model: str = BASE_MODEL
    workflow: Annotated[str, Field(max_length=MAX_NAME_CHARS)] | None = (
        None  # whose step graph the session's agents follow
    )


class TurnBody(_StrictBody):
    """Chat turn."""

    role: str
    text: str
    opening: bool = True


class ParentBody(_StrictBody):
    """Message, or a part of it."""

    id: Annotated[str, Field(max_length=64)]
    start: int | None = None
    stop: int | None = None


Prompt = str | Items[int] | TurnBody | Annotated[Items[TurnBody], Field(max_length=MAX_TURNS)]

# a call with a schema has no other
SCHEMA_FIELDS = {"kind", "tokens", "prompt_schema", "agent", "sampling", "forced_tokens"}


class CallBody(_body_of(CallOptions)):  # type: ignore[misc]
    """One `prefill` or `decode`."""

    kind: Literal["prefill", "decode"]
    tokens: Prompt
    parents: Items[ParentBody] = Field(default_factory=list, max_length=MAX_MESSAGES)
    offsets: Items[int | None] | None = None
    new_offset: int | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    agent: Annotated[str, Field(max_length=MAX_NAME_CHARS)] | None = None  # whose turn the calls of one request are
    prompt_schema: str | None = Field(None, alias="schema")  # `tokens` are PML and import modules of this schema
    sampling: dict[str, JsonValue] | None = None
    footer: Prompt | None = None
    forced_tokens: Items[int] | None = None


class DeclassifyBody(_StrictBody):
    """Labels to remove from a message."""

    labels: LabelNames


class CallsBody(_StrictBody):
    """Calls that are submitted together, all or none."""

    calls: Items[CallBody] = Field(min_length=1, max_length=MAX_CALLS)
