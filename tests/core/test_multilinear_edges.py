"""Multi-linear attention where callers go to the edge: texts continued over gaps, no tokens, other precisions and devices."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from multilinear_equations import WIDE, E, R, agree, decayed_equation, distances, layer, tokens

import fullrank as fr
from fullrank.core.errors import ConfigError, InputError
from fullrank.core.project import Heads
from fullrank.kernels.multilinear_decayed import decayed_multilinear


def test_decayed_sums_are_continued_over_a_gap() -> None:
    """What a text leaves out between two pieces counts as distance, as in one pass; a window cannot be taken out of sums."""
    module, source = layer(output_map="decayed", decays=3), tokens(2, 9)
    layout = fr.Layout.of_runs(4, ((0, 2), (4, 3), (9, 4)))
    past: Any = module.continued(source[:, :2], module.past(), fr.Layout.of(2))[1]
    past = module.continued(source[:, 2:5], past, fr.Layout.of_runs(3, ((0, 2), (4, 3))))[1]
    out, after = module.continued(source[:, 5:], past, layout)
    apart, seen = distances([9, 10, 11, 12], [0, 1, 4, 5, 6, 9, 10, 11, 12])
    agree(module, out, decayed_equation(module, source[:, 5:], apart, seen, source), [source])
    assert after.length == 9
    for refused in (fr.Layout.of(4, 9, window=3), fr.Layout.of(4, 9, causal=False)):
        with pytest.raises(InputError, match="causal layout without window"):
            module.continued(source[:, 5:], past, refused)


def test_sums_of_another_precision_are_read_in_that_of_the_tokens() -> None:
    module, x = layer(output_map="decayed", decays=3), tokens(2, 6)
    narrow = deepcopy(module).float()
    past = narrow.continued(x[:, :4].float(), narrow.past(), fr.Layout.of(4))[1]
    out, after = module.continued(x[:, 4:], past, fr.Layout.of(2, 6))
    assert (out.dtype, after.keys.dtype) == (WIDE, WIDE)
    torch.testing.assert_close(out, module(x)[:, 4:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("output_map", ["pairs", "decayed"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("rows", "count"), [(2, 0), (0, 3), (0, 0)])
def test_no_tokens_and_no_texts(rows: int, count: int, causal: bool, output_map: str) -> None:
    module, x = layer(output_map=output_map), tokens(rows, count)
    out = module(x, layout=fr.Layout.of(count, causal=causal))
    assert out.shape == (rows, count, E)
    out.sum().backward()  # a rank of several processes may have no text


def test_decayed_sums_on_the_meta_device() -> None:
    """Padding and layouts both ways too, which go by distances."""
    with torch.device("meta"):
        module = fr.MultiLinearAttention(hidden_size=E, rank=R, output_map="decayed")
        x, mask = torch.zeros(2, 7, E), torch.ones(2, 7, dtype=torch.bool)
        for layout in (fr.Layout.of(7, causal=False), fr.Layout.of(7, key_mask=mask)):
            out = module(x, layout=layout)
            assert out.is_meta
            assert out.shape == (2, 7, E)


@pytest.mark.parametrize("wrong", [0, -3, 2.5])
def test_positions_are_a_positive_whole_number(wrong: Any) -> None:
    for config in ({"kind": "multilinear"}, {"score": "random_synthesizer"}):
        with pytest.raises(ConfigError, match=r"max_position_embeddings: a positive whole number"):
            fr.Attention(
                fr.AttentionConfig(**config), hidden_size=E, num_attention_heads=2, max_position_embeddings=wrong
            )


def test_gradient_of_a_narrow_output_map_over_many_chunks() -> None:
    """Summed wide: in bf16 a sum of ones ends at 256."""
    count = 8192
    ones = torch.ones(1, count, 1)
    weight = torch.ones(1, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    logs = (torch.tensor([-30.0]), torch.tensor([-30.0]))
    out = decayed_multilinear(ones, ones, ones, torch.ones(1, 1), logs, weight)[0]
    out.backward(torch.ones_like(out))
    assert weight.grad is not None
    assert weight.grad.dtype == torch.bfloat16
    assert float(weight.grad) == count


@pytest.mark.parametrize("output_map", ["pairs", "decayed"])
@pytest.mark.parametrize("count", [9, 80])
def test_a_backward_pass_has_the_precision_of_its_forward_pass(count: int, output_map: str) -> None:
    """Also where it is called while autocast is on."""
    module = layer(output_map=output_map, max_position_embeddings=80).float()
    x = tokens(2, count).detach().float()

    def gradients(autocast: bool) -> tuple[torch.Tensor, ...]:
        heads = [torch.nn.functional.linear(x, module.project.query.weight).detach().requires_grad_() for _ in range(3)]
        out = module.attend(Heads(None, *(h[:, None] for h in heads)), fr.Layout.of(count))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return torch.autograd.grad(out.square().sum(), heads)

    for a, b in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_positions_before_the_text_have_no_rows() -> None:
    """As the labels of `gaps: drifting` may say of a memory."""
    layer = fr.MultiLinearAttention(hidden_size=6, rank=3, max_position_embeddings=9)
    layout = fr.Layout.of_runs(2, [(-3, 2), (0, 2)])
    with pytest.raises(InputError, match=r"position before the text.*gaps: true"):
        layer.continued(torch.randn(1, 2, 6), None, layout, source=torch.randn(1, 4, 6))


def test_one_decay_starts_in_the_middle() -> None:
    layer = fr.MultiLinearAttention(hidden_size=6, rank=3, output_map="decayed", decays=1)
    for decay in (d.detach() for d in (layer.attend.decayed.key_decay, layer.attend.decayed.value_decay)):
        assert 7.9 < float(1 / (1 - torch.sigmoid(decay))) < 8.2  # tokens, the geometric mean of 1 and 64
