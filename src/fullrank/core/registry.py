"""(slot, name) -> class: how a word in a configuration finds its module.

A stage registers itself where it is defined::

    @register("mix", "position_wise")
    class PositionWiseMixing(Mixing): ...

A slot's built-in stages are registered by one module, which is imported when somebody asks for a name.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from .errors import ConfigError, suggest

if TYPE_CHECKING:
    from torch import nn

# slot -> the module that registers its built-in stages
_HOMES = {
    "attend": f"{__package__}.multilinear",
    "score": f"{__package__}.score",
    "normalize": f"{__package__}.stages",
    "mix": f"{__package__}.mixers",
    "mix_qkv": f"{__package__}.vector_mixers",
    "mix_scores": f"{__package__}.mixers",
    "gate": f"{__package__}.vector_mixers",
    "norm_type": f"{__package__}.stages",
    "position": f"{__package__}.embedding",
    "activation": f"{__package__}.attention",
    "input": f"{__package__}.compressed_embedding",
    "output": f"{__package__}.output",
    "initializer": f"{__package__}.initialize",
    "skip": f"{__package__}.skip_retain",
    "model_part": f"{__package__}.model",
}

_registered: dict[tuple[str, str], Any] = {}
Registered = TypeVar("Registered")
Part = TypeVar("Part", bound="nn.Module")


def add_slot(slot: str, module: str) -> None:
    """Add a slot outside of the model, whose built-in entries `module` registers."""
    _HOMES[slot] = module


def _describe(item: Any) -> tuple[str, str | None]:
    """Return name and module of a registered object; a `functools.partial` has none of its own."""
    return getattr(item, "__qualname__", None) or repr(item), getattr(item, "__module__", None)


def register(slot: str, name: str) -> Callable[[Registered], Registered]:
    """Register the decorated class or function as the meaning of `name` in `slot`.

    Raises ConfigError if the slot is unknown or the name is taken by another object.
    """
    if slot not in _HOMES:
        raise ConfigError(f"unknown slot '{slot}': {suggest(slot, _HOMES)}")

    def add(item: Registered) -> Registered:
        former = _registered.get((slot, name), item)
        # the same name in the same module: a module read again
        if _describe(former) != _describe(item):
            raise ConfigError(f"{slot} '{name}' is already registered by {_describe(former)[0]}; choose another name")
        _registered[slot, name] = item
        return item

    return add


def unregister(slot: str, name: str) -> None:
    """Forget a registration (tests that register a stage of their own clean up with it)."""
    _registered.pop((slot, name), None)


def names(slot: str, built_in: Iterable[str] = ()) -> list[str]:
    """List all names of `slot` in alphabetical order; the module of its built-in ones is imported unless they are given."""
    if not built_in:
        importlib.import_module(_HOMES[slot])
    return sorted({*built_in, *(name for other, name in _registered if other == slot)})


def lookup(slot: str, name: str, key: str | None = None, built_in: Iterable[str] = ()) -> Any:
    """Look up the object registered as `name`.

    Args:
        slot: where it was registered.
        name: the word of the configuration.
        key: the key of the configuration, which an error names; None for the slot.
        built_in: the names of all built-in stages; an unknown name is then refused before their module is imported.

    Raises:
        ConfigError: nothing is registered as `name`.
    """
    available = names(slot, built_in)
    if name not in available:
        near = suggest(name, available, list_all=True)
        if near.startswith("known"):
            near += "; a name of your own is known once its module is imported (--import MODULE)"
        raise ConfigError(f"{key or slot}: '{name}' is not available; {near}")
    return _registered[slot, name]


def with_parts(module: Part, **parts: nn.Module) -> Part:
    """Make a view of `module` with other submodules of these names; it shares everything else."""
    view = object.__new__(type(module))  # not by copy.copy: a sharded module (FSDP2) would be made anew
    view.__dict__.update(vars(module), _modules={**module._modules, **parts})
    return view
