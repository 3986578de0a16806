"""Run folders from before the tokenizers were merged, imitated with those of today, and read after their conversion."""

import json

import pytest
from scripts.convert_run import convert, convert_tokenizer

from fullrank.config.load import flatten, merge, read_yaml
from fullrank.core.errors import InputError
from fullrank.data import load_tokenizer
from fullrank.experiments.run import evaluate
from fullrank.files import digest, write_checked
from run_files import train_quietly

RETIRED = {"data.eos": None, "train.t_mult": 1.0, "model.attention.value_residual": False, "eval.dynamic": None}


def make_old(folder, **changed):
    """Files of a run as version 4f5d4883 wrote them."""
    today = load_tokenizer(folder)
    meta = {"kind": "word", "entries": len(today), "fingerprint": today.fingerprint, "lowercase": False}
    write_checked(folder / "vocabulary.json", {**meta, "split": "whitespace", "line_end": True, "line_start": False})
    old = merge({}, {**flatten(read_yaml(folder / "config.yaml")), **RETIRED, **changed})
    (folder / "config.yaml").write_text(json.dumps(old), encoding="utf-8")
    for path in folder.glob("checkpoints/step-*/checkpoint.json"):
        content = json.loads(path.read_text())["content"]
        content["run"]["config"] = old
        path.write_text(json.dumps({"sha256": digest(content), "content": content}), encoding="utf-8")


def test_a_converted_run_has_the_same_figures(tmp_path):
    (tmp_path / "text.txt").write_text("".join(f"the cat {i % 7} saw a dog\n" for i in range(90)), encoding="utf-8")
    raw = {
        "model": {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8},
        "data": {"train": str(tmp_path / "text.txt"), "cache": str(tmp_path / "cache")},
        "train": {"steps": 2, "batch_size": 2, "segment_length": 8},
        "eval": {"batch_size": 2},
    }
    old, new = tmp_path / "old", tmp_path / "new"
    train_quietly(raw, old)
    figures = evaluate(old, "test")
    make_old(old)
    with pytest.raises(InputError, match="unknown key"):
        evaluate(old, "test")
    convert(old, new)
    assert {**evaluate(new, "test"), "run": str(old)} == figures
    make_old(old, **{"model.attention.value_residual": True})
    with pytest.raises(InputError, match="value_residual"):
        convert(old, tmp_path / "other")


def test_codes_of_a_language_keep_their_ids(tmp_path):
    pieces = ["<eos>", "<unk>", "low", "l@@", "lo@@", "wer", "o", "<eos>"]
    state = "#version: 0.2\nl o\ne r</w>\nw er</w>\nlo w</w>\n"
    meta = {"kind": "sentences", "entries": 8, "fingerprint": "", "name": "en", "lowercase": False, "moses": False}
    write_checked(tmp_path / "vocabulary.json", {**meta, "segmenter": "codes", "state": state, "pieces": pieces})
    language = convert_tokenizer(tmp_path)
    assert language.encode("low lower o lo x") == [2, 4, 5, 6, 3, 6, 1]
    assert language.decode([2, 4, 5, 6]) == "low lower o"
