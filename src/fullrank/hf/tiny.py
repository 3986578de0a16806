"""Tiny untrained models of a model type of transformers: its configuration made small by the names of its settings."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fullrank.config.load import read_yaml
from fullrank.core.errors import InputError, one_line

_VOCABULARY = 64
_MOST_LAYERS, _MOST_PARAMETERS = 4, 30_000_000
_LENGTH, _SOURCE = 67, 29  # tokens of the example inputs
_RULES: dict[str, Any] = read_yaml(Path(__file__).with_name("tiny.yaml"))


class Tiny(NamedTuple):
    """inputs: what the model has to be called with, where token ids alone do not do (see `fullrank.check`)."""

    model: Any
    inputs: dict[str, Tensor] | None = None


def classes(model_type: str | None = None) -> list[tuple[str, str]]:
    """(model type, class) of what predicts next tokens in the installed transformers; a type's causal class first."""
    from transformers.models.auto import modeling_auto as auto

    causal, translating = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    pairs = dict.fromkeys((*causal.items(), *translating.items()))
    return sorted((pair for pair in pairs if model_type in (None, pair[0])), key=lambda pair: pair[0])


def build_tiny(model_type: str, class_name: str | None = None, **settings: Any) -> Tiny:
    """A random model in fp32, in evaluation mode: few layers, but one of each kind, and windows of 8 tokens.

    class_name: one of `classes(model_type)`, the first if not given. settings: of the configuration, before the small ones.
    Raises InputError for what predicts no next tokens, for what needs more than tokens and for what would be large; an error
    of transformers where it cannot build the model.
    """
    import transformers

    named = [name for _, name in classes(model_type)]
    if not named or class_name not in (None, *named):
        raise InputError(f"hf:{model_type}: no {class_name or 'class'} that predicts next tokens")
    if reason := _RULES["inapplicable"].get(model_type):
        raise InputError(f"hf:{model_type}: not a model of tokens alone: {reason}")
    cls = getattr(transformers, class_name or named[0])
    config = _make_small_config(transformers.CONFIG_MAPPING[model_type], **settings)
    parts = [part for part in vars(config).values() if isinstance(part, cls.config_class)]
    if not isinstance(config, cls.config_class) and parts:
        config = parts[0]  # the class is that of a part of the model
    try:
        with torch.device("meta"):
            count = cls(copy.deepcopy(config)).num_parameters()
        if count > _MOST_PARAMETERS:
            raise InputError(f"hf:{model_type}: {count:,} parameters at least, too large for a tiny model")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            model = cls(config).float().eval()
    except ImportError as error:
        raise InputError(f"hf:{model_type}: needs another package: {one_line(error, 120)}") from error
    return Tiny(model, _inputs(model))


def _inputs(model: Any) -> dict[str, Tensor] | None:
    draw, config = torch.Generator().manual_seed(1), model.config

    def tokens(length: int) -> Tensor:
        return torch.randint(4, _VOCABULARY, (1, length), generator=draw)

    if config.is_encoder_decoder and "decoder_input_ids" in inspect.signature(model.forward).parameters:
        return {"input_ids": tokens(_SOURCE), "decoder_input_ids": tokens(_LENGTH)}
    return None


def _make_small_config(config_class: Any, **settings: Any) -> Any:
    """The configuration that the class stands for, with small sizes, in its parts too."""
    windows = {field.name: True for field in dataclasses.fields(config_class) if field.name == "use_sliding_window"}
    return config_class(**_shrink_settings(config_class(**windows)) | windows | settings)


def _shrink_settings(config: Any) -> dict[str, Any]:
    from transformers import PreTrainedConfig

    fields = {field.name: field.default for field in dataclasses.fields(config) if field.init}
    values = {name: vars(config).get(config.attribute_map.get(name, name)) for name in fields}
    settings: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, PreTrainedConfig):
            settings[name] = type(value)(**_shrink_settings(value))
        elif value is None and name in _RULES["open"]:
            settings[name] = _RULES["open"][name]
        elif fields[name] is not None:
            settings[name] = _shrink(name, value)
    heads, groups = values.get("num_attention_heads"), "num_key_value_heads"
    if groups in settings and values[groups] == heads:
        settings[groups] = 4
    if values.get("is_decoder") is False and not config.is_encoder_decoder:
        settings["is_decoder"] = True
    return settings | _layers(config, values) | _RULES["special"].get(config.model_type, {})


def _shrink(name: str, value: Any) -> Any:
    if isinstance(value, list) and name.endswith("token_id"):
        return [_shrink(name, one) for one in value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    most = next((most for pattern, most in _RULES["most"] if re.search(pattern, name)), None)
    if most == 0:
        return value if value < _VOCABULARY else 4 + value % (_VOCABULARY - 4)
    if isinstance(most, float):
        return most
    return value if most is None else min(value, most)


def _layers(config: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with an entry for each layer, cut to the fewest layers in which every entry occurs, and their number."""
    count = getattr(config, "num_hidden_layers", 0)
    lists = {name: one for name, one in values.items() if isinstance(one, list | tuple) and len(one) == count > 1}
    if not lists:
        return {}
    kinds = [{(name, str(entries[place])) for name, entries in lists.items()} for place in range(count)]
    wanted, kept = set[tuple[str, str]]().union(*kinds), list[int]()
    while len(kept) < min(count, _MOST_LAYERS) and (wanted or len(kept) < 2):
        rest = [place for place in range(count) if place not in kept]
        best = max(rest, key=[len(kind & wanted) for kind in kinds].__getitem__)
        kept, wanted = sorted([*kept, best]), wanted - kinds[best]
    cut: dict[str, Any] = {name: [_shrink(name, value[place]) for place in kept] for name, value in lists.items()}
    if values.get("num_kv_shared_layers"):  # the later half uses the keys and values of the earlier one
        cut = {name: [*entries, *entries] for name, entries in cut.items()} | {"num_kv_shared_layers": len(kept)}
        kept = [*kept, *kept]
    key = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    return cut | ({key: len(kept)} if key in values else {})
