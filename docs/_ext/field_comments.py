"""Griffe extension: trailing comments of fields become descriptions, and trees in docstrings code blocks."""

import ast
import io
import tokenize
from functools import lru_cache
from pathlib import Path
from typing import Any

import griffe


@lru_cache
def comments_by_line(path: Path) -> dict[int, str]:
    """Return the comments of a source file by line number, without comments for linters."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
    comments = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
    return {line: text for line, text in comments.items() if not text.startswith(("noqa", "type:", "fmt:"))}


class FieldComments(griffe.Extension):
    """Uses trailing comments as docstrings of fields that have none."""

    def on_attribute_instance(self, *, node: Any, attr: griffe.Attribute, **kwargs: Any) -> None:
        if attr.docstring is not None or not isinstance(node, ast.AnnAssign) or not isinstance(attr.filepath, Path):
            return
        line = node.end_lineno or node.lineno
        comment = comments_by_line(attr.filepath).get(line)
        if comment:
            attr.docstring = griffe.Docstring(comment, lineno=line, parent=attr)

    def on_module_members(self, *, mod: griffe.Module, **kwargs: Any) -> None:
        """Put a tree drawn in a module's docstring into a code block."""
        if mod.docstring is None or "├── " not in mod.docstring.value:
            return
        intro, _, tree = mod.docstring.value.partition("\n\n")
        mod.docstring.value = f"{intro}\n\n```text\n{tree.rstrip()}\n```"
