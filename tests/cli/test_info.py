"""`fullrank info` of multi-linear attention: the block beside multi-head attention, in words and as JSON."""

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
    lines = {" ".join(line.split()) for line in told(capsys, "info", wikitext103).splitlines()}
    assert {
        "total 85,356,626",
        "one attention block multi-linear multi-head",
        "projections Q K V 30,720 196,608",
        "output map W_O 1,638,400 65,536",
        "cores 40 0",
        "position term 10,240 0",
        "all 1,679,400 262,144",
        "the block is 6.4 times LARGER than with multi-head attention (of 8 heads; their number changes nothing)",
        "the output map has a row for each of 80 x 80 pairs of positions",
        "attention of 6 layers is 6.4 times LARGER than with multi-head attention: 10,076,480, with multi-head 1,572,864",
        "the whole model is 1.111 times LARGER than with multi-head attention: 85,356,626, with multi-head 76,853,010",
        "with relative positions as in Transformer-XL, multi-head has 65,536 more",
        "the paper's formula (3 h d) / (3 d + h) is 7.50 at h = 8 heads and factors of width d = 40:",
        "it counts projections and cores only and leaves W_O out",
    } <= lines
    assert not any("biases" in line for line in lines)
    found = json.loads(told(capsys, "info", wikitext103, "--json"))
    assert found["attention_block"]["parameters"]["total"] == 1_679_400
    assert found["attention_block"]["ratio"] == 262_144 / 1_679_400
    assert found["bytes"]["cache_per_token_fp32"] == 4 * 6 * 2 * 40


def test_a_map_of_any_length(capsys: pytest.CaptureFixture[str], wikitext103: Path) -> None:
    changes = ["model.attention.output_map=decayed", "model.attention.score=dot_product", "model.position=none",
               "model.attention.bias=true"]  # fmt: skip
    shown = told(capsys, "info", wikitext103, *changes, "--length", 5000)
    lines = {" ".join(line.split()) for line in shown.splitlines()}
    decayed = 8 * 40 * 256 + 2 * 8
    total = 30_720 + decayed + 40 + 3 * 40 + 256
    assert {
        f"output map W_O {decayed:,} 65,536",
        "biases 376 1,024",
        f"all {total:,} {262_144 + 1024:,}",
        f"the block is {263_168 / total:.1f} times smaller than with multi-head attention (of 8 heads; their number changes "
        "nothing)",
        "the output map does not grow with length",
    } <= lines
    assert "cache 0.0 KiB per token and 15.0 KiB per text" in shown  # 6 layers, 2 S R numbers of 4 bytes
    assert "position term" not in shown


def test_too_long_for_the_map(capsys: pytest.CaptureFixture[str], wikitext103: Path) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["info", str(wikitext103), "--length", "81"])
    assert stopped.value.code == 2
    assert "each pair of 80 positions" in capsys.readouterr().err


def test_others_have_no_such_block(capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(told(capsys, "info", "mixhead/table1-vanilla", "--row", "b", "--json"))["attention_block"] is None
    assert "block" not in told(capsys, "info", "mixhead/table1-vanilla", "--row", "b")
