# Shared by the scripts here; sourced, not run.

# say TEXT...: one progress line.
say() { printf '\n==> %s\n' "$*"; }

# find_python: print the first interpreter that is new enough.
find_python() {
    local candidate
    for candidate in python3 python3.13 python3.12 python3.11 python; do
        if command -v "$candidate" >/dev/null 2>&1 &&
            "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    echo "error: no Python 3.11 or newer found on PATH" >&2
    return 8
}

# make_venv FOLDER: create a virtual environment, installing venv support where a
# system Python lacks it and the package manager may be used.
make_venv() {
    local python
    python=$(find_python) || return
    "$python" -m venv "$1" && return
    rm -rf "$1"
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        apt-get update -q && apt-get install -qy python3-venv && "$python" -m venv "$1" && return
    fi
    echo "error: $python cannot make a virtual environment; install its venv module" >&2
    return 8
}

# use_venv: take the active virtual environment, else make .venv here and activate it.
# Sets venv_is_ours to yes or no.
use_venv() {
    venv_is_ours=no
    if [ -z "${VIRTUAL_ENV:-}" ]; then
        venv_is_ours=yes
        [ -x .venv/bin/python ] || make_venv .venv || return
        VIRTUAL_ENV=$PWD/.venv
        export VIRTUAL_ENV
    fi
    PATH=$VIRTUAL_ENV/bin:$PATH
    export PATH
}
