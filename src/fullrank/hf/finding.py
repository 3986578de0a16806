"""Which modules of a Hugging Face model can be injected into, and why a model cannot be."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from fullrank.core.errors import InputError, suggest
from fullrank.core.stage import HeadSize
from fullrank.hf.own import Eager

_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads")
_WIDTHS = ("qk_head_dim", "head_dim", "attention_head_size", "head_size", "key_value_proj_dim", "dim_per_head")
_QUERIES = ("q_proj", "query", "q_lin", "q", "query_proj", "linear_q", "wq")


def attention_modules(model: nn.Module) -> dict[str, Any]:
    """The modules that call an attention function of the attention interface, by name, in the order of the model."""
    return {name: module for name, module in model.named_modules() if dispatcher(type(module)) is not None}


def eager_of(module: nn.Module) -> Eager:
    """The model's own attention function, which it uses as `attn_implementation="eager"`."""
    method = dispatcher(type(module))
    eager: Eager | None = None if method is None else method.__globals__.get("eager_attention_forward")
    if eager is None or method is None:
        raise InputError(
            f"{type(module).__name__}: its file has no eager attention function, whose weights could be mixed; "
            "this model cannot be injected into"
        )
    if _by_name(method) or getattr(module, "reorder_and_upcast_attn", False):
        raise InputError(
            f"{type(module).__name__}: it computes something else where its attention is called neither 'eager' nor 'sdpa' "
            "(sparse attention, or `reorder_and_upcast_attn`); this model cannot be injected into"
        )
    return eager


def _by_name(method: types.FunctionType) -> bool:
    """Whether a method asks if its attention is one of these two."""
    return ("eager", "sdpa") in method.__code__.co_consts


def dispatcher(kind: type) -> types.FunctionType | None:
    """The method of a class in which an attention function is looked up."""
    for owner in kind.__mro__:
        if not issubclass(owner, nn.Module) or owner is nn.Module:
            continue
        for item in vars(owner).values():
            method = inspect.unwrap(item) if callable(item) else item
            if isinstance(method, types.FunctionType) and "ALL_ATTENTION_FUNCTIONS" in method.__code__.co_names:
                return method
        if "forward" in vars(owner):
            return None  # it overrides what a base class looks up
    return None


def chosen_modules(model: nn.Module, layers: Sequence[int | str] | None) -> dict[str, Any]:
    """The attention modules of `layers`: numbers (the first one in a module's name), or parts of names; None: all.

    Raises InputError for a model that is not on the attention interface, and for layers that it has not.
    """
    found = attention_modules(model)
    if not found:
        raise InputError(_reason(model))
    if layers is None:
        return found
    if isinstance(layers, str | int) or not layers or not all(type(layer) in (int, str) for layer in layers):
        raise InputError(
            f"layers: a list of layer numbers or of parts of module names, or None for all; given {layers!r}"
        )
    taken: dict[str, Any] = {}
    for layer in layers:
        matching = {name: module for name, module in found.items() if _matches(name, layer)}
        if not matching:
            raise InputError(
                f"layers: {layer!r} is no attention layer of {type(model).__name__}; {_known(found, layer)}"
            )
        taken |= matching
    return {name: module for name, module in found.items() if name in taken}


def _matches(name: str, layer: int | str) -> bool:
    if isinstance(layer, int):
        return layer_number(name) == layer
    return f".{layer}." in f".{name}."


def layer_number(name: str) -> int | None:
    """The first number in a dotted name: 3 in `encoder.layer.3.attention.self`."""
    return next((int(part) for part in name.split(".") if part.isdigit()), None)


def _known(found: dict[str, nn.Module], layer: int | str) -> str:
    if isinstance(layer, str):
        return suggest(layer, found)
    numbers = sorted({number for name in found if (number := layer_number(name)) is not None})
    return f"it has {', '.join(map(str, numbers)) or 'no numbered ones'}"


def _reason(model: nn.Module) -> str:
    name = type(model).__name__
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "_attn_implementation"):
        return f"{name}: not a Hugging Face model; for our own models set model.attention in their configuration"
    if config.model_type == "fullrank":
        return f"{name}: our own model; set model.attention in its configuration"
    return (
        f"{name}: its attention is not on transformers' attention interface (it computes weights in code of its own), so "
        "there is nothing to inject into; choose a model that is, such as BERT, RoBERTa, GPT-2, Llama, T5, BART or ViT"
    )


def head_size(module: nn.Module) -> HeadSize:
    """How many query heads an attention module has, and how wide a query is."""
    heads = _number((module, getattr(module, "config", None)), _HEADS)
    if heads is None:
        raise InputError(f"{type(module).__name__}: says nowhere how many heads it has; choose others with `layers`")
    width = _number((module,), _WIDTHS)
    if width is None:
        out = next(_widths_of_queries(module), None)
        if out is None:
            out = _number((module, getattr(module, "config", None)), ("embed_dim", "hidden_size", "d_model")) or 0
        width = out // heads
    return HeadSize(num_heads=heads, head_dim=width, hidden_size=heads * width, max_length=0)


def _number(places: Sequence[Any], names: Sequence[str]) -> int | None:
    for place in places:
        for name in names:
            if type(value := getattr(place, name, None)) is int and value > 0:
                return value
    return None


def _widths_of_queries(module: nn.Module) -> Iterator[int]:
    for name in _QUERIES:
        if isinstance(projection := getattr(module, name, None), nn.Linear):
            yield projection.out_features
