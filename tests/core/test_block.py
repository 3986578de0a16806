"""Blocks, feed-forward and output layer against their equations, and the defaults that go with them."""

import math

import pytest
import torch

import fullrank as fr
from fullrank.core.attention import Block, FeedForward

E, INNER = 8, 11


def config(**changes):
    sizes = {
        "vocab_size": 13,
        "hidden_size": E,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": INNER,
        "position": "sinusoidal",  # added outside of the blocks, as PyTorch's layers expect
    }
    return fr.ModelConfig(**(sizes | changes))


def shaken(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.5)
    return module.double().eval()


def norm(layer, x, eps):
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * layer.weight + layer.bias


def test_activations():
    x = torch.randn(3, E, dtype=torch.float64)
    for name, act in (
        ("relu", lambda u: u.clamp_min(0)),
        ("gelu", lambda u: u * 0.5 * (1 + torch.erf(u / math.sqrt(2)))),
        ("swiglu", lambda u: u[..., :INNER] / (1 + torch.exp(-u[..., :INNER])) * u[..., INNER:]),
    ):
        layer = shaken(FeedForward(config(hidden_act=name)))
        up = x @ layer.up.weight.T + layer.up.bias
        assert torch.allclose(layer(x), act(up) @ layer.down.weight.T + layer.down.bias, atol=1e-12), name


@pytest.mark.parametrize(
    ("kind", "given", "expected"),
    [("pre", None, True), ("post", None, False), ("pre", False, False), ("post", True, True)],
)
def test_final_norm_by_default_with_pre_norm(kind, given, expected):
    made = shaken(fr.LanguageModel(config(norm=kind, final_norm=given, position="none")))
    assert made.config.final_norm is expected
    assert ("final_norm.weight" in made.state_dict()) is expected
    x = made.embedding.weight[torch.tensor([[1, 2, 3]])]
    for block in made.blocks:
        x = block(x, fr.Layout.of(3))
    x = norm(made.final_norm, x, 1e-5) if expected else x
    logits = x @ made.output.weight.T + made.output.bias
    assert torch.allclose(made(torch.tensor([[1, 2, 3]])).logits, logits, atol=1e-12)


def test_tied_weights_get_both_gradients():
    """The embedding's gradient is that through the input plus that through the output."""
    tied = shaken(fr.LanguageModel(config(output=fr.OutputConfig(tied=True))))
    free = fr.LanguageModel(config(output=fr.OutputConfig(bias=False))).double().eval()
    free.load_state_dict(tied.state_dict() | {"output.weight": tied.embedding.weight.detach().clone()})
    read, targets = torch.randint(13, (2, 4)), torch.randint(13, (2, 4))
    for made in (tied, free):
        made.loss(read, targets).backward()
    assert torch.allclose(tied.embedding.weight.grad, free.embedding.weight.grad + free.output.weight.grad, atol=1e-13)
    assert free.output.weight.grad.abs().max() > 1e-3
    assert free.embedding.weight.grad.abs().max() > 1e-3


@pytest.mark.parametrize("eps", [1e-5, 0.1])
def test_equals_pytorchs_encoder_layer(eps):
    """A block equals nn.TransformerEncoderLayer with a causal mask, pre- and post-norm."""
    for kind in ("pre", "post"):
        block = shaken(Block(config(norm=kind, layer_norm_eps=eps)))
        options = {"layer_norm_eps": eps, "batch_first": True, "norm_first": kind == "pre"}
        other = torch.nn.TransformerEncoderLayer(E, 2, INNER, 0.0, **options).double()
        a, project = other.self_attn, block.attention.project
        layers = (project.query, project.key, project.value)
        with torch.no_grad():
            a.in_proj_weight.copy_(torch.cat([layer.weight for layer in layers]))
            a.in_proj_bias.copy_(torch.cat([layer.bias for layer in layers]))
        for theirs, ours in (
            (a.out_proj, block.attention.merge),
            (other.linear1, block.feed_forward.up), (other.linear2, block.feed_forward.down),
            (other.norm1, block.attention_norm), (other.norm2, block.feed_forward_norm),
        ):  # fmt: skip
            theirs.load_state_dict(ours.state_dict())
        x, hidden = torch.randn(2, 5, E, dtype=torch.float64), torch.ones(5, 5, dtype=torch.bool).triu(1)
        assert torch.allclose(block(x, fr.Layout.of(5)), other(x, src_mask=hidden), atol=1e-12)
