"""Optimizers and learning rates by name, and the parameter groups with and without weight decay.

The learning rate is set by the loop before every step. With g the gradient, p the parameter and d its weight decay:

    sgd     g += d p;   v = mu v + g;   p -= lr v
    nag     g += d p;   v = mu v + g;   p -= lr (g + mu v)
    adam    g += d p;   m = b1 m + (1-b1) g;   s = b2 s + (1-b2) g^2;   p -= lr m/(1-b1^t) / (sqrt(s/(1-b2^t)) + eps)
    adamw   p -= lr d p;   then adam with d = 0
    muon    see `MuonWithAdamW`

`nag` is fairseq's, whose weight decay acts on p where ours acts on g. What fairseq calls `adam` is `adamw` here, but for its
decay of biases, norms and mixing weights, and for sqrt(s) + eps where ours has sqrt(s) + eps sqrt(1-b2^t).

A schedule is registered as a function `(step, total, options) -> learning rate` of the update `step`, which counts from
1, of `total`; or, where it depends on the validation (`plateau`), as a subclass of `Schedule`.
With lr = `learning_rate`, w = `warmup_steps`, T = `total`, every schedule but `cosine_wave` begins with

    rate(t) = warmup_from + (lr - warmup_from) t / w        for t <= w
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fullrank.config import register
from fullrank.config.run import TrainConfig
from fullrank.core.registry import lookup
from fullrank.training.device import find_blocks, is_sharded

Groups = list[dict[str, Any]]


def parameter_groups(
    model: nn.Module,
    weight_decay: float,
    muon: bool = False,
    rates: Mapping[nn.Parameter, Mapping[str, float]] | None = None,
) -> Groups:
    """Divide trainable parameters into groups: those that decay by `weight_decay`, and those that never do.

    Biases and norms (fewer than two dimensions) never decay, nor anything inside a module whose `no_weight_decay` is
    true, nor a parameter marked so itself: mixing matrices start at the identity, and decay would pull them to zero.
    A tied parameter appears once, and stays out of decay if any of its owners says so. Order is the model's own.

    Args:
        model: the model that is trained.
        weight_decay: that of the parameters that decay.
        muon: mark the matrices inside blocks that decay as `muon`.
        rates: of parameters with a learning rate of their own, its `scale`, a factor on every update's rate, or its `peak`, a
            factor on `learning_rate` alone (`Schedule.scale_rate`).

    Returns:
        The parameter groups of an optimizer.
    """
    exempt = {id(p) for p in model.parameters() if p.ndim < 2 or getattr(p, "no_weight_decay", False)}
    for module in model.modules():
        if getattr(module, "no_weight_decay", False):
            exempt |= {id(p) for p in module.parameters()}
    blocks = find_blocks(model) if muon else []
    matrices = {id(p) for block in blocks for p in block.parameters() if p.ndim == 2} - exempt
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for p in model.parameters():
        if p.requires_grad:
            is_matrix = id(p) in matrices
            is_exempt = id(p) in exempt
            rate = (rates or {}).get(p, {})
            key = is_matrix, is_exempt, *rate.items()
            group = groups.setdefault(key, {"params": [], "weight_decay": 0.0 if is_exempt else weight_decay, **rate})
            group["params"].append(p)
            if is_matrix:
                group["muon"] = True
    return [groups[key] for key in sorted(groups)]


def make_optimizer(groups: Groups, options: TrainConfig) -> Optimizer:
    """Make the optimizer `options.optimizer` of parameter groups (see `parameter_groups`)."""
    build: Callable[[Groups, TrainConfig], Optimizer] = lookup("optimizer", options.optimizer, "train.optimizer")
    return build(groups, options)


# `fused`, torch's one-pass kernels: the fastest, adding in a fixed order


@register("optimizer", "sgd")
@register("optimizer", "nag")
def sgd(groups: Groups, options: TrainConfig) -> Optimizer:
    """Make stochastic gradient descent, with `momentum` if any, which is Nesterov's by the name of `nag`.

    Velocities start at zero: torch's fused step fails if only some are missing, as those of a layer skipped at first.
    """
    parameters = [parameter for group in groups for parameter in group["params"]]
    optimizer = torch.optim.SGD(
        groups,
        lr=options.learning_rate,
        momentum=options.momentum,
        nesterov=options.optimizer == "nag",
        fused=not any(map(is_sharded, parameters)),  # torch has no such step for parameters in parts
    )
    if options.momentum:
        for parameter in parameters:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


@register("optimizer", "adam")
@register("optimizer", "adamw")
def adam(groups: Groups, options: TrainConfig) -> Optimizer:
    """Make Adam with decoupled weight decay, which by the name of `adam` is added to the gradient."""
    make: Callable[..., Optimizer] = torch.optim.Adam if options.optimizer == "adam" else torch.optim.AdamW
    return make(groups, lr=options.learning_rate, betas=options.betas, eps=options.eps, fused=True)


@register("optimizer", "muon")
class MuonWithAdamW(Optimizer):
    """Muon (Jordan et al. 2024) for matrices inside blocks (`parameter_groups` marks them), AdamW for all else.

        v = mu v + (1-mu) g;   u = (1-mu) g + mu v;   p -= lr d p;   p -= 0.2 sqrt(max(m, n)) lr `orthogonalize(u)`

    p (m, n).  mu is `momentum`, 0.95 where that is 0.  The factor gives an update the root mean square 0.2, about that of
    AdamW, so that one learning rate serves both (`match_rms_adamw`; Liu et al. 2025, arXiv 2502.16982, §2.2).
    """

    def __init__(self, groups: Groups, options: TrainConfig) -> None:
        others = [group for group in groups if "muon" not in group]
        self.rest = adam(others, options) if others else None
        super().__init__(groups, {"lr": options.learning_rate, "momentum": options.momentum or 0.95})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        if self.rest is not None:  # `load_state_dict` makes new states and groups
            self.rest.state = self.state
            self.rest.param_groups = [g for g in self.param_groups if "muon" not in g]
            self.rest.step()
        for group in self.param_groups:
            if "muon" in group:
                for p in group["params"]:
                    if p.grad is not None:
                        self._update_matrix(p, p.grad, group["lr"], group["momentum"], group["weight_decay"])

    def _update_matrix(self, p: Tensor, gradient: Tensor, rate: float, mu: float, decay: float) -> None:
        v = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p)).lerp_(gradient, 1 - mu)
        p.mul_(1 - rate * decay)
        p.sub_(orthogonalize(gradient.lerp(v, mu)), alpha=0.2 * math.sqrt(max(p.shape)) * rate)


# a x + (b G + c G^2) x with G = x x' brings every singular value of x nearer to 1 (Jordan et al. 2024)
_A = 3.4445
_B = -4.7750
_C = 2.0315
_STEPS = 5


def orthogonalize(u: Tensor) -> Tensor:
    """Compute about U V' for u = U diag(s) V'.

    Five Newton-Schulz steps, in bfloat16 on CUDA, bring s to between 0.7 and 1.2.
    """
    tall = u.shape[0] > u.shape[1]
    x = u.bfloat16() if u.device.type == "cuda" else u
    x = (x.T if tall else x) / x.norm().clamp_min(1e-7)
    if x.dtype != torch.bfloat16 and not is_sharded(x) and x.shape[1] > 2 * x.shape[0]:
        x = _combine_steps(x @ x.T) @ x
    else:
        for _ in range(_STEPS):
            x = torch.addmm(x, _add_powers(x @ x.T), x, beta=_A)
    return x.T if tall else x


def _add_powers(gram: Tensor) -> Tensor:
    """Compute b G + c G^2."""
    return torch.addmm(gram, gram, gram, beta=_B, alpha=_C)


def _combine_steps(gram: Tensor) -> Tensor:
    """Compute the product of all steps as one matrix, of x x' alone: fewer multiplications where x is wide.

    A step is P = a I + b G + c G^2, and makes P G P of G.
    """
    identity = torch.eye(len(gram), device=gram.device, dtype=gram.dtype)
    product = step = _A * identity + _add_powers(gram)
    for _ in range(_STEPS - 1):
        gram = step @ gram @ step
        step = _A * identity + _add_powers(gram)
        product = step @ product
    return product


FunctionOfStep = Callable[[int, int, TrainConfig], float]


class Schedule:
    """The learning rate of every update: the warm-up, then `function`, or what a subclass makes of the validation."""

    def __init__(self, options: TrainConfig, total_steps: int, function: FunctionOfStep | None = None) -> None:
        self.options = options
        self.function = function
        self.total_steps = options.decay_steps or total_steps
        self.averaged_after = round(options.swa_start * total_steps)

    def scale_rate(self, step: int, peak: float = 1.0) -> float:
        """Return the learning rate of update `step`, with `learning_rate` times `peak`.

        It is `swa_learning_rate` once that applies.
        """
        if self.options.swa_learning_rate is not None and step > self.averaged_after:
            return self.options.swa_learning_rate
        if peak == 1:
            return self.rate(step)
        scaled = copy.copy(self)
        scaled.options = dataclasses.replace(self.options, learning_rate=self.options.learning_rate * peak)
        return scaled.rate(step)

    def rate(self, step: int) -> float:
        """Return the learning rate of update `step`, which counts from 1, by the schedule alone."""
        options = self.options
        if step <= options.warmup_steps:
            share = step / options.warmup_steps
            return options.warmup_from + (options.learning_rate - options.warmup_from) * share
        return self.rate_after_warmup(step)

    def rate_after_warmup(self, step: int) -> float:
        """Return the learning rate of an update after the warm-up."""
        assert self.function is not None
        return self.function(step, self.total_steps, self.options)

    def observe(self, cost: float) -> None:
        """Record an evaluation: the value of `eval.metric` as a number that is better the lower it is."""

    def state(self) -> dict[str, Any]:
        """Return plain values for a checkpoint; empty for a pure function of the step."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to what `state()` gave."""


def make_schedule(options: TrainConfig, total_steps: int) -> Schedule:
    """Make the schedule `options.schedule` for a training of `total_steps` updates."""
    registered = lookup("schedule", options.schedule, "train.schedule")
    if isinstance(registered, type):
        return registered(options, total_steps)
    return Schedule(options, total_steps, registered)


def _compute_decayed_share(step: int, total: int, options: TrainConfig) -> float:
    """Compute the share of training after the warm-up that is done, 0 to 1."""
    return min(1.0, (step - options.warmup_steps) / max(1, total - options.warmup_steps))


@register("schedule", "constant")
def constant(step: int, total: int, options: TrainConfig) -> float:
    """Return the rate of an update in a constant schedule.

        rate(t) = lr

    Args:
        step: number t of the update, from 1.
        total: updates T of the training.
        options: section `train` of the configuration, with lr.

    Returns:
        The learning rate.
    """
    return options.learning_rate


def _follow_cosine(angle: float, options: TrainConfig) -> float:
    """Return the learning rate on a cosine from `learning_rate` at 0 to `min_learning_rate` at pi."""
    low = options.min_learning_rate
    return low + (options.learning_rate - low) * (1 + math.cos(angle)) / 2


@register("schedule", "cosine")
def cosine(step: int, total: int, options: TrainConfig) -> float:
    """Return the rate of an update on half a cosine.

        rate(t) = min + (lr - min) (1 + cos(pi (t - w) / (T - w))) / 2,    min = `min_learning_rate`

    Args:
        step: number t of the update, from 1.
        total: updates T of the training.
        options: section `train` of the configuration, with lr, min and the warm-up w.

    Returns:
        The learning rate.
    """
    return _follow_cosine(math.pi * _compute_decayed_share(step, total, options), options)


@register("schedule", "cosine_restarts")
def cosine_restarts(step: int, total: int, options: TrainConfig) -> float:
    """Return the rate of an update on cosines of P = `period` steps, one after another (SGDR).

        rate(t) = min + (lr - min) (1 + cos(pi k / P)) / 2,    k = (t - w - 1) mod P + 1

    Without a `period` there is a single one of T - w steps.
    Differs from fairseq by one step: a period ends with its lowest rate instead of beginning with its highest.

    Args:
        step: number t of the update, from 1.
        total: updates T of the training.
        options: section `train` of the configuration, with lr, min, P and the warm-up w.

    Returns:
        The learning rate.
    """
    period = options.period or max(1, total - options.warmup_steps)
    k = (step - options.warmup_steps - 1) % period + 1
    return _follow_cosine(math.pi * k / period, options)


@register("schedule", "cosine_wave")
class CosineWave(Schedule):
    """Wave that falls for P = `period` steps and rises for as many.

    It is PyTorch's CosineAnnealingLR with T_max = P, which the released code of Skip Cross-head took for one decay.

        rate(t) = min + (high - min) c(k) / c(min(k, w) - 1)    for 1 <= k <= P,   high = lr min(1, k / w),   if w > 0
                  min + (lr - min) c(k)                         otherwise,         k = t - 1,   c(k) = (1 + cos(pi k / P)) / 2

    Its warm-up is that code's: update 1 has the rate lr, then the rate is set to lr k / w and takes one step of the wave.
    """

    def rate(self, step: int) -> float:
        options = self.options
        done = step - 1
        period = options.period or self.total_steps
        warmup = options.warmup_steps
        low = options.min_learning_rate

        def wave(k: int) -> float:
            return (1 + math.cos(math.pi * k / period)) / 2

        if warmup and 1 <= done <= period:
            high = options.learning_rate * min(1.0, done / warmup)
            return low + (high - low) * wave(done) / wave(min(done, warmup) - 1)
        return low + (options.learning_rate - low) * wave(done)


@register("schedule", "linear")
def linear(step: int, total: int, options: TrainConfig) -> float:
    """Return the rate of an update on a straight line.

        rate(t) = lr + (min - lr) (t - w) / (T - w),    min = `min_learning_rate`

    Args:
        step: number t of the update, from 1.
        total: updates T of the training.
        options: section `train` of the configuration, with lr, min and the warm-up w.

    Returns:
        The learning rate.
    """
    high = options.learning_rate
    return high + (options.min_learning_rate - high) * _compute_decayed_share(step, total, options)


@register("schedule", "inverse_sqrt")
def inverse_sqrt(step: int, total: int, options: TrainConfig) -> float:
    """Return the rate of an update that falls with the inverse square root of its number.

        rate(t) = lr sqrt(max(w, 1) / t),    not below `min_learning_rate`

    With `warmup_from` 1e-7 that is fairseq's, but for one update: its update t has the rate of our t - 1.

    Args:
        step: number t of the update, from 1.
        total: updates T of the training.
        options: section `train` of the configuration, with lr and the warm-up w.

    Returns:
        The learning rate.
    """
    return max(options.min_learning_rate, options.learning_rate * math.sqrt(max(1, options.warmup_steps) / step))


@register("schedule", "plateau")
class Plateau(Schedule):
    """Schedule that lowers the rate when evaluations stop improving.

        rate = lr / k^n,    not below `min_learning_rate`, with k = `plateau_factor`

    n grows by one after more than `plateau_patience` evaluations in a row that do not improve on the best so far.
    """

    best: float | None = None
    waited = 0
    divisions = 0

    def rate_after_warmup(self, step: int) -> float:
        divided = self.options.learning_rate / self.options.plateau_factor**self.divisions
        return max(self.options.min_learning_rate, divided)

    def observe(self, cost: float) -> None:
        if self.best is None or cost < self.best:
            self.best = cost
            self.waited = 0
            return
        self.waited += 1
        if self.waited > self.options.plateau_patience:
            self.waited = 0
            self.divisions = self.divisions + 1

    def state(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited, "divisions": self.divisions}

    def restore(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
