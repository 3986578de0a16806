"""Any module of torch: the arguments of its forward, the logits in what it returns, and tensors loaded into it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fullrank.core.errors import InputError, one_line


def read_arguments(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    """The arguments of a forward; none where Python cannot tell them."""
    try:
        return inspect.signature(module.forward).parameters
    except (TypeError, ValueError):
        return {}


def cache_argument(arguments: Mapping[str, inspect.Parameter]) -> str:
    """The argument by which a forward takes a cache; empty where it takes none. `use_cache` may be among its **kwargs."""
    if "use_cache" not in arguments and all(one.kind is not one.VAR_KEYWORD for one in arguments.values()):
        return ""
    caches = ("past_key_values", "cache", "cache_params", "state")
    return next((name for name in caches if name in arguments), "")


def logits_in(out: Any) -> Tensor:
    """Logits in the output of a model: a tensor, an object with `.logits`, a dict, or the first of several."""
    if isinstance(out, Mapping) and "logits" in out:
        out = out["logits"]
    out = getattr(out, "logits", out)
    if isinstance(out, tuple | list) and out:
        out = out[0]
    if not isinstance(out, Tensor):
        raise InputError(f"the model returned {type(out).__name__}; logits are needed, or an object with .logits")
    return out


def load_tensors(module: nn.Module, tensors: Mapping[str, Tensor], origin: Path, *, assign: bool = False) -> None:
    """Load tensors into a module; InputError names those that do not fit. assign: they become its parameters as they are."""
    try:
        module.load_state_dict(tensors, assign=assign)
    except RuntimeError as error:
        words = one_line(error, 600).partition(": ")[2]
        raise InputError(f"{origin} does not fit the model: {words}; check the model section of config.yaml") from error
