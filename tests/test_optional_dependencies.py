"""A missing extra is one line that names it; the package imports without any extra."""

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "choreograph"
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
REQUIRED = {  # (module, extra) of every call of `require`
    (call.args[0].value, call.args[1].value)
    for path in PACKAGE.rglob("*.py")
    for call in ast.walk(ast.parse(path.read_text()))
    if isinstance(call, ast.Call) and getattr(call.func, "id", None) == "require" and len(call.args) == 2
    if all(isinstance(argument, ast.Constant) for argument in call.args)
}


BLOCK = """
import sys
from importlib.machinery import PathFinder

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {blocked!r} else PathFinder.find_spec(name, path, target)

sys.meta_path = [Finder if finder is PathFinder else finder for finder in sys.meta_path]
"""


def run_without(modules, code, *arguments):
    """Run code in a process in which some modules are not installed."""
    command = [sys.executable, "-c", BLOCK.replace("{blocked!r}", repr(modules)) + code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)


@pytest.mark.parametrize("module", ["rich", "typer"])
def test_the_command_line_names_its_extra(module):
    result = run_without([module], "from choreograph.__main__ import main; main()", "--help")
    assert result.returncode == 2 and not result.stdout
    assert result.stderr == f"error: {module} is not installed: run pip install 'choreograph[cli]'\n"


def test_commands_name_the_extra_that_they_need_in_one_line(tmp_path):
    graph, picture = tmp_path / "g.json", tmp_path / "g.svg"
    graph.write_text('{"a": null, "b": "a"}')
    commands = {
        f"step-graph show {graph} --svg {picture}": "matplotlib is not installed: run pip install 'choreograph[viz]'",
        "eval single_call --data games --ray local": "ray is not installed: run pip install 'choreograph[ray]'",
        "trace single_call --data games --ray local": "ray is not installed: run pip install 'choreograph[ray]'",
    }
    code = """
from choreograph.__main__ import main
commands, sys.argv[1:] = sys.argv[1:], []
for command in commands:
    sys.argv[1:] = command.split()
    try:
        main()
    except SystemExit as exc:
        assert exc.code == 1, exc.code
    else:
        raise SystemExit(f"{command} needed nothing")
"""
    result = run_without(["matplotlib", "ray"], code, *commands)
    assert result.stderr.splitlines() == [f"error: {line}" for line in commands.values()]
    assert result.returncode == 0 and not picture.exists()


def test_importing_the_package_imports_no_library():
    code = "import sys, choreograph; print({'numpy', 'pydantic', 'torch', 'transformers'} & sys.modules.keys())"
    assert run_without([], code).stdout == "set()\n"


def test_an_engine_imports_nothing_of_servers_and_tools(talker_folder):
    code = """
from choreograph import Engine, SamplingParams
engine = Engine.from_pretrained(sys.argv[1], dtype="float32")
with engine.session() as session:
    question = session.prefill(session.user("hello"))
    session.decode(session.assistant(), [question], sampling=SamplingParams(max_tokens=2)).result()
print(sorted(name for name in sys.modules if name in set(sys.argv[2:])))
"""
    unused = ["fastapi", "gguf", "httpx", "llguidance", "matplotlib", "nicegui", "opentelemetry", "pandas", "peft"]
    unused += ["prometheus_client", "ray", "sklearn", "statsmodels", "torchao", "typer", "uvicorn"]
    unused += ["choreograph.models.compilation", "choreograph.models.gguf.gguf_tokenizer", "transformers.models.bloom"]
    result = run_without([], code, talker_folder, *unused)
    assert result.stdout == "[]\n", result.stderr


def test_evaluation_names_its_extra():
    code = """
from choreograph.errors import MissingDependencyError
from choreograph.lab.evaluation import metrics, statistics
for module, call in (
    ("math_verify", lambda: metrics.math_equal("1", "x")),
    ("lemminflect", lambda: metrics.concept_coverage("a dog", ["dog"])),
    ("scipy", lambda: statistics.mean([0.1, 0.2])),
    ("statsmodels", lambda: statistics.mean([0, 1])),
):
    try:
        call()
    except MissingDependencyError as exc:
        assert str(exc) == f"{module} is not installed: run pip install 'choreograph[eval]'", exc
    else:
        raise SystemExit(f"{module} was not needed")
"""
    result = run_without(["lemminflect", "math_verify", "scipy", "statsmodels"], code)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(("module", "extra"), sorted(REQUIRED))
def test_a_required_module_is_in_its_extra(module, extra):
    distributions = packages_distributions().get(module.partition(".")[0], [])
    listed = {re.split(r"[>\[]", requirement)[0].lower() for requirement in EXTRAS[extra]}
    assert listed & {name.lower() for name in distributions}, f"{extra} does not install {module}"


@pytest.mark.parametrize("extra", ["cli", "eval", "viz"])
def test_no_module_imports_an_extra_at_its_top(extra):
    optional = {module.partition(".")[0] for module, name in REQUIRED if name == extra}
    modules = {path: ast.parse(path.read_text()).body for path in PACKAGE.rglob("*.py")}
    own = {"cli": [PACKAGE / "cli", PACKAGE / "lab" / "commands"], "eval": [PACKAGE / "agents"]}.get(
        extra, []
    )  # agents have an extra with SciPy
    imports = {
        (str(path.relative_to(PACKAGE)), name.partition(".")[0])
        for path, body in modules.items()
        for node in body
        if isinstance(node, (ast.Import, ast.ImportFrom)) and not getattr(node, "level", 0)
        for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module])
        if not any(folder in path.parents for folder in own)
    }
    assert not [entry for entry in imports if entry[1] in optional]
