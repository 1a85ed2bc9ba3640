#!/usr/bin/env bash
# Makes a fresh environment in .venv and runs every check: layers, types, style, tests.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
"$python" -m venv --clear .venv
.venv/bin/pip install --quiet --disable-pip-version-check "torch==${TORCH_VERSION:-2.13.0}"
.venv/bin/pip install --quiet --disable-pip-version-check -e ".[test,torch]"
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
.venv/bin/lint-imports
exec .venv/bin/python -m pytest "$@"
