"""`fullrank average`: the mean of the kept checkpoints, used like any other checkpoint."""

import shutil

import pytest
import torch
from safetensors.torch import save_file

import fullrank as fr
from cli_runs import SMALL, called, document, succeeds, write_config
from fullrank.seal import write_record
from fullrank.training.checkpoint import mean_weights


@pytest.fixture(scope="module")
def trained(text):
    """Tied weights; evaluations at 4, 8, 12, 16 and 18, of which the last three are kept."""
    config = write_config(text / "average.yaml", text, text / "cache", steps=18, keep_checkpoints=3)
    settings = ["model.output.tied=true", "eval.every_steps=4", "--out", text / "average", "--quiet"]
    assert called("train", config, *SMALL, *settings)[0] == 0
    return text / "average"


@pytest.fixture
def folder(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run", symlinks=True)


def figures(folder, checkpoint):
    content = document("eval", folder, "--device", "cpu", "--checkpoint", checkpoint)
    assert content.pop("checkpoint") == checkpoint
    content.pop("run")
    return content


def test_the_mean_of_the_last_ones_is_measured_and_writes(folder):
    out = succeeds("average", folder, "--last", 2)
    assert f"{folder}: the mean of 2 checkpoints (step 16, 18)" in out
    assert f"fullrank eval {folder} --checkpoint average" in out
    expected = mean_weights([folder / "checkpoints" / "kept" / f"step-{step:08d}" for step in (16, 18)])
    model = fr.LanguageModel.load(folder, "average")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())

    second = shutil.copytree(folder, folder.parent / "by hand", symlinks=True)
    checkpoint = second / "checkpoints" / "hand"
    checkpoint.mkdir()
    save_file(expected, checkpoint / "model.safetensors")
    write_record(checkpoint, ("model.safetensors",), {"step": 18})
    measured = figures(folder, "average")
    assert measured == figures(second, "hand")
    assert measured["nll"] != figures(folder, "last")["nll"]

    words = ("generate", folder, "--checkpoint", "average", "--prompt", "the", "--max-new-tokens", 3, "--greedy")
    out = succeeds(*words, "--device", "cpu")
    assert out.startswith("the")
