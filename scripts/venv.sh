#!/bin/sh
# Make .venv hold this package and what it needs; returns at once when it already does.
#
#     [PYTHON=python3.12] sh scripts/venv.sh [run|dev]
#
# Files it keeps in .venv:
#   built       the folder the environment was built in: a copied or moved environment is built anew
#   unfinished  present while something is being installed: an environment left with it is built anew
#   installed   what was installed: `run` or `dev`, and checksums of pyproject.toml and constraints.txt
set -eu
cd -- "$(dirname -- "$0")/.."

wanted=${1:-run}
here=$(pwd -P)
signature="$(cksum pyproject.toml constraints.txt) $here"

# torch is pinned there; in force for every pip call, the isolated builds included (newer pips read the second name)
export PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_USER=0 PIP_NO_INPUT=1

fail() {
    printf '%s\n' "$*" >&2
    exit 2
}

new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        found=$("$PYTHON" -c 'import platform; print(platform.python_version())' 2>/dev/null) ||
            fail "PYTHON=$PYTHON cannot be run; give the path of a Python 3.11 or later"
        new_enough "$PYTHON" || fail "PYTHON=$PYTHON is Python $found; fullrank needs Python 3.11 or later"
        printf '%s\n' "$PYTHON"
        return
    fi
    for candidate in python3 python3.13 python3.12 python3.11 python; do
        if new_enough "$candidate"; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or later found (python3 is $(python3 --version 2>&1 || true));" \
        "install one, or name it: make demo PYTHON=/path/to/python3.11"
}

identity() {
    "$1" -c 'import sys; print(sys.base_prefix, *sys.version_info[:2])' 2>/dev/null
}

# Can the environment be used as it is? One made by hand, without our files, can.
usable() {
    [ ! -e .venv/unfinished ] && [ "$(cat .venv/built 2>/dev/null || echo "$here")" = "$here" ] &&
        new_enough .venv/bin/python && { [ -z "${PYTHON:-}" ] || [ "$(identity "$python")" = "$(identity .venv/bin/python)" ]; }
}

installed() {
    recorded=$(cat .venv/installed 2>/dev/null || true)
    [ "$recorded" = "$wanted $signature" ] || [ "$recorded" = "dev $signature" ]
}

build() {
    for attempt in first second; do
        # pip comes in a step of its own, after the mark, so that being killed at any moment is noticed
        "$python" -m venv --clear --without-pip .venv || continue
        : >.venv/unfinished
        if .venv/bin/python -Im ensurepip --upgrade --default-pip >.venv/ensurepip.log 2>&1; then
            printf '%s\n' "$here" >.venv/built
            return
        fi
        printf 'pip could not be put into .venv (%s attempt):\n' "$attempt" >&2
        tail -n 5 .venv/ensurepip.log >&2
    done
    fail "$python cannot build .venv; on Debian and Ubuntu the package python3-venv may be missing"
}

python=
[ -n "${PYTHON:-}" ] && python=$(find_python)
if usable; then
    if installed; then
        exit 0
    fi
    .venv/bin/python -m pip --version >/dev/null 2>&1 || : >.venv/unfinished
fi
if ! usable; then
    [ -n "$python" ] || python=$(find_python)
    printf 'Building .venv with %s\n' "$("$python" --version)"
    build
fi

target=.
[ "$wanted" = run ] || target=".[$wanted]"
printf 'Installing fullrank into .venv. The first time this downloads torch: 200 MB for a CPU, gigabytes with CUDA.\n'
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu has pip take the small one
: >.venv/unfinished
rm -f .venv/installed
status=0 # two q: neither progress nor the remarks of an unusual index configuration, errors only
.venv/bin/python -m pip install -qq -c constraints.txt -e "$target" || status=$?
# pip that ends by itself leaves a usable environment even when it fails; only a killed one does not
[ "$status" -ge 128 ] || rm -f .venv/unfinished
[ "$status" -eq 0 ] || fail "pip could not install fullrank (see above); call again when the cause is mended"
printf '%s\n' "$wanted $signature" >.venv/installed
