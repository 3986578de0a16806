"""Orthogonality and overlap against Eq. 16 and Eq. 20 as they stand."""

import itertools

import numpy as np
import pytest
import torch

import fullrank as fr
from fullrank.core.trace import overlap_terms
from moving import narrow


def model(mix):
    return narrow(vocab_size=7, head_dim=5, attention={"mix": mix})


def equation_16(mixing):
    """||M^T M - I||_F^2 from its entries: columns are to be orthogonal, of length one."""
    total = 0.0
    for i, j in itertools.product(range(len(mixing)), repeat=2):
        product = sum(mixing[k, i] * mixing[k, j] for k in range(len(mixing)))
        total += (product - (1.0 if i == j else 0.0)) ** 2
    return total


@pytest.mark.parametrize("mix", ["position_independent", "position_wise"])
def test_orthogonality_of_a_model_is_the_sum_over_layers(mix):
    made = model(mix)
    expected = sum(equation_16(b.attention.attend.mix.mixing.detach().numpy()) for b in made.blocks)
    assert abs(float(fr.orthogonality(made).detach()) - expected) < 1e-10 * expected
    assert expected > 1


def test_orthogonality_of_a_trace_is_the_mean_over_positions():
    made = model("position_wise")
    trace = fr.Trace()
    made(torch.randint(7, (2, 5)), trace=trace)
    assert len(trace.layers) == 2
    expected = 0.0
    for layer in trace.layers:
        matrices = layer.mixing.detach().numpy().reshape(-1, 3, 3)
        assert len(matrices) == 10
        expected += sum(equation_16(m) for m in matrices) / 10
    assert abs(float(fr.orthogonality(trace).detach()) - expected) < 1e-10 * expected


@pytest.mark.parametrize("shape", [(1, 2, 4, 4), (3, 4, 5, 7), (2, 1, 3, 3)])
def test_overlap_is_equation_20_over_all_pairs_of_heads(shape):
    weights = torch.softmax(torch.randn(shape, dtype=torch.float64), -1)
    rows = columns = 0.0
    for text in weights.numpy():
        for first, second in itertools.combinations(text, 2):
            rows += np.linalg.norm(first @ second.T) ** 2 / shape[0]
            columns += np.linalg.norm(first.T @ second) ** 2 / shape[0]
    terms = overlap_terms(weights)
    assert abs(float(terms[0]) - rows) < 1e-12
    assert abs(float(terms[1]) - columns) < 1e-12
    assert abs(float(fr.overlap(weights)) - rows - columns) < 1e-12


def test_overlap_of_a_trace_takes_the_weights_before_mixing():
    made = model("position_independent")
    trace = fr.Trace()
    made(torch.randint(7, (2, 5)), trace=trace)
    expected = sum(float(fr.overlap(layer.weights.detach())) for layer in trace.layers)
    assert abs(float(fr.overlap(trace).detach()) - expected) < 1e-12
    for layer, block in zip(trace.layers, made.blocks, strict=True):
        mixed = torch.einsum("bjnm,ji->binm", layer.weights, block.attention.attend.mix.mixing)
        assert torch.allclose(layer.mixed, mixed, atol=1e-14)
    fr.overlap(trace).backward()
    assert made.blocks[0].attention.project.query.weight.grad.abs().max() > 0
