#!/usr/bin/env bash
# Installs the test extra, lints, checks types, runs the tests. Arguments go to pytest: ./scripts/test.sh tests/layers -x
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh
ensure_environment test

say "ruff"
ruff check .
ruff format --check .
say "mypy"
mypy
say "pytest"
pytest "$@"
