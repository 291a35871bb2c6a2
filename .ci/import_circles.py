"""Fail if modules of the package import each other in a circle of more than three files, type imports included."""

import ast
import sys
from pathlib import Path

MAX_FILES = 3


def import_graph(package: Path) -> dict[str, set[str]]:
    """Return the modules of a package that each of them imports."""
    names = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package.parent).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return {name: set(_imports(name, path)) & names.keys() - {name} for name, path in names.items()}


def _imports(name: str, path: Path) -> list[str]:
    """Return what a module imports; of `from a import b` both `a` and `a.b`."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
            base = base[: len(base) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            members = [f"{module}.{alias.name}" for alias in node.names]
            found += members if node.module is None else [module, *members]
    return found


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the sets of modules that reach each other."""
    reachable = {}
    for name in graph:
        seen, queue = set(), [name]
        while queue:
            new = graph[queue.pop()] - seen
            seen |= new
            queue += new
        reachable[name] = seen
    found = {frozenset(b for b in reachable[a] if a in reachable[b]) for a in graph if a in reachable[a]}
    return sorted(sorted(circle) for circle in found)


def main() -> int:
    """Print all circles; return 1 if one is too large."""
    found = circles(import_graph(Path(__file__).parents[1] / "choreograph"))
    for circle in found:
        print(f"{len(circle)} modules import each other: {', '.join(circle)}")
    return int(any(len(circle) > MAX_FILES for circle in found))


if __name__ == "__main__":
    sys.exit(main())
