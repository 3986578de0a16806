"""Our models beside their definition: fast kernels and the reference, mixing at its start and plain attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fullrank.checking.finding import Check, Finding, inapplicable, judged, largest
from fullrank.checking.future import masks_of
from fullrank.checking.subject import Subject, logits_in, mode
from fullrank.core import registry
from fullrank.core.config import DropoutConfig, ModelConfig, stage_name
from fullrank.core.errors import InputError
from fullrank.core.multilinear import MultiLinear
from fullrank.core.weighted import WeightedValues
from fullrank.kernels import NAMES, chosen, kernel, kernel_for, reference

# fp32: the library's promise across kernels. Gradients are sums over all tokens of products of such outputs.
_TOLERANCES = {"fp64": (torch.float64, 1e-12, 1e-11), "fp32": (torch.float32, 1e-6, 1e-5)}


def kernels(
    subject: Subject,
    precision: str,
    quiet: Callable[[Subject], Any] | None = None,
    computed: Callable[[Subject, Any], Mapping[str, Tensor]] | None = None,
) -> Finding:
    """Every kernel that can compute the model beside the reference: outputs, losses and gradients.

    quiet: makes the model without randomness; computed: what is compared. By default, of a language model.
    """
    if not subject.ours:
        return inapplicable("its kernels are not those of fullrank")
    dtype, outputs, steepest = _TOLERANCES[precision]
    computed = computed or _computed
    model = (quiet or _quiet)(subject).to(dtype)
    with kernel("reference"):
        expected = computed(subject, model)
    worst: dict[str, float] = {}
    names: dict[str, str] = {}
    ran = []
    used: set[str] = set()
    for name in (name for name in NAMES if name != "reference"):
        try:
            with kernel(name), chosen() as taken:
                found = computed(subject, model)
        except InputError:
            if name == "auto":
                raise
            continue  # it does not compute these stages
        ran.append(name)
        used |= taken
        largest_gradient = max(float(t.abs().max()) for key, t in expected.items() if key.startswith("gradient"))
        for key, wanted in expected.items():
            kind = key.partition(" of ")[0]
            scale = largest_gradient if kind == "gradient" else max(1.0, float(wanted.abs().max()))
            share = largest(found[key], wanted) / (scale or 1.0)
            known = worst.get(kind, -1.0)
            if known == known and not share <= known:  # nothing is worse than what is no number
                worst[kind], names[kind] = share, f"{key.partition(' of ')[2]} ({name})"
    limits = {kind: steepest if kind == "gradient" else outputs for kind in worst}
    layers = [module for module in model.modules() if isinstance(module, WeightedValues | MultiLinear)]
    used |= {by_stages for module in layers if (by_stages := _by_stages(module)) is not None}
    remark = "; ".join(f"{kind} {share:.1e}" for kind, share in worst.items())
    if bad := [kind for kind in worst if not worst[kind] <= limits[kind]]:
        remark += "; worst: " + ", ".join(f"{kind} of {names[kind]}" for kind in bad)
    elif used:
        remark += f"; attention by {', '.join(sorted(used))}" + (
            " (no fast kernel computes these stages), the vocabulary layer by its fast one"
            if used == {"reference"}
            else ""
        )
    # one figure: how far the worst is, in the tolerance of outputs
    figure = max((worst[kind] / limits[kind] * outputs for kind in worst), key=lambda share: (share != share, share))
    reason = (
        f"outputs, nll and losses within {outputs:g} of max(1, largest), gradients within {steepest:g} of the largest "
        "(the figure in proportion)"
    )
    context = "of beams" if subject.kind == "translator" else "after a memory"
    looked_at = (
        f"{', '.join(ran)} beside reference: logits (padded, {context}), log-probabilities, nll, loss, gradients of all "
        "parameters; training and evaluation, no dropout"
    )
    return judged(looked_at, figure, outputs, reason, remark=remark)


def _by_stages(attend: WeightedValues | MultiLinear) -> str | None:
    """The kernel that "auto" takes, where that does not depend on the tensors."""
    if isinstance(attend, MultiLinear):
        return "multilinear"
    return "reference" if kernel_for(attend, tracing=False) is reference else None


def _quiet(subject: Subject) -> Any:
    """The model without dropout and permutations: different kernels draw different random numbers."""
    model: Any = subject.model
    config: ModelConfig = model.config
    quiet = replace(
        config,
        dropout=DropoutConfig(locked=config.dropout.locked),
        attention=replace(config.attention, cross_head=0.0),
        output=replace(config.output, latent_dropout=0.0, latent_dropout_locked=False, tail_dropout=0.0),
    )
    same = type(model)(quiet).to(subject.ids.device, next(model.parameters()).dtype)
    same.load_state_dict(model.state_dict())
    return same


def _computed(subject: Subject, model: Any) -> Mapping[str, Tensor]:
    """Outputs and gradients by name; the word before ` of ` says what kind it is."""
    ids, found, half = subject.ids, {}, subject.length // 2
    targets = subject.tokens(len(ids), subject.length, 6)
    weights = torch.rand(ids.shape, generator=torch.Generator().manual_seed(4)).to(ids.device)
    for training in (False, True):
        where = "training" if training else "evaluation"
        with mode(model, training=training):
            with torch.no_grad():
                found[f"output of logits, {where}"] = logits_in(model(ids))
                found[f"output of log-probabilities, {where}"] = model.output.log_prob(model.hidden(ids).hidden)
                for side, mask in masks_of(subject).items():
                    padded = logits_in(model(ids, attention_mask=mask))
                    found[f"output of logits, padding on the {side}, {where}"] = padded[mask.bool()]
                if model.memory_length:
                    memory = model(ids[:, :half]).memory
                    found[f"output of logits after a memory, {where}"] = logits_in(model(ids[:, half:], memory))
            model.zero_grad(set_to_none=True)
            nll = model.nll(ids, targets).per_token
            (nll * weights.to(nll)).sum().backward()
            found[f"nll of tokens, {where}"] = nll.detach()
            found |= gradients(model, f"nll, {where}")
            for smoothing in (0.0, 0.1):
                model.zero_grad(set_to_none=True)
                loss = model.loss(ids, targets, weights.to(nll), label_smoothing=smoothing)
                loss.backward()
                found[f"loss of tokens, label_smoothing {smoothing}, {where}"] = loss.detach()
                found |= gradients(model, f"loss, label_smoothing {smoothing}, {where}")
            if model.memory_length:
                model.zero_grad(set_to_none=True)
                memory = model(ids[:, :half]).memory
                model.loss(ids[:, half:], targets[:, half:], memory=memory).backward()
                found |= gradients(model, f"loss after a memory, {where}")
    model.zero_grad(set_to_none=True)
    return found


def gradients(model: Any, of: str) -> dict[str, Tensor]:
    return {
        f"gradient of {name}: {of}": torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
        if p.requires_grad
    }


# -- the start --------------------------------------------------------------------------------------------------------


def plain_start(subject: Subject) -> Finding:
    """Where the paper says so, mixing starts as plain attention: bit for bit through one kernel."""
    if subject.kind != "fullrank":
        return inapplicable("not a model with a mixing of heads")
    own: Any = subject.own
    config: ModelConfig = own.config
    mix = stage_name(config.attention.mix)
    if config.attention.kind != "weighted":
        return inapplicable(f"model.attention.kind is {config.attention.kind}, which has no heads to mix")
    if mix == "none":
        return inapplicable("no mixing: it is plain attention")
    if not getattr(registry.lookup("mix", mix), "starts_plain", True):
        return inapplicable(f"'{mix}' mixing does not start as plain attention, by its definition")
    plain = replace(config, attention=replace(config.attention, mix="none"))
    found = []
    for made in (config, plain):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            found.append(type(own)(made).to(subject.ids.device).eval())
    figures = {}
    with torch.no_grad():
        for name in ("reference", "auto"):
            with kernel(name):
                given, expected = (logits_in(model(subject.ids)) for model in found)
            figures[name] = largest(given, expected) / max(1.0, float(expected.abs().max()))
    remark = f"fastest kernels, which need not be the same: {figures['auto']:.1e} of 1e-06"
    # across kernels the promise is 1e-6; the figure is that of one kernel unless the other is broken
    off = figures["reference"] if figures["auto"] <= 1e-6 else max(figures.values())
    looked_at = f"logits of a fresh model beside the same with mix: none (mix: {mix}), kernel reference, fp32"
    return judged(looked_at, off, 0.0, "bit for bit through one kernel", remark=remark)


def definitions(subject: Subject) -> list[Check]:
    """All of them, not yet run."""
    return [
        ("starts as plain attention", lambda: plain_start(subject)),
        ("kernels = reference, fp64", lambda: kernels(subject, "fp64")),
        ("kernels = reference, fp32", lambda: kernels(subject, "fp32")),
    ]
