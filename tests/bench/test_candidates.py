"""Candidates of all benchmarks agree where they compute the same, at tiny sizes; how a benchmark treats those that do not."""

import dataclasses

import pytest
import torch

import measure
import mixing
from candidates import BOTH, Candidate, Comparison, Pass, Settings, Shape
from fullrank.core.errors import RunError
from suites import SUITES

TINY = Settings(heads=2, head_dim=8, batch=2, compile=False)
NAMES = list(SUITES)


def shrink(name, dtypes=("fp32",)):
    """The comparisons of a benchmark at their tiny sizes, each once, and their passes."""
    comparisons = {}
    for comparison in measure.list_comparisons(SUITES[name], TINY, dtypes, [16]):
        for pass_name in comparison.passes:
            comparisons.setdefault(
                (comparison.tiny, pass_name), (dataclasses.replace(comparison, size=comparison.tiny), pass_name)
            )
    return list(comparisons.values())


@pytest.mark.parametrize("name", NAMES)
def test_candidates_that_compute_the_same_agree(name):
    compared = 0
    for comparison, pass_name in shrink(name):
        by_result = {}
        for candidate in comparison.candidates:
            if not candidate.absent:
                by_result.setdefault(candidate.computes, []).append(
                    (candidate.name, candidate.make_pass(pass_name, comparison.size).values())
                )
        for (first, expected), *others in by_result.values():
            for other, values in others:
                for tensor in values.keys() & expected.keys():
                    off = (values[tensor] - expected[tensor]).abs() - 1e-4 * expected[tensor].abs()
                    assert off.max() < 1e-5, f"{comparison.size}, {first}, {other}, {tensor}: {off.max():.1e}"
                    compared += 1
    assert compared > 0 or name in ("growth", "small-step", "generation", "skip")  # there all compute different things


def test_talking_heads_are_mixhead_a_with_the_matrix_transposed():
    pytest.importorskip("x_transformers", reason="the extra 'bench' is not installed")
    passes, _ = measure.make_and_compare(*shrink("mixing")[1], {})
    ours, theirs = passes["Mixhead A"].values(), passes["x-transformers"].values()
    torch.testing.assert_close(theirs["convolution"][:, :, 0, 0].T, ours["mixing"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_narrow_dtypes_agree_within_their_tolerance(name):
    for comparison, pass_name in shrink(name, ["bf16"]):
        skipped = {}
        passes, _ = measure.make_and_compare(comparison, pass_name, skipped)
        assert all(candidate.name in passes or candidate.absent for candidate in comparison.candidates), skipped


def test_candidates_of_two_dtypes_stand_in_one_comparison():
    candidates = {candidate.name: candidate for candidate in shrink("layer", ["fp32", "bf16"])[0][0].candidates}
    assert candidates["Mixhead A fp32"].against == ("SDPA layer fp32",)
    assert candidates["Mixhead A bf16"].against == ("SDPA layer bf16", "Mixhead A fp32")
    assert candidates["Mixhead A bf16"].computes != candidates["Mixhead A fp32"].computes


def test_peers_agree_with_a_loop_over_queries():
    """Mixhead B of the definition: M(n) = Q(n) W + B, one query and head at a time, in double precision."""
    problem = mixing.Problem(TINY, False, "B", Shape(1, 2, 5, 8))
    operands = {name: tensor.detach().double() for name, tensor in problem.make_operands().items()}
    query, keys, values = operands["query"], operands["keys"], operands["values"]
    expected = torch.zeros_like(values)
    for n in range(5):
        weights = [torch.softmax(keys[0, j, : n + 1] @ query[0, j, n] / 8**0.5, 0) for j in range(2)]
        for i in range(2):
            row = sum(
                (query[0, j, n] @ operands["from_query"][:, i] + operands["mixing"][j, i]) * weights[j]
                for j in range(2)
            )
            expected[0, i, n] = row @ values[0, i, : n + 1]
    future = torch.ones(5, 5, dtype=torch.bool).triu(1)
    torch.testing.assert_close(mixing.formula(query, keys, values, mixing.compute_matrix(operands), future), expected)


def test_the_train_step_updates_and_its_values_do_not():
    ((comparison, pass_name),) = shrink("step")
    ours = comparison.candidates[0].make_pass(pass_name, comparison.size)
    before = [parameter.detach().clone() for parameter in ours.model.parameters()]
    first = ours.values()
    assert all(torch.equal(a, b) for a, b in zip(before, ours.model.parameters(), strict=True))
    ours()
    assert any(not torch.equal(a, b) for a, b in zip(before, ours.model.parameters(), strict=True))
    assert float(ours.values()["output"]) < float(first["output"])


# how a benchmark goes on when something is not as it should be


def passing(scale=1.0):
    def make(settings, backward, size):
        leaf = torch.arange(1.0, 4.0, requires_grad=True)
        return Pass(lambda: scale * leaf**2, {"leaf": leaf}, torch.ones(3), True)

    return make


def failing(settings, backward, size):
    raise NotImplementedError("no such thing\nhere")


def make_passes(*candidates):
    skipped = {}
    comparison = Comparison("shape", "tiny", 3, candidates)
    return list(measure.make_and_compare(comparison, BOTH, skipped)[0]), skipped


OURS = Candidate("ours", passing(), "square", ("peer",))


def test_different_functions_are_not_timed():
    with pytest.raises(RunError, match=r"peer and ours, shape, forward \+ backward: .* differs by 1\.0e-02"):
        make_passes(OURS, Candidate("peer", passing(1.01), "square"))
    assert make_passes(OURS, Candidate("peer", passing(1.01), "something else")) == (["ours", "peer"], {})


def test_peers_that_are_absent_too_large_or_fail_are_skipped_by_name():
    names, skipped = make_passes(
        OURS,
        Candidate("peer", passing(), "square", absent="not installed"),
        Candidate("huge", passing(), "square", takes=2**60),
        Candidate("broken", failing, "square"),
    )
    assert names == ["ours"]
    assert skipped["peer"] == "not installed"
    assert skipped["huge"].startswith("needs at least 1,073,741,824.0 GiB, ")
    assert skipped["broken"] == "failed: NotImplementedError: no such thing here"
