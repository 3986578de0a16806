"""Copies of a model: a check moves, converts, trains and runs them, and leaves the model as it is."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import random
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fullrank.core.errors import InputError


class AsModule(nn.Module):
    """A function from token ids to logits, with the modules that it calls: a copy of it calls copies of them."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        # copying leaves functions as they are
        self.function = functools.wraps(function)(lambda *args, **options: function(*args, **options))
        for name, module in find_modules(function):
            if module not in set(self.modules()):
                while hasattr(self, name):
                    name += "_"
                self.add_module(name, module)
        originals = list(self.children())
        self.list_originals = lambda: originals

    def forward(self, *args: Any, **options: Any) -> Any:
        with stand_in(self.list_originals(), self.children()):
            return self.function(*args, **options)


def find_modules(value: Any, depth: int = 4) -> Iterator[tuple[str, nn.Module]]:
    """Modules that a function or an object reaches, by name."""
    for name, part in list_parts(value).items() if depth else ():
        if isinstance(part, nn.Module):
            yield name.replace(".", "_"), part
        else:
            yield from find_modules(part, depth - 1)


def list_parts(value: Any) -> Mapping[str, Any]:
    """What a function reaches, by name: its closure, its defaults, the globals that it names; or parts of an object."""
    match value:
        case types.FunctionType():
            defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
            with contextlib.suppress(ValueError):  # a variable that has no value yet
                scope = inspect.getclosurevars(value)
                return {**number_parts(defaults), **scope.globals, **scope.nonlocals}
            return number_parts(defaults)
        case functools.partial():
            return number_parts([value.func, *value.args, *value.keywords.values()])
        case types.MethodType():
            return {"owner": value.__self__, "method": value.__func__}
        case list() | tuple():
            return number_parts(value)
        case dict():
            return number_parts(value.values())
        case type() | types.ModuleType() | Tensor():
            return {}
    return dict(getattr(value, "__dict__", {}))


def number_parts(values: Iterable[Any]) -> dict[str, Any]:
    return {f"given{number}": value for number, value in enumerate(values)}


@contextmanager
def stand_in(originals: Iterable[nn.Module], copies: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, whoever calls the originals runs the copies: each module has the attributes of its copy."""
    attributes: dict[nn.Module, dict[str, Any]] = {}
    for original, copied in zip(originals, copies, strict=True):
        attributes |= zip(original.modules(), map(vars, copied.modules()), strict=True)
    before = {module: vars(module) for module in attributes}
    try:
        for module, own in attributes.items():
            object.__setattr__(module, "__dict__", own)
        yield
    finally:
        for module, own in before.items():
            object.__setattr__(module, "__dict__", own)


def list_arguments(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    """Arguments of the forward of a model, or of the function that stands for it."""
    return inspect.signature(model.function if isinstance(model, AsModule) else model.forward).parameters


def duplicate(model: nn.Module) -> Any:
    """A copy of the model; InputError where Python cannot make one."""
    try:
        return copy.deepcopy(model)
    except Exception as error:
        name = type(model).__name__
        raise InputError(f"{name}: cannot be copied ({error}), and a check leaves its model alone") from error


def move_copy(model: nn.Module, seed: int = 17) -> Any:
    """A copy for evaluation, every parameter moved by a tenth of its size: what starts at zero, such as a mixing, shows.

    Tables of positions that are not trained stay, except in a model that is frozen as a whole.
    """
    copied = duplicate(model).eval()
    generator = torch.Generator().manual_seed(seed)
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
    return copied


def find_dtype(model: nn.Module, default: torch.dtype = torch.float32) -> torch.dtype:
    """The type of the first parameter that is a floating-point number."""
    return next((parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()), default)


@contextmanager
def mode(model: nn.Module, *, training: bool, seed: int = 1) -> Iterator[None]:
    """Inside, the model trains or not, random numbers begin at `seed`; afterwards all is as before.

    Buffers and other attributes are put back, too: a memory that a module keeps between calls is that of the model as passed.
    """
    attributes = {module: dict(vars(module)) for module in model.modules()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    state = random.getstate()
    with torch.random.fork_rng(devices=list(devices)):
        torch.manual_seed(seed)
        random.seed(seed)
        model.train(training)
        try:
            yield
        finally:
            random.setstate(state)
            for module, before in attributes.items():
                vars(module).clear()
                vars(module).update(before)
            with torch.no_grad():
                for name, buffer in model.named_buffers():
                    if name in buffers and buffers[name].shape == buffer.shape:
                        buffer.copy_(buffers[name])
