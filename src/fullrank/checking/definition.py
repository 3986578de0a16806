"""The definition of our own models: whole sources, memory, probabilities, kernels, and mixing at its start."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fullrank.checking.agreement import pad_sources, read_pieces
from fullrank.checking.compare import Pair, compare_pairs, largest, rounding, tolerance
from fullrank.checking.copies import duplicate, list_arguments, mode
from fullrank.checking.paths import open_decoder
from fullrank.checking.report import Finding, bounded, inapplicable
from fullrank.checking.subject import ROWS, SIDES, Subject
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


def whole_source(subject: Subject) -> Finding:
    """Every token of the source moves every state of the encoder, and the logits of every token of the target."""
    model, sources = subject.model, subject.fixed["input_ids"]
    unmoved, remark = 0, ""

    def read(sources: Tensor) -> dict[str, Tensor]:
        logits = replace(subject, fixed={"input_ids": sources}).logits(subject.ids)
        return {"state": model.encode(sources).hidden, "logits of target token": logits}

    with torch.no_grad(), mode(model, training=False):
        before = read(sources)
        for position in range(sources.shape[1]):
            other = sources.clone()
            other[:, position] = (other[:, position] + 1) % model.encoder.config.vocab_size
            for what, after in read(other).items():
                off = (after - before[what]).abs().amax(2)  # (3, M) or (3, N)
                still = (off <= 1e-13 * float(before[what].abs().max())).nonzero()
                unmoved += len(still)
                if len(still) and not remark:
                    remark = f"token {position} (from 0) of the source is not seen by {what} {int(still[0, 1])}"
    count = sources.shape[1]
    looked_at = f"encoder states and logits after each of {count} tokens of the source was changed; unmoved ones"
    return bounded(looked_at, float(unmoved), 0.0, "each token is a part of every state", remark=remark)


def memory(subject: Subject) -> Finding:
    """A text in segments, each after the memory of those before, as in one pass."""
    if subject.translates:
        return inapplicable("a translation model reads sentences, each by itself: it has no memory")
    subject = subject.core
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


def probabilities(subject: Subject) -> Finding:
    """Probabilities of the vocabulary layer sum to one, and its nll is that of its log-probabilities."""
    subject = subject.core
    if not subject.ours:
        return inapplicable("its logits go through a softmax, after which anything sums to one")
    model, ids = subject.model, subject.ids
    epsilon = float(model.config.output.epsilon)
    targets = subject.tokens(ROWS, subject.length, 6)
    with torch.no_grad(), mode(model, training=False):
        log_prob = subject.log_prob(ids)
        nll = subject.compute("nll", ids, targets).per_token
        logits = subject.all_logits(ids)
    total = float((log_prob.double().logsumexp(-1).exp() - 1).abs().max())
    picked = largest(nll, -log_prob.gather(-1, targets[..., None])[..., 0])
    normalised = largest(torch.log_softmax(logits, -1), torch.log_softmax(log_prob, -1))
    limit = tolerance(subject.dtype) * max(1.0, float(log_prob.abs().max())) + subject.vocab_size * epsilon
    reason = rounding(subject.dtype) + (f", and V epsilon with model.output.epsilon {epsilon:g}" if epsilon else "")
    looked_at = (
        "sums of exp(log_prob) over the vocabulary; nll beside the log_prob of the target, logits beside log_prob"
    )
    return bounded(looked_at, max(total, picked, normalised), limit, reason)


# -- mixing at its start ------------------------------------------------------------------------------------------------


def plain_start(subject: Subject) -> Finding:
    """Mixing starts as plain attention, bit for bit through one kernel, where the paper says so."""
    subject = subject.core
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
    figures = {}
    with torch.no_grad():
        for kind in ("reference", "auto"):
            with kernel(kind):
                logits, expected = (subject.logits(subject.ids, model=model) for model in models)
            figures[kind] = largest(logits, expected) / max(1.0, float(expected.abs().max()))
    remark = f"fastest kernels, which need not be the same: {figures['auto']:.1e} of 1e-06"
    # across kernels the promise is 1e-6; the figure is that of one kernel unless the other is broken
    figure = figures["reference"] if figures["auto"] <= 1e-6 else max(figures.values())
    words = ", ".join(f"{place} {mix}".strip() for place, mix in mixed.items())
    precision = str(next(models[0].parameters()).dtype).removeprefix("torch.")
    looked_at = f"logits of a fresh model beside the same with mix: none (mix: {words}), kernel reference, {precision}"
    return bounded(looked_at, figure, 0.0, "bit for bit through one kernel", remark=remark)


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

# fp32: the library's promise across kernels. Gradients are sums over all tokens of products of such outputs.
_TOLERANCES = {"fp64": (torch.float64, 1e-12, 1e-11), "fp32": (torch.float32, 1e-6, 1e-5)}


def kernels(subject: Subject, precision: str) -> Finding:
    """Every kernel that can compute the model beside the reference: outputs, losses and gradients."""
    subject = subject.core
    if not subject.ours and not subject.injected:
        return inapplicable("its kernels are not those of fullrank")
    dtype, outputs, steepest = _TOLERANCES[precision]
    if subject.injected:  # a whole model that is not ours, parts of which are in fp32 in double precision too
        if dtype.itemsize > subject.dtype.itemsize:
            return inapplicable("the model cannot compute in double precision")
        model, outputs, steepest = duplicate(subject.model).requires_grad_(), 1e-5, 1e-5
    else:
        model = build_without_chance(subject)
    model = model.to(dtype)
    with kernel("reference"):
        expected = compute_all(subject, model)
    scales = {key: max(1.0, float(tensor.abs().max())) for key, tensor in expected.items()}
    gradients = [key for key in expected if key.startswith("gradient")]
    scales |= dict.fromkeys(gradients, max(float(expected[key].abs().max()) for key in gradients) or 1.0)
    worst, ran, used = dict[str, tuple[float, str]](), [], set[str]()
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
            kind, _, tensor_name = key.partition(" of ")
            share = largest(computed[key], tensor) / scales[key]
            if kind not in worst or order_share(share) > order_share(worst[kind][0]):
                worst[kind] = (share, f"{tensor_name} ({name})")
    limits = {kind: steepest if kind == "gradient" else outputs for kind in worst}
    remark = "; ".join(f"{kind} {share:.1e}" for kind, (share, _) in worst.items())
    if wrong := [kind for kind, (share, _) in worst.items() if not share <= limits[kind]]:
        remark += "; worst: " + ", ".join(f"{kind} of {worst[kind][1]}" for kind in wrong)
    else:
        kinds = {part.kind for part in attention_by_place(subject).values()} if subject.ours else set()
        used |= {"multilinear"} & kinds
        remark += f"; attention by {', '.join(sorted(used)) or 'reference'}"
        if used == {"reference"}:
            remark += " (no fast kernel computes these stages), the vocabulary layer by its fast one"
    # one figure: how far the worst is, in the tolerance of outputs
    figure = max((share / limits[kind] * outputs for kind, (share, _) in worst.items()), key=order_share)
    reason = (
        f"outputs, nll and losses within {outputs:g} of max(1, largest), gradients within {steepest:g} of the largest "
        "(the figure in proportion)"
    )
    context = "of beams" if subject.translates else "after a memory"
    outputs_of = f"logits (padded, {context}), log-probabilities, nll, loss"
    modes = "training and evaluation"
    if subject.injected:
        outputs_of, modes = "logits, nll", "evaluation"
    looked_at = f"{', '.join(ran)} beside reference: {outputs_of}, gradients of all parameters; {modes}, no dropout"
    return bounded(looked_at, figure, outputs, reason, remark=remark)


def build_without_chance(subject: Subject) -> Any:
    """The model of ours without dropout and permutations: different kernels draw different random numbers."""
    config = change_attention(subject.model.config, cross_head=0.0)
    output = config.output.with_known(latent_dropout=0.0, latent_dropout_locked=False, tail_dropout=0.0)
    return rebuild(subject, replace(config, dropout=DropoutConfig(locked=config.dropout.locked), output=output))


def order_share(share: float) -> tuple[bool, float]:
    """Key of a maximum in which nothing is worse than NaN."""
    return math.isnan(share), share


def compute_all(subject: Subject, model: Any) -> dict[str, Tensor]:
    """Outputs and gradients of a model by name; the word before ` of ` says what kind it is."""
    ids, out, subject = subject.ids, dict[str, Tensor](), replace(subject, model=model)
    targets = subject.tokens(len(ids), subject.length, 6)
    weights = torch.rand(ids.shape, generator=torch.Generator().manual_seed(4)).to(next(model.parameters()))

    def differentiate(scalar: Tensor, name: str) -> None:
        model.zero_grad(set_to_none=True)
        scalar.backward()
        for parameter, p in model.named_parameters():
            if p.requires_grad:
                out[f"gradient of {parameter}: {name}"] = torch.zeros_like(p) if p.grad is None else p.grad.clone()

    if not subject.ours:
        with mode(model, training=False):
            logits = subject.all_logits(ids)
            out["output of logits, evaluation"] = logits.detach()
            nll = -torch.log_softmax(logits, -1).gather(-1, targets[..., None])[..., 0]
            differentiate((nll * weights).sum(), "nll, evaluation")
        return out
    sides = {"": subject}
    if subject.translates:
        sides |= {f", source padded on the {side}": padded for side, padded in pad_sources(subject).items()}
    for training, where in ((False, "evaluation"), (True, "training")):
        with mode(model, training=training):
            for side, one in sides.items():
                with torch.no_grad():
                    out[f"output of logits{side}, {where}"] = one.all_logits(ids)
                    out[f"output of log-probabilities{side}, {where}"] = one.log_prob(ids)
                    out |= compute_beams(one, f"{side}, {where}")
                nll = one.compute("nll", ids, targets).per_token
                out[f"nll of tokens{side}, {where}"] = nll.detach()
                if not training:  # without dropout training computes the same; there the loss is differentiated
                    differentiate((nll * weights).sum(), f"nll{side}, {where}")
            with torch.no_grad():
                out |= compute_padded(subject, where)
            if training:
                loss = subject.compute("loss", ids, targets, weights, label_smoothing=0.1)
                out[f"loss of tokens, {where}"] = loss.detach()
                differentiate(loss, f"loss, {where}")
            if subject.kind == "fullrank" and model.config.memory_length:
                half = subject.length // 2
                with torch.no_grad():  # keys are kept beside hidden states
                    memory = model(ids[:, :half]).memory
                    out[f"output of logits after a memory, {where}"] = model(ids[:, half:], memory).logits
                memory = model(ids[:, :half]).memory
                loss = model.loss(ids[:, half:], targets[:, half:], memory=memory)
                differentiate(loss, f"loss after a memory, {where}")
    return out


def compute_beams(subject: Subject, where: str) -> dict[str, Tensor]:
    """Logits of a translation model with two beams a source."""
    if not subject.translates or subject.sees_future:
        return {}
    decoder = open_decoder(subject, subject.model)
    twice = torch.arange(ROWS, device=subject.ids.device).repeat_interleave(2)
    cache = decoder.new_cache().reorder(twice)
    return {f"output of logits of beams{where}": decoder(subject.ids[twice], cache=cache).logits}


def compute_padded(subject: Subject, where: str) -> dict[str, Tensor]:
    """Logits of padded texts."""
    masks = {} if subject.translates else subject.masks()
    return {
        f"output of logits, {SIDES[side]}, {where}": subject.all_logits(subject.ids, mask)[mask.bool()]
        for side, mask in masks.items()
    }
