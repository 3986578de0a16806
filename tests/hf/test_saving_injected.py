"""Injected stages are saved and loaded, or loading fails; they are never left out and never made up."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

from tiny_families import FAMILIES  # noqa: E402

import fullrank as fr  # noqa: E402
from fullrank.core.errors import InputError  # noqa: E402

SOURCES = str(Path(fr.__file__).parents[1])


def train(model, inputs, steps=2):
    """A few steps of training; away from the identity first, so that a mixing that was left out would be seen."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".fullrank." in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.train()
    optimizer = torch.optim.AdamW(fr.parameter_groups(model, learning_rate=1e-2, weight_decay=0.1))
    for _ in range(steps):
        actual = model(**inputs)
        values = actual.logits if "logits" in actual else actual.last_hidden_state
        values.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@pytest.fixture
def bert():
    return FAMILIES["bert"]()


@pytest.mark.full
def test_a_fresh_process_computes_the_same_and_a_plain_load_fails(tmp_path):
    """A plain `from_pretrained` fails with a word about `load_injected`, before and after our package is imported."""
    for name in ("bert", "llama"):
        model, inputs = FAMILIES[name]()
        layers = [1] if name == "llama" else None
        train(fr.inject(model, mix="position_wise", cross_head=0.1, layers=layers), inputs)
        with torch.no_grad():
            actual = model(**inputs)
        torch.save([inputs, actual.logits if "logits" in actual else actual.last_hidden_state], tmp_path / f"{name}.pt")
        model.save_pretrained(tmp_path / name)
    code = """
import sys, torch, transformers
for kind in (transformers.BertForMaskedLM, transformers.AutoModel, transformers.AutoModelForSequenceClassification):
    try:
        kind.from_pretrained(f"{sys.argv[1]}/bert")
    except ValueError as error:
        assert "fullrank.load_injected" in str(error), error
    else:
        raise SystemExit(f"{kind} loaded it")
assert "fullrank" not in sys.modules
import fullrank as fr
for name in ("bert", "llama"):
    inputs, expected = torch.load(f"{sys.argv[1]}/{name}.pt")
    model = fr.load_injected(f"{sys.argv[1]}/{name}").eval()
    with torch.no_grad():
        actual = model(**inputs)
    actual = actual.logits if "logits" in actual else actual.last_hidden_state
    assert torch.equal(actual, expected), (name, (actual - expected).abs().max())
    assert type(model).__module__.startswith("transformers.models."), type(model)
    assert model.config.fullrank["mix"] == "position_wise"
print("same")
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "PYTHONPATH": SOURCES, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.stdout.strip() == "same", done.stderr[-2000:]


def test_what_is_saved_computes_the_same_and_a_plain_load_fails(tmp_path):
    for name in ("bert", "llama", "t5"):
        model, inputs = FAMILIES[name]()
        train(fr.inject(model, mix="position_wise", cross_head=0.1), inputs)
        model.save_pretrained(tmp_path / name)
        loaded = fr.load_injected(tmp_path / name).eval()
        assert torch.equal(loaded(**inputs).logits, model(**inputs).logits), name
    for kind in (transformers.BertForMaskedLM, transformers.AutoModelForMaskedLM):
        with pytest.raises(ValueError, match=r"fullrank\.load_injected"):
            kind.from_pretrained(tmp_path / "bert")


@pytest.mark.filterwarnings("ignore")
def test_a_model_with_configurations_inside_configurations(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "num_hidden_layers": 1}
    text = {**sizes, "vocab_size": 60, "num_key_value_heads": 2, "head_dim": 8, "layer_types": ["full_attention"]}
    encoder = {"text_config": text, "vision_config": {**sizes, "image_size": 16, "patch_size": 4}}
    config = transformers.T5Gemma2Config(encoder=encoder, decoder=text, vocab_size=60, image_token_index=7)
    model = fr.inject(transformers.T5Gemma2ForConditionalGeneration(config).eval(), mix="position_wise")
    inputs = {"input_ids": torch.randint(10, 60, (2, 9)), "decoder_input_ids": torch.randint(10, 60, (2, 5))}
    train(model, inputs)
    model.eval().save_pretrained(tmp_path)
    with torch.no_grad():
        actual, expected = (each(**inputs).logits for each in (fr.load_injected(tmp_path).eval(), model))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


def test_a_model_made_of_the_configuration_alone_refuses_to_run(bert):
    model, inputs = bert
    for given in ({"mix": "position_wise"}, {"cross_head": 0.5}):
        config = fr.inject(copy.deepcopy(model), **given).config
        again = type(model)(config)
        with pytest.raises(InputError, match="load_injected"):
            again(**inputs)


def test_other_classes_load_it_too(tmp_path, bert):
    model, inputs = bert
    train(fr.inject(model, mix="position_wise"), inputs).save_pretrained(tmp_path)
    expected = model.bert(**inputs).last_hidden_state
    for cls in (transformers.BertModel, transformers.AutoModel):
        again = fr.load_injected(tmp_path, cls).eval()
        assert type(again) is transformers.BertModel
        assert torch.equal(again(**inputs).last_hidden_state, expected)
    half = fr.load_injected(tmp_path, dtype=torch.bfloat16)
    assert type(half) is transformers.BertForMaskedLM
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}


def test_a_model_with_parameters_made_outside_of_the_meta_device_is_loaded(tmp_path):
    """DiffLlama draws its lambdas with a function that does not know the meta device."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.DiffLlamaConfig(vocab_size=11, intermediate_size=12, pad_token_id=0, **sizes)
    model, inputs = transformers.DiffLlamaForCausalLM(config), {"input_ids": torch.arange(1, 9)[None]}
    train(fr.inject(model, mix="position_wise"), inputs, steps=1).save_pretrained(tmp_path)
    assert torch.equal(fr.load_injected(tmp_path).eval()(**inputs).logits, model(**inputs).logits)


def test_a_plain_load_by_hand_names_what_it_leaves_out(tmp_path, bert):
    model, _ = bert
    fr.inject(model, mix="position_wise").save_pretrained(tmp_path)
    _, report = type(model).from_pretrained(tmp_path, attn_implementation="sdpa", output_loading_info=True)
    assert set(report["unexpected_keys"]) == {name for name in model.state_dict() if ".fullrank." in name}


def test_missing_parameters_are_an_error(tmp_path, bert):
    from safetensors.torch import load_file, save_file

    model, _ = bert
    fr.inject(model, mix="position_wise").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({k: v for k, v in load_file(path).items() if "from_query" not in k}, path, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"lacks .*fullrank\.mix\.from_query"):
        fr.load_injected(tmp_path)


def test_without_injection_there_is_nothing_to_load(tmp_path, bert):
    model, _ = bert
    model.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="nothing was injected"):
        fr.load_injected(tmp_path)
    with pytest.raises(InputError, match="no model that transformers can find"):
        fr.load_injected(tmp_path / "nowhere")
    with pytest.raises(InputError, match="nothing was injected"):
        fr.save_adapter(model, tmp_path)
    removed = fr.remove(fr.inject(copy.deepcopy(model), mix="average"))
    removed.save_pretrained(tmp_path / "removed")
    again = transformers.BertForMaskedLM.from_pretrained(tmp_path / "removed")
    assert again.config.to_dict().keys() == transformers.BertConfig.from_pretrained(tmp_path).to_dict().keys()


@pytest.mark.parametrize("mix", ["position_wise", "random", "average"])
def test_an_adapter_is_small_and_complete(tmp_path, bert, mix):
    model, inputs = bert
    model.save_pretrained(tmp_path / "base")
    base = transformers.BertForMaskedLM.from_pretrained(tmp_path / "base").eval()
    injected = fr.inject(base, mix=mix, layers=["encoder.layer.1"])
    with torch.no_grad():
        for parameter in injected.bert.encoder.layer[1].attention.self.fullrank.parameters():
            parameter.normal_()
    fr.save_adapter(injected, tmp_path / "adapter")
    expected = injected(**inputs).logits
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == {"fullrank_config.json", "fullrank.safetensors"}
    assert (tmp_path / "adapter" / "fullrank.safetensors").stat().st_size < 1000
    assert torch.equal(fr.load_adapter(copy.deepcopy(model), tmp_path / "adapter")(**inputs).logits, expected)
    again = fr.load_injected(tmp_path / "adapter").eval()
    assert torch.equal(again(**inputs).logits, expected)
    assert torch.equal(fr.load_adapter(again, tmp_path / "adapter")(**inputs).logits, expected)


def test_an_adapter_that_does_not_fit_changes_nothing(tmp_path, bert):
    model, _ = bert
    fr.save_adapter(fr.inject(copy.deepcopy(model), mix="position_wise"), tmp_path)
    deeper = transformers.BertForMaskedLM(
        transformers.BertConfig(**{**model.config.to_diff_dict(), "num_hidden_layers": 3})
    )
    before = set(deeper.state_dict())
    with pytest.raises(InputError, match=r"lacks .*layer\.2"):
        fr.load_adapter(deeper, tmp_path)
    assert set(deeper.state_dict()) == before
    assert deeper.config._attn_implementation == model.config._attn_implementation
    other = fr.inject(copy.deepcopy(model), mix="position_independent")
    with pytest.raises(InputError, match="position_independent"):
        fr.load_adapter(other, tmp_path)
    with pytest.raises(InputError, match="holds no adapter"):
        fr.load_adapter(copy.deepcopy(model), tmp_path / "nowhere")
    (tmp_path / "fullrank.safetensors").write_bytes(b"12345678")
    with pytest.raises(InputError, match="damaged"):
        fr.load_adapter(copy.deepcopy(model), tmp_path)
    written = json.loads((tmp_path / "fullrank_config.json").read_text())
    assert written["base_model"] is None
    with pytest.raises(InputError, match="which model it was made of"):
        fr.load_injected(tmp_path)
