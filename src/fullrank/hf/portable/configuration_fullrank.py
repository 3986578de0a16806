"""The configuration of a fullrank model for Hugging Face, readable without the package `fullrank`."""

from __future__ import annotations

from copy import copy
from types import SimpleNamespace
from typing import Any

from transformers import PreTrainedConfig

_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")


class FullRankConfig(PreTrainedConfig):
    """`fullrank` is the whole model configuration as the package `fullrank` writes it, every key resolved; sizes follow it.

    objective: `causal`, `masked` or `translation`. `memory_length` may be changed at evaluation:
    `from_pretrained(folder, memory_length=512)`.
    """

    model_type = "fullrank"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012  Hugging Face reads a list

    fullrank: dict | None = None
    objective: str | None = None
    vocab_size: int | None = None
    hidden_size: int | None = None
    num_hidden_layers: int | None = None
    num_attention_heads: int | None = None
    max_position_embeddings: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    mask_token_id: int | None = None
    decoder_start_token_id: int | None = None
    use_cache: bool = True
    tie_word_embeddings: bool = False  # a tied output layer has no matrix of its own to tie

    def __post_init__(self, **kwargs: Any) -> None:
        plain = self.fullrank
        if plain is not None:
            translates = plain.get("encoder") is not None or plain.get("decoder") is not None
            self.objective = self.objective or ("translation" if translates else "causal")
            self.is_encoder_decoder = self.objective == "translation"
            for name in _SIZES:
                setattr(self, name, plain[name])
        super().__post_init__(**kwargs)

    @property
    def memory_length(self) -> int:
        """Tokens before a segment that every layer remembers."""
        return 0 if self.fullrank is None else self.fullrank["memory_length"]

    @memory_length.setter
    def memory_length(self, tokens: int) -> None:
        assert self.fullrank is not None
        self.fullrank = {**self.fullrank, "memory_length": tokens}


Settings = Any  # a SimpleNamespace with the keys of the model section, its sections namespaces themselves


def settings_of(config: FullRankConfig) -> Settings:
    """`config.fullrank` with attributes instead of keys."""
    if config.fullrank is None:
        raise ValueError(
            "FullRankConfig: give fullrank=, the model section of a configuration of the package `fullrank`"
        )
    return _namespace(config.fullrank, ("dropout", "attention", "input", "output", "encoder", "decoder", "cross"))


def _namespace(plain: dict[str, Any], sections: tuple[str, ...]) -> Settings:
    return SimpleNamespace(
        **{
            key: _namespace(value, sections) if key in sections and isinstance(value, dict) else value
            for key, value in plain.items()
        }
    )


def stage(value: str | dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The name of a stage and its options: `relative`, or `{name: relative, clamp_length: 400}`."""
    if isinstance(value, str):
        return value, {}
    return value["name"], {key: option for key, option in value.items() if key != "name"}


def changed(settings: Settings, **changes: Any) -> Settings:
    """A copy with other values."""
    made = copy(settings)
    vars(made).update(changes)
    return made


# -- the parts of a translation model: what differs in its encoder, its decoder and between them ----------------------------


def encoder_settings(model: Settings) -> Settings:
    """Nothing is hidden from an encoder, so `as_published` and `masked` are one."""
    own = model.encoder
    if own is None:
        return changed(model, attention=_seeing_all(model.attention))
    return changed(
        model,
        attention=_seeing_all(own.attention or model.attention),
        vocab_size=own.vocab_size or model.vocab_size,
        num_hidden_layers=own.num_hidden_layers or model.num_hidden_layers,
    )


def decoder_settings(model: Settings) -> Settings:
    own = model.decoder
    if own is None:
        return model
    layers = own.num_hidden_layers or model.num_hidden_layers
    return changed(model, attention=own.attention or model.attention, num_hidden_layers=layers)


def cross_settings(model: Settings) -> Settings:
    """Cross-attention has no positions: those of two texts have no distance."""
    own = model.decoder
    cross = own.cross if own is not None and own.cross else changed(model.attention, score="dot_product")
    if own is not None and own.released_cross:
        cross = changed(cross, mix="none")
    return changed(model, attention=_seeing_all(cross), position="none")


def _seeing_all(attention: Settings) -> Settings:
    return changed(attention, causal="masked") if attention.causal == "as_published" else attention
