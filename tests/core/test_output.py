"""Output layers against their equations: every probability, every gradient; and the contract that all of them keep."""

import json
from dataclasses import replace
from pathlib import Path

import output_equations as equations
import pytest
import torch
from output_equations import DOUBLE, Case, pairwise_cases
from torch import nn

import fullrank as fr
from fullrank.core.output import Tempered

CASES = pairwise_cases()
KINDS = {"softmax": Case(), "mixture": Case(mixtures=3), "adaptive": Case(cutoffs=(8, 15), form="transformer_xl")}
kinds = pytest.mark.parametrize("case", KINDS.values(), ids=KINDS)


def check(case):
    """Log-probabilities, nll, losses, and every gradient."""
    layer = case.layer()
    hidden, targets = case.batch()
    leaves = case.tensors(layer) | {"hidden": hidden}
    copies = {name: tensor.detach().double().requires_grad_() for name, tensor in leaves.items()}
    logs = case.log_prob(copies, copies["hidden"])
    total = torch.ones(targets.shape, dtype=DOUBLE)
    assert torch.allclose(logs.exp().sum(-1), total)
    log_prob = layer.log_prob(hidden)
    assert torch.allclose(log_prob.exp().sum(-1), total, rtol=1e-10)
    equations.compare(log_prob, logs, leaves, copies, torch.randn(logs.shape, dtype=DOUBLE))
    logits = layer(hidden)  # the log-probabilities themselves, of one softmax up to a constant
    assert torch.equal(logits if case.cutoffs or case.mixtures else torch.log_softmax(logits, -1), log_prob)
    each = -logs.gather(-1, targets[..., None]).squeeze(-1)
    equations.compare(layer.nll(hidden, targets), each, leaves, copies, torch.randn(targets.shape, dtype=DOUBLE))
    weights = torch.rand(targets.shape, dtype=DOUBLE) + 0.1
    weights[:, 1::3] = 0
    for smoothing, share, cotangent in ((0.0, None, 1.0), (0.0, weights, -1.7), (0.1, weights, 1.0), (0.6, None, 2.0)):
        loss, nll = layer.loss(hidden, targets, share, smoothing)
        expected = equations.mean_loss(logs, targets, share, smoothing)
        equations.compare(loss, expected, leaves, copies, torch.tensor(cotangent, dtype=DOUBLE))
        plain = equations.mean_loss(logs, targets, share, 0.0).detach()
        equations.close("nll", nll, plain, 1e-9)
        assert not nll.requires_grad
        assert loss.shape == nll.shape == ()


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("kernel", ["auto", "reference"])
def test_every_probability_and_every_gradient(case, kernel):
    with fr.kernel(kernel):
        check(case)


@pytest.mark.parametrize("bias", [True, False])
@kinds
def test_a_temperature_divides_the_logits_of_every_softmax(case, bias):
    """Beside the equations with every matrix and bias divided, since z / T = (W / T) h + b / T; the prior stays."""
    case = replace(case, bias=bias)
    layer = case.layer()
    hidden, targets = case.batch()
    leaves = case.tensors(layer) | {"hidden": hidden}
    copies = {name: tensor.detach().clone().requires_grad_() for name, tensor in leaves.items()}
    divided = {n: t / 1.7 if "weight" in n or "bias" in n else t for n, t in copies.items() if "mixture" not in n}
    logs = case.log_prob(copies | divided, copies["hidden"])
    tempered = Tempered(layer, 1.7)
    log_prob = tempered.log_prob(hidden)
    assert torch.allclose(log_prob.exp().sum(-1), torch.ones(log_prob.shape[:-1], dtype=DOUBLE), rtol=1e-12)
    equations.compare(log_prob, logs, leaves, copies, torch.randn(logs.shape, dtype=DOUBLE))
    each = -logs.gather(-1, targets[..., None]).squeeze(-1)
    equations.compare(tempered.nll(hidden, targets), each, leaves, copies, torch.randn(each.shape, dtype=DOUBLE))
    assert torch.equal(tempered(hidden).log_softmax(-1), log_prob.log_softmax(-1))
    assert not torch.allclose(layer.log_prob(hidden), log_prob)


FIXTURE = json.loads((Path(__file__).parent / "fixtures" / "transformer_xl_adaptive.json").read_text())


@pytest.mark.parametrize(
    "case", FIXTURE["cases"], ids=lambda c: f"div{c['div_val']}-{c['tied']}-{c['tied_projections']}"
)
def test_equals_transformer_xl(case):
    """Vectors, log-probabilities and nll of Hugging Face's Transformer-XL for the same parameters (see `origin`)."""
    sizes = {name: FIXTURE[name] for name in ("vocab_size", "hidden_size")}
    clusters = {"cutoffs": FIXTURE["cutoffs"], "div_val": case["div_val"]}
    config = fr.ModelConfig(
        **sizes, num_attention_heads=1, scale_embedding=True, input=fr.InputConfig(kind="adaptive", **clusters),
        output=fr.OutputConfig(kind="adaptive", form="transformer_xl", tied=case["tied"],
                               tied_projections=case["tied_projections"] and case["tied"]),
    )  # fmt: skip
    embedding = fr.AdaptiveInput(config).double()
    layers = nn.ModuleDict({"embedding": embedding, "output": fr.AdaptiveSoftmax(config, embedding).double()})
    parameters = {name: torch.tensor(numbers, dtype=DOUBLE) for name, numbers in case["parameters"].items()}
    layers.load_state_dict({name: parameters[name].view_as(p) for name, p in layers.named_parameters()})
    assert parameters.keys() == dict(layers.named_parameters()).keys()
    hidden = torch.tensor(case["hidden"], dtype=DOUBLE).view(1, -1, sizes["hidden_size"])
    for tensor, expected in (
        (embedding(torch.tensor([case["ids"]])), case["embedded"]),
        (layers["output"](hidden), case["log_prob"]),
        (layers["output"].nll(hidden, torch.tensor([case["targets"]])), case["nll"]),
    ):
        assert tensor.shape[:2] == (1, len(case["ids"]))
        assert torch.allclose(tensor.flatten(), torch.tensor(expected, dtype=DOUBLE), atol=1e-12)


@kinds
def test_second_derivatives_are_right_or_refused(case):
    """Never silently wrong, and always available with the formulas of the reference."""
    layer = case.layer()
    hidden, targets = case.batch()
    leaves = case.tensors(layer) | {"hidden": hidden}
    copies = {name: tensor.detach().clone().requires_grad_() for name, tensor in leaves.items()}

    def penalty(value, leaf):
        (gradient,) = torch.autograd.grad(value, leaf, create_graph=True)
        return gradient.square().sum()

    logs = case.log_prob(copies, copies["hidden"])
    expected = penalty(equations.mean_loss(logs, targets, None, 0.0) * targets.numel(), copies["hidden"])
    for value in (
        lambda: layer.nll(hidden, targets).sum(),
        lambda: layer.loss(hidden, targets)[0] * targets.numel(),
        lambda: -layer.log_prob(hidden).gather(-1, targets[..., None]).sum(),
    ):
        with fr.kernel("reference"):
            equations.compare(penalty(value(), hidden), expected, leaves, copies, torch.ones(()))
        try:
            actual = penalty(value(), hidden)
        except RuntimeError as error:
            assert "no second derivative" in str(error)  # noqa: PT017 - it may also succeed
        else:
            equations.compare(actual, expected, leaves, copies, torch.ones(()))


def improbable(dtype):
    """Two words, of which both softmaxes give the second about e^-270 and e^-200."""
    case = Case(2, bias=False, vocabulary=2, width=1, tokens=(1, 1))
    layer = case.layer(dtype)
    numbers = {"mixture.latent.weight": [[1.0], [0.5]], "mixture.latent.bias": [0.0, 0.13], "weight": [[360.0], [0.0]]}
    with torch.no_grad():
        for name, value in numbers.items():
            case.tensors(layer)[name].copy_(torch.tensor(value))
    return layer, torch.ones(1, 1, 1, dtype=dtype, requires_grad=True), case


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE], ids=["fp32", "fp64"])
def test_an_improbable_word_keeps_its_gradient(dtype):
    """log p = -200: exp underflows in fp32, the gradient does not vanish."""
    layer, hidden, case = improbable(dtype)
    targets = torch.tensor([[1]])
    exact = hidden.detach().double().requires_grad_()
    tensors = {name: tensor.detach().double() for name, tensor in case.tensors(layer).items()}
    expected = -case.log_prob(tensors, exact)[..., 1].sum()
    assert 190 < float(expected.detach()) < 210
    (right,) = torch.autograd.grad(expected, exact)
    assert float(right.abs()) > 100
    for value in (layer.nll(hidden, targets).sum(), layer.loss(hidden, targets)[0], -layer(hidden)[..., 1].sum()):
        assert abs(float(value.detach() / expected.detach()) - 1) < 1e-5
        assert abs(float(torch.autograd.grad(value, hidden)[0] / right) - 1) < 1e-4


@pytest.mark.parametrize(("target", "rare"), [(2, "weights.1"), (1, "class_weight")])
def test_an_improbable_word_in_a_tail_and_an_improbable_tail(target, rare):
    case = Case(None, (1,), 1, bias=False, vocabulary=3, width=2, tokens=(1, 1))
    results = []
    for dtype in (torch.float32, DOUBLE):
        layer = case.layer(dtype)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.mul_(0.1)
            case.tensors(layer)[rare][-1].copy_(torch.tensor([-170.0, -170.0]))
        hidden = torch.tensor([[[0.7, 0.5]]], dtype=dtype, requires_grad=True)
        ids = torch.tensor([[target]])
        values = (layer.nll(hidden, ids).sum(), layer.loss(hidden, ids)[0], -layer(hidden)[0, 0, target])
        results.append([(float(v.detach()), torch.autograd.grad(v, hidden)[0]) for v in values])
    for (value, gradient), (right, exact) in zip(*results, strict=True):
        assert right > 150
        assert abs(value / right - 1) < 1e-5
        assert float(exact.abs().max()) > 1
        equations.close("gradient", gradient, exact, 1e-4)
