"""Names in the package are the field's terms, not words of the earlier private vocabulary."""

import ast
import re
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "choreograph"
# Words of the earlier vocabulary that must not occur in names of classes, functions, parameters or fields.
WORDS = {
    "sight", "sights", "beginning", "beginnings", "counsel", "advice", "hear", "hearing", "endings", "spite",
    "hasten", "foresee", "foreseen", "begun", "mend", "lesson", "lessons", "rehearsal", "rehearse",
    "performance", "choreographies", "told", "whoever", "nobody", "somebody", "apart", "lender",
    "borrow", "borrows", "holder", "holders", "mover", "traffic", "elsewhere", "sharing",
}  # fmt: skip


def defined_names(tree: ast.Module):
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from (arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs))
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def words_of(name: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def test_names_are_the_fields_terms():
    found = {
        f"{path.relative_to(PACKAGE)}: {name}"
        for path in PACKAGE.rglob("*.py")
        for name in defined_names(ast.parse(path.read_text()))
        if words_of(name) & WORDS
    }
    assert not found


def test_class_and_module_names_are_unique():
    paths = [path for path in PACKAGE.rglob("*.py") if path.name not in ("__init__.py", "__main__.py")]
    modules = Counter(path.stem for path in paths)
    classes = Counter(
        node.name for path in paths for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)
    )
    assert not [name for name, count in (modules + classes).items() if count > 1]
