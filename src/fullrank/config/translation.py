"""The encoder and decoder sections of a model's configuration: what differs there from `model`."""

from __future__ import annotations

from dataclasses import dataclass

from fullrank.config.attention import AttentionConfig
from fullrank.config.checks import SIZES, Strict, raise_problems


def _check_sizes(section: str, **values: int | None) -> None:
    raise_problems(
        [
            f"model.{section}.{key}: a positive whole number below {SIZES:,}, given {value!r}"
            for key, value in values.items()
            if value is not None and not (type(value) is int and 0 < value < SIZES)
        ]
    )


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(Strict):
    """The encoder of a translation model; null: as in `model`.

    `vocab_size` is the source vocabulary's. `share_embedding`: source and target tokens have one table (and one vocabulary).
    """

    num_hidden_layers: int | None = None
    vocab_size: int | None = None
    share_embedding: bool = False
    attention: AttentionConfig | None = None

    def __post_init__(self) -> None:
        _check_sizes("encoder", num_hidden_layers=self.num_hidden_layers, vocab_size=self.vocab_size)


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(Strict):
    """The decoder of a translation model; null: as in `model`.

    `attention` is its self-attention, `cross` what it reads the source with. Without a `cross` of its own, `model.attention`
    serves, with a dot-product score: positions of two languages have no distance.
    The released code of Mixhead never mixes heads in cross-attention, nor in self-attention while it decodes token by
    token, though it was trained mixed. `released_cross` and `released_decoding` do as it does, for comparison.
    """

    num_hidden_layers: int | None = None
    attention: AttentionConfig | None = None
    cross: AttentionConfig | None = None
    released_cross: bool = False
    released_decoding: bool = False

    def __post_init__(self) -> None:
        _check_sizes("decoder", num_hidden_layers=self.num_hidden_layers)
