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
    """`fullrank` is the `model` section of a run, whole; what else describes the model is derived from it.

    objective: `causal` (a language model) or `masked` (an encoder that predicts masked tokens).
    use_cache: generation keeps keys and values; memory is part of a model and always on.
    `memory_length` may be changed at evaluation: `from_pretrained(folder, memory_length=512)`.
    Raises ConfigError, with every fault, for a section that describes no model, and for sizes that contradict it.
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
            value, derived = getattr(self, name), getattr(model, name)
            if value is not None and value != derived:
                problems.append(
                    f"{name}: {derived} by `fullrank`, given {value}; change it there, or leave it out here"
                )
            setattr(self, name, derived)
        if problems:
            raise ConfigError(*problems)
        super().__post_init__(**kwargs)

    @classmethod
    def of(cls, model: ModelConfig, *, objective: str = "causal", **settings: Any) -> FullRankConfig:
        """Build a FullRankConfig from a ModelConfig and further `settings` of it, such as `eos_token_id`.

        `<mask>` is the last entry of a masked model's vocabulary.
        Raises ConfigError for a name that is no setting.
        """
        if unknown := [name for name in settings if not hasattr(cls, name)]:
            raise ConfigError(
                f"'{unknown[0]}' is no setting of FullRankConfig; {suggest(unknown[0], cls.__annotations__)}"
            )
        if objective == "masked" and model.vocab_size is not None:
            settings.setdefault("mask_token_id", model.vocab_size - 1)
        return cls(fullrank=model.to_dict(), objective=objective, **settings)

    def model_config(self) -> ModelConfig:
        """The `ModelConfig` of the model; ConfigError if it was changed into one that describes none."""
        return ModelConfig.from_dict(self.fullrank or {})

    @property
    def memory_length(self) -> int:
        """Number of tokens before a segment that every layer remembers."""
        return self.model_config().memory_length

    @memory_length.setter
    def memory_length(self, tokens: int) -> None:
        self.fullrank = with_memory(self.model_config(), tokens).to_dict()
