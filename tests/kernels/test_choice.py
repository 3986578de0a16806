"""The choice of a kernel: names and errors, the order for a call, and dropout in each of them."""

import math
from dataclasses import replace

import pytest
import torch
from calls import call, equation, needs_compiler

import fullrank as fr
from fullrank import kernels
from fullrank.core import engine
from layouts import LAYOUTS
from moving import moved

FAST = ["sdpa", "native"]
of = fr.Layout.of


def chosen(problem):
    with kernels.chosen() as names:
        out = kernels.attend(problem)
    (name,) = names
    assert (out is None) == (name == "reference")
    return name


def plain(queries, **choices):
    return call(of(queries), batch=1, heads=1, **choices)


@pytest.mark.parametrize(
    ("problem", "with_compiler", "without"),
    [
        (plain(47, dtype=torch.float32), "sdpa", "sdpa"),
        (plain(48, dtype=torch.float32), "native", "sdpa"),
        (plain(20, dtype=torch.float32, p=0.1), "native", "reference"),
        (plain(192, dtype=torch.float32, p=0.1), "native", "reference"),
        (plain(191, dtype=torch.bfloat16), "reference", "reference"),
        (plain(192, dtype=torch.bfloat16), "native", "reference"),
        (call(of(1, 9)), "sdpa", "sdpa"),
        (call(of(1, 9), "A"), "reference", "reference"),
        (call(of(1, 9), relative=True), "reference", "reference"),
        (call(of(9), "B"), "native", "reference"),
        (call(of(9), "none, A scores"), "native", "reference"),
        (call(of(9), "none, convolution"), "native", "reference"),
        (call(of(9), "none, convolution", relative=True), "reference", "reference"),
        (replace(call(of(9), "none, convolution"), scoring=torch.eye(3)), "reference", "reference"),
        (replace(call(of(9)), convolution=torch.ones(3, 4, 4)), "reference", "reference"),
        (call(of(191), "B"), "native", "reference"),
        (call(of(192), "B"), "native", "reference"),
        (call(of(9), normalize="sigsoftmax", relative=True), "native", "reference"),
        (replace(call(of(9), "A"), mixing=torch.eye(4)), "reference", "reference"),
    ],
)
def test_the_fastest_kernel(problem, with_compiler, without, monkeypatch):
    needs_compiler()
    assert chosen(problem) == with_compiler
    monkeypatch.setattr(kernels.native, "library", lambda: None)
    assert chosen(problem) == without


def test_without_engines_everything_works(monkeypatch):
    """An exported model has no engines."""
    layer = fr.Attention(fr.AttentionConfig(mix="position_wise"), hidden_size=6, num_attention_heads=2)
    x = torch.randn(1, 60, 6)
    expected = layer(x)
    monkeypatch.setattr(engine, "load", engine.NoEngines)
    with kernels.chosen() as names:
        assert (layer(x) - expected).abs().max() < 1e-6
    assert not names


@pytest.mark.parametrize("kernel", FAST)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_that_of_the_equation(name, kernel):
    if kernel == "native":
        needs_compiler()
    problem = call(LAYOUTS[name])
    with fr.kernel(kernel):
        out = kernels.attend(problem)
    assert torch.allclose(out, equation(problem), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["reference", *FAST])
def test_dropout_of_weights_has_the_same_distribution_in_every_kernel(name):
    """With every value 1 an output is the sum of the kept weights: mean 1 and, over 8 equal weights, variance p/(1-p)/8."""
    p = 0.25
    layer = fr.Attention(fr.AttentionConfig(), hidden_size=15, num_attention_heads=3, dropout=p).train()
    same = torch.zeros(400, 8, 15)
    with torch.no_grad():
        layer.project.value.bias.fill_(1.0)
        layer.merge.weight.copy_(torch.eye(15))
        layer.merge.bias.zero_()
        with fr.kernel(name):
            last = layer(same)[:, -1].reshape(400, 3, 5)[..., 0]  # sees all eight
            assert torch.allclose(layer.eval()(same), torch.ones(()), rtol=0, atol=1e-6)
    assert abs(float(last.mean()) - 1) < 5 * math.sqrt(p / (1 - p) / 8 / last.numel())
    assert abs(float(last.var()) - p / (1 - p) / 8) < 0.008


@pytest.mark.parametrize("mix", ["none", "position_wise"])
def test_transforms_of_functions_get_kernels_that_know_them(mix):
    """Kernels written by hand know no transforms; without one, they compute calls of 64 tokens."""
    layer = moved(fr.Attention(fr.AttentionConfig(mix=mix), hidden_size=16, num_attention_heads=2).double())
    x = torch.randn(2, 64, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    values = {name: parameter.detach() for name, parameter in layer.named_parameters()}

    def loss(values, x):
        return torch.func.functional_call(layer, values, (x[None],)).square().sum()

    for row in x:
        gradients = torch.func.grad(loss)(values, row)
        expected = torch.autograd.grad(layer(row[None]).square().sum(), list(layer.parameters()))
        torch.testing.assert_close([*gradients.values()], [*expected], rtol=1e-9, atol=1e-9)


def test_transforms_of_losses_get_the_definition():
    output = fr.LanguageModel(fr.ModelConfig(vocab_size=9, hidden_size=8, num_attention_heads=2)).output
    hidden = torch.randn(2, 5, 8, requires_grad=True)
    ids = torch.arange(10).view(2, 5) % 9
    gradient = torch.func.grad(lambda hidden: output.loss(hidden, ids)[0])(hidden.detach())
    torch.testing.assert_close(gradient, torch.autograd.grad(output.loss(hidden, ids)[0], hidden)[0])
