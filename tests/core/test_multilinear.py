"""Multi-linear attention against its equations, in whatever order it works off the pairs of positions."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fullrank as fr
from fullrank.core import multilinear_reference as reference
from fullrank.core.errors import InputError
from fullrank.kernels import multilinear as fast
from fullrank.kernels import multilinear_plan as planning
from fullrank.kernels.multilinear import multilinear
from fullrank.kernels.multilinear_plan import Shape, Stage

NAMES = ("query", "keys", "values", "cores", "weight")


def given(
    batch: int, queries: int, keys: int, rank: int = 5, width: int = 4, cores: int = 2, length: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> list[Tensor]:  # fmt: skip
    generator = torch.Generator().manual_seed(7)
    length = length or keys
    shapes = (
        (batch, queries, rank), (batch, keys, rank), (batch, keys, rank), (cores, rank), (length, length, width)
    )  # fmt: skip
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def equation(query: Tensor, keys: Tensor, values: Tensor, cores: Tensor, weight: Tensor, visible: Tensor) -> Tensor:
    """visible (B, N, M). Written apart from ours: one core after the other, the output matrix as the authors lay it out."""
    used = keys.shape[1]
    output_map = weight[:used, :used].permute(2, 0, 1).reshape(weight.shape[2], used * used)  # (E, M^2), keys major
    total = torch.zeros(())
    for core in cores:
        block = torch.einsum("bir,bjr,bmr->bijm", core * query, keys, values)
        total = total + block / len(cores)
    total = total * visible[:, :, :, None] * visible[:, :, None, :]
    return torch.nn.functional.linear(total.flatten(2), output_map)


def causal(batch: int, queries: int, keys: int) -> Tensor:
    return torch.tensor([[[m <= keys - queries + i for m in range(keys)] for i in range(queries)]] * batch)


def agree(out: Tensor, expected: Tensor, leaves: list[Tensor], tolerance: float = 1e-9) -> None:
    """Values, and gradients of a random cotangent."""
    cotangent = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    torch.testing.assert_close(out.double(), expected.double(), rtol=tolerance, atol=tolerance)
    wanted = torch.autograd.grad(expected, leaves, cotangent.to(expected.dtype))
    found = torch.autograd.grad(out, leaves, cotangent.to(out.dtype))
    for name, a, b in zip(NAMES, found, wanted, strict=True):
        assert a.dtype == b.dtype
        scale = b.abs().max().item() + 1
        assert (a - b).abs().max().item() <= tolerance * scale, name


@pytest.fixture
def no_tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is so small that T itself is built."""
    monkeypatch.setattr(fast, "TINY", 0)


def test_the_equation_by_loops() -> None:
    query, keys, values, cores, weight = (tensor.detach() for tensor in given(1, 3, 3, rank=2, width=2, cores=3))
    for visible in (causal(1, 3, 3), torch.ones(1, 3, 3, dtype=torch.bool)):
        expected = torch.zeros(1, 3, 2, dtype=torch.float64)
        for i, j, m in product(range(3), repeat=3):
            if visible[0, i, j] and visible[0, i, m]:
                entry = sum(
                    float(cores[c, r] * query[0, i, r] * keys[0, j, r] * values[0, m, r]) / 3
                    for c in range(3)
                    for r in range(2)
                )
                expected[0, i] += entry * weight[j, m]
        leaves = [query, keys, values, cores, weight]
        torch.testing.assert_close(reference.multilinear(*leaves, visible), expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(equation(*leaves, visible), expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(multilinear(*leaves, visible=visible), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cores", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("queries", "keys", "length"), [(1, 1, 1), (13, 13, 13), (21, 21, 24), (5, 19, 21), (1, 12, 12)]
)
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.usefixtures("no_tiny")
def test_values_and_gradients(queries: int, keys: int, length: int, masked: bool, cores: int) -> None:
    leaves = given(2, queries, keys, cores=cores, length=length)
    seen = causal(2, queries, keys) if masked else torch.ones(2, queries, keys, dtype=torch.bool)
    agree(multilinear(*leaves, causal=masked), equation(*leaves, seen), leaves)


@pytest.mark.parametrize("masked", [True, False])
def test_small_ones_and_the_reference_kernel(masked: bool) -> None:
    leaves = given(2, 5, 7, length=8)
    seen = causal(2, 5, 7) if masked else torch.ones(2, 5, 7, dtype=torch.bool)
    expected = equation(*leaves, seen)
    agree(multilinear(*leaves, causal=masked), expected, leaves)
    with fr.kernel("reference"):
        agree(multilinear(*leaves, causal=masked), equation(*leaves, seen), leaves)


def orders(queries: int, keys: int) -> list[tuple[Stage, ...]]:
    """Every shell and stage length for causal text, all slabs, and the earlier keys by the state and not."""
    found = [planning._slabs(queries, keys, slab) for slab in (1, 3, 8)]
    for shell, times, past in product((1, 2, 3, 5), (1, 2, 3, 100), (False, True)):
        if past and queries == keys:
            continue
        found.append(planning.causal_stages(queries, keys, shell, min(shell * times, queries), past))
    return found


@pytest.mark.parametrize("limit", [4096, 11])
@pytest.mark.parametrize(("queries", "keys"), [(11, 11), (6, 10)])
def test_every_order_is_exact(queries: int, keys: int, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "_PAIRS", limit)
    leaves = given(2, queries, keys)
    expected = equation(*leaves, causal(2, queries, keys))
    monkeypatch.setattr(fast, "TINY", 0)
    for stages in orders(queries, keys):
        monkeypatch.setattr(fast, "plan", lambda _, stages=stages: stages)
        cotangent = torch.ones_like(expected)
        found = multilinear(*leaves)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
        wanted = torch.autograd.grad(expected, leaves, cotangent, retain_graph=True)
        for a, b in zip(torch.autograd.grad(found, leaves, cotangent), wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("shape", [
    Shape(1, 40, 40, 40, 256, True, False), Shape(1, 130, 130, 4, 8, True, False), Shape(8, 7, 90, 16, 32, True, False),
    Shape(4, 120, 120, 8, 16, True, False), Shape(4, 90, 90, 8, 64, False, False), Shape(1, 20, 20, 40, 256, False, False),
])  # fmt: skip
def test_a_plan_has_every_pair_once(shape: Shape) -> None:
    """Each query meets each pair that it may see once, directly or by the state; pairs it may not see are masked."""
    past = shape.keys - shape.queries
    for stages in planning._candidates(shape):
        stored: Counter[tuple[int, int]] = Counter()
        for stage in stages:
            met = dict.fromkeys(range(stage.first, stage.last), 0)
            before = sum(stored.values()) if stage.reads else 0
            if shape.causal and stage.reads:
                assert all(max(pair) <= past + stage.first for pair in stored)
            for step in stage.steps:
                pairs = [p for j0, j1, m0, m1 in step.rectangles for p in product(range(j0, j1), range(m0, m1))]
                assert len(pairs) == step.pairs
                if step.into_state:
                    stored.update(pairs)
                times = torch.tensor([max(pair) for pair in pairs])
                for i in range(step.first, step.last):
                    seen = int((times <= past + i).sum()) if shape.causal else len(pairs)
                    assert seen == len(pairs) or i < step.masked
                    met[i] += seen
            for i, count in met.items():
                assert count + before == ((past + i + 1) ** 2 if shape.causal else shape.keys**2)
        assert not stored or max(stored.values()) == 1


@pytest.mark.parametrize("tokens", [33, 70, 150])
def test_fp32(tokens: int) -> None:
    leaves = given(2, tokens, tokens, rank=8, width=6, dtype=torch.float32)
    with torch.no_grad():
        leaves[4] /= tokens
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = equation(*wide, causal(2, tokens, tokens))
    found = multilinear(*leaves)
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    cotangent = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, wide, cotangent)
    for name, a, b in zip(NAMES, torch.autograd.grad(found, leaves, cotangent.float()), wanted, strict=True):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max(), name


@pytest.mark.parametrize("tokens", [10, 90])
def test_autocast(tokens: int) -> None:
    """Operands in bf16, sums in fp32, gradients in the dtype of their leaves."""
    leaves = given(2, tokens, tokens, rank=8, width=6, dtype=torch.float32)
    expected = equation(*leaves, causal(2, tokens, tokens))
    with torch.autocast("cpu", torch.bfloat16):
        found = multilinear(*leaves)
    assert found.dtype == torch.bfloat16
    assert (found - expected).abs().max() <= 0.02 * expected.abs().max()
    cotangent = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, leaves, cotangent)
    for name, a, b in zip(NAMES, torch.autograd.grad(found, leaves, cotangent.bfloat16()), wanted, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).abs().max() <= 0.03 * b.abs().max(), name


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.usefixtures("no_tiny")
def test_padding(masked: bool) -> None:
    leaves = given(2, 13, 13)
    key_mask = torch.ones(2, 13, dtype=torch.bool)
    key_mask[0, :4] = False
    key_mask[1, [3, 12]] = False
    seen = (causal(2, 13, 13) if masked else torch.ones(2, 13, 13, dtype=torch.bool)) & key_mask[:, None]
    agree(multilinear(*leaves, causal=masked, key_mask=key_mask), equation(*leaves, seen), leaves)
    with fr.kernel("reference"):
        agree(multilinear(*leaves, causal=masked, key_mask=key_mask), equation(*leaves, seen), leaves)
    changed = [leaf.detach().clone() for leaf in leaves]
    changed[1][~key_mask], changed[2][~key_mask] = 1e9, float("inf")
    same = multilinear(*changed, causal=masked, key_mask=key_mask)
    assert torch.equal(same, multilinear(*leaves, causal=masked, key_mask=key_mask))


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.usefixtures("no_tiny")
def test_any_visibility(rows: int) -> None:
    leaves = given(2, 9, 19)
    visible = torch.rand(rows, 9, 19, generator=torch.Generator().manual_seed(1)) < 0.4
    visible[:, 4] = False
    found = multilinear(*leaves, visible=visible)
    assert torch.equal(found[:, 4], torch.zeros_like(found[:, 4]))
    agree(found, equation(*leaves, visible.expand(2, -1, -1)), leaves)


@pytest.mark.parametrize("tokens", [9, 40, 130])
@pytest.mark.parametrize("kernel", ["auto", "reference"])
def test_no_look_ahead(tokens: int, kernel: str) -> None:
    """What comes later may be anything, also inf: outputs keep every bit, and nothing depends on it."""
    if kernel == "reference" and tokens > 40:
        return
    query, keys, values, cores, weight = given(1, tokens, tokens, rank=3, width=2)
    with fr.kernel(kernel):
        before = multilinear(query, keys, values, cores, weight)
        for here in (0, tokens // 2, tokens - 2):
            to_keys, to_values = torch.autograd.grad(before[:, : here + 1].sum(), (keys, values), retain_graph=True)
            assert not to_keys[:, here + 1 :].any()
            assert not to_values[:, here + 1 :].any()
            assert to_keys[:, here].any()
            changed = [tensor.detach().clone() for tensor in (query, keys, values)]
            changed[0][:, here + 1 :], changed[1][:, here + 1 :], changed[2][:, here + 1 :] = 5.0, -7.0, float("inf")
            assert torch.equal(multilinear(*changed, cores, weight)[:, : here + 1], before[:, : here + 1])


def test_as_published_sees_the_future() -> None:
    query, keys, values, cores, weight = given(1, 12, 12)
    out = multilinear(query, keys, values, cores, weight, causal=False)
    assert torch.autograd.grad(out[:, 0].sum(), values)[0][:, 1:].ne(0).all()


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.usefixtures("no_tiny")
def test_cores_are_one_core_with_their_mean(masked: bool) -> None:
    query, keys, values, cores, weight = given(2, 11, 11, cores=4)
    one = cores.detach().mean(0, keepdim=True)
    found = multilinear(query, keys, values, cores, weight, causal=masked)
    torch.testing.assert_close(
        multilinear(query, keys, values, one, weight, causal=masked), found, rtol=1e-12, atol=1e-12
    )


def test_the_position_term_is_more_rank() -> None:
    """(q + u) k v + (q + w) p v, the authors' relative term, is one form of rank 2 R."""
    query, keys, values, cores, weight = (tensor.detach() for tensor in given(2, 8, 8, cores=1))
    u, w, places = torch.randn(5).double(), torch.randn(5).double(), torch.randn(8, 5).double()
    expected = sum(
        equation(a, b.expand_as(keys), values, cores, weight, causal(2, 8, 8))
        for a, b in ((query + u, keys), (query + w, places))
    )
    found = multilinear(
        torch.cat((query + u, query + w), -1),
        torch.cat((keys, places.expand_as(keys)), -1),
        torch.cat((values, values), -1),
        torch.cat((cores, cores), -1),
        weight,
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.usefixtures("no_tiny")
def test_gradcheck() -> None:
    leaves = given(1, 5, 6, rank=2, width=2, length=7)
    assert torch.autograd.gradcheck(lambda *x: multilinear(*x), leaves)
    with fr.kernel("reference"):
        small = given(1, 2, 3, rank=2, width=1)
        assert torch.autograd.gradgradcheck(lambda *x: multilinear(*x), small)


@pytest.mark.usefixtures("no_tiny")
def test_second_derivative_is_refused() -> None:
    leaves = given(1, 5, 5)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(multilinear(*leaves).sum(), leaves, create_graph=True)


@pytest.mark.usefixtures("no_tiny")
def test_frozen_weight_and_no_grad() -> None:
    leaves = given(2, 9, 9)
    expected = equation(*leaves, causal(2, 9, 9))
    wanted = torch.autograd.grad(expected.sum(), leaves[:4])
    frozen = [*leaves[:4], leaves[4].detach()]
    for a, b in zip(torch.autograd.grad(multilinear(*frozen).sum(), leaves[:4]), wanted, strict=True):
        torch.testing.assert_close(a, b)
    with torch.inference_mode():
        torch.testing.assert_close(multilinear(*frozen), expected.detach())
    agree(multilinear(*leaves), equation(*leaves, causal(2, 9, 9)), leaves)  # what is cached was made in inference mode


def test_a_cache_decodes_the_same() -> None:
    """One query over all keys so far is that row of the whole pass."""
    query, keys, values, cores, weight = (tensor.detach() for tensor in given(2, 9, 9, length=11))
    whole = multilinear(query, keys, values, cores, weight)
    for i in range(9):
        one = multilinear(query[:, i : i + 1], keys[:, : i + 1], values[:, : i + 1], cores, weight)
        torch.testing.assert_close(one, whole[:, i : i + 1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("causal_", "tokens"), [(True, 140), (False, 140), (True, 200)])
def test_nothing_of_size_n_cubed(causal_: bool, tokens: int) -> None:
    class Largest(TorchDispatchMode):
        numbers = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else (out,):
                if isinstance(tensor, Tensor):
                    self.numbers = max(self.numbers, tensor.untyped_storage().nbytes() // tensor.element_size())
            return out

    leaves = given(1, tokens, tokens, rank=4, width=4, dtype=torch.float32)
    seen = torch.rand(1, tokens, tokens) < 0.5
    for options in ({"causal": causal_}, {"visible": seen}):
        with Largest() as largest:
            multilinear(*leaves, **options).sum().backward()
        assert tokens * tokens * 4 <= largest.numbers < tokens**3 / 4


def test_refused() -> None:
    query, keys, values, cores, weight = given(1, 4, 6, length=5)
    with pytest.raises(InputError, match=r"6 positions.*pair of 5"):
        multilinear(query, keys, values, cores, weight)
    with pytest.raises(InputError, match="4 causal queries over 3 keys"):
        multilinear(query, keys[:, :3], values[:, :3], cores, weight)


def test_meta_and_no_texts() -> None:
    leaves = [leaf.detach() for leaf in given(2, 6, 6)]
    assert multilinear(*(leaf.to("meta") for leaf in leaves)).shape == (2, 6, 4)
    empty = multilinear(*(leaf[:0] for leaf in leaves[:3]), *leaves[3:])
    assert empty.shape == (0, 6, 4)
