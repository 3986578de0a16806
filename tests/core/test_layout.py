"""Who sees whom."""

from __future__ import annotations

import pytest
import torch

import fullrank as fr


def picture(layout: fr.Layout, row: int = 0) -> list[str]:
    return ["".join(".x"[int(seen)] for seen in line) for line in layout.visible()[row, 0].tolist()]


def test_causal() -> None:
    layout = fr.Layout.of(4)
    assert picture(layout) == ["x...", "xx..", "xxx.", "xxxx"]
    assert layout.shape == (4, 4)
    assert layout.plain_causal
    assert not layout.unrestricted
    assert layout.query_positions.tolist() == layout.key_positions.tolist() == [0, 1, 2, 3]


def test_reach() -> None:
    """The smallest and greatest distance of a pair that is seen."""
    assert fr.Layout.of(4).reach == (0, 3)
    assert fr.Layout.of(2, 5).reach == (0, 4)
    assert fr.Layout.of(2, 5, causal=False).reach == (-1, 4)
    assert fr.Layout.of(5, 2, causal=False).reach == (-4, 1)
    gap = torch.tensor([0, 7])
    assert fr.Layout(gap, gap, farthest=7).reach == (0, 7)
    assert fr.Layout(gap, gap, farthest=7).distances == 8
    assert fr.Layout.of(4).contiguous
    assert not fr.Layout(gap, gap).contiguous
    for queries, keys in ((4, 4), (2, 5), (5, 2)):
        layout = fr.Layout.of(queries, keys, causal=False)
        apart = layout.query_positions[:, None] - layout.key_positions
        assert (int(apart.min()), int(apart.max())) == layout.reach


def test_causal_with_past() -> None:
    layout = fr.Layout.of(2, 5)
    assert picture(layout) == ["xxxx.", "xxxxx"]
    assert layout.query_positions.tolist() == [3, 4]
    assert not layout.plain_causal  # a fused kernel would align the first query with the first key
    assert not layout.unrestricted


def test_one_new_token_sees_everything() -> None:
    layout = fr.Layout.of(1, 5)
    assert picture(layout) == ["xxxxx"]
    assert layout.unrestricted


def test_padding_on_either_side() -> None:
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 0, 0]]).bool()
    layout = fr.Layout.of(4, key_mask=mask)
    assert picture(layout, 0)[2:] == ["..x.", "..xx"]
    assert picture(layout, 1) == ["x...", "xx..", "xxx.", "xx.x"]  # padding sees itself too; nobody reads what it says
    assert layout.visible().any(-1).all()
    assert not layout.plain_causal
    assert not layout.unrestricted


def test_past_and_padding() -> None:
    layout = fr.Layout.of(2, 4, key_mask=torch.tensor([[0, 1, 1, 1]]).bool())
    assert picture(layout) == [".xx.", ".xxx"]


def test_cross() -> None:
    layout = fr.Layout.of(2, 3, causal=False)
    assert picture(layout) == ["xxx", "xxx"]
    assert layout.unrestricted
    masked = fr.Layout.of(2, 3, causal=False, key_mask=torch.tensor([[1, 0, 1], [0, 0, 0]]).bool())
    assert picture(masked, 0) == ["x.x", "x.x"]
    assert picture(masked, 1) == ["xxx", "xxx"]  # a text of nothing but padding: any finite weights do
    assert not masked.unrestricted


def test_cross_with_more_queries_than_keys() -> None:
    layout = fr.Layout.of(5, 2, causal=False)
    assert layout.shape == (5, 2)
    assert layout.visible().shape == (1, 1, 5, 2)
    with pytest.raises(ValueError, match="5 queries over 2 keys"):
        fr.Layout.of(5, 2)


@pytest.mark.parametrize("kernel", ["reference", "auto"])
@pytest.mark.parametrize("normalize", ["softmax", "sigsoftmax"])
@pytest.mark.parametrize("causal", [True, False])
def test_rows_of_nothing_but_padding_give_no_nan(causal: bool, normalize: str, kernel: str) -> None:
    attention = fr.Attention(
        fr.AttentionConfig(normalize=normalize, mix="position_wise"), hidden_size=6, num_attention_heads=2
    )
    x = torch.randn(2, 4, 6, requires_grad=True)
    mask = torch.tensor([[0, 0, 0, 0], [1, 1, 1, 1]]).bool()
    with fr.kernel(kernel):
        out = attention(x, layout=fr.Layout.of(4, causal=causal, key_mask=mask))
        out[1].sum().backward()
    assert out.isfinite().all()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert torch.equal(x.grad[0], torch.zeros_like(x.grad[0]))
    assert all(p.grad.isfinite().all() for p in attention.parameters() if p.grad is not None)
