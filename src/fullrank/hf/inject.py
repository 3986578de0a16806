"""Our attention inside any Hugging Face model that is on the attention interface, and out of it again."""

from __future__ import annotations

import ast
import copy
import functools
import importlib.util
import inspect
import re
import textwrap
import types
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fullrank.core.config import OutputConfig, Stage, WeightedConfig, stage_name
from fullrank.core.errors import InputError, suggest
from fullrank.core.score import Softmax
from fullrank.core.stage import HeadSize
from fullrank.hf import output as vocabulary
from fullrank.hf.interface import (
    FORMER,
    Injected,
    QueryProjection,
    dispatcher,
    drop_hooks,
    eager_of,
    hand_over,
    let_go,
    name_for,
    prepare,
)

_FORMERS = "_fullrank_formers"
_TAGS = ("fullrank", "fullrank-rotated-query")  # of the card of an injected model, and of its adapters
STORED = "_fullrank_stored"  # on a model whose injected parameters were read from a folder
# Saved as the attention implementation of an injected model. It is never registered, so that a plain `from_pretrained` stops
# with an error that shows this name, where it would otherwise leave out the mixing parameters.
LOADED_BY = "fullrank.load_injected"


def inject(model: Any, *, mix: Stage = "none", normalize: Stage = "softmax", cross_head: float = 0.0,
           layers: Sequence[int | str] | None = None,
           output: str | Mapping[str, Any] | OutputConfig | None = None,
           query: str | Mapping[str, str] = "projected") -> Any:  # fmt: skip
    """Let the heads of a Hugging Face model exchange their attention weights, or make its vocabulary layer a mixture.

        P'_i = sum_j m_ji P_j                               of the weights P that the model itself computes
        p(v | g) = sum_k pi_k softmax(W h_k + b)_v          h_k = g + tanh(W_k g + b_k),  pi = softmax(P g)

    Returns the same model. Outputs are unchanged until it is trained, with `normalize="softmax"` and a mix that starts as
    the identity. New parameters are `....fullrank.*`. `model.config.fullrank` says what was injected, and which query is read.
    The configuration becomes a copy, so that other models that were made of it stay as they are.
    mix, normalize, cross_head: as in `AttentionConfig`. layers: numbers of layers (-1: the last), or parts of module names;
    None: all, with a warning for attention that is not on the interface. Mixing is over query heads, cross_head permutes key
    and value heads.
    output: "mixture_of_softmaxes", or an `OutputConfig` of that kind with `mixtures`, `latent_dropout` and
    `latent_dropout_locked`, for a causal or masked language model. W and b are the model's own, tied as they were. Logits
    are log-probabilities. In training with `labels` the loss is formed chunk by chunk, and `logits` is None;
    `model.config.chunked_loss = False` gives them.
    The mixture starts at W_k = b_k = 0, where every softmax is the old one, with a random P, so that components part at the
    first step. Differs from Transformer-MoS §3: h_k = tanh(W_k g + b_k) there, which could not start as g.
    query: the query that position-wise mixing reads. "projected": with its bias, before norms, rotation and scale, wherever the
    projection can be told; a warning names attention with a rotated query where it cannot. "given": as the attention function
    gets it; `model.config.fullrank["query"]` then has words for what that is, which are taken as well.
    Raises InputError for a model that cannot be injected into, or has been already, ConfigError for unknown words.
    """
    WeightedConfig(mix=mix, normalize=normalize, cross_head=cross_head)
    mixture = None if output is None else vocabulary.mixture_settings(output)
    weights_change = _changes_weights(mix, normalize)
    attends = weights_change or bool(cross_head)
    if not attends and mixture is None:
        raise InputError(
            "inject: nothing to inject; give mix (such as 'position_wise'), normalize, cross_head or output"
        )
    if not attends and layers is not None:
        raise InputError(
            f"layers: those of mix, normalize and cross_head, and none of these is given; given {layers!r}"
        )
    if injected_parts(model):
        raise InputError(
            f"{type(model).__name__}: has been injected into already; take it out first, fullrank.remove(model)"
        )
    chosen = chosen_modules(model, layers) if attends else {}
    formers = {module.config._attn_implementation for module in chosen.values()}
    if not weights_change and not formers <= {"eager", "sdpa"}:
        raise InputError(
            f"{type(model).__name__}: cross_head alone keeps the attention function of the model, which has to be 'sdpa' or "
            f"'eager'; given '{min(formers - {'eager', 'sdpa'}, key=str)}': call model.set_attn_implementation('sdpa') first"
        )
    projections = {
        name: query_projection(module) if _query_word(name, query) == "projected" else None
        for name, module in chosen.items()
    }
    made = {}
    with torch.random.fork_rng(devices=[]):
        for name, module in chosen.items():
            torch.rand((), device="cpu")  # a fixed random mixing is another one in every layer
            made[name] = _stages(name, module, mix, normalize, cross_head, projections[name])
    if mixture is not None or any(list(stages.parameters()) for stages in made.values()):
        _refuse_peft(model)
        _exempt_from_trainer()
    head = None if mixture is None else vocabulary.vocabulary_layer(model)
    # nothing was changed so far
    if mixture is not None and head is not None:
        vocabulary.attach(model, head, mixture)
    for name, stages in made.items():
        chosen[name].fullrank = stages
        chosen[name].register_forward_pre_hook(prepare)
        if stages.projection is not None:
            chosen[name].register_forward_hook(let_go)
    _copy_configs(model)
    for module in attention_modules(model).values() if attends else ():
        vars(module)[FORMER] = module.config._attn_implementation
    queries = {name: query_of(module) if projections[name] is None else "projected" for name, module in chosen.items()}
    settings = {
        "mix": mix, "normalize": normalize, "cross_head": cross_head, "layers": None if layers is None else list(layers),
        "query": next(iter(queries.values())) if len(set(queries.values())) == 1 else queries,
        "output": mixture,
    }  # fmt: skip
    rotated = [name for name, word in queries.items() if "rotated" in word and "query" in made[name].mix.needs]
    model.model_tags = [*(getattr(model, "model_tags", None) or ()), *_TAGS[: 2 if rotated else 1]]
    model.register_state_dict_pre_hook(_before_state_dict)
    model.register_load_state_dict_post_hook(_after_load_state_dict)
    vars(model)[_FORMERS] = [(config, config._attn_implementation) for config in _configs(model)]
    for config, former in vars(model)[_FORMERS]:
        if former is not None and attends:
            config._attn_implementation_internal = name_for(former, weights_change)
        config.fullrank, config.attn_implementation = settings, LOADED_BY
    if attends and layers is None and (left := _off_the_interface(model)):
        warnings.warn(
            f"{type(model).__name__}: {len(left)} attention modules compute weights in code of their own and stay as they are: "
            f"{_first(left)}; give the others as `layers` to inject without this warning",
            stacklevel=2,
        )
    if unknown := [name for name in rotated if _query_word(name, query) == "projected"]:
        warnings.warn(
            f"{type(model).__name__}: {len(unknown)} attention modules have a projection of queries that is not known, so that "
            f"mixing reads the rotated query: the same text at other positions gives other outputs ({_first(unknown)}); "
            "give position_ids with padding on the left, or choose others with `layers`",
            stacklevel=2,
        )
    return model


def _changes_weights(mix: Stage, normalize: Stage) -> bool:
    return (stage_name(mix), stage_name(normalize)) != ("none", "softmax")


def _query_word(name: str, query: str | Mapping[str, str]) -> str:
    """The word of `query` for a module: "projected", "given", or what a saved model says that its attention function gets."""
    if isinstance(query, Mapping):
        same = (word for key, word in query.items() if f".{key}".endswith(f".{name}") or f".{name}".endswith(f".{key}"))
        query = next(same, "projected")
    if not isinstance(query, str) or set(query.split(" and ")) - {
        "projected",
        "given",
        "normalized",
        "rotated",
        "scaled",
    }:
        raise InputError(
            f"query: 'projected', 'given', or `config.fullrank['query']` of a saved model, given {query!r}"
        )
    return query


def _copy_configs(model: nn.Module) -> None:
    """Give a model configurations of its own."""
    copied = copy.deepcopy(configs := _configs(model))
    copies = dict(zip(map(id, configs), copied, strict=True))
    for module in model.modules():
        for name, value in vars(module).items():
            if id(value) in copies:
                vars(module)[name] = copies[id(value)]


def _stages(name: str, module: Any, mix: Stage, normalize: Stage, cross_head: float,
            projection: QueryProjection | None = None) -> Injected:  # fmt: skip
    """The stages for a module, on its device and in its dtype."""
    stages = Injected(head_size(module), eager_of(module), mix, normalize, cross_head, projection)
    # a quantized layer has others too; while a model is loaded, some parameters may have been made outside of the meta device
    like = min((p for p in module.parameters() if p.is_floating_point()), key=lambda p: not p.is_meta, default=None)
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
    """All injected stages of attention by their names in the model."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Injected)}


def injected_parts(model: nn.Module) -> dict[str, nn.Module]:
    """All that was injected by its names in the model: stages of attention, and the latent states of a mixture."""
    modules = dict(model.named_modules())
    heads = tuple(f"{name}." for name, module in modules.items() if isinstance(module, vocabulary.MixtureHead))
    return {
        name: module
        for name, module in modules.items()
        if isinstance(module, Injected) or (isinstance(module, vocabulary.Latents) and name.startswith(heads))
    }


def complete(model: Any) -> tuple[Any, set[int]]:
    """A model with a mixing in each of its layers of attention, for analyses, and the numbers of the layers that had none.

    Layers without one get an identity on a copy of the model, so that its outputs stay. Cross-head attention alone counts as
    none: it acts in training only. Raises InputError where some attention is not on the attention interface.
    """
    modules = weighted_modules(model)
    had = {name for name, module in modules.items() if "fullrank" in module._modules}
    settings: dict[str, Any] = {"mix": "none", "normalize": "softmax", "output": None}
    settings = settings_of(model) if injected_parts(model) else settings
    mixed = _changes_weights(settings["mix"], settings["normalize"])
    if mixed and had == set(modules):
        return model, set()
    model = copy.deepcopy(model)
    if mixed:
        for name, module in attention_modules(model).items():
            if name not in had:
                module.fullrank = _stages(name, module, "position_independent", "softmax", 0.0)
    else:
        head = vocabulary.mixture_head(model)
        latents = None if head is None else head.fullrank
        inject(remove(model) if injected_parts(model) else model, mix="position_independent", output=settings["output"])
        if head is not None and latents is not None:
            head.fullrank = latents
    return model, {number for number, name in enumerate(modules) if not mixed or name not in had}


def weighted_modules(model: Any) -> dict[str, Any]:
    """All layers of attention, whose weights can be read; InputError where some attention is not on the interface."""
    modules = chosen_modules(model, None)
    if off := _off_the_interface(model):
        raise InputError(f"{type(model).__name__}: {off[0]} computes its weights in code of its own, which shows none")
    return modules


def settings_of(model: Any) -> dict[str, Any]:
    """The arguments with which `inject` was called on a model."""
    if not injected_parts(model):
        raise InputError(f"{type(model).__name__}: nothing was injected into it; call fullrank.inject first")
    return arguments_of(model.config.fullrank)


def arguments_of(settings: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `inject` among the settings in a configuration."""
    arguments = {key: settings[key] for key in ("mix", "normalize", "cross_head", "layers")}
    earlier = {"output": None, "query": "given"}  # earlier versions did not write these everywhere
    return {**arguments, **{key: settings.get(key, value) for key, value in earlier.items()}}


def remove(model: Any, *, merge: bool = False) -> Any:
    """Take the injected stages out; the same model, as it was before injection, its own parameters as they are now.

    merge: mixing is written into the model's own parameters, so that the output stays. That is possible where no head takes
    weights from another (M is diagonal, as at the start): a head's values are multiplied by m_jj. A mixture of softmaxes can be
    merged until it is trained. Without merge its latent states are lost, and the vocabulary layer keeps what it has learned.
    Raises InputError if nothing was injected, or if a mixing or a mixture cannot be merged; then nothing is changed.
    """
    if not injected_parts(model):
        raise InputError(f"{type(model).__name__}: nothing was injected into it")
    if _FORMERS not in vars(model):
        raise InputError(f"{type(model).__name__}: only a part of an injected model; remove it from the whole one")
    modules = attention_modules(model)
    if merge:
        vocabulary.check_merge(model)
        _merge({name: module for name, module in modules.items() if "fullrank" in module._modules})
    vocabulary.detach(model)
    for module in modules.values():
        vars(module).pop(FORMER, None)
        module._modules.pop("fullrank", None)
        for part in module.modules():
            drop_hooks(part, prepare, hand_over, let_go)
    drop_hooks(model, _before_state_dict, _after_load_state_dict)
    vars(model).pop(STORED, None)
    model.model_tags = [tag for tag in model.model_tags or () if tag not in _TAGS] or None
    for config, former in vars(model).pop(_FORMERS):
        config._attn_implementation_internal = former
        del config.fullrank, config.attn_implementation
    return model


# -- attention modules of Hugging Face models: which can be injected into, and their sizes ---------------------------------

HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads")
_WIDTHS = ("qk_head_dim", "head_dim", "attention_head_size", "head_size", "key_value_proj_dim", "dim_per_head")
QUERIES = ("q_proj", "query", "q_lin", "q", "query_proj", "linear_q", "wq")
_MODEL_WIDTHS = ("embed_dim", "hidden_size", "d_model")


def attention_modules(model: nn.Module) -> dict[str, Any]:
    """The modules that call an attention function of the attention interface, by name, in the order of the model."""
    return {name: module for name, module in model.named_modules() if dispatcher(type(module)) is not None}


def _off_the_interface(model: nn.Module) -> list[str]:
    """The names of attention modules with projections of their own that call no attention function of the interface."""
    known = attention_modules(model)
    return [
        name
        for name, module in model.named_modules()
        if "Attention" in type(module).__name__
        and sum(p.dim() == 2 for layer in module.children() for p in layer.parameters(recurse=False)) > 1
        and not any(f"{other}.".startswith(f"{name}.") for other in known)
    ]


def chosen_modules(model: nn.Module, layers: Sequence[int | str] | None) -> dict[str, Any]:
    """The attention modules of `layers`: numbers (the first one in a module's name), or parts of names; None: all.

    Negative numbers count from the end of each list of layers.

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
        matching = {name for name in modules if _matches(model, name, layer)}
        if not matching:
            numbers = sorted({number for name in modules if (number := _layer_number(name)) is not None})
            known = suggest(layer, modules) if isinstance(layer, str) else f"it has {', '.join(map(str, numbers))}"
            raise InputError(f"layers: {layer!r} is no attention layer of {type(model).__name__}; {known}")
        chosen |= matching
    return {name: module for name, module in modules.items() if name in chosen}


def _matches(model: nn.Module, name: str, layer: int | str) -> bool:
    if isinstance(layer, str):
        return f".{layer}." in f".{name}."
    number = _layer_number(name)
    if number is not None and layer < 0:
        layers: Any = model.get_submodule(f".{name}".partition(f".{number}.")[0].lstrip("."))
        layer += len(layers)
    return number == layer


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
    heads = _number((module, config), HEAD_COUNTS)
    if heads is None:
        raise InputError(f"{type(module).__name__}: says nowhere how many heads it has; choose others with `layers`")
    width = _number((module,), _WIDTHS)
    if width is None:
        projections = [getattr(module, name, None) for name in QUERIES]
        widths = [layer.out_features for layer in projections if isinstance(layer, nn.Linear)]
        width = (widths[0] if widths else _number((module, config), _MODEL_WIDTHS) or 0) // heads
    return HeadSize(num_heads=heads, head_dim=width, hidden_size=heads * width, max_length=0)


def _number(owners: Sequence[Any], names: Sequence[str]) -> int | None:
    for owner in owners:
        for name in names:
            if type(value := getattr(owner, name, None)) is int and value > 0:
                return value
    return None


# -- the query that position-wise mixing reads: projected, or as a module hands it to its attention function --------------

_PROJECTIONS = (
    "q_b_proj",
    *QUERIES,
    "to_q",
    "query_key_value",
)  # each head's own, a gate, key and value behind its query
_FUSED = ("qkv_proj", "qkv", "Wqkv")  # the queries of all heads, then all keys, then all values
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


def query_projection(module: nn.Module) -> QueryProjection | None:
    """The projection of queries, None where the attention function gets its output unchanged, or it is not known."""
    method = dispatcher(type(module))
    assert method is not None
    if query_of(module) == "projected":
        return None
    size = head_size(module)
    for name in (*_PROJECTIONS, *_FUSED):
        layer = getattr(module, name, None)
        if name in method.__code__.co_names and isinstance(layer, nn.Module):
            blocks = size.num_heads if name in _PROJECTIONS else getattr(module, "mp_num", 1)  # CodeGen: 4 such blocks
            fits = getattr(layer, "out_features", 0 if name in _FUSED else size.hidden_size) >= size.hidden_size
            return QueryProjection(name, blocks) if fits else None
    return None


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
    if not isinstance(node, ast.BinOp | ast.AugAssign) or not isinstance(node.op, ast.Mult):
        return False
    factors = [node.value] if isinstance(node, ast.AugAssign) else [node.left, node.right]
    return any(isinstance(factor, ast.Attribute) and factor.attr in _SCALES for factor in factors)


# -- mixing written into the model's own parameters ----------------------------------------------------------------------

VALUES = ("v_proj", "value", "v_lin", "v", "value_proj")


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
    for projection in (getattr(module, attribute, None) for attribute in VALUES):
        if isinstance(projection, nn.Linear) and not hasattr(module, "v_norm"):
            return projection
    raise _refusal(name, "it has no projection of values alone that could be scaled")


def _refusal(name: str, reason: str) -> InputError:
    return InputError(f"{name}: cannot be merged, {reason}; remove it without merge, or keep it")


# -- PEFT: it saves and loads the modules that its configuration names, and is silent about others --------------------------


# a pattern whose remark stands in PEFT's warning and in the saved configuration
_EXCLUDED = r"(.*\.)?fullrank(?#: call fullrank.inject on the base model as in training, then load this adapter)"


def _has_adapters(model: nn.Module) -> bool:
    return any(type(module).__module__.startswith("peft.") for module in model.modules())


def _refuse_peft(model: nn.Module) -> None:
    """InputError for a model with adapters: PEFT saves the modules that it knew when it was applied, and no others."""
    if _has_adapters(model):
        raise InputError(
            f"{type(model).__name__}: PEFT was applied already and would not save what is injected; call fullrank.inject on "
            "the base model first, then get_peft_model with modules_to_save=['fullrank'] in its configuration"
        )


def _before_state_dict(model: Any, prefix: str, keep_vars: bool) -> None:
    """Hook of an injected model, which PEFT calls in saving an adapter: what the adapter lacks is said by name.

    `fullrank` joins the modules that the adapter excludes: PEFT warns, without this package too, where none of them is found.
    """
    if not _has_adapters(model) and not prefix.endswith("base_model."):  # adapters of prompts leave the model as it is
        return
    settings = model.config.fullrank  # cross-head attention alone acts in training only
    changes = settings["output"] is not None or _changes_weights(settings["mix"], settings["normalize"])
    for config in getattr(model, "peft_config", {}).values() if changes else ():
        if hasattr(config, "exclude_modules") and _EXCLUDED not in (others := config.exclude_modules or ()):
            others = [others] if isinstance(others, str) else [rf"(.*\.)?{re.escape(name)}" for name in others]
            config.exclude_modules = "|".join([*others, _EXCLUDED])
    parts = {name: part for name, part in injected_parts(model).items() if part.state_dict()}
    unsaved = [
        name
        for name, part in parts.items()
        if name.endswith("fullrank") and (STORED not in vars(model) or any(p.requires_grad for p in part.parameters()))
    ]
    if unsaved:
        warnings.warn(
            f"{type(model).__name__}: an adapter of PEFT without modules_to_save=['fullrank'] holds nothing of "
            f"{_first(unsaved)}, and answers otherwise when it is loaded; name that in its configuration, or save these too: "
            "fullrank.save_adapter(model.get_base_model(), folder)",
            stacklevel=2,
        )


def _after_load_state_dict(model: Any, keys: Any) -> None:
    """Hook of an injected model, which PEFT calls in loading an adapter: an adapter without what is injected is named."""
    inside = ("original_module", "modules_to_save")  # of PEFT's wrapper, which the adapter fills
    lacks = [key for key in keys.missing_keys if ".fullrank." in key and not any(f".{part}." in key for part in inside)]
    if lacks and STORED not in vars(model) and (_has_adapters(model) or lacks[0].startswith("base_model.")):
        warnings.warn(
            f"{type(model).__name__}: the adapter of PEFT was saved without modules_to_save=['fullrank'] and lacks "
            f"{_first(lacks)}; the model keeps its own and may answer otherwise than the one that was trained",
            stacklevel=2,
        )


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (" ..." if names[3:] else "")


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
    """Have `transformers.Trainer` leave injected parameters out of weight decay, as it does biases and norms."""
    if importlib.util.find_spec("accelerate") is None:
        return  # without it there is no Trainer
    from transformers.trainer import Trainer

    names_of = Trainer.get_decay_parameter_names
    if getattr(names_of, "leaves_out_mixing", False):
        return

    @functools.wraps(names_of)
    def get_decay_parameter_names(self: Any, model: nn.Module) -> list[str]:
        injected = tuple(f"{prefix}." for prefix in injected_modules(model))
        return [name for name in names_of(self, model) if not name.startswith(injected)]

    get_decay_parameter_names.leaves_out_mixing = True  # type: ignore[attr-defined]
    Trainer.get_decay_parameter_names = get_decay_parameter_names
