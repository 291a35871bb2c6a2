"""The public surface is pinned, and what the documents show is what runs."""

import re
from pathlib import Path

import pytest
import torch
from jaxtyping import TypeCheckError

import choreograph
from choreograph.attention.rope import rotate

ROOT = Path(__file__).parents[1]
NAMES = [
    "CacheConfig",
    "ChoreographError",
    "Engine",
    "EngineConfig",
    "LayerPattern",
    "Message",
    "SamplingParams",
    "SchedulerConfig",
    "Session",
    "Timing",
    "TokenLogprob",
    "Turn",
    "Usage",
]


def test_public_names():
    assert choreograph.__all__ == NAMES
    assert all(hasattr(choreograph, name) for name in NAMES)


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        *(
            f"docs/{name}.md"
            for name in ("quickstart", "workflows", "pml", "memory", "distillation", "reuse", "models")
        ),
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
    assert len(block.splitlines()) <= 25


def test_the_tables_of_the_results_are_what_the_results_say():
    from benchmarks.results_page import PAGE, TABLES, fill_tables

    text = PAGE.read_text()
    assert fill_tables(text) == text
    assert all(f"<!-- table: {name} -->" in text for name in TABLES)


def test_the_table_of_the_readme_is_what_the_results_say():
    from benchmarks.readme import PAGE, summary, table

    assert summary() in (ROOT / "README.md").read_text()
    assert table() in PAGE.read_text()


def test_shapes_in_signatures_are_checked_here():
    with pytest.raises(TypeCheckError):
        rotate(torch.zeros(2, 8), torch.zeros(2, 4), torch.zeros(2, 3), interleaved=False)


def test_modules_stay_small_and_open_with_a_contract():
    for path in (ROOT / "choreograph").rglob("*.py"):
        text = path.read_text()
        assert len(text.splitlines()) <= 480, path
        assert text.startswith('"""'), path


def test_the_tables_of_the_predictions_are_what_was_predicted():
    from benchmarks.gpu.page import PAGE, fill_tables

    text = PAGE.read_text()
    assert fill_tables(text) == text and all(
        f"<!-- table: {name} -->" in text for name in ("h200", "h200_otherwise", "check")
    )
