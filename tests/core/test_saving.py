"""Saving and loading, and messages when it fails. Every combination is saved and loaded in tests/properties."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml

import fullrank as fr
from fullrank.core.errors import InputError, RunError


def model(vocab_size=13, seed=1, **changes):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    return fr.LanguageModel(fr.ModelConfig(vocab_size=vocab_size, **(sizes | changes)))


def same(first, second):
    a, b = first.state_dict(), second.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_files(tmp_path):
    made = model(output=fr.OutputConfig(tied=True))
    made.save(tmp_path / "deep" / "folder")
    assert {file.name for file in (tmp_path / "deep" / "folder").iterdir()} == {"model.safetensors", "config.yaml"}
    text = (tmp_path / "deep" / "folder" / "config.yaml").read_text()
    assert yaml.safe_load(text)["model"]["hidden_size"] == 8
    with (tmp_path / "deep" / "folder" / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    assert "output.weight" not in header  # tied: stored once
    assert same(fr.LanguageModel.load(tmp_path / "deep" / "folder"), made)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_weights(tmp_path, keep):
    model().save(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(InputError, match=r"model\.safetensors: damaged or not a safetensors file"):
        fr.LanguageModel.load(tmp_path)


def swap(tmp_path, weights, config):
    """The weights of one model beside the configuration of another."""
    weights.save(tmp_path)
    config.save(tmp_path / "other")
    shutil.copy(tmp_path / "other" / "config.yaml", tmp_path / "config.yaml")
    return tmp_path


def test_other_parts(tmp_path):
    mixed = model(attention=fr.AttentionConfig(mix="position_independent"))
    with pytest.raises(InputError, match=r"Missing key.*blocks\.0\.attention\.attend\.mix\.mixing"):
        fr.LanguageModel.load(swap(tmp_path, model(), mixed))
    with pytest.raises(InputError, match=r"Unexpected key.*blocks\.0\.attention\.attend\.mix\.mixing"):
        fr.LanguageModel.load(swap(tmp_path, mixed, model()))


def test_no_space_left(tmp_path, monkeypatch):
    """The old files stay whole, nothing half-written is left."""
    import errno

    from fullrank import storage as weights

    model(seed=1).save(tmp_path)

    def full(*args):
        Path(str(args[1])).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(weights, "save_file", full)
    with pytest.raises(RunError, match=r"no space left on the disk.*what was there before is unchanged"):
        model(seed=2).save(tmp_path)
    assert same(fr.LanguageModel.load(tmp_path), model(seed=1))
    assert len(list(tmp_path.iterdir())) == 2
