"""What our models have in common as Hugging Face's: how they are built, started, loaded and checkpointed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers import initialization as init

from fullrank.core.attention import Trace
from fullrank.core.config import ModelConfig
from fullrank.core.errors import InputError
from fullrank.hf.configuration import FullRankConfig

IGNORED = -100  # the label of what has no loss


class FullRankPreTrainedModel(PreTrainedModel):
    """One of our models under the attribute `model`, so that its tensors are called `model.<our name>`.

    Subclasses say with `objectives` which models they take, and build theirs in `_built`.
    """

    config_class = FullRankConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True  # forward takes num_items_in_batch
    gradient_checkpointing = False
    objectives: tuple[str, ...] = ()
    _no_split_modules = ["Block"]  # noqa: RUF012  Hugging Face reads a list

    def __init__(self, config: FullRankConfig) -> None:
        super().__init__(config)
        if config.objective not in self.objectives:
            raise InputError(
                f"{type(self).__name__}: takes a model of objective {' or '.join(self.objectives)}, given "
                f"'{config.objective}'; see the auto classes of its objective"
            )
        self.model: Any = self._built(config)
        # our constructors draw the numbers that a model starts with; without a device they could not
        self._started = all(tensor.device.type != "meta" for tensor in self.model.parameters())

    @staticmethod
    def _built(config: FullRankConfig) -> nn.Module:
        raise NotImplementedError

    # -- starts -------------------------------------------------------------------------------------------------------

    def initialize_weights(self) -> None:
        """Tensors of `model` that no checkpoint gave start as in a new model of ours, whatever its initialiser."""
        own = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        missing = [name for name, tensor in own.items() if not getattr(tensor, "_is_hf_initialized", False)]
        if missing and not self._started:
            fresh = self._built(self.config)
            starts = {**dict(fresh.named_parameters()), **dict(fresh.named_buffers())}
            for name in missing:
                init.copy_(own[name], starts[name])
        super().initialize_weights()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """A head on top of `model` starts at N(0, 0.02^2), its bias at 0."""
        if isinstance(module, nn.Linear) and module in set(self.children()):
            init.normal_(module.weight, std=0.02)
            if module.bias is not None:
                init.zeros_(module.bias)

    # -- embeddings ---------------------------------------------------------------------------------------------------

    def get_input_embeddings(self) -> nn.Module:
        """The input layer of what reads the input ids."""
        reader = getattr(self.model, "encoder", self.model)
        embedding: nn.Module | None = reader.embedding
        return self.model.decoder.embedding if embedding is None else embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        raise InputError(
            "the input layer of a fullrank model is built from its configuration (fullrank.input) and shared with its output "
            "layer where they are tied; it cannot be replaced"
        )

    def get_output_embeddings(self) -> None:
        """None: a vocabulary layer of ours may be more than one matrix, and is tied by itself."""

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Module:
        """The input layer as it is; InputError for another number of tokens."""
        if new_num_tokens not in (None, self.config.vocab_size) or pad_to_multiple_of is not None:
            raise InputError(
                f"a fullrank model keeps the vocabulary that it was trained with, {self.config.vocab_size} entries, given "
                f"{new_num_tokens}; use its own tokenizer, or train a model with another vocabulary"
            )
        return self.get_input_embeddings()

    # -- activation checkpointing -------------------------------------------------------------------------------------

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Callable[..., Any] = checkpoint, every_n_layers: int = 1
    ) -> None:
        """Blocks of `model` keep their inputs only, every `every_n_layers`-th of them, and are run again backwards."""
        self.gradient_checkpointing = enable
        for i, block in enumerate(self._blocks()):
            block.__dict__.pop("forward", None)
            if enable and i % every_n_layers == 0:
                block.forward = partial(_run_again, gradient_checkpointing_func, block)

    def _blocks(self) -> list[nn.Module]:
        blocks: list[nn.Module] = self.model.compile_targets()
        return blocks

    # -- what outputs hold --------------------------------------------------------------------------------------------

    def _trace(self, output_attentions: bool | None, output_hidden_states: bool | None) -> Trace | None:
        """What collects attention weights and hidden states, None where nobody asks for them."""
        weights = self.config.output_attentions if output_attentions is None else output_attentions
        states = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        return Trace(weights=bool(weights), states=[] if states else None) if weights or states else None

    def _returned(self, output: Any, return_dict: bool | None) -> Any:
        wanted = self.config.return_dict if return_dict is None else return_dict
        return output if wanted else output.to_tuple()


def _run_again(func: Callable[..., Any], block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    run = partial(type(block).forward, block, **kwargs)
    if not (block.training and torch.is_grad_enabled()) or any(isinstance(given, Trace) for given in args):
        return run(*args)
    return func(run, *args)


def states_of(trace: Trace | None, last: Tensor) -> tuple[Tensor, ...] | None:
    """Inputs of the blocks, then what the output layer reads."""
    return None if trace is None or trace.states is None else (*trace.states, last)


def weights_of(trace: Trace | None) -> tuple[Tensor, ...] | None:
    """Attention weights (B, H, N, M) of each layer, after mixing."""
    return None if trace is None or not trace.weights else tuple(layer.mixed for layer in trace.layers)


def refuse_generation(config: ModelConfig) -> None:
    """InputError for a model whose tokens see later ones."""
    if config.sees_future:
        raise InputError(
            "generate: the tokens of this model see later ones (model.attention.causal: as_published), so it cannot write a "
            "text token by token; train with model.attention.causal: masked to generate"
        )


def mean_loss(logits: Tensor, labels: Tensor, num_items: Tensor | int | None) -> Tensor:
    """Mean nll in nats of labels (B, N) under logits (B, N, V), or its sum over `num_items`; -100 does not count."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    reduction = "mean" if num_items is None else "sum"
    loss = F.cross_entropy(wide.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction=reduction)
    return loss if num_items is None else loss / num_items


def chunked_loss(output: Any, hidden: Tensor, labels: Tensor, num_items: Tensor | int | None) -> Tensor:
    """The same from what the output layer reads, (B, N, E), formed chunk by chunk: no logits are kept."""
    counts = labels != IGNORED
    loss: Tensor = output.loss(hidden, labels.masked_fill(~counts, 0), counts)[0]
    return loss if num_items is None else loss * counts.sum() / num_items
