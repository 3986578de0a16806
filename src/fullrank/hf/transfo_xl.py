"""Published Transformer-XL checkpoints as models of ours (Dai et al. 2019, §3).

weights = softmax((q + u) . k + (q + v) . W_r R(distance))    over the memory and the segment
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fullrank import storage
from fullrank.core.config import DropoutConfig, InputConfig, ModelConfig, OutputConfig, Stage, WeightedConfig
from fullrank.core.decoder import LanguageModel
from fullrank.core.errors import InputError
from fullrank.files import read_json
from fullrank.forward import load_tensors

# settings of an old configuration by which its model is another one, and the only values that are read
_ONLY = {
    "attn_type": 0,
    "proj_share_all_but_first": True,
    "tie_projs": [False, True, True, True],
    "tie_word_embeddings": True,
}

# tensors of a layer by our names, and their names
_LAYER = {
    "attention.project.relative.weight": "dec_attn.r_net.weight",
    "attention.merge.weight": "dec_attn.o_net.weight",
    **{f"attention_norm.{part}": f"dec_attn.layer_norm.{part}" for part in ("weight", "bias")},
    **{f"feed_forward.up.{part}": f"pos_ff.CoreNet.0.{part}" for part in ("weight", "bias")},
    **{f"feed_forward.down.{part}": f"pos_ff.CoreNet.3.{part}" for part in ("weight", "bias")},
    **{f"feed_forward_norm.{part}": f"pos_ff.layer_norm.{part}" for part in ("weight", "bias")},
}


def load_transfo_xl(
    folder: str | Path, *, mix: Stage = "none", normalize: Stage = "softmax", cross_head: float = 0.0
) -> LanguageModel:
    """Load `transfo-xl/transfo-xl-wt103`, or another folder that transformers up to 4.35 saved, in evaluation mode.

    A text without memory begins with `mem_len` zeros, which are attended to, as in the old code. `model.with_memory` changes
    the length of the memory, and `model.save` makes a folder that every verb reads.

    Args:
        folder: a folder with `config.json` and `model.safetensors`.
        mix: exchange of attention between heads, as in `AttentionConfig`; a new mixing starts as it does in a new model.
        normalize: what makes weights of scores, as in `AttentionConfig`.
        cross_head: probability of permuted heads in training, as in `AttentionConfig`.

    Raises:
        InputError: the folder holds another model, lacks a file or a tensor, or has settings that are not read.
    """
    folder = Path(folder)
    about = read_json(folder / storage.HUGGING_FACE)
    if about.get("model_type") != "transfo-xl":
        raise InputError(f"{folder}: model_type: transfo-xl, given {about.get('model_type')!r}")
    if not (folder / storage.WEIGHTS).is_file():
        raise InputError(
            f"{folder}: holds no {storage.WEIGHTS}; a pickle (pytorch_model.bin) is converted as docs/transformer_xl.md shows"
        )
    attention = WeightedConfig(mix=mix, normalize=normalize, cross_head=cross_head, bias=False)
    try:
        model = LanguageModel(make_config(about, attention))
        named = rename_tensors(storage.read(folder / storage.WEIGHTS), about)
    except KeyError as error:
        raise InputError(f"{folder}: its {storage.HUGGING_FACE} or {storage.WEIGHTS} lacks {error}") from error
    state = model.state_dict()
    fresh = {name: tensor for name, tensor in state.items() if ".attend.mix." in name}
    load_tensors(model, fresh | named, folder / storage.WEIGHTS, assign=True)
    return model.eval()


def make_config(about: Mapping[str, Any], attention: WeightedConfig) -> ModelConfig:
    """Translate an old `config.json` into the configuration of a model of ours.

    Raises InputError for a setting that is not read, KeyError for one that is missing.
    """
    for key, value in _ONLY.items():
        expected = value[: len(about["cutoffs"]) + 1] if isinstance(value, list) else value
        if about.get(key, expected) != expected:
            raise InputError(f"{key}: {expected}, the published setting, given {about[key]}")
    if about["d_embed"] != about["d_model"] or about["div_val"] < 2:
        raise InputError(
            f"d_embed, div_val: as many as d_model ({about['d_model']}), and from 2, given {about['d_embed']} and "
            f"{about['div_val']}"
        )
    clamp_length = about["clamp_len"] if about["clamp_len"] > 0 else None
    score = {"name": "relative", "shared_biases": not about["untie_r"], "clamp_length": clamp_length}
    clusters = {"kind": "adaptive", "cutoffs": about["cutoffs"], "div_val": about["div_val"]}
    dropout = about["dropout"]
    memory_length = about["mem_len"]
    return ModelConfig(
        vocab_size=about["vocab_size"],
        hidden_size=about["d_model"],
        num_hidden_layers=about["n_layer"],
        num_attention_heads=about["n_head"],
        head_dim=about["d_head"],
        intermediate_size=about["d_inner"],
        layer_norm_eps=about["layer_norm_epsilon"],
        norm="pre" if about["pre_lnorm"] else "post",
        final_norm=False,
        position="relative",
        memory_length=memory_length,
        memory_start="zeros" if memory_length else "empty",
        same_length=about["same_length"],
        scale_embedding=True,
        dropout=DropoutConfig(
            embedding=dropout, activation=dropout, residual=dropout, output=dropout, attention=about["dropatt"]
        ),
        attention=WeightedConfig.from_dict(attention.to_dict() | {"score": score}),
        input=InputConfig.from_dict(clusters),
        output=OutputConfig.from_dict(clusters | {"form": "transformer_xl", "tied": True}),
    )


def rename_tensors(tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> dict[str, Tensor]:
    """Rename the tensors of an old checkpoint to our names; KeyError for one that is missing."""
    renamed = {
        "output.projections.0": tensors["crit.out_projs.0"],
        "output.class_weight": tensors["crit.cluster_weight"],
        "output.class_bias": tensors["crit.cluster_bias"],
    }
    for i in range(len(about["cutoffs"]) + 1):
        renamed[f"embedding.weights.{i}"] = tensors[f"transformer.word_emb.emb_layers.{i}.weight"]
        renamed[f"embedding.projections.{i}"] = tensors[f"transformer.word_emb.emb_projs.{i}"]
        renamed[f"output.biases.{i}"] = tensors[f"crit.out_layers.{i}.bias"]
    if not about["untie_r"]:  # theirs are named by what they multiply: content (words, w) and distances (r)
        renamed["position.biases.content_bias"] = tensors["transformer.r_w_bias"]
        renamed["position.biases.position_bias"] = tensors["transformer.r_r_bias"]
    for i in range(about["n_layer"]):
        old = f"transformer.layers.{i}"
        new = f"blocks.{i}"
        if about["untie_r"]:
            renamed[f"{new}.attention.attend.score.biases.content_bias"] = tensors[f"{old}.dec_attn.r_w_bias"]
            renamed[f"{new}.attention.attend.score.biases.position_bias"] = tensors[f"{old}.dec_attn.r_r_bias"]
        projections = tensors[f"{old}.dec_attn.qkv_net.weight"].chunk(3)
        for name, weight in zip(("query", "key", "value"), projections, strict=True):
            renamed[f"{new}.attention.project.{name}.weight"] = weight
        for name, theirs in _LAYER.items():
            renamed[f"{new}.{name}"] = tensors[f"{old}.{theirs}"]
    return renamed
