"""Every example runs. A file of its own, since files are what the workers of a test run share out."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


QUICK = ("documents.py", "own_workflow.py", "tree_of_thoughts.py")


@pytest.mark.parametrize(
    "example",
    [
        path.name if path.name in QUICK else pytest.param(path.name, marks=pytest.mark.slow)
        for path in sorted(EXAMPLES.glob("*.py"))
    ],
)
@pytest.mark.usefixtures("brief")
def test_example_runs(example, capsys):
    path = EXAMPLES / example
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.strip()
