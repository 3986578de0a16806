"""Who sees whom."""

from dataclasses import replace

import pytest
import torch

import fullrank as fr


def picture(layout, row=0):
    return ["".join(map(".x".__getitem__, line)) for line in layout.visible()[row, 0].tolist()]


def test_padding_on_either_side():
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 0, 0]]).bool()
    layout = fr.Layout.of(4, key_mask=mask)
    assert picture(layout, 0)[2:] == ["..x.", "..xx"]
    assert picture(layout, 1) == ["x...", "xx..", "xxx.", "xx.x"]  # padding sees itself too; nobody reads what it says
    assert layout.visible().any(-1).all()
    assert not layout.plain_causal
    assert not layout.unrestricted


def test_cross():
    layout = fr.Layout.of(2, 3, causal=False)
    assert picture(layout) == ["xxx", "xxx"]
    assert layout.unrestricted
    masked = fr.Layout.of(2, 3, causal=False, key_mask=torch.tensor([[1, 0, 1], [0, 0, 0]]).bool())
    assert picture(masked, 0) == ["x.x", "x.x"]
    assert picture(masked, 1) == ["xxx", "xxx"]  # a text of nothing but padding: any finite weights do
    assert not masked.unrestricted


@pytest.mark.parametrize("kernel", ["reference", "auto"])
@pytest.mark.parametrize("normalize", ["softmax", "sigsoftmax"])
@pytest.mark.parametrize("causal", [True, False])
def test_rows_of_nothing_but_padding_give_no_nan(causal, normalize, kernel):
    attention = fr.Attention(
        fr.AttentionConfig(normalize=normalize, mix="position_wise"), hidden_size=6, num_attention_heads=2
    )
    x = torch.randn(2, 4, 6, requires_grad=True)
    mask = torch.tensor([[0, 0, 0, 0], [1, 1, 1, 1]]).bool()
    with fr.kernel(kernel):
        out = attention(x, layout=fr.Layout.of(4, causal=causal, key_mask=mask))
        out[1].sum().backward()
    assert out.isfinite().all()
    assert x.grad.isfinite().all()
    assert torch.equal(x.grad[0], torch.zeros_like(x.grad[0]))
    assert all(p.grad.isfinite().all() for p in attention.parameters() if p.grad is not None)


def test_strided_pattern():
    """Child et al. 2019, §4.3: A1 = {t, .., i} with t = max(0, i - l), A2 = {j: (i - j) mod l = 0}; a merged head sees both."""
    tokens, stride = 9, 3
    layout = replace(fr.Layout.of(tokens), stride=stride)
    for i, seen in enumerate(layout.visible()[0, 0].tolist()):
        near = set(range(max(0, i - stride), i + 1))
        far = {j for j in range(i + 1) if (i - j) % stride == 0}
        assert {j for j in range(tokens) if seen[j]} == near | far
    assert picture(layout)[-1] == "..x..xxxx"
    assert not layout.plain_causal
    assert not layout.unrestricted
    assert layout.distances == tokens  # of relative scores: the table has them all


def test_a_stride_counts_positions_with_gaps_padding_windows_and_in_both_directions():
    gap = replace(fr.Layout.from_runs(2, [(-7, 2), (-2, 4)]), stride=3)
    assert gap.key_positions.tolist() == [-7, -6, -2, -1, 0, 1]
    assert picture(gap) == [".xxxx.", "..xxxx"]  # from 0: -6, -2, -1, 0; from 1: -2, -1, 0, 1; -5 and -8 are not there
    mask = torch.tensor([[0, 1, 1, 1, 1, 1]]).bool()
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    padded = replace(fr.Layout(positions[:, 4:], positions, True, mask, farthest=4), stride=2)
    assert picture(padded) == ["..xxx.", ".x.xxx"]  # token 3 without 0, token 4 without 1
    assert picture(replace(fr.Layout.of(1, 9, window=5), stride=3)) == [".....xxxx"]
    assert picture(replace(fr.Layout.of(5, causal=False), stride=2)) == ["xxx.x", "xxxx.", "xxxxx", ".xxxx", "x.xxx"]


def test_a_model_has_weights_where_its_pattern_sees():
    model = fr.LanguageModel(fr.ModelConfig(vocab_size=11, attention={"pattern": "strided", "stride": 3}))
    trace = fr.Trace()
    model.eval()(torch.randint(11, (2, 13)), trace=trace)
    seen = replace(fr.Layout.of(13), stride=3).visible()
    assert all(torch.equal(layer.weights > 0, seen.expand_as(layer.weights)) for layer in trace.layers)
