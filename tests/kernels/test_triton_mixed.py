"""The Triton kernels of mixed heads against the formula: on a GPU where there is one, otherwise under the interpreter."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
from computing import triton_computes
from mixed_formula import DEVICE, EXACT, check, drawn, problem
from torch import Tensor

import fullrank as fr
from fullrank.core.engine import Distances
from fullrank.kernels.triton_mixed import _intervals
from fullrank.kernels.triton_mixed import attend as triton_mixed

if sys.platform != "linux":
    pytest.importorskip("triton", reason="Triton is for Linux")


def padding(texts: int, keys: int, empty: int | None = None) -> Tensor:
    """Padding before, after and amid the tokens; text `empty` has none."""
    mask = torch.ones(texts, keys, dtype=torch.bool)
    mask[0, : keys // 3] = False
    mask[-1, keys - keys // 4 :] = False
    mask[:, keys // 2] = False
    if empty is not None:
        mask[empty] = False
    return mask


L = fr.Layout.of
CASES = {  # texts, heads, layout, size of a head, mixing, normaliser
    "one token": (2, 2, L(1), 16, "B", "softmax"),
    "one new token": (1, 8, L(1, 9), 64, "A", "softmax"),
    "nothing mixed": (2, 2, L(7, 33), 24, "none", "softmax"),
    "nothing mixed, padding": (2, 3, L(7, 9, key_mask=padding(2, 9)), 16, "none", "sigsoftmax"),
    "causal": (2, 3, L(33), 16, "A", "softmax"),
    "past": (1, 3, L(7, 40), 40, "B", "sigsoftmax"),
    "sigsoftmax": (1, 2, L(17), 24, "A", "sigsoftmax"),
    "twelve heads": (1, 12, L(7), 16, "B", "softmax"),
    "padding": (2, 2, L(18, key_mask=padding(2, 18)), 16, "B", "softmax"),
    "window": (1, 2, L(35, 70, window=9), 16, "A", "softmax"),
    "gaps and window": (1, 2, fr.Layout.of_runs(7, ((0, 12), (15, 3), (20, 30)), window=20), 16, "B", "softmax"),
    "cross": (1, 2, L(19, 5, causal=False), 16, "A", "sigsoftmax"),
    "cross and padding": (3, 2, L(5, 34, causal=False, key_mask=padding(3, 34, empty=1)), 16, "B", "softmax"),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_formula(name: str) -> None:
    batch, heads, layout, size, mixing, normalize = CASES[name]
    check(drawn(batch, heads, layout, size, mixing), layout, normalize, EXACT)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 2e-3)], ids=["bf16", "fp16"])
def test_products_of_sixteen_bits(dtype: torch.dtype, tolerance: float) -> None:
    layout = L(18, 20)
    check(drawn(1, 3, layout, 20, "B", dtype), layout, "sigsoftmax", tolerance)


def test_intervals_wherever_tensors_are_made_by_default() -> None:
    with torch.device("meta"):
        found = _intervals.__wrapped__(True, 5, 7, (0, 7), 3, torch.device("cpu"))
    first, end, _, looks, looked = (x.tolist() for x in found)
    assert list(zip(first, end, strict=True)) == [(0, 3), (1, 4), (2, 5), (3, 6), (4, 7)]
    for key, (begin, stop) in enumerate(zip(looks, looked, strict=True)):
        assert [n for n in range(5) if first[n] <= key < end[n]] == list(range(begin, stop))


def test_large_scores_do_not_overflow() -> None:
    query, keys, values, mixing = drawn(1, 2, L(9), 16, "A")
    for normalize in ("softmax", "sigsoftmax"):
        given = (query.detach().mul(60).requires_grad_(), keys, values, mixing)
        check(given, L(9), normalize, 1e-4 if DEVICE == "cpu" else 2e-3)


def test_strides_and_gradients_that_nobody_wants() -> None:
    """Heads as views of a projection (B, N, H, D), and only some gradients asked for."""
    layout = L(9)
    given = drawn(2, 2, layout, 16, "A")
    views = [x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in given[:3]]
    expected = triton_mixed(problem(given, layout))
    assert not views[0].is_contiguous()
    for asked in range(3):
        x = views[asked].requires_grad_()
        out = triton_mixed(problem((*views, given[3].detach()), layout))  # type: ignore[union-attr,arg-type]
        assert torch.equal(out, expected)
        (own,) = torch.autograd.grad(out.square().sum(), x)
        (right,) = torch.autograd.grad(expected.square().sum(), given[asked], retain_graph=True)  # type: ignore[arg-type]
        assert torch.equal(own, right)
        x.requires_grad_(False)


def test_no_look_ahead() -> None:
    layout = L(20)
    query, keys, values, mixing = (x.detach() for x in drawn(1, 2, layout, 16, "B") if x is not None)
    before = triton_mixed(problem((query, keys, values, mixing), layout))
    for changed in (keys, values):
        changed[:, :, 17:] = 100.0
    after = triton_mixed(problem((query, keys, values, mixing), layout))
    assert torch.equal(before[:, :, :17], after[:, :, :17])
    assert not torch.equal(before[:, :, 17:], after[:, :, 17:])


def test_the_same_call_gives_the_same_bits() -> None:
    layout = L(20)
    given = drawn(1, 3, layout, 16, "A")

    def once() -> list[Tensor]:
        torch.manual_seed(5)
        out = triton_mixed(problem(given, layout, p=0.3))
        return [out, *torch.autograd.grad(out.square().sum(), [x for x in given if x is not None])]

    assert all(torch.equal(a, b) for a, b in zip(once(), once(), strict=True))


def test_no_second_derivative() -> None:
    given = drawn(1, 2, L(3), 16, "A")
    out = triton_mixed(problem(given, L(3)))
    with pytest.raises(RuntimeError, match=r"no second derivative .*reference"):
        torch.autograd.grad(out.sum(), given[0], create_graph=True)


def test_what_is_left_to_others() -> None:
    layout = L(7)
    query, keys, values, _ = given = drawn(1, 2, layout, 16, "A")
    wanted = problem(given, layout)
    assert triton_computes(wanted)
    long = torch.zeros(1, 2, 7, 129, device=DEVICE)
    many = torch.zeros(1, 33, 7, 16, device=DEVICE)
    refused = [
        replace(wanted, query=query.double(), keys=keys.double(), values=values.double()),
        replace(wanted, keys=keys.half()),
        replace(wanted, query=long, keys=long, values=long),
        replace(wanted, values=values[..., :8]),
        replace(wanted, query=many, keys=many, values=many, mixing=torch.eye(33, device=DEVICE)),
        replace(wanted, query=query[:0], keys=keys[:0], values=values[:0]),
        replace(wanted, distances=Distances(torch.zeros(2, 7, 16), torch.zeros(2, 16), torch.zeros(2, 16))),
        replace(wanted, layout=L(7, causal=False, window=3)),
        replace(wanted, query=query.to("meta"), keys=keys.to("meta"), values=values.to("meta")),
    ]
    assert not any(triton_computes(other) for other in refused)
    assert triton_computes(replace(wanted, query=many, keys=many, values=many, mixing=None))
