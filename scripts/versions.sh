#!/bin/sh
# Run the tests of Hugging Face models with the lowest and the newest torch and transformers that pyproject.toml allows.
#
#     [PYTHON=python3.12] [INDEX=https://download.pytorch.org/whl/cpu] sh scripts/versions.sh ["torch==2.8.0 transformers==5.20.0" ...]
#
# Each line of versions gets a fresh environment in a temporary folder, without constraints.txt. INDEX: a further index, which
# has torch without CUDA. Older transformers lack some families, whose tests are skipped, and warn about torch.jit.
set -eu
cd -- "$(dirname -- "$0")/.."
floor() { sed -n "s/.*\"$1>=\([0-9.]*\)[,\"].*/\1/p" pyproject.toml | head -n 1; }
[ $# -gt 0 ] || set -- "torch==$(floor torch).0 transformers==$(floor transformers).0" "torch transformers<5.25"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
failed=
for versions in "$@"; do
    printf '\n%s\n' "$versions"
    "${PYTHON:-python3}" -m venv --clear "$folder"
    # shellcheck disable=SC2086  # several words
    if ! "$folder/bin/python" -m pip install -qq ${INDEX:+--extra-index-url "$INDEX"} $versions peft accelerate scikit-learn \
        pytest pytest-xdist hypothesis -e . ||
        ! OMP_NUM_THREADS=1 "$folder/bin/python" -m pytest -m "" -n 2 -W ignore::DeprecationWarning -W ignore::FutureWarning tests/hf; then
        failed="$failed [$versions]"
    fi
done
[ -z "$failed" ] || { printf 'failed with:%s\n' "$failed" >&2; exit 1; }
