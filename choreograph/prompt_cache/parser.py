"""Read and write the Prompt Markup Language (PML).

PML looks like XML but holds prompts, and prompts hold code. A `<` or `&` that starts neither a tag nor an entity is
therefore text, names may be file names, and any character may occur, which no XML parser accepts. CDATA is verbatim.
Nothing is ever expanded: a DOCTYPE or ENTITY is refused.
"""

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from ..errors import PMLSyntaxError, PromptError, SchemaError
from .schema import NAME, ROLES, TAGS, Child, Import, Module, Parameter, Prompt, Role, Scaffold, Schema, Union

_ATTRIBUTE = rf"({NAME})\s*=\s*(\"[^\"]*\"|'[^']*')"
_TAG = re.compile(rf"<(/?)({NAME})((?:\s+{_ATTRIBUTE})*)\s*(/?)>")
_TAG_START = re.compile(rf"<(/?)({NAME})")
_INCOMPLETE_TAG = re.compile(rf"</?{NAME}\s+{NAME}\s*=[^<]*>")
_DECLARATION = re.compile(r"<!(DOCTYPE|ENTITY|ELEMENT|ATTLIST|NOTATION)\b", re.IGNORECASE)
_ENTITY = re.compile(r"&(?:(lt|gt|amp|quot|apos)|#(\d{1,7})|#x([0-9a-fA-F]{1,6}));")
_NAMED_ENTITIES = {"lt": "<", "gt": ">", "amp": "&", "quot": '"', "apos": "'"}
_QUOTE = {'"': "&quot;"}

_PARAMETER_TAGS = ("parameter", "param")
_SCHEMA_ATTRIBUTES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # tag: required, optional
    "schema": (("name",), ()),
    "module": (("name",), ("src", "cache")),
    "union": ((), ("required",)),
    **dict.fromkeys(_PARAMETER_TAGS, (("name",), ("length", "len", "default"))),
}

MAX_DEPTH = 200  # nested tags


def load_schema(source: str | Path) -> Schema:
    """Read a schema from PML text or from a file.

    Args:
        source: text, or a path; only a schema from a file may load text with `src`, from its own folder.

    Raises:
        PMLError: if the text is not a valid schema.
    """
    document = _Document(source, "schema", TAGS)
    element = document.root()
    document.check_attributes(element)
    return Schema(element.attributes["name"], document.schema_children(element))


def load_prompt(source: str | Path) -> Prompt:
    """Read a prompt from PML text or from a file.

    Raises:
        PMLError: if the text is not a valid prompt.
    """
    document = _Document(source, "prompt")
    element = document.root()
    arguments = dict(element.attributes)
    schema = arguments.pop("schema", None)
    if not schema:
        raise document.error("<prompt> needs the attribute schema", element.offset)
    return Prompt(schema, document.prompt_children(element), arguments)


def dumps(value: Schema | Prompt) -> str:
    """Return the PML of a schema or prompt, which reads back as an equal value."""
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
    children: list["_Element | _Text"] = field(default_factory=list)


class _Document:
    """PML text, parsed into elements and then into the values of a schema or prompt.

    Args:
        root_name: tag of the only top-level element.
        tags: names that are tags; others are text. Empty: every name is a tag.
    """

    def __init__(self, source: str | Path, root_name: str, tags: tuple[str, ...] = ()) -> None:
        self._root_name = root_name
        self._tags = tags
        self._source_name = f"<{root_name}>"
        self._folder: Path | None = None
        if not isinstance(source, str):
            source = self._read_file(source)
        self._text = source.removeprefix("\ufeff")
        self._top = _Element("", {}, 0)
        self._open_elements = [self._top]

    def _read_file(self, path: object) -> str:
        error = SchemaError if self._root_name == "schema" else PromptError
        if not isinstance(path, Path):
            raise error(f"{self._root_name}={path!r}: give PML as text, a file as a pathlib.Path, or the value itself")
        self._source_name, self._folder = path.name, path.parent.resolve()
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as exc:
            raise error(f"{path}: cannot be read as text ({exc}); name a PML file in UTF-8") from None

    def error(self, message: str, offset: int) -> PMLSyntaxError:
        """Return an error at a character offset."""
        return PMLSyntaxError(message, self._source_name, *self._line_and_column(offset))

    def _line_and_column(self, offset: int) -> tuple[int, int]:
        return self._text.count("\n", 0, offset) + 1, offset - self._text.rfind("\n", 0, offset)

    # -- text to elements -------------------------------------------------------------------------------------

    def root(self) -> _Element:
        """Parse the text and return its only element."""
        declaration = re.match(r"\s*<\?xml\b.*?\?>", self._text, re.DOTALL)
        offset = declaration.end() if declaration else 0
        while offset < len(self._text):
            if self._text[offset] == "<":
                offset = self._parse_markup(offset)
            else:
                start, offset = offset, self._text.find("<", offset)
                offset = len(self._text) if offset < 0 else offset
                self._add(_Text(self._expand_entities(self._text[start:offset], start)))
        last = self._open_elements[-1]
        if last is not self._top:
            raise self.error(f"<{last.name}> is never closed: write </{last.name}>, or &lt; for text", last.offset)
        nodes = [node for node in self._top.children if isinstance(node, _Element) or node.value.strip()]
        if len(nodes) != 1 or not isinstance(nodes[0], _Element) or nodes[0].name != self._root_name:
            hint = "" if any(isinstance(node, _Element) for node in nodes) else " (a file is named by a pathlib.Path)"
            raise self.error(
                f"one <{self._root_name} ...> ... </{self._root_name}> is expected and nothing else{hint}", 0
            )
        return nodes[0]

    def _add(self, node: _Element | _Text) -> None:
        self._open_elements[-1].children.append(node)

    def _parse_markup(self, offset: int) -> int:
        """Parse the markup or text that starts with a `<` and return the offset after it."""
        for start, end, construct in (("<!--", "-->", "comment"), ("<![CDATA[", "]]>", "CDATA section")):
            if self._text.startswith(start, offset):
                first, last = offset + len(start), self._text.find(end, offset)
                if last < 0:
                    raise self.error(f"a {construct} is never closed: write {end}", offset)
                if start != "<!--":
                    self._add(_Text(self._text[first:last], verbatim=True))
                return last + len(end)
        if declaration := _DECLARATION.match(self._text, offset):
            raise self.error(
                f"{declaration[1].upper()} is refused: nothing is expanded; put such text into CDATA", offset
            )
        return self._parse_tag(offset)

    def _parse_tag(self, offset: int) -> int:
        """Parse a tag, or a `<` that is text, and return the offset after it."""
        start, tag = _TAG_START.match(self._text, offset), _TAG.match(self._text, offset)
        is_tag = start is not None and (not self._tags or start[2] in self._tags)
        if tag is not None and tag[3] and not is_tag:
            similar = difflib.get_close_matches(tag[2], self._tags, n=1, cutoff=0.8)
            if similar:
                raise self.error(f"<{tag[2]}> is not a tag: write <{similar[0]}>, or &lt;{tag[2]}> for text", offset)
        if tag is None and not self._tags:  # where any name may be a tag, text must look like one to be an error
            is_tag = _INCOMPLETE_TAG.match(self._text, offset) is not None
        if start is None or not is_tag:
            self._add(_Text("<"))
            return offset + 1
        if tag is None or (tag[1] and (tag[3].strip() or tag[6])):
            raise self.error(f'{start[0]} is not a whole tag: write <name key="value"> or </name>', offset)
        if tag[1]:
            self._close(tag[2], offset)
            return tag.end()
        element = _Element(tag[2], self._parse_attributes(tag[3], offset), offset)
        self._add(element)
        if not tag[6]:
            self._open_elements.append(element)
            if len(self._open_elements) > MAX_DEPTH + 1:
                raise self.error(f"tags are nested deeper than {MAX_DEPTH}", offset)
        return tag.end()

    def _close(self, name: str, offset: int) -> None:
        if all(element.name != name for element in self._open_elements[1:]):
            raise self.error(f"</{name}> closes nothing that is open", offset)
        element = self._open_elements.pop()
        if element.name != name:
            line, column = self._line_and_column(offset)
            where = f"before </{name}> in line {line}, column {column}"
            raise self.error(
                f"<{element.name}> is not closed {where}: write </{element.name}>, or &lt; for text", element.offset
            )

    def _parse_attributes(self, text: str, offset: int) -> dict[str, str]:
        attributes: dict[str, str] = {}
        for name, value in re.findall(_ATTRIBUTE, text):
            if name in attributes:
                raise self.error(f"attribute {name!r} stands twice in one tag: remove one", offset)
            attributes[name] = self._expand_entities(value[1:-1], offset)
        return attributes

    def _expand_entities(self, text: str, offset: int) -> str:
        def expand(match: re.Match[str]) -> str:
            if match[1]:
                return _NAMED_ENTITIES[match[1]]
            code = int(match[2] or match[3], 10 if match[2] else 16)
            if not 0 < code <= 0x10FFFF or 0xD800 <= code <= 0xDFFF:
                raise self.error(f"{match[0]} is not a character", offset + match.start())
            return chr(code)

        return _ENTITY.sub(expand, text)

    # -- elements to values -----------------------------------------------------------------------------------

    def check_attributes(self, element: _Element) -> None:
        """Check that a tag of a schema has the attributes it needs and no others."""
        required, optional = _SCHEMA_ATTRIBUTES.get(element.name, ((), ()))
        for name in required:
            if not element.attributes.get(name):
                raise self.error(f"<{element.name}> needs the attribute {name}", element.offset)
        for name in element.attributes:
            if name not in (*required, *optional):
                allowed = [*required, *optional]
                raise self.error(f"<{element.name}> has no attribute {name!r}; it has {allowed}", element.offset)

    def schema_children(self, element: _Element) -> tuple[Child, ...]:
        return tuple(n if isinstance(n, str) else self._schema_child(n) for n in _strip_layout(element.children))

    def _schema_child(self, element: _Element) -> Child:
        self.check_attributes(element)
        if element.name in _PARAMETER_TAGS:
            return self._parameter(element)
        children: tuple[Any, ...] = self.schema_children(element)
        try:
            match element.name:
                case "union":
                    return Union(children, self._flag(element, "required", False))
                case "scaffold":
                    return Scaffold(children)
        except SchemaError as exc:
            raise self.error(str(exc), element.offset) from None
        match element.name:
            case "module":
                return self._module(element, children)
            case "system" | "user" | "assistant":
                return Role(element.name, children)
        raise self.error(f"<{element.name}> cannot be inside a schema", element.offset)

    def _module(self, element: _Element, children: tuple[Child, ...]) -> Module:
        if "src" in element.attributes:
            if children:
                raise self.error("a module has either src or content: remove one", element.offset)
            children = (self._load_src(element),)
        return Module(element.attributes["name"], children, self._flag(element, "cache", True))

    def _load_src(self, element: _Element) -> str:
        """Read a text file in the schema's folder or below it."""
        src = element.attributes["src"]
        if self._folder is None:
            raise self.error(f"src={src!r} needs a schema that is read from a file", element.offset)
        try:
            path = (self._folder / src).resolve()
            if path.is_relative_to(self._folder):
                return path.read_text(encoding="utf-8")
        except (OSError, RuntimeError, ValueError) as exc:  # ValueError: NUL in the name, or text that is not UTF-8
            raise self.error(f"src={src!r} cannot be read as text: {type(exc).__name__}", element.offset) from None
        raise self.error(f"src={src!r} is outside the schema's folder: put the file beside the schema", element.offset)

    def _parameter(self, element: _Element) -> Parameter:
        if element.children:
            raise self.error(f"<{element.name}> holds nothing: write <{element.name} .../>", element.offset)
        lengths = [element.attributes[key] for key in ("length", "len") if key in element.attributes]
        if len(lengths) != 1 or not re.fullmatch(r"\s*[0-9]{1,9}\s*", lengths[0]) or not int(lengths[0]):
            raise self.error(f'<{element.name}> needs length="..." in tokens, 1 or more', element.offset)
        return Parameter(element.attributes["name"], int(lengths[0]), element.attributes.get("default"))

    def _flag(self, element: _Element, name: str, default: bool) -> bool:
        value = element.attributes.get(name, str(default)).lower()
        if value not in ("true", "false"):
            raise self.error(f"{name}={element.attributes[name]!r}: use true or false", element.offset)
        return value == "true"

    def prompt_children(self, element: _Element) -> tuple[str | Import | Role, ...]:
        return tuple(n if isinstance(n, str) else self._prompt_child(n) for n in _strip_layout(element.children))

    def _prompt_child(self, element: _Element) -> Import | Role:
        children = self.prompt_children(element)
        if element.name not in ROLES:
            return Import(element.name, children, element.attributes)
        if element.attributes or not all(isinstance(child, str) for child in children):
            raise self.error(
                f"<{element.name}> in a prompt holds text only: put imports outside of turns", element.offset
            )
        return Role(element.name, children)  # type: ignore[arg-type]


def _strip_layout(nodes: list[_Element | _Text]) -> list[_Element | str]:
    """Join adjacent texts, without the line breaks and indentation that only lay out tags.

    A parameter is part of the text, so white space next to it is kept.
    """
    result: list[_Element | str] = []
    end = 0
    for _, group in groupby(nodes, key=lambda node: isinstance(node, _Text)):
        members = list(group)
        start, end = end, end + len(members)
        result += [node for node in members if isinstance(node, _Element)]
        texts = [node for node in members if isinstance(node, _Text)]
        if not texts:
            continue
        neighbors = nodes[start - 1] if start else None, nodes[end] if end < len(nodes) else None
        after_parameter, before_parameter = (
            isinstance(node, _Element) and node.name in _PARAMETER_TAGS for node in neighbors
        )
        values = [text.value for text in texts]
        if not after_parameter and not texts[0].verbatim:
            values[0] = re.sub(r"\A[ \t\r]*\n", "", values[0])
        if not before_parameter and not texts[-1].verbatim:
            values[-1] = re.sub(r"(?<=\n)[ \t]+\Z", "", values[-1])
        text = "".join(values)
        is_content = after_parameter or before_parameter or any(text.verbatim for text in texts)
        if text.strip() or (text and is_content):
            result.append(text)
    return result


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
