"""A mixture of softmaxes in place of the vocabulary layer of a Hugging Face model, equal to the old layer at the start.

    p(v | g) = sum_k pi_k softmax(W h_k + b)_v        h_k = g + tanh(W_k g + b_k),  pi = softmax(P g)

W and b are the parameters of the old layer, under their old names and as tied as they were. W_k and b_k are `latent`, P is
`prior` of the submodule `fullrank` that the layer gets: `Latents` with `latent: residual`, which start as one softmax.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.utils import ModelOutput

from fullrank.core.config import MixtureConfig, OutputConfig
from fullrank.core.engine import Cluster, Components
from fullrank.core.errors import InputError
from fullrank.core.output import IGNORED, Latents, Output
from fullrank.hf.interface import drop_hooks

KIND = "mixture_of_softmaxes"
OWN_KEYS = ("mixtures", "latent_dropout")  # the others are those of the layer that the model has


@dataclass
class _Request:
    """A loss that the vocabulary layer forms in this pass: targets (B, N) of its positions, and what the sum is divided by."""

    targets: Tensor
    items: Tensor | int | None
    loss: Tensor | None = None


_requested: ContextVar[_Request | None] = ContextVar("requested", default=None)


class MixtureHead(nn.Linear, Output):
    """The vocabulary layer of an injected model: hidden (..., E) -> log-probabilities (..., V), in fp32 at least.

    An `nn.Linear` gets this class and keeps its parameters. Where a loss is requested, it forms that chunk by chunk and
    returns the hidden states, which nobody reads.
    """

    fullrank: Latents

    def components(self, hidden: Tensor) -> Components:
        states, log_prior = self.fullrank(hidden)
        return Components(states, log_prior, (Cluster(self.weight, self.bias),))

    def forward(self, hidden: Tensor) -> Tensor:
        request = None if torch.compiler.is_compiling() else _requested.get()
        if request is None:
            return self.log_prob(hidden)
        targets = request.targets.to(hidden.device)
        if targets.shape != hidden.shape[:-1]:
            raise InputError(f"labels {tuple(targets.shape)}: one for each of the positions {tuple(hidden.shape[:-1])}")
        counts = targets != IGNORED
        loss = self.loss(hidden[counts][None], targets[counts][None])[0]
        request.loss = loss if request.items is None else loss * counts.sum() / request.items
        return hidden


def mixture_head(model: nn.Module) -> MixtureHead | None:
    """The vocabulary layer that was injected into a model."""
    return next((module for module in model.modules() if isinstance(module, MixtureHead)), None)


def mixture_settings(output: str | Mapping[str, Any] | OutputConfig) -> dict[str, Any]:
    """The mixture that `inject(output=...)` asks for, as `model.config.fullrank` has it; InputError for another one."""
    given = {"kind": output} if isinstance(output, str) else output
    config = given if isinstance(given, OutputConfig) else OutputConfig.from_dict(given)
    settings: dict[str, Any] = {"kind": KIND, **{name: getattr(config, name, None) for name in OWN_KEYS}}
    if not isinstance(config, MixtureConfig) or config not in (MixtureConfig(**settings), _residual(settings)):
        raise InputError(
            f"output: '{KIND}', or an OutputConfig of that kind with {', '.join(OWN_KEYS)} and no other key, given {config}; "
            "the layer has to start equal to the model's own, whose matrix, tying and bias stay"
        )
    return settings


def _residual(settings: Mapping[str, Any]) -> MixtureConfig:
    return MixtureConfig(**settings, latent="residual")


def vocabulary_layer(model: Any) -> nn.Linear:
    """The vocabulary layer that a mixture can replace, tried out on a few tokens unless it has no values yet.

    Raises InputError for a model without one, and for one whose logits or loss are not what a mixture would give.
    """
    name, head = type(model).__name__, getattr(model, "get_output_embeddings", lambda: None)()
    if type(head) is not nn.Linear or "forward" in vars(head):  # device_map replaces the forward pass
        given = "none" if head is None else f"a {type(head).__name__}"
        raise InputError(
            f"{name}: output replaces an nn.Linear (not quantized, not placed by device_map); given {given}"
        )
    if head.weight.is_meta:
        return head
    ids = torch.arange(min(4, head.out_features), device=head.weight.device)[None]
    targets, seen = _targets(model, {"labels": ids}).flatten(), []
    hook = head.register_forward_hook(lambda _, __, logits: seen.append(logits))
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            out = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, return_dict=True)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(f"{name}: output is for models that predict tokens from input_ids alone ({error})") from error
    finally:
        hook.remove()
    logits, loss = out.get("logits"), out.get("loss")
    rtol = 8 * max(torch.finfo(dtype).eps for dtype in (head.weight.dtype, torch.float32))
    if not seen or logits is None or not torch.equal(logits.to(seen[0]), seen[0]):
        fault = "it changes its logits after the vocabulary layer (a soft-cap, a scale)"
    elif loss is None or not torch.isclose(loss.float(), F.cross_entropy(seen[0].flatten(0, 1).float(), targets), rtol):
        fault = "its loss is another one than the cross entropy of the next token (of a masked model: the same token)"
    else:
        return head
    raise InputError(f"{name}: {fault}; a mixture of softmaxes cannot replace its vocabulary layer")


def attach(model: Any, head: nn.Linear, settings: Mapping[str, Any]) -> None:
    """Make the vocabulary layer of a model a mixture."""
    with torch.random.fork_rng(devices=[]):
        latents = Latents(_residual(settings), head.in_features).train(head.training)
    head.__class__ = MixtureHead
    head.fullrank = latents if head.weight.is_meta else latents.to(head.weight)
    model.register_forward_pre_hook(_take_labels, with_kwargs=True)
    model.register_forward_hook(_put_loss, with_kwargs=True, always_call=True)


def detach(model: Any) -> None:
    """Make the vocabulary layer of a model the old one again."""
    if (head := mixture_head(model)) is None:
        return
    del head.fullrank
    head.__class__ = nn.Linear  # type: ignore[assignment]
    drop_hooks(model, _take_labels, _put_loss)


# -- the loss of a whole model, formed in its vocabulary layer ------------------------------------------------------------


def _is_masked(model: Any) -> bool:
    return model.loss_type == "ForMaskedLM"


def _targets(model: Any, arguments: Mapping[str, Any]) -> Tensor:
    """The label of every position: shifted by one token, unless the model is a masked one or they are shifted already."""
    labels: Tensor = arguments["labels"]
    if _is_masked(model):
        return labels
    shifted: Tensor | None = arguments.get("shift_labels")
    return F.pad(labels[..., 1:], (0, 1), value=IGNORED) if shifted is None else shifted


def _take_labels(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Before a pass of the model: in training the vocabulary layer gets the labels, and the model none."""
    head = model.get_output_embeddings()
    if not isinstance(getattr(head, "original_module", head), MixtureHead):  # PEFT's copy of the layer is one, too
        raise InputError(
            f"{type(model).__name__}: its vocabulary layer became a {type(head).__name__} after injection (by "
            "resize_token_embeddings, or an adapter on it), which leaves the mixture out; change the layer first, then inject"
        )
    if (
        torch.compiler.is_compiling()
        or not model.training
        or kwargs.get("labels") is None
        or not getattr(model.config, "chunked_loss", True)
        or kwargs.get("output_router_logits", getattr(model.config, "output_router_logits", False))  # they have a loss
    ):
        return None
    _requested.set(_Request(_targets(model, kwargs), kwargs.get("num_items_in_batch")))
    return args, {**kwargs, "labels": None}


def _put_loss(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
    """After a pass of the model: the loss goes into its output, which has no logits then."""
    request = None if torch.compiler.is_compiling() else _requested.get()
    if request is None:
        return None
    _requested.set(None)
    if isinstance(out, ModelOutput):
        return replace(out, loss=request.loss, logits=None)
    return None if out is None else (request.loss, *out[1:])  # None: the pass raised an error
