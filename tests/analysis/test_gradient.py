"""The share of the gradient that the output layer lets through, against a direct computation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fullrank as fr
from fullrank.analysis import gradient_share

IDS = torch.randint(3, 50, (2, 9), generator=torch.Generator().manual_seed(0))
TARGETS = torch.where(torch.rand(2, 9, generator=torch.Generator().manual_seed(1)) < 0.3, -100, IDS.roll(-1, 1))
CLUSTERS = {"cutoffs": [20], "div_val": 2}


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
    assert share.suppressed == pytest.approx(1 - (part / whole) ** 0.5, rel=1e-10)
    assert (share.tokens, share.width, share.vocab_size) == (int(counts.sum()), 12, 50)


def test_mixture_of_softmaxes() -> None:
    """Each softmax has the gradient r_k (p_k - 1[y]), r_k the posterior of component k."""
    made = model(fr.OutputConfig(kind="mixture_of_softmaxes", mixtures=3, bias=False))
    share = gradient_share(made, [(IDS, TARGETS)])
    counts = TARGETS != -100
    with torch.no_grad():
        components = made.output.components(made.hidden(IDS).hidden[counts][None])
        p = torch.softmax(components.states @ made.output.weight.T, -1)  # (T, K, V)
        target = TARGETS[counts][:, None, None].expand(-1, 3, 1)
        joint = components.log_prior.exp() * p.gather(2, target)[..., 0]
        one_hot = torch.zeros_like(p).scatter_(2, target, 1.0)
        gradient = (joint / joint.sum(1, keepdim=True))[..., None] * (p - one_hot)
    whole, part = lets_through(gradient.flatten(0, 1), made.output.weight)
    assert share.squares == pytest.approx(whole, rel=1e-10)
    assert share.let_through_squares == pytest.approx(part, rel=1e-10)


def test_adaptive_softmax() -> None:
    """Head and tail have a gradient each; the tail only from words in it."""
    made = model(fr.OutputConfig(kind="adaptive", **CLUSTERS))
    share = gradient_share(made, [(IDS, TARGETS)])
    counts = TARGETS != -100
    with torch.no_grad():
        hidden, targets = made.hidden(IDS).hidden[counts], TARGETS[counts]
        head, tail = made.output.components(hidden[None]).clusters
        in_tail = targets >= 20
        of_head = torch.softmax(hidden @ head.projection @ head.weight.T + head.bias, -1)
        of_head[torch.arange(len(targets)), targets.clamp(max=20)] -= 1
        of_tail = torch.softmax(hidden[in_tail] @ tail.projection @ tail.weight.T + tail.bias, -1)
        of_tail[torch.arange(int(in_tail.sum())), targets[in_tail] - 20] -= 1
    sums = [lets_through(of_head, head.weight), lets_through(of_tail, tail.weight)]
    assert share.squares == pytest.approx(sum(whole for whole, _ in sums), rel=1e-10)
    assert share.let_through_squares == pytest.approx(sum(part for _, part in sums), rel=1e-10)
    assert share.vocab_size == 50


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "bert"])
def test_models_of_hugging_face(family: str) -> None:
    """Gemma 2 caps its logits; the gradient at the output embedding's own output goes through the cap."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(2)
    sizes = {"vocab_size": 50, "hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
    more = {"gemma2": {"num_key_value_heads": 1, "head_dim": 6, "final_logit_softcapping": 0.1}}.get(family, {})
    config = transformers.AutoConfig.for_model(family, **sizes, intermediate_size=16, **more)
    auto = transformers.AutoModelForMaskedLM if family == "bert" else transformers.AutoModelForCausalLM
    made = auto.from_config(config, attn_implementation="eager").double().eval()
    share = gradient_share(made, [(IDS, TARGETS)])
    counts = TARGETS != -100
    with torch.no_grad():
        logits = made(IDS).logits[counts]
        gradient = logits.softmax(-1)
        gradient[torch.arange(int(counts.sum())), TARGETS[counts]] -= 1
        if family == "gemma2":  # c tanh(s / c) has the derivative 1 - (z / c)^2
            gradient *= 1 - (logits / 0.1) ** 2
    whole, part = lets_through(gradient, made.get_output_embeddings().weight)
    assert share.squares == pytest.approx(whole, rel=1e-10)
    assert share.let_through_squares == pytest.approx(part, rel=1e-10)
    assert all(parameter.requires_grad for parameter in made.parameters())
