"""Initialisers by name: how parameters start in fairseq, in Transformer-XL and in PyTorch's own layers.

An initialiser is called for every module of a model in order. Mixing starts as its configuration says, and what it draws is
drawn last, so that all other parameters of models with and without mixing start equal.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager

from torch import Tensor, nn

from . import registry
from .attention import Attention
from .compressed_embedding import AdaptiveInput, TensorTrainInput
from .draws import draw_apart
from .embedding import Learned, RelativeBiases, RelativeKeys, T5Bias, TokenEmbedding
from .multilinear import MultiLinear
from .output import AdaptiveSoftmax, Latents, SoftmaxOutput
from .registry import register
from .released import PositionTerm
from .score import RandomSynthesizer
from .stages import Mixing, Projection, SeparateLinear

_TABLES = TokenEmbedding | Learned | SoftmaxOutput | AdaptiveInput | AdaptiveSoftmax

Initializer = Callable[[nn.Module], None]


def _draw_apart(layer: nn.Module) -> AbstractContextManager[None]:
    return draw_apart() if isinstance(layer, SeparateLinear) else contextlib.nullcontext()


def _start_projections(attention: Attention, start: Callable[[nn.Linear], object]) -> None:
    for layer in attention.project.layers():
        with _draw_apart(layer):
            start(layer)


def _zero_bias(*layers: nn.Linear) -> None:
    for layer in layers:
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)


def _uniform(fan_in: int, *parameters: Tensor | None) -> None:
    """Start parameters as in `nn.Linear`: uniform within +-1 / sqrt(fan_in)."""
    for parameter in parameters:
        if parameter is not None:
            nn.init.uniform_(parameter, -(fan_in**-0.5), fan_in**-0.5)


def _pairs(module: MultiLinear, start: Callable[[Tensor], object]) -> None:
    """Start the output map of multi-linear attention over pairs of positions, as the matrix (P^2, E) that it is."""
    if module.weight is not None:
        start(module.weight.view(-1, module.weight.shape[2]))


def _tables(module: nn.Module, std: float | None = None) -> None:
    """Start embeddings, learned positions and an untied vocabulary matrix from N(0, std^2), by default N(0, 1/E).

    Entries of a tensor train have that variance. A vocabulary bias stays 0.
    """
    if isinstance(module, TensorTrainInput):
        module.start(std or module.hidden_size**-0.5)
    elif isinstance(module, TokenEmbedding | Learned | SoftmaxOutput) and module.weight is not None:
        nn.init.normal_(module.weight, std=std or module.weight.shape[1] ** -0.5)


@register("initializer", "fairseq")
def fairseq(module: nn.Module) -> None:
    """Start a module as in fairseq's Transformer.

    Embeddings and vocabulary matrix are N(0, 1/E). Query, key and value are Xavier-uniform with gain 1/sqrt(2), their biases as
    in `nn.Linear`. Merge is Xavier-uniform with bias 0. Feed-forward is as in `nn.Linear`. In relative attention keys of
    distances start as keys, u and v Xavier-uniform. Synthesizers and adaptive layers start as their classes say.
    """
    _tables(module)
    if isinstance(module, AdaptiveInput | AdaptiveSoftmax):
        module.reset_parameters()
    elif isinstance(module, Attention):
        _start_projections(module, lambda layer: nn.init.xavier_uniform_(layer.weight, gain=1 / math.sqrt(2)))
        if isinstance(module.merge, nn.Linear):  # multi-linear attention has its output map instead
            nn.init.xavier_uniform_(module.merge.weight)
            _zero_bias(module.merge)
    elif isinstance(module, RelativeKeys | PositionTerm):
        nn.init.xavier_uniform_(module.weight, gain=1 / math.sqrt(2))
    elif isinstance(module, MultiLinear):
        _pairs(module, nn.init.xavier_uniform_)
    elif isinstance(module, RelativeBiases):
        for bias in module.parameters():
            nn.init.xavier_uniform_(bias)


@register("initializer", "transformer_xl")
def transformer_xl(module: nn.Module) -> None:
    """Start a module as in Transformer-XL.

    Every matrix and table, u and v are N(0, 0.02^2), other biases 0, norm weights N(1, 0.02^2), projections of adaptive layers
    N(0, 0.01^2).
    """
    _tables(module, 0.02)
    if isinstance(module, AdaptiveInput | AdaptiveSoftmax):
        for name, parameter in module.named_parameters():
            if parameter.ndim == 1:
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=0.01 if name.startswith("projections.") else 0.02)
    if isinstance(module, nn.Linear):
        with _draw_apart(module):
            nn.init.normal_(module.weight, std=0.02)
        _zero_bias(module)
    elif isinstance(module, RelativeKeys | PositionTerm | RelativeBiases | RandomSynthesizer | T5Bias):
        for parameter in module.parameters(recurse=False):
            nn.init.normal_(parameter, std=0.02)
    elif isinstance(module, MultiLinear):
        _pairs(module, functools.partial(nn.init.normal_, std=0.02))
    elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
        nn.init.normal_(module.weight, mean=1.0, std=0.02)


@register("initializer", "pytorch")
def pytorch(module: nn.Module) -> None:
    """Start a module as in `nn.Embedding`, `nn.TransformerEncoderLayer` and `nn.Linear`.

    Embeddings and positions are N(0, 1). Query, key and value are Xavier-uniform as one packed matrix. Attention biases are 0,
    and so are u and v. Everything else is as in `nn.Linear`.
    """
    if isinstance(module, SoftmaxOutput):
        _uniform(module.matrix.shape[1], module.weight, module.bias)
    else:
        _tables(module, 1.0)
    if isinstance(module, AdaptiveInput):
        for weight in module.weights:
            nn.init.normal_(weight)
        for projection in module.projections:
            _uniform(projection.shape[1], projection)
    elif isinstance(module, AdaptiveSoftmax):
        hidden = module.class_weight.shape[1]
        widths = module.clusters.widths
        for i, width in enumerate(widths):
            _uniform(width, *(tensors[i] for tensors in (module.weights, module.biases) if len(tensors)))
        _uniform(hidden, module.class_weight, module.class_bias, *module.projections.parameters())
    elif isinstance(module, Attention):
        layers = module.project.layers()
        rows = (module.project.groups + 2) * layers[-1].out_features  # the last one makes the values
        bound = math.sqrt(6 / (layers[0].in_features + rows))
        _start_projections(module, lambda layer: nn.init.uniform_(layer.weight, -bound, bound))
        _zero_bias(*layers)
        if isinstance(module.merge, nn.Linear):
            _zero_bias(module.merge)


@register("initializer", "skip_cross_head")
def skip_cross_head(module: nn.Module) -> None:
    """Start a module as in the released code of Skip Cross-head, which leaves all to PyTorch.

    Matrices are as in `nn.Linear`, those of attention too. Embeddings, u and v, and projections of adaptive layers are N(0, 1).
    The first layers begin with saturated attention.
    """
    if isinstance(module, Attention):
        _start_projections(module, lambda layer: _uniform(layer.in_features, layer.weight, layer.bias))
        return
    pytorch(module)
    if isinstance(module, AdaptiveInput | AdaptiveSoftmax):
        for projection in module.projections.parameters():
            nn.init.normal_(projection)
    elif isinstance(module, RelativeBiases):
        for bias in module.parameters():
            nn.init.normal_(bias)


@register("initializer", "xavier_uniform")
def xavier_uniform(module: nn.Module) -> None:
    """Start every matrix and table Xavier-uniform, as in the code of Transformer-MoS.

    They are uniform within +-sqrt(6 / (rows + columns)). Query, key and value are one packed matrix, and so are the latents of
    a mixture. Everything else is as in `pytorch`.
    """
    pytorch(module)
    if isinstance(module, Projection):
        return  # packed by its attention, just now
    if isinstance(module, MultiLinear):
        _pairs(module, nn.init.xavier_uniform_)
        return
    if isinstance(module, TensorTrainInput):
        module.start((2 / (module.vocab_size + module.hidden_size)) ** 0.5)
        return
    if isinstance(module, _TABLES | RelativeKeys | PositionTerm | RelativeBiases):
        parameters: list[Tensor] = list(module.parameters())
    else:
        parameters = [layer.weight for layer in module.children() if isinstance(layer, nn.Linear)]
    for parameter in parameters:
        if parameter.ndim > 1:
            nn.init.xavier_uniform_(parameter)


def initialize(model: nn.Module, name: str) -> None:
    """Give every parameter of `model` the start that the initialiser `name` defines."""
    initializer: Initializer = registry.lookup("initializer", name, "model.initializer")
    if any(parameter.is_meta for parameter in model.parameters()):
        return  # there are no numbers, and to draw none imports the compiler: two seconds
    for module in model.modules():
        initializer(module)
    for module in model.modules():
        if isinstance(module, Latents):
            module.reset_residual()
    # Mixings are drawn last, so that no other parameter depends on them, and those of scores before those of weights, so that
    # they do not depend on these.
    mixings = [(name, module) for name, module in model.named_modules() if isinstance(module, Mixing)]
    for _, mixing in sorted(mixings, key=lambda named: not named[0].endswith("mix_scores")):
        mixing.draw()
