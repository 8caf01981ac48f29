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
# Tests download nothing, so what they need of the built-in model is fetched here, once.
say "smollm2-135m"
python -c 'from eagle_jax.checkpoint.hub import resolve; print(resolve("smollm2-135m"))' ||
    say "Not to be had: the tests of the built-in model will be skipped"
say "pytest"
pytest "$@"
