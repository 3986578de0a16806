"""Configuration of our models for Hugging Face: the `config.json` of a folder."""

from __future__ import annotations

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from fullrank.core.config import ModelConfig, with_memory
from fullrank.core.errors import ConfigError, suggest

OBJECTIVES = ("causal", "masked")
# sizes that the tools of Hugging Face ask a configuration for
_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")


@strict
class FullRankConfig(PreTrainedConfig):
    """The configuration of a model of ours for Hugging Face: `config.json`.

    `FullRankConfig.of(model.config)` makes one of a model's own configuration. Sizes such as `hidden_size` are there for
    Hugging Face's tools. They are derived from `fullrank`, and one that is given has to agree with it. `memory_length` may be
    changed at evaluation: `from_pretrained(folder, memory_length=512)`.

    Args:
        fullrank: the whole `model` section of a run, as a dictionary.
        objective: `causal` (a language model) or `masked` (an encoder that predicts masked tokens).
        vocab_size: V.
        hidden_size: E.
        num_hidden_layers: number of blocks.
        num_attention_heads: H.
        max_position_embeddings: the longest sequence.
        bos_token_id: the token that begins a text.
        eos_token_id: the token, or tokens, that end a text.
        pad_token_id: the token of padding; `vocab_size` where every entry of the vocabulary may stand in a text.
        mask_token_id: the token `<mask>` of a masked model.
        use_cache: generation keeps keys and values. Memory is part of a model and always on.
        tie_word_embeddings: False; tied outputs are set in `fullrank` (`output.tied`).

    Raises:
        ConfigError: `fullrank` describes no model, or a size contradicts it; it names every fault.
    """

    model_type = "fullrank"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # noqa: RUF012  Hugging Face reads a list

    fullrank: dict[str, Any] | None = None
    objective: str = "causal"
    vocab_size: int | None = None
    hidden_size: int | None = None
    num_hidden_layers: int | None = None
    num_attention_heads: int | None = None
    max_position_embeddings: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    mask_token_id: int | None = None
    use_cache: bool = True
    tie_word_embeddings: bool = False  # our modules share their tensors themselves

    def __post_init__(self, **kwargs: Any) -> None:
        model = self.model_config()
        self.fullrank = model.to_dict()
        problems = []
        if self.objective not in OBJECTIVES:
            problems.append(f"objective: {', '.join(OBJECTIVES)}, given '{self.objective}'")
        if self.tie_word_embeddings:
            problems.append("tie_word_embeddings: tied outputs are set in `fullrank` (output.tied); leave it false")
        if self.objective == "masked":
            problems += model.problems_of_masked()
        if model.encoder is not None or model.decoder is not None:
            problems.append("fullrank: a language model or an encoder, given a translation model")
        for name in _SIZES:
            value = getattr(self, name)
            derived = getattr(model, name)
            if value is not None and value != derived:
                problems.append(
                    f"{name}: {derived} by `fullrank`, given {value}; change it there, or leave it out here"
                )
            setattr(self, name, derived)
        if problems:
            raise ConfigError(*problems)
        super().__post_init__(**kwargs)

    def validate_token_ids(self) -> None:
        """Check the ids of special tokens. That of padding may be the first one beyond the vocabulary."""
        if self.pad_token_id != self.vocab_size:
            super().validate_token_ids()

    @classmethod
    def of(cls, model: ModelConfig, *, objective: str = "causal", **settings: Any) -> FullRankConfig:
        """Build a FullRankConfig from a ModelConfig.

        Args:
            model: the configuration of a model of ours, `model.config`.
            objective: `causal`, or `masked`, where `<mask>` is the last entry of the vocabulary.
            **settings: further settings of FullRankConfig, such as `eos_token_id`.

        Raises:
            ConfigError: a name is no setting, or the settings describe no model.
        """
        if unknown := [name for name in settings if not hasattr(cls, name)]:
            raise ConfigError(
                f"'{unknown[0]}' is no setting of FullRankConfig; {suggest(unknown[0], cls.__annotations__)}"
            )
        if objective == "masked" and model.vocab_size is not None:
            settings.setdefault("mask_token_id", model.vocab_size - 1)
        return cls(fullrank=model.to_dict(), objective=objective, **settings)

    def model_config(self) -> ModelConfig:
        """Build the `ModelConfig` of the model; ConfigError if `fullrank` was changed and describes none."""
        return ModelConfig.from_dict(self.fullrank or {})

    @property
    def memory_length(self) -> int:
        """Number of tokens before a segment that every layer remembers."""
        return self.model_config().memory_length

    @memory_length.setter
    def memory_length(self, tokens: int) -> None:
        self.fullrank = with_memory(self.model_config(), tokens).to_dict()
