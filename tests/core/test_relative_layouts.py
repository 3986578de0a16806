"""Relative attention over keys in pieces and within a window: the equation, and the fast kernel against the reference."""

from __future__ import annotations

import math
import weakref

import pytest
import torch
from torch import Tensor

import fullrank as fr
from fullrank.core.attention import WeightedValues
from fullrank.core.project import Heads
from fullrank.core.shift import descending, kept_descending, pieces, shift
from fullrank.core.stage import HeadSize
from fullrank.kernels import block_plan
from fullrank.kernels.compiled import shifted_scores

H, D, E = 3, 4, 10

# queries, runs of keys (the last one ends with the queries), window
LAYOUTS = {
    "gap below the segment": (13, ((0, 9), (15, 20)), None),
    "gap beyond the segment": (13, ((0, 9), (50, 20)), None),
    "no earlier key beside the segment": (11, ((-40, 17), (0, 11)), None),
    "three runs": (7, ((-90, 5), (-20, 3), (-4, 11)), None),
    "gap of one": (10, ((0, 6), (7, 3), (11, 12)), None),
    "window below the segment": (13, ((0, 30),), 5),
    "window of one": (6, ((0, 9),), 1),
    "window beyond the segment": (13, ((0, 40),), 21),
    "window that hides nothing": (5, ((0, 9),), 9),
    "window that ends in a gap": (6, ((0, 9), (30, 10)), 12),
    "window that ends in an old run": (6, ((0, 9), (14, 10)), 16),
    "window that hides an old run from some": (9, ((0, 4), (6, 5), (14, 12)), 11),
    "window that hides an old run from later rows": (9, ((0, 4), (14, 12)), 18),
    "one query": (1, ((0, 30),), None),
    "one query after a gap": (1, ((0, 9), (15, 4), (40, 1)), None),
    "one query, window": (1, ((0, 9), (15, 14)), 17),
}
WHERE = pytest.mark.parametrize("name", LAYOUTS)


def layout(name: str) -> fr.Layout:
    queries, runs, window = LAYOUTS[name]
    return fr.Layout.of_runs(queries, runs, window=window)


def attend(mix: str = "none", normalize: str = "softmax", p: float = 0.0) -> WeightedValues:
    torch.manual_seed(4)
    made = WeightedValues(fr.AttentionConfig(score="relative", mix=mix, normalize=normalize), HeadSize(H, D, E, 9), p)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.5)
    return made.double()


def operands(where: fr.Layout, batch: int = 3, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    (queries, keys), generator = where.shape, torch.Generator().manual_seed(3)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    return {"query": drawn(batch, queries, H, D), "keys": drawn(batch, H, keys, D), "values": drawn(batch, H, keys, D),
            "relative": drawn(where.distances, H, D)}  # fmt: skip


def heads(given: dict[str, Tensor]) -> Heads:
    query = given["query"].transpose(1, 2)
    return Heads(query, query, given["keys"], given["values"], given["relative"].transpose(0, 1))


def gradients(made: WeightedValues, kernel: str, given: dict[str, Tensor], where: fr.Layout) -> dict[str, Tensor]:
    torch.manual_seed(8)
    with fr.kernel(kernel):
        out = made(heads(given), where)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(out.dtype)
    named = given | dict(made.named_parameters())
    return {"output": out.detach()} | dict(
        zip(named, torch.autograd.grad(out, list(named.values()), cotangent), strict=True)
    )


def same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    for name, want in expected.items():
        off, scale = float((found[name] - want).abs().max()), max(1.0, float(want.abs().max()))
        assert off <= tolerance * scale, f"{name} is off by {off:.1e}"


@pytest.mark.parametrize("kernel", ["reference", "blocks"])
@WHERE
def test_the_equation(name: str, kernel: str) -> None:
    """By a loop over queries and keys, distances by subtraction of positions; with gradients and without."""
    queries, runs, window = LAYOUTS[name]
    where, made = layout(name), attend()
    given = operands(where, batch=1)
    places = [start + i for start, size in runs for i in range(size)]
    row = {}  # where the key of a distance stands
    for low, high in where.spans:
        for distance in range(low, high + 1):
            row[distance] = len(row)
    assert list(row) == sorted(row)
    u, v = (bias.detach() for bias in (made.score.biases.content_bias, made.score.biases.position_bias))
    query_of, key_of, far_of = (given[name].detach() for name in ("query", "keys", "relative"))
    expected = torch.zeros(1, H, queries, D, dtype=torch.float64)
    for h in range(H):
        for n in range(queries):
            own, query = places[len(places) - queries + n], query_of[0, n, h]
            scores = {}
            for m, place in enumerate(places):
                if place <= own and (window is None or own - place < window):
                    far = far_of[row[own - place], h]
                    scores[m] = float((query + u[h]) @ key_of[0, h, m] + (query + v[h]) @ far) / math.sqrt(D)
            total = sum(math.exp(score) for score in scores.values())
            for m, score in scores.items():
                expected[0, h, n] += math.exp(score) / total * given["values"][0, h, m].detach()
    with fr.kernel(kernel):
        assert (made(heads(given), where).detach() - expected).abs().max() < 1e-12
        with torch.no_grad():
            assert (made.eval()(heads(given), where) - expected).abs().max() < 1e-12


@WHERE
@pytest.mark.parametrize("mix", ["none", "position_independent", "position_wise", "random", "average"])
@pytest.mark.parametrize("normalize", ["softmax", "sigsoftmax"])
@pytest.mark.parametrize("rows", [4, 64])
def test_gradients_equal_those_of_the_reference(
    name: str, mix: str, normalize: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks of four rows, so that a block meets only some of the runs, and with all rows and texts in one."""
    for limits in (block_plan._FORWARD, block_plan._BACKWARD):
        monkeypatch.setitem(limits, "cpu", block_plan.Limits(200 if rows == 4 else 2**17, rows, rows))
    made, where = attend(mix, normalize), layout(name)
    given = operands(where)
    expected = gradients(made, "reference", given, where)
    same(gradients(made, "blocks", given, where), expected)
    with torch.no_grad():
        assert (made.eval()(heads(given), where) - expected["output"]).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("queries", "runs", "window"),
    [(150, ((0, 41), (60, 30), (100, 161)), None), (129, ((0, 70), (900, 200)), None), (201, ((0, 333),), 77)],
)
def test_sizes_at_which_there_are_blocks(queries: int, runs: tuple[tuple[int, int], ...], window: int | None) -> None:
    made, where = attend("position_wise"), fr.Layout.of_runs(queries, runs, window=window)
    given = operands(where, batch=2)
    assert len(block_plan.plan(made.problem(heads(given), where, None), backward=True).blocks) > 1
    expected = gradients(made, "reference", given, where)
    same(gradients(made, "blocks", given, where), expected)
    plain = attend()
    with torch.no_grad():
        found = plain(heads(given), where)
        with fr.kernel("reference"):
            assert (found - plain(heads(given), where)).abs().max() < 1e-12


@pytest.mark.parametrize(
    "name", ["gap below the segment", "window that hides an old run from some", "one query, window"]
)
@pytest.mark.parametrize("normalize", ["softmax", "sigsoftmax"])
@pytest.mark.parametrize("autocast", [False, True])
def test_low_precision(name: str, normalize: str, autocast: bool) -> None:
    """About as close to the exact numbers as the reference in low precision, with gradients and without."""
    where = layout(name)
    expected = gradients(attend(normalize=normalize), "reference", operands(where), where)
    made = attend(normalize=normalize)
    made = made.float() if autocast else made.bfloat16()
    off = {}
    for kernel in ("blocks", "reference"):
        given = operands(where, dtype=torch.bfloat16)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            found = gradients(made, kernel, given, where)
            with torch.no_grad(), fr.kernel(kernel):
                found["without gradients"] = made(heads(given), where)
        assert found["output"].dtype == found["without gradients"].dtype == torch.bfloat16
        off[kernel] = {
            key: float((got.double() - want).norm() / want.norm())
            for key, want in ({**expected, "without gradients": expected["output"]}).items()
            for got in [found[key]]
        }
    for key, ours in off["blocks"].items():
        assert ours < max(1.5 * off["reference"][key], 0.01), key


@WHERE
def test_the_shift_of_all_rows_is_what_the_reference_gathers(name: str) -> None:
    """What a compiler gets."""
    where, score = layout(name), attend().score
    given = heads(operands(where))
    problem = attend().problem(given, where, None)
    found = shifted_scores(problem, problem.distances)
    assert found.isfinite().all()
    expected = score(given.scored, given.keys, given.relative, where)
    hidden = ~where.visible()
    assert torch.allclose(found.masked_fill(hidden, 0), expected.masked_fill(hidden, 0), rtol=0, atol=1e-13)


@WHERE
def test_no_two_pairs_share_a_number(name: str) -> None:
    """Otherwise gradients that are written through the view would overwrite each other."""
    where = layout(name)
    for first in range(0, where.shape[0], 4):
        rows = min(4, where.shape[0] - first)
        for piece in pieces(where, first, first + rows):
            width = piece.table.stop - piece.table.start
            numbers = shift(torch.arange(rows * width).view(rows, width), piece)
            assert numbers.shape == (rows, piece.keys.stop - piece.keys.start)
            assert numbers.unique().numel() == numbers.numel()


def test_only_keys_in_sight_are_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window of 8 over 4 rows needs at most 11 keys of a long text, and not more distances than there are in it."""
    where = fr.Layout.of(64, 600, window=8)
    monkeypatch.setitem(block_plan._FORWARD, "cpu", block_plan.Limits(1, 4, 4))
    pipeline = attend().problem(heads(operands(where, batch=1)), where, None)
    for block in block_plan.plan(pipeline, backward=False).blocks:
        assert block.keys.stop - block.keys.start == 11
        assert block.keys.stop == 536 + block.rows.stop
    table = descending(torch.arange(8.0).expand(D, H, 8).permute(1, 2, 0), 12)
    assert table.shape == (H, 12, D)
    assert table[1, :, 2].tolist() == [7, 6, 5, 4, 3, 2, 1, 0, 0, 0, 0, 0]


def test_a_turned_table_is_kept_while_its_owner_lives_unchanged() -> None:
    with torch.no_grad():
        owner = torch.randn(20, H * D)

        def view() -> Tensor:
            return owner.unflatten(-1, (H, D)).transpose(0, 1)[:, :9]

        first = kept_descending(view(), 10)
        assert torch.equal(first, descending(view(), 10))
        assert kept_descending(view(), 10) is first
        assert kept_descending(view(), 12).shape == (H, 12, D)
        assert torch.equal(kept_descending(view()[:, :5], 6), descending(view()[:, :5], 6))
        owner.mul_(2)
        assert torch.equal(kept_descending(view(), 10), 2 * first)
        gone = weakref.ref(kept_descending(view(), 10))
        assert gone() is not None
        del owner
        assert gone() is None
    with torch.inference_mode():
        owner = torch.randn(H, 9, D)
        first = kept_descending(owner, 10)
        owner.mul_(2)
        assert torch.equal(kept_descending(owner, 10), 2 * first)
