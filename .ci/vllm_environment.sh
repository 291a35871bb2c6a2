#!/usr/bin/env bash
# Build the environment of the vLLM tests once, and keep it: vLLM pins versions of torch and transformers of its own.
# usage: .ci/vllm_environment.sh [--python PYTHON] [--venv FOLDER]
# vLLM's wheel for CPUs needs the CPU build of torch: if pip does not find it, name its index in PIP_EXTRA_INDEX_URL.
set -euo pipefail
cd "$(dirname "$0")/.."
python=python3 venv=.venv-vllm requirements=.ci/vllm_requirements.txt
while [ $# -gt 0 ]; do
  case "$1" in
    --python) python=$2; shift 2 ;;
    --venv) venv=$2; shift 2 ;;
    *) echo "unknown option $1: use --python PYTHON or --venv FOLDER" >&2; exit 2 ;;
  esac
done
# The stamp holds what was installed, so that a changed list is installed, and an unchanged one is not looked at.
if cmp -s "$requirements" "$venv/.ready"; then exit 0; fi
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
pip install -q -r "$requirements"
# Builds of these for other versions of torch would stop vLLM when it imports them; no test uses them.
pip uninstall -qy torchvision torchaudio torchcodec
"$venv/bin/python" -c "import vllm; print('vLLM', vllm.__version__, 'is ready in $venv')"
cp "$requirements" "$venv/.ready"
