"""Adaptive input and adaptive softmax against their definitions: every probability, every gradient, every total."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from adaptive_equations import CASES, DOUBLE, Case, cases, check, compare, gradients
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fullrank as fr


@cases
def test_every_probability_and_every_gradient(case: Case) -> None:
    check(case, torch.randint(case.vocabulary, (3, 7)))


@pytest.mark.parametrize("case", [CASES[1], CASES[7], CASES[9], CASES[15]], ids=str)
@pytest.mark.parametrize("cluster", range(4))
def test_empty_clusters_and_single_tokens(case: Case, cluster: int) -> None:
    """All tokens of one cluster, and a text of one token."""
    bounds = [0, *case.cutoffs, case.vocabulary]
    check(case, torch.randint(bounds[cluster], bounds[cluster + 1], (2, 5)), (0.0, 0.3))
    check(case, torch.tensor([[bounds[cluster]]]), (0.0, 0.3))
    check(case, torch.tensor([[bounds[cluster + 1] - 1]]), (0.0,))


def test_a_cluster_without_tokens_gets_a_gradient_of_zero() -> None:
    """Not none: what an optimiser does must not hang on which words a batch holds."""
    for case in (CASES[1], CASES[17]):
        embedding, output = case.layers()
        for value in (lambda h, x, o=output: o.nll(h, x).sum(), lambda h, x, o=output: o.loss(h, x)[0]):
            output.zero_grad()
            embedding.zero_grad()
            value(torch.randn(1, 4, case.width, dtype=DOUBLE), torch.zeros(1, 4, dtype=torch.int64)).backward()
            tail = (embedding if case.tied else output).weights[2]
            assert torch.equal(tail.grad, torch.zeros_like(tail))
            assert all(p.grad is not None for p in output.parameters())


@settings(max_examples=15)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=2, max_size=5), div=st.integers(1, 3), rows=st.integers(1, 12),
    extra=st.integers(0, 4), tied=st.booleans(), bias=st.booleans(), form=st.sampled_from(["fairseq", "transformer_xl"]),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_any_size(
    sizes: list[int], div: int, rows: int, extra: int, tied: bool, bias: bool, form: str, seed: int
) -> None:
    torch.manual_seed(seed)
    ends = list(itertools.accumulate(sizes))
    case = Case(form, tied, None, bias, div, tuple(ends[:-1]), ends[-1], div ** (len(sizes) - 1) + extra)
    check(case, torch.randint(case.vocabulary, (1, rows)), (0.0, 0.2))


def test_gradcheck() -> None:
    _, output = Case("transformer_xl", False, None, True, 2, (2, 3), 6, 4).layers()
    hidden, targets = torch.randn(1, 4, 4, dtype=DOUBLE, requires_grad=True), torch.tensor([[5, 0, 2, 4]])
    assert torch.autograd.gradcheck(lambda h: output.nll(h, targets), hidden)
    assert torch.autograd.gradcheck(lambda h: output.loss(h, targets, label_smoothing=0.2)[0], hidden)


def test_nll_is_in_the_order_of_the_tokens() -> None:
    _, output = CASES[1].layers()
    hidden, targets = torch.randn(1, 12, 11, dtype=DOUBLE), torch.randint(31, (1, 12))
    order = torch.randperm(12)
    assert torch.allclose(
        output.nll(hidden[:, order], targets[:, order]), output.nll(hidden, targets)[:, order], atol=1e-12
    )


def test_equals_pytorchs_adaptive_softmax() -> None:
    """`nn.AdaptiveLogSoftmaxWithLoss` is the untied form without biases in the tails."""
    case = Case("fairseq", False, None, False, 2)
    _, output = case.layers()
    other = nn.AdaptiveLogSoftmaxWithLoss(case.width, case.vocabulary, list(case.cutoffs), div_value=2.0).double()
    with torch.no_grad():
        other.head.weight.copy_(torch.cat((output.weights[0], output.class_weight)))
        for i, (project, out) in enumerate(other.tail, start=1):
            project.weight.copy_(output.projections[str(i)].T)
            out.weight.copy_(output.weights[i])
    hidden, targets = torch.randn(40, case.width, dtype=DOUBLE), torch.randint(case.vocabulary, (40,))
    assert torch.allclose(output.log_prob(hidden[None])[0], other.log_prob(hidden), atol=1e-12)
    assert torch.allclose(-output.nll(hidden[None], targets[None])[0], other(hidden, targets).output, atol=1e-12)
    assert torch.allclose(output.loss(hidden[None], targets[None])[0], other(hidden, targets).loss, atol=1e-12)


FIXTURE = json.loads((Path(__file__).parent / "fixtures" / "transformer_xl_adaptive.json").read_text())


@pytest.mark.parametrize(
    "case", FIXTURE["cases"], ids=lambda c: f"div{c['div_val']}-{c['tied']}-{c['tied_projections']}"
)
def test_equals_transformer_xl(case: dict[str, Any]) -> None:
    """Vectors, log-probabilities and nll of Hugging Face's Transformer-XL for the same parameters (see `origin`)."""
    sizes = {name: FIXTURE[name] for name in ("vocab_size", "hidden_size")}
    clusters = {"cutoffs": FIXTURE["cutoffs"], "div_val": case["div_val"]}
    config = fr.ModelConfig(
        **sizes, num_attention_heads=1, scale_embedding=True, input=fr.InputConfig(kind="adaptive", **clusters),
        output=fr.OutputConfig(kind="adaptive", form="transformer_xl", tied=case["tied"],
                               tied_projections=case["tied_projections"] and case["tied"]),
    )  # fmt: skip
    embedding = fr.AdaptiveInput(config).double()
    layers = nn.ModuleDict({"embedding": embedding, "output": fr.AdaptiveSoftmax(config, embedding).double()})
    given = {name: torch.tensor(numbers, dtype=DOUBLE) for name, numbers in case["parameters"].items()}
    layers.load_state_dict({name: given[name].view_as(p) for name, p in layers.named_parameters()})
    assert given.keys() == dict(layers.named_parameters()).keys()
    hidden, count = torch.tensor(case["hidden"], dtype=DOUBLE).view(1, -1, sizes["hidden_size"]), len(case["ids"])
    for found, expected in (
        (embedding(torch.tensor([case["ids"]])), case["embedded"]),
        (layers["output"](hidden), case["log_prob"]),
        (layers["output"].nll(hidden, torch.tensor([case["targets"]])), case["nll"]),
    ):
        assert found.shape[:2] == (1, count)
        assert torch.allclose(found.flatten(), torch.tensor(expected, dtype=DOUBLE), atol=1e-12)


# -- adaptive input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("div_val", [1, 2, 3])
@pytest.mark.parametrize("scaled", [False, True])
def test_adaptive_input(div_val: int, scaled: bool) -> None:
    """A row of its cluster's table, projected, token by token; and the gradients of both."""
    width, cutoffs, vocabulary = 27, [4, 5, 11], 17
    layer = fr.AdaptiveInput(
        fr.ModelConfig(vocab_size=vocabulary, hidden_size=width, num_attention_heads=3, scale_embedding=scaled,
                       input=fr.InputConfig(kind="adaptive", cutoffs=cutoffs, div_val=div_val))
    ).double()  # fmt: skip
    assert [tuple(w.shape) for w in layer.weights] == [(n, width // div_val**i) for i, n in enumerate([4, 1, 6, 6])]
    assert len(layer.projections) == (0 if div_val == 1 else 4)
    ids = torch.tensor([[0, 3, 4, 5, 10], [11, 16, 3, 3, 11]])

    def vector(word: int) -> Tensor:
        i = sum(word >= cutoff for cutoff in cutoffs)
        row = layer.weights[i][word - [0, *cutoffs][i]]
        row = row if div_val == 1 else layer.projections[i] @ row
        return row * (width**0.5 if scaled else 1)

    expected = torch.stack([torch.stack([vector(int(word)) for word in row]) for row in ids])
    found, cotangent = layer(ids), torch.randn(2, 5, width, dtype=DOUBLE)
    leaves = dict(layer.named_parameters())
    compare(
        {"value": found} | gradients(found, cotangent, leaves),
        {"value": expected} | gradients(expected, cotangent, leaves),
    )


def test_ids_outside_the_vocabulary_are_refused_as_by_other_layers() -> None:
    embedding, output = CASES[1].layers()
    hidden = torch.randn(1, 1, 11, dtype=DOUBLE)
    for wrong in (-1, 31, 10_000):
        with pytest.raises(IndexError):
            embedding(torch.tensor([[wrong]]))
        with pytest.raises(RuntimeError, match="index"):
            output.nll(hidden, torch.tensor([[wrong]]))
