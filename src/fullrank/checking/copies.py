"""Copies of a model: a check moves, converts, trains and runs them, and leaves the model as it is."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from fullrank.core.config import AttentionConfig, DropoutConfig, ModelConfig
from fullrank.core.errors import InputError

np: Any = sys.modules.get("numpy")  # torch imports it where there is one


def duplicate(model: nn.Module) -> Any:
    """Copy the model; InputError where Python cannot."""
    try:
        return copy.deepcopy(model)
    except Exception as error:
        name = type(model).__name__
        raise InputError(f"{name}: cannot be copied ({error}), and a check leaves its model alone") from error


def move_copy(model: nn.Module) -> Any:
    """Copy a model for evaluation, every parameter moved by a tenth of its size: what starts at zero, as a mixing, shows.

    Tables of positions that are not trained stay, except in a model that is frozen as a whole.
    """
    copied = duplicate(model).eval()
    generator = torch.Generator().manual_seed(17)
    trained = [parameter for parameter in copied.parameters() if parameter.requires_grad]
    with torch.no_grad():
        for parameter in trained or copied.parameters():
            if not parameter.is_floating_point() or parameter.numel() == 0:
                continue
            size = float(parameter.double().square().mean().sqrt())
            start = 0.3 / (parameter[0].numel() ** 0.5 if parameter.ndim > 1 else 3)
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            noise *= 0.1 * size if size > 0 else start
            parameter.add_(noise.to(parameter.device, parameter.dtype))
        for parameter in copied.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
    return copied


@contextmanager
def perturbed(model: nn.Module) -> Iterator[None]:
    """Run the block with an error of rounding added to every parameter, then restore the parameters."""
    generator = torch.Generator().manual_seed(19)
    saved = {parameter: parameter.detach().clone() for parameter in model.parameters()}
    with torch.no_grad():
        for parameter in saved:
            if parameter.is_floating_point():
                noise = torch.randn(parameter.shape, generator=generator).to(parameter)
                parameter.mul_(1 + torch.finfo(parameter.dtype).eps * noise)
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in saved.items():
                parameter.copy_(value)


def find_dtype(model: nn.Module) -> torch.dtype:
    """Find the dtype of the first parameter of floating-point numbers; float32 without any."""
    types = (parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    return next(types, torch.float32)


def list_tensors(model: nn.Module) -> list[Tensor]:
    """List parameters and buffers."""
    return [*model.parameters(), *model.buffers()]


@contextmanager
def mode(model: nn.Module, *, training: bool, seed: int = 1) -> Iterator[None]:
    """Run the block with the model in training or evaluation mode, and random numbers from a seed; then put all back.

    Buffers and other attributes are put back, too. A memory that a module keeps between calls is then that of the model as
    passed, also one in a list or a dict, and so are its random generators.

    Args:
        model: the model.
        training: True: training mode; False: evaluation mode.
        seed: where the random numbers of torch, Python and NumPy begin.
    """
    attributes = {module: dict(vars(module)) for module in model.modules()}
    copies = {}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    state = random.getstate()
    state_of_numpy = np and np.random.get_state()
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        random.seed(seed)
        if np:
            np.random.seed(seed)
        model.train(training)
        for module, before in attributes.items():
            for name, value in before.items():
                if name not in _OF_EVERY_MODULE and isinstance(value, _CHANGING):
                    if id(value) not in copies:  # it may be shared
                        copies[id(value)] = _pytree.tree_map(copy_generator, value)
                    vars(module)[name] = copies[id(value)]
        try:
            yield
        finally:
            random.setstate(state)
            if np:
                np.random.set_state(state_of_numpy)
            for module, before in attributes.items():
                vars(module).clear()
                vars(module).update(before)
            for name, buffer in model.named_buffers():
                buffer.data = buffers.get(name, buffer.data)


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_GENERATORS: tuple[type, ...] = (random.Random, torch.Generator)
if np:
    _GENERATORS += (np.random.Generator, np.random.RandomState)
_CHANGING = (list, dict, *_GENERATORS)


def copy_generator(value: Any) -> Any:
    """Copy a random generator; return any other value as it is."""
    if isinstance(value, torch.Generator):
        return value.clone_state()
    return copy.deepcopy(value) if isinstance(value, _GENERATORS) else value


def rebuild(model: Any, config: ModelConfig) -> Any:
    """Build a model of ours of another configuration with the same parameters."""
    parameter = next(model.parameters())
    rebuilt = type(model)(config).to(parameter.device, parameter.dtype)
    rebuilt.load_state_dict(model.state_dict())
    return rebuilt


def change_attention(config: ModelConfig, **changes: Any) -> ModelConfig:
    """Change the attention of every place in a configuration."""

    def change(part: Any) -> Any:
        return part and replace(part, **changes)

    encoder = config.encoder
    decoder = config.decoder
    if encoder is not None:
        encoder = replace(encoder, attention=change(encoder.attention))
    if decoder is not None:
        decoder = replace(decoder, attention=change(decoder.attention), cross=change(decoder.cross))
    return config.with_attention(change, encoder=encoder, decoder=decoder)


def list_attentions(config: ModelConfig, *, translates: bool) -> list[AttentionConfig]:
    """List the attention of every place, of a translation model in its three stacks."""
    parts = [config]
    if translates:
        parts = [config.get_encoder_config(), config.get_decoder_config(), config.get_cross_config()]
    return [attention for part in parts for attention in part.attentions]


def build_without_chance(model: Any) -> Any:
    """Copy a model of ours without dropout and permutations: different kernels draw different random numbers."""
    config = change_attention(model.config, cross_head=0.0)
    output: Any = config.output
    output = replace(output, latent_dropout=0.0, tail_dropout=0.0)
    return rebuild(model, replace(config, dropout=DropoutConfig(locked=config.dropout.locked), output=output))


class WithoutDropout(TorchFunctionMode):
    """A block in which dropout changes nothing, wherever it is called from."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if function in (F.dropout, torch.dropout):
            return args[0] if args else options["input"]
        if function is F.scaled_dot_product_attention:
            options = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False))
            return function(**options | (kwargs or {}) | {"dropout_p": 0.0})
        return function(*args, **options)


class InDouble(TorchFunctionMode):
    """A block in which a model computes in float64 what it computes in float32.

    `is_complete` says that nothing was computed in another type.
    """

    is_complete = True

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        function = torch.Tensor.double if function is torch.Tensor.float else function
        widen = {torch.float32: torch.float64}
        args, kwargs = _pytree.tree_map_only(torch.dtype, lambda dtype: widen.get(dtype, dtype), (args, kwargs or {}))
        for value in _pytree.tree_leaves((args, kwargs)):
            if isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64:
                self.is_complete = False
        return function(*args, **kwargs)


class OnlyWords(TorchFunctionMode):
    """A block in which a linear layer that gives a number for each word of a vocabulary gives those of some words."""

    def __init__(self, words: Tensor, vocab_size: int) -> None:
        super().__init__()
        self.words = words
        self.vocab_size = vocab_size

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.linear and len(args[1]) == self.vocab_size:
            args = (args[0], *(None if argument is None else argument[self.words] for argument in args[1:]))
        return function(*args, **(kwargs or {}))
