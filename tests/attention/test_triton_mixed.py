"""The Triton kernels of mixed heads against the formula: on a GPU where there is one, otherwise under the interpreter."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fullrank as fr
from fullrank.attention.kernels.pipeline import Distances, Pipeline
from fullrank.attention.kernels.triton_mixed import triton_computes, triton_mixed

if sys.platform != "linux":
    pytest.importorskip("triton", reason="Triton is for Linux")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Given = tuple[Tensor, Tensor, Tensor, Tensor | None]


def padding(texts: int, keys: int, empty: int | None = None) -> Tensor:
    """Padding before, after and amid the tokens; text `empty` has none."""
    mask = torch.ones(texts, keys, dtype=torch.bool)
    mask[0, : keys // 3] = False
    mask[-1, keys - keys // 4 :] = False
    mask[:, keys // 2] = False
    if empty is not None:
        mask[empty] = False
    return mask


def drawn(
    batch: int, heads: int, layout: fr.Layout, size: int, mixing: str, dtype: torch.dtype = torch.float32
) -> Given:
    """query, keys, values and M, which need gradients."""
    (queries, keys), generator = layout.shape, torch.Generator().manual_seed(7)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    shapes = {"none": None, "A": (heads, heads), "B": (batch, queries, heads, heads)}
    given = [normal(batch, heads, n, size).to(DEVICE, dtype).requires_grad_() for n in (queries, keys, keys)]
    shape = shapes[mixing]
    matrix = None if shape is None else normal(*shape).to(DEVICE, torch.float32).requires_grad_()
    return given[0], given[1], given[2], matrix


def pipeline(given: Given, layout: fr.Layout, normalize: str = "softmax", p: float = 0.0) -> Pipeline:
    return Pipeline(*given, None, layout, 0.3, normalize, p)  # type: ignore[arg-type]


def formula(given: Given, layout: fr.Layout, normalize: str, kept: Tensor | None = None) -> Tensor:
    """All weights at once, in double precision."""
    query, keys, values, mixing = given
    scores = 0.3 * (query @ keys.transpose(-1, -2))
    if normalize == "sigsoftmax":
        scores = scores + F.logsigmoid(scores)
    weights = torch.softmax(scores.masked_fill(~layout.visible().to(DEVICE), -torch.inf), -1)
    if mixing is not None:
        matrix = mixing if mixing.dim() == 4 else mixing.expand(weights.shape[0], weights.shape[2], -1, -1)
        weights = (matrix.permute(0, 2, 3, 1)[..., None] * weights[:, :, None]).sum(1)
    return (weights if kept is None else weights * kept) @ values


def check(
    given: Given, layout: fr.Layout, normalize: str, tolerance: float, p: float = 0.0, kept: Tensor | None = None
) -> None:
    """Output and all gradients under a random cotangent."""
    asked = [tensor for tensor in given if tensor is not None]
    wanted = pipeline(given, layout, normalize, p)
    assert triton_computes(wanted)
    out = triton_mixed(wanted)
    assert out.dtype == given[2].dtype
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out)
    found = [out, *torch.autograd.grad(out, asked, cotangent)]
    wide = [tensor.detach().double().requires_grad_() for tensor in asked]
    exact = formula((*wide, None)[:4] if len(wide) == 3 else tuple(wide), layout, normalize, kept)  # type: ignore[arg-type]
    expected = [exact, *torch.autograd.grad(exact, wide, cotangent.double())]
    for name, own, right in zip(("output", "query", "keys", "values", "mixing"), found, expected, strict=False):
        assert own.isfinite().all(), name
        off = float((own.double() - right).detach().abs().max() / right.detach().abs().max().clamp(min=1.0))
        assert off <= tolerance, f"{name} is off by {off:.1e} of its largest number or of 1"


EXACT = 2e-6 if DEVICE == "cpu" else 5e-6  # of fp32
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
    expected = triton_mixed(pipeline(given, layout))
    assert not views[0].is_contiguous()
    for asked in range(3):
        x = views[asked].requires_grad_()
        out = triton_mixed(pipeline((*views, given[3].detach()), layout))  # type: ignore[union-attr,arg-type]
        assert torch.equal(out, expected)
        (own,) = torch.autograd.grad(out.square().sum(), x)
        (right,) = torch.autograd.grad(expected.square().sum(), given[asked], retain_graph=True)  # type: ignore[arg-type]
        assert torch.equal(own, right)
        x.requires_grad_(False)


def test_no_look_ahead() -> None:
    layout = L(20)
    query, keys, values, mixing = (x.detach() for x in drawn(1, 2, layout, 16, "B") if x is not None)
    before = triton_mixed(pipeline((query, keys, values, mixing), layout))
    for changed in (keys, values):
        changed[:, :, 17:] = 100.0
    after = triton_mixed(pipeline((query, keys, values, mixing), layout))
    assert torch.equal(before[:, :, :17], after[:, :, :17])
    assert not torch.equal(before[:, :, 17:], after[:, :, 17:])


def test_the_same_call_gives_the_same_bits() -> None:
    layout = L(20)
    given = drawn(1, 3, layout, 16, "A")

    def once() -> list[Tensor]:
        torch.manual_seed(5)
        out = triton_mixed(pipeline(given, layout, p=0.3))
        return [out, *torch.autograd.grad(out.square().sum(), [x for x in given if x is not None])]

    assert all(torch.equal(a, b) for a, b in zip(once(), once(), strict=True))


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU chooses its groups itself")
def test_groups_of_heads_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of four, for which dropout draws once, and groups with a rest."""
    from fullrank.attention.kernels import triton_blocks

    given = drawn(1, 8, L(5), 16, "B")

    def once() -> list[Tensor]:
        torch.manual_seed(5)
        out = triton_mixed(pipeline(given, L(5), p=0.4))
        return [out, *torch.autograd.grad(out.square().sum(), [x for x in given if x is not None])]

    expected = once()
    monkeypatch.setattr(triton_blocks, "INTERPRETED", {**triton_blocks.INTERPRETED, "G": 5, "GJ": 8})
    for own, right in zip(once(), expected, strict=True):
        assert (own - right).abs().max() < 1e-5


def shown_mask(batch: int, heads: int, layout: fr.Layout, size: int, mixing: str, p: float) -> Tensor:
    """What dropout multiplies mixed weights by, read off values that are one-hot; keys at most as many as a head is large."""
    query, keys, values, matrix = drawn(batch, heads, layout, size, mixing)
    one_hot = torch.eye(size, device=DEVICE)[: layout.shape[1]].expand_as(values)
    matrix = None if matrix is None else matrix.detach().abs() + 0.1
    given = (torch.zeros_like(query), keys, one_hot, matrix)
    whole, dropped = (triton_mixed(pipeline(given, layout, p=some)) for some in (0.0, p))
    seen = layout.visible().to(DEVICE).expand(batch, heads, -1, -1)
    ratio = (dropped / whole.where(whole != 0, 1))[..., : layout.shape[1]]
    return torch.where(seen, ratio, torch.ones_like(ratio))


@pytest.mark.parametrize("mixing", ["none", "B"])
def test_backward_drops_what_forward_dropped(mixing: str) -> None:
    """Five heads: two draws of four, and several groups of heads."""
    layout, p = L(9, 17), 0.4
    torch.manual_seed(11)
    torch.rand(())
    state = torch.get_rng_state() if DEVICE == "cpu" else torch.cuda.get_rng_state()
    kept = shown_mask(1, 5, layout, 20, mixing, p).double()
    assert (kept.isclose(torch.tensor(1 / (1 - p), dtype=kept.dtype)) | (kept == 0) | (kept == 1)).all()
    assert (kept == 0).any()
    torch.set_rng_state(state) if DEVICE == "cpu" else torch.cuda.set_rng_state(state)
    check(drawn(1, 5, layout, 20, mixing), layout, "softmax", EXACT, p, kept)


def test_dropout_has_its_distribution() -> None:
    """Share of dropped weights, and no connection between heads, texts, queries or keys."""
    p, layout = 0.3, L(32, 64, causal=False)
    kept = (shown_mask(2, 5, layout, 64, "A", p) > 0).double()
    deviation = math.sqrt(p * (1 - p))
    assert abs(float(kept.mean()) - (1 - p)) < 5 * deviation / math.sqrt(kept.numel())
    centred = (kept - (1 - p)) / deviation
    for head in range(1, 5):
        together = float((centred[:, 0] * centred[:, head]).mean())
        assert abs(together) < 5 / math.sqrt(2 * 32 * 64), head
    for dim in (0, 2, 3):
        together = float((centred * centred.roll(1, dim)).mean())
        assert abs(together) < 5 / math.sqrt(centred.numel() / 2), dim


def test_an_output_without_dropout_is_the_mean() -> None:
    """1 / (1 - p) makes up for what is dropped: with values of one and weights of one an output is 1 on average."""
    layout, p = L(16, 64, causal=False), 0.25
    query, keys, values, _ = (x if x is None else torch.zeros_like(x) for x in drawn(4, 4, layout, 16, "none"))
    out = triton_mixed(pipeline((query, keys, values + 1, None), layout, p=p))[..., 0]  # type: ignore[operator,arg-type]
    variance = p / (1 - p) / 64
    assert abs(float(out.mean()) - 1) < 5 * math.sqrt(variance / out.numel())
    assert abs(float(out.var()) - variance) < 5 * variance * math.sqrt(2 / out.numel())


def test_no_second_derivative() -> None:
    given = drawn(1, 2, L(3), 16, "A")
    out = triton_mixed(pipeline(given, L(3)))
    with pytest.raises(RuntimeError, match=r"no second derivative .*reference"):
        torch.autograd.grad(out.sum(), given[0], create_graph=True)


def test_what_is_left_to_others() -> None:
    layout = L(7)
    query, keys, values, _ = given = drawn(1, 2, layout, 16, "A")
    wanted = pipeline(given, layout)
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


@pytest.mark.cuda
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mixing", ["none", "A", "B"])
@pytest.mark.parametrize(("heads", "size"), [(8, 64), (3, 24), (10, 41), (16, 128), (32, 16)])
def test_real_sizes_on_a_gpu(heads: int, size: int, mixing: str, dtype: torch.dtype) -> None:
    layout = L(203, 331)
    tolerance = {torch.float32: EXACT, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    check(drawn(2, heads, layout, size, mixing, dtype), layout, "softmax", tolerance)


@pytest.mark.cuda
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_memory_grows_with_the_length() -> None:
    """Four times the tokens take four times the memory, within a tenth; weights would take sixteen times."""
    found = []
    for length in (2048, 8192):
        given = drawn(1, 8, L(length), 64, "A", torch.bfloat16)
        for _ in range(2):  # the first call tries block sizes
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            triton_mixed(pipeline(given, L(length))).square().sum().backward()
            torch.cuda.synchronize()
        found.append(torch.cuda.max_memory_allocated() - before)
    assert found[1] < 4.4 * found[0]


@pytest.mark.parametrize("mixing", ["A", "B"])
def test_one_graph_when_compiled(mixing: str) -> None:
    layout = L(9)
    given = drawn(1, 2, layout, 16, mixing)
    asked = [x for x in given if x is not None]

    def attend(query: Tensor, keys: Tensor, values: Tensor, matrix: Tensor) -> Tensor:
        return triton_mixed(pipeline((query + 1, keys, values, matrix), layout)) * 2

    expected = attend(*given)  # type: ignore[arg-type]
    found = torch.compile(attend, fullgraph=True, backend="aot_eager")(*given)
    assert torch.equal(found, expected)
    for a, b in zip(*(torch.autograd.grad(o.square().sum(), asked) for o in (found, expected)), strict=True):
        assert torch.equal(a, b)


def test_block_sizes_for_every_number_and_size_of_heads() -> None:
    """Something is tried everywhere, within the shared memory of an H200, and no group is empty."""
    from fullrank.attention.kernels.triton_blocks import KERNELS, choices

    for name in KERNELS:
        for heads in (1, 2, 3, 7, 8, 10, 12, 16, 31, 32):
            for width in (16, 32, 64, 128):
                for size, precision in ((2, "ieee"), (4, "tf32"), (4, "tf32x3")):
                    found = choices(name, heads, width, size, precision, 232_448)
                    assert 1 <= len(found) <= 4, (name, heads, width, size, precision)
                    for sizes, warps, _ in found:
                        assert warps in (4, 8)
                        for group in (sizes.get("G", 1), sizes.get("GJ", 1)):
                            assert 1 <= group <= heads
                            assert (-(-heads // group) - 1) * group < heads


def test_compiles_for_a_gpu(tmp_path: Path) -> None:
    """Every kernel becomes machine code of an H200, with its first choice of block sizes; no GPU is needed for that."""
    script = Path(__file__).with_name("compile_triton.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr
    assert len(ran.stdout.splitlines()) == 6, ran.stdout
