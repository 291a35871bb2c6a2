"""Text to tags: the syntax of PML. Knows places and quotes; knows no schema.

PML looks like XML but holds prompts, and prompts hold code. So a `<` or `&` that starts neither a tag nor an
entity is text, CDATA is verbatim, and nothing is ever expanded: a DOCTYPE or ENTITY is refused.
"""

import bisect
import difflib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import PMLSyntaxError, PromptError, SchemaError
from .schema import NAME, ROLES, Child, Import, Module, Parameter, Prompt, Role, Scaffold, Schema, Union

_ATTRIBUTE = rf"({NAME})\s*=\s*(\"[^\"]*\"|'[^']*')"

_TAG = re.compile(rf"<(/?)({NAME})((?:\s+{_ATTRIBUTE})*)\s*(/?)>")

_TAG_START = re.compile(rf"<(/?)({NAME})")

_INCOMPLETE_TAG = re.compile(rf"</?{NAME}\s+{NAME}\s*=[^<]*>")

_ENTITY = re.compile(r"&(?:(lt|gt|amp|quot|apos)|#(\d{1,7})|#x([0-9a-fA-F]{1,6}));")

_NAMED_ENTITIES = {"lt": "<", "gt": ">", "amp": "&", "quot": '"', "apos": "'"}

_DECLARATION = re.compile(r"<!(DOCTYPE|ENTITY|ELEMENT|ATTLIST|NOTATION)\b", re.IGNORECASE)

MAX_DEPTH = 200


@dataclass(frozen=True)
class TextNode:
    """verbatim: it stood in CDATA, so its white space counts as it is."""

    value: str
    verbatim: bool = False


@dataclass
class Element:
    """An element with what stands inside it."""

    name: str
    attributes: dict[str, str]
    line: int
    column: int
    children: list["Element | TextNode"] = field(default_factory=list)


class PMLParser:
    """One document. is_tag decides which names are tags; others are text. near: the names where they
    are few: a slip in one of them is an error."""

    def __init__(
        self, text: str, *, source: str, is_tag: Callable[[str], bool], similar_names: tuple[str, ...] = ()
    ) -> None:
        self._text = text.removeprefix("\ufeff")
        self._source = source
        self._is_tag = is_tag
        self._similar_names = similar_names
        self._line_starts = [0, *(m.end() for m in re.finditer("\n", self._text))]

    def error(self, message: str, offset: int) -> PMLSyntaxError:
        return PMLSyntaxError(message, self._source, *self._line_and_column(offset))

    def _line_and_column(self, offset: int) -> tuple[int, int]:
        line = bisect.bisect(self._line_starts, offset)
        return line, offset - self._line_starts[line - 1] + 1

    def parse(self) -> list[Element | TextNode]:
        """The document's top level."""
        top: list[Element | TextNode] = []
        self._open_elements: list[tuple[Element, int]] = []
        at = self._skip_declaration()
        while at < len(self._text):
            here = self._open_elements[-1][0].children if self._open_elements else top
            if self._text[at] == "<":
                after = self._parse_markup(at, here)
            else:
                after = self._text.find("<", at)
                after = len(self._text) if after < 0 else after
                here.append(TextNode(self._decode(at, after)))
            at = after
        if self._open_elements:
            tag, where = self._open_elements[-1]
            raise self.error(f"<{tag.name}> is never closed: write </{tag.name}>, or &lt; for text", where)
        return top

    def _skip_declaration(self) -> int:
        result = re.match(r"\s*<\?xml\b.*?\?>", self._text, re.DOTALL)
        return result.end() if result else 0

    def _parse_markup(self, offset: int, siblings: list[Element | TextNode]) -> int:
        """Reads what starts at a `<`; returns where it ends."""
        text = self._text
        if text.startswith("<!--", offset):
            return self._find_end("-->", offset, "comment")
        if text.startswith("<![CDATA[", offset):
            end = self._find_end("]]>", offset, "CDATA section")
            siblings.append(TextNode(text[offset + 9 : end - 3], verbatim=True))
            return end
        if refused := _DECLARATION.match(text, offset):
            kind = refused[1].upper()
            raise self.error(f"{kind} is refused: nothing is expanded; put such text into CDATA", offset)
        return self._parse_tag(offset, siblings)

    def _find_end(self, terminator: str, offset: int, construct: str) -> int:
        end = self._text.find(terminator, offset)
        if end < 0:
            raise self.error(f"a {construct} is never closed: write {terminator}", offset)
        return end + len(terminator)

    def _parse_tag(self, offset: int, siblings: list[Element | TextNode]) -> int:
        start = _TAG_START.match(self._text, offset)
        if start is None or not self._is_tag(start[2]):
            self._reject_typo(offset, start)
            siblings.append(TextNode("<"))
            return offset + 1
        whole = _TAG.match(self._text, offset)
        if whole is None and not self._similar_names and not _INCOMPLETE_TAG.match(self._text, offset):
            siblings.append(TextNode("<"))  # any name may be a tag here, so only what looks like one has to be whole
            return offset + 1
        if whole is None or (whole[1] and (whole[3].strip() or whole[6])):
            raise self.error(f'{start[0]} is not a whole tag: write <name key="value"> or </name>', offset)
        if whole[1]:
            self._close(whole[2], offset)
            return whole.end()
        tag = Element(whole[2], self._parse_attributes(whole[3], offset), *self._line_and_column(offset))
        siblings.append(tag)
        if not whole[6]:
            self._open_elements.append((tag, offset))
            if len(self._open_elements) > MAX_DEPTH:
                raise self.error(f"tags are nested deeper than {MAX_DEPTH}", offset)
        return whole.end()

    def _reject_typo(self, offset: int, start: re.Match[str] | None) -> None:
        """A whole tag with attributes whose name is almost one that counts is an error, not text."""
        whole = _TAG.match(self._text, offset)
        if start is None or whole is None or not whole[3]:
            return
        close = difflib.get_close_matches(whole[2], self._similar_names, n=1, cutoff=0.8)
        if close:
            raise self.error(f"<{whole[2]}> is not a tag: write <{close[0]}>, or &lt;{whole[2]}> for text", offset)

    def _close(self, name: str, offset: int) -> None:
        if all(tag.name != name for tag, _ in self._open_elements):
            raise self.error(f"</{name}> closes nothing that is open", offset)
        tag, where = self._open_elements.pop()
        if tag.name != name:
            line, column = self._line_and_column(offset)
            end = f"before </{name}> in line {line}, column {column}"
            raise self.error(f"<{tag.name}> is not closed {end}: write </{tag.name}>, or &lt; for text", where)

    def _parse_attributes(self, text: str, offset: int) -> dict[str, str]:
        result: dict[str, str] = {}
        for name, value in re.findall(_ATTRIBUTE, text):
            if name in result:
                raise self.error(f"attribute {name!r} stands twice in one tag", offset)
            result[name] = self._expand_entities(value[1:-1], offset)
        return result

    def _decode(self, start: int, end: int) -> str:
        return self._expand_entities(self._text[start:end], start)

    def _expand_entities(self, text: str, offset: int) -> str:
        def one(found: re.Match[str]) -> str:
            if found[1]:
                return _NAMED_ENTITIES[found[1]]
            code = int(found[2] or found[3], 10 if found[2] else 16)
            if not 0 < code <= 0x10FFFF or 0xD800 <= code <= 0xDFFF:
                raise self.error(f"{found[0]} is not a character", offset + found.start())
            return chr(code)

        return _ENTITY.sub(one, text)


TAGS = ("schema", "module", "union", "parameter", "param", "scaffold", *ROLES)


def load_schema(source: str | Path) -> Schema:
    """A schema from PML text, or from a file (a Path); `src` loads text from beside that file only."""
    text, name, folder = _read_source(source, "schema")
    reader = _SchemaReader(name, folder)
    markup = PMLParser(text, source=name, is_tag=TAGS.__contains__, similar_names=TAGS)
    return reader.schema(_root_element(markup, "schema"))


def load_prompt(source: str | Path) -> Prompt:
    """A prompt from PML text or from a file (a Path)."""
    text, name, _ = _read_source(source, "prompt")
    tag = _root_element(PMLParser(text, source=name, is_tag=lambda _: True), "prompt")
    attributes = dict(tag.attributes)
    schema = attributes.pop("schema", None)
    if not schema:
        raise PMLSyntaxError("<prompt> needs the attribute schema", name, tag.line, tag.column)
    return Prompt(schema, _prompt_children(tag, name), attributes)


def _read_source(source: str | Path, root_name: str) -> tuple[str, str, Path | None]:
    if isinstance(source, str):
        return source, f"<{root_name}>", None
    error = SchemaError if root_name == "schema" else PromptError
    if not isinstance(source, Path):
        raise error(f"{root_name}={source!r}: give PML as text, a file as a pathlib.Path, or the value itself")
    try:
        return source.read_text(encoding="utf-8"), source.name, source.parent
    except (OSError, UnicodeDecodeError) as exc:
        raise error(f"{source}: cannot be read as text ({exc}); name a PML file in UTF-8") from None


def _root_element(parser: PMLParser, name: str) -> Element:
    """The one element of a document."""
    nodes = [n for n in parser.parse() if isinstance(n, Element) or n.value.strip()]
    if len(nodes) != 1 or not isinstance(nodes[0], Element) or nodes[0].name != name:
        hint = "" if any(isinstance(n, Element) for n in nodes) else " (a file is named by a pathlib.Path)"
        raise parser.error(f"one <{name} ...> ... </{name}> is expected and nothing beside it{hint}", 0)
    return nodes[0]


class _SchemaReader:
    """One document on its way to a Schema."""

    def __init__(self, source: str, folder: Path | None) -> None:
        self._source = source
        self._folder = folder

    def _error(self, message: str, element: Element) -> PMLSyntaxError:
        return PMLSyntaxError(message, self._source, element.line, element.column)

    def schema(self, element: Element) -> Schema:
        self._check_attributes(element, required=("name",))
        return Schema(element.attributes["name"], tuple(self._children(element)))

    def _children(self, element: Element) -> Iterable[Child]:
        for node in strip_layout_whitespace(element.children):
            yield node if isinstance(node, str) else self._child(node)

    def _child(self, element: Element) -> Child:
        if element.name in ("parameter", "param"):
            return self._parameter(element)
        if element.name == "module":
            return self._module(element)
        if element.name == "union":
            self._check_attributes(element, optional=("required",))
            return Union(self._modules(element, (Module,)), self._flag(element, "required", False))  # type: ignore[arg-type]
        if element.name == "scaffold":
            self._check_attributes(element)
            return Scaffold(self._modules(element, (Module, Union)))
        if element.name in ROLES:
            self._check_attributes(element)
            return Role(element.name, tuple(self._children(element)))
        raise self._error(f"<{element.name}> cannot stand inside a schema", element)

    def _modules(self, element: Element, types: tuple[type, ...]) -> tuple[Module | Union, ...]:
        children = tuple(self._children(element))
        if not children or not all(isinstance(child, types) for child in children):
            inside = "modules and unions" if Union in types else "modules"
            raise self._error(f"<{element.name}> holds {inside}, at least one, and no text", element)
        return children  # type: ignore[return-value]

    def _module(self, element: Element) -> Module:
        self._check_attributes(element, required=("name",), optional=("src", "cache"))
        children = tuple(self._children(element))
        if "src" in element.attributes:
            if children:
                raise self._error("a module has either src or content: remove one", element)
            children = (self._load_src(element),)
        return Module(element.attributes["name"], children, self._flag(element, "cache", True))

    def _load_src(self, element: Element) -> str:
        """The text of a file in the schema's folder or below it."""
        src = element.attributes["src"]
        if self._folder is None:
            raise self._error(f"src={src!r} needs a schema that is read from a file", element)
        folder = self._folder.resolve()
        try:
            path = (folder / src).resolve()
            if path.is_relative_to(folder):
                return path.read_text(encoding="utf-8")
        except (
            OSError,
            RuntimeError,
            ValueError,
        ) as exc:  # ValueError: a NUL in the name, or text that is not UTF-8
            raise self._error(f"src={src!r} cannot be read as text: {type(exc).__name__}", element) from None
        raise self._error(f"src={src!r} lies outside the schema's folder: put the file beside the schema", element)

    def _parameter(self, element: Element) -> Parameter:
        self._check_attributes(element, required=("name",), optional=("length", "len", "default"))
        if element.children:
            raise self._error(f"<{element.name}> holds nothing: write <{element.name} .../>", element)
        lengths = [element.attributes[k] for k in ("length", "len") if k in element.attributes]
        if len(lengths) != 1 or not re.fullmatch(r"\s*[0-9]{1,9}\s*", lengths[0]) or not int(lengths[0]):
            raise self._error(f'<{element.name}> needs length="..." in tokens, 1 or more', element)
        return Parameter(element.attributes["name"], int(lengths[0]), element.attributes.get("default"))

    def _flag(self, element: Element, name: str, default: bool) -> bool:
        value = element.attributes.get(name, str(default)).lower()
        if value not in ("true", "false"):
            raise self._error(f"{name}={element.attributes[name]!r}: use true or false", element)
        return value == "true"

    def _check_attributes(
        self, element: Element, required: tuple[str, ...] = (), optional: tuple[str, ...] = ()
    ) -> None:
        for name in required:
            if not element.attributes.get(name):
                raise self._error(f"<{element.name}> needs the attribute {name}", element)
        for name in element.attributes:
            if name not in (*required, *optional):
                raise self._error(
                    f"<{element.name}> has no attribute {name!r}; known: {[*required, *optional]}", element
                )


def _prompt_children(element: Element, source: str) -> tuple[str | Import | Role, ...]:
    return tuple(
        node if isinstance(node, str) else _prompt_child(node, source)
        for node in strip_layout_whitespace(element.children)
    )


def _prompt_child(element: Element, source: str) -> Import | Role:
    children = _prompt_children(element, source)
    if element.name not in ROLES:
        return Import(element.name, children, dict(element.attributes))
    if element.attributes or not all(isinstance(child, str) for child in children):
        exc = f"<{element.name}> in a prompt holds text only: imports stand outside turns"
        raise PMLSyntaxError(exc, source, element.line, element.column)
    return Role(element.name, children)  # type: ignore[arg-type]


def strip_layout_whitespace(nodes: list[Element | TextNode]) -> list[Element | str]:
    """Tags and texts without layout."""
    kept: list[Element | str] = []
    at = 0
    while at < len(nodes):
        node = nodes[at]
        if isinstance(node, Element):
            kept.append(node)
            at += 1
            continue
        end = next((i for i in range(at, len(nodes)) if isinstance(nodes[i], Element)), len(nodes))
        texts = [n for n in nodes[at:end] if isinstance(n, TextNode)]
        behind, before = (any(map(_is_parameter, side)) for side in (nodes[max(at - 1, 0) : at], nodes[end : end + 1]))
        if text := _join_texts(texts, behind, before):
            kept.append(text)
        at = end
    return kept


def _is_parameter(node: Element | TextNode) -> bool:
    return isinstance(node, Element) and node.name in ("parameter", "param")


def _join_texts(texts: list[TextNode], after_parameter: bool, before_parameter: bool) -> str:
    """Joins the texts between two tags. A parameter is part of the text, so nothing goes on its side."""
    values = [t.value for t in texts]
    blank = all(not t.verbatim for t in texts) and not "".join(values).strip()
    if blank and not after_parameter and not before_parameter:
        return ""
    if not texts[0].verbatim and not after_parameter:
        values[0] = re.sub(r"\A[ \t\r]*\n", "", values[0])
    if not texts[-1].verbatim and not before_parameter:
        values[-1] = re.sub(r"(?<=\n)[ \t]+\Z", "", values[-1])
    return "".join(values)
