"""Attention modules of Hugging Face models: which can be injected into, their sizes, and which query they hand over."""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from fullrank.core.errors import InputError, suggest
from fullrank.core.stage import HeadSize

_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads")
_WIDTHS = ("qk_head_dim", "head_dim", "attention_head_size", "head_size", "key_value_proj_dim", "dim_per_head")
_QUERIES = ("q_proj", "query", "q_lin", "q", "query_proj", "linear_q", "wq")
_MODEL_WIDTHS = ("embed_dim", "hidden_size", "d_model")


def attention_modules(model: nn.Module) -> dict[str, Any]:
    """The modules that call an attention function of the attention interface, by name, in the order of the model."""
    return {name: module for name, module in model.named_modules() if dispatcher(type(module)) is not None}


def dispatcher(kind: type) -> types.FunctionType | None:
    """The method of a class that looks up an attention function."""
    for owner in kind.__mro__:
        if not issubclass(owner, nn.Module) or owner is nn.Module:
            continue
        for item in vars(owner).values():
            method = inspect.unwrap(item) if callable(item) else item
            if isinstance(method, types.FunctionType) and "ALL_ATTENTION_FUNCTIONS" in method.__code__.co_names:
                return method
        if "forward" in vars(owner):
            return None  # it overrides the lookup of a base class
    return None


def eager_of(module: nn.Module) -> Callable[..., Any]:
    """The model's own attention function, which it uses as `attn_implementation="eager"`."""
    method = dispatcher(type(module))
    eager: Callable[..., Any] | None = None if method is None else method.__globals__.get("eager_attention_forward")
    if eager is None or method is None:
        raise InputError(
            f"{type(module).__name__}: its file has no eager attention function, whose weights could be mixed; "
            "this model cannot be injected into"
        )
    if ("eager", "sdpa") in method.__code__.co_consts or getattr(module, "reorder_and_upcast_attn", False):
        raise InputError(
            f"{type(module).__name__}: it computes something else where its attention is called neither 'eager' nor 'sdpa' "
            "(sparse attention, or `reorder_and_upcast_attn`); this model cannot be injected into"
        )
    return eager


def chosen_modules(model: nn.Module, layers: Sequence[int | str] | None) -> dict[str, Any]:
    """The attention modules of `layers`: numbers (the first one in a module's name), or parts of names; None: all.

    Raises InputError for a model that is not on the attention interface, and for layers that it does not have.
    """
    modules = attention_modules(model)
    if not modules:
        raise InputError(_reason(model))
    if layers is None:
        return modules
    if isinstance(layers, str | int) or not layers or not all(type(layer) in (int, str) for layer in layers):
        raise InputError(
            f"layers: a list of layer numbers or of parts of module names, or None for all; given {layers!r}"
        )
    chosen: set[str] = set()
    for layer in layers:
        matching = {name for name in modules if _matches(name, layer)}
        if not matching:
            numbers = sorted({number for name in modules if (number := _layer_number(name)) is not None})
            known = suggest(layer, modules) if isinstance(layer, str) else f"it has {', '.join(map(str, numbers))}"
            raise InputError(f"layers: {layer!r} is no attention layer of {type(model).__name__}; {known}")
        chosen |= matching
    return {name: module for name, module in modules.items() if name in chosen}


def _matches(name: str, layer: int | str) -> bool:
    return _layer_number(name) == layer if isinstance(layer, int) else f".{layer}." in f".{name}."


def _layer_number(name: str) -> int | None:
    """The first number in a dotted name: 3 in `encoder.layer.3.attention.self`."""
    return next((int(part) for part in name.split(".") if part.isdigit()), None)


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
    """The number of query heads of an attention module, and the width of a query."""
    config = getattr(module, "config", None)
    heads = _number((module, config), _HEADS)
    if heads is None:
        raise InputError(f"{type(module).__name__}: says nowhere how many heads it has; choose others with `layers`")
    width = _number((module,), _WIDTHS)
    if width is None:
        projections = [getattr(module, name, None) for name in _QUERIES]
        widths = [layer.out_features for layer in projections if isinstance(layer, nn.Linear)]
        width = (widths[0] if widths else _number((module, config), _MODEL_WIDTHS) or 0) // heads
    return HeadSize(num_heads=heads, head_dim=width, hidden_size=heads * width, max_length=0)


def _number(owners: Sequence[Any], names: Sequence[str]) -> int | None:
    for owner in owners:
        for name in names:
            if type(value := getattr(owner, name, None)) is int and value > 0:
                return value
    return None


# -- the query that a module hands to its attention function: position-wise mixing reads it ------------------------------

_SCALES = ("scaling", "scale", "scale_factor", "softmax_scale")
_ROTATING = ("rotary", "rope")
_NORMS = ("q_norm", "q_layernorm", "q_layer_norm", "query_layernorm", "qk_norm")  # of heads
_SWITCHES = ("use_rope", "use_rotary", "apply_rotary")  # where layers differ


def query_of(module: nn.Module) -> str:
    """ "projected", or the changes of the projected query before: "normalized", "rotated", "scaled", joined by " and ".

    They are read from the module's code, so that they are known before the first pass.
    """
    method = dispatcher(type(module))
    assert method is not None
    names = method.__code__.co_names
    rotates = any(word in name.lower() for name in names for word in _ROTATING)
    changes = {
        "normalized": any(name in _NORMS and getattr(module, name, None) is not None for name in names),
        "rotated": rotates and all(getattr(module, switch, True) is not False for switch in _SWITCHES),
        "scaled": _scales_query(method),
    }
    return " and ".join(change for change, done in changes.items() if done) or "projected"


def _scales_query(method: types.FunctionType) -> bool:
    """True if a name with a `q` in it is assigned a product with the module's scale."""
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(method)))):
        if isinstance(node, ast.Assign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if "q" in " ".join(map(ast.unparse, targets)) and any(map(_is_scaling, (node, *ast.walk(node.value)))):
                return True
    return False


def _is_scaling(node: ast.AST) -> bool:
    """True for `... * self.scaling` and `... *= self.scaling`."""
    factors: list[ast.expr] = []
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        factors = [node.left, node.right]
    elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Mult):
        factors = [node.value]
    return any(isinstance(factor, ast.Attribute) and factor.attr in _SCALES for factor in factors)
