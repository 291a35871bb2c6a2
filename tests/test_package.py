"""The public surface is pinned, and what the documents show is what runs."""

import re
import runpy
import tomllib
from pathlib import Path

import pytest
import torch
import yaml
from jaxtyping import TypeCheckError

import choreograph
from choreograph.attention.rope import rotate

ROOT = Path(__file__).parents[1]
NAMES = [
    "Budget",
    "CacheConfig",
    "CallOptions",
    "ChoreographError",
    "ContextFeature",
    "DecodeOptions",
    "Engine",
    "EngineConfig",
    "Explanation",
    "KVSnapshot",
    "LayerPattern",
    "Message",
    "Repair",
    "SamplingParams",
    "SchedulerConfig",
    "Session",
    "SessionOptions",
    "Timing",
    "TokenLogprob",
    "Turn",
    "Usage",
    "connect",
]


def test_public_names():
    assert choreograph.__all__ == NAMES
    assert all(hasattr(choreograph, name) for name in NAMES)


def test_an_installed_package_has_all_files():
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["choreograph"]
    package = ROOT / "choreograph"
    files = {path for path in package.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert files == {path for pattern in patterns for path in package.glob(pattern)}


def test_the_version_is_the_same_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    releases = re.findall(r"^## (\d\S*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert choreograph.__version__ == project["version"] == releases[0] == citation["version"]


def test_each_extra_is_tried_before_a_release():
    names = runpy.run_path(str(ROOT / ".ci" / "release_check.py"))
    assert set(names["SMOKE_TESTS"]) == set(names["NAMES"])


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        *(f"docs/{name}.md" for name in ("quickstart", "workflows", "pml", "distillation", "reuse", "models", "guard")),
        pytest.param("docs/memory.md", marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("brief")
def test_code_in_the_documents_runs(page):
    """All python blocks of a page, in one namespace, top to bottom."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert blocks
    scope: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, page, "exec"), scope)


def test_the_workflow_in_the_documents_is_the_example():
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "workflows.md").read_text(), re.DOTALL)
    assert block in (ROOT / "examples" / "own_workflow.py").read_text()


def test_the_tables_of_the_results_are_what_the_results_say():
    from benchmarks.results_page import PAGES
    from benchmarks.tables import TABLES, fill_tables

    texts = [page.read_text() for page in PAGES]
    assert [fill_tables(text) for text in texts] == texts
    assert all(sum(f"<!-- table: {name} -->" in text for text in texts) == 1 for name in TABLES)


def test_the_table_of_the_readme_is_what_the_results_say():
    from benchmarks.readme import PAGE, summary, table

    assert summary() in (ROOT / "README.md").read_text()
    assert table() in PAGE.read_text()


def test_shapes_in_signatures_are_checked_here():
    with pytest.raises(TypeCheckError):
        rotate(torch.zeros(2, 8), torch.zeros(2, 4), torch.zeros(2, 3), interleaved=False)


def test_the_tables_of_the_predictions_are_what_was_predicted():
    from benchmarks.gpu.page import PAGES, fill_tables

    texts = [page.read_text() for page in PAGES]
    assert [fill_tables(text) for text in texts] == texts
    names = ("h200", "h200_otherwise", "h200_summary", "check", "binaries")
    assert all(sum(f"<!-- table: {name} -->" in text for text in texts) == 1 for name in names)
