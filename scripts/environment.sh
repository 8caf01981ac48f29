# Sourced by the other scripts: `ensure_environment EXTRA...` creates .venv once, installs what changed, activates it.

say() { printf '\033[1m==> %s\033[0m\n' "$*" >&2; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3 python3.13 python3.12 python3.11; do
        if command -v "$candidate" >/dev/null &&
            "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    say "Python 3.11 or newer with its venv module is needed; set PYTHON to one" && return 1
}

ensure_environment() {
    local venv=${VENV:-.venv} extras=${1:-} python stamp wanted
    python=$(find_python)
    if [ ! -x "$venv/bin/python" ]; then
        say "Creating $venv with $($python --version)"
        "$python" -m venv "$venv"
    fi
    # shellcheck disable=SC1091
    . "$venv/bin/activate"
    stamp="$venv/.installed${extras:+-$extras}"
    wanted=$(cat pyproject.toml | cksum)
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
        say "Installing eagle-jax${extras:+[$extras]} into $venv (again only when pyproject.toml changes)"
        python -m pip install --quiet --disable-pip-version-check --editable ".${extras:+[$extras]}"
        printf '%s\n' "$wanted" >"$stamp"
    fi
}
