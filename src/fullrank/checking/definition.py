"""The definition of our own models: memory, kernels, and mixing at its start."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fullrank.checking.agreement import compare, compare_pieces
from fullrank.checking.calls import Run
from fullrank.checking.copies import build_without_chance, change_attention, duplicate, list_attentions, mode, rebuild
from fullrank.checking.report import Finding, inapplicable, judge, largest
from fullrank.checking.subject import Subject
from fullrank.core.config import ModelConfig, WeightedConfig, stage_name, with_memory
from fullrank.core.errors import InputError
from fullrank.core.stages import starts_plain
from fullrank.forward import logits_in
from fullrank.kernels import NAMES, kernel


def memory(run: Run) -> Finding:
    """Compare a text in segments, each read after the memory of those before, with one pass."""
    subject = run.subject.core
    if subject.kind != "fullrank":
        return inapplicable("only the memory of fullrank's language models is known")
    if subject.sees_future:
        why = "tokens see their whole segment, so that it matters where segments end"
        return inapplicable(f"{subject.sees_future}: {why}")
    config: ModelConfig = subject.model.config
    if not config.memory_length:
        return inapplicable("model.memory_length is 0: this model has no memory")
    length = subject.length
    without = with_memory(config, 0)  # it begins empty, and all before a segment is seen
    model = rebuild(subject.model, with_memory(without, length))
    one_pass = rebuild(subject.model, without)
    if config.same_length:  # each token sees as many, wherever segments end
        model = one_pass = rebuild(
            subject.model, with_memory(without, min(config.memory_length, length // 2), same_length=True)
        )

    def step(ids: Tensor, memory: Any) -> tuple[Tensor, Any]:
        out = model(ids, memory)
        return subject.select(out.logits.detach()), out.memory

    run = Run(replace(subject, model=one_pass), run.call)
    comparisons = []
    with mode(model, training=False):
        expected = run.read(subject.ids)
        for cuts, cached in itertools.product(((length // 3, 2 * length // 3), (1, length - 2)), (True, False)):
            name = f"cut at {cuts}{', keys cached' * cached}"
            with torch.set_grad_enabled(not cached):  # keys are kept beside hidden states where nothing is trained
                comparisons += compare_pieces(name, expected, subject.ids, (0, *cuts, length), step)
    looked_at = "logits of three segments after their memory, beside one pass; with and without gradients"
    return compare(replace(run, subject=replace(subject, model=model)), comparisons, looked_at)


def check_plain_start(run: Run) -> Finding:
    """Check that mixing starts as plain attention, bit for bit through one kernel, where the paper says so."""
    subject = run.subject.core
    mixes, *models = build_injected(subject) if subject.injected else build_fresh(subject)
    if not mixes:
        return inapplicable("model.attention.kind is multilinear, which has no heads to mix")
    for mix in mixes:
        if not starts_plain(mix):
            return inapplicable(f"'{stage_name(mix)}' mixing does not start as plain attention, by its definition")
    names = dict.fromkeys(stage_name(mix) for mix in mixes if stage_name(mix) != "none")
    if not names:
        return inapplicable("no mixing: it is plain attention")
    with torch.no_grad(), kernel("reference"):
        logits, expected = (replace(subject, model=model).logits(subject.ids) for model in models)
    figure = largest(logits, expected) / max(1.0, float(expected.abs().max()))
    looked_at = f"logits of a fresh model beside the same with mix: none (mix: {', '.join(names)}), kernel reference"
    return judge(looked_at, figure, 0.0, "bit for bit through one kernel")


def build_fresh(subject: Subject) -> tuple[list[Any], Any, Any]:
    """Build a fresh model like a model of ours, and the same without mixing; return its mixings and the two."""
    config: ModelConfig = subject.original.config
    attentions = list_attentions(config, translates=subject.kind == "translator")
    models = []
    for variant in (config, change_attention(config, mix="none")):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            models.append(type(subject.model)(variant).to(subject.ids.device).eval())
    return [attention.mix for attention in attentions if isinstance(attention, WeightedConfig)], models[0], models[1]


def build_injected(subject: Subject) -> tuple[list[Any], Any, Any]:
    """Build an injected model with fresh stages, and the same without mixing; return its mixing and the two."""
    from fullrank.hf.inject import inject, remove, settings_of

    settings = settings_of(subject.model)
    plain = remove(duplicate(subject.model))
    plain.set_attn_implementation("eager")  # whose weights the kernel reference mixes
    mixed = inject(duplicate(plain), **settings)
    if stage_name(settings["normalize"]) != "softmax":
        plain = inject(plain, **settings | {"mix": "none"})
    return [settings["mix"]], mixed, plain


# the library's promise across kernels, for outputs and gradients: gradients are sums over all tokens of products of outputs
_TOLERANCES = {torch.float64: (1e-12, 1e-11), torch.float32: (1e-6, 1e-5)}


def kernels(run: Run, dtype: torch.dtype) -> Finding:
    """Compare every kernel that can compute the model with the reference: logits, losses and gradients."""
    subject = run.subject.core
    of_outputs, of_gradients = _TOLERANCES[dtype]
    if subject.injected:  # a whole model that is not ours, parts of which are in fp32 in double precision too
        if dtype.itemsize > subject.dtype.itemsize:
            return inapplicable("the model cannot compute in double precision")
        model = duplicate(subject.model).to(dtype)
        of_outputs = of_gradients = 1e-5
    else:
        model = build_without_chance(subject.model).to(dtype)
    subject = replace(subject, model=model)
    with kernel("reference"):
        expected = compute_all(subject)
    sizes = {name: float(tensor.abs().max()) for name, tensor in expected.items()}
    steepest = max(size for name, size in sizes.items() if name.startswith("gradient")) or 1.0
    shares = {}
    ran = []
    skipped = ["reference"] if subject.ids.is_cuda else ["reference", "triton"]  # whose interpreter is for tests
    for name in (name for name in NAMES if name not in skipped):
        try:
            with kernel(name):
                computed = compute_all(subject)
        except InputError:
            if name == "auto":
                raise
            continue  # it does not compute these stages
        ran.append(name)
        for key, tensor in expected.items():
            is_gradient = key.startswith("gradient")
            allowed = steepest * of_gradients if is_gradient else max(1.0, sizes[key]) * of_outputs
            shares[f"{key} ({name})"] = largest(computed[key], tensor) / allowed
    looked_at = f"{', '.join(ran)} beside reference: logits, losses and all gradients, as shares of what is allowed"
    reason = f"logits and losses within {of_outputs:g} of max(1, largest), gradients {of_gradients:g} of the largest"
    worst = max(shares, key=shares.__getitem__)
    return judge(looked_at, shares[worst], 1.0, reason, f"worst: {worst}")


def compute_all(subject: Subject) -> dict[str, Tensor]:
    """Compute logits, losses and the gradients of these, by name."""
    model = subject.model
    texts = (subject.fixed["input_ids"], subject.ids) if subject.kind == "translator" else (subject.ids,)
    targets = subject.draw_tokens(subject.length, 6)
    is_ours = subject.kind != "hugging_face"
    weights = torch.rand(targets.shape, generator=torch.Generator().manual_seed(4)).to(next(model.parameters()))
    computed = {}
    losses = {}
    with mode(model, training=False):
        computed["logits"] = logits_in(subject.call(subject.ids))
        if is_ours:
            nll = model.nll(*texts, targets).per_token
        else:
            nll = nn.functional.cross_entropy(computed["logits"].mT, targets, reduction="none")
        losses["nll"] = (nll * weights).sum()
        if subject.kind == "fullrank":
            for side, mask in subject.masks().items():
                padded = logits_in(subject.call(subject.ids, mask))
                computed[f"logits, padded, {side}"] = padded[mask.bool()]
    if is_ours:
        with mode(model, training=True):
            losses["loss"] = model.loss(*texts, targets, weights)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for name, loss in losses.items():
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True, materialize_grads=True)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            computed[f"gradient of {parameter}: {name}"] = gradient
    return {name: tensor.detach() for name, tensor in (computed | losses).items()}


CHECKS: dict[str, Callable[[Run], Finding]] = {  # of models that are made of our parts, or have some inside
    "starts as plain attention": check_plain_start,
    "kernels = reference, fp64": partial(kernels, dtype=torch.float64),
    "kernels = reference, fp32": partial(kernels, dtype=torch.float32),
    "memory in segments = one pass": memory,
}
