"""The model section of a configuration: what a language model, a masked one or a translation model is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from .errors import ConfigError
from .kinds import AdaptiveConfig as AdaptiveConfig
from .kinds import AdaptiveInputConfig as AdaptiveInputConfig
from .kinds import AttentionConfig as AttentionConfig
from .kinds import InputConfig as InputConfig
from .kinds import Mix as Mix
from .kinds import MixtureConfig as MixtureConfig
from .kinds import MultiLinearConfig as MultiLinearConfig
from .kinds import Normalize as Normalize
from .kinds import OutputConfig as OutputConfig
from .kinds import TensorTrainConfig as TensorTrainConfig
from .kinds import WeightedConfig as WeightedConfig
from .section import Layers, Parts, Positive, Rate, Section, Size, SizeOrZero, Slot, key
from .section import Stage as Stage
from .section import stage_name as stage_name
from .section import stage_options as stage_options

Position = Annotated[str, Slot("position", "sinusoidal", "learned", "relative", "rotary", "alibi", "t5", "none")]
NormType = Annotated[str, Slot("norm_type", "layer_norm", "rms_norm")]
Activation = Annotated[str, Slot("activation", "relu", "gelu", "swiglu")]
Initializer = Annotated[
    str, Slot("initializer", "fairseq", "transformer_xl", "pytorch", "skip_cross_head", "xavier_uniform")
]

SYNTHESIZERS = ("dense_synthesizer", "random_synthesizer")  # scores that read no keys
# what is said of every figure of a model whose tokens see later ones
NOT_NEXT_TOKEN = "not a next-token perplexity: its tokens see later ones (model.attention.causal: as_published)"


@dataclass(frozen=True, kw_only=True)
class DropoutConfig(Section):
    """Dropout by place."""

    KEY = "model.dropout"
    words: Rate = key(0.0, "dropout of whole words: rows of the embedding, the same ones in the whole batch")
    embedding: Rate = key(0.0, "dropout on embeddings plus positions")
    projection: Rate = key(0.0, "dropout on queries, keys and values, as projected")
    attention: Rate = key(0.0, "dropout on attention weights, after mixing", needs="model.has_attention_weights=true")
    activation: Rate = key(0.0, "dropout inside the feed-forward layer")
    residual: Rate = key(0.0, "dropout on what attention and feed-forward add to the residual stream")
    output: Rate = key(0.0, "dropout on the last hidden states, before the vocabulary layer")
    locked: bool = key(False, "variational: one mask for all positions of a sequence, except on attention weights")


@dataclass(frozen=True, kw_only=True)
class LayerConfig(Section):
    """One entry of `model.layers`: `{at: [-2, -1], attention: {mix: position_wise}}` mixes heads in the last two layers.

    Its `attention` is a whole section: a key that is left out has its default, not the value of `model.attention`.
    """

    KEY = "model.layers"
    at: list[int] | None = key(None, "layers of this entry, the first is 0 and the last -1; null: one entry a layer")
    attention: AttentionConfig | None = key(None, "self-attention of these layers; null: model.attention")

    def change(self, change: Callable[[AttentionConfig], AttentionConfig]) -> LayerConfig:
        """Return a copy with changed attention, or this entry where it has none of its own."""
        return self if self.attention is None else replace(self, attention=change(self.attention))


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(Section):
    """The encoder of a translation model; null: as in `model`."""

    KEY = "model.encoder"
    num_hidden_layers: Layers | None = key(None, "layers of the encoder")
    vocab_size: Size | None = key(None, "entries of the source vocabulary")
    share_embedding: bool = key(
        False, "source and target tokens have one table (and one vocabulary)", needs="data.vocabulary!=separate"
    )
    attention: AttentionConfig | None = key(None, "self-attention of the encoder")


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(Section):
    """The decoder of a translation model; null: as in `model`.

    Without a `cross` of its own, `model.attention` serves, with a dot-product score: positions of two languages have no
    distance. The released code of Mixhead never mixes heads in cross-attention, nor in self-attention while it decodes token
    by token, though it was trained mixed. `released_cross` and `released_decoding` do as it does, for comparison.
    """

    KEY = "model.decoder"
    num_hidden_layers: Layers | None = key(None, "layers of the decoder")
    attention: AttentionConfig | None = key(None, "self-attention of the decoder")
    cross: AttentionConfig | None = key(None, "attention from the decoder to the source")
    released_cross: bool = key(False, "cross-attention is never mixed, as in the released code of Mixhead")
    released_decoding: bool = key(False, "decoding token by token is not mixed, as in the released code of Mixhead")


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """A Transformer: a decoder-only language model, an encoder, or both of a translation model.

    `encoder` and `decoder` say what differs there; a language model has neither section.
    `position` is rotary by default. Multi-linear attention and synthesizers have no dot products to rotate, and heads of odd
    size no pairs: a model with one of these gets sinusoidal positions. Relative scores need `position: relative` beside them.
    """

    KEY = "model"
    DECIDED_BY: ClassVar = {"has_attention_weights": "model.attention.kind"}
    vocab_size: Size | None = key(None, "entries of the vocabulary; null: as many as the data has")
    hidden_size: Size = key(512, "width E of the hidden states")
    num_hidden_layers: Layers = key(6, "layers L")
    num_attention_heads: Size = key(8, "attention heads H")
    num_key_value_heads: Size | None = key(
        None, "heads G of keys and values, each read by H / G heads of queries; null: as many as attention heads"
    )
    head_dim: Size | None = key(None, "size D of a head (Mixhead §4.4.3); null: hidden_size / num_attention_heads")
    intermediate_size: Size | None = key(None, "width of the feed-forward layer; null: 4 * hidden_size")
    hidden_act: Activation = key("relu", "activation of the feed-forward layer")
    mlp_bias: bool = key(True, "biases of the feed-forward layer")
    norm: Literal["pre", "post"] = key("pre", "layer norm before or after each sub-layer")
    final_norm: bool | None = key(None, "layer norm after the last layer; null: with pre-norm yes, with post-norm no")
    norm_type: NormType = key("layer_norm", "the norms of sub-layers and after the last layer; rms_norm as in Llama")
    layer_norm_eps: Positive = key(1e-5, "added to the variance, or to the mean square, in norms")
    position: Position | None = key(
        None, "how positions are told; null: rotary, sinusoidal where nothing can be rotated"
    )
    max_position_embeddings: Size = key(1024, "the longest sequence")
    rope_theta: Positive = key(10000.0, "base of the angles of rotary positions")
    alibi_scale: Positive = key(1.0, "factor of the slopes of position alibi; Falcon's is 1 / sqrt(head_dim)")
    relative_attention_num_buckets: Size = key(32, "numbers that a head has for distances, with position t5")
    relative_attention_max_distance: Size = key(
        128, "from so many tokens on distances share a number, with position t5"
    )
    memory_length: SizeOrZero = key(0, "tokens before a segment that every layer remembers")
    memory_start: Literal["empty", "zeros"] = key(
        "empty", "zeros: a memory of zeros that is attended, for comparison", needs="memory_length"
    )
    document_token_id: SizeOrZero | None = key(
        None,
        "the token that begins a document, whose tokens see no earlier ones; null: a text is one (set by data.documents)",
        needs="memory_length=0",
    )
    same_length: bool = key(
        False,
        "every query sees memory_length keys, itself included, instead of all of the memory",
        needs="memory_length",
    )
    scale_embedding: bool = key(False, "multiply embeddings by sqrt(hidden_size)")
    initializer: Initializer = key("fairseq", "how parameters start")
    dropout: DropoutConfig = key(DropoutConfig(), "dropout by place")
    attention: AttentionConfig = key(AttentionConfig(), "attention")
    layers: list[LayerConfig] = key(
        [], "layers with attention of their own: one entry a layer, or entries that say `at`"
    )
    input: InputConfig = key(InputConfig(), "embedding of token ids")
    output: OutputConfig = key(OutputConfig(), "vocabulary layer")
    parts: Annotated[dict[str, dict[str, Any]], Parts("model_part")] = key(
        {}, "modules of one's own by name, with their options: built with the model and saved with it"
    )
    encoder: EncoderConfig | None = key(
        None, "what differs in the encoder of a translation model", needs="task=translation"
    )
    decoder: DecoderConfig | None = key(
        None, "what differs in the decoder of a translation model", needs="task=translation"
    )

    def _resolve(self) -> None:
        divides = self.hidden_size % self.num_attention_heads == 0
        if divides or isinstance(self.attention, MultiLinearConfig):
            self._fill(head_dim=max(1, self.hidden_size // self.num_attention_heads))
        self._fill(
            position="rotary" if self._rotates() else "sinusoidal",
            intermediate_size=4 * self.hidden_size,
            final_norm=self.norm == "pre",
        )
        if isinstance(self.output, AdaptiveConfig):  # clusters left open are the input's
            usual = self.input if isinstance(self.input, AdaptiveInputConfig) else self.output
            cutoffs = usual.cutoffs if self.output.cutoffs is None else self.output.cutoffs
            div_val = self.output.div_val or usual.div_val or 1
            self._set("output", replace(self.output, cutoffs=cutoffs, div_val=div_val))

    def _rotates(self) -> bool:
        """Return whether every self-attention is of dot products, of heads of even size, which rotary positions need.

        Relative scores count as dot products: no other position suits them either.
        """
        if self.head_dim is None or self.head_dim % 2:
            return False
        return not any(
            isinstance(attention, MultiLinearConfig) or stage_name(attention.score) in SYNTHESIZERS
            for _, attention in self._attentions_by_key()
        )

    def _faults(self) -> Iterator[str]:
        if self.document_token_id is not None:
            yield from self._faults_of_documents()
        if self.head_dim is None:
            yield (
                f"model.head_dim: model.hidden_size {self.hidden_size} is not divisible by model.num_attention_heads "
                f"{self.num_attention_heads}; change one of them or set model.head_dim"
            )
        elif self.num_attention_heads % (self.num_key_value_heads or 1):
            yield (
                f"model.num_key_value_heads: each is read by equally many of model.num_attention_heads "
                f"{self.num_attention_heads}; give a divisor of it, given {self.num_key_value_heads}"
            )
        elif self.position == "rotary" and self.head_dim % 2:
            yield f"model.head_dim: rotary positions need an even head size, given {self.head_dim}"
        # distances with a number of their own where both sides are seen
        exact = self.relative_attention_num_buckets // 4
        if exact == 0 or self.relative_attention_max_distance <= 2 * exact:
            yield (
                "model.relative_attention_num_buckets: 4 or more, and fewer than twice "
                f"model.relative_attention_max_distance; given {self.relative_attention_num_buckets} and "
                f"{self.relative_attention_max_distance}"
            )
        for name, attention in self._attentions_by_key():
            yield from self._faults_of_attention(name, attention)
        embedding = self.input
        output = self.output
        fits = not isinstance(embedding, AdaptiveInputConfig | TensorTrainConfig)
        if isinstance(output, AdaptiveConfig):
            clusters = (output.cutoffs, output.div_val)
            fits = isinstance(embedding, AdaptiveInputConfig) and clusters == (embedding.cutoffs, embedding.div_val)
        if output.tied and not fits:
            yield (
                "model.output.tied: an adaptive softmax is tied to an AdaptiveInput with the same clusters, another output to "
                f"`model.input.kind: token`; given {output.kind} with {embedding.kind}"
            )
        yield from (
            self.problems_of_translation() if self._translates else self._faults_of_layers(self.num_hidden_layers)
        )

    def _attentions_by_key(self) -> Iterator[tuple[str, AttentionConfig]]:
        yield "model.attention", self.attention
        yield from (("model.layers.attention", entry.attention) for entry in self.layers if entry.attention)
        for name, part in (("encoder", self.encoder), ("decoder", self.decoder)):
            if part is not None and part.attention is not None:
                yield f"model.{name}.attention", part.attention

    def _faults_of_attention(self, name: str, attention: AttentionConfig) -> Iterator[str]:
        score = stage_name(attention.score)
        if (score == "relative") != (self.position == "relative"):
            yield (
                f"{name}.score: 'relative' goes with model.position: relative and only with it; given score {score} with "
                f"model.position: {self.position}; change one of them"
            )
        heads = self.num_attention_heads
        yield from attention.problems_of_heads(name, heads, self.num_key_value_heads or heads)
        if isinstance(attention, WeightedConfig) and attention.qk_norm and score in SYNTHESIZERS:
            yield f"{name}.qk_norm: goes with scores of queries and keys, given score {score}; leave it out"
        if not isinstance(attention, MultiLinearConfig):
            return
        if self.position in ("rotary", "alibi", "t5"):
            yield (
                f"model.position: {self.position} acts on scores, and multi-linear attention has none; choose sinusoidal, "
                f"learned, relative or none ({name})"
            )
        decoder = None if self.decoder is None else self.decoder.attention
        predicts = name != "model.encoder.attention" and (name != "model.attention" or decoder is None)
        if predicts and attention.sees_future and not attention.not_next_token_perplexity:
            yield (
                f"{name}.causal: as_published lets every token see those that it has to predict; use 'masked', or say that one "
                f"knows it: {name}.not_next_token_perplexity: true"
            )

    def _faults_of_documents(self) -> Iterator[str]:
        token_id = self.document_token_id
        if self.vocab_size is not None and token_id is not None and token_id >= self.vocab_size:
            yield f"model.document_token_id: an id below model.vocab_size {self.vocab_size}, given {token_id}"
        if self._translates or any(isinstance(attention, MultiLinearConfig) for attention in self.attentions):
            reason = (
                "sentences are no documents" if self._translates else "multi-linear attention has no weights to mask"
            )
            yield f"model.document_token_id: {reason}; leave it out (or data.documents), given {token_id}"

    def _faults_of_layers(self, count: int, part: str = "model") -> Iterator[str]:
        layers = [layer for entry in self.layers for layer in entry.at or ()]
        num_without_at = sum(entry.at is None for entry in self.layers)
        if num_without_at and not num_without_at == len(self.layers) == count:
            yield (
                f"model.layers: an entry for each of {count} layers ({part}.num_hidden_layers), or `at` in all entries; given "
                f"{len(self.layers)} entries, {num_without_at} without `at`"
            )
        elif not {*layers} <= {*range(-count, count)} or len({layer % count for layer in layers}) < len(layers):
            yield (
                f"model.layers.at: each layer at most once, from 0 to {count - 1} or from -{count} to -1 "
                f"({part}.num_hidden_layers is {count}); given {layers}"
            )
        else:
            yield from self._faults_between_layers()

    def _faults_between_layers(self) -> Iterator[str]:
        stages = (self.attention, *self.attentions)
        scores = [(stage.kind, getattr(stage, "rank", None), stage_options(stage.score)) for stage in stages]
        if self.position == "relative" and (different := [score for score in scores if score != scores[0]]):
            yield (
                "model.layers.attention.score: relative scores of all layers read the same distances, u and v, so all have the "
                f"kind, rank and options of model.attention, {scores[0]}; given {different[0]}"
            )

    @property
    def _translates(self) -> bool:
        return self.encoder is not None or self.decoder is not None

    @property
    def has_attention_weights(self) -> bool:
        """True if some layer has attention weights; multi-linear attention has none."""
        parts = self._attentions() if self._translates else ()
        return any(isinstance(attention, WeightedConfig) for attention in (*self.attentions, *parts))

    @property
    def attentions(self) -> list[AttentionConfig]:
        """Attention of each layer, the first layer first."""
        attentions = [self.attention] * self.num_hidden_layers
        for index, entry in enumerate(self.layers):
            for layer in [index] if entry.at is None else entry.at:
                attentions[layer % len(attentions)] = entry.attention or self.attention
        return attentions

    @property
    def most_tokens(self) -> int | None:
        """The most tokens that a sequence may have, where something has a row for each of them; None without such a limit."""
        limited = any(part.tied_to_length or stage_name(part.score) in SYNTHESIZERS for part in self.attentions)
        return self.max_position_embeddings if limited or self.position == "learned" else None

    def get_layer_config(self, layer: int) -> ModelConfig:
        """Return the configuration of one layer, with its own attention.

        It drops out no attention weights where the layer has none.
        """
        return self._part(self.attentions[layer], None, []) if self.layers else self

    def with_attention(self, change: Callable[[AttentionConfig], AttentionConfig], **changes: Any) -> ModelConfig:
        """Return a copy with changed attention, that of `layers` too, and with `changes` of other keys."""
        layers = [entry.change(change) for entry in self.layers]
        return replace(self, attention=change(self.attention), layers=layers, **changes)

    def _attentions(self) -> tuple[AttentionConfig, AttentionConfig, AttentionConfig]:
        """Return attention of the encoder, of the decoder, and from the decoder to the source."""
        encoder = self.encoder or EncoderConfig()
        decoder = self.decoder or DecoderConfig()
        cross = decoder.cross or self.attention.across()
        if decoder.released_cross and isinstance(cross, WeightedConfig):
            cross = replace(cross, mix="none")
        return (
            (encoder.attention or self.attention).seeing_all(),
            decoder.attention or self.attention,
            cross.seeing_all(),
        )

    def _part(
        self, attention: AttentionConfig, num_hidden_layers: int | None, layers: list[LayerConfig], **changes: Any
    ) -> ModelConfig:
        """Return the configuration of one part or layer; one without attention weights drops none."""
        attentions = [attention, *(entry.attention for entry in layers)]
        weighted = any(isinstance(entry, WeightedConfig) for entry in attentions)
        return replace(
            self,
            attention=attention,
            layers=layers,
            num_hidden_layers=num_hidden_layers or self.num_hidden_layers,
            dropout=self.dropout if weighted else replace(self.dropout, attention=0.0),
            encoder=None,
            decoder=None,
            **changes,
        )

    def get_encoder_config(self) -> ModelConfig:
        """Return the configuration of the encoder.

        Nothing is hidden there, so that `as_published` and `masked` are the same.
        """
        encoder = self.encoder or EncoderConfig()
        has_other_words = encoder.vocab_size not in (None, self.vocab_size)  # the output layer is of target words
        return self._part(
            self._attentions()[0],
            encoder.num_hidden_layers,
            [entry.change(lambda attention: attention.seeing_all()) for entry in self.layers],
            vocab_size=encoder.vocab_size or self.vocab_size,
            output=OutputConfig() if has_other_words else self.output,
        )

    def get_decoder_config(self) -> ModelConfig:
        """Return the configuration of the decoder, without its cross-attention."""
        layers = (self.decoder or DecoderConfig()).num_hidden_layers
        return self._part(self._attentions()[1], layers, self.layers)

    def get_cross_config(self) -> ModelConfig:
        """Return the configuration of cross-attention.

        It has no positions: there is no distance between positions of two texts.
        """
        layers = (self.decoder or DecoderConfig()).num_hidden_layers
        return self._part(self._attentions()[2], layers, [], position="none")

    def problems_of_translation(self) -> list[str]:
        """List the reasons why no translation model can be built of this; empty if one can."""
        lines = self._problems_of_memory("translation")
        cross = self._attentions()[2]
        choices = {name: (getattr(cross, name), value) for name, value in cross.across().to_dict().items()}
        if isinstance(cross, MultiLinearConfig) and not cross.tied_to_length:
            choices["output_map"] = (cross.output_map, "pairs")
        lines += [
            f"model.decoder.cross.{name}: '{stage_name(chosen)}' reads positions, distances or a token's own state, which two "
            f"texts do not share; use {name}: {stage_name(possible)}"
            for name, (chosen, possible) in choices.items()
            if chosen != possible and possible is not None
        ]
        encoder = self.encoder or EncoderConfig()
        decoder = self.decoder or DecoderConfig()
        if encoder.share_embedding and encoder.vocab_size not in (None, self.vocab_size):
            lines.append(
                f"model.encoder.share_embedding: one table for both vocabularies, but model.encoder.vocab_size is "
                f"{encoder.vocab_size} and model.vocab_size {self.vocab_size}; use data.vocabulary: joint, or false"
            )
        for name, part in (("encoder", encoder), ("decoder", decoder)):
            lines += self._faults_of_layers(part.num_hidden_layers or self.num_hidden_layers, f"model.{name}")
        return lines

    def problems_of_masked(self) -> list[str]:
        """List the reasons why no masked language model can be built of this; empty if one can."""
        lines = [
            f"model.{name}: a part of a translation model, given for a masked one; leave it out"
            for name in ("encoder", "decoder")
            if getattr(self, name) is not None
        ]
        lines += self._problems_of_memory("masked")
        if self.document_token_id is not None:
            lines.append("model.document_token_id: a masked token may be one that begins a document; leave it out")
        if self.sees_future:
            lines.append(
                "model.attention.causal: as_published is for causal models; leave it out, and "
                "model.attention.not_next_token_perplexity too"
            )
        return lines

    def _problems_of_memory(self, kind: str) -> list[str]:
        length = self.memory_length
        return [f"model.memory_length: a {kind} model has no memory; given {length}, set it to 0"] if length else []

    @property
    def sees_future(self) -> bool:
        """True if the output at a token depends on later ones, so that perplexity is not a next-token perplexity.

        In a translation model only tokens of the target count: the encoder sees everything, and has nothing to predict.
        """
        part = self if self.decoder is None else self.get_decoder_config()
        return any(attention.sees_future for attention in part.attentions)


def with_memory(
    config: ModelConfig,
    memory_length: int | None = None,
    *,
    same_length: bool | None = None,
    clamp_length: int | None = None,
) -> ModelConfig:
    """Copy a configuration with another memory, window or clamp.

    Args:
        config: model to copy.
        memory_length: tokens that every layer remembers. 0 also resets `same_length` and `memory_start`. None: unchanged.
        same_length: whether every query sees `memory_length` keys instead of all of the memory; None: unchanged.
        clamp_length: distance in tokens above which all distances count as this one; None: unchanged.

    Raises:
        ConfigError: the model cannot have these values.
    """
    given = {"memory_length": memory_length, "same_length": same_length}
    changes: dict[str, Any] = {"same_length": False, "memory_start": "empty"} if memory_length == 0 else {}
    changes |= {name: value for name, value in given.items() if value is not None}
    if clamp_length is not None:
        if config.position != "relative" or isinstance(config.attention, MultiLinearConfig):
            raise ConfigError(
                "clamp_length: goes with model.position: relative and model.attention.kind: weighted; given "
                f"{clamp_length} with {config.position} and {config.attention.kind}"
            )
        score = {"name": "relative", **stage_options(config.attention.score), "clamp_length": clamp_length}
        return config.with_attention(lambda attention: replace(attention, score=score), **changes)
    return replace(config, **changes)
