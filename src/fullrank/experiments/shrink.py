"""A configuration made small: the same mechanisms, in sizes that a check reads in seconds."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch

from fullrank.core.config import (
    AdaptiveInputConfig,
    AttentionConfig,
    ClusteredConfig,
    DecoderConfig,
    EncoderConfig,
    MixtureConfig,
    ModelConfig,
)
from fullrank.core.decoder import LanguageModel
from fullrank.core.translator import Translator

VOCABULARY = 32
_SMALL = 100_000  # parameters of a model that is taken as it is
_LAYERS, _HEADS, _HEAD_DIM, _INTERMEDIATE, _POSITIONS, _MEMORY = 2, 4, 4, 32, 40, 8
_ATTENTION = {"rank": 6, "cores": 3, "decays": 3}  # sizes of attention that are no heads, where it has them
_MIXTURES = 3
_PAIRED = 23  # positions where there are parameters for each pair of them
_PARTS = ("attention", "input", "output")
_SECTIONS = ("encoder", "decoder", "encoder.attention", "decoder.attention", "decoder.cross")
_OTHER = 3  # how many words more the source knows: languages that are mixed up show


def shrunk(config: ModelConfig, *, translates: bool = False) -> tuple[ModelConfig, tuple[str, ...]]:
    """`config` small, and what was changed: "hidden_size 512 -> 16". A small configuration stays as it is.

    Mechanisms, kinds of positions, norms, clusters by number, tying and dropout stay. translates: it is that of a
    translation model.
    """
    stages = [config.attention]
    if translates:
        stages = [part.attention for part in (config.of_encoder(), config.of_decoder(), config.of_cross())]
    as_it_is = config
    clusters, divisors = [0, 0], [1, 1]
    for i, part in enumerate((config.input, config.output)):
        if isinstance(part, AdaptiveInputConfig | ClusteredConfig):
            clusters[i], divisors[i] = len(part.cutoffs or ()), part.div_val or 1
    if config.vocab_size is None and not any(clusters):
        as_it_is = replace(config, vocab_size=VOCABULARY)
    at_least = 2 * config.num_hidden_layers * config.hidden_size * (config.intermediate_size or 0)
    if as_it_is.vocab_size is not None and at_least <= _SMALL and _parameters(as_it_is, translates) <= _SMALL:
        return as_it_is, _changes(config, as_it_is)
    heads, assumed = min(config.num_attention_heads, _HEADS), config.head_dim or 1
    head_dim = min(assumed, _HEAD_DIM)
    vocab_size = min(config.vocab_size or VOCABULARY, VOCABULARY)
    least = max(d**n for d, n in zip(divisors, clusters, strict=True))  # the narrowest cluster keeps a dimension
    width = heads * head_dim
    if config.hidden_size != config.num_attention_heads * assumed:
        width += heads  # heads that do not add up to the width stay so
    while width < min(least, config.hidden_size):
        width += heads * head_dim
    vocab_size = max(vocab_size, 2 * (max(clusters) + 1))
    changes: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": width,
        "num_hidden_layers": min(config.num_hidden_layers, _LAYERS),
        "num_attention_heads": heads,
        "head_dim": width // heads if config.hidden_size == config.num_attention_heads * assumed else head_dim,
        "intermediate_size": min(config.intermediate_size or _INTERMEDIATE, _INTERMEDIATE),
        "max_position_embeddings": min(
            config.max_position_embeddings, _PAIRED if any(s.tied_to_length for s in stages) else _POSITIONS
        ),
        "memory_length": min(config.memory_length, _MEMORY),
    }
    output: dict[str, Any] = {"cutoffs": _cutoffs(clusters[1], vocab_size)}
    if isinstance(config.output, MixtureConfig):
        output["mixtures"] = min(config.output.mixtures or 1, _MIXTURES)
    small = replace(
        config,
        **changes,
        attention=_attention(config.attention),
        input=config.input.with_known(cutoffs=_cutoffs(clusters[0], vocab_size)),
        output=config.output.with_known(**output),
        encoder=_encoder(config, vocab_size) if translates else config.encoder,
        decoder=_decoder(config.decoder),
    )
    return small, _changes(config, small)


def _attention(stages: AttentionConfig) -> AttentionConfig:
    sizes = {key: getattr(stages, key) for key in _ATTENTION}
    changes: dict[str, Any] = {key: min(n, _ATTENTION[key]) for key, n in sizes.items() if isinstance(n, int)}
    return stages.with_known(**changes)


def _encoder(config: ModelConfig, vocab_size: int) -> EncoderConfig:
    own = config.encoder or EncoderConfig()
    layers = None if own.num_hidden_layers is None else min(own.num_hidden_layers, _LAYERS)
    words = None if own.share_embedding else vocab_size + _OTHER
    attention = None if own.attention is None else _attention(own.attention)
    return replace(own, num_hidden_layers=layers, vocab_size=words, attention=attention)


def _decoder(own: DecoderConfig | None) -> DecoderConfig | None:
    if own is None:
        return None
    layers = None if own.num_hidden_layers is None else min(own.num_hidden_layers, _LAYERS)
    attention, cross = (None if stages is None else _attention(stages) for stages in (own.attention, own.cross))
    return replace(own, num_hidden_layers=layers, attention=attention, cross=cross)


def _changes(config: ModelConfig, small: ModelConfig) -> tuple[str, ...]:
    parts: list[tuple[str, Any, Any]] = [("", config, small)]
    parts += [(f"{part}.", getattr(config, part), getattr(small, part)) for part in _PARTS]
    for place in _SECTIONS:
        before, after = _at(config, place), _at(small, place)
        if after is not None:
            parts.append((f"{place}.", before or type(after)(), after))
    inner = {*_PARTS, "encoder", "decoder", "cross"}
    return tuple(
        f"{section}{field.name} {_shown(getattr(before, field.name))} -> {_shown(getattr(after, field.name))}"
        for section, before, after in parts
        for field in fields(before)
        if field.name not in inner and getattr(before, field.name) != getattr(after, field.name)
    )


def _at(config: ModelConfig, place: str) -> Any:
    """The section at `place`, None if there is none."""
    found: Any = config
    for key in place.split("."):
        found = getattr(found, key, None)
    return found


def _shown(value: Any) -> str:
    return "that of the data" if value is None else str(value)


def _cutoffs(count: int, vocab_size: int) -> list[int]:
    """As many clusters, evenly spread."""
    return [vocab_size * (i + 1) // (count + 1) for i in range(count)]


def _parameters(config: ModelConfig, translates: bool) -> int:
    with torch.device("meta"):
        return (Translator(config) if translates else LanguageModel(config)).num_parameters()
