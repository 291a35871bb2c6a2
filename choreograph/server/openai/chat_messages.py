"""Messages of chats, with OpenAI's field names."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, JsonValue, ValidationInfo

from ..request_body import Items
from .chat_turns import parse_arguments

MAX_MESSAGES = 32_768  # of a chat, whatever the context holds; refused before any of them is read

REASONING_PARTS = ("thinking", "redacted_thinking", "reasoning", "reasoning_text")


class BodyPart(BaseModel):
    """Part of a body in which fields of newer clients are ignored."""

    model_config = ConfigDict(extra="ignore", populate_by_name=True)


class TextPart(BodyPart):
    """Part of a message's content; only text is accepted."""

    type: str
    text: str | None = None
    refusal: str | None = None


class CalledFunction(BodyPart):
    """Function and arguments of a call."""

    name: str
    arguments: str | dict[str, JsonValue] | None = "{}"


class ToolCall(BodyPart):
    """Call of a tool in an assistant message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


def _drop_reasoning(parts: Any, info: ValidationInfo) -> Any:
    """Leave out reasoning, which clients store with answers of other servers."""
    if info.data.get("role") != "assistant" or not isinstance(parts, list):
        return parts
    is_reasoning = (isinstance(part, dict) and part.get("type") in REASONING_PARTS for part in parts)
    # an empty text keeps the places of the other parts, which errors name
    return [{"type": "text"} if left_out else part for left_out, part in zip(is_reasoning, parts, strict=True)]


def _check_parts(parts: list[TextPart]) -> list[TextPart]:
    for part in parts:
        if part.type not in ("text", "input_text", "output_text", "refusal", "summary_text"):
            raise ValueError(f"content part of type {part.type!r}: the model reads text alone")
    return parts


TextParts = Annotated[Items[TextPart], BeforeValidator(_drop_reasoning), AfterValidator(_check_parts)]


class ChatMessage(BodyPart):
    """Message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | TextParts | None = None
    name: str | None = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @property
    def text(self) -> str:
        """Text of the content."""
        if not isinstance(self.content, list):
            return self.content or ""
        return "".join(part.text or part.refusal or "" for part in self.content)


def _check_number(messages: Any) -> Any:
    if isinstance(messages, list) and len(messages) > MAX_MESSAGES:
        raise ValueError(f"{len(messages):,} messages: use at most {MAX_MESSAGES:,}")
    return messages


ChatMessages = Annotated[Items[ChatMessage], BeforeValidator(_check_number)]


def as_turn(message: ChatMessage) -> dict[str, Any]:
    """Return a message as chat templates read it."""
    role = {"developer": "system", "function": "tool"}.get(message.role, message.role)
    turn: dict[str, Any] = {"role": role, "content": message.text}
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": parse_arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    for name in ("name", "tool_call_id", "reasoning_content"):
        if getattr(message, name) is not None:
            turn[name] = getattr(message, name)
    return turn
