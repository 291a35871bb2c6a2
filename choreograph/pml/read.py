"""PML to objects: schemas and prompts from text or files. Owns the vocabulary of tags and attributes.

White space: a line break right behind a tag and the indentation in front of the next one are layout and go; all
other text stays as it is, CDATA entirely. Blank text between tags is layout. A parameter is part of the text: beside
one nothing is layout.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from ..errors import PMLSyntaxError, PromptError, SchemaError
from .markup import Markup, Tag, Text
from .objects import ROLES, Child, Import, Module, Parameter, Prompt, Role, Scaffold, Schema, Union

TAGS = ("schema", "module", "union", "parameter", "param", "scaffold", *ROLES)


def read_schema(source: str | Path) -> Schema:
    """A schema from PML text, or from a file (a Path); `src` loads text from beside that file only."""
    text, name, folder = _text_of(source, "schema")
    reader = _SchemaReader(name, folder)
    markup = Markup(text, source=name, is_tag=TAGS.__contains__, near=TAGS)
    return reader.schema(_only(markup, "schema"))


def read_prompt(source: str | Path) -> Prompt:
    """A prompt from PML text or from a file (a Path)."""
    text, name, _ = _text_of(source, "prompt")
    tag = _only(Markup(text, source=name, is_tag=lambda _: True), "prompt")
    attributes = dict(tag.attributes)
    schema = attributes.pop("schema", None)
    if not schema:
        raise PMLSyntaxError("<prompt> needs the attribute schema", name, tag.line, tag.column)
    return Prompt(schema, _prompt_children(tag, name), attributes)


def _text_of(source: str | Path, what: str) -> tuple[str, str, Path | None]:
    if isinstance(source, str):
        return source, f"<{what}>", None
    error = SchemaError if what == "schema" else PromptError
    if not isinstance(source, Path):
        raise error(f"{what}={source!r}: give PML as text, a file as a pathlib.Path, or the value itself")
    try:
        return source.read_text(encoding="utf-8"), source.name, source.parent
    except (OSError, UnicodeDecodeError) as problem:
        raise error(f"{source}: cannot be read as text ({problem}); name a PML file in UTF-8") from None


def _only(markup: Markup, name: str) -> Tag:
    """The one element of a document."""
    nodes = [n for n in markup.parse() if isinstance(n, Tag) or n.value.strip()]
    if len(nodes) != 1 or not isinstance(nodes[0], Tag) or nodes[0].name != name:
        hint = "" if any(isinstance(n, Tag) for n in nodes) else " (a file is named by a pathlib.Path)"
        raise markup.error(f"one <{name} ...> ... </{name}> is expected and nothing beside it{hint}", 0)
    return nodes[0]


class _SchemaReader:
    """One document on its way to a Schema."""

    def __init__(self, source: str, folder: Path | None) -> None:
        self._source = source
        self._folder = folder

    def _error(self, problem: str, tag: Tag) -> PMLSyntaxError:
        return PMLSyntaxError(problem, self._source, tag.line, tag.column)

    def schema(self, tag: Tag) -> Schema:
        self._attributes(tag, needed=("name",))
        return Schema(tag.attributes["name"], tuple(self._children(tag)))

    def _children(self, tag: Tag) -> Iterable[Child]:
        for node in trimmed(tag.children):
            yield node if isinstance(node, str) else self._child(node)

    def _child(self, tag: Tag) -> Child:
        if tag.name in ("parameter", "param"):
            return self._parameter(tag)
        if tag.name == "module":
            return self._module(tag)
        if tag.name == "union":
            self._attributes(tag, known=("required",))
            return Union(self._modules(tag, (Module,)), self._flag(tag, "required", False))  # type: ignore[arg-type]
        if tag.name == "scaffold":
            self._attributes(tag)
            return Scaffold(self._modules(tag, (Module, Union)))
        if tag.name in ROLES:
            self._attributes(tag)
            return Role(tag.name, tuple(self._children(tag)))
        raise self._error(f"<{tag.name}> cannot stand inside a schema", tag)

    def _modules(self, tag: Tag, kinds: tuple[type, ...]) -> tuple[Module | Union, ...]:
        children = tuple(self._children(tag))
        if not children or not all(isinstance(child, kinds) for child in children):
            inside = "modules and unions" if Union in kinds else "modules"
            raise self._error(f"<{tag.name}> holds {inside}, at least one, and no text", tag)
        return children  # type: ignore[return-value]

    def _module(self, tag: Tag) -> Module:
        self._attributes(tag, needed=("name",), known=("src", "cache"))
        children = tuple(self._children(tag))
        if "src" in tag.attributes:
            if children:
                raise self._error("a module has either src or content: remove one", tag)
            children = (self._beside(tag),)
        return Module(tag.attributes["name"], children, self._flag(tag, "cache", True))

    def _beside(self, tag: Tag) -> str:
        """The text of a file in the schema's folder or below it."""
        src = tag.attributes["src"]
        if self._folder is None:
            raise self._error(f"src={src!r} needs a schema that is read from a file", tag)
        folder = self._folder.resolve()
        try:
            path = (folder / src).resolve()
            if path.is_relative_to(folder):
                return path.read_text(encoding="utf-8")
        except (
            OSError,
            RuntimeError,
            ValueError,
        ) as problem:  # ValueError: a NUL in the name, or text that is not UTF-8
            raise self._error(f"src={src!r} cannot be read as text: {type(problem).__name__}", tag) from None
        raise self._error(f"src={src!r} lies outside the schema's folder: put the file beside the schema", tag)

    def _parameter(self, tag: Tag) -> Parameter:
        self._attributes(tag, needed=("name",), known=("length", "len", "default"))
        if tag.children:
            raise self._error(f"<{tag.name}> holds nothing: write <{tag.name} .../>", tag)
        lengths = [tag.attributes[k] for k in ("length", "len") if k in tag.attributes]
        if len(lengths) != 1 or not re.fullmatch(r"\s*[0-9]{1,9}\s*", lengths[0]) or not int(lengths[0]):
            raise self._error(f'<{tag.name}> needs length="..." in tokens, 1 or more', tag)
        return Parameter(tag.attributes["name"], int(lengths[0]), tag.attributes.get("default"))

    def _flag(self, tag: Tag, name: str, default: bool) -> bool:
        value = tag.attributes.get(name, str(default)).lower()
        if value not in ("true", "false"):
            raise self._error(f"{name}={tag.attributes[name]!r}: use true or false", tag)
        return value == "true"

    def _attributes(self, tag: Tag, needed: tuple[str, ...] = (), known: tuple[str, ...] = ()) -> None:
        for name in needed:
            if not tag.attributes.get(name):
                raise self._error(f"<{tag.name}> needs the attribute {name}", tag)
        for name in tag.attributes:
            if name not in (*needed, *known):
                raise self._error(f"<{tag.name}> has no attribute {name!r}; known: {[*needed, *known]}", tag)


def _prompt_children(tag: Tag, source: str) -> tuple[str | Import | Role, ...]:
    return tuple(node if isinstance(node, str) else _prompt_child(node, source) for node in trimmed(tag.children))


def _prompt_child(tag: Tag, source: str) -> Import | Role:
    children = _prompt_children(tag, source)
    if tag.name not in ROLES:
        return Import(tag.name, children, dict(tag.attributes))
    if tag.attributes or not all(isinstance(child, str) for child in children):
        problem = f"<{tag.name}> in a prompt holds text only: imports stand outside turns"
        raise PMLSyntaxError(problem, source, tag.line, tag.column)
    return Role(tag.name, children)  # type: ignore[arg-type]


def trimmed(nodes: list[Tag | Text]) -> list[Tag | str]:
    """Tags and texts without layout."""
    kept: list[Tag | str] = []
    at = 0
    while at < len(nodes):
        node = nodes[at]
        if isinstance(node, Tag):
            kept.append(node)
            at += 1
            continue
        end = next((i for i in range(at, len(nodes)) if isinstance(nodes[i], Tag)), len(nodes))
        texts = [n for n in nodes[at:end] if isinstance(n, Text)]
        behind, before = (any(map(_is_parameter, side)) for side in (nodes[max(at - 1, 0) : at], nodes[end : end + 1]))
        if text := _without_layout(texts, behind, before):
            kept.append(text)
        at = end
    return kept


def _is_parameter(node: Tag | Text) -> bool:
    return isinstance(node, Tag) and node.name in ("parameter", "param")


def _without_layout(texts: list[Text], behind_parameter: bool, before_parameter: bool) -> str:
    """Joins the texts between two tags. A parameter is part of the text, so nothing goes on its side."""
    values = [t.value for t in texts]
    blank = all(not t.verbatim for t in texts) and not "".join(values).strip()
    if blank and not behind_parameter and not before_parameter:
        return ""
    if not texts[0].verbatim and not behind_parameter:
        values[0] = re.sub(r"\A[ \t\r]*\n", "", values[0])
    if not texts[-1].verbatim and not before_parameter:
        values[-1] = re.sub(r"(?<=\n)[ \t]+\Z", "", values[-1])
    return "".join(values)
