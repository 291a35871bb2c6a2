"""Report names, prose and sizes that a reader may stumble over: `make style`, or with files and folders to read.

A report and no check: it always exits with 0, and CI does not run it.
"""

import argparse
import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

MAX_DOCSTRING_WORDS = 12  # of a first line
# Most lines of files that are read in one go.
MAX_LINES = {
    "choreograph/**/*.py": 480,
    "examples/*.py": 40,
    "examples/serve/*.py": 45,
    "docs/results.md": 150,
}
# Words of an earlier vocabulary, in names of classes, functions, parameters or fields.
NAME_WORDS = {
    "sight", "sights", "beginning", "beginnings", "counsel", "advice", "hear", "hearing", "endings", "spite",
    "hasten", "foresee", "foreseen", "begun", "mend", "lesson", "lessons", "rehearsal", "rehearse",
    "performance", "choreographies", "told", "whoever", "nobody", "somebody", "apart", "lender",
    "borrow", "borrows", "holder", "holders", "mover", "traffic", "elsewhere", "sharing",
}  # fmt: skip
# The same in docstrings, comments, string literals and documentation pages.
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
# Lines with these words in the ordinary sense.
EXCEPTIONS = ("position encoding", "text encoding", "stone bridge beside it", "encoding of the file")


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


def unusual_names(files: list[Path]) -> Iterator[str]:
    for path in files:
        for name in sorted(set(defined_names(ast.parse(path.read_text())))):
            if NAME_WORDS & {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}:
                yield f"{path}: {name}"


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


def unusual_prose(files: list[Path]) -> Iterator[str]:
    for path in files:
        for number, line in prose_of(path):
            if not any(phrase in line.lower() for phrase in EXCEPTIONS):
                for match in PROSE.finditer(line):
                    yield f"{path}:{number}: {match.group()!r} in {line.strip()[:120]!r}"


def long_docstrings(files: list[Path]) -> Iterator[str]:
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                first = (ast.get_docstring(node) or "").partition("\n")[0]
                if len(first.split()) > MAX_DOCSTRING_WORDS:
                    yield f"{path}: {first}"


def modules_without_docstring(files: list[Path]) -> Iterator[str]:
    return (f"{path}" for path in files if ast.get_docstring(ast.parse(path.read_text())) is None)


def repeated_names(files: list[Path]) -> Iterator[str]:
    files = [path for path in files if path.name not in ("__init__.py", "__main__.py")]
    trees = [ast.parse(path.read_text()) for path in files]
    names = Counter(path.stem for path in files)
    names.update(node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    return (f"{name}: {count} times" for name, count in sorted(names.items()) if count > 1)


def long_files() -> Iterator[str]:
    for pattern, limit in MAX_LINES.items():
        for path in sorted(Path().glob(pattern)):
            num_lines = len(path.read_text().splitlines())
            if num_lines > limit:
                yield f"{path}: {num_lines} lines, more than {limit}"


def report(title: str, lines: Iterator[str]) -> None:
    found = list(lines)
    print(f"{title}: {len(found)}", *found, sep="\n  ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("paths", nargs="*", type=Path, help="files and folders whose prose is read; default: all")
    paths = parser.parse_args().paths
    if paths:
        files = [file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("*.[mp][dy]")))]
        report("words of the earlier vocabulary in prose", unusual_prose(files))
        return
    package = sorted(Path("choreograph").rglob("*.py"))
    pages = [*sorted(Path().glob("*.md")), *sorted(Path("docs").rglob("*.md"))]
    report("words of the earlier vocabulary in names", unusual_names(package))
    report("words of the earlier vocabulary in prose", unusual_prose([*package, *pages]))
    report(f"first lines of docstrings with more than {MAX_DOCSTRING_WORDS} words", long_docstrings(package))
    report("modules without a docstring", modules_without_docstring(package))
    report("names of modules and classes that occur more than once", repeated_names(package))
    report("long files", long_files())


if __name__ == "__main__":
    main()
