"""The forward of any model: its arguments, and the logits in what it returns. It needs torch alone."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from fullrank.core.errors import InputError


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
