#!/bin/sh
# Check four decoders of transformers that attended to future tokens from 5.9 on (huggingface/transformers#48745, mended by
# #48760), with releases before, during and after it.
#
#     [PYTHON=.venv/bin/python] [OUT=roformer_leak.json] sh scripts/roformer_leak.sh [VERSION ...]
#
# Each release of transformers is put into a temporary folder, with what it needs besides torch, which PYTHON has, as it has
# fullrank's other dependencies. Prints a line for each class; OUT holds them as a list.
set -eu
cd -- "$(dirname -- "$0")/.."
[ $# -gt 0 ] || set -- 5.8.1 5.9.0 5.17.0 5.18.0
python=${PYTHON:-.venv/bin/python}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for version in "$@"; do
    "$python" -m pip install -qq --target "$folder/$version" "transformers==$version"
    # status 1: some of them leak
    PYTHONPATH="$folder/$version:src" OMP_NUM_THREADS=1 "$python" -m fullrank check --census --out "$folder/$version/census" \
        --only roformer,big_bird,rembert,megatron-bert --json >/dev/null 2>&1 || [ $? -eq 1 ]
done
"$python" - "${OUT:-}" "$folder"/*/census/census.jsonl <<'EOF'
import json, sys

rows = [json.loads(line) for file in sys.argv[2:] for line in open(file)]
rows.sort(key=lambda row: ([int(part) for part in row["transformers"].split(".")], row["class"]))
for row in rows:
    print(f"{row['transformers']:8} {row['class']:26} {row['verdict']:15} {'; '.join(one['check'] for one in row['failures'])}")
if sys.argv[1]:
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        file.write("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
EOF
