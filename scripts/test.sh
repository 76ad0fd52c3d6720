#!/usr/bin/env bash
# Lint, types, import contracts and tests, in .venv. Arguments go to pytest: scripts/test.sh tests/scheduler -x
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"

install_into_venv test

say "ruff"
.venv/bin/ruff check .
.venv/bin/ruff format --check .
say "pyright"
.venv/bin/pyright
say "import contracts"
.venv/bin/lint-imports --no-logo
say "pytest"
.venv/bin/python -m pytest "$@"
