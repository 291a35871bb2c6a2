"""Bodies of /v1/choreograph: sessions of the library over HTTP."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from ...features.guard import OnLeak
from ...outputs import BASE_MODEL, KVReuse, Mode
from ..body_types import MAX_NAME_CHARS, Items, LabelNames

MAX_CALLS, MAX_MESSAGES = 256, 4096  # of one request, of one session

Share = Annotated[float, Field(ge=0, le=1)]


class _StrictBody(BaseModel):
    model_config = ConfigDict(extra="forbid")


class GuardBody(_StrictBody):
    """Labels and clearance of a session or call; None: the default."""

    labels: LabelNames | None = None
    clearance: LabelNames | None = None
    on_leak: OnLeak | None = None

    @property
    def guard(self) -> dict[str, Any]:
        return {"labels": self.labels, "clearance": self.clearance, "on_leak": self.on_leak}


class SessionBody(GuardBody):
    """Options of `Engine.session`."""

    mode: Mode = "choreographed"
    seed: int | None = None
    model: str = BASE_MODEL
    repair: Share | None = None
    max_kl: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
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


Prompt = str | Items[int] | TurnBody

SCHEMA_FIELDS = {
    "kind",
    "tokens",
    "prompt_schema",
    "agent",
    "sampling",
    "forced_tokens",
}  # a call with a schema has no other


class CallBody(GuardBody):
    """One `prefill` or `decode`."""

    kind: Literal["prefill", "decode"]
    tokens: Prompt
    parents: Items[ParentBody] = Field(default_factory=list, max_length=MAX_MESSAGES)
    offsets: Items[int | None] | None = None
    new_offset: int | None = None
    model: str | None = None
    kv_reuse: KVReuse = "recompute"
    repair: Share | None = None
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
