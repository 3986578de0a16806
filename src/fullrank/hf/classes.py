"""Our models as Hugging Face's: `generate`, `Trainer`, pipelines and auto classes, over the models of `core`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import Cache as HuggingFaceCache
from transformers import DynamicCache, GenerationMixin, LogitsProcessorList, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import CacheLayerMixin
from transformers.modeling_outputs import CausalLMOutputWithPast, MaskedLMOutput
from transformers.utils import can_return_tuple

from fullrank.core.attention import Block
from fullrank.core.cache import Cache
from fullrank.core.config import ModelConfig
from fullrank.core.decoder import LanguageModel
from fullrank.core.encoder import MaskedLanguageModel
from fullrank.core.errors import InputError
from fullrank.core.memory import Memory
from fullrank.core.model import Model
from fullrank.core.output import IGNORED
from fullrank.core.registry import with_parts
from fullrank.core.trace import Trace
from fullrank.hf.configuration import FullRankConfig

State: TypeAlias = Cache | Memory


class StateLayer(CacheLayerMixin):
    """The one layer of our caches: it holds the state of all layers of a model, which is one value.

    The value itself never changes. The methods that Hugging Face calls replace it by another one.
    """

    supports_early_init = False
    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.state: State | None = None

    def state_of(self, kind: type[State]) -> Any:
        """Return the state, None at the beginning; InputError if it is that of another kind of model."""
        if self.state is not None and not isinstance(self.state, kind):
            raise InputError(
                f"past_key_values: holds a {type(self.state).__name__}, of another model or of this one with another "
                "memory_length; begin with FullRankCache()"
            )
        return self.state

    @property
    def is_croppable(self) -> bool:
        """True if the last tokens can be taken out again: keys and values can, sums and a memory cannot."""
        return self.state is None or (isinstance(self.state, Cache) and self.state.croppable)

    @property
    def batch_size(self) -> int:
        """Number of rows; -1 before the first token."""
        return -1 if self.state is None else self.state.batch or -1

    def get_seq_length(self) -> int:
        """Tokens and padding read so far, forgotten ones of a memory included."""
        return 0 if self.state is None else self.state.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: a model sets the state."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise InputError("the cache of a fullrank model holds what that model has read; no other model can write to it")

    def reset(self) -> None:
        self.state = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select rows `beam_idx`, in that order; they may repeat."""
        if self.state is not None:
            self.state = self.state.reorder(beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last -tokens_to_remove tokens; InputError where that is impossible."""
        if tokens_to_remove > 0:
            raise InputError(f"crop: a number below zero, the tokens to take out again, given {tokens_to_remove}")
        if tokens_to_remove == 0 or self.state is None:
            return
        if isinstance(self.state, Memory):
            raise InputError(
                "a memory cannot forget its last tokens again: what they pushed out of it is gone; decode without speculation, "
                "or with a memory of 0 (memory_length=0 in from_pretrained)"
            )
        self.state = self.state.crop(max(0, self.get_seq_length() + tokens_to_remove))


class FullRankCache(HuggingFaceCache):
    """The `past_key_values` of our models: the state of a model after the tokens read so far.

    `FullRankCache()` is empty and begins a text. Each call of a model changes it in place: it then holds the state for the
    next call. `generate` makes its own.
    """

    def __init__(self) -> None:
        super().__init__(layers=[StateLayer()])

    @property
    def state(self) -> State | None:
        """The `Cache` or `Memory` of our models; None at the beginning."""
        return self.layers[0].state


def layer_of(past: Any) -> StateLayer | None:
    """Find the layer of a cache that holds our state; an empty `DynamicCache`, which `generate` makes, gets such a layer.

    None: there is no cache.
    Raises InputError for caches of other kinds, and for one that another model has filled.
    """
    if past is None:
        return None
    if isinstance(past, HuggingFaceCache) and past.layers and isinstance(past.layers[0], StateLayer):
        return past.layers[0]
    if not isinstance(past, DynamicCache) or past.offloading:
        raise InputError(
            f"past_key_values: a FullRankCache, or an empty DynamicCache without offloading; given a {type(past).__name__}"
        )
    if past.get_seq_length():
        raise InputError("past_key_values: holds what another model has read; begin with FullRankCache()")
    layer = StateLayer()
    past.layers[:] = [layer]
    return layer


def mask_of_new(attention_mask: Tensor | None, input_ids: Tensor, state: State | None) -> Tensor | None:
    """Cut the mask of new tokens out of an attention mask.

    Args:
        attention_mask: (B, N), or (B, M + N) with the M tokens that `state` has read; None: nothing is padded.
        input_ids: new tokens (B, N).
        state: what was read before; None: nothing.

    Returns:
        Mask (B, N), True at tokens; None where nothing is padded, as engines are faster without one.

    Raises:
        InputError: the mask has another shape.
    """
    if attention_mask is None:
        return None
    rows, tokens = input_ids.shape
    past = 0 if state is None else state.length
    shape = tuple(attention_mask.shape)
    shapes = dict.fromkeys([(rows, tokens), (rows, past + tokens)])
    if shape not in shapes:
        allowed = " or ".join(map(str, shapes))
        raise InputError(f"attention_mask: {allowed} for input_ids {(rows, tokens)}, given {shape}")
    new = attention_mask[:, shape[1] - tokens :].bool()
    return None if new.all() else new


# -- models ------------------------------------------------------------------------------------------------------------


class _LookedUp(nn.Module):
    """An input layer whose vectors (B, N, E) were looked up before."""

    def __init__(self, vectors: Tensor) -> None:
        super().__init__()
        self.vectors = vectors

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.vectors


class FullRankPreTrainedModel(PreTrainedModel):
    """A `PreTrainedModel` with a model of `core` as the attribute `model`, so that its tensors are called `model.<our name>`.

    Subclasses set the objective of the configurations that they take, and the class of `model`.
    """

    config_class = FullRankConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True  # forward takes num_items_in_batch
    gradient_checkpointing = False
    objective: ClassVar[str]
    model_class: ClassVar[type[Model]]
    _no_split_modules = ["Block"]  # noqa: RUF012  Hugging Face reads a list

    def __init__(self, config: FullRankConfig) -> None:
        super().__init__(config)
        if config.objective != self.objective:
            raise InputError(
                f"{type(self).__name__}: takes a model of objective {self.objective}, given '{config.objective}'; see the auto "
                "classes of its objective"
            )
        self.model: Any = self._build(config)
        # our constructors draw the numbers that a model starts with; under the meta device they cannot
        self._started = all(tensor.device.type != "meta" for tensor in self.model.parameters())
        self.post_init()

    @classmethod
    def _build(cls, config: FullRankConfig) -> Model:
        # from the plain section: in an export, `config` may come from a second copy of the same code
        return cls.model_class(ModelConfig.from_dict(config.fullrank or {}))

    # -- start of parameters ------------------------------------------------------------------------------------------

    def initialize_weights(self) -> None:
        """Start tensors of `model` that a checkpoint lacks as in a new model of ours, whatever its initialiser."""
        tensors = _name_tensors(self.model)
        missing = [name for name, tensor in tensors.items() if not getattr(tensor, "_is_hf_initialized", False)]
        if missing and not self._started:
            starts = _name_tensors(self._build(self.config))
            for name in missing:
                init.copy_(tensors[name], starts[name])
        super().initialize_weights()

    def _init_weights(self, module: nn.Module) -> None:
        """Do nothing: `initialize_weights` has started all tensors."""

    # -- embeddings ---------------------------------------------------------------------------------------------------

    @property
    def _reader(self) -> Any:
        """The part of `model` that has the input layer and the blocks."""
        return self.model if isinstance(self.model, LanguageModel) else self.model.encoder

    def get_input_embeddings(self) -> nn.Module:
        """Return the input layer that reads input_ids."""
        return self._reader.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        raise InputError(
            "the input layer of a fullrank model is built from its configuration (fullrank.input) and shared with its output "
            "layer where they are tied; it cannot be replaced"
        )

    # -- activation checkpointing -------------------------------------------------------------------------------------

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Callable[..., Any] = checkpoint, every_n_layers: int = 1
    ) -> None:
        """Let every `every_n_layers`-th block of `model` keep its inputs only and run again in the backward pass."""
        self.gradient_checkpointing = enable
        blocks: list[Any] = [module for module in self.model.modules() if isinstance(module, Block)]
        for i, block in enumerate(blocks):
            block.__dict__.pop("forward", None)
            if enable and i % every_n_layers == 0:
                block.forward = partial(_run_checkpointed, gradient_checkpointing_func, block)

    # -- outputs ------------------------------------------------------------------------------------------------------

    def _trace(self, output_attentions: bool | None, output_hidden_states: bool | None) -> Trace | None:
        """Make a collector of attention weights and hidden states, None where neither is asked for."""
        weights = self.config.output_attentions if output_attentions is None else output_attentions
        states = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        if not (weights or states):
            return None
        return Trace(weights=weights, states=[] if states else None)

    def _choose_inputs(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> tuple[Any, Tensor]:
        """Choose what reads a text, and its ids: `_reader`, or with vectors a view of it in whose input layer they stand."""
        if (input_ids is None) == (inputs_embeds is None):
            raise InputError("input_ids, inputs_embeds: exactly one of them")
        if inputs_embeds is None:
            assert input_ids is not None
            return self._reader, self._replace_padding(input_ids)
        config = self.model.config
        if config.document_token_id is not None or (self.training and config.dropout.words):
            raise InputError(
                "inputs_embeds: model.document_token_id and model.dropout.words read the ids of tokens; give input_ids"
            )
        ids = torch.zeros(inputs_embeds.shape[:2], dtype=torch.int64, device=inputs_embeds.device)
        return with_parts(self._reader, embedding=_LookedUp(inputs_embeds)), ids

    def _replace_padding(self, ids: Tensor, replacement: int = 0) -> Tensor:
        """Replace the first id beyond the vocabulary, which is padding where every entry may stand in a text.

        It is read as some entry of the vocabulary, as its outputs mean nothing.
        """
        return ids.masked_fill(ids == self.config.vocab_size, replacement)

    def _predict(
        self,
        hidden: Tensor,
        labels: Tensor | None,
        num_items: Tensor | int | None,
        logits_to_keep: int | Tensor = 0,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute logits (B, N, V) of hidden (B, N, E), and the loss of labels (B, N) in nats, None without labels.

        The loss is the mean over labels other than -100, or their sum over num_items; 0 where there is no such label.
        """
        positions = slice(-logits_to_keep or None, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits: Tensor = self.model.output(hidden[:, positions])
        if labels is None:
            return logits, None
        labels = self._replace_padding(labels[:, positions], IGNORED).flatten()
        precise = logits if logits.dtype == torch.float64 else logits.float()
        loss = F.cross_entropy(precise.flatten(0, -2), labels, ignore_index=IGNORED, reduction="sum")
        items = (labels != IGNORED).sum() if num_items is None else torch.as_tensor(num_items)
        return logits, loss / items.clamp_min(1)


def _name_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


def _run_checkpointed(func: Callable[..., Any], block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    run = partial(type(block).forward, block, **kwargs)
    if not (block.training and torch.is_grad_enabled()) or isinstance(kwargs.get("trace"), Trace):
        return run(*args)
    return func(run, *args)


def _collect_traced(trace: Trace | None, last: Tensor) -> dict[str, tuple[Tensor, ...]]:
    """Collect the outputs of Hugging Face that a trace holds.

    hidden_states: inputs of the blocks, then the input `last` of the output layer. attentions: mixed attention weights
    (B, H, N, M) of each layer.
    """
    traced: dict[str, tuple[Tensor, ...]] = {}
    if trace is not None and trace.states is not None:
        traced["hidden_states"] = (*trace.states, last)
    if trace is not None and trace.weights:
        if not trace.layers:
            raise InputError("output_attentions: multi-linear attention has no attention weights")
        traced["attentions"] = tuple(layer.mixed for layer in trace.layers)
    return traced


class _WithPadding(LogitsProcessorList):
    """Processors that may look up the score of padding, which has an id beyond the vocabulary."""

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        if not self:
            return scores
        padded = F.pad(scores, (0, 1), value=-torch.inf)
        return super().__call__(input_ids, padded, **kwargs)[:, :-1]


class FullRankForCausalLM(FullRankPreTrainedModel, GenerationMixin):
    """A `LanguageModel` behind the interface of Hugging Face: p(x_{n+1} | x_1 .. x_n).

    The language model is the attribute `model`. `generate`, `Trainer`, pipelines and `AutoModelForCausalLM` take this class.
    `logits` are log-probabilities where the output layer is adaptive or a mixture; their softmax is right either way.

    A model with memory reads a text segment by segment. Its memory is in `past_key_values`, which goes into the next call.
    Neither `config.use_cache=False` nor `generate(use_cache=False)` turns it off: without memory it is another model.
    """

    objective = "causal"
    model_class = LanguageModel

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
    ) -> Any:
        """Compute the logits of the next tokens, and the loss of labels.

        Args:
            input_ids: tokens (B, N); None where `inputs_embeds` are given.
            attention_mask: (B, N), or (B, M + N) with the M tokens before; 1 for tokens, 0 for padding on either side. None:
                nothing is padded. Outputs at padding mean nothing.
            past_key_values: a `FullRankCache`, or the empty cache that `generate` makes; it is changed in place. None: the
                text begins here.
            labels: (B, N), `input_ids` again, -100 where there is no loss. They are shifted here: the loss is that of each
                token given those before it. None: no loss.
            use_cache: return a new cache where none is given. None: in evaluation only, always by a model with memory, by
                others as `config.use_cache` says and without labels; never where tokens see later ones.
            logits_to_keep: logits, and the loss, of the last so many tokens, or of these positions; 0: of all.
            num_items_in_batch: what the summed loss is divided by; None: the number of labels.
            output_attentions: return mixed attention weights (B, H, N, M); None: `config.output_attentions`.
            output_hidden_states: return hidden states (B, N, E); None: `config.output_hidden_states`.
            cache: the name of `past_key_values` from transformers 5.24 on; give either.
            inputs_embeds: vectors (B, N, E) in place of `get_input_embeddings()(input_ids)`, as prompt tuning makes them.

        Returns:
            `CausalLMOutputWithPast`: the loss in nats (a mean, or a sum over `num_items_in_batch`), logits (B, N, V), the
            cache, and the tuples `hidden_states` and `attentions` where they are asked for.

        Raises:
            InputError: the mask has another shape, the text is too long, an id is not in the vocabulary, the cache is that of
                another model, weights are asked of attention that has none, or vectors of a model that needs ids.
        """
        trace = self._trace(output_attentions, output_hidden_states)
        past = cache if past_key_values is None else past_key_values
        if past is None and self._begins_cache(use_cache, labels is not None):
            past = FullRankCache()
        reader, ids = self._choose_inputs(input_ids, inputs_embeds)
        hidden = self._read(reader, ids, attention_mask, layer_of(past), trace)
        if labels is not None:  # each token predicts the next one, and padding predicts nothing
            labels = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
            if attention_mask is not None:
                seen = attention_mask[:, -labels.shape[1] :].bool()
                labels = labels.masked_fill(~seen, IGNORED)
        logits, loss = self._predict(hidden, labels, num_items_in_batch, logits_to_keep)
        return CausalLMOutputWithPast(loss, logits, past, **_collect_traced(trace, hidden))

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, inputs_embeds: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Prepare the inputs of `forward` in `generate`.

        Args:
            input_ids: tokens so far (B, N).
            inputs_embeds: vectors of the prompt in place of its tokens.
            **kwargs: as of `GenerationMixin`.

        Raises:
            InputError: the model cannot write a text token by token.
        """
        if self.model.config.sees_future:
            raise InputError(
                "generate: the tokens of this model see later ones (model.attention.causal: as_published), so it cannot "
                "write a text token by token; train with model.attention.causal: masked to generate"
            )
        return super().prepare_inputs_for_generation(input_ids, inputs_embeds=inputs_embeds, **kwargs)

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        if (kind := generation_config.cache_implementation) not in (None, "dynamic"):
            raise InputError(f"cache_implementation: this model keeps a cache of its own, given {kind!r}; leave it out")
        if self.model.memory_length:
            generation_config.use_cache = True  # a copy of this call; without memory it is another model
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)

    def _get_logits_processor(self, *args: Any, **kwargs: Any) -> LogitsProcessorList:
        processors = super()._get_logits_processor(*args, **kwargs)
        return _WithPadding(processors) if self.config.pad_token_id == self.config.vocab_size else processors

    @property
    def _is_stateful(self) -> bool:
        """True if speculation is impossible: a memory or a sum cannot forget rejected tokens."""
        return self.model.memory_length or not self.model.new_cache().croppable

    def _begins_cache(self, use_cache: bool | None, has_labels: bool) -> bool:
        """Return whether a call without a cache begins one."""
        if use_cache is not None:
            return use_cache
        if self.training or self.model.config.sees_future:
            return False
        return self.model.memory_length or (self.config.use_cache and not has_labels)

    def _read(
        self,
        model: LanguageModel,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        layer: StateLayer | None,
        trace: Trace | None,
    ) -> Tensor:
        """Compute the input (B, N, E) of the output layer; `layer` then holds the state after these tokens."""
        state: State | None = None
        past: dict[str, Any] = {}
        if layer is not None and model.memory_length:
            past["memory"] = state = layer.state_of(Memory)
        elif layer is not None:
            state = layer.state_of(Cache)
            past["cache"] = state or model.new_cache()
        mask = mask_of_new(attention_mask, input_ids, state)
        after = model.hidden(input_ids, **past, attention_mask=mask, trace=trace)
        if layer is not None:
            layer.state = after.memory if model.memory_length else after.cache
            layer.device = input_ids.device
        return after.hidden


# -- encoders ----------------------------------------------------------------------------------------------------------


class FullRankForMaskedLM(FullRankPreTrainedModel):
    """A `MaskedLanguageModel` behind the interface of Hugging Face: p(x_n | the text around n).

    The masked language model is the attribute `model`. `Trainer`, the pipeline `fill-mask` and `AutoModelForMaskedLM` take this
    class. `<mask>` is the last entry of the vocabulary (`config.mask_token_id`).
    `logits` are log-probabilities where the output layer is adaptive or a mixture; their softmax is right either way.
    """

    objective = "masked"
    model_class = MaskedLanguageModel

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Any:
        """Compute the logits of every position, and the loss of labels.

        Args:
            input_ids: tokens (B, N), some of them `<mask>`; None where `inputs_embeds` are given.
            attention_mask: (B, N), 1 for tokens and 0 for padding on either side; None: nothing is padded. Outputs at padding
                mean nothing.
            labels: (B, N), the masked tokens, -100 elsewhere; None: no loss.
            num_items_in_batch: what the summed loss is divided by; None: the number of labels.
            output_attentions: return mixed attention weights (B, H, N, M); None: `config.output_attentions`.
            output_hidden_states: return hidden states (B, N, E); None: `config.output_hidden_states`.
            inputs_embeds: vectors (B, N, E) in place of `get_input_embeddings()(input_ids)`.

        Returns:
            `MaskedLMOutput`: the loss in nats (a mean, or a sum over `num_items_in_batch`), logits (B, N, V), and the tuples
            `hidden_states` and `attentions` where they are asked for.

        Raises:
            InputError: the mask has another shape, the text is empty or too long, an id is not in the vocabulary, or weights
                are asked of attention that has none.
        """
        trace = self._trace(output_attentions, output_hidden_states)
        reader, ids = self._choose_inputs(input_ids, inputs_embeds)
        states = reader.encode(ids, attention_mask, trace=trace).hidden
        hidden = self.model.output_dropout(states)
        logits, loss = self._predict(hidden, labels, num_items_in_batch)
        return MaskedLMOutput(loss=loss, logits=logits, **_collect_traced(trace, states))
