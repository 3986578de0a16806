"""The translator beside its equations and beside PyTorch's own Transformer: outputs, and the gradients of everything."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import translator_equations as equations
from torch import Tensor, nn

from translator_models import MECHANISMS, TARGET, WIDE, WIDTH, close, padding, sentences, tokens, translator

# everything whose equation is written here; the output layers, adaptive ones and mixtures have their own tests
WRITTEN = [
    name
    for name in MECHANISMS
    if not any(word in name for word in ("synth", "decayed", "term", "mixture", "adaptive", "average"))
]
LENGTHS = [6, 1, 4]


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone().requires_grad_() for name, tensor in model.state_dict().items()}


SIDED = [  # every day each mechanism with one side; both in the full tier
    pytest.param(mechanism, side, marks=() if i % 4 == 2 * k else pytest.mark.full)
    for i, mechanism in enumerate(WRITTEN)
    for k, side in enumerate(["right", "left"])
]


@pytest.mark.parametrize(("mechanism", "side"), SIDED)
def test_outputs_and_every_gradient(mechanism: str, side: str) -> None:
    """A padded batch, its padding another token than those of the sentences, beside each sentence alone."""
    model = translator(mechanism)
    source, target = sentences(model, 3, 6, 5)
    mask = padding(LENGTHS, 6, side)
    read = parameters(model)
    found = model(source, target, mask).logits
    wanted = torch.stack(
        [
            equations.logits(model.config, read, source[row][mask[row].bool()], target[row])
            for row in range(len(LENGTHS))
        ]
    )
    close(found, wanted, "logits", 1e-9)
    cotangent = torch.randn(found.shape, dtype=WIDE, generator=torch.Generator().manual_seed(8))
    found.backward(cotangent)
    wanted.backward(cotangent)
    largest = max(float(tensor.grad.abs().max()) for tensor in read.values() if tensor.grad is not None)
    named = dict(model.named_parameters())
    assert set(named) <= set(read)
    for name, parameter in named.items():
        expected = read[name].grad
        assert parameter.grad is not None, f"no gradient for {name}"
        assert expected is not None, f"the equation does not read {name}"
        off = float((parameter.grad - expected).abs().max())
        assert off <= 1e-9 * largest, f"gradient of {name} is off by {off:.1e}"
        if "project.key.bias" not in name:  # one number added to all scores of a query matters to sigsoftmax alone
            assert float(expected.abs().max()) > 1e-9 * largest, f"the gradient of {name} is zero"


@pytest.mark.parametrize("mechanism", ["plain", "B", "sigsoftmax with B"])
def test_loss_and_nll(mechanism: str) -> None:
    """sum(w nll) / sum(w), label smoothing, and gradients of both, from log p of the equations."""
    model = translator(mechanism)
    source, target = sentences(model, 3, 6, 5)
    wanted = tokens(TARGET, 3, 5, seed=9)
    mask = padding(LENGTHS, 6, "right")
    weights = padding([5, 2, 3], 5, "right").double()
    read = parameters(model)
    logs = torch.stack(
        [equations.logits(model.config, read, source[i, :n], target[i]).log_softmax(-1) for i, n in enumerate(LENGTHS)]
    )
    nll = -logs.gather(-1, wanted[..., None])[..., 0]
    close(model.nll(source, target, wanted, mask).per_token, nll, "nll")
    expected = (nll * weights).sum() / weights.sum()
    parts = model.loss_parts(source, target, wanted, weights, mask, label_smoothing=0.1)
    close(parts.nll, expected, "nll of the loss")
    smooth = (((1 - 0.1) * nll - 0.1 * logs.mean(-1)) * weights).sum() / weights.sum()
    close(parts.loss, smooth, "loss")
    close(model.loss(source, target, wanted, weights, mask), expected, "plain loss")
    close(model.loss(source, target, wanted), model.nll(source, target, wanted).per_token.mean(), "no weights")
    parts.loss.backward()
    smooth.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        gradient = read[name].grad
        assert gradient is not None
        close(parameter.grad, gradient, name, 1e-9)


# -- PyTorch's Transformer --------------------------------------------------------------------------------------------


def copied(model: Any, norm: str) -> nn.Transformer:
    """`nn.Transformer` with the parameters of a plain translator."""
    config = model.config
    theirs = nn.Transformer(
        WIDTH, config.num_attention_heads, 2, 2, config.intermediate_size, dropout=0.0, batch_first=True,
        norm_first=norm == "pre", dtype=WIDE,
    ).eval()  # fmt: skip
    if norm == "post":  # theirs norms once more at the end
        theirs.encoder.norm = theirs.decoder.norm = None

    def attention(into: Any, ours: Any) -> None:
        layers = [getattr(ours.project, name) for name in ("query", "key", "value")]
        into.in_proj_weight.copy_(torch.cat([layer.weight for layer in layers]))
        into.in_proj_bias.copy_(torch.cat([layer.bias for layer in layers]))
        into.out_proj.load_state_dict(ours.merge.state_dict())

    with torch.no_grad():
        for part in ("encoder", "decoder"):
            half, own = getattr(theirs, part), getattr(model, part)
            for into, block in zip(half.layers, own.blocks, strict=True):
                attention(into.self_attn, block.attention)
                norms = [block.attention_norm, block.feed_forward_norm]
                if part == "decoder":
                    attention(into.multihead_attn, block.cross_attention)
                    norms.insert(1, block.cross_attention_norm)
                for number, one in enumerate(norms, 1):
                    getattr(into, f"norm{number}").load_state_dict(one.state_dict())
                into.linear1.load_state_dict(block.feed_forward.up.state_dict())
                into.linear2.load_state_dict(block.feed_forward.down.state_dict())
            if norm == "pre":
                half.norm.load_state_dict(own.final_norm.state_dict())
    return theirs


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_equals_the_transformer_of_pytorch(norm: str) -> None:
    model: Any = translator("plain", norm=norm, position="sinusoidal")  # PyTorch's layers rotate nothing
    theirs = copied(model, norm)
    source, target = sentences(model, 3, 6, 5)
    mask = padding(LENGTHS, 6, "right").bool()
    read = model.encoder.position(model.encoder.embedding(source), torch.arange(6))
    written = model.decoder.position(model.decoder.embedding(target), torch.arange(5))
    hidden = theirs(
        read, written, src_key_padding_mask=~mask, memory_key_padding_mask=~mask,
        tgt_mask=nn.Transformer.generate_square_subsequent_mask(5, dtype=WIDE),
    )  # fmt: skip
    wanted = model.decoder.output(hidden)
    found = model(source, target, mask).logits
    close(found, wanted, "logits", 1e-9)
    cotangent = torch.randn(found.shape, dtype=WIDE)
    given = dict(model.named_parameters())
    expected = dict(theirs.named_parameters())
    pairs = [
        (f"{part}.blocks.{i}.{ours}.weight", f"{part}.layers.{i}.{other}.weight")
        for i in range(2)
        for part, ours, other in (
            ("encoder", "attention.merge", "self_attn.out_proj"), ("encoder", "feed_forward.up", "linear1"),
            ("decoder", "attention.merge", "self_attn.out_proj"),
            ("decoder", "cross_attention.merge", "multihead_attn.out_proj"),
            ("decoder", "feed_forward.down", "linear2"),
        )
    ]  # fmt: skip
    ours_too = torch.autograd.grad(found, [given[name] for name, _ in pairs], cotangent)
    theirs_too = torch.autograd.grad(wanted, [expected[name] for _, name in pairs], cotangent)
    for (name, _), a, b in zip(pairs, ours_too, theirs_too, strict=True):
        close(a, b, f"gradient of {name}", 1e-9)
    for i in range(2):  # query, key and value of cross-attention, packed there
        packed = expected[f"decoder.layers.{i}.multihead_attn.in_proj_weight"]
        (b,) = torch.autograd.grad(
            model.decoder.output(theirs(read, written, src_key_padding_mask=~mask, memory_key_padding_mask=~mask,
                                        tgt_mask=nn.Transformer.generate_square_subsequent_mask(5, dtype=WIDE))),
            packed, cotangent,
        )  # fmt: skip
        names = [f"decoder.blocks.{i}.cross_attention.project.{part}.weight" for part in ("query", "key", "value")]
        a = torch.autograd.grad(model(source, target, mask).logits, [given[name] for name in names], cotangent)
        close(torch.cat(a), b, f"gradients of cross-attention {i}", 1e-9)
