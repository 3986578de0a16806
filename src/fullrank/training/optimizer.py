"""Optimizers by name, and the parameter groups with and without weight decay.

An optimizer is registered as a function `(groups, options) -> torch.optim.Optimizer`; the learning rate is set by the
loop before every step. With g the gradient, p the parameter and d the weight decay of its group:

    sgd     g += d p;   v = mu v + g;   p -= lr v
    nag     g += d p;   v = mu v + g;   p -= lr (g + mu v)
    adam    g += d p;   m = b1 m + (1-b1) g;   s = b2 s + (1-b2) g^2;   p -= lr m/(1-b1^t) / (sqrt(s/(1-b2^t)) + eps)
    adamw   p -= lr d p;   then adam with d = 0

`nag` written with the velocity w = -lr v is fairseq's: w' = mu w - lr g, p += mu^2 w - (1 + mu) lr g, where w is
rescaled whenever lr changes; only the weight decay differs (fairseq's acts on p, ours on g).
What fairseq calls `adam` is `adamw` here: p -= lr d p. Two things differ: its decay acts on biases, norms and mixing weights,
too, and its last step has sqrt(s) + eps where ours has sqrt(s) + eps sqrt(1-b2^t), which matters only where s is about eps^2.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from fullrank.config import register
from fullrank.config.run import TrainConfig
from fullrank.core.errors import ConfigError
from fullrank.core.registry import lookup

Groups = list[dict[str, Any]]


class BuildOptimizer(Protocol):
    """A function registered in the slot `optimizer`."""

    def __call__(self, groups: Groups, options: TrainConfig) -> Optimizer: ...


def parameter_groups(model: nn.Module, weight_decay: float) -> Groups:
    """Trainable parameters in two groups: those that decay by `weight_decay`, and those that never do.

    Biases and norms (fewer than two dimensions) never decay, nor anything inside a module whose `no_weight_decay` is
    true, nor a parameter marked so itself: mixing matrices start at the identity, and decay would pull them to zero.
    A tied parameter appears once, and stays out of decay if any of its owners says so. Order is the model's own.
    """
    exempted = {id(p) for m in model.modules() if getattr(m, "no_weight_decay", False) for p in m.parameters()}
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        exempt = parameter.ndim < 2 or id(parameter) in exempted or getattr(parameter, "no_weight_decay", False)
        (others if exempt else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def make_optimizer(name: str, groups: Groups, options: TrainConfig) -> Optimizer:
    """The optimizer registered as `name`, over parameter groups (see `parameter_groups`)."""
    build: BuildOptimizer = lookup("optimizer", name, "train.optimizer")
    return build(groups, options)


def _fused(groups: Groups) -> bool:
    """True if torch's one-pass kernels apply: they are the fastest on CPU and GPU, and add in a fixed order."""
    parameters = (parameter for group in groups for parameter in group["params"])
    return all(p.device.type in ("cpu", "cuda") and torch.is_floating_point(p) for p in parameters)


@register("optimizer", "sgd")
def sgd(groups: Groups, options: TrainConfig) -> Optimizer:
    """Stochastic gradient descent, with `momentum` if any."""
    return torch.optim.SGD(groups, lr=options.learning_rate, momentum=options.momentum, fused=_fused(groups))


@register("optimizer", "nag")
def nag(groups: Groups, options: TrainConfig) -> Optimizer:
    """Nesterov's accelerated gradient; ConfigError without `momentum`."""
    if not options.momentum > 0:
        raise ConfigError(f"train.momentum: nag needs a momentum above 0 (0.99 is usual), given {options.momentum}")
    return torch.optim.SGD(
        groups, lr=options.learning_rate, momentum=options.momentum, nesterov=True, fused=_fused(groups)
    )


@register("optimizer", "adam")
def adam(groups: Groups, options: TrainConfig) -> Optimizer:
    """Adam; weight decay is added to the gradient."""
    return torch.optim.Adam(
        groups, lr=options.learning_rate, betas=options.betas, eps=options.eps, fused=_fused(groups)
    )


@register("optimizer", "adamw")
def adamw(groups: Groups, options: TrainConfig) -> Optimizer:
    """Adam with decoupled weight decay."""
    return torch.optim.AdamW(
        groups, lr=options.learning_rate, betas=options.betas, eps=options.eps, fused=_fused(groups)
    )
