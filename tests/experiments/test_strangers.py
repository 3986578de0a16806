"""Folders of strangers: what their files name is a folder or a model of the hub, and never code that is run."""

import json

import pytest
import torch

transformers = pytest.importorskip("transformers")

from fullrank.core.errors import InputError  # noqa: E402
from fullrank.hf.load import load_named  # noqa: E402

EVIL = "from pathlib import Path\n\nPath(__file__).with_name('ran').touch()\n\n\ndef make():\n    return None\n"


def tiny(folder):
    """A GPT-2 of one layer, saved in `folder`."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    model.save_pretrained(folder)
    return model


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    """A working directory with a module that leaves a file where it is imported, and the model `base`."""
    (tmp_path / "evil.py").write_text(EVIL, encoding="utf-8")
    tiny(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


def test_remote_code_is_not_run(workspace):
    file = workspace / "base" / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    code = {"auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}, "model_type": "own"}
    file.write_text(json.dumps(config | code), encoding="utf-8")
    (workspace / "base" / "evil.py").write_text(EVIL, encoding="utf-8")
    with pytest.raises(InputError, match="base"):
        load_named(str(workspace / "base"), causal=True, tokenizer=False)
    assert not [*workspace.rglob("ran")]


def test_an_adapter_is_refused_before_peft_reads_it(workspace):
    """It may name a module, which PEFT would import."""
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "gpt2"}
    adapter |= {"megatron_config": {"a": 1}, "megatron_core": "evil"}
    (workspace / "base" / "adapter_config.json").write_text(json.dumps(adapter), encoding="utf-8")
    with pytest.raises(InputError, match="an adapter of PEFT; merge it"):
        load_named(str(workspace / "base"), causal=True, tokenizer=False)
    assert not (workspace / "ran").exists()
