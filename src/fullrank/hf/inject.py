"""Our attention inside any Hugging Face model that is on the attention interface, and out of it again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fullrank.config.schema import AttentionConfig, Stage, stage_name
from fullrank.errors import InputError
from fullrank.hf import interface
from fullrank.hf.finding import attention_modules, chosen_modules, eager_of, head_size
from fullrank.hf.heads import Injected
from fullrank.hf.own import examine

_FORMERS = "_fullrank_formers"


def inject(model: Any, *, mix: Stage = "none", normalize: Stage = "softmax", cross_head: float = 0.0,
           layers: Sequence[int | str] | None = None) -> Any:  # fmt: skip
    """Let the heads of a Hugging Face model exchange their attention weights; returns the same model.

        P'_i = sum_j m_ji P_j     of the weights P that the model itself computes

    mix, normalize, cross_head: as in `AttentionConfig`. layers: numbers of layers, or parts of module names; None: all.
    Outputs are unchanged until it is trained, with `normalize="softmax"` and a mix that starts as the identity. The new
    parameters are `....fullrank.mix.*`, and `model.config.fullrank` says what was injected.
    Mixing is over query heads, cross_head permutes key and value heads.
    Raises InputError for a model that cannot be injected into, or has been already, ConfigError for unknown words.
    """
    AttentionConfig(mix=mix, normalize=normalize, cross_head=cross_head)
    if stage_name(mix) == "none" and stage_name(normalize) == "softmax" and not cross_head:
        raise InputError("inject: nothing to inject; give mix (such as 'position_wise'), normalize or cross_head")
    if injected_modules(model):
        raise InputError(
            f"{type(model).__name__}: has been injected into already; take it out first, fullrank.remove(model)"
        )
    chosen = chosen_modules(model, layers)
    weights_change = (stage_name(mix), stage_name(normalize)) != ("none", "softmax")
    for name, module in chosen.items():
        former, eager, size = module.config._attn_implementation, eager_of(module), head_size(module)
        with torch.random.fork_rng(devices=[]):
            own = examine(module, eager, size)
            stages = Injected(size, own, former, mix, normalize, cross_head)
        if stage_name(normalize) != "softmax" and not own.plain:
            raise InputError(
                f"{name}: its scores are more than scaled dot products (a soft-cap, sinks or position biases), and other "
                f"normalisers than softmax would have to take them apart; given normalize '{stage_name(normalize)}'"
            )
        like = next(module.parameters(), None)
        module.fullrank = stages if like is None else stages.to(device=like.device, dtype=like.dtype)
        module.fullrank.train(module.training)
    for module in attention_modules(model).values():
        vars(module)["fullrank_former"] = module.config._attn_implementation
    _switch(model, weights_change)
    model.config.fullrank = {
        "mix": mix, "normalize": normalize, "cross_head": cross_head, "layers": None if layers is None else list(layers),
    }  # fmt: skip
    return model


def injected_modules(model: nn.Module) -> dict[str, Injected]:
    """What was injected, by the name of the attention module."""
    return {
        name.removesuffix("fullrank").removesuffix("."): module
        for name, module in model.named_modules()
        if isinstance(module, Injected)
    }


def _configs(model: Any) -> list[Any]:
    """Every configuration that the model's parts read, once."""
    found: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            found[id(config)] = config
    return list(found.values())


def _switch(model: Any, weights_change: bool) -> None:
    formers = [(config, config._attn_implementation_internal) for config in _configs(model)]
    for config, former in formers:
        name = interface.MIXED if weights_change else interface.routed(former)
        interface.register(name)
        config._attn_implementation_internal = name
    setattr(model, _FORMERS, formers)


def remove(model: Any, *, merge: bool = False) -> Any:
    """Take out what was injected; the same model, as it was before."""
    if not injected_modules(model):
        raise InputError(f"{type(model).__name__}: nothing was injected into it")
    for module in attention_modules(model).values():
        vars(module).pop("fullrank_former", None)
        if hasattr(module, "fullrank"):
            del module.fullrank
    for config, former in vars(model).pop(_FORMERS):
        config._attn_implementation_internal = former
        vars(config).pop("fullrank", None)
    return model
