"""The share of the gradient that the output layer lets through, against a direct computation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fullrank as fr
from fullrank.analysis import gradient_share

IDS = torch.randint(3, 50, (2, 9), generator=torch.Generator().manual_seed(0))
TARGETS = torch.where(torch.rand(2, 9, generator=torch.Generator().manual_seed(1)) < 0.3, -100, IDS.roll(-1, 1))


def lets_through(gradient: Tensor, weight: Tensor) -> tuple[float, float]:
    """||G||^2 and ||G W (W'W)^-1 W'||^2 of G (T, V) and W (V, d)."""
    weight = weight.detach()
    projected = gradient @ weight @ torch.linalg.pinv(weight)
    return float(gradient.square().sum()), float(projected.square().sum())


def model(output: fr.OutputConfig, **options: object) -> fr.LanguageModel:
    torch.manual_seed(1)
    config = fr.ModelConfig(
        vocab_size=50, hidden_size=12, num_hidden_layers=1, num_attention_heads=3, intermediate_size=16, output=output,
        **options,
    )  # fmt: skip
    made = fr.LanguageModel(config).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return made


def test_one_softmax() -> None:
    """The gradient of a softmax is p - 1[y]."""
    made = model(fr.OutputConfig(kind="softmax", bias=True))
    share = gradient_share(made, [(IDS[:1], TARGETS[:1]), (IDS[1:], TARGETS[1:])])
    counts = TARGETS != -100
    with torch.no_grad():
        gradient = made(IDS).logits[counts].softmax(-1)
        gradient[torch.arange(int(counts.sum())), TARGETS[counts]] -= 1
    whole, part = lets_through(gradient, made.output.weight)
    assert share.squares == pytest.approx(whole, rel=1e-10)
    assert share.let_through_squares == pytest.approx(part, rel=1e-10)
    assert share.let_through == pytest.approx((part / whole) ** 0.5, rel=1e-10)
    assert share.tokens == int(counts.sum())


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_models_of_hugging_face(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(2)
    sizes = {"vocab_size": 50, "hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.AutoConfig.for_model(family, **sizes, intermediate_size=16)
    auto = transformers.AutoModelForMaskedLM if family == "bert" else transformers.AutoModelForCausalLM
    made = auto.from_config(config, attn_implementation="eager").double().eval()
    share = gradient_share(made, [(IDS, TARGETS)])
    counts = TARGETS != -100
    with torch.no_grad():
        logits = made(IDS).logits[counts]
        gradient = logits.softmax(-1)
        gradient[torch.arange(int(counts.sum())), TARGETS[counts]] -= 1
    whole, part = lets_through(gradient, made.get_output_embeddings().weight)
    assert share.squares == pytest.approx(whole, rel=1e-10)
    assert share.let_through_squares == pytest.approx(part, rel=1e-10)
    assert all(parameter.requires_grad for parameter in made.parameters())
