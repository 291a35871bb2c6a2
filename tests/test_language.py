"""Names and prose use the field's terms, not words of the earlier private vocabulary.

`python tests/test_language.py [PATH ...]` lists every occurrence with its line.
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "choreograph"
# Words of the earlier vocabulary that must not occur in names of classes, functions, parameters or fields.
NAME_WORDS = {
    "sight", "sights", "beginning", "beginnings", "counsel", "advice", "hear", "hearing", "endings", "spite",
    "hasten", "foresee", "foreseen", "begun", "mend", "lesson", "lessons", "rehearsal", "rehearse",
    "performance", "choreographies", "told", "whoever", "nobody", "somebody", "apart", "lender",
    "borrow", "borrows", "holder", "holders", "mover", "traffic", "elsewhere", "sharing",
}  # fmt: skip
# Patterns that must not occur in docstrings, comments, string literals or documentation pages.
PROSE = re.compile(
    r"""\b(
    whoever | whomever | somebody | nobody | anybody | everybody | folks?
    | sights? | in\ sight | is\ shown | are\ shown\ to | on\ show
    | lets?\ go(?:\ of)? | letting\ go | give[sn]?\ way | gave\ way | mak(?:es?|ing)\ (?:room|way) | made\ (?:room|way)
    | mends? | mended | mending | spite | heard | hearing | hears | told | tells | telling
    | lessons? | rehears\w* | begun | foresee\w* | foreseen | hasten\w*
    | sen[dt]s?\ away | stands?\ (?:at|for|in|where) | where\ it\ stands | stood
    | lender | borrow\w* | beginnings?(?!-of) | counsel | endings?
    | (?:an|the|its|their|this|each|every|whose|no|old|saved|stored|host|device|reused)\ encodings? | encodings\ (?:of|that|are|which|in|on)
    | beside | apart | in\ front\ of | twice\ over | at\ its\ end | of\ its\ own\ accord | is\ nothing\ to | what\ watches
    )\b""",
    re.VERBOSE | re.IGNORECASE,
)
# Occurrences in the ordinary sense: the text around a match, and why it stays.
EXCEPTIONS = {
    "position encoding": "the field's term for RoPE, ALiBi and learned positions",
    "text encoding": "bytes of a text file",
    "stone bridge beside it": "text of an example",
    "encoding of the file": "bytes of a text file",
}


def defined_names(tree: ast.Module) -> Iterator[str]:
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


def prose_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line number, text) of the strings and comments of a Python file, or of the text of a page outside code."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield from enumerate(node.value.splitlines(), node.lineno)
        yield from ((i, line.split("#", 1)[1]) for i, line in enumerate(text.splitlines(), 1) if "#" in line)
        return
    in_code = False
    for i, line in enumerate(text.splitlines(), 1):
        in_code ^= line.lstrip().startswith("```")
        if not in_code:
            yield i, line


def dialect_of(path: Path) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{number}: {match.group()!r} in {line.strip()[:120]!r}"
        for number, line in prose_of(path)
        for match in PROSE.finditer(line)
        if not any(phrase in line.lower() for phrase in EXCEPTIONS)
    ]


def test_names_are_the_fields_terms():
    found = {
        f"{path.relative_to(PACKAGE)}: {name}"
        for path in PACKAGE.rglob("*.py")
        for name in defined_names(ast.parse(path.read_text()))
        if words_of(name) & NAME_WORDS
    }
    assert not found


def test_prose_of_package_and_docs_has_no_word_of_the_earlier_vocabulary():
    paths = [*PACKAGE.rglob("*.py"), *ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    assert not [line for path in paths for line in dialect_of(path)]


def test_first_lines_of_docstrings_have_at_most_12_words():
    long = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                first = (ast.get_docstring(node) or "").partition("\n")[0]
                if len(first.split()) > 12:
                    long.append(f"{path.relative_to(PACKAGE)}: {first}")
    assert not long


def test_class_and_module_names_are_unique():
    paths = [path for path in PACKAGE.rglob("*.py") if path.name not in ("__init__.py", "__main__.py")]
    modules = Counter(path.stem for path in paths)
    classes = Counter(
        node.name for path in paths for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)
    )
    assert not [name for name, count in (modules + classes).items() if count > 1]


if __name__ == "__main__":
    for argument in map(Path, sys.argv[1:] or ["choreograph", "docs", "README.md"]):
        files = [argument] if argument.is_file() else [*argument.rglob("*.py"), *argument.rglob("*.md")]
        for file in files:
            print("\n".join(dialect_of(file.resolve())), end="\n" if dialect_of(file.resolve()) else "")
