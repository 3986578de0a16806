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
    PYTHONPATH="$folder/$version:src:." OMP_NUM_THREADS=1 "$python" - >"$folder/$version.jsonl" <<'EOF'
import json, time

import transformers

from fullrank.checking import check
from fullrank.hf.load import build_tiny, list_classes
from research.census import row_of

transformers.logging.set_verbosity_error()
for kind in ("big_bird", "megatron-bert", "rembert", "roformer"):
    # its sparse attention, the default, sees later tokens in every release; as a decoder it needs the other one
    model, *_ = build_tiny(kind, **({"attention_type": "original_full"} if kind == "big_bird" else {}))
    start = time.process_time()
    row = row_of(list_classes(kind)[0], check(model, say=lambda _: None), time.process_time() - start)
    print(json.dumps({**row, "transformers": transformers.__version__}))
EOF
done
"$python" - "${OUT:-}" "$folder"/*.jsonl <<'EOF'
import json, sys

rows = [json.loads(line) for file in sys.argv[2:] for line in open(file)]
rows = [
    {
        "transformers": row["transformers"], "class": row["class"], "verdict": row["verdict"],
        "failing": [one["check"] for one in row["failures"]],
        "layers": sorted({layer for one in row["failures"] for layer in one.get("layers") or ()}),
        "first": row["failures"][0] if row["failures"] else {},
    }
    for row in rows
]
rows.sort(key=lambda row: ([int(part) for part in row["transformers"].split(".")], row["class"]))
for row in rows:
    failed = f"{len(row['failing'])} checks fail: {row['failing'][0]} ..." if row["failing"] else ""
    print(f"{row['transformers']:8} {row['class']:26} {row['verdict']:10} {failed}".rstrip())
if sys.argv[1]:
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        file.write("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
EOF
