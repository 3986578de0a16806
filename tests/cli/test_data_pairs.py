"""`fullrank data` with sentence pairs: what is known, what preparing prints, and one clear line for every fault."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_runs import called

DE = ["ein Hund läuft .", "", "das ist ein sehr langer Satz über viele Hunde .", "Katzen schlafen ."]
EN = ["a dog runs .", "nothing .", "a long one .", "cats sleep ."]


def put(folder: Path, name: str, source: list[str], target: list[str]) -> None:
    for suffix, lines in (("de", source), ("en", target)):
        (folder / f"{name}.{suffix}").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


@pytest.fixture
def words(tmp_path) -> list[str]:
    put(tmp_path, "train", DE, EN)
    put(tmp_path, "dev", DE, EN)
    keys = [
        "data.train=train",
        "data.valid=dev",
        "data.test=dev",
        "data.source=de",
        "data.target=en",
        "data.tokens=word",
    ]
    return ["data", "prepare", "parallel", *keys, "--from", str(tmp_path), "--to", str(tmp_path / "cache")]


def test_preparing_in_json(words):
    code, out, _ = called(*words, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["label"] == "parallel (train.de, train.en)"
    assert found["languages"] == {"source": "de", "target": "en"}
    assert found["vocabulary"]["source"] == found["vocabulary"]["target"]
    assert found["pairs"]["test"] == 4
    assert found["details"]["cleaning"]["empty"] == 1
    assert Path(found["folder"]).is_dir()
    found = json.loads(called(*words, "data.vocabulary=separate", "data.max_ratio=2", "--json")[1])
    # de: ein Hund läuft . Katzen schlafen; en: a dog runs . cats sleep; and two marks each
    assert found["vocabulary"] == {"source": 8, "target": 8}
    assert found["pairs"]["train"] == 2
    assert found["tokens"]["valid"] == {"source": 21, "target": 17}
    counts = {"given": 4, "empty": 1, "too_long": 0, "ratio": 1, "kept": 2}
    assert counts.items() <= found["details"]["cleaning"].items()
