"""Input layers: token by token, with the gradients of every table; how tensor trains start."""

import math

import numpy as np
import output_equations as equations
import pytest
import torch

import fullrank as fr
from fullrank.core import registry
from fullrank.core.compressed_embedding import TensorTrainInput, factorize

DOUBLE = torch.float64


@pytest.mark.parametrize(("div_val", "scaled"), [(1, True), (2, False), (3, True)])
def test_adaptive_input(div_val, scaled):
    """A row of its cluster's table, projected, token by token; and the gradients of both."""
    width, vocabulary = 27, 17
    cutoffs = [4, 5, 11]
    layer = fr.AdaptiveInput(
        fr.ModelConfig(vocab_size=vocabulary, hidden_size=width, num_attention_heads=3, scale_embedding=scaled,
                       input=fr.InputConfig(kind="adaptive", cutoffs=cutoffs, div_val=div_val))
    ).double()  # fmt: skip
    assert [tuple(w.shape) for w in layer.weights] == [(n, width // div_val**i) for i, n in enumerate([4, 1, 6, 6])]
    assert len(layer.projections) == (0 if div_val == 1 else 4)
    ids = torch.tensor([[0, 3, 4, 5, 10], [11, 16, 3, 3, 11]])

    def vector(word):
        i = sum(word >= cutoff for cutoff in cutoffs)
        row = layer.weights[i][word - [0, *cutoffs][i]]
        row = row if div_val == 1 else layer.projections[i] @ row
        return row * (width**0.5 if scaled else 1)

    expected = torch.stack([vector(word) for word in ids.flatten().tolist()]).view(2, 5, width)
    leaves = dict(layer.named_parameters())
    equations.compare(layer(ids), expected, leaves, leaves, torch.randn(2, 5, width, dtype=DOUBLE))


def train(vocab_size=23, hidden_size=24, scaled=False, **options):
    config = fr.ModelConfig(vocab_size=vocab_size, hidden_size=hidden_size, num_attention_heads=1, scale_embedding=scaled,
                            input=fr.InputConfig(kind="tensor_train", **options))  # fmt: skip
    torch.manual_seed(8)
    return TensorTrainInput(config)


@pytest.mark.parametrize(
    ("options", "shapes"),
    [
        ({"rank": 3}, [(1, 3, 2, 3), (3, 3, 3, 3), (3, 3, 4, 1)]),  # 3 x 3 x 3 >= 23, 2 x 3 x 4 = 24
        ({"rank": 2, "cores": 2}, [(1, 5, 4, 2), (2, 5, 6, 1)]),
        ({"rank": 5, "cores": 1}, [(1, 23, 24, 1)]),
    ],
)
def test_tensor_train(options, shapes):
    """Entry by entry a product of matrices of numbers, with the gradients of every core."""
    layer = train(scaled=True, **options).double()
    assert [tuple(core.shape) for core in layer.cores] == shapes
    words, widths = [shape[1] for shape in shapes], [shape[2] for shape in shapes]
    ids = torch.tensor([[0, 22, 5], [7, 7, 13]])

    def entry(word, dimension):
        product = torch.eye(1, dtype=DOUBLE)
        i, j = np.unravel_index(word, words), np.unravel_index(dimension, widths)
        for k, core in enumerate(layer.cores):
            product = product @ core[:, i[k], j[k], :]
        return product[0, 0] * 24**0.5

    expected = torch.stack([entry(word, d) for word in ids.flatten().tolist() for d in range(24)])
    leaves = dict(layer.named_parameters())
    equations.compare(layer(ids), expected.view(2, 3, 24), leaves, leaves, torch.randn(2, 3, 24, dtype=DOUBLE))


def test_factors_are_nearly_equal():
    """Factors are nearly equal, of the paper's sizes too: 256 = 4 x 8 x 8 and 512 = 8 x 8 x 8."""
    for size in (1, 2, 7, 23, 64, 97, 256, 410, 512, 1024, 10_000, 267_735):
        for count in (1, 2, 3, 4):
            above, exact = factorize(size, count, exact=False), factorize(size, count, exact=True)
            assert len(above) == len(exact) == count
            assert math.prod(exact) == size <= math.prod(above)
            assert max(above) - min(above) <= 1 or math.prod(above) == size
            assert sorted(exact) == exact
    assert [factorize(size, 3, exact=True) for size in (256, 410, 512)] == [[4, 8, 8], [2, 5, 41], [8, 8, 8]]
    assert factorize(10_000, 3, exact=False) == [21, 22, 22]


@pytest.mark.parametrize(
    ("initializer", "variance"),
    [("fairseq", 1 / 64), ("transformer_xl", 0.02**2), ("pytorch", 1.0), ("xavier_uniform", 2 / (900 + 64))],
)
def test_a_tensor_train_starts_with_the_variance_of_a_plain_table(initializer, variance):
    layer = train(900, 64, rank=8)
    ratios = []
    for seed in range(30):
        torch.manual_seed(seed)
        registry.lookup("initializer", initializer)(layer)
        ratios.append(float(layer(torch.arange(900)[None]).detach().square().mean()) / variance)
    mean, error = np.mean(ratios), np.std(ratios) / 30**0.5
    assert error < 0.06
    assert abs(mean - 1) < 4 * error
