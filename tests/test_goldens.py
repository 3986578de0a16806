"""Golden documents: what every verb with `--json` says of eight tiny runs is, in numbers and labels, what it was.

A golden is a condensed document in `goldens/`. Sentences are left out, so wording is free, and all that depends on the machine
or the clock. After a change that is meant, `python tests/test_goldens.py --write` makes the goldens again, and the commit names
the keys that changed. `--keep DIR` also leaves the runs, whole documents and sha256 sums of the checkpoints in DIR.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from fullrank.cli.app import load

GOLDENS = Path(__file__).resolve().parent / "goldens"
RELATIVE, ABSOLUTE = 1e-4, 1e-5  # differences of perplexities in fp32 vary by 3e-6 between processors
LONGEST = 12  # entries of a list that is kept whole

# -- runs: the invented sentences are the same text in every Python -----------------------------------------------------

SENTENCES = GOLDENS.parent / "invented_text"  # sentence pairs, source .svo and target .sov

# An activation without a kink, and so large an eps that a gradient of rounding alone (of biases of keys) moves nothing: else
# two machines train two models.
MODEL = (
    "hidden_size: 16, num_hidden_layers: 2, num_attention_heads: 4, intermediate_size: 32, hidden_act: gelu, "
    "max_position_embeddings: 64"
)
TRAIN = "steps: 40, learning_rate: 0.01, eps: 1.0e-4, log_every_steps: 10, device: cpu, threads: 1"
TEXT = "{name: text, train: text/train.svo, valid: text/valid.svo, test: text/test.svo, cache: cache, tokens: word}"
PAIRS = (
    "{name: parallel, train: text/train, valid: text/valid, test: text/test, source: svo, target: sov, "
    "cache: cache, tokens: word}"
)

CONFIGURATIONS = {
    "table": f"""
table: A table of two rows
base:
  model: {{{MODEL}}}
  data: {TEXT}
  train: {{{TRAIN}, batch_size: 16, segment_length: 16, keep_checkpoints: 2}}
  eval: {{every_steps: 20}}
scales: {{tiny: {{}}}}
rows:
  plain: {{paper: {{test: 29.78, parameters: 156M}}}}
  b: {{set: {{model.attention.mix: position_wise}}, paper: {{test: 28.67, extra_parameters: 3456}}}}
""",
    "memory": f"""
model: {{{MODEL}, memory_length: 24, position: relative, attention: {{score: relative}}}}
data: {TEXT}
train:
  {{{TRAIN}, batch_size: 16, segment_length: 16, order: contiguous,
   phases: [{{name: skip_retain, skip: linear, steps: 24}}, {{name: vanilla}}]}}
eval: {{every_steps: 20}}
""",
    "mixture": f"""
model: {{{MODEL}, output: {{kind: mixture_of_softmaxes, mixtures: 3}}}}
data: {TEXT}
train: {{{TRAIN}, batch_size: 16, segment_length: 16}}
eval: {{every_steps: 20}}
""",
    "masked": f"""
model: {{{MODEL}}}
data: {TEXT}
train: {{{TRAIN}, batch_size: 16, segment_length: 16, objective: masked}}
eval: {{every_steps: 20}}
""",
    "translation": f"""
model: {{{MODEL}}}
data: {PAIRS}
train: {{{TRAIN}, batch_tokens: 1200}}
eval: {{every_steps: 20, beams: 2}}
""",
    "finetuned": f"""
model: {{pretrained: random, attention: {{mix: position_wise}}}}
data: {{name: glue/cola, invented: true, max_length: 16, max_train: 160, max_eval: 60, cache: cache}}
train: {{{TRAIN.replace("0.01", "0.001")}, batch_size: 8}}
""",
}
PLAIN, MIXED, OTHER_SEED = (f"runs/table/{name}" for name in ("plain-tiny-seed1", "b-tiny-seed1", "b-tiny-seed2"))
RUNS = [PLAIN, MIXED, OTHER_SEED, "runs/memory", "runs/mixture", "runs/masked", "runs/translation", "runs/finetuned"]

# In this order: some verbs leave files that later ones show
VERBS = {
    "reproduce": "reproduce table.yaml --seeds 2 --scale tiny --out runs/table --quiet",
    "reproduce-list": "reproduce mos/table2 --scale tiny --list",
    "train-memory": "train memory.yaml --out runs/memory --quiet",
    "train-mixture": "train mixture.yaml --out runs/mixture --quiet",
    "train-masked": "train masked.yaml --out runs/masked --quiet",
    "train-translation": "train translation.yaml --out runs/translation --quiet",
    "finetune": "finetune finetuned.yaml --out runs/finetuned --quiet",
    "info-mixhead": "info mixhead/table1-vanilla --row b --scale paper model.vocab_size=1000",
    "info-memory": "info memory.yaml model.vocab_size=1000",
    "info-mixture": "info mos/table2 --row k5 --scale paper model.vocab_size=1000",
    "info-multilinear": "info tensorized/table2-ptb --row core1 --scale paper model.vocab_size=1000",
    "info-translation": "info tensorized/table3 --row core1 --scale paper",
    "info-finetuning": "info mixhead/table5 --row cola-b --scale tiny",
    "recipes-list": "recipes list",
    "recipes-show": "recipes show mos/table2",
    "config-show": "config show memory.yaml",
    "config-show-finetuning": "config show mixhead/table5 --row cola-b --scale tiny",
    "config-validate": "config validate mixhead/table1-vanilla",
    "data-list": "data list",
    "data-prepare-text": "data prepare text data.train=text/train.svo data.valid=text/valid.svo --to prepared",
    "data-prepare-pairs": "data prepare parallel data.train=text/train data.valid=text/valid data.test=text/test "
    "data.source=svo data.target=sov --to prepared",
    "eval": f"eval {MIXED}",
    "eval-sliding": f"eval {MIXED} --context 4 --stride 12 --split valid",
    "eval-text": f"eval {PLAIN} --text text/valid.svo",
    "eval-memory": "eval runs/memory --memory-length 40 --segment-length 8 --clamp-length 20",
    "eval-temperature": "eval runs/mixture --temperature 1.2",
    "eval-masked": "eval runs/masked",
    "eval-translation": "eval runs/translation",
    "generate": f"generate {MIXED} --prompt la --max-new-tokens 12 --seed 3 --number 2",
    "generate-memory": "generate runs/memory --prompt la --max-new-tokens 12 --greedy",
    "generate-beam": f"generate {MIXED} --beam 3 --max-new-tokens 6",
    "translate": "translate runs/translation --input three.svo --n-best 2 --quiet",
    "average": f"average {MIXED}",
    "export": f"export {MIXED} exported",
    "analyze-context": "analyze context runs/memory",
    "analyze-rank": f"analyze rank {PLAIN} runs/mixture --contexts 60",
    "analyze-spectrum": f"analyze spectrum {PLAIN} {MIXED} runs/memory --texts 4",
    "analyze-spectrum-exported": "analyze spectrum exported --text text/valid.svo --texts 4 --segment-length 16",
    "analyze-heads": f"analyze heads {PLAIN} {MIXED} --texts 4",
    "analyze-heads-masked": "analyze heads runs/masked --texts 4",
    "analyze-mixing": f"analyze mixing {MIXED} --texts 4",
    "diagnose": f"diagnose {MIXED}",
    "diagnose-mixture": "diagnose runs/mixture",
    "diagnose-memory": "diagnose runs/memory",
    "diagnose-hugging-face": "diagnose gpt2 --text words.txt --segment-length 16",
    "rank-hugging-face": "analyze rank gpt2 --text words.txt --segment-length 16 --contexts 60",
    "heads-hugging-face": "analyze heads gpt2 --text words.txt --segment-length 16 --texts 4",
    "check-recipe": "check mixhead/table1-vanilla --row b --quick",
    "check-multilinear": "check tensorized/table1 --row core1 --quick",
    "check-run": "check runs/memory --quick",
    "check-hugging-face": "check gpt2 --quick",
    "report": f"report {MIXED} {PLAIN} {OTHER_SEED} --out report.html",
    "report-others": "report runs/memory runs/mixture runs/masked --out others.html",
    "report-translation": "report runs/translation",
    "report-finetuned": "report runs/finetuned",
}


def write_inputs() -> None:
    """Texts, configurations and a model of Hugging Face, in the working directory."""
    import hugging_face_models

    shutil.copytree(SENTENCES, "text")
    three = Path("text/test.svo").read_text(encoding="utf-8").split("\n")[:3]
    Path("three.svo").write_text("".join(f"{line}\n" for line in three), encoding="utf-8")
    for name, text in CONFIGURATIONS.items():
        Path(f"{name}.yaml").write_text(text, encoding="utf-8")
    model = hugging_face_models.gpt2()
    torch.manual_seed(0)  # whatever has been drawn for the first parameters
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
    hugging_face_models.save(model, Path("gpt2"))
    hugging_face_models.write_text(Path("words.txt"))


def call_verb(line: str) -> Any:
    """The document of a command; a list of documents where it prints one a line."""
    answer = CliRunner().invoke(load(), [*line.split(), "--json"])
    assert answer.exit_code == 0, f"fullrank {line}: {answer.exception!r}\n{answer.stderr}"
    if line.startswith("translate"):
        return [json.loads(document) for document in answer.stdout.splitlines()]
    return json.loads(answer.stdout)


def collect_documents() -> dict[str, Any]:
    """Whole documents of all verbs by name, of runs that are trained in the working directory."""
    write_inputs()
    documents = {name: call_verb(line) for name, line in VERBS.items()}
    documents["metrics"] = {run: read_metrics(Path(run)) for run in RUNS}
    documents["checkpoints"] = {run: summarize_tensors(find_weights(Path(run))) for run in RUNS}
    return documents


def read_metrics(run: Path) -> list[Any]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def find_weights(run: Path) -> Path:
    """The file of the last parameters of a run."""
    fine_tuned = run / "model" / "model.safetensors"
    return fine_tuned if fine_tuned.is_file() else max(run.glob("checkpoints/step-*/model.safetensors"))


def summarize_tensors(file: Path) -> dict[str, Any]:
    """Shape and sums of every tensor in double precision."""
    summaries = {}
    for name, tensor in sorted(load_file(file).items()):
        numbers = tensor.double()
        summaries[name] = {"shape": list(tensor.shape), **write_sums(numbers.sum().item(), numbers.abs().sum().item())}
    return summaries


# -- condensed documents ------------------------------------------------------------------------------------------------

MACHINE = re.compile("seconds|ms_per|per_second|peak|environment|version$")  # keys of what depends on machine or clock
LABELS = {"verdict", "check", "text", "label", "corpus", "name"}  # keys of values with spaces that are no sentences


def condense(value: Any, key: str = "") -> Any:
    """A document without sentences, with short lists and eight digits."""
    if isinstance(value, dict):
        noise = "difference" if "tolerance" in value else None  # of a check: rounding
        return {name: condense(entry, name) for name, entry in value.items() if name != noise and is_kept(name, entry)}
    if isinstance(value, list):
        entries = [condense(entry, key) for entry in value if is_kept(key, entry)]
        return entries if len(entries) <= LONGEST else shorten(entries)
    return round_number(value) if isinstance(value, float) else value


def is_kept(key: str, value: Any) -> bool:
    """False for sentences, for absolute paths and for what depends on the machine."""
    if isinstance(value, str) and ((" " in value and key not in LABELS) or str(Path.cwd()) in value):
        return False
    if isinstance(value, dict) and MACHINE.search(str(value.get("measure", ""))):  # a record
        return False
    return not MACHINE.search(key)


def shorten(entries: list[Any]) -> dict[str, Any]:
    """Length, first entries, sums over all numbers and a checksum of all labels of a long list."""
    leaves = list(iterate_leaves(entries))
    numbers = [leaf for leaf in leaves if isinstance(leaf, int | float)]
    labels = "\n".join(leaf for leaf in leaves if isinstance(leaf, str))
    sums = write_sums(sum(numbers), sum(map(abs, numbers)))
    return {"length": len(entries), "first": entries[:3], **sums, "labels": zlib.crc32(labels.encode())}


def write_sums(total: float, absolute: float) -> dict[str, float]:
    """A sum, and the sum of absolute values that its tolerance is relative to."""
    return {"sum": round_number(total), "absolute": round_number(absolute)}


def iterate_leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from iterate_leaves(entry)
    else:
        yield value


def round_number(number: float) -> float:
    return float(f"{number:.8g}")


# -- comparison ---------------------------------------------------------------------------------------------------------


def compare(golden: Any, now: Any, path: str, scale: float | None = None) -> Iterator[str]:
    """Lines `path: golden -> now`, one for each number or label that differs.

    scale: what the tolerance of a number is relative to; the golden number if not given.
    """
    if isinstance(golden, dict) and isinstance(now, dict):
        for key in dict.fromkeys([*golden, *now]):
            inner_scale = golden.get("absolute") if key == "sum" else None
            yield from compare(golden.get(key, "absent"), now.get(key, "absent"), f"{path}.{key}", inner_scale)
    elif isinstance(golden, list) and isinstance(now, list) and len(golden) == len(now):
        for index, (before, after) in enumerate(zip(golden, now, strict=True)):
            yield from compare(before, after, f"{path}[{index}]")
    elif not is_equal(golden, now, scale):
        yield f"{path}: {show_value(golden)} -> {show_value(now)}"


def is_equal(golden: Any, now: Any, scale: float | None = None) -> bool:
    """True for equal whole numbers and labels, and for other numbers within the tolerance."""
    if float in (type(golden), type(now)) and {type(golden), type(now)} <= {int, float}:
        return abs(golden - now) <= ABSOLUTE + RELATIVE * (abs(golden) if scale is None else scale)
    return type(golden) is type(now) and golden == now


def show_value(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)[:100]


# -- tests, and how the goldens are made --------------------------------------------------------------------------------

WRITE, KEEP = "GOLDENS_WRITE", "GOLDENS_KEEP"  # environment variables that `main` sets


def test_every_document_has_the_numbers_and_labels_of_its_golden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(os.environ.get(KEEP, tmp_path))
    monkeypatch.chdir(folder)
    documents = collect_documents()
    condensed = {name: condense(document) for name, document in documents.items()}
    if KEEP in os.environ:
        keep_documents(documents)
    if WRITE in os.environ:
        write_goldens(condensed)
    differences = list(compare(read_goldens(), condensed, ""))
    assert not differences, "\n".join([f"{len(differences)} differences from tests/goldens", *differences[:200]])


def test_comparison_sees_numbers_labels_and_keys() -> None:
    golden = condense({"a": 1.0, "b": [0.5] * 20, "c": "best", "d": 3, "e": "A sentence.", "seconds": 3.0})
    assert golden.keys() == {"a", "b", "c", "d"}
    close = condense({"a": 1.00005, "b": [0.50001] * 20, "c": "best", "d": 3, "e": "Another one."})
    assert list(compare(golden, close, "")) == []
    other = condense({"a": 1.001, "b": [0.5] * 19 + [0.6], "c": "last", "f": 1})
    lines = list(compare(golden, other, "verb"))
    assert [line.split(":")[0] for line in lines] == [
        "verb.a", "verb.b.sum", "verb.b.absolute", "verb.c", "verb.d", "verb.f"
    ]  # fmt: skip
    assert lines[0] == "verb.a: 1.0 -> 1.001"


def write_goldens(condensed: dict[str, Any]) -> None:
    """A file of each document that differs from its golden, and none of verbs that are gone."""
    goldens = read_goldens()
    for name in goldens.keys() - condensed.keys():
        (GOLDENS / f"{name}.json").unlink()
    for name, document in condensed.items():
        if list(compare(goldens.get(name, "absent"), document, name)):
            (GOLDENS / f"{name}.json").write_text(write_lines(document) + "\n", encoding="utf-8")


def read_goldens() -> dict[str, Any]:
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in GOLDENS.glob("*.json")}


def write_lines(value: Any, indent: str = "") -> str:
    """JSON: what fits stands on one line, else every entry begins one."""
    line = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict | list) or len(indent) + len(line) <= 120:
        return line
    inner = indent + " "
    if isinstance(value, list):
        return "[\n" + ",\n".join(inner + write_lines(entry, inner) for entry in value) + f"\n{indent}]"
    entries = (f"{inner}{json.dumps(key)}: {write_lines(entry, inner)}" for key, entry in value.items())
    return "{\n" + ",\n".join(entries) + f"\n{indent}}}"


def keep_documents(documents: dict[str, Any]) -> None:
    """Whole documents, and sums of the bytes of what training wrote, beside the runs."""
    Path("documents").mkdir()
    for name, document in documents.items():
        Path(f"documents/{name}.json").write_text(json.dumps(document, indent=1, ensure_ascii=False), encoding="utf-8")
    files = [file for run in RUNS for file in (find_weights(Path(run)), Path(run) / "metrics.jsonl")]
    lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file}\n" for file in files]
    Path("sha256.txt").write_text("".join(lines), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare with the goldens, or make them again.")
    parser.add_argument("--write", action="store_true", help="make the goldens again")
    parser.add_argument("--keep", type=Path, help="a new folder for the runs, whole documents and sha256 sums")
    options = parser.parse_args()
    if options.write:
        os.environ[WRITE] = "yes"
    if options.keep is not None:
        options.keep.mkdir(parents=True)
        os.environ[KEEP] = str(options.keep.resolve())
    os.execv(sys.executable, [sys.executable, "-m", "pytest", __file__])


if __name__ == "__main__":
    main()
