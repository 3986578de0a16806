"""Causal models of Hugging Face pass, and one whose mask was taken away is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullrank as fr
import hugging_face_models as tiny
from fullrank.checking import agreement, last_position
from fullrank.checking.future import by_gradient, by_perturbation
from fullrank.checking.subject import subject_of


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few steps on random tokens; what they show is tested in test_last_position.py."""
    monkeypatch.setattr(last_position, "_STEPS", 5)


APPLY = [
    "future, by perturbation, evaluation", "future, by perturbation, training", "future, by perturbation, with padding",
    "future, by gradient, evaluation", "future, by gradient, training", "padding changes nothing",
    "incremental decoding = one pass", "evaluation is deterministic", "saved and loaded: same numbers", "last position",
]  # fmt: skip


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma2"])
def test_honest_models_pass(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    report = fr.check(getattr(tiny, kind)())
    assert {f.check: f.remark for f in report.failures} == {}
    assert [f.check for f in report.findings if f.verdict == "passes"] == APPLY
    assert all(f.reason for f in report.findings if f.verdict == "not applicable")
    assert report.description["source"] == "a causal model of Hugging Face"
    assert report.description["precision"] == "float64"
    assert capsys.readouterr() == ("", "")


class Blind(nn.Module):
    """An attention layer of Hugging Face without its mask."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer
        self.layer.is_causal = False

    def forward(self, hidden_states: Tensor, *given: Any, **more: Any) -> Any:
        shape = (len(hidden_states), 1, hidden_states.shape[1], hidden_states.shape[1])
        more["attention_mask"] = torch.zeros(shape, dtype=hidden_states.dtype)
        return self.layer(hidden_states, *given, **more)


def test_a_layer_that_leaks_is_named() -> None:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=8, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1, intermediate_size=16,
        vocab_size=47, bos_token_id=1, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    model = tiny.built(config)
    model.model.layers[1].self_attn = Blind(model.model.layers[1].self_attn)
    subject = subject_of(model)
    for training in (False, True):
        for found in (by_perturbation(subject, training=training), by_gradient(subject, training=training)):
            assert found.verdict == "fails"
            assert found.layers == ("model.layers.1.self_attn.layer.o_proj",) or found.layers == (
                "model.layers.1.self_attn.layer",
            )


def test_a_wrong_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.cache_utils import DynamicLayer

    subject = subject_of(tiny.llama())
    assert agreement.decoding(subject).verdict == "passes"
    right = DynamicLayer.update

    def wrong(self: Any, key: Tensor, value: Tensor, *given: Any, **more: Any) -> Any:
        keys, values = right(self, key, value, *given, **more)
        return keys, torch.cat((values[:, :, :-1] * 1.001, values[:, :, -1:]), dim=2) if key.shape[2] == 1 else values

    monkeypatch.setattr(DynamicLayer, "update", wrong)
    found = agreement.decoding(subject)
    assert (found.verdict, found.remark) == ("fails", "worst: token by token")


def test_files_that_lose_something(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = subject_of(tiny.gpt2())
    right = type(subject.model).from_pretrained

    def lossy(*given: Any, **more: Any) -> Any:
        model = right(*given, **more)
        tiny.moved(model, 1e-9)
        return model

    monkeypatch.setattr(type(subject.model), "from_pretrained", lossy)
    assert agreement.saving(subject).verdict == "fails"
