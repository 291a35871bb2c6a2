"""Agent programs for any OpenAI server run unchanged, and `auto` finds what they quote."""

import re
import runpy
from pathlib import Path

import httpx
import pytest
from helpers.live_server import make_engine, serving

ROOT = Path(__file__).parents[3]
PROGRAMS, DOCS = ROOT / "examples" / "serve", ROOT / "docs"


@pytest.fixture(scope="module")
def auto(talker_folder):
    """A server whose default is to reuse quotes."""
    with serving(make_engine(talker_folder), reuse="auto") as server:
        yield server


def found(server, source):
    """Prompt tokens of one source that the server has counted."""
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    name = "choreograph:prompt_tokens_by_source_total"
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name) and f'"{source}"' in line)


@pytest.mark.parametrize("program", sorted(path.name for path in PROGRAMS.glob("*.py")))
def test_agent_program_runs(auto, program, monkeypatch, capsys, request):
    if program == "debate.py":  # the others need whole calls
        request.getfixturevalue("brief")
    monkeypatch.setenv("OPENAI_BASE_URL", f"{auto.url}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    before = found(auto, "computed")
    runpy.run_path(str(PROGRAMS / program), run_name="__main__")
    assert capsys.readouterr().out.strip()
    auto.wait_until_idle()
    assert found(auto, "computed") > before


@pytest.mark.parametrize(
    "page",
    [
        "server",
        pytest.param("from-vllm", marks=pytest.mark.slow),
        pytest.param("from-langgraph", marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("brief")
def test_the_code_of_the_page_runs(auto, page):
    """All python blocks, on the test's server."""
    text = (DOCS / f"{page}.md").read_text()
    text = text.replace("http://127.0.0.1:8000", auto.url).replace("smollm2-135m-instruct", "tiny")
    scope: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(block, page, "exec"), scope)


def test_the_page_of_the_server_begins_with_the_first_answer():
    page = (DOCS / "server.md").read_text()
    commands, program = re.findall(r"```(?:python)?\n(.*?)```", page, re.DOTALL)[:2]
    assert commands.startswith("pip install 'choreograph[serve]'")
    assert len([line for line in program.splitlines() if line]) == 3
