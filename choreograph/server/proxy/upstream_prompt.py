"""Prompts of completions, as a vLLM server renders and tokenizes them."""

from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

# fields of a chat that /tokenize knows too
RENDERED_FIELDS = (
    *("model", "messages", "tools", "add_generation_prompt", "continue_final_message", "add_special_tokens"),
    *("chat_template", "chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs"),
)

# fields with which vLLM returns or computes more than what follows the entries
EXACT_FIELDS = ("prompt_logprobs", "echo", "use_beam_search", "prompt_embeds", "suffix", "truncate_prompt_tokens")

Tokenize = Callable[[Mapping[str, Any]], Awaitable[list[int]]]


def can_reuse(body: Mapping[str, Any]) -> bool:
    """Return whether a prompt is text and only its answer is read."""
    if any(body.get(name) is not None and body[name] is not False for name in EXACT_FIELDS):
        return False
    messages = body.get("messages")
    contents = [m.get("content") for m in messages if isinstance(m, dict)] if isinstance(messages, list) else []
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return all(isinstance(part, str) or (isinstance(part, dict) and part.get("type") == "text") for part in parts)


async def read_prompt(body: Mapping[str, Any], tokenize: Tokenize) -> list[int]:
    """Return the token ids of a prompt; none for several prompts."""
    if "messages" in body:
        return await tokenize(_chat(body))
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, str):
        names = ("model", "add_special_tokens")
        return await tokenize({"prompt": prompt} | {name: body[name] for name in names if name in body})
    is_tokens = isinstance(prompt, list) and all(type(token) is int and 0 <= token < 1 << 32 for token in prompt)
    return prompt if is_tokens and isinstance(prompt, list) else []


def _chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a chat in the form of /tokenize, which knows fewer fields."""
    chat = {name: body[name] for name in RENDERED_FIELDS if body.get(name) is not None}
    variables = {name: body[name] for name in ("documents", "reasoning_effort") if body.get(name) is not None}
    if "reasoning_effort" in variables:
        variables["enable_thinking"] = variables["reasoning_effort"] != "none"
    given = chat.get("chat_template_kwargs", {})
    return chat | {"chat_template_kwargs": variables | given} if variables and isinstance(given, dict) else chat


async def find_turn_tokens(model: Mapping[str, Any], tokenize: Tokenize) -> frozenset[int]:
    """Return the first tokens of generation prompts and user turns.

    Args:
        model: field of the name; empty: the server's own.
    """
    user, assistant = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}

    async def render(*messages: Mapping[str, str], prompts: bool = False) -> list[int]:
        return await tokenize({**model, "messages": messages, "add_generation_prompt": prompts})

    pairs = [
        (await render(user), await render(user, prompts=True)),
        (await render(user, assistant), await render(user, assistant, user)),
    ]
    return frozenset(
        longer[len(shorter)]
        for shorter, longer in pairs
        if 0 < len(shorter) < len(longer) and longer[: len(shorter)] == shorter
    )


def find_cuts(tokens: list[int], turn_tokens: Collection[int], num_messages: int) -> list[int]:
    """Return where turns begin; nothing if texts have the tokens too."""
    cuts = [position for position, token in enumerate(tokens) if token in turn_tokens]
    return cuts if len(cuts) <= num_messages + 2 else []  # a template adds a system turn and the generation prompt
