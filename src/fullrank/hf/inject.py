"""Our attention inside any Hugging Face model that is on the attention interface, and out of it again."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fullrank.core.config import Stage, WeightedConfig, stage_name
from fullrank.core.errors import InputError
from fullrank.core.normalize import Softmax
from fullrank.hf.families import attention_modules, chosen_modules, eager_of, head_size, query_of
from fullrank.hf.interface import FORMER, Injected, name_for

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
    WeightedConfig(mix=mix, normalize=normalize, cross_head=cross_head)
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
    # nothing was changed so far
    for name, stages in made.items():
        chosen[name].fullrank = stages
    if any(list(stages.parameters()) for stages in made.values()):
        _exempt_from_trainer()
    for module in attention_modules(model).values():
        vars(module)[FORMER] = module.config._attn_implementation
    queries = {name: query_of(module) for name, module in chosen.items()}
    same_query = len(set(queries.values())) == 1
    settings = {
        "mix": mix, "normalize": normalize, "cross_head": cross_head, "layers": None if layers is None else list(layers),
        "query": next(iter(queries.values())) if same_query else queries,
    }  # fmt: skip
    vars(model)[_FORMERS] = [(config, config._attn_implementation) for config in _configs(model)]
    for config, former in vars(model)[_FORMERS]:
        if former is not None:
            config._attn_implementation_internal = name_for(former, weights_change)
        config.fullrank, config.attn_implementation = settings, LOADED_BY
    return model


def _stages(name: str, module: Any, mix: Stage, normalize: Stage, cross_head: float) -> Injected:
    """The stages for a module, on its device and in its dtype."""
    stages = Injected(head_size(module), eager_of(module), mix, normalize, cross_head)
    like = next((p for p in module.parameters() if p.is_floating_point()), None)  # a quantized layer has others too
    if like is None or not like.is_meta:
        own = stages.own(module)
        if stage_name(normalize) != "softmax" and not own.plain:
            raise InputError(
                f"{name}: its scores are more than scaled dot products (a soft-cap, sinks or position biases), which other "
                f"normalisers than softmax would have to take apart; given normalize '{stage_name(normalize)}'"
            )
    return (stages if like is None else stages.to(device=like.device, dtype=like.dtype)).train(module.training)


def _configs(model: nn.Module) -> list[Any]:
    """Every configuration that the model's parts read, once."""
    configs = (getattr(module, "config", None) for module in model.modules())
    return list({id(config): config for config in configs if hasattr(config, "_attn_implementation")}.values())


def injected_modules(model: nn.Module) -> dict[str, Injected]:
    """All injected stages by their names in the model."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Injected)}


def settings_of(model: Any) -> dict[str, Any]:
    """The arguments with which `inject` was called on a model."""
    if not injected_modules(model):
        raise InputError(f"{type(model).__name__}: nothing was injected into it; call fullrank.inject first")
    return arguments_of(model.config.fullrank)


def arguments_of(settings: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `inject` among the settings in a configuration."""
    return {key: settings[key] for key in ("mix", "normalize", "cross_head", "layers")}


def remove(model: Any, *, merge: bool = False) -> Any:
    """Take the injected stages out; the same model, as it was before injection, its own parameters as they are now.

    merge: mixing is written into the model's own parameters, so that the output stays. That is possible where no head takes
    weights from another (M is diagonal, as at the start): a head's values are multiplied by m_jj.
    Raises InputError if nothing was injected, or if a mixing cannot be merged; then nothing is changed.
    """
    if not injected_modules(model):
        raise InputError(f"{type(model).__name__}: nothing was injected into it")
    if _FORMERS not in vars(model):
        raise InputError(f"{type(model).__name__}: only a part of an injected model; remove it from the whole one")
    modules = attention_modules(model)
    if merge:
        _merge({name: module for name, module in modules.items() if "fullrank" in module._modules})
    for module in modules.values():
        vars(module).pop(FORMER, None)
        module._modules.pop("fullrank", None)
    for config, former in vars(model).pop(_FORMERS):
        config._attn_implementation_internal = former
        del config.fullrank, config.attn_implementation
    return model


# -- mixing written into the model's own parameters ----------------------------------------------------------------------

_VALUES = ("v_proj", "value", "v_lin", "v", "value_proj")


@torch.no_grad()
def _merge(modules: dict[str, Any]) -> None:
    """Multiply the values of each head j by m_jj, where M is diagonal:  O_j = P'_j V_j = P_j (m_jj V_j).

    A head that takes weights of others would need values that are a sum over heads, of higher rank than a head has.
    Raises InputError naming the module where M is not diagonal, or values are not reached; then nothing was changed.
    """
    factors = {name: _diagonal(name, module) for name, module in modules.items()}
    changed = {name: diagonal for name, diagonal in factors.items() if bool((diagonal != 1).any())}
    projections = [(_value_projection(name, modules[name]), diagonal) for name, diagonal in changed.items()]
    for values, diagonal in projections:
        rows = diagonal.repeat_interleave(values.out_features // diagonal.shape[0])
        values.weight.mul_(rows[:, None])
        if values.bias is not None:
            values.bias.mul_(rows)


def _diagonal(name: str, module: Any) -> Tensor:
    """m_jj for each value head."""
    stages: Injected = module.fullrank
    if type(stages.normalize) is not Softmax:
        raise _refusal(name, "its weights are normalised otherwise than the model's own")
    matrix = stages.mix.matrix(None)
    if matrix is None:
        return torch.ones(stages.size.num_heads)
    if any(bool((p != 0).any()) for part, p in stages.mix.named_parameters() if part != "mixing"):
        raise _refusal(name, "its mixing depends on the query")
    diagonal = matrix.diagonal()
    if bool((matrix != torch.diag(diagonal)).any()):
        raise _refusal(name, "its heads exchange weights (M is not diagonal)")
    by_group = diagonal.view(-1, getattr(module, "num_key_value_groups", 1))
    if bool((by_group != by_group[:, :1]).any()):
        raise _refusal(name, "the heads of a group share their values, and have different factors")
    return by_group[:, 0]


def _value_projection(name: str, module: Any) -> nn.Linear:
    for projection in (getattr(module, attribute, None) for attribute in _VALUES):
        if isinstance(projection, nn.Linear) and not hasattr(module, "v_norm"):
            return projection
    raise _refusal(name, "it has no projection of values alone that could be scaled")


def _refusal(name: str, reason: str) -> InputError:
    return InputError(f"{name}: cannot be merged, {reason}; remove it without merge, or keep it")


# -- training ------------------------------------------------------------------------------------------------------------


def parameter_groups(model: nn.Module, *, learning_rate: float, mixing_learning_rate: float | None = None,
                     weight_decay: float = 0.0) -> list[dict[str, Any]]:  # fmt: skip
    """Groups for an optimizer: mixing parameters with a learning rate of their own and never decayed, the others as usual.

    Decay pulls mixing towards zero, which is not plain attention. Nor are vectors (biases, norms) decayed. Parameters without
    gradient are left out. mixing_learning_rate: as `learning_rate` where it is None.
    """
    mixing = {id(p) for stages in injected_modules(model).values() for p in stages.parameters()}
    trained = [p for p in model.parameters() if p.requires_grad]
    rest = [p for p in trained if id(p) not in mixing]
    groups = [
        {"params": [p for p in rest if p.dim() > 1], "lr": learning_rate, "weight_decay": weight_decay},
        {"params": [p for p in rest if p.dim() <= 1], "lr": learning_rate, "weight_decay": 0.0},
        {"params": [p for p in trained if id(p) in mixing], "weight_decay": 0.0,
         "lr": learning_rate if mixing_learning_rate is None else mixing_learning_rate},
    ]  # fmt: skip
    return [group for group in groups if group["params"]]


def _exempt_from_trainer() -> None:
    """Have `transformers.Trainer` leave mixing parameters out of weight decay, as it does biases and norms.

    It asks `Trainer.get_decay_parameter_names`, which from now on leaves out injected parameters; for other models nothing
    changes. Without accelerate there is no Trainer.
    """
    if importlib.util.find_spec("accelerate") is None:
        return
    from transformers.trainer import Trainer

    names_of = Trainer.get_decay_parameter_names
    if getattr(names_of, "leaves_out_mixing", False):
        return

    @functools.wraps(names_of)
    def get_decay_parameter_names(self: Any, model: nn.Module) -> list[str]:
        mixing = {
            f"{prefix}.{name}"
            for prefix, stages in injected_modules(model).items()
            for name, _ in stages.named_parameters()
        }
        return [name for name in names_of(self, model) if name not in mixing]

    get_decay_parameter_names.leaves_out_mixing = True  # type: ignore[attr-defined]
    Trainer.get_decay_parameter_names = get_decay_parameter_names
