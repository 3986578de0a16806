"""Tiny untrained models of a model type of transformers: its configuration made small by the names of its settings."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fullrank.core.errors import InputError, one_line

_VOCABULARY = 64
_MOST_LAYERS, _MOST_PARAMETERS = 4, 30_000_000
_LENGTH, _SOURCE = 67, 29  # tokens of the example inputs


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


def tiny(model_type: str, class_name: str | None = None, **settings: Any) -> Tiny:
    """A random model in fp32, in evaluation mode: few layers, but one of each kind, and windows of 8 tokens.

    class_name: one of `classes(model_type)`, the first if not given. settings: of the configuration, before the small ones.
    Raises InputError for what predicts no next tokens, for what needs more than tokens and for what would be large; an error
    of transformers where it cannot build the model.
    """
    import transformers

    named = [name for _, name in classes(model_type)]
    if not named or class_name not in (None, *named):
        raise InputError(f"hf:{model_type}: no {class_name or 'class'} that predicts next tokens")
    if reason := _INAPPLICABLE.get(model_type):
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
    if config.model_type == "voxtral_realtime":  # eight frames of sound beside each token
        sound = torch.randn(1, config.audio_config.num_mel_bins, 8 * _LENGTH, generator=draw)
        return {"input_ids": tokens(_LENGTH), "input_features": sound}
    return None


# -- configurations ---------------------------------------------------------------------------------------------------

# A number whose name has the pattern is at most this; the first pattern counts. Windows and chunks are shorter than the
# texts of a check, groups divide heads and experts, and the sizes of states agree: 2 x 32 = 64 = 8 heads of 8.
_MOST = tuple((re.compile(pattern), most) for pattern, most in (
    (r"token_id$|token_index$", 0),
    (r"initializer_range|init_std", 0.2),  # larger than usual: in so narrow a model attention would be nearly uniform
    (r"vocab", _VOCABULARY),
    (r"position|n_ctx|max_seq_len|context_length|model_max_length|rel_extent", 128),
    (r"sliding_window(_size)?$|attention_chunk_size|^attention_window|keep_window|local_attention|^(mamba_)?chunk_size$"
     r"|attn_chunk_length|block_size|local_radius|index_topk$", 8),
    (r"buckets|max_distance", 16),
    (r"topk_group", 1),
    (r"n_groups?$|ngroups|expert_group|period|every_n|interval|frequency|sparse_step|_pattern$", 2),
    (r"layer_offset|first_k_dense|num_dense_layers|layers_per|random_blocks", 1),
    (r"tokenizer", None),
    (r"layers$|n_layer$|num_blocks$|^depth$|experts_per|top_?k|moe_k$|num_filters", 2),
    (r"index.*heads", 32),  # with few heads many scores are 0, and which of them come first is chance
    (r"kv_n?_?heads|key_value_heads|query_groups", 2),
    (r"experts$|expert_num|dt_rank|time_step_rank|rotary_dim|linear.*key_heads|_groups$", 4),
    (r"head_?dim|d_head|d_kv|dim_head|attention_head_size|kv_channels|state_size|d_state|query_pre_attn", 8),
    (r"mamba.*heads|value_heads|linear_num_heads", 8),
    (r"heads?(_per_layer)?$", 4),
    (r"rank", 16),
    (r"intermediate|ffn|d_ff|dff|dim_ff|d_inner|mlp_dim|n_inner|feed_forward|d_ssm", 64),
    (r"hidden|d_model|embd|embed|emb_dim|_dim$|_size$|width|channels", 32),
))  # fmt: skip
# what the installed transformers leaves open, where None does not work
_OPEN = {
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
}
# what a type needs besides, or what turns on a part of it
_SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"], "full_attn_idxs": None},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},  # two share parameters
    "mamba2": {"num_heads": 8},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10_000.0}},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1]}
            for kind in ("sliding_attention", "full_attention")
        },
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8, "indexer_compress_ratio": 2,
        "ple_layer_ids": [1], "eos_token_id": 2,
    },
    "musicgen_decoder": {"num_codebooks": 1},  # one stream of tokens instead of four beside each other
    "musicgen_melody_decoder": {"num_codebooks": 1},
    "gemma4_text": {"global_head_dim": 16},
    "gemma4_unified_text": {"global_head_dim": 16},
    "dots3_note_text": {
        "sliding_window": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16, "swa_head_dim": 16, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8,
    },
    "xmod": {"default_language": "en_XX"},
    "recurrent_gemma": {"num_hidden_layers": 3},  # two recurrent ones before one with attention
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "deepseek_v4": {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}},
    "flint": {"mlp_only_layers": [0]},
    "reformer": {"attn_layers": ["local", "lsh"], "axial_pos_shape": [8, 16], "axial_pos_embds_dim": [8, 24]},
    "xlm": {"causal": True},
    "xlnet": {"attn_type": "uni"},  # by default it predicts permuted texts
}  # fmt: skip
_DRAFTS = "it drafts tokens from the hidden states and the cache of another model"
_INAPPLICABLE = {"gemma4_assistant": _DRAFTS, "gemma4_unified_assistant": _DRAFTS}


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
        elif value is None and name in _OPEN:
            settings[name] = _OPEN[name]
        elif fields[name] is not None:
            settings[name] = _shrink(name, value)
    heads, groups = values.get("num_attention_heads"), "num_key_value_heads"
    if groups in settings and values[groups] == heads:
        settings[groups] = 4
    if values.get("is_decoder") is False and not config.is_encoder_decoder:
        settings["is_decoder"] = True
    return settings | _layers(config, values) | _SPECIAL.get(config.model_type, {})


def _shrink(name: str, value: Any) -> Any:
    if isinstance(value, list) and name.endswith("token_id"):
        return [_shrink(name, one) for one in value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    most = next((most for pattern, most in _MOST if pattern.search(name)), None)
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
