"""The definition of our own models: memory, kernels, and mixing at its start."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fullrank.checking.calls import read_pieces
from fullrank.checking.compare import Pair, compare_pairs, largest
from fullrank.checking.copies import duplicate, list_arguments, mode
from fullrank.checking.report import Finding, inapplicable, judge
from fullrank.checking.subject import Subject
from fullrank.core.config import AttentionConfig, DropoutConfig, ModelConfig, WeightedConfig, stage_name, with_memory
from fullrank.core.errors import InputError
from fullrank.core.mix import starts_plain
from fullrank.kernels import NAMES, chosen, kernel


def rebuild(subject: Subject, config: ModelConfig, *, fresh: bool = False) -> Any:
    """A model of ours of another configuration with the same parameters, or with those of a `fresh` start."""
    model = type(subject.model)(config).to(subject.ids.device)
    if not fresh:
        model = model.to(next(subject.model.parameters()).dtype)
        model.load_state_dict(subject.model.state_dict())
    return model


def change_attention(config: ModelConfig, **changes: Any) -> ModelConfig:
    """`config` with the attention of every place changed."""

    def change(part: Any) -> Any:
        return part.with_known(**changes)

    encoder, decoder = config.encoder, config.decoder
    if encoder is not None and encoder.attention is not None:
        encoder = replace(encoder, attention=change(encoder.attention))
    for key in ("attention", "cross"):
        if decoder is not None and getattr(decoder, key) is not None:
            decoder = replace(decoder, **{key: change(getattr(decoder, key))})
    return config.with_attention(change, encoder=encoder, decoder=decoder)


def attention_by_place(subject: Subject) -> dict[str, AttentionConfig]:
    """Attention of our models by its place: part of a translation model, and layer where `model.layers` says so."""
    config = subject.own.config
    parts = {"": config}
    if subject.translates:
        parts = {"encoder": config.of_encoder(), "decoder": config.of_decoder(), "cross": config.of_cross()}
    places = {}
    for place, part in parts.items():
        for layer, attention in enumerate(part.attentions):
            places[f"{place} layer {layer}".strip() if part.layers else place] = attention
    return places


def call_method(model: Any, name: str, subject: Subject, *args: Any) -> Any:
    """A method of a model of ours for the texts; of a translation model with its sources, too."""
    if not subject.translates:
        return getattr(model, name)(subject.ids, *args)
    return getattr(model, name)(subject.fixed["input_ids"], subject.ids, *args)


def memory(subject: Subject) -> Finding:
    """A text in segments, each after the memory of those before, as in one pass."""
    if subject.translates:
        return inapplicable("a translation model reads sentences, each by itself: it has no memory")
    subject = subject.core.shorten()
    if subject.kind != "fullrank":
        takes = "memory" in list_arguments(subject.model)
        return inapplicable("only the memory of fullrank's models is known" if takes else "forward takes no memory")
    if subject.sees_future:
        return inapplicable(
            f"{subject.sees_future}: tokens see their whole segment, so that it matters where segments end"
        )
    config: ModelConfig = subject.model.config
    if not config.memory_length:
        return inapplicable("model.memory_length is 0: this model has no memory")
    length, ids, pairs = subject.length, subject.ids, list[Pair]()
    without = with_memory(config, 0)  # its memory begins empty, and every token before a segment is seen
    models = {"": (rebuild(subject, with_memory(without, length)), rebuild(subject, without))}
    if config.same_length:  # each token sees as many, wherever segments end
        window = with_memory(without, min(config.memory_length, length // 2), same_length=True)
        models["same_length, "] = (rebuild(subject, window),) * 2
    cuts = [0, length // 3, 2 * length // 3, length], [0, 1, length - 2, length]
    for name, (model, whole) in models.items():

        def step(ids: Tensor, memory: Any, model: Any = model) -> tuple[Tensor, Any]:
            out = model(ids, memory)
            return out.logits.detach(), out.memory

        with mode(model, training=False), mode(whole, training=False):
            with torch.no_grad():
                expected = whole(ids).logits
            for bounds, cached in itertools.product(cuts, (True, False)):
                with torch.set_grad_enabled(not cached):  # keys are kept beside hidden states where nothing is trained
                    logits = read_pieces(ids, bounds, step)
                pairs.append((f"{name}cut at {bounds[1:-1]}{', keys cached' * cached}", logits, expected))
    looked_at = "logits of three segments, the memory as long as the text, beside one pass; with and without gradients"
    return compare_pairs(subject, looked_at, pairs)


# -- mixing at its start ------------------------------------------------------------------------------------------------


def check_plain_start(subject: Subject) -> Finding:
    """Mixing starts as plain attention, bit for bit through one kernel, where the paper says so."""
    subject = subject.core.shorten()
    settings: dict[str, Any] = {}
    if subject.injected:
        from fullrank.hf.inject import settings_of

        settings = settings_of(subject.model) | {"output": None}
        mixes = {"": settings["mix"]}
    elif subject.ours:
        places = attention_by_place(subject)
        mixes = {place: part.mix for place, part in places.items() if isinstance(part, WeightedConfig)}
    else:
        return inapplicable("not a model with a mixing of heads")
    if not mixes:
        return inapplicable("model.attention.kind is multilinear, which has no heads to mix")
    mixed = {place: stage_name(mix) for place, mix in mixes.items() if stage_name(mix) != "none"}
    if not mixed:
        return inapplicable("no mixing: it is plain attention")
    for place, name in mixed.items():
        if not starts_plain(mixes[place]):
            where = f" ({place})" if place else ""
            return inapplicable(f"'{name}' mixing{where} does not start as plain attention, by its definition")
    models = build_injected(subject, settings) if settings else build_fresh(subject)
    with torch.no_grad(), kernel("reference"):
        logits, expected = (subject.logits(subject.ids, model=model) for model in models)
    figure = largest(logits, expected) / max(1.0, float(expected.abs().max()))
    words = ", ".join(f"{place} {mix}".strip() for place, mix in mixed.items())
    precision = str(next(models[0].parameters()).dtype).removeprefix("torch.")
    looked_at = f"logits of a fresh model beside the same with mix: none (mix: {words}), kernel reference, {precision}"
    return judge(looked_at, figure, 0.0, "bit for bit through one kernel")


def build_injected(subject: Subject, settings: dict[str, Any]) -> tuple[Any, Any]:
    """A model of Hugging Face with fresh stages, and the same without mixing."""
    from fullrank.hf.inject import inject, remove

    plain = remove(duplicate(subject.model))
    plain.set_attn_implementation("eager")  # whose weights the kernel reference mixes
    mixed = inject(duplicate(plain), **settings)
    if stage_name(settings["normalize"]) != "softmax":
        plain = inject(plain, **settings | {"mix": "none"})
    return mixed, plain


def build_fresh(subject: Subject) -> tuple[Any, Any]:
    """A fresh model of ours, and the same without mixing."""
    models = []
    for config in (subject.own.config, change_attention(subject.own.config, mix="none")):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            models.append(rebuild(subject, config, fresh=True).eval())
    return models[0], models[1]


# -- kernels ------------------------------------------------------------------------------------------------------------

# the library's promise across kernels, for outputs and gradients: gradients are sums over all tokens of products of outputs
_TOLERANCES = {"fp64": (torch.float64, 1e-12, 1e-11), "fp32": (torch.float32, 1e-6, 1e-5)}


def kernels(subject: Subject, precision: str) -> Finding:
    """Every kernel that can compute the model beside the reference: logits, losses and gradients."""
    subject = subject.core.shorten()
    if not subject.ours and not subject.injected:
        return inapplicable("its kernels are not those of fullrank")
    dtype, of_outputs, of_gradients = _TOLERANCES[precision]
    if subject.injected:  # a whole model that is not ours, parts of which are in fp32 in double precision too
        if dtype.itemsize > subject.dtype.itemsize:
            return inapplicable("the model cannot compute in double precision")
        model, of_outputs, of_gradients = duplicate(subject.model).requires_grad_(), 1e-5, 1e-5
    else:
        model = build_without_chance(subject)
    model = model.to(dtype)
    with kernel("reference"):
        expected = compute_all(subject, model)
    steepest = max(float(tensor.abs().max()) for name, tensor in expected.items() if name.startswith("gradient")) or 1.0
    worst, place, ran, used = 0.0, "", list[str](), set[str]()
    on_cpu = () if subject.ids.is_cuda else ("triton",)  # its interpreter is for tests
    for name in (name for name in NAMES if name not in ("reference", *on_cpu)):
        try:
            with kernel(name), chosen() as taken:
                computed = compute_all(subject, model)
        except InputError:
            if name == "auto":
                raise
            continue  # it does not compute these stages
        ran.append(name)
        used |= taken
        for key, tensor in expected.items():
            is_gradient = key.startswith("gradient")
            scale = steepest * of_gradients if is_gradient else max(1.0, float(tensor.abs().max())) * of_outputs
            share = largest(computed[key], tensor) / scale
            if not share <= worst and not math.isnan(worst):
                worst, place = share, f"{key} ({name})"
    kinds = {part.kind for part in attention_by_place(subject).values()} if subject.ours else set()
    used |= {"multilinear"} & kinds
    remark = f"attention by {', '.join(sorted(used)) or 'reference'}" if worst <= 1 else f"worst: {place}"
    reason = (
        f"logits and losses within {of_outputs:g} of max(1, largest), gradients within {of_gradients:g} of the largest"
    )
    looked_at = (
        f"{', '.join(ran)} beside reference: logits, losses, gradients of all parameters, as shares of what is allowed"
    )
    return judge(looked_at, worst, 1.0, reason, remark=remark)


def build_without_chance(subject: Subject) -> Any:
    """The model of ours without dropout and permutations: different kernels draw different random numbers."""
    config = change_attention(subject.model.config, cross_head=0.0)
    output = config.output.with_known(latent_dropout=0.0, latent_dropout_locked=False, tail_dropout=0.0)
    return rebuild(subject, replace(config, dropout=DropoutConfig(locked=config.dropout.locked), output=output))


def compute_all(subject: Subject, model: Any) -> dict[str, Tensor]:
    """Logits, losses and the gradients of these, by name."""
    targets = subject.draw_tokens(subject.length, 6)
    weights = torch.rand(targets.shape, generator=torch.Generator().manual_seed(4)).to(next(model.parameters()))
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    computed = dict[str, Tensor]()

    def differentiate(name: str, loss: Tensor) -> None:
        computed[name] = loss.detach()
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True, materialize_grads=True)
        computed.update({f"gradient of {p}: {name}": g for p, g in zip(parameters, gradients, strict=True)})

    with mode(model, training=False):
        logits = subject.all_logits(subject.ids, model=model)
        computed["logits"] = logits.detach()
        if not subject.ours:
            nll = -torch.log_softmax(logits, -1).gather(-1, targets[..., None])[..., 0]
            differentiate("nll", (nll * weights).sum())
            return computed
        differentiate("nll", (call_method(model, "nll", subject, targets).per_token * weights).sum())
    with mode(model, training=True):
        differentiate("loss", call_method(model, "loss", subject, targets, weights))
        for side, mask in ({} if subject.translates else subject.masks()).items():
            with torch.no_grad():
                padded = subject.all_logits(subject.ids, mask, model=model)
            computed[f"logits, padded, {side}"] = padded[mask.bool()]
    return computed


CHECKS: dict[str, Callable[[Subject], Finding]] = {  # of models that are made of our parts
    "starts as plain attention": check_plain_start,
    "kernels = reference, fp64": partial(kernels, precision="fp64"),
    "kernels = reference, fp32": partial(kernels, precision="fp32"),
    "memory in segments = one pass": memory,
}
