"""Any module of torch, or function: the arguments of its forward, what is in its output, and tensors loaded into it."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fullrank.core.errors import InputError, one_line


def read_arguments(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    """Read the arguments of a forward, or of the function that a module stands for; none where Python cannot tell them."""
    try:
        return inspect.signature(module.function if isinstance(module, AsModule) else module.forward).parameters
    except (TypeError, ValueError):
        return {}


def cache_argument(arguments: Mapping[str, inspect.Parameter]) -> str:
    """Name the argument by which a forward takes a cache; empty where it takes none. `use_cache` may be among its **kwargs."""
    if "use_cache" not in arguments and all(
        argument.kind is not argument.VAR_KEYWORD for argument in arguments.values()
    ):
        return ""
    caches = ("past_key_values", "cache", "cache_params", "state")
    return next((name for name in caches if name in arguments), "")


def find_cache(out: Any, name: str) -> Any:
    """Find the cache in an output: by its name, or the second of a tuple after the logits."""
    if isinstance(out, Mapping):
        return out.get(name)
    is_pair = type(out) in (tuple, list) and len(out) > 1
    return out[1] if is_pair else getattr(out, name, None)


def logits_in(out: Any) -> Tensor:
    """Find the logits in the output of a model: a tensor, an object with `.logits`, a dict, or the first of several."""
    if isinstance(out, Mapping) and "logits" in out:
        out = out["logits"]
    out = getattr(out, "logits", out)
    if isinstance(out, tuple | list) and out:
        out = out[0]
    if not isinstance(out, Tensor):
        raise InputError(f"the model returned {type(out).__name__}; logits are needed, or an object with .logits")
    return out


def check_ids(ids: Any) -> None:
    """Raise InputError unless token ids are a matrix (B, N) of whole numbers."""
    if not isinstance(ids, Tensor):
        raise InputError(f"input_ids: tensors of token ids (B, N), given {type(ids).__name__}; encode texts first")
    if ids.ndim != 2 or ids.is_floating_point() or not ids.numel():
        raise InputError(f"input_ids: (B, N) of whole numbers, given {tuple(ids.shape)} {ids.dtype}")


def load_tensors(module: nn.Module, tensors: Mapping[str, Tensor], origin: Path, *, assign: bool = False) -> None:
    """Load tensors into a module.

    Args:
        module: the model.
        tensors: its tensors by name.
        origin: their file, for the error.
        assign: make them its parameters as they are, with their dtype.

    Raises:
        InputError: names the tensors that do not fit.
    """
    try:
        module.load_state_dict(tensors, assign=assign)
    except RuntimeError as error:
        fault = one_line(error, 600).partition(": ")[2]
        raise InputError(f"{origin} does not fit the model: {fault}; check the model section of config.yaml") from error


class AsModule(nn.Module):
    """A function from token ids to logits, with the modules that it calls: a copy of it calls copies of them."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        # copying leaves functions as they are
        self.function = functools.wraps(function)(lambda *args, **options: function(*args, **options))
        for name, module in find_modules("model", function):
            if module not in set(self.modules()):
                while hasattr(self, name):
                    name += "_"
                self.add_module(name, module)
        originals = list(self.children())
        self.list_originals = lambda: originals

    def forward(self, *args: Any, **options: Any) -> Any:
        with stand_in(self.list_originals(), self.children()):
            return self.function(*args, **options)


_REACHED = ("__self__", "__func__", "__defaults__", "__kwdefaults__", "func", "args", "keywords")


def find_modules(name: str, value: Any, depth: int = 5) -> Iterator[tuple[str, nn.Module]]:
    """Find the modules that a function reaches: by its closure, its arguments and the globals that it names.

    Args:
        name: that of the value.
        value: a function, or any other object, whose attributes and items are searched.
        depth: steps from one object to the next.

    Yields:
        Name and module.
    """
    if isinstance(value, nn.Module):
        yield name.replace(".", "_"), value
    if not depth or isinstance(value, nn.Module | type | types.ModuleType | Tensor):
        return
    slots: list[str] = []
    for kind in type(value).__mro__:
        slots += getattr(kind, "__slots__", ())
    parts: dict[Any, Any] = {part: getattr(value, part, None) for part in (*_REACHED, *slots)}
    parts |= getattr(value, "__dict__", {})
    if isinstance(value, list | tuple):
        parts = dict(enumerate(value))
    elif isinstance(value, dict):
        parts = dict(value)
    with contextlib.suppress(TypeError, ValueError):  # no function, or a variable that has no value yet
        scope = inspect.getclosurevars(value)
        parts |= {**scope.globals, **scope.nonlocals}
    for part, inner in parts.items():
        yield from find_modules(str(part), inner, depth - 1)


@contextmanager
def stand_in(originals: Iterable[nn.Module], copies: Iterable[nn.Module]) -> Iterator[None]:
    """Run the block with calls of the originals going to their copies: each module has the attributes of its copy."""
    pairs = list[tuple[nn.Module, dict[str, Any]]]()
    for original, copied in zip(originals, copies, strict=True):
        pairs += zip(original.modules(), map(vars, copied.modules()), strict=True)
    saved = [(module, vars(module)) for module, _ in pairs]
    try:
        for module, attributes in pairs:
            object.__setattr__(module, "__dict__", attributes)
        yield
    finally:
        for module, attributes in saved:
            object.__setattr__(module, "__dict__", attributes)
