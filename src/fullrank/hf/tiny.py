"""Tiny untrained models of a model type: its configuration made small by the names of its settings (`tiny.yaml`)."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from fullrank.config.load import read_yaml
from fullrank.core.errors import InputError, one_line

_VOCABULARY = 64
_MOST_LAYERS = 4
_MOST_PARAMETERS = 30_000_000
_LENGTH = 67  # tokens of the example inputs
_SOURCE = 29  # tokens of what an encoder reads
_RULES: dict[str, Any] = read_yaml(Path(__file__).with_name("tiny.yaml"))


def list_classes(model_type: str | None = None) -> list[tuple[str, str]]:
    """List (model type, class) of the installed transformers that predict next tokens, the causal class of a type first."""
    from transformers.models.auto import modeling_auto as auto

    causal = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    translating = auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    pairs = dict.fromkeys((*causal.items(), *translating.items()))
    selected = [pair for pair in pairs if model_type in (None, pair[0])]
    return sorted(selected, key=lambda pair: pair[0])


def build_tiny(model_type: str, class_name: str | None = None, **settings: Any) -> tuple[Any, dict[str, Tensor] | None]:
    """Build a tiny random model in fp32, in evaluation mode: few layers, one of each kind, and windows of 8 tokens.

    Args:
        model_type: a type of transformers, such as "gpt2".
        class_name: one of `list_classes(model_type)`; None: the first.
        **settings: of the configuration; they override the small ones.

    Returns:
        The model, and example inputs where it reads more than token ids, else None.

    Raises:
        InputError: the type predicts no next tokens, needs more than tokens, needs a missing package, or is large even at small
            sizes. Where transformers cannot build the model, its own error is raised.
    """
    names = [name for _, name in list_classes(model_type)]
    if not names or class_name not in (None, *names):
        raise InputError(f"hf:{model_type}: no {class_name or 'class'} that predicts next tokens")
    if reason := _RULES["inapplicable"].get(model_type):
        raise InputError(f"hf:{model_type}: not a model of tokens alone: {reason}")
    cls = getattr(transformers, class_name or names[0])
    config = make_small_config(transformers.CONFIG_MAPPING[model_type], **settings)
    parts = [part for part in vars(config).values() if isinstance(part, cls.config_class)]
    if not isinstance(config, cls.config_class) and parts:
        config = parts[0]  # the class is that of one part, such as the text model
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
    return model, _make_inputs(model)


def _make_inputs(model: Any) -> dict[str, Tensor] | None:
    if not model.config.is_encoder_decoder or "decoder_input_ids" not in inspect.signature(model.forward).parameters:
        return None
    generator = torch.Generator().manual_seed(1)
    lengths = {"input_ids": _SOURCE, "decoder_input_ids": _LENGTH}
    return {name: torch.randint(4, _VOCABULARY, (1, length), generator=generator) for name, length in lengths.items()}


def make_small_config(config_class: Any, **settings: Any) -> Any:
    """Build a configuration of the class with small sizes, in its parts too."""
    windows = {field.name: True for field in dataclasses.fields(config_class) if field.name == "use_sliding_window"}
    return config_class(**_shrink_settings(config_class(**windows)) | windows | settings)


def _shrink_settings(config: Any) -> dict[str, Any]:
    fields = {field.name: field.default for field in dataclasses.fields(config) if field.init}
    values = {name: vars(config).get(config.attribute_map.get(name, name)) for name in fields}
    settings: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, transformers.PreTrainedConfig):
            settings[name] = type(value)(**_shrink_settings(value))
        elif value is None and name in _RULES["open"]:
            settings[name] = _RULES["open"][name]
        elif fields[name] is not None:
            settings[name] = _shrink(name, value)
    key_value_heads = "num_key_value_heads"
    if key_value_heads in settings and values[key_value_heads] == values.get("num_attention_heads"):
        settings[key_value_heads] = 4
    if values.get("is_decoder") is False and not config.is_encoder_decoder:
        settings["is_decoder"] = True
    return settings | _cut_layers(config, values) | _RULES["special"].get(config.model_type, {})


def _shrink(name: str, value: Any) -> Any:
    if isinstance(value, list) and name.endswith("token_id"):
        return [_shrink(name, item) for item in value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    largest = next((size for pattern, size in _RULES["most"] if re.search(pattern, name)), None)
    if largest == 0:  # a token id
        return value if value < _VOCABULARY else 4 + value % (_VOCABULARY - 4)
    if isinstance(largest, float):
        return largest
    return value if largest is None else min(value, largest)


def _cut_layers(config: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Cut settings with an entry for each layer to the first layer of each kind, and count the layers that remain."""
    count = getattr(config, "num_hidden_layers", 0)
    lists = {name: value for name, value in values.items() if isinstance(value, list | tuple)}
    lists = {name: entries for name, entries in lists.items() if len(entries) == count > 1}
    if not lists:
        return {}
    kinds = [str(settings) for settings in zip(*lists.values(), strict=True)]
    first_layers = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    kept_layers = first_layers[:_MOST_LAYERS] if len(first_layers) > 1 else [0, 1]
    cut: dict[str, Any] = {}
    for name, entries in lists.items():
        cut[name] = [_shrink(name, entries[layer]) for layer in kept_layers]
    layers = len(kept_layers)
    if values.get("num_kv_shared_layers"):  # the later half uses the keys and values of the earlier one
        cut = {name: entries * 2 for name, entries in cut.items()} | {"num_kv_shared_layers": layers}
        layers *= 2
    key = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    if key in values:
        cut[key] = layers
    return cut
