"""Input layers: token by token, with the gradients of every table; how adaptive layers start; what they refuse."""

from __future__ import annotations

import output_equations as equations
import pytest
import torch
from torch import Tensor

import fullrank as fr
from fullrank.core.errors import ConfigError

DOUBLE = torch.float64


@pytest.mark.parametrize(("div_val", "scaled"), [(1, True), (2, False), (3, True)])
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
    leaves = dict(layer.named_parameters())
    equations.compare(layer(ids), expected, leaves, leaves, torch.randn(2, 5, width, dtype=DOUBLE))


def test_ids_outside_the_vocabulary_are_refused() -> None:
    layer = fr.AdaptiveInput(fr.InputConfig(kind="adaptive", cutoffs=[10], div_val=4), vocab_size=31, hidden_size=16)
    for wrong in (-1, 31, 10_000):
        with pytest.raises(IndexError):
            layer(torch.tensor([[wrong]]))


def test_layers_alone_refuse_sizes_that_cannot_be() -> None:
    config = fr.InputConfig(kind="adaptive", cutoffs=[10], div_val=4)
    model = fr.ModelConfig(vocab_size=30, input=config)
    for build, message in (
        (lambda: fr.AdaptiveInput(config), "give a ModelConfig, or an InputConfig with vocab_size and hidden_size"),
        (lambda: fr.AdaptiveInput(config, hidden_size=16), r"model\.vocab_size: must be a number"),
        (lambda: fr.AdaptiveInput(config, vocab_size=10, hidden_size=16), r"model\.input\.cutoffs: below .* 10"),
        (lambda: fr.AdaptiveInput(config, vocab_size=30, hidden_size=3), r"model\.input\.div_val: .* 3 / 4\^1 < 1"),
        (lambda: fr.AdaptiveInput(model, vocab_size=30, hidden_size=16), "has its own sizes"),
    ):
        with pytest.raises(ConfigError, match=message):
            build()


# -- how adaptive layers start ----------------------------------------------------------------------------------------


def large(initializer: str, tied: bool, form: str) -> fr.LanguageModel:
    torch.manual_seed(3)
    return fr.LanguageModel(
        fr.ModelConfig(
            vocab_size=900, hidden_size=64, num_hidden_layers=1, num_attention_heads=2, initializer=initializer,
            input=fr.InputConfig(kind="adaptive", cutoffs=[200, 500], div_val=2),
            output=fr.OutputConfig(kind="adaptive", tied=tied, form=form, bias=True, tied_projections=False),
        )
    )  # fmt: skip


def is_normal(tensor: Tensor, std: float) -> None:
    tensor = tensor.detach()
    assert abs(float(tensor.std()) / std - 1) < 5 / (2 * tensor.numel()) ** 0.5
    assert float(tensor.abs().max() / tensor.std()) > 2


def is_uniform(tensor: Tensor, bound: float) -> None:
    tensor = tensor.detach()
    assert bound * (1 - 20 / tensor.numel()) < float(tensor.abs().max()) <= bound * (1 + 1e-6)
    assert float(tensor.abs().max() / tensor.std()) < 2.2  # of a uniform distribution it is sqrt(3)
    assert abs(float(tensor.std()) / bound * 3**0.5 - 1) < 5 / tensor.numel() ** 0.5


def test_fairseq_starts() -> None:
    """Vectors N(0, 1 / width); projections, tails and the head (words and classes as one matrix) Xavier; biases 0."""
    made = large("fairseq", False, "transformer_xl")
    for i, width in enumerate((64, 32, 16)):
        is_normal(made.embedding.weights[i], width**-0.5)
        is_uniform(made.embedding.projections[i], (6 / (64 + width)) ** 0.5)
        is_uniform(made.output.projections[str(i)], (6 / (64 + width)) ** 0.5)
        assert float(made.output.biases[i].detach().abs().max()) == 0
    for part in (made.output.weights[0], made.output.class_weight):
        is_uniform(part, (6 / (64 + 202)) ** 0.5)
    is_uniform(made.output.weights[1], (6 / (300 + 32)) ** 0.5)
    is_uniform(made.output.weights[2], (6 / (400 + 16)) ** 0.5)
    is_uniform(large("fairseq", True, "fairseq").output.class_weight, (6 / (64 + 2)) ** 0.5)


def test_transformer_xl_starts() -> None:
    made = large("transformer_xl", False, "transformer_xl")
    for layer in (made.embedding, made.output):
        assert len(layer.projections) == 3
        for projection in layer.projections if layer is made.embedding else layer.projections.values():
            is_normal(projection, 0.01)
        for weight in layer.weights:
            is_normal(weight, 0.02)
    is_normal(made.output.class_weight, 0.02)
    assert all(float(p.detach().abs().max()) == 0 for n, p in made.output.named_parameters() if p.dim() == 1)


def test_pytorch_starts() -> None:
    """The starts of nn.Embedding and nn.Linear."""
    made = large("pytorch", False, "transformer_xl")
    for i, width in enumerate((64, 32, 16)):
        is_normal(made.embedding.weights[i], 1.0)
        is_uniform(made.embedding.projections[i], width**-0.5)
        is_uniform(made.output.weights[i], width**-0.5)
        is_uniform(made.output.biases[i], width**-0.5)
        is_uniform(made.output.projections[str(i)], 1 / 8)
    is_uniform(made.output.class_weight, 1 / 8)
    assert 0 < float(made.output.class_bias.detach().abs().max()) <= 1 / 8


def test_layers_alone_start_too() -> None:
    sizes = {"vocab_size": 30, "hidden_size": 16}
    embedding = fr.AdaptiveInput(fr.InputConfig(kind="adaptive", cutoffs=[10], div_val=4), **sizes)
    tied = fr.OutputConfig(kind="adaptive", cutoffs=[10], div_val=4, tied=True)
    output = fr.AdaptiveSoftmax(tied, embedding, **sizes)
    hidden = embedding(torch.tensor([[1, 29]]))
    assert hidden.isfinite().all()
    assert float(output.nll(hidden, torch.tensor([[29, 1]])).detach().min()) > 0
