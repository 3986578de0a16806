"""How adaptive layers start, and what they refuse."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fullrank as fr
from fullrank.core.errors import ConfigError


def large(initializer: str, tied: bool, form: str) -> fr.LanguageModel:
    torch.manual_seed(3)
    return fr.LanguageModel(
        fr.ModelConfig(
            vocab_size=900, hidden_size=64, num_hidden_layers=1, num_attention_heads=2, initializer=initializer,
            input=fr.InputConfig(kind="adaptive", cutoffs=[200, 500], div_val=2),
            output=fr.OutputConfig(kind="adaptive", tied=tied, form=form, bias=True, tied_projections=False),
        )
    )  # fmt: skip


def spread(tensor: Tensor) -> tuple[float, float]:
    """Standard deviation, and the largest number in units of it: sqrt(3) for a uniform distribution."""
    std = float(tensor.std())
    return std, float(tensor.abs().max()) / std


def is_normal(tensor: Tensor, std: float) -> None:
    found, longest = spread(tensor.detach())
    assert abs(found / std - 1) < 5 / (2 * tensor.numel()) ** 0.5
    assert longest > 2


def is_uniform(tensor: Tensor, bound: float) -> None:
    tensor = tensor.detach()
    assert float(tensor.abs().max()) <= bound * (1 + 1e-6)
    assert float(tensor.abs().max()) > bound * (1 - 20 / tensor.numel())
    found, longest = spread(tensor.detach())
    assert longest < 2.2
    assert abs(found / bound * 3**0.5 - 1) < 5 / tensor.numel() ** 0.5


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
    """As nn.Embedding and nn.Linear."""
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
    torch.manual_seed(1)
    embedding = fr.AdaptiveInput(fr.InputConfig(kind="adaptive", cutoffs=[10], div_val=4), **sizes)
    tied = fr.OutputConfig(kind="adaptive", cutoffs=[10], div_val=4, tied=True)
    output = fr.AdaptiveSoftmax(tied, embedding, **sizes)
    hidden = embedding(torch.tensor([[1, 29]]))
    assert hidden.isfinite().all()
    assert float(output.nll(hidden, torch.tensor([[29, 1]])).detach().min()) > 0


# -- what is refused --------------------------------------------------------------------------------------------------


def test_what_layers_alone_refuse() -> None:
    read, sizes = fr.InputConfig(kind="adaptive", cutoffs=[10], div_val=4), {"vocab_size": 30, "hidden_size": 16}
    written = fr.OutputConfig(kind="adaptive", cutoffs=[10], tied=True)
    for build, message in (
        (lambda: fr.AdaptiveInput(read), "give a ModelConfig, or an InputConfig with vocab_size and hidden_size"),
        (lambda: fr.AdaptiveInput(read, hidden_size=16), r"model\.vocab_size: must be a number"),
        (lambda: fr.AdaptiveInput(read, vocab_size=10, hidden_size=16), r"model\.input\.cutoffs: below .* 10"),
        (lambda: fr.AdaptiveInput(read, vocab_size=30, hidden_size=3), r"model\.input\.div_val: .* 3 / 4\^1 < 1"),
        (lambda: fr.AdaptiveInput(fr.ModelConfig(vocab_size=30, input=read), **sizes), "has its own sizes"),
        (lambda: fr.AdaptiveSoftmax(written), "or an OutputConfig with vocab_size and hidden_size"),
        (lambda: fr.AdaptiveSoftmax(written, **sizes), "tied to an AdaptiveInput with the same clusters"),
        (lambda: fr.AdaptiveSoftmax(written, fr.AdaptiveInput(read, **sizes), **sizes), "with the same clusters"),
        (lambda: fr.AdaptiveSoftmax(fr.OutputConfig(kind="adaptive"), **sizes), r"model\.output\.cutoffs: an adaptive"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            build()
