"""Read and write the Prompt Markup Language (PML).

PML resembles XML, but prompts contain code. Therefore a `<` or `&` that starts neither a tag nor an entity
is text, names may be file names, and any character may occur, which no XML parser accepts. CDATA is
verbatim. Entities cannot be declared: a DOCTYPE or ENTITY is an error.
"""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from ..errors import PMLError, PMLSyntaxError, PromptError, SchemaError
from .schema import NAME, ROLES, TAGS, Child, Import, Module, Parameter, Prompt, Role, Scaffold, Schema, Union

_ATTRIBUTE = rf"({NAME})\s*=\s*(\"[^\"]*\"|'[^']*')"
_TAG = re.compile(rf"<(/?)({NAME})((?:\s+{_ATTRIBUTE})*)\s*(/?)>")
_TAG_START = re.compile(rf"<(/?)({NAME})")
_INCOMPLETE_TAG = re.compile(rf"</?{NAME}\s+{NAME}\s*=[^<]*>")
_DECLARATION = re.compile(r"<!(DOCTYPE|ENTITY|ELEMENT|ATTLIST|NOTATION)\b", re.IGNORECASE)
_ENTITY = re.compile(r"&(?:(lt|gt|amp|quot|apos)|#(\d{1,7})|#x([0-9a-fA-F]{1,6}));")
_NAMED_ENTITIES = {"lt": "<", "gt": ">", "amp": "&", "quot": '"', "apos": "'"}
_QUOTE = {'"': "&quot;"}

_SCHEMA_ATTRIBUTES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # tag: required, optional
    "schema": (("name",), ()),
    "module": (("name",), ("src", "cache")),
    "union": ((), ("required",)),
    **dict.fromkeys(("parameter", "param"), (("name",), ("length", "len", "default"))),
}

MAX_DEPTH = 200  # nested tags


def load_schema(source: str | Path) -> Schema:
    """Read a schema from PML text or from a file.

    Args:
        source: text, or a path; only a schema from a file may load text with `src`, from its own folder.

    Raises:
        PMLError: if the text is not a valid schema.
    """
    return _Parser(source, "schema", SchemaError, TAGS).parse()


def load_prompt(source: str | Path) -> Prompt:
    """Read a prompt from PML text or from a file.

    Raises:
        PMLError: if the text is not a valid prompt.
    """
    return _Parser(source, "prompt", PromptError).parse()


def dumps(value: Schema | Prompt) -> str:
    """Return PML that parses to an equal schema or prompt."""
    if isinstance(value, Schema):
        return _dump_element("schema", {"name": value.name}, value.children)
    return _dump_element("prompt", {"schema": value.schema, **value.arguments}, value.children)


@dataclass
class _Text:
    value: str
    verbatim: bool = False  # from CDATA: white space is kept


@dataclass
class _Element:
    name: str
    attributes: dict[str, str]
    offset: int  # characters before its tag
    children: list[Any] = field(default_factory=list)  # texts, and the values of complete elements


class _Parser:
    """Parser of one PML document; converts each element when complete.

    Args:
        root_name: tag of the only top-level element.
        error: raised if the file cannot be read.
        tags: names that are tags; others are text. Empty: every name is a tag.
    """

    def __init__(self, source: str | Path, root_name: str, error: type[PMLError], tags: tuple[str, ...] = ()) -> None:
        self._root_name = root_name
        self._tags = tags
        self._source_name = f"<{root_name}>"
        self._folder: Path | None = None
        if isinstance(source, Path):
            self._source_name, self._folder = source.name, source.parent.resolve()
            try:
                source = source.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as exc:
                raise error(f"{source}: cannot be read as text ({exc}); name a PML file in UTF-8") from None
        elif not isinstance(source, str):
            raise error(f"{root_name}={source!r}: give PML as text, a file as a pathlib.Path, or the value itself")
        self._text = source.removeprefix("\ufeff")
        self._document = _Element("", {}, 0)
        self._open_elements = [self._document]

    def _error(self, message: str, offset: int) -> PMLSyntaxError:
        return PMLSyntaxError(message, self._source_name, *self._line_and_column(offset))

    def _line_and_column(self, offset: int) -> tuple[int, int]:
        return self._text.count("\n", 0, offset) + 1, offset - self._text.rfind("\n", 0, offset)

    def parse(self) -> Any:
        """Return the value of the only top-level element."""
        try:
            return self._parse()
        except (SchemaError, PromptError) as exc:
            if self._folder is None:
                raise
            raise type(exc)(f"{self._source_name}: {exc}") from None

    def _parse(self) -> Any:
        declaration = re.match(r"\s*<\?xml\b.*?\?>", self._text, re.DOTALL)
        offset = declaration.end() if declaration else 0
        while offset < len(self._text):
            start, offset = offset, self._text.find("<", offset)
            if offset == start:
                offset = self._parse_markup(start)
            else:
                offset = len(self._text) if offset < 0 else offset
                self._add(_Text(self._expand_entities(self._text[start:offset], start)))
        element = self._open_elements[-1]
        if element is not self._document:
            message = f"<{element.name}> is never closed: write </{element.name}>, or &lt; for text"
            raise self._error(message, element.offset)
        nodes = [node for node in self._document.children if not isinstance(node, _Text) or node.value.strip()]
        if len(nodes) != 1 or not isinstance(nodes[0], (Schema, Prompt)):
            is_text = all(isinstance(node, _Text) for node in nodes)
            hint = " (a file is named by a pathlib.Path)" if is_text else ""
            name = self._root_name
            raise self._error(f"one <{name} ...> ... </{name}> is expected and nothing else{hint}", 0)
        return nodes[0]

    def _add(self, node: Any) -> None:
        self._open_elements[-1].children.append(node)

    def _parse_markup(self, offset: int) -> int:
        """Parse markup or text at a `<`; return the offset after it."""
        for start, end, construct in (("<!--", "-->", "comment"), ("<![CDATA[", "]]>", "CDATA section")):
            if self._text.startswith(start, offset):
                first, last = offset + len(start), self._text.find(end, offset)
                if last < 0:
                    raise self._error(f"a {construct} is never closed: write {end}", offset)
                if start != "<!--":
                    self._add(_Text(self._text[first:last], verbatim=True))
                return last + len(end)
        if declaration := _DECLARATION.match(self._text, offset):
            raise self._error(
                f"{declaration[1].upper()} is refused: nothing is expanded; put such text into CDATA", offset
            )
        return self._parse_tag(offset)

    def _parse_tag(self, offset: int) -> int:
        """Parse a tag or literal `<`; return the offset after it."""
        start, tag = _TAG_START.match(self._text, offset), _TAG.match(self._text, offset)
        is_tag = start is not None and (not self._tags or start[2] in self._tags)
        if tag is not None and tag[3] and not is_tag:
            similar = difflib.get_close_matches(tag[2], self._tags, n=1, cutoff=0.8)
            if similar:
                raise self._error(f"<{tag[2]}> is not a tag: write <{similar[0]}>, or &lt;{tag[2]}> for text", offset)
        if tag is None and not self._tags:  # where any name may be a tag, text must look like one to be an error
            is_tag = _INCOMPLETE_TAG.match(self._text, offset) is not None
        if start is None or not is_tag:
            self._add(_Text("<"))
            return offset + 1
        if tag is None or (tag[1] and (tag[3].strip() or tag[6])):
            raise self._error(f'{start[0]} is not a whole tag: write <name key="value"> or </name>', offset)
        if tag[1]:
            self._close(tag[2], offset)
            return tag.end()
        element = _Element(tag[2], self._parse_attributes(tag[3], offset), offset)
        if tag[6]:
            self._add(self._build(element))
        else:
            self._open_elements.append(element)
            if len(self._open_elements) > MAX_DEPTH + 1:
                raise self._error(f"tags are nested deeper than {MAX_DEPTH}", offset)
        return tag.end()

    def _close(self, name: str, offset: int) -> None:
        if all(element.name != name for element in self._open_elements[1:]):
            raise self._error(f"</{name}> closes nothing that is open", offset)
        element = self._open_elements.pop()
        if element.name != name:
            line, column = self._line_and_column(offset)
            message = f"<{element.name}> is not closed before </{name}> in line {line}, column {column}"
            raise self._error(f"{message}: write </{element.name}>, or &lt; for text", element.offset)
        self._add(self._build(element))

    def _parse_attributes(self, text: str, offset: int) -> dict[str, str]:
        attributes: dict[str, str] = {}
        for name, value in re.findall(_ATTRIBUTE, text):
            if name in attributes:
                raise self._error(f"attribute {name!r} stands twice in one tag: remove one", offset)
            attributes[name] = self._expand_entities(value[1:-1], offset)
        return attributes

    def _expand_entities(self, text: str, offset: int) -> str:
        def expand(match: re.Match[str]) -> str:
            if match[1]:
                return _NAMED_ENTITIES[match[1]]
            code = int(match[2] or match[3], 10 if match[2] else 16)
            if not 0 < code <= 0x10FFFF or 0xD800 <= code <= 0xDFFF:
                raise self._error(f"{match[0]} is not a character", offset + match.start())
            return chr(code)

        return _ENTITY.sub(expand, text)

    # -- values -------------------------------------------------------------------------------------------

    def _build(self, element: _Element) -> Any:
        """Return the value of a complete element."""
        children = tuple(_strip_layout(element.children))
        is_root = element.name == self._root_name and len(self._open_elements) == 1
        if self._root_name == "schema":
            return self._build_schema_value(element, children, is_root)
        return self._build_prompt_value(element, children, is_root)

    def _build_schema_value(self, element: _Element, children: tuple[Any, ...], is_root: bool) -> Schema | Child:
        name, attributes, offset = element.name, element.attributes, element.offset
        required, optional = _SCHEMA_ATTRIBUTES.get(name, ((), ()))
        for key in required:
            if not attributes.get(key):
                raise self._error(f"<{name}> needs the attribute {key}", offset)
        for key in attributes:
            if key not in (*required, *optional):
                raise self._error(f"<{name}> has no attribute {key!r}; it has {[*required, *optional]}", offset)
        if name in ("parameter", "param"):
            lengths = [attributes[key] for key in ("length", "len") if key in attributes]
            if element.children:
                raise self._error(f"<{name}> holds nothing: write <{name} .../>", offset)
            if len(lengths) != 1 or not re.fullmatch(r"\s*[0-9]{1,9}\s*", lengths[0]) or not int(lengths[0]):
                raise self._error(f'<{name}> needs length="..." in tokens, 1 or more', offset)
            return Parameter(attributes["name"], int(lengths[0]), attributes.get("default"))
        if name == "module":
            if "src" in attributes:
                if children:
                    raise self._error("a module has either src or content: remove one", offset)
                children = (self._load_src(attributes["src"], offset),)
            return Module(attributes["name"], children, self._flag(element, "cache", True))
        if name in ROLES:
            return Role(name, children)
        if is_root:
            return Schema(attributes["name"], children)
        if name == "schema":
            raise self._error("a <schema> cannot be inside a schema", offset)
        try:
            return Scaffold(children) if name == "scaffold" else Union(children, self._flag(element, "required", False))
        except SchemaError as exc:
            raise self._error(str(exc), offset) from None

    def _load_src(self, src: str, offset: int) -> str:
        """Read a text file in the schema's folder or below it."""
        if self._folder is None:
            raise self._error(f"src={src!r} needs a schema that is read from a file", offset)
        try:
            path = (self._folder / src).resolve()
            if path.is_relative_to(self._folder):
                return path.read_text(encoding="utf-8")
        except (OSError, RuntimeError, ValueError) as exc:  # ValueError: NUL in the name, or text that is not UTF-8
            raise self._error(f"src={src!r} cannot be read as text: {type(exc).__name__}", offset) from None
        raise self._error(f"src={src!r} is outside the schema's folder: move the file there", offset)

    def _flag(self, element: _Element, name: str, default: bool) -> bool:
        value = element.attributes.get(name, str(default)).lower()
        if value not in ("true", "false"):
            raise self._error(f"{name}={element.attributes[name]!r}: use true or false", element.offset)
        return value == "true"

    def _build_prompt_value(
        self, element: _Element, children: tuple[Any, ...], is_root: bool
    ) -> Prompt | Import | Role:
        if is_root:
            arguments = dict(element.attributes)
            schema = arguments.pop("schema", None)
            if not schema:
                raise self._error("<prompt> needs the attribute schema", element.offset)
            return Prompt(schema, children, arguments)
        if element.name not in ROLES:
            return Import(element.name, children, element.attributes)
        if element.attributes or not all(isinstance(child, str) for child in children):
            message = f"<{element.name}> in a prompt holds text only: put imports outside of turns"
            raise self._error(message, element.offset)
        return Role(element.name, children)


def _strip_layout(nodes: list[Any]) -> Iterator[Any]:
    """Yield values and joined texts without white space around tags.

    Only line breaks and indentation that lay out tags are removed. A parameter is part of the text, so white
    space next to it is kept.
    """
    end = 0
    for is_text, group in groupby(nodes, key=lambda node: isinstance(node, _Text)):
        members = list(group)
        start, end = end, end + len(members)
        if not is_text:
            yield from members
            continue
        after_parameter, before_parameter = (
            any(isinstance(node, Parameter) for node in neighbor)
            for neighbor in (nodes[max(start - 1, 0) : start], nodes[end : end + 1])
        )
        values = [text.value for text in members]
        if not after_parameter and not members[0].verbatim:
            values[0] = re.sub(r"\A[ \t\r]*\n", "", values[0])
        if not before_parameter and not members[-1].verbatim:
            values[-1] = re.sub(r"(?<=\n)[ \t]+\Z", "", values[-1])
        text = "".join(values)
        is_content = after_parameter or before_parameter or any(text.verbatim for text in members)
        if text.strip() or (text and is_content):
            yield text


def _dump(node: object) -> str:
    match node:
        case str():
            if re.fullmatch(r"\S(.*\S)?", node, re.DOTALL):
                return escape(node)
            return "<![CDATA[" + node.replace("]]>", "]]]]><![CDATA[>") + "]]>"  # keeps white space at both ends
        case Parameter():
            default = {} if node.default is None else {"default": node.default}
            return _dump_element("parameter", {"name": node.name, "length": str(node.length), **default})
        case Module():
            return _dump_element(
                "module", {"name": node.name, **({} if node.cache else {"cache": "false"})}, node.children
            )
        case Union():
            return _dump_element("union", {"required": "true"} if node.required else {}, node.members)
        case Scaffold():
            return _dump_element("scaffold", {}, node.children)
        case Role():
            return _dump_element(node.name, {}, node.children)
        case Import():
            return _dump_element(node.name, node.arguments, node.children)
    raise TypeError(f"{node!r} is not part of PML")


def _dump_element(name: str, attributes: Mapping[str, str], children: Iterable[object] = ()) -> str:
    head = " ".join([name, *(f'{key}="{escape(value, _QUOTE)}"' for key, value in attributes.items())])
    content = "".join(map(_dump, children))
    return f"<{head}>{content}</{name}>" if content else f"<{head}/>"
