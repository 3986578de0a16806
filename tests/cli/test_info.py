"""`fullrank info` of multi-linear attention: the block beside multi-head attention."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from fullrank.cli import main


def told(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    with pytest.raises(SystemExit) as stopped:
        main([str(word) for word in words])
    said = capsys.readouterr()
    assert stopped.value.code in (0, None), said.err
    return said.out


@pytest.fixture
def wikitext103(tmp_path: Path) -> Path:
    """The released script's sizes."""
    clusters = {"kind": "adaptive", "cutoffs": [20_000, 40_000, 200_000], "div_val": 1}
    model = {
        "vocab_size": 267_735, "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8,
        "intermediate_size": 2100, "max_position_embeddings": 80, "position": "relative", "norm": "post", "input": clusters,
        "output": {**clusters, "form": "transformer_xl", "tied": True},
        "attention": {"kind": "multilinear", "rank": 40, "score": "relative", "bias": False},
    }  # fmt: skip
    path = tmp_path / "run.yaml"
    train = {"steps": 1, "segment_length": 80, "batch_size": 60}
    path.write_text(yaml.safe_dump({"model": model, "train": train}), encoding="utf-8")
    return path


def test_the_block_is_larger(capsys: pytest.CaptureFixture[str], wikitext103: Path) -> None:
    found = json.loads(told(capsys, "info", wikitext103, "--json"))
    assert found["parameters"]["attention"] == 10_076_480
    assert found["bytes"]["cache_per_token_fp32"] == 4 * 6 * 2 * 40
    assert found["memory"]["parameters"] == 4 * found["parameters"]["total"] == 4 * 85_356_626
    shown = told(capsys, "info", wikitext103)
    for number in ("85,356,626", "10,076,480"):
        assert number in shown


def test_a_map_of_any_length(capsys: pytest.CaptureFixture[str], wikitext103: Path) -> None:
    changes = ["model.attention.output_map=decayed", "model.attention.score=dot_product", "model.position=none",
               "model.attention.bias=true"]  # fmt: skip
    found = json.loads(told(capsys, "info", wikitext103, *changes, "--length", 5000, "--json"))
    projections, output_map, cores, biases = 30_720, 8 * 40 * 256 + 2 * 8, 40, 376
    assert found["parameters"]["attention"] == 6 * (projections + output_map + cores + biases)
    assert found["bytes"]["state_per_text_fp32"] == 15 * 2**10  # 6 layers, 2 S R numbers of 4 bytes
    assert found["bytes"]["cache_per_token_fp32"] == 0


def test_too_long_for_the_map(capsys: pytest.CaptureFixture[str], wikitext103: Path) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["info", str(wikitext103), "--length", "81"])
    assert stopped.value.code == 2
    assert "each pair of 80 positions" in capsys.readouterr().err
