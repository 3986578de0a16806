"""A model whose tokens see later ones, from `reproduce` to `generate`: every report says what its figures are not."""

import json
import math

import pytest
import yaml

from cli_runs import called, succeeds, write_text
from fullrank.core.config import NOT_NEXT_TOKEN
from run_files import read_result

SIZES = {
    "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "max_position_embeddings": 8,
    "attention": {"kind": "multilinear", "rank": 3},
}  # fmt: skip
TRAIN = {"steps": 2, "batch_size": 4, "segment_length": 8, "threads": 1, "device": "cpu"}
PUBLISHED = {"model.attention.causal": "as_published", "model.attention.not_next_token_perplexity": True}


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A recipe of three rows; the folder holds its runs, too."""
    folder = tmp_path_factory.mktemp("table")
    text = write_text(folder / "text", sentences=80)
    data = {"name": "text", "cache": str(folder / "cache")} | {
        split: str(text / f"{split}.txt") for split in ("train", "valid", "test")
    }
    recipe = {
        "table": "masked and as published",
        "base": {"model": SIZES, "data": data, "train": TRAIN},
        "scales": {"paper": {}},
        "rows": {
            "masked": {"paper": {"test": 30.0}},
            "published": {"set": PUBLISHED, "paper": {"test": 20.0}},
            "slid": {"set": {**PUBLISHED, "eval.stride": 1}},
        },
    }
    (folder / "table.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def runs(table):
    succeeds("reproduce", table / "table.yaml", "--scale", "paper", "--out", table / "runs", "--quiet")
    folders = {}
    for folder in (table / "runs").glob("*/"):
        folders[yaml.safe_load((folder / "run.json").read_text())["row"]] = folder
    return folders


def test_result_json(runs):
    masked, published, slid = (read_result(runs[row]) for row in ("masked", "published", "slid"))
    assert published["protocol_settings"]["next_token"] is False
    assert published["protocol"].endswith(f"; {NOT_NEXT_TOKEN}")
    for checkpoint in ("final", "last"):
        for split in ("valid", "test"):
            last = published[checkpoint][split]["last_position"]
            assert last["perplexity"] == pytest.approx(math.exp(last["nll"]))
            assert last["tokens"] == -(-published[checkpoint][split]["tokens"] // 8), "one of each block of 8"
            assert "last_position" not in masked[checkpoint][split]
            assert "last_position" not in slid[checkpoint][split]
    assert masked["protocol_settings"]["next_token"] is slid["protocol_settings"]["next_token"] is True
    assert "next-token" not in masked["protocol"] + slid["protocol"] + masked["best"]["protocol"]
    for result in (published, slid):  # judged in segments while training
        assert result["best"]["next_token"] is False
        assert result["best"]["protocol"].endswith(NOT_NEXT_TOKEN)
    assert masked["best"]["next_token"] is True


def test_eval(runs):
    folder = runs["published"]
    figures = read_result(folder)["final"]["test"]
    _, text, _ = called("eval", folder, "--device", "cpu")
    assert NOT_NEXT_TOKEN in text
    assert f"at last positions        {figures['last_position']['perplexity']:.4f} " in text
    windowed = json.loads(called("eval", folder, "--device", "cpu", "--json", "--context", 7, "--stride", 1)[1])
    assert windowed["protocol_settings"]["next_token"] is True
    assert "next-token" not in windowed["protocol"]
    assert "last_position" not in windowed


def test_generate_is_refused(runs):
    code, _, error = called("generate", runs["published"], "--prompt", "the", "--device", "cpu")
    assert (code, error.count("\n")) == (2, 1)
    assert "neither write a text token by token" in error
    assert "model.attention.causal" in error
