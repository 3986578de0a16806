"""The C++ kernel equals the reference, outputs and every gradient, at sizes that reach whole blocks and what is left over."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from computing import native_computes
from native_cases import (
    Case,
    built,
    by_native,
    by_reference,
    compare,
    found,
    given,
    heads_of,
    needs_compiler,
    random_case,
)
from torch import Tensor

import fullrank as fr
from fullrank.core.attention import WeightedValues
from fullrank.core.config import AttentionConfig
from fullrank.core.engine import Problem
from fullrank.core.project import Heads
from fullrank.core.stage import HeadSize
from fullrank.kernels.native import attend as native


@pytest.fixture(autouse=True)
def _compiled() -> None:
    needs_compiler()


A, B = "position_independent", "position_wise"
CASES = [
    Case(1, 1, 1, 1, mix=B, normalize="sigsoftmax"),
    Case(1, 70, 9, 17, mix=B, where="left"),
    Case(16, 16, 2, 16, "relative", "sigsoftmax", A),
    Case(16, 33, 12, 5, mix=B, where="window"),
    Case(17, 17, 3, 41, "relative", mix=B),
    Case(17, 64, 8, 64, "relative", "sigsoftmax", B, "gaps"),
    Case(33, 33, 5, 100, "relative", mix=A, where="window"),
    Case(33, 47, 33, 5, normalize="sigsoftmax", mix=B, where="holes"),
    Case(47, 47, 2, 64, normalize="sigsoftmax", mix="random", where="right"),
    Case(47, 129, 3, 16, "relative", mix=B, where="gaps and window"),
    Case(49, 49, 1, 41, "relative", "sigsoftmax", where="window"),
    Case(49, 200, 8, 1, mix=A, where="window"),
    Case(64, 64, 8, 64, "relative", mix=B),
    Case(64, 64, 9, 17, mix="average", where="only padding"),
    Case(64, 70, 12, 16, "relative", "sigsoftmax", A, "gaps and window"),
    Case(70, 70, 8, 5, normalize="sigsoftmax", where="holes", texts=3),
    Case(70, 200, 3, 41, "relative", where="gaps"),
    Case(129, 129, 5, 16, mix=B, where="left"),
    Case(129, 129, 2, 5, "relative", "sigsoftmax", "random"),
    Case(129, 200, 4, 64, "relative", mix=B, where="gaps"),
    Case(200, 200, 3, 17, mix=A, where="window"),
    Case(200, 200, 1, 100, "relative", "sigsoftmax"),
    Case(70, 33, 5, 16, mix=B, where="cross"),
    Case(129, 7, 3, 41, normalize="sigsoftmax", mix=A, where="cross"),
    Case(17, 129, 9, 5, mix=B, where="cross, holes"),
    Case(64, 49, 2, 17, normalize="sigsoftmax", where="cross, only padding"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_equals_reference(case: Case, dtype: torch.dtype) -> None:
    compare(case, dtype, 2e-6 if dtype == torch.float32 else 1e-12)


def test_equals_reference_wherever() -> None:
    draw = random.Random(11)
    for _ in range(40):
        case = random_case(draw)
        compare(case, torch.float64, 1e-12 * case.size)


@pytest.mark.parametrize("score", ["dot_product", "relative"])
@pytest.mark.parametrize("normalize", ["softmax", "sigsoftmax"])
def test_large_scores(score: str, normalize: str) -> None:
    """Of some hundreds; as a score of 200 is known to 1e-5 in fp32, so are weights, and no better."""
    case = Case(35, 50, 3, 16, score, normalize, B, size=7.0)
    attend = built(case).double()
    assert attend.scores(heads_of(case, attend, torch.float64), case.layout()).abs().max() > 200
    compare(case, torch.float64, 1e-11)
    compare(case, torch.float32, 5e-4)


@pytest.mark.parametrize("normalize", ["softmax", "sigsoftmax"])
@pytest.mark.parametrize("where", ["causal", "only padding"])
def test_no_less_exact_than_the_reference(where: str, normalize: str) -> None:
    """The logarithm of the sum is rounded as the scores are; gradients of a row's scores must add up to zero all the same."""
    case = Case(84, 84, 10, 16, normalize=normalize, mix=B, where=where, size=4.0)
    exact, plain, ours = (
        found(case, dtype, kernel)
        for dtype, kernel in [(torch.float64, "reference"), (torch.float32, "reference"), (torch.float32, "native")]
    )
    for name in ("output", "gradient of query", "gradient of keys"):
        allowed = 2 * (plain[name] - exact[name]).abs().max() + 5e-7 * exact["gradient of query"].abs().max()
        assert (ours[name] - exact[name]).abs().max() <= allowed, name


@pytest.mark.parametrize("offset", [-1e4, -300.0, 300.0, 1e4])
@pytest.mark.parametrize("normalize", ["softmax", "sigsoftmax"])
def test_scores_far_from_zero(normalize: str, offset: float) -> None:
    """One dimension of keys is constant, so that all scores of a query are near the offset, where exp is 0 or infinite."""
    case = Case(35, 35, 2, 16, normalize=normalize, mix=A)
    attend, layout = built(case).double(), case.layout()

    def computed(kernel: object) -> list[Tensor]:
        heads = heads_of(case, attend, torch.float64)
        with torch.no_grad():
            heads.scored[..., 0] = offset * 4
            heads.keys[..., 0] = 1.0
        out = kernel(attend, heads, layout)  # type: ignore[operator]
        cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
        return [out.detach(), *torch.autograd.grad(out, [heads.query, heads.keys, heads.values], cotangent)]

    for ours, expected in zip(computed(by_native), computed(by_reference), strict=True):
        off = float((ours - expected).abs().max())
        assert off <= 1e-14 * abs(offset) * max(1.0, float(expected.abs().max()))


def small(dropout: float = 0.0, **choices: object) -> tuple[WeightedValues, Heads, fr.Layout]:
    case = Case(**{"queries": 35, "keys": 40, "heads": 3, "dim": 5, "mix": B, **choices})  # type: ignore[arg-type]
    attend = built(case, dropout).double().train()
    return attend, heads_of(case, attend, torch.float64), case.layout()


def test_expanded_inputs() -> None:
    """The same keys for all texts, and values that are one number: gradients are summed where they are read."""
    attend, heads, layout = small()
    one, number = heads.keys.detach()[:1].requires_grad_(), torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    spread = Heads(heads.query, heads.scored, one.expand(2, -1, -1, -1), number.expand_as(heads.values))
    both = [
        torch.autograd.grad(kernel(attend, spread, layout).square().sum(), [one, number])
        for kernel in (by_native, by_reference)
    ]
    for ours, expected in zip(*both, strict=True):
        assert torch.allclose(ours, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "wanted",
    [
        "query",
        "keys",
        "values",
        "relative",
        "score.biases.content_bias",
        "score.biases.position_bias",
        "mix.mixing",
        "mix.from_query",
    ],
)
def test_gradient_of_one_input_only(wanted: str) -> None:
    attend, heads, layout = small(score="relative", where="gaps")
    inputs = given(heads) | dict(attend.named_parameters())
    for name, tensor in inputs.items():
        tensor.requires_grad_(name == wanted)
    both = [
        torch.autograd.grad(kernel(attend, heads, layout).sin().sum(), inputs[wanted])[0]
        for kernel in (by_native, by_reference)
    ]
    assert torch.allclose(*both, rtol=1e-12, atol=1e-12)


def test_without_gradients() -> None:
    attend, heads, layout = small()
    expected = by_reference(attend, heads, layout)
    with torch.no_grad():
        assert torch.allclose(by_native(attend, heads, layout), expected, atol=1e-13)
    with torch.inference_mode():
        assert torch.allclose(by_native(attend, heads, layout), expected, atol=1e-13)


@pytest.fixture
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("texts", [1, 2, 3, 5])
@pytest.mark.parametrize("score", ["dot_product", "relative"])
def test_threads(score: str, texts: int) -> None:
    """Texts that do not divide by the threads, and more threads than there is work for."""
    case = Case(70, 80, 3, 17, score, mix=A if texts % 2 else B, texts=texts)
    torch.set_num_threads(1)
    expected = found(case, torch.float64, "native")
    for threads in (2, 4, 64):
        torch.set_num_threads(threads)
        first, second = found(case, torch.float64, "native"), found(case, torch.float64, "native")
        for name, tensor in first.items():
            assert torch.equal(tensor, second[name]), f"{name} differs from call to call"
            assert torch.allclose(tensor, expected[name], rtol=1e-12, atol=1e-12), f"{name} with {threads} threads"


def test_shapes_that_do_not_fit_are_not_computed() -> None:
    """A kernel that takes addresses would read beside its inputs."""
    attend, heads, layout = small(mix=A)
    problem = attend.problem(heads, layout, attend.mix.matrix(heads.query))
    assert native_computes(problem)
    fields = {name: getattr(problem, name) for name in Problem.__dataclass_fields__}
    wrong = {
        "query": problem.query[:1],
        "keys": problem.keys[:, :1],
        "values": problem.values[:, :, :-1],
        "mixing": torch.eye(4, dtype=torch.float64),
        "layout": fr.Layout.of(35, 41),
    }
    for name, value in wrong.items():
        assert not native_computes(Problem(**{**fields, name: value})), name
    mask = torch.ones(3, 40, dtype=torch.bool)
    assert not native_computes(Problem(**{**fields, "layout": fr.Layout.of(35, 40, key_mask=mask)}))


def test_mixing_of_other_heads_is_refused_as_by_the_reference() -> None:
    _, heads, layout = small(mix=A)
    other = WeightedValues(AttentionConfig(mix=A), HeadSize(4, 5, 20, 40), 0.0).double()
    with pytest.raises(ValueError, match="does not fit weights"), fr.kernel("auto"):
        other(heads, layout)


def test_default_device_elsewhere() -> None:
    """`torch.device` as a context moves what is made inside it, but not who sees whom."""
    attend, heads, layout = small(dropout=0.5, score="relative", where="gaps")
    attend.eval()
    expected = by_native(attend, heads, layout)
    with torch.device("meta"):
        assert torch.equal(by_native(attend, heads, layout), expected)
        assert by_native(attend.train(), heads, layout).isfinite().all()


class TestNumbersThatAreNone:
    @pytest.mark.parametrize("score", ["dot_product", "relative"])
    @pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
    def test_in_a_key(self, score: str, number: float) -> None:
        attend, heads, layout = small(score=score, queries=40)
        with torch.no_grad():
            clean = by_native(attend, heads, layout)
            heads.keys[0, 1, 20, 2] = number
            ours, expected = by_native(attend, heads, layout), by_reference(attend, heads, layout)
        assert torch.equal(ours[0, :, :20], clean[0, :, :20])
        assert torch.equal(ours[1], clean[1])
        assert ours[0, :, 20:].isnan().any()
        assert torch.allclose(ours, expected, atol=1e-12, equal_nan=True)

    @pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
    def test_in_a_query(self, number: float) -> None:
        attend, heads, layout = small(mix=A)
        with torch.no_grad():
            clean = by_native(attend, heads, layout)
            heads.query[0, 1, 20, 2] = number
            ours, expected = by_native(attend, heads, layout), by_reference(attend, heads, layout)
        assert torch.allclose(ours, expected, atol=1e-12, equal_nan=True)
        assert ours[0, :, 20].isnan().all()
        others = torch.arange(35) != 20
        assert torch.equal(ours[:, :, others], clean[:, :, others])

    def test_reaches_gradients(self) -> None:
        attend, heads, layout = small()
        with torch.no_grad():
            heads.query[0, 1, 20, 2] = float("nan")
        by_native(attend, heads, layout).sum().backward()
        assert heads.query.grad[0, 1, 20].isnan().all()
        assert heads.query.grad[0, :, 21:].isfinite().all()
        assert heads.query.grad[1].isfinite().all()


@pytest.mark.parametrize("score", ["dot_product", "relative"])
@pytest.mark.parametrize("changed", [1, 15, 16, 31, 50])
def test_sees_nothing_ahead(score: str, changed: int) -> None:
    """Other keys and values later on change nothing before them, to the last bit."""
    attend, heads, layout = small(score=score, queries=64, keys=64)
    with torch.no_grad():
        before = by_native(attend, heads, layout)
        heads.keys[:, :, changed:] += 3
        heads.values[:, :, changed:] -= 5
        after = by_native(attend, heads, layout)
    assert torch.equal(before[:, :, :changed], after[:, :, :changed])
    assert not torch.equal(before[:, :, changed], after[:, :, changed])


class TestAutograd:
    @pytest.mark.parametrize("mix", ["none", A, B])
    def test_no_weights_are_kept(self, mix: str) -> None:
        """Nothing of N M numbers, for inputs of which none has as many."""
        case = Case(90, 100, 2, 3, "relative", mix=mix, texts=1)
        attend = built(case).double()
        heads, sizes = heads_of(case, attend, torch.float64), []

        def packed(tensor: Tensor) -> Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(packed, lambda tensor: tensor):
            by_native(attend, heads, case.layout())
        assert sizes
        assert max(sizes) < 90 * 100

    def test_no_second_derivative(self) -> None:
        attend, heads, layout = small()
        out = by_native(attend, heads, layout).sum()
        with pytest.raises(RuntimeError, match=r'no second derivative.*kernel."reference"'):
            torch.autograd.grad(out, heads.query, create_graph=True)

    def test_changed_input_is_noticed(self) -> None:
        """Inputs that are as the kernel wants them are not copied."""
        attend, heads, layout = small(dim=8)
        values = heads.values.contiguous() * 1
        out = by_native(attend, Heads(heads.query, heads.scored, heads.keys, values), layout)
        values.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()

    def test_backward_twice(self) -> None:
        attend, heads, layout = small(dropout=0.4)
        out = by_native(attend, heads, layout).sum()
        first = torch.autograd.grad(out, heads.query, retain_graph=True)[0]
        assert torch.equal(first, torch.autograd.grad(out, heads.query)[0])

    def test_functional_transforms_fail_clearly(self) -> None:
        attend, heads, layout = small(mix="none")
        problem = attend.problem(heads, layout, attend.mix.matrix(heads.query))

        def of_values(values: Tensor) -> Tensor:
            fields = {name: getattr(problem, name) for name in Problem.__dataclass_fields__}
            return native(Problem(**{**fields, "values": values})).sum()

        with pytest.raises(RuntimeError, match=r"setup_context|functorch|vmap"):
            torch.func.grad(of_values)(problem.values.detach())
        with pytest.raises(RuntimeError, match=r"setup_context|functorch|vmap"):
            torch.vmap(of_values)(problem.values.detach()[None])
