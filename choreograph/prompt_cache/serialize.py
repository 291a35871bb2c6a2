"""Objects to PML: what `read_schema` and `read_prompt` read back as the same value. Adds no layout."""

import re

from .schema import Import, Module, Parameter, Prompt, Role, Scaffold, Schema, Union

_NO_EDGE_WHITESPACE = re.compile(r"\S(.*\S)?", re.DOTALL)


def dumps(value: Schema | Prompt) -> str:
    """The PML of a schema or prompt."""
    if isinstance(value, Schema):
        return _element("schema", {"name": value.name}, value.children)
    return _element("prompt", {"schema": value.schema, **value.arguments}, value.children)


def _node(node: object) -> str:
    match node:
        case str():
            return _text(node)
        case Parameter():
            default = {} if node.default is None else {"default": node.default}
            return _element("parameter", {"name": node.name, "length": str(node.length), **default}, ())
        case Module():
            return _element("module", {"name": node.name, **({} if node.cache else {"cache": "false"})}, node.children)
        case Union():
            return _element("union", {"required": "true"} if node.required else {}, node.members)
        case Scaffold():
            return _element("scaffold", {}, node.children)
        case Role():
            return _element(node.name, {}, node.children)
        case Import():
            return _element(node.name, dict(node.arguments), node.children)
    raise TypeError(f"{node!r} is no part of PML")


def _element(name: str, attributes: dict[str, str], children: tuple[object, ...]) -> str:
    head = " ".join(
        [name, *(f'{key}="{_escape(value).replace(chr(34), "&quot;")}"' for key, value in attributes.items())]
    )
    inside = "".join(map(_node, children))
    return f"<{head}>{inside}</{name}>" if inside else f"<{head}/>"


def _text(text: str) -> str:
    """Escaped; in CDATA where white space at an end would be taken for layout."""
    if _NO_EDGE_WHITESPACE.fullmatch(text):
        return _escape(text)
    return "<![CDATA[" + text.replace("]]>", "]]]]><![CDATA[>") + "]]>"


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
