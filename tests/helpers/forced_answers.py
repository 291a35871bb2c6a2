"""Requests whose answer is known: a choice of one text makes any model write it."""

from typing import Any

ASK = [{"role": "user", "content": "What time is it?"}]

ZONE = {"type": "object", "properties": {"zone": {"type": "string"}}, "required": ["zone"]}


def forced(text: str) -> dict[str, Any]:
    """Fields of a request that is answered by a text."""
    return {"structured_outputs": {"choice": [text]}}


def tool(name: str = "get_time", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


TOOLS = [tool(parameters=ZONE)]
RESPONSE_TOOLS = [{"type": "function", "name": "get_time", "parameters": ZONE, "strict": False}]


def call(arguments: str, name: str = "get_time") -> str:
    """A call in the form of Hermes."""
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def chat(client: Any, text: str | None = None, *, stream: bool = False, **options: Any) -> Any:
    """Return the choice of a chat, as the client assembles it."""
    extra = {**(forced(text) if text is not None else {}), **options.pop("extra_body", {})}
    options = {"model": "tiny", "messages": ASK, "temperature": 0, "max_tokens": 300} | options
    if not stream:
        return client.chat.completions.create(**options, extra_body=extra).choices[0]
    with client.chat.completions.stream(**options, extra_body=extra) as events:
        for _ in events:
            pass
        return events.current_completion_snapshot.choices[0]


def arguments_of(choice: Any) -> list[str]:
    return [item.function.arguments for item in choice.message.tool_calls or ()]
