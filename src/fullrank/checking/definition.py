"""Our models beside their definition: every kernel and the reference, mixing at its start and plain attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fullrank.checking.report import Check, Finding, bounded, inapplicable, largest
from fullrank.checking.subject import Subject, call, everywhere, log_prob, logits_in, mode
from fullrank.core import registry
from fullrank.core.config import DropoutConfig, WeightedConfig, stage_name
from fullrank.core.errors import InputError
from fullrank.kernels import NAMES, chosen, kernel


def definitions(subject: Subject) -> list[Check]:
    """All of them, not yet run."""
    return [
        ("starts as plain attention", lambda: plain_start(subject)),
        ("kernels = reference, fp64", lambda: kernels(subject, "fp64")),
        ("kernels = reference, fp32", lambda: kernels(subject, "fp32")),
    ]


def plain_start(subject: Subject) -> Finding:
    """Where the paper says so, mixing starts as plain attention: bit for bit through one kernel."""
    if not subject.ours:
        return inapplicable("not a model with a mixing of heads")
    mixes = {place: stage_name(p.mix) for place, p in subject.attention.items() if isinstance(p, WeightedConfig)}
    if not mixes:
        return inapplicable("model.attention.kind is multilinear, which has no heads to mix")
    mixed = {place: mix for place, mix in mixes.items() if mix != "none"}
    if not mixed:
        return inapplicable("no mixing: it is plain attention")
    for place, mix in mixed.items():
        if not registry.lookup("mix", mix).starts_plain:
            where = f" ({place})" if place else ""
            return inapplicable(f"'{mix}' mixing{where} does not start as plain attention, by its definition")
    config = subject.own.config
    models = []
    for settings in (config, everywhere(config, mix="none")):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            models.append(subject.rebuilt(settings, fresh=True).eval())
    figures = {}
    with torch.no_grad():
        for name in ("reference", "auto"):
            with kernel(name):
                logits, expected = (call(model, subject.ids) for model in models)
            figures[name] = largest(logits, expected) / max(1.0, float(expected.abs().max()))
    remark = f"fastest kernels, which need not be the same: {figures['auto']:.1e} of 1e-06"
    # across kernels the promise is 1e-6; the figure is that of one kernel unless the other is broken
    off = figures["reference"] if figures["auto"] <= 1e-6 else max(figures.values())
    words = ", ".join(f"{place} {mix}".strip() for place, mix in mixed.items())
    looked_at = f"logits of a fresh model beside the same with mix: none (mix: {words}), kernel reference, fp32"
    return bounded(looked_at, off, 0.0, "bit for bit through one kernel", remark=remark)


# fp32: the library's promise across kernels. Gradients are sums over all tokens of products of such outputs.
_TOLERANCES = {"fp64": (torch.float64, 1e-12, 1e-11), "fp32": (torch.float32, 1e-6, 1e-5)}


def kernels(subject: Subject, precision: str) -> Finding:
    """Every kernel that can compute the model beside the reference: outputs, losses and gradients."""
    if not subject.ours:
        return inapplicable("its kernels are not those of fullrank")
    dtype, outputs, steepest = _TOLERANCES[precision]
    # without dropout and permutations: different kernels draw different random numbers
    config = everywhere(subject.model.config, cross_head=0.0)
    output = config.output.with_known(latent_dropout=0.0, latent_dropout_locked=False, tail_dropout=0.0)
    config = replace(config, dropout=DropoutConfig(locked=config.dropout.locked), output=output)
    model = subject.rebuilt(config).to(dtype)
    with kernel("reference"):
        expected = _computed(subject, model)
    scales = {key: max(1.0, float(tensor.abs().max())) for key, tensor in expected.items()}
    gradients = [key for key in expected if key.startswith("gradient")]
    scales |= dict.fromkeys(gradients, max(float(expected[key].abs().max()) for key in gradients) or 1.0)
    worst: dict[str, tuple[float, str]] = {}
    ran, used = [], set[str]()
    for name in NAMES:
        if name == "reference" or (
            name == "triton" and not subject.ids.is_cuda
        ):  # its interpreter on a CPU is for tests
            continue
        try:
            with kernel(name), chosen() as taken:
                computed = _computed(subject, model)
        except InputError:
            if name == "auto":
                raise
            continue  # it does not compute these stages
        ran.append(name)
        used |= taken
        for key, tensor in expected.items():
            kind, _, of = key.partition(" of ")
            share = largest(computed[key], tensor) / scales[key]
            known = worst.get(kind, (-1.0, ""))[0]
            if known == known and not share <= known:  # nothing is worse than NaN
                worst[kind] = share, f"{of} ({name})"
    limits = {kind: steepest if kind == "gradient" else outputs for kind in worst}
    remark = "; ".join(f"{kind} {share:.1e}" for kind, (share, _) in worst.items())
    if bad := [kind for kind, (share, _) in worst.items() if not share <= limits[kind]]:
        remark += "; worst: " + ", ".join(f"{kind} of {worst[kind][1]}" for kind in bad)
    else:
        used |= {"multilinear"} & {part.kind for part in subject.attention.values()}
        remark += f"; attention by {', '.join(sorted(used))}"
        if used == {"reference"}:
            remark += " (no fast kernel computes these stages), the vocabulary layer by its fast one"
    # one figure: how far the worst is, in the tolerance of outputs
    shares = [share / limits[kind] * outputs for kind, (share, _) in worst.items()]
    figure = max(shares, key=lambda share: (share != share, share))
    reason = (
        f"outputs, nll and losses within {outputs:g} of max(1, largest), gradients within {steepest:g} of the largest "
        "(the figure in proportion)"
    )
    context = "of beams" if subject.kind == "translator" else "after a memory"
    looked_at = (
        f"{', '.join(ran)} beside reference: logits (padded, {context}), log-probabilities, nll, loss, gradients of all "
        "parameters; training and evaluation, no dropout"
    )
    return bounded(looked_at, figure, outputs, reason, remark=remark)


def _computed(subject: Subject, model: Any) -> Mapping[str, Tensor]:
    """Outputs and gradients by name; the word before ` of ` says what kind it is."""
    ids, out, half = subject.ids, dict[str, Tensor](), subject.length // 2
    translates = subject.kind == "translator"
    targets = subject.tokens(len(ids), subject.length, 6)
    weights = torch.rand(ids.shape, generator=torch.Generator().manual_seed(4)).to(
        ids.device, dtype=next(model.parameters()).dtype
    )
    sides = {"": model}
    if translates:
        sides |= {f", source padded on the {side}": padded for side, padded in model.padded_sources().items()}

    def differentiate(scalar: Tensor, name: str) -> None:
        model.zero_grad(set_to_none=True)
        scalar.backward()
        for parameter, p in model.named_parameters():
            if p.requires_grad:
                out[f"gradient of {parameter}: {name}"] = torch.zeros_like(p) if p.grad is None else p.grad.clone()

    for training, where in ((False, "evaluation"), (True, "training")):
        with mode(model, training=training):
            for side, one in sides.items():
                with torch.no_grad():
                    out[f"output of logits{side}, {where}"] = call(one, ids)
                    out[f"output of log-probabilities{side}, {where}"] = log_prob(one, ids)
                    if translates and not subject.sees_future:
                        decoder = one.decoder_of_sources()
                        twice = torch.arange(len(ids), device=ids.device).repeat_interleave(2)
                        logits = decoder(ids[twice], cache=decoder.new_cache().reorder(twice)).logits
                        out[f"output of logits of beams{side}, {where}"] = logits
                nll = one.nll(ids, targets).per_token
                out[f"nll of tokens{side}, {where}"] = nll.detach()
                differentiate((nll * weights).sum(), f"nll{side}, {where}")
            for smoothing in (0.0, 0.1):
                loss = model.loss(ids, targets, weights, label_smoothing=smoothing)
                out[f"loss of tokens, label_smoothing {smoothing}, {where}"] = loss.detach()
                differentiate(loss, f"loss, label_smoothing {smoothing}, {where}")
            if translates:
                continue
            with torch.no_grad():
                for side, mask in subject.masks().items():
                    out[f"output of logits, padding on the {side}, {where}"] = call(model, ids, mask)[mask.bool()]
            if model.config.memory_length:
                with torch.no_grad():
                    memory = model(ids[:, :half]).memory
                    out[f"output of logits after a memory, {where}"] = logits_in(model(ids[:, half:], memory))
                memory = model(ids[:, :half]).memory
                loss = model.loss(ids[:, half:], targets[:, half:], memory=memory)
                differentiate(loss, f"loss after a memory, {where}")
    return out
