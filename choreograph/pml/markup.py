"""Text to tags: the syntax of PML. Knows places and quotes; knows no schema.

PML looks like XML but holds prompts, and prompts hold code. So a `<` or `&` that starts neither a tag nor an
entity is text, CDATA is verbatim, and nothing is ever expanded: a DOCTYPE or ENTITY is refused.
"""

import bisect
import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from ..errors import PMLSyntaxError

NAME = r"[^\s<>/&\"'=!?]+"
_ATTRIBUTE = rf"({NAME})\s*=\s*(\"[^\"]*\"|'[^']*')"
_TAG = re.compile(rf"<(/?)({NAME})((?:\s+{_ATTRIBUTE})*)\s*(/?)>")
_START = re.compile(rf"<(/?)({NAME})")
_HALF = re.compile(rf"</?{NAME}\s+{NAME}\s*=[^<]*>")
_ENTITY = re.compile(r"&(?:(lt|gt|amp|quot|apos)|#(\d{1,7})|#x([0-9a-fA-F]{1,6}));")
_NAMED = {"lt": "<", "gt": ">", "amp": "&", "quot": '"', "apos": "'"}
_REFUSED = re.compile(r"<!(DOCTYPE|ENTITY|ELEMENT|ATTLIST|NOTATION)\b", re.IGNORECASE)
DEPTH = 200


@dataclass(frozen=True)
class Text:
    """verbatim: it stood in CDATA, so its white space counts as it is."""

    value: str
    verbatim: bool = False


@dataclass
class Tag:
    """An element with what stands inside it."""

    name: str
    attributes: dict[str, str]
    line: int
    column: int
    children: list["Tag | Text"] = field(default_factory=list)


class Markup:
    """One document. is_tag decides which names are tags; others are text. near: the names where they
    are few: a slip in one of them is an error."""

    def __init__(self, text: str, *, source: str, is_tag: Callable[[str], bool], near: tuple[str, ...] = ()) -> None:
        self._text = text.removeprefix("\ufeff")
        self._source = source
        self._is_tag = is_tag
        self._near = near
        self._lines = [0, *(m.end() for m in re.finditer("\n", self._text))]

    def error(self, problem: str, at: int) -> PMLSyntaxError:
        return PMLSyntaxError(problem, self._source, *self._place(at))

    def _place(self, at: int) -> tuple[int, int]:
        line = bisect.bisect(self._lines, at)
        return line, at - self._lines[line - 1] + 1

    def parse(self) -> list[Tag | Text]:
        """The document's top level."""
        top: list[Tag | Text] = []
        self._open: list[tuple[Tag, int]] = []
        at = self._skip_declaration()
        while at < len(self._text):
            here = self._open[-1][0].children if self._open else top
            if self._text[at] == "<":
                after = self._angle(at, here)
            else:
                after = self._text.find("<", at)
                after = len(self._text) if after < 0 else after
                here.append(Text(self._decoded(at, after)))
            at = after
        if self._open:
            tag, where = self._open[-1]
            raise self.error(f"<{tag.name}> is never closed: write </{tag.name}>, or &lt; for text", where)
        return top

    def _skip_declaration(self) -> int:
        found = re.match(r"\s*<\?xml\b.*?\?>", self._text, re.DOTALL)
        return found.end() if found else 0

    def _angle(self, at: int, here: list[Tag | Text]) -> int:
        """Reads what starts at a `<`; returns where it ends."""
        text = self._text
        if text.startswith("<!--", at):
            return self._until("-->", at, "comment")
        if text.startswith("<![CDATA[", at):
            end = self._until("]]>", at, "CDATA section")
            here.append(Text(text[at + 9 : end - 3], verbatim=True))
            return end
        if refused := _REFUSED.match(text, at):
            kind = refused[1].upper()
            raise self.error(f"{kind} is refused: nothing is expanded; put such text into CDATA", at)
        return self._tag(at, here)

    def _until(self, mark: str, at: int, what: str) -> int:
        end = self._text.find(mark, at)
        if end < 0:
            raise self.error(f"a {what} is never closed: write {mark}", at)
        return end + len(mark)

    def _tag(self, at: int, here: list[Tag | Text]) -> int:
        start = _START.match(self._text, at)
        if start is None or not self._is_tag(start[2]):
            self._refuse_slip(at, start)
            here.append(Text("<"))
            return at + 1
        whole = _TAG.match(self._text, at)
        if whole is None and not self._near and not _HALF.match(self._text, at):
            here.append(Text("<"))  # any name may be a tag here, so only what looks like one has to be whole
            return at + 1
        if whole is None or (whole[1] and (whole[3].strip() or whole[6])):
            raise self.error(f'{start[0]} is not a whole tag: write <name key="value"> or </name>', at)
        if whole[1]:
            self._close(whole[2], at)
            return whole.end()
        tag = Tag(whole[2], self._attributes(whole[3], at), *self._place(at))
        here.append(tag)
        if not whole[6]:
            self._open.append((tag, at))
            if len(self._open) > DEPTH:
                raise self.error(f"tags are nested deeper than {DEPTH}", at)
        return whole.end()

    def _refuse_slip(self, at: int, start: re.Match[str] | None) -> None:
        """A whole tag with attributes whose name is almost one that counts is an error, not text."""
        whole = _TAG.match(self._text, at)
        if start is None or whole is None or not whole[3]:
            return
        close = difflib.get_close_matches(whole[2], self._near, n=1, cutoff=0.8)
        if close:
            raise self.error(f"<{whole[2]}> is not a tag: write <{close[0]}>, or &lt;{whole[2]}> for text", at)

    def _close(self, name: str, at: int) -> None:
        if all(tag.name != name for tag, _ in self._open):
            raise self.error(f"</{name}> closes nothing that is open", at)
        tag, where = self._open.pop()
        if tag.name != name:
            line, column = self._place(at)
            end = f"before </{name}> in line {line}, column {column}"
            raise self.error(f"<{tag.name}> is not closed {end}: write </{tag.name}>, or &lt; for text", where)

    def _attributes(self, text: str, at: int) -> dict[str, str]:
        found: dict[str, str] = {}
        for name, value in re.findall(_ATTRIBUTE, text):
            if name in found:
                raise self.error(f"attribute {name!r} stands twice in one tag", at)
            found[name] = self._entities(value[1:-1], at)
        return found

    def _decoded(self, at: int, after: int) -> str:
        return self._entities(self._text[at:after], at)

    def _entities(self, text: str, at: int) -> str:
        def one(found: re.Match[str]) -> str:
            if found[1]:
                return _NAMED[found[1]]
            code = int(found[2] or found[3], 10 if found[2] else 16)
            if not 0 < code <= 0x10FFFF or 0xD800 <= code <= 0xDFFF:
                raise self.error(f"{found[0]} is not a character", at + found.start())
            return chr(code)

        return _ENTITY.sub(one, text)
