"""Starts of parameters, from the definitions of the initialisers' originals: moments, bounds, zeros."""

from __future__ import annotations

import math

import torch
from torch import Tensor

import fullrank as fr

E, H, D, F, V, P = 48, 4, 20, 100, 300, 64


def model(initializer: str, tied: bool = False, bias: bool | None = None, **attention: object) -> fr.LanguageModel:
    torch.manual_seed(5)
    config = fr.ModelConfig(
        vocab_size=V, hidden_size=E, num_hidden_layers=2, num_attention_heads=H, head_dim=D, intermediate_size=F,
        position="learned", max_position_embeddings=P, initializer=initializer,
        output=fr.OutputConfig(tied=tied, bias=bias), attention=fr.AttentionConfig(**attention),
    )  # fmt: skip
    return fr.LanguageModel(config)


def normal(tensor: Tensor, std: float, mean: float = 0.0) -> None:
    numbers = (tensor.detach().double().flatten() - mean) / std
    count = len(numbers)
    assert abs(float(numbers.mean())) < 5 / math.sqrt(count)
    assert abs(float(numbers.std()) - 1) < 5 / math.sqrt(2 * count)
    assert float(numbers.abs().max()) > 1.8  # beyond the sqrt(3) of a uniform distribution of the same deviation


def uniform(tensor: Tensor, bound: float) -> None:
    numbers = tensor.detach().double().flatten() / bound
    count = len(numbers)
    assert float(numbers.abs().max()) <= 1 + 1e-6
    assert float(numbers.abs().max()) > 1 - 20 / count
    assert abs(float(numbers.mean())) < 5 / math.sqrt(3 * count)
    assert abs(float(numbers.square().mean()) - 1 / 3) < 5 * math.sqrt(4 / 45 / count)


def as_in_pytorch(*layers: torch.nn.Linear) -> None:
    for layer in layers:
        uniform(layer.weight, layer.in_features**-0.5)
        uniform(layer.bias, layer.in_features**-0.5)


def zero(tensor: Tensor) -> None:
    assert torch.equal(tensor, torch.zeros_like(tensor))


def norms_at_one(made: fr.LanguageModel) -> None:
    norms = [module for module in made.modules() if isinstance(module, torch.nn.LayerNorm)]
    assert len(norms) == 5
    for norm in norms:
        assert torch.equal(norm.weight, torch.ones_like(norm.weight))
        zero(norm.bias)


def test_fairseq() -> None:
    """transformer_lm: embeddings N(0, 1/E), q, k, v Xavier with gain 1/sqrt(2), out_proj Xavier, bias 0, fc as in PyTorch."""
    made = model("fairseq")
    for table in (made.embedding.weight, made.position.weight, made.output.weight):
        normal(table, E**-0.5)
    zero(made.output.bias)
    for block in made.blocks:
        project = block.attention.project
        for layer in (project.query, project.key, project.value):
            uniform(layer.weight, math.sqrt(6 / (E + H * D)) / math.sqrt(2))
            uniform(layer.bias, E**-0.5)
        uniform(block.attention.merge.weight, math.sqrt(6 / (E + H * D)))
        zero(block.attention.merge.bias)
        as_in_pytorch(block.feed_forward.up, block.feed_forward.down)
    norms_at_one(made)


def test_transformer_xl() -> None:
    """weights_init: N(0, 0.02) everywhere, biases 0, norm weights N(1, 0.02)."""
    made = model("transformer_xl")
    for table in (made.embedding.weight, made.position.weight, made.output.weight):
        normal(table, 0.02)
    zero(made.output.bias)
    layers = [module for module in made.modules() if isinstance(module, torch.nn.Linear)]
    assert len(layers) == 2 * 6
    for layer in layers:
        normal(layer.weight, 0.02)
        zero(layer.bias)
    norms = [module for module in made.modules() if isinstance(module, torch.nn.LayerNorm)]
    normal(torch.cat([norm.weight for norm in norms]), 0.02, mean=1.0)
    assert len(norms) == 5
    for norm in norms:
        zero(norm.bias)


def test_pytorch() -> None:
    """nn.Embedding N(0, 1); in_proj (3E, E) Xavier as one matrix, its bias 0; out_proj bias 0; the rest as in nn.Linear."""
    made = model("pytorch")
    for table in (made.embedding.weight, made.position.weight):
        normal(table, 1.0)
    uniform(made.output.weight, E**-0.5)
    uniform(made.output.bias, E**-0.5)
    for block in made.blocks:
        project = block.attention.project
        for layer in (project.query, project.key, project.value):
            uniform(layer.weight, math.sqrt(6 / (E + 3 * H * D)))
            zero(layer.bias)
        uniform(block.attention.merge.weight, (H * D) ** -0.5)
        zero(block.attention.merge.bias)
        as_in_pytorch(block.feed_forward.up, block.feed_forward.down)
    norms_at_one(made)


def xavier(tensor: Tensor) -> None:
    rows, columns = tensor.shape
    uniform(tensor, math.sqrt(6 / (rows + columns)))


def test_xavier_uniform() -> None:
    """Transformer-MoS: `xavier_uniform_` on every parameter of more than one dimension, vectors as PyTorch has them."""
    torch.manual_seed(5)
    config = fr.ModelConfig(
        vocab_size=V, hidden_size=E, num_hidden_layers=2, num_attention_heads=H, head_dim=D, intermediate_size=F,
        position="learned", max_position_embeddings=P, initializer="xavier_uniform",
        output=fr.OutputConfig(kind="mixture_of_softmaxes", mixtures=10),
    )  # fmt: skip
    made = fr.LanguageModel(config)
    for table in (made.embedding.weight, made.position.weight, made.output.weight):
        xavier(table)
    uniform(made.output.bias, E**-0.5)
    latents = made.output.mixture
    assert latents.latent.weight.shape == (10 * E, E)
    xavier(latents.latent.weight)
    xavier(latents.prior.weight)
    uniform(latents.latent.bias, E**-0.5)
    for block in made.blocks:
        project = block.attention.project
        for layer in (project.query, project.key, project.value):
            uniform(layer.weight, math.sqrt(6 / (E + 3 * H * D)))
            zero(layer.bias)
        xavier(block.attention.merge.weight)
        zero(block.attention.merge.bias)
        for layer in (block.feed_forward.up, block.feed_forward.down):
            xavier(layer.weight)
            uniform(layer.bias, layer.in_features**-0.5)
    norms_at_one(made)
    plain = model("xavier_uniform")
    assert plain.output.weight.shape == (V, E)
    xavier(plain.output.weight)
    uniform(plain.output.bias, E**-0.5)


def test_skip_cross_head() -> None:
    """Its code makes `nn.Linear`, `nn.Embedding` and `torch.randn`, and changes nothing of them."""
    torch.manual_seed(5)
    config = fr.ModelConfig(
        vocab_size=V, hidden_size=E, num_hidden_layers=1, num_attention_heads=H, head_dim=D, intermediate_size=F,
        position="relative", initializer="skip_cross_head", attention=fr.AttentionConfig(score="relative", bias=False),
        input=fr.InputConfig(kind="adaptive", cutoffs=[100], div_val=2),
        output=fr.OutputConfig(kind="adaptive", form="transformer_xl", cutoffs=[100], div_val=2),
    )  # fmt: skip
    made = fr.LanguageModel(config)
    drawn = [*made.embedding.weights, *made.embedding.projections, *made.output.projections.values()]
    drawn += made.position.biases.parameters()
    assert len(drawn) == 2 + 2 + 2 + 2
    for tensor in drawn:
        normal(tensor, 1.0)
    for weight, bias in zip(made.output.weights, made.output.biases, strict=True):
        uniform(weight, weight.shape[1] ** -0.5)
        uniform(bias, weight.shape[1] ** -0.5)
    attention = made.blocks[0].attention
    for layer in (attention.project.query, attention.project.key, attention.project.value, attention.project.relative):
        uniform(layer.weight, E**-0.5)
    uniform(attention.merge.weight, (H * D) ** -0.5)
