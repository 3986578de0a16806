"""Golden documents: what every verb with `--json` says of eight tiny runs is, in numbers and labels, what it was.

A golden is a condensed document in `goldens/`. Sentences are left out, so wording is free, and all that depends on the machine
or the clock. After a change that is meant, `python tests/test_goldens.py --write` makes the goldens again, and the commit names
the keys that changed. `--keep DIR` also leaves the runs, whole documents and sha256 sums of the checkpoints in DIR.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import sys
import zlib
from pathlib import Path

import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from fullrank.cli.app import load
from fullrank.files import parse_yaml
from run_files import read_metrics

GOLDENS = Path(__file__).resolve().parent / "goldens"
RELATIVE, ABSOLUTE = 1e-4, 1e-5  # differences of perplexities in fp32 vary by 3e-6 between processors
LONGEST = 12  # entries of a list that is kept whole

SENTENCES = GOLDENS.parent / "invented_text"  # sentence pairs, source .svo and target .sov

TABLE = parse_yaml((GOLDENS.parent / "goldens.yaml").read_text(encoding="utf-8"), "goldens.yaml")
CONFIGURATIONS = TABLE["configurations"]
VERBS = TABLE["verbs"]
TABLE_RUNS = ["plain-tiny-seed1", "b-tiny-seed1", "b-tiny-seed2"]
RUNS = [f"runs/table/{name}" for name in TABLE_RUNS] + [f"runs/{name}" for name in CONFIGURATIONS if name != "table"]


def write_inputs():
    """Texts, configurations and a model of Hugging Face, in the working directory."""
    import hugging_face_models

    shutil.copytree(SENTENCES, "text")
    three = Path("text/test.svo").read_text(encoding="utf-8").split("\n")[:3]
    Path("three.svo").write_text("".join(f"{line}\n" for line in three), encoding="utf-8")
    for name, configuration in CONFIGURATIONS.items():
        Path(f"{name}.yaml").write_text(json.dumps(configuration), encoding="utf-8")
    model = hugging_face_models.gpt2()
    torch.manual_seed(0)  # whatever has been drawn for the first parameters
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
    hugging_face_models.save(model, Path("gpt2"))
    hugging_face_models.write_text(Path("words.txt"))


def call_verb(line):
    """The document of a command; a list of documents where it prints one a line."""
    answer = CliRunner().invoke(load(), [*line.split(), "--json"])
    assert answer.exit_code == 0, f"fullrank {line}: {answer.exception!r}\n{answer.stderr}"
    if line.startswith("translate"):
        return [json.loads(document) for document in answer.stdout.splitlines()]
    return json.loads(answer.stdout)


def collect_documents():
    """Whole documents of all verbs by name, of runs that are trained in the working directory."""
    write_inputs()
    documents = {name: call_verb(line) for name, line in VERBS.items()}
    documents["metrics"] = {run: read_metrics(Path(run)) for run in RUNS}
    documents["checkpoints"] = {run: summarize_tensors(find_weights(Path(run))) for run in RUNS}
    return documents


def find_weights(run):
    """The file of the last parameters of a run."""
    fine_tuned = run / "model" / "model.safetensors"
    return fine_tuned if fine_tuned.is_file() else max(run.glob("checkpoints/step-*/model.safetensors"))


def summarize_tensors(file):
    """Shape and sums of every tensor in double precision."""
    summaries = {}
    for name, tensor in sorted(load_file(file).items()):
        numbers = tensor.double()
        summaries[name] = {"shape": list(tensor.shape), **write_sums(numbers.sum().item(), numbers.abs().sum().item())}
    return summaries


MACHINE = re.compile("seconds|ms_per|per_second|peak|environment|version$")  # keys of what depends on machine or clock
LABELS = {"verdict", "check", "text", "label", "corpus", "name"}  # keys of values with spaces that are no sentences


def condense(value, key=""):
    """A document without sentences, with short lists and eight digits."""
    if isinstance(value, dict):
        noise = "difference" if "tolerance" in value else None  # of a check: rounding
        return {name: condense(entry, name) for name, entry in value.items() if name != noise and is_kept(name, entry)}
    if isinstance(value, list):
        entries = [condense(entry, key) for entry in value if is_kept(key, entry)]
        return entries if len(entries) <= LONGEST else shorten(entries)
    return round_number(value) if isinstance(value, float) else value


def is_kept(key, value):
    """False for sentences, for absolute paths and for what depends on the machine."""
    if isinstance(value, str) and ((" " in value and key not in LABELS) or str(Path.cwd()) in value):
        return False
    if isinstance(value, dict) and MACHINE.search(str(value.get("measure", ""))):  # a record
        return False
    return not MACHINE.search(key)


def shorten(entries):
    """Length, first entries, sums over all numbers and a checksum of all labels of a long list."""
    leaves = list(iterate_leaves(entries))
    numbers = [leaf for leaf in leaves if isinstance(leaf, int | float)]
    labels = "\n".join(leaf for leaf in leaves if isinstance(leaf, str))
    sums = write_sums(sum(numbers), sum(map(abs, numbers)))
    return {"length": len(entries), "first": entries[:3], **sums, "labels": zlib.crc32(labels.encode())}


def write_sums(total, absolute):
    """A sum, and the sum of absolute values that its tolerance is relative to."""
    return {"sum": round_number(total), "absolute": round_number(absolute)}


def iterate_leaves(value):
    if isinstance(value, dict | list):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from iterate_leaves(entry)
    else:
        yield value


def round_number(number):
    return float(f"{number:.8g}")


def compare(golden, now, path, scale=None):
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


def is_equal(golden, now, scale=None):
    """True for equal whole numbers and labels, and for other numbers within the tolerance."""
    if float in (type(golden), type(now)) and {type(golden), type(now)} <= {int, float}:
        return abs(golden - now) <= ABSOLUTE + RELATIVE * (abs(golden) if scale is None else scale)
    return type(golden) is type(now) and golden == now


def show_value(value):
    return json.dumps(value, ensure_ascii=False)[:100]


WRITE, KEEP = "GOLDENS_WRITE", "GOLDENS_KEEP"  # environment variables that `main` sets


def test_every_document_has_the_numbers_and_labels_of_its_golden(tmp_path, monkeypatch):
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


def write_goldens(condensed):
    """A file of each document that differs from its golden, and none of verbs that are gone."""
    goldens = read_goldens()
    for name in goldens.keys() - condensed.keys():
        (GOLDENS / f"{name}.json").unlink()
    for name, document in condensed.items():
        if list(compare(goldens.get(name, "absent"), document, name)):
            (GOLDENS / f"{name}.json").write_text(write_lines(document) + "\n", encoding="utf-8")


def read_goldens():
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in GOLDENS.glob("*.json")}


def write_lines(value, indent=""):
    """JSON: what fits stands on one line, else every entry begins one."""
    line = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict | list) or len(indent) + len(line) <= 120:
        return line
    inner = indent + " "
    if isinstance(value, list):
        return "[\n" + ",\n".join(inner + write_lines(entry, inner) for entry in value) + f"\n{indent}]"
    entries = (f"{inner}{json.dumps(key)}: {write_lines(entry, inner)}" for key, entry in value.items())
    return "{\n" + ",\n".join(entries) + f"\n{indent}}}"


def keep_documents(documents):
    """Whole documents, and sums of the bytes of what training wrote, beside the runs."""
    Path("documents").mkdir()
    for name, document in documents.items():
        Path(f"documents/{name}.json").write_text(json.dumps(document, indent=1, ensure_ascii=False), encoding="utf-8")
    files = [file for run in RUNS for file in (find_weights(Path(run)), Path(run) / "metrics.jsonl")]
    lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file}\n" for file in files]
    Path("sha256.txt").write_text("".join(lines), encoding="utf-8")


def main():
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
