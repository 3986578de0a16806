"""Our attention inside any Hugging Face model that is on the attention interface, and out of it again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fullrank.core.config import AttentionConfig, Stage, stage_name
from fullrank.core.errors import InputError
from fullrank.hf import interface
from fullrank.hf.decay import exempt_from_trainer
from fullrank.hf.finding import attention_modules, chosen_modules, eager_of, head_size
from fullrank.hf.heads import Injected
from fullrank.hf.merging import merge_mixing
from fullrank.hf.query import queries_of

_FORMERS = "_fullrank_formers"
# Saved as the attention implementation of an injected model. It is never registered, so that a plain `from_pretrained` stops
# with an error that shows this name, where it would otherwise leave out the mixing parameters.
LOADED_BY = "fullrank.load_injected"


def inject(model: Any, *, mix: Stage = "none", normalize: Stage = "softmax", cross_head: float = 0.0,
           layers: Sequence[int | str] | None = None) -> Any:  # fmt: skip
    """Let the heads of a Hugging Face model exchange their attention weights; returns the same model.

        P'_i = sum_j m_ji P_j     of the weights P that the model itself computes

    mix, normalize, cross_head: as in `AttentionConfig`. layers: numbers of layers, or parts of module names; None: all.
    Outputs are unchanged until it is trained, with `normalize="softmax"` and a mix that starts as the identity. The new
    parameters are `....fullrank.mix.*`, and `model.config.fullrank` says what was injected, and which query is read.
    Mixing is over query heads, cross_head permutes key and value heads.
    Raises InputError for a model that cannot be injected into, or has been already, ConfigError for unknown words.
    """
    AttentionConfig(mix=mix, normalize=normalize, cross_head=cross_head)
    weights_change = (stage_name(mix), stage_name(normalize)) != ("none", "softmax")
    if not weights_change and not cross_head:
        raise InputError("inject: nothing to inject; give mix (such as 'position_wise'), normalize or cross_head")
    if injected_modules(model):
        raise InputError(
            f"{type(model).__name__}: has been injected into already; take it out first, fullrank.remove(model)"
        )
    chosen = chosen_modules(model, layers)
    formers = {module.config._attn_implementation for module in chosen.values()}
    if not weights_change and not formers <= {"eager", "sdpa"}:
        raise InputError(
            f"{type(model).__name__}: cross_head alone keeps the attention function of the model, which has to be 'sdpa' or "
            f"'eager'; given '{min(formers - {'eager', 'sdpa'}, key=str)}': call model.set_attn_implementation('sdpa') first"
        )
    made = {}
    with torch.random.fork_rng(devices=[]):
        for name, module in chosen.items():
            torch.rand((), device="cpu")  # a fixed random mixing is another one in every layer
            made[name] = _stages(name, module, mix, normalize, cross_head)
    for name, stages in made.items():
        chosen[name].fullrank = stages
    if any(list(stages.parameters()) for stages in made.values()):
        exempt_from_trainer()
    for module in attention_modules(model).values():
        vars(module)[interface.FORMER] = module.config._attn_implementation
    settings = {
        "mix": mix, "normalize": normalize, "cross_head": cross_head, "layers": None if layers is None else list(layers),
        "query": queries_of(chosen),
    }  # fmt: skip
    _switch(model, settings, weights_change)
    return model


def _stages(name: str, module: Any, mix: Stage, normalize: Stage, cross_head: float) -> Injected:
    """What is to hang on a module; nothing is changed yet."""
    size, eager = head_size(module), eager_of(module)
    stages = Injected(size, eager, module.config._attn_implementation, mix, normalize, cross_head)
    like = next((p for p in module.parameters() if p.is_floating_point()), None)  # of a quantized layer some are not
    if like is None or not like.is_meta:
        own = stages.own(module)
        if stage_name(normalize) != "softmax" and not own.plain:
            raise InputError(
                f"{name}: its scores are more than scaled dot products (a soft-cap, sinks or position biases), which other "
                f"normalisers than softmax would have to take apart; given normalize '{stage_name(normalize)}'"
            )
    return (stages if like is None else stages.to(device=like.device, dtype=like.dtype)).train(module.training)


def _switch(model: Any, settings: dict[str, Any], weights_change: bool) -> None:
    formers = [(config, config._attn_implementation) for config in _configs(model)]
    for config, former in formers:
        if former is not None:
            config._attn_implementation_internal = interface.name_for(former, weights_change)
        config.fullrank, config.attn_implementation = settings, LOADED_BY
    vars(model)[_FORMERS] = formers


def _configs(model: nn.Module) -> list[Any]:
    """Every configuration that the model's parts read, once."""
    configs = (getattr(module, "config", None) for module in model.modules())
    return list({id(config): config for config in configs if hasattr(config, "_attn_implementation")}.values())


def injected_modules(model: nn.Module) -> dict[str, Injected]:
    """What was injected, by its name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Injected)}


def settings_of(model: Any) -> dict[str, Any]:
    """What was injected, as arguments of `inject`."""
    if not injected_modules(model):
        raise InputError(f"{type(model).__name__}: nothing was injected into it; call fullrank.inject first")
    return arguments_of(model.config.fullrank)


def arguments_of(settings: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `inject` among what a configuration says."""
    return {key: settings[key] for key in ("mix", "normalize", "cross_head", "layers")}


def remove(model: Any, *, merge: bool = False) -> Any:
    """Take out what was injected; the same model, as it was before injection, its own parameters as they are now.

    merge: what mixing does is written into the model's own parameters, so that the output stays. That is possible where no
    head takes weights from another (M is diagonal, as at the start): a head's values are multiplied by m_jj.
    Raises InputError if nothing was injected, or is to be merged that cannot be; then nothing is changed.
    """
    if not injected_modules(model):
        raise InputError(f"{type(model).__name__}: nothing was injected into it")
    if _FORMERS not in vars(model):
        raise InputError(f"{type(model).__name__}: only a part of an injected model; remove it from the whole one")
    modules = attention_modules(model)
    if merge:
        merge_mixing({name: module for name, module in modules.items() if hasattr(module, "fullrank")})
    for module in modules.values():
        vars(module).pop(interface.FORMER, None)
        if hasattr(module, "fullrank"):
            del module.fullrank
    for config, former in vars(model).pop(_FORMERS):
        config._attn_implementation_internal = former
        del config.fullrank, config.attn_implementation
    return model
