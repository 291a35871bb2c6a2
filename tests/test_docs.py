"""Documentation pages: navigation, links, and the reference generated from docstrings."""

import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
PACKAGES = ("", ".agents", ".layer_reuse", ".prompt_cache", ".lab.training", ".lab.workflows")


def nav_pages(entry: object) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    children = entry.values() if isinstance(entry, dict) else entry
    return [page for child in children for page in nav_pages(child)]


def reference_names() -> list[str]:
    return [name for page in PAGES for name in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.MULTILINE)]


def resolve(name: str) -> object:
    """Import the longest module prefix of a dotted name and return what the rest names in it."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            value = import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            value = getattr(value, part)
        return value
    raise ModuleNotFoundError(name)


def test_navigation_lists_every_page_once():
    pages = nav_pages(CONFIG["nav"])
    assert sorted(pages) == sorted(page.relative_to(DOCS).as_posix() for page in PAGES)


@pytest.mark.parametrize("page", [*PAGES, *ROOT.glob("*.md")], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_relative_links_exist(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in link]
    assert not [link for link in links if not (page.parent / link).exists()]


@pytest.mark.parametrize("name", reference_names())
def test_reference_names_exist(name):
    assert resolve(name) is not None


@pytest.mark.parametrize("package", PACKAGES)
def test_reference_covers_the_public_names(package):
    names = import_module(f"choreograph{package}").__all__
    assert not {f"choreograph{package}.{name}" for name in names} - set(reference_names())


def test_site_loads_nothing_from_other_servers(tmp_path):
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings_handlers.python")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    pages = [path.read_text() for path in tmp_path.rglob("*.html")]
    assert pages
    assert not [page for page in pages if re.search(r"<(?:script|link|img)[^>]*(?:src|href)=\"(?:https?:)?//", page)]
