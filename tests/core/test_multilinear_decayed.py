"""The output map of any length: the direct triple sum, the two decayed sums and the recurrence are one function."""

from __future__ import annotations

import math
from itertools import pairwise, product

import pytest
import torch
from torch import Tensor

import fullrank as fr
from fullrank.core import multilinear_reference as reference
from fullrank.core.errors import InputError
from fullrank.kernels.multilinear_decayed import DecayedState, absorb, decayed_multilinear

NAMES = ("query", "keys", "values", "cores", "log_a", "log_b", "weight")
S, R, E = 3, 2, 4


def given(
    batch: int, queries: int, keys: int, *, each_rank: bool = True, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """Decays from nearly 0 to nearly 1."""
    generator = torch.Generator().manual_seed(5)
    shapes = [(batch, queries, R), (batch, keys, R), (batch, keys, R), (2, R)]
    leaves = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    leaves += [torch.tensor([-1e-6, -0.3, -40.0]).double(), torch.tensor([-2.0, -1e-3, -0.1]).double()]
    leaves.append(torch.randn((S, R, E) if each_rank else (S, E), generator=generator, dtype=torch.float64))
    return [leaf.to(dtype).requires_grad_() for leaf in leaves]


def call(leaves: list[Tensor], state: DecayedState | None = None, **options: Tensor) -> tuple[Tensor, DecayedState]:
    query, keys, values, cores, log_a, log_b, weight = leaves
    return decayed_multilinear(query, keys, values, cores, (log_a, log_b), weight, state=state, **options)


def triple_sum(leaves: list[Tensor]) -> Tensor:
    """T_ijm W(i, j, m), number by number in Python."""
    query, keys, values, cores, log_a, log_b, weight = (leaf.detach() for leaf in leaves)
    batch, queries, length = query.shape[0], query.shape[1], keys.shape[1]
    out = torch.zeros(batch, queries, E, dtype=torch.float64)
    for b, i in product(range(batch), range(queries)):
        own = length - queries + i
        for j, m, s, r in product(range(own + 1), range(own + 1), range(S), range(R)):
            core = float(cores[:, r].mean())
            entry = core * float(query[b, i, r] * keys[b, j, r] * values[b, m, r])
            decay = math.exp(float(log_a[s]) * (own - j)) * math.exp(float(log_b[s]) * (own - m))
            out[b, i] += entry * decay * (weight[s, r] if weight.dim() == 3 else weight[s])
    return out


@pytest.mark.parametrize("each_rank", [True, False])
@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (3, 5)])
def test_the_equation_by_loops(queries: int, keys: int, each_rank: bool) -> None:
    leaves = given(2, queries, keys, each_rank=each_rank)
    expected = triple_sum(leaves)
    query, key, values, cores, log_a, log_b, weight = leaves
    direct = reference.decayed(query, key, values, cores, (log_a, log_b), weight)
    torch.testing.assert_close(direct, expected, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(call(leaves)[0], expected, rtol=1e-11, atol=1e-11)
    with fr.kernel("reference"):
        torch.testing.assert_close(call(leaves)[0], expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("each_rank", [True, False])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (16, 16), (37, 37), (18, 41), (1, 20)])
def test_values_and_gradients(queries: int, keys: int, each_rank: bool) -> None:
    """Within a chunk, over chunks, with earlier keys."""
    leaves = given(2, queries, keys, each_rank=each_rank)
    query, key, values, cores, log_a, log_b, weight = leaves
    expected = reference.decayed(query, key, values, cores, (log_a, log_b), weight)
    found = call(leaves)[0]
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    cotangent = torch.randn(expected.shape, dtype=torch.float64)
    wanted = torch.autograd.grad(expected, leaves, cotangent)
    for name, a, b in zip(NAMES, torch.autograd.grad(found, leaves, cotangent), wanted, strict=True):
        assert (a - b).abs().max() <= 1e-9 * (1 + b.abs().max()), name


def test_token_by_token_and_in_segments() -> None:
    """Values, states and gradients of one pass, however the text is cut; the gradient goes through the states."""
    leaves = given(2, 40, 40)
    whole, last = call(leaves)
    cotangent = torch.randn(whole.shape, dtype=torch.float64)
    wanted = torch.autograd.grad((whole * cotangent).sum() + last.keys.sum() - last.values.sum(), leaves)
    for cuts in (list(range(41)), [0, 16, 40], [0, 1, 30, 40]):
        state, outs = None, []
        for a, b in pairwise(cuts):
            out, state = call([leaf[:, a:b] for leaf in leaves[:3]] + leaves[3:], state)
            outs.append(out)
        assert state is not None
        torch.testing.assert_close(torch.cat(outs, 1), whole, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(state.keys, last.keys, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(state.values, last.values, rtol=1e-11, atol=1e-11)
        found = torch.autograd.grad(
            (torch.cat(outs, 1) * cotangent).sum() + state.keys.sum() - state.values.sum(), leaves
        )
        for name, a, b in zip(NAMES, found, wanted, strict=True):
            assert (a - b).abs().max() <= 1e-9 * (1 + b.abs().max()), name


def test_gradcheck() -> None:
    leaves = given(1, 19, 20)
    leaves[4] = torch.tensor([-0.05, -0.3, -2.0]).double().requires_grad_()
    state = [torch.randn(1, S, R, dtype=torch.float64, requires_grad=True) for _ in range(2)]

    def function(*tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out, after = call(list(tensors[:7]), DecayedState(*tensors[7:]))
        return out, *after

    assert torch.autograd.gradcheck(function, (*leaves, *state))
    with fr.kernel("reference"):
        few = [leaf.detach()[:, :3].requires_grad_() for leaf in leaves[:3]] + leaves[3:]
        assert torch.autograd.gradgradcheck(lambda *tensors: call(list(tensors))[0], few)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(call(leaves)[0].sum(), leaves, create_graph=True)


def test_fp32_with_decays_at_both_ends() -> None:
    """A thousand tokens, decays within 1e-6 of 1 and below 1e-17: no quotient of powers overflows."""
    leaves = given(1, 1000, 1000, dtype=torch.float32)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    with fr.kernel("reference"):
        expected = call(wide)[0]
    found = call(leaves)[0]
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    wanted = torch.autograd.grad(expected.sum(), wide)
    for name, a, b in zip(NAMES, torch.autograd.grad(found.sum(), leaves), wanted, strict=True):
        assert a.isfinite().all(), name
        assert (a - b).abs().max() <= 2e-5 * b.abs().max(), name


def test_bounded_at_any_length() -> None:
    """With U scaled by (1 - a)(1 - b) an output is at most sum_sr |g_r U_sr| max|Q| max|K| max|V|."""
    query, keys, values, cores, log_a, log_b, weight = (leaf.detach() for leaf in given(1, 4000, 4000))
    keys, values, query = (torch.ones_like(tensor) for tensor in (keys, values, query))
    scale = torch.expm1(log_a) * torch.expm1(log_b)
    out = call([query, keys, values, cores, log_a, log_b, weight * scale[:, None, None]])[0]
    limit = (cores.mean(0)[:, None] * weight).abs().sum((0, 1))
    assert (out.abs() <= limit * (1 + 1e-9)).all()


def test_autocast() -> None:
    leaves = given(2, 37, 37, dtype=torch.float32)
    expected = call(leaves)[0]
    with torch.autocast("cpu", torch.bfloat16):
        found, state = call(leaves)
    assert found.dtype == torch.bfloat16
    assert state.keys.dtype == torch.float32
    assert (found - expected).abs().max() <= 0.02 * expected.abs().max()
    wanted = torch.autograd.grad(expected.sum(), leaves)
    for name, a, b in zip(NAMES, torch.autograd.grad(found.sum(), leaves), wanted, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).abs().max() <= 0.03 * b.abs().max(), name


def test_padding_counts_as_distance_only() -> None:
    leaves = given(2, 20, 20)
    key_mask = torch.ones(2, 20, dtype=torch.bool)
    key_mask[0, :5], key_mask[1, 7] = False, False
    found, _ = call(leaves, key_mask=key_mask)
    zeroed = [leaves[0], *(leaf * key_mask[..., None] for leaf in leaves[1:3]), *leaves[3:]]
    torch.testing.assert_close(found, reference.decayed(*zeroed[:4], (leaves[4], leaves[5]), leaves[6]))
    short = [leaf[:1, 5:] for leaf in leaves[:3]] + leaves[3:]  # padding before a text is no text
    torch.testing.assert_close(found[:1, 5:], call(short)[0])
    changed = [leaf.detach().clone() for leaf in leaves]
    changed[1][~key_mask], changed[2][~key_mask] = float("inf"), 1e9
    assert torch.equal(call(changed, key_mask=key_mask)[0], found)


def test_no_look_ahead() -> None:
    leaves = [leaf.detach() for leaf in given(1, 35, 35)]
    before, _ = call(leaves)
    changed = [leaf.clone() for leaf in leaves]
    for tensor in changed[:3]:
        tensor[:, 20:] = 9.0
    found, _ = call(changed)
    torch.testing.assert_close(found[:, :20], before[:, :20], rtol=0, atol=0)
    assert (found[:, 20:] != before[:, 20:]).any()


def test_absorb_is_the_recurrence() -> None:
    tokens, state = torch.randn(2, 6, R).double(), torch.randn(2, S, R).double()
    log = torch.tensor([-0.1, -1.0, -1e-5]).double()
    expected = state
    for i in range(6):
        expected = torch.exp(log)[:, None] * expected + tokens[:, i, None]
    torch.testing.assert_close(absorb(tokens, log, state), expected)


def test_edges() -> None:
    leaves = given(2, 4, 4)
    out, state = call([leaves[0][:, :0], *leaves[1:]])
    assert out.shape == (2, 0, E)
    torch.testing.assert_close(state.keys, call(leaves)[1].keys)
    assert call([leaf.detach().to("meta") for leaf in leaves])[0].shape == (2, 4, E)
    with pytest.raises(InputError, match="4 causal queries over 3 keys"):
        call([leaves[0], leaves[1][:, :3], leaves[2][:, :3], *leaves[3:]])
