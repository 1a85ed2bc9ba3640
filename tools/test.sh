#!/usr/bin/env bash
# Makes a fresh environment in .venv-test and runs every check: style, types, layers, tests.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
# pages are looked at in a real browser
if ! command -v chromium >/dev/null && command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
  { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends chromium \
    fonts-dejavu-core; } >/dev/null 2>&1 || true
fi
"$python" -m venv --clear .venv-test
.venv-test/bin/pip install --quiet --disable-pip-version-check "torch==${TORCH_VERSION:-2.13.0}"
.venv-test/bin/pip install --quiet --disable-pip-version-check -e ".[test,torch]"
.venv-test/bin/ruff check .
.venv-test/bin/ruff format --check .
.venv-test/bin/mypy
.venv-test/bin/lint-imports
# most of them wait for other processes: more at a time than there are CPUs; those of a file share what they set up
.venv-test/bin/python -m pytest -n "${TEST_WORKERS:-4}" --dist worksteal --ignore tests/test_proxy.py "$@"
# what measures how late an event loop is runs alone
exec .venv-test/bin/python -m pytest tests/test_proxy.py
