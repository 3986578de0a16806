"""Every kernel computes what `reference` computes: outputs and all gradients under a random cotangent, at odd sizes."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import combinations
import pytest
import torch
from torch import Tensor

import fullrank as fr
from fullrank import kernels
from fullrank.core.attention import WeightedValues
from fullrank.core.errors import InputError
from fullrank.core.project import Heads
from fullrank.core.stage import HeadSize
from fullrank.kernels import KERNELS
from moving import moved

H, D = 3, 5
STAGES = list(itertools.product(*(combinations.slots()[slot] for slot in ("score", "normalize", "mix"))))
FAST = [name for name in KERNELS if name not in ("reference", "triton")]  # the last: test_triton_equals_reference


def layout(name: str) -> fr.Layout:
    """Seven queries (or one) after four past keys, or none, at their places; two texts."""
    padded = torch.ones(2, 11, dtype=torch.bool)
    padded[0, :3] = False
    padded[1, 9:] = False
    nothing = padded.clone()
    nothing[1] = False
    match name:
        case "causal":
            return fr.Layout.of(7)
        case "past":
            return fr.Layout.of(7, 11)
        case "one new token":
            return fr.Layout.of(1, 11)
        case "padding":
            return fr.Layout.of(7, key_mask=padded[:, 2:9])
        case "past and padding":
            return fr.Layout.of(7, 11, key_mask=padded)
        case "only padding":
            return fr.Layout.of(7, 11, key_mask=nothing)
        case "gaps":
            return fr.Layout.of_runs(7, ((0, 2), (4, 1), (8, 8)))
        case "window":
            return fr.Layout.of(7, 11, window=4)
        case "gaps and window":
            return fr.Layout.of_runs(7, ((0, 2), (4, 1), (7, 8)), window=6)
        case "cross":
            return fr.Layout.of(7, 11, causal=False)
        case "cross, more queries":
            return fr.Layout.of(7, 3, causal=False)
        case _:
            return fr.Layout.of(7, 11, causal=False, key_mask=nothing)


LAYOUTS = ["causal", "past", "one new token", "padding", "past and padding", "only padding", "gaps", "window",
           "gaps and window", "cross", "cross, more queries", "cross and padding"]  # fmt: skip


def run(attend: WeightedValues, where: fr.Layout, kernel: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Output and gradients by name."""
    queries, keys = where.shape
    torch.manual_seed(8)
    shapes = {"query": (2, H, queries, D), "scored": (2, H, queries, D), "keys": (2, H, keys, D), "values": (2, H, keys, D),
              "relative": (H, where.distances, D)}  # fmt: skip
    read = {"values", *attend.needs.score, *attend.needs.mix}
    given = {
        name: torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_()
        for name, shape in shapes.items()
        if name in read
    }
    attend.zero_grad()
    with fr.kernel(kernel):
        out = attend(Heads(**{name: given.get(name) for name in shapes}), where)
    cotangent = torch.randn(out.shape, dtype=torch.float64).to(dtype)
    out.backward(cotangent)
    found = {"output": out.detach()}
    found |= {f"gradient of {name}": x.grad for name, x in (given | dict(attend.named_parameters())).items()}
    return {name: torch.zeros(()) if tensor is None else tensor for name, tensor in found.items()}


def refuses(kernel: str, attend: WeightedValues) -> bool:
    """Whether the kernel does not compute these stages; test_kernels_compute_what_they_are_for says which ones it must."""
    where = layout("causal")
    heads = Heads(*(torch.zeros(2, H, 7, D) for _ in range(4)), torch.zeros(H, where.distances, D))
    try:
        with fr.kernel(kernel):
            kernels.attend(attend.problem(heads, where, attend.mix.matrix(heads.query)))
    except InputError:
        return True
    return False


@pytest.mark.parametrize("kernel", [*FAST, "auto"])
@pytest.mark.parametrize("where", LAYOUTS)
@pytest.mark.parametrize("stages", STAGES, ids="-".join)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_equals_reference(stages: tuple[str, str, str], where: str, kernel: str, dtype: torch.dtype) -> None:
    score, normalize, mix = stages
    config = fr.AttentionConfig(score=score, normalize=normalize, mix=mix)
    attend = moved(WeightedValues(config, HeadSize(H, D, 17, 16), 0.0).to(dtype))
    if refuses(kernel, attend):
        return
    fast = run(attend, layout(where), kernel, dtype)
    for name, expected in run(attend, layout(where), "reference", dtype).items():
        assert fast[name].isfinite().all(), f"{name} is not finite"
        off = float((fast[name] - expected).abs().max())
        scale = max(1.0, float(expected.abs().max()))
        assert off <= (1e-6 if dtype == torch.float32 else 1e-13) * scale, f"{kernel}: {name} is off by {off:.1e}"


POSITION_TERM = {**combinations.MULTILINEAR, "score": "relative"}


@pytest.mark.parametrize("kernel", ["multilinear", "auto"])
@pytest.mark.parametrize("where", LAYOUTS)
@pytest.mark.parametrize(
    "way", [*combinations.ATTENDS.values(), POSITION_TERM], ids=[*combinations.ATTENDS, "position term"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_multilinear_equals_reference(way: dict[str, Any], where: str, kernel: str, dtype: torch.dtype) -> None:
    def computed(kernel: str) -> dict[str, Tensor]:
        torch.manual_seed(3)
        attention = fr.Attention(fr.AttentionConfig(**way), hidden_size=17, max_position_embeddings=16)
        attend = moved(attention.attend.to(dtype))
        queries, keys = layout(where).shape
        generator = torch.Generator().manual_seed(8)
        given = [torch.randn(2, 1, n, 5, generator=generator).to(dtype).requires_grad_() for n in (queries, keys, keys)]
        with fr.kernel(kernel):
            out = attend(Heads(given[0], *given), layout(where))
        out.backward(torch.randn(out.shape, generator=generator).to(dtype))
        found = {"output": out.detach()} | {f"input {i}": x.grad for i, x in enumerate(given)}
        found |= {name: parameter.grad for name, parameter in attend.named_parameters()}
        return {name: torch.zeros(()) if tensor is None else tensor for name, tensor in found.items()}

    fast = computed(kernel)
    for name, expected in computed("reference").items():
        assert fast[name].isfinite().all(), f"{name} is not finite"
        off, scale = float((fast[name] - expected).abs().max()), max(1.0, float(expected.abs().max()))
        assert off <= (2e-6 if dtype == torch.float32 else 1e-13) * scale, f"{name} is off by {off:.1e}"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the tests marked cuda run the compiled kernels")
@pytest.mark.parametrize("where", LAYOUTS)
@pytest.mark.parametrize("stages", [stages for stages in STAGES if stages[0] == "dot_product"], ids="-".join)
def test_triton_equals_reference(stages: tuple[str, str, str], where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter; the fp32 kernels beside the reference in fp64."""
    pytest.importorskip("triton")
    score, normalize, mix = stages
    config = fr.AttentionConfig(score=score, normalize=normalize, mix=mix)
    attend = moved(WeightedValues(config, HeadSize(H, D, 17, 16), 0.0))
    expected = run(copy.deepcopy(attend).double(), layout(where), "reference", torch.float64)
    computed = []
    monkeypatch.setattr(
        kernels, "_fastest", lambda problem: computed.append(KERNELS["triton"].reason(problem) is None) or "triton"
    )
    found = run(attend, layout(where), "auto", torch.float32)
    assert computed == [True]
    for name, wanted in expected.items():
        off, scale = float((found[name] - wanted).abs().max()), max(1.0, float(wanted.abs().max()))
        assert off <= 1e-6 * scale, f"{name} is off by {off:.1e}"


def test_kernels_compute_what_they_are_for() -> None:
    """Otherwise the comparison above would compare nothing, or the reference with itself."""
    for score, normalize, mix in STAGES:
        config = fr.AttentionConfig(score=score, normalize=normalize, mix=mix)
        attend = WeightedValues(config, HeadSize(H, D, 17, 16), 0.0)
        computed = {kernel for kernel in FAST if not refuses(kernel, attend)}
        expected = set() if "synthesizer" in score else {"native", "blocks"}
        if (score, normalize, mix) == ("dot_product", "softmax", "none"):
            expected.add("sdpa")
        assert computed == expected, (score, normalize, mix)


def test_dropout_of_weights_has_the_same_distribution_in_every_kernel() -> None:
    """With every value 1 an output is the sum of the kept weights: mean 1 and, over 8 equal weights, variance p/(1-p)/8."""
    p = 0.25
    same = torch.zeros(400, H, 8, D)
    for name in ("reference", *FAST):
        attend = WeightedValues(fr.AttentionConfig(), HeadSize(H, D, 17, 16), p).train()
        heads = Heads(same, same, same, same + 1, torch.zeros(H, 8, D))
        with fr.kernel(name):
            last = attend(heads, fr.Layout.of(8))[:, :, -1, 0].detach()  # sees all eight
            assert torch.equal(attend.eval()(heads, fr.Layout.of(8)), same + 1), name
        assert abs(float(last.mean()) - 1) < 5 * math.sqrt(p / (1 - p) / 8 / last.numel()), name
        assert abs(float(last.var()) - p / (1 - p) / 8) < 0.008, name


def test_no_fast_line_matches_a_subclass() -> None:
    """`case Softmax()` also matches subclasses, so that stages never subclass each other."""
    from fullrank.core import registry

    for slot in ("score", "normalize", "mix"):
        stages = [registry.lookup(slot, name) for name in registry.names(slot)]
        assert stages
        for a, b in itertools.permutations(stages, 2):
            assert not issubclass(a, b), f"{a.__name__} is a {b.__name__}"


@pytest.mark.parametrize("mix", ["none", "position_wise"])
def test_transforms_of_functions_get_kernels_that_know_them(mix: str) -> None:
    """Kernels written by hand do not; 64 tokens are enough for them."""
    layer = fr.Attention(fr.AttentionConfig(mix=mix), hidden_size=16, num_attention_heads=2).double()
    moved(layer)
    x = torch.randn(2, 64, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    values = {name: parameter.detach() for name, parameter in layer.named_parameters()}

    def loss(values: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(layer, values, (x[None],)).square().sum()

    each = [torch.func.grad(loss)(values, row) for row in x]
    for row, found in zip(x, each, strict=True):
        layer.zero_grad()
        layer(row[None]).square().sum().backward()
        for name, parameter in layer.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-9, atol=1e-9)


def test_names() -> None:
    with pytest.raises(InputError, match="did you mean 'reference'"), fr.kernel("refrence"):
        pass
    mixed = fr.Attention(fr.AttentionConfig(mix="position_wise"), hidden_size=6, num_attention_heads=2)
    with fr.kernel("sdpa"), pytest.raises(InputError, match=r"cannot compute .*no mixing.*auto.*reference"):
        mixed(torch.zeros(1, 2, 6))
    mixed(torch.zeros(1, 2, 6))  # the choice ended with the block, in spite of the error
    with fr.kernel("sdpa"), fr.kernel("auto"):
        mixed(torch.zeros(1, 2, 6))
