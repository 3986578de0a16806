"""Blocks, feed-forward and output layer against their equations, and the defaults that go with them."""

import pytest
import torch

import fullrank as fr
from fullrank.core.attention import Block

E, INNER = 8, 11


def config(**changes):
    sizes = {
        "vocab_size": 13, "hidden_size": E, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": INNER,
        "position": "sinusoidal",  # added outside of the blocks, as PyTorch's layers expect
    }  # fmt: skip
    return fr.ModelConfig(**(sizes | changes))


def shaken(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.5)
    return module.double().eval()


def norm(layer, x, eps):
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * layer.weight + layer.bias


@pytest.mark.parametrize(
    ("kind", "requested", "expected"),
    [("pre", None, True), ("post", None, False), ("pre", False, False), ("post", True, True)],
)
def test_final_norm_by_default_with_pre_norm(kind, requested, expected):
    made = shaken(fr.LanguageModel(config(norm=kind, final_norm=requested, position="none")))
    assert made.config.final_norm is expected
    assert ("final_norm.weight" in made.state_dict()) is expected
    x = made.embedding.weight[torch.tensor([[1, 2, 3]])]
    for block in made.blocks:
        x = block(x, fr.Layout.of(3))
    x = norm(made.final_norm, x, 1e-5) if expected else x
    logits = x @ made.output.weight.T + made.output.bias
    assert torch.allclose(made(torch.tensor([[1, 2, 3]])).logits, logits, atol=1e-12)


@pytest.mark.parametrize("eps", [1e-5, 0.1])
def test_equals_pytorchs_encoder_layer(eps):
    """A block equals nn.TransformerEncoderLayer with a causal mask, pre- and post-norm."""
    for kind in ("pre", "post"):
        block = shaken(Block(config(norm=kind, layer_norm_eps=eps)))
        options = {"layer_norm_eps": eps, "batch_first": True, "norm_first": kind == "pre"}
        other = torch.nn.TransformerEncoderLayer(E, 2, INNER, 0.0, **options).double()
        a = other.self_attn
        project = block.attention.project
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
        x = torch.randn(2, 5, E, dtype=torch.float64)
        hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
        assert torch.allclose(block(x, fr.Layout.of(5)), other(x, src_mask=hidden), atol=1e-12)
