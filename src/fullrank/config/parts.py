"""The parts of a translation model, each as a `ModelConfig` of its own, and why there can be none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from fullrank.config.attention import AttentionConfig
from fullrank.config.checks import stage_name
from fullrank.config.translation import DecoderConfig, EncoderConfig
from fullrank.config.vocabulary import OutputConfig
from fullrank.errors import ConfigError

if TYPE_CHECKING:
    from fullrank.config.model import ModelConfig


def of_encoder(model: ModelConfig) -> ModelConfig:
    """See `ModelConfig.of_encoder`."""
    own = model.encoder or EncoderConfig()
    other = own.vocab_size not in (None, model.vocab_size)
    return _part(
        model,
        _seeing_all(_attentions(model)["encoder"]),
        vocab_size=own.vocab_size or model.vocab_size,
        num_hidden_layers=own.num_hidden_layers or model.num_hidden_layers,
        output=OutputConfig() if other else model.output,  # which is of target words
    )


def of_decoder(model: ModelConfig) -> ModelConfig:
    """See `ModelConfig.of_decoder`."""
    own = model.decoder or DecoderConfig()
    layers = own.num_hidden_layers or model.num_hidden_layers
    return _part(model, _attentions(model)["decoder"], num_hidden_layers=layers)


def of_cross(model: ModelConfig) -> ModelConfig:
    """See `ModelConfig.of_cross`."""
    own = model.decoder or DecoderConfig()
    layers = own.num_hidden_layers or model.num_hidden_layers
    return _part(model, _seeing_all(_attentions(model)["cross"]), num_hidden_layers=layers, position="none")


def problems(model: ModelConfig) -> list[str]:
    """See `ModelConfig.problems_of_translation`."""
    found: list[str] = []
    if model.memory_length:
        found.append(
            f"model.memory_length: a translation model reads sentences, not a running text; given {model.memory_length}, "
            "set it to 0"
        )
    cross = model.decoder.cross if model.decoder is not None else None
    if cross is not None and stage_name(cross.score) != "dot_product":
        found.append(
            f"model.decoder.cross.score: '{stage_name(cross.score)}' scores places and distances, and those of two texts "
            "have nothing to do with each other; use dot_product"
        )
    if (cross or model.attention).output_map == "decayed":
        found.append(
            "model.decoder.cross: multi-linear attention with output_map decayed weighs distances, and between two texts "
            "there are none; give model.decoder.cross an output_map pairs, or kind: weighted"
        )
    own = model.encoder
    if own is not None and own.share_embedding and own.vocab_size not in (None, model.vocab_size):
        found.append(
            f"model.encoder.share_embedding: one table for both vocabularies, but model.encoder.vocab_size is "
            f"{own.vocab_size} and model.vocab_size {model.vocab_size}; use one joint vocabulary (data.vocabulary: joint), or "
            "set it to false"
        )
    if found:
        return found
    for key, part in (
        ("model.encoder.attention", of_encoder),
        ("model.decoder.attention", of_decoder),
        ("model.decoder.cross", of_cross),
    ):
        found += _faults(model, key, part)
    return found


def _faults(model: ModelConfig, key: str, part: Callable[[ModelConfig], ModelConfig]) -> list[str]:
    """What keeps a part from being built, with the keys that are meant there."""
    try:
        part(model)
    except ConfigError as error:
        named = [problem.replace("model.attention", key) for problem in error.problems]
        if part is of_encoder and model.encoder is not None and model.encoder.vocab_size is not None:
            named = [problem.replace("model.vocab_size", "model.encoder.vocab_size") for problem in named]
        section = key.rpartition(".")[0]
        return [problem if section in problem else f"{problem} ({key})" for problem in named]
    return []


def _attentions(model: ModelConfig) -> dict[str, AttentionConfig]:
    """What each place attends with."""
    encoder, decoder = model.encoder or EncoderConfig(), model.decoder or DecoderConfig()
    cross = decoder.cross or replace(model.attention, score="dot_product")
    if decoder.released_cross:
        cross = replace(cross, mix="none")
    return {
        "encoder": encoder.attention or model.attention,
        "decoder": decoder.attention or model.attention,
        "cross": cross,
    }


def _part(model: ModelConfig, attention: AttentionConfig, **changes: object) -> ModelConfig:
    """Dropout of attention weights is for the places that have some, if there are such."""
    dropout, kinds = model.dropout, {stages.kind for stages in _attentions(model).values()}
    if attention.kind == "multilinear" and kinds != {"multilinear"}:
        dropout = replace(dropout, attention=0.0)
    return replace(model, attention=attention, dropout=dropout, encoder=None, decoder=None, **changes)  # type: ignore[arg-type]


def _seeing_all(attention: AttentionConfig) -> AttentionConfig:
    """Where nothing is hidden, `as_published` and `masked` are one."""
    if attention.sees_future:
        return replace(attention, causal="masked", not_next_token_perplexity=False)
    return attention
