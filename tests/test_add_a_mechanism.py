"""The worked example of docs/add_a_mechanism.md as printed: one class runs in every kernel, learns, is injected and causal."""

import math
import re
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertModel

import fullrank as fr
from fullrank.core import registry

ROOT = Path(__file__).resolve().parents[1]
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2]])


@pytest.fixture(scope="module")
def example():
    """The names that the example defines."""
    page = (ROOT / "docs" / "add_a_mechanism.md").read_text(encoding="utf-8")
    names = {"__name__": "example"}
    code = "\n".join(re.findall(r"```python\n(.*?)```", page, re.S))
    assert "hidden_size=32," in code
    code = code.replace("hidden_size=32,", "hidden_size=32, num_hidden_layers=1,")
    exec(compile(code, "add_a_mechanism.md", "exec"), names)
    yield names
    registry.unregister("mix", "halfway")


def test_it_computes_its_equation_in_every_kernel(example):
    layer = fr.Attention(fr.AttentionConfig(mix="halfway"), hidden_size=16, num_attention_heads=8).double()
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    trace = fr.Trace()
    layer(x, trace=trace)
    plain, mixed = trace.layers[0].weights, trace.layers[0].mixed
    torch.testing.assert_close(mixed, (plain + plain.mean(1, keepdim=True)) / 2)
    model = example["model"].double()
    with fr.kernel("reference"):
        expected = model(IDS).logits
    for kernel in ("auto", "native"):
        with fr.kernel(kernel):
            torch.testing.assert_close(model(IDS).logits, expected, rtol=0, atol=1e-12)


def test_it_is_causal_and_learns(example):
    assert example["report"].passes
    assert example["loss"] < math.log(100) - 0.1
    model = example["model"].double()
    later = IDS.clone()
    later[:, 4:] += 1
    assert torch.equal(model(IDS).logits[:, :4], model(later).logits[:, :4])
    model.loss(IDS[:, :-1], IDS[:, 1:]).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_it_is_injected(example):
    config = BertConfig(hidden_size=16, num_attention_heads=4, num_hidden_layers=1, intermediate_size=8, vocab_size=12)
    bert = BertModel(config).eval()
    before = bert(IDS).last_hidden_state
    fr.inject(bert, mix="halfway")
    assert not torch.allclose(bert(IDS).last_hidden_state, before)
    fr.remove(bert)
    torch.testing.assert_close(bert(IDS).last_hidden_state, before)
