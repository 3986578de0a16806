"""Our attention and vocabulary layer inside Hugging Face models, and out of them again.

A mixture of softmaxes takes the place of the vocabulary layer, and is equal to it at the start (`inject`). W and b are the
parameters of the old layer, under their old names and as tied as they were. W_k and b_k are `latent`, P is `prior` of the
submodule `fullrank` that the layer gets: `Latents` with `latent: residual`, which start as one softmax.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fullrank.core import registry
from fullrank.core.config import MixtureConfig, OutputConfig, Stage, WeightedConfig, stage_name
from fullrank.core.draws import checkpoint_function
from fullrank.core.embedding import Linear
from fullrank.core.engine import Cluster, Components
from fullrank.core.errors import InputError
from fullrank.core.output import Latents, Output
from fullrank.hf.families import (
    LAYOUTS,
    attention_modules,
    choose_modules,
    describe_classes,
    find_projection,
    unknown_modules,
)
from fullrank.hf.interface import FORMER, MIXED, Injected, drop_hooks, hand_over, let_go, prepare
from fullrank.training import optimizer

_FORMERS = "_fullrank_formers"
# Saved as the attention implementation of an injected model. It is never registered, so that a plain `from_pretrained` stops
# with an error that shows this name, where it would otherwise leave out the mixing parameters.
LOADED_BY = "fullrank.load_injected"


def inject(
    model: Any,
    *,
    mix: Stage = "none",
    normalize: Stage = "softmax",
    cross_head: float = 0.0,
    layers: Sequence[int | str] | None = None,
    output: str | Mapping[str, Any] | OutputConfig | None = None,
    interface: Mapping[str, Mapping[str, Any]] | None = None,
) -> Any:
    """Let the heads of a Hugging Face model exchange their attention weights, or make its vocabulary layer a mixture.

        P'_i = sum_j m_ji P_j                               of the weights P that the model itself computes
        p(v | g) = sum_k pi_k softmax(W h_k + b)_v          h_k = g + tanh(W_k g + b_k),  pi = softmax(P g)

    The model is changed in place. With `normalize="softmax"` and a mix that starts as the identity, its outputs stay the same
    until it is trained. New parameters are called `<module>.fullrank.*`. `model.save_pretrained` saves them, `load_injected`
    loads the model with them, and `remove` takes out what was injected.

    `model.config` becomes a copy, so that other models of the same configuration stay as they are. `model.config.fullrank`
    says what was injected, and whether mixing reads the projected query. Position-wise mixing reads the projected query with
    its bias, before norms, rotation and scale. Where no submodule is known to project queries, it reads the query that the
    attention function gets.

    The mixture starts at W_k = b_k = 0, where every softmax is the old one. P starts at random, so that the components part
    at the first step. Differs from Transformer-MoS §3: h_k = tanh(W_k g + b_k) there, which cannot start as g.

    Args:
        model: a model whose attention is on the attention interface of transformers.
        mix: how query heads exchange weights, as in `AttentionConfig`: "position_wise", "position_independent" and so on.
        normalize: what makes weights of scores, as in `AttentionConfig`. Any other than "softmax" changes outputs at once.
        cross_head: probability with which key and value heads are permuted in training; evaluation stays as it is.
        layers: numbers of layers (-1: the last), or parts of module names between dots, such as "decoder". None: all, with a
            warning that names attention that is not on the interface.
        output: "mixture_of_softmaxes", or an `OutputConfig` of that kind with `mixtures` and `latent_dropout`, for a causal or
            masked language model. W and b stay the model's own, tied as they were. Logits become log-probabilities. None: the
            vocabulary layer stays.
        interface: descriptions of attention classes that are refused otherwise, or whose queries are projected by a submodule
            of an unusual name (`fullrank.hf.families` has the usual ones): {"OwnAttention": {"query": "q_proj"}}. Add
            "blocks": 1 where the output of that submodule is the queries of all heads, then keys, then values; leave it out
            where the output is a block for each head.

    Returns:
        The same model.

    Raises:
        InputError: the model cannot be injected into, has been already, or has no such layers or classes; `mix` or `output` is
            one that cannot be injected; or there is nothing to inject.
        ConfigError: `mix`, `normalize`, `cross_head` or `output` has a value that no configuration takes.
    """
    mixture = None if output is None else mixture_settings(output)
    changes_weights = (stage_name(mix), stage_name(normalize)) != ("none", "softmax")
    attends = changes_weights or cross_head != 0
    _check_request(model, mix, normalize, cross_head, changes=attends or mixture is not None)
    interface = interface or {}
    describe_classes(model, interface)
    chosen = choose_modules(model, layers) if attends else {}
    stages = {}
    with torch.random.fork_rng(devices=[]):
        for name, module in chosen.items():
            torch.rand((), device="cpu")  # a fixed random mixing is another one in every layer
            stages[name] = _build_stages(name, module, mix, normalize, cross_head)
    if mixture is not None or any(list(injected.parameters()) for injected in stages.values()):
        _refuse_peft(model)
    if mixture is not None:  # nothing was changed so far
        attach_mixture(find_vocabulary_layer(model), mixture)
        model.register_forward_pre_hook(check_mixture)
    for name, injected in stages.items():
        module = chosen[name]
        module.fullrank = injected
        module.register_forward_pre_hook(prepare)
        if injected.projection is not None:
            module.register_forward_hook(let_go)
    _copy_configs(model)
    vars(model)[_FORMERS] = [(config, config._attn_implementation) for config in _configs(model)]
    if attends:
        _attend_by_stages(model)
    projected = [find_projection(module)[0] or type(module).__name__ in LAYOUTS for module in chosen.values()]
    settings = {
        "mix": mix,
        "normalize": normalize,
        "cross_head": cross_head,
        "layers": None if layers is None else list(layers),
        "output": mixture,
        "interface": {name: {**fields} for name, fields in interface.items()} or None,
        "query": "projected" if all(projected) else "given",
    }
    for config in _configs(model):
        config.fullrank = settings
        config.attn_implementation = LOADED_BY
    unknown = unknown_modules(model) if attends and layers is None else []
    if unknown:
        warnings.warn(
            f"{type(model).__name__}: {len(unknown)} attention modules are off the attention interface and stay as they are: "
            f"{', '.join(unknown[:3])}; give the others as `layers` to inject without this warning",
            stacklevel=2,
        )
    return model


def _check_request(model: nn.Module, mix: Stage, normalize: Stage, cross_head: float, changes: bool) -> None:
    """Raise InputError for what cannot be injected, or changes nothing; ConfigError for unknown words."""
    WeightedConfig(mix=mix, normalize=normalize, cross_head=cross_head)
    if not registry.lookup("mix", stage_name(mix)).injectable:
        raise InputError(
            f"inject: mix '{stage_name(mix)}' is more than a matrix of mixed weights and would change a trained model; give "
            "'position_wise', 'position_independent' or 'low_rank', or train it from scratch"
        )
    if not changes:
        raise InputError(
            "inject: nothing to inject; give mix (such as 'position_wise'), normalize, cross_head or output"
        )
    if is_injected(model):
        raise InputError(
            f"{type(model).__name__}: has been injected into already; take it out first, fullrank.remove(model)"
        )


def _refuse_peft(model: nn.Module) -> None:
    """Raise InputError for a model with adapters: PEFT trains and saves the modules that it knew when it was applied."""
    if any(type(module).__module__.startswith("peft.") for module in model.modules()):
        raise InputError(
            f"{type(model).__name__}: PEFT was applied already and would not save what is injected; call fullrank.inject on "
            "the base model first, then get_peft_model with modules_to_save=['fullrank'] in its configuration"
        )


def _copy_configs(model: nn.Module) -> None:
    """Give a model configurations of its own."""
    copies: dict[int, Any] = {}
    for module in model.modules():
        for name, value in vars(module).items():
            if hasattr(value, "_attn_implementation"):
                vars(module)[name] = copy.deepcopy(value, copies)


def _build_stages(name: str, module: Any, mix: Stage, normalize: Stage, cross_head: float) -> Injected:
    """Build the stages for a module, on its device and in its dtype."""
    stages = Injected(module, mix, normalize, cross_head)
    # a quantized layer has others too; while a model is loaded, some parameters may have been made outside of the meta device
    parameters = [p for p in module.parameters() if p.is_floating_point()]
    like = min(parameters, key=lambda p: not p.is_meta, default=None)
    if like is None or not like.is_meta:
        rules = stages.rules(module)
        is_plain = rules.plain and "position_bias" not in rules.extras  # which T5 always gives
        is_capped = getattr(module, "attn_logit_softcapping", None) is not None  # as in Gemma 2
        if stage_name(normalize) != "softmax" and (is_capped or not is_plain):
            raise InputError(
                f"{name}: its scores are more than scaled dot products (a soft-cap, sinks or position biases), which other "
                f"normalisers than softmax would have to take apart; given normalize '{stage_name(normalize)}'"
            )
    if like is not None:
        stages.to(device=like.device, dtype=like.dtype)
    return stages.train(module.training)


def _configs(model: nn.Module) -> list[Any]:
    """List every configuration that the model's parts read, once."""
    configs = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            configs[id(config)] = config
    return list(configs.values())


def find_injected_modules(model: nn.Module) -> dict[str, Injected]:
    """Find all injected stages of attention, by their names in the model."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Injected)}


def is_injected(model: nn.Module) -> bool:
    """Return whether stages of attention or a mixture of softmaxes were injected."""
    return any(isinstance(module, Injected | MixtureHead) for module in model.modules())


def add_identities(model: Any) -> tuple[Any, set[int]]:
    """Add an identity mixing to the layers of attention that have no mixing, for analyses; outputs stay the same.

    Returns the model and the numbers of the layers that had none. Where there are any, the model is a copy. Cross-head
    attention alone counts as no mixing: it acts in training only.
    Raises InputError where some attention is not on the interface.
    """
    modules = find_weighted_modules(model)
    plain = set()
    for number, module in enumerate(modules.values()):
        stages = module._modules.get("fullrank")
        if stages is None or stages.keeps_weights:
            plain.add(number)
    if plain:
        model = copy.deepcopy(model)
        for number, (name, module) in enumerate(attention_modules(model).items()):
            if number in plain:
                module.fullrank = _build_stages(name, module, "position_independent", "softmax", 0.0)
        _attend_by_stages(model)
    return model, plain


def _attend_by_stages(model: nn.Module) -> None:
    """Let a model attend by the stages in it; each module of attention remembers its former implementation."""
    for module in attention_modules(model).values():
        vars(module).setdefault(FORMER, module.config._attn_implementation)
    for config in _configs(model):
        if config._attn_implementation is not None:
            config._attn_implementation_internal = MIXED


def find_weighted_modules(model: Any) -> dict[str, Any]:
    """Find all layers of attention, by name; InputError where some are not on the interface, so that no weights are read."""
    modules = choose_modules(model, None)
    if unknown := unknown_modules(model):
        raise InputError(
            f"{type(model).__name__}: {unknown[0]} is not on the attention interface, so that its weights cannot be read"
        )
    return modules


def settings_of(model: Any) -> dict[str, Any]:
    """Return the arguments with which `inject` was called on a model."""
    return arguments_of(model.config.fullrank)


def arguments_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Select the arguments of `inject` among the settings in a configuration."""
    return {key: settings.get(key) for key in ("mix", "normalize", "cross_head", "layers", "output", "interface")}


def remove(model: Any) -> Any:
    """Take out what `inject` put into a model, and return the same model.

    Its own parameters stay as they are now, with what they have learned. The mixing, and the latent states of a mixture of
    softmaxes, are lost. The vocabulary layer is one softmax again, and the implementation of attention that of before.
    Raises InputError if nothing was injected; then nothing is changed.
    """
    if _FORMERS not in vars(model):
        raise InputError(
            f"{type(model).__name__}: nothing was injected into it, or it is only a part of an injected model; remove it from "
            "the whole one"
        )
    drop_hooks(model, check_mixture)
    for module in model.modules():
        if isinstance(module, MixtureHead):
            del module.fullrank
            module.__class__ = nn.Linear  # type: ignore[assignment]
    for module in attention_modules(model).values():
        vars(module).pop(FORMER, None)
        module._modules.pop("fullrank", None)
        for part in module.modules():
            drop_hooks(part, prepare, hand_over, let_go)
    for config, former in vars(model).pop(_FORMERS):
        config._attn_implementation_internal = former
        del config.fullrank, config.attn_implementation
    return model


def parameter_groups(
    model: nn.Module,
    *,
    learning_rate: float,
    mixing_learning_rate: float | None = None,
    weight_decay: float = 0.0,
) -> list[dict[str, Any]]:
    """Make the parameter groups of an optimizer for an injected model: mixing parameters apart, which are never decayed.

    Decay pulls mixing towards zero, which is not plain attention. Vectors (biases, norms) are not decayed either. Parameters
    without gradient are left out.

    Args:
        model: the injected model.
        learning_rate: of all parameters but those of mixing.
        mixing_learning_rate: of the mixing parameters; None: `learning_rate`.
        weight_decay: of all matrices but those of mixing.

    Returns:
        Groups as `torch.optim` takes them, without empty ones.
    """
    rate = learning_rate if mixing_learning_rate is None else mixing_learning_rate
    rates = {p: {"lr": rate} for stages in find_injected_modules(model).values() for p in stages.parameters()}
    groups = optimizer.parameter_groups(model, weight_decay, rates=rates)
    return [{"lr": learning_rate, **group} for group in groups]


# -- the vocabulary layer ----------------------------------------------------------------------------------------------

KIND = "mixture_of_softmaxes"
OWN_KEYS = ("mixtures", "latent_dropout")  # the others are those of the layer that the model has


_CHUNK = 128  # tokens of which the logits of all softmaxes are in memory together


class MixtureHead(nn.Linear, Output):
    """The vocabulary layer of an injected model: hidden (..., E) -> log-probabilities (..., V), in fp32 at least.

    An `nn.Linear` gets this class and keeps its parameters. The softmaxes are computed chunk by chunk, and for gradients again.
    """

    fullrank: Latents

    def components(self, hidden: Tensor) -> Components:
        states, log_prior = self.fullrank(hidden)
        return Components(states, log_prior, (Cluster(self.weight, self.bias),))

    def forward(self, hidden: Tensor) -> Tensor:
        chunks = hidden.flatten(0, -2).split(_CHUNK)
        log_prob = torch.cat([checkpoint_function(self.log_prob, chunk) for chunk in chunks])
        return log_prob.unflatten(0, hidden.shape[:-1])


def check_mixture(model: Any, _: Any) -> None:
    """Raise InputError where the vocabulary layer was replaced after injection: the mixture would be lost silently."""
    head = model.get_output_embeddings()
    head = getattr(head, "original_module", head)  # PEFT's wrapper of a module that is trained and saved
    if not isinstance(head, MixtureHead):
        raise InputError(
            f"{type(model).__name__}: its vocabulary layer became a {type(head).__name__} after injection (by "
            "resize_token_embeddings, or an adapter on it), without the mixture; resize first, then call fullrank.inject, and "
            "leave that layer out of the adapters"
        )


def mixture_settings(output: str | Mapping[str, Any] | OutputConfig) -> dict[str, Any]:
    """Read the mixture that `inject(output=...)` asks for, as `model.config.fullrank` has it; InputError for another one."""
    section = {"kind": output} if isinstance(output, str) else output
    config = section if isinstance(section, OutputConfig) else OutputConfig.from_dict(section)
    settings: dict[str, Any] = {"kind": KIND, **{name: getattr(config, name, None) for name in OWN_KEYS}}
    if not isinstance(config, MixtureConfig) or config not in (MixtureConfig(**settings), _residual(settings)):
        raise InputError(
            f"output: '{KIND}', or an OutputConfig of that kind with {', '.join(OWN_KEYS)} and no other key, given {config}; "
            "the layer has to start equal to the model's own, whose matrix, tying and bias stay"
        )
    return settings


def _residual(settings: Mapping[str, Any]) -> MixtureConfig:
    return MixtureConfig(**settings, latent="residual")


def find_vocabulary_layer(model: Any) -> nn.Linear:
    """Find the vocabulary layer that a mixture can replace, and try it out on a few tokens unless it has no values yet.

    Raises InputError for a model without one, and for one that changes its logits afterwards.
    """
    name = type(model).__name__
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    # device_map replaces the forward pass
    if type(head) not in (nn.Linear, Linear) or "forward" in vars(head):
        kind = "none" if head is None else type(head).__name__
        raise InputError(
            f"{name}: output replaces an nn.Linear (not quantized, not placed by device_map); its vocabulary layer: {kind}"
        )
    if head.weight.is_meta:
        return head
    ids = torch.arange(min(4, head.out_features), device=head.weight.device)[None]
    seen: list[Tensor] = []
    hook = head.register_forward_hook(lambda _, __, logits: seen.append(logits))
    try:
        with hook, torch.no_grad(), torch.random.fork_rng(devices=[]):
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), return_dict=True).get("logits")
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(f"{name}: output is for models that predict tokens from input_ids alone ({error})") from error
    if not seen or logits is None or not torch.equal(logits.to(seen[0]), seen[0]):
        raise InputError(
            f"{name}: it changes its logits after the vocabulary layer (a soft-cap, a scale); a mixture of softmaxes cannot "
            "replace that layer"
        )
    return head


def attach_mixture(head: nn.Linear, settings: Mapping[str, Any]) -> None:
    """Turn a vocabulary layer into a mixture, in place; `settings` are those of `mixture_settings`."""
    with torch.random.fork_rng(devices=[]):
        latents = Latents(_residual(settings), head.in_features).train(head.training)
    head.__class__ = MixtureHead
    head.fullrank = latents if head.weight.is_meta else latents.to(head.weight)
