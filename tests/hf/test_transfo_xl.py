"""A checkpoint of transformers' Transformer-XL as a model of ours: its nll, its layout, our attention inside."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import fullrank as fr
from fullrank.core.config import WeightedConfig
from fullrank.core.errors import InputError
from fullrank.hf.transfo_xl import load_transfo_xl, make_config, rename_tensors

# numbers of transformers' own code, see tests/core/fixtures/make_transformer_xl.py
FIXTURES = Path(__file__).parents[1] / "core" / "fixtures"
OLD = json.loads((FIXTURES / "transformer_xl.json").read_text())
TENSORS = load_file(FIXTURES / "transformer_xl.safetensors")
# shapes of the published checkpoint, as transformers 4.35.2 gives them
PUBLISHED = json.loads((Path(__file__).parent / "transfo_xl_published.json").read_text())
PUBLISHED_SETTINGS = {
    "vocab_size": 267735, "cutoffs": [20000, 40000, 200000], "d_model": 1024, "d_embed": 1024, "n_head": 16, "d_head": 64,
    "d_inner": 4096, "div_val": 4, "pre_lnorm": False, "n_layer": 18, "mem_len": 1600, "clamp_len": 1000, "same_length": True,
    "proj_share_all_but_first": True, "attn_type": 0, "dropout": 0.1, "dropatt": 0.0, "untie_r": True, "tie_weight": True,
    "layer_norm_epsilon": 1e-5, "tie_projs": [False, True, True, True],
}  # fmt: skip


def write_folder(folder, case, **changes):
    """A folder as an old release wrote it, in double precision."""
    folder.mkdir(exist_ok=True)
    tensors = {
        name.removeprefix("parameter."): tensor.double()
        for name, tensor in TENSORS.items()
        if name.startswith("parameter.")
    }
    save_file(tensors, folder / "model.safetensors")
    about = {"model_type": "transfo-xl"} | OLD["sizes"] | case | changes
    (folder / "config.json").write_text(json.dumps(about))
    return folder


@pytest.mark.parametrize("mix", ["none", "position_wise"])
def test_nll_is_that_of_the_old_code(tmp_path, mix):
    """Segment by segment with its memory; a mixing changes nothing until it is trained; what is saved is the same."""
    model = load_transfo_xl(write_folder(tmp_path / "old", OLD["cases"]["zeros"]), mix=mix, cross_head=0.1).double()
    model.save(tmp_path / "new")
    for checked in (model, fr.LanguageModel.load(tmp_path / "new")):
        start = 0
        memory = None
        for number, size in enumerate(OLD["segments"]):
            ids = TENSORS["text"][:, start : start + size + 1]
            with torch.no_grad(), fr.kernel("reference"):
                nll = checked.nll(ids[:, :-1], ids[:, 1:], memory)
            memory = nll.memory
            torch.testing.assert_close(nll.per_token, TENSORS[f"zeros.{number}.nll"], rtol=0, atol=1e-9)
            start += size
    assert any(".mix." in key for key in model.state_dict()) == (mix != "none")


def test_the_layout_is_that_of_the_published_model():
    shapes = PUBLISHED["shapes"]
    layers = {
        name.replace(".layers.0.", f".layers.{i}."): torch.empty(shape, device="meta")
        for name, shape in shapes.items()
        for i in range(18)
    }
    with torch.device("meta"):
        model = fr.LanguageModel(make_config(PUBLISHED_SETTINGS, WeightedConfig(bias=False)))
    renamed = rename_tensors(layers, PUBLISHED_SETTINGS)
    assert {name: tensor.shape for name, tensor in renamed.items()} == {
        name: tensor.shape for name, tensor in model.state_dict().items()
    }
    assert model.num_parameters() == PUBLISHED["parameters"] == 285_205_322


def test_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = write_folder(tmp_path / "transfo-xl-wt103", OLD["cases"]["zeros"])
    words = ["<eos>", "<unk>", "the", "state", "of", "art", *(f"w{i}" for i in range(24))]
    torch.save({"idx2sym": words}, folder / "vocab.bin")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    page = (Path(__file__).parents[2] / "docs" / "transformer_xl.md").read_text(encoding="utf-8")
    space = {}
    exec(page.split("```python\n")[1].split("```")[0], space)
    assert space["model"].has >= {"logits", "step", "attention", "tokenizer"}
    assert space["text"].shape == (1, 25)


def test_damaged_weights_are_named(tmp_path):
    folder = write_folder(tmp_path, OLD["cases"]["zeros"])
    (folder / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(InputError, match=r"model\.safetensors: damaged"):
        load_transfo_xl(folder)
