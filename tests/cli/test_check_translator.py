"""`fullrank check` on translation: a recipe, a row that decodes as the released code does, a saved model, a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import fullrank as fr
from fullrank.checking import causality
from fullrank.cli import main
from translation_runs import write_run

Called = Callable[..., tuple[object, str, str]]


@pytest.fixture
def called(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Called:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(causality, "_STEPS", 5)

    def run(*words: object) -> tuple[object, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main(["check", *map(str, words)])
        said = capsys.readouterr()
        return stopped.value.code or 0, said.out, said.err

    return run


def test_a_recipe_is_made_small_and_passes(called: Called) -> None:
    code, out, said = called("mixhead/table4", "--row", "h4-b", "--json")
    assert (code, said) == (0, "")
    found = json.loads(out)
    verdicts = {one["check"]: one["verdict"] for one in found["checks"]}
    assert verdicts.pop("memory in segments = one pass") == "not applicable"
    assert set(verdicts.values()) == {"passes"}
    assert "the whole source is seen" in verdicts
    assert "starts as plain attention" in verdicts
    assert found["source"] == "a translation model of fullrank"
    assert (found["vocab_size"], found["row"]) == (32, "h4-b")
    assert "hidden_size 512 -> 16" in found["shrunk"]
    assert "encoder.vocab_size 8848 -> 35" in found["shrunk"]


def test_a_row_that_decodes_as_released_fails_by_name(called: Called) -> None:
    code, out, _ = called("mixhead/table4", "--row", "h4-b-released")
    assert code == 1
    assert "incremental decoding = one pass" in out.splitlines()[-1]
    assert "model.decoder.released_decoding: true leaves heads unmixed while a translation is written" in out
    assert out.splitlines()[-1].count(";") == 0  # nothing else fails


def test_a_saved_translator_and_a_run(called: Called, tmp_path: Path) -> None:
    torch.manual_seed(1)
    sizes = {
        "vocab_size": 13,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 9,
    }
    fr.Translator(fr.ModelConfig(**sizes, encoder=fr.EncoderConfig(vocab_size=15))).save(tmp_path / "saved")
    write_run(tmp_path / "run", num_hidden_layers=1)
    for folder, kind in (("saved", "saved model"), ("run", "run")):
        code, out, said = called(tmp_path / folder, "--json")
        assert (code, said) == (0, "")
        found = json.loads(out)
        assert (found["kind"], found["source"], found["shrunk"]) == (kind, "a translation model of fullrank", [])
    (tmp_path / "text.txt").write_text("ein hund\n" * 90)
    code, _, said = called(tmp_path / "run", "--text", tmp_path / "text.txt")
    assert code == 2
    assert "--text: for models of running text" in said
