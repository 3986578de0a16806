"""The definition of our own models: whole sources, memory, probabilities, kernels, and mixing at its start."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fullrank.checking.agreement import close, segments
from fullrank.checking.report import Finding, bounded, inapplicable, largest, rounding, tolerance
from fullrank.checking.subject import ROWS, Subject, accepted, duplicate, everywhere, log_prob, mode
from fullrank.core.config import DropoutConfig, ModelConfig, WeightedConfig, stage_name, with_memory
from fullrank.core.errors import InputError
from fullrank.core.mix import starts_plain
from fullrank.kernels import NAMES, chosen, kernel
from fullrank.models import logits_in


def whole_source(subject: Subject) -> Finding:
    """Every token of the source moves every state of the encoder, and the logits of every token of the target."""
    model, unmoved, remark = subject.model, 0, ""
    with torch.no_grad(), mode(model, training=False):

        def read(sources: Tensor) -> dict[str, Tensor]:
            logits = model.with_sources(sources)(subject.ids).logits
            return {"state": model.translator.encode(sources).hidden, "logits of target token": logits}

        before = read(model.sources)
        for position in range(model.sources.shape[1]):
            other = model.sources.clone()
            other[:, position] = (other[:, position] + 1) % model.encoder.config.vocab_size
            for what, after in read(other).items():
                off = (after - before[what]).abs().amax(2)  # (3, M) or (3, N)
                still = off <= 1e-13 * float(before[what].abs().max())
                unmoved += int(still.sum())
                if bool(still.any()) and not remark:
                    first = int(still.nonzero()[0, 1])
                    remark = f"token {position} (from 0) of the source is not seen by {what} {first}"
    count = model.sources.shape[1]
    looked_at = f"encoder states and logits after each of {count} tokens of the source was changed; unmoved ones"
    return bounded(looked_at, float(unmoved), 0.0, "each token is a part of every state", remark=remark)


def memory(subject: Subject) -> Finding:
    """A text in segments, each after the memory of those before, as in one pass."""
    if subject.translates:
        return inapplicable("a translation model reads sentences, each by itself: it has no memory")
    subject = subject.core
    if subject.kind != "fullrank":
        takes = "memory" in accepted(subject.model)
        return inapplicable("only the memory of fullrank's models is known" if takes else "forward takes no memory")
    if subject.sees_future:
        return inapplicable(
            f"{subject.sees_future}: tokens see their whole segment, so that it matters where segments end"
        )
    config: ModelConfig = subject.model.config
    if not config.memory_length:
        return inapplicable("model.memory_length is 0: this model has no memory")
    length, ids = subject.length, subject.ids
    without = with_memory(config, 0)  # its memory begins empty, and every token before a segment is seen
    models = [("", subject.rebuilt(with_memory(without, length)), subject.rebuilt(without))]
    if config.same_length:  # each token sees as many, wherever segments end
        window = subject.rebuilt(with_memory(without, min(config.memory_length, length // 2), same_length=True))
        models.append(("same_length, ", window, window))
    pairs = []
    for name, model, whole in models:
        with mode(model, training=False), mode(whole, training=False):
            with torch.no_grad():
                expected = whole(ids).logits

            def step(memory: Any, start: int, end: int, model: Any = model) -> tuple[Tensor, Any]:
                out = model(ids[:, start:end], memory)
                return out.logits.detach(), out.memory

            cuts = [0, length // 3, 2 * length // 3, length], [0, 1, length - 2, length]
            for bounds, cached in itertools.product(cuts, (True, False)):
                with torch.set_grad_enabled(not cached):  # keys are kept beside hidden states where nothing is trained
                    logits = segments(bounds, step, None)
                pairs.append((f"{name}cut at {bounds[1:-1]}{', keys cached' if cached else ''}", logits, expected))
    looked_at = "logits of three segments, the memory as long as the text, beside one pass; with and without gradients"
    return close(subject, looked_at, pairs)


def probabilities(subject: Subject) -> Finding:
    """Probabilities of the vocabulary layer sum to one, and its nll is that of its log-probabilities."""
    subject = subject.core
    if not subject.ours:
        return inapplicable("its logits go through a softmax, after which anything sums to one")
    model = subject.model
    epsilon = float(model.config.output.epsilon)
    targets = subject.tokens(ROWS, subject.length, 6)
    with torch.no_grad(), mode(model, training=False):
        log_probs = log_prob(model, subject.ids)
        nll = model.nll(subject.ids, targets).per_token
        logits = subject.logits(subject.ids, model=model)
    total = float((log_probs.double().logsumexp(-1).exp() - 1).abs().max())
    picked = log_probs.gather(-1, targets[..., None])[..., 0]
    normalised = largest(torch.log_softmax(logits, -1), torch.log_softmax(log_probs, -1))
    off = max(total, largest(nll, -picked), normalised)
    limit = tolerance(subject.dtype) * max(1.0, float(log_probs.abs().max())) + subject.vocab_size * epsilon
    reason = rounding(subject.dtype) + (f", and V epsilon with model.output.epsilon {epsilon:g}" if epsilon else "")
    looked_at = (
        "sums of exp(log_prob) over the vocabulary; nll beside the log_prob of the target, logits beside log_prob"
    )
    return bounded(looked_at, off, limit, reason)


# -- the definition: kernels, and mixing at its start -----------------------------------------------------------------


def plain_start(subject: Subject) -> Finding:
    """Mixing starts as plain attention, bit for bit through one kernel, where the paper says so."""
    subject = subject.core
    settings: dict[str, Any] = {}
    if subject.injected:
        from fullrank.hf.inject import inject, remove, settings_of

        settings = settings_of(subject.model) | {"output": None}
        mixes = {"": settings["mix"]}
    elif subject.ours:
        mixes = {place: part.mix for place, part in subject.attention.items() if isinstance(part, WeightedConfig)}
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
    models: list[Any] = []
    if settings:
        plain = remove(duplicate(subject.model))
        plain.set_attn_implementation("eager")  # whose weights the kernel reference mixes
        other_normalizer = stage_name(settings["normalize"]) != "softmax"
        models = [inject(duplicate(plain), **settings), plain]
        if other_normalizer:
            models[1] = inject(plain, **settings | {"mix": "none"})
    else:
        config = subject.own.config
        for changed in (config, everywhere(config, mix="none")):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(3)
                models.append(subject.rebuilt(changed, fresh=True).eval())
    figures = {}
    with torch.no_grad():
        for name in ("reference", "auto"):
            with kernel(name):
                logits, expected = (subject.logits(subject.ids, model=model) for model in models)
            figures[name] = largest(logits, expected) / max(1.0, float(expected.abs().max()))
    remark = f"fastest kernels, which need not be the same: {figures['auto']:.1e} of 1e-06"
    # across kernels the promise is 1e-6; the figure is that of one kernel unless the other is broken
    off = figures["reference"] if figures["auto"] <= 1e-6 else max(figures.values())
    words = ", ".join(f"{place} {mix}".strip() for place, mix in mixed.items())
    precision = str(next(models[0].parameters()).dtype).removeprefix("torch.")
    looked_at = f"logits of a fresh model beside the same with mix: none (mix: {words}), kernel reference, {precision}"
    return bounded(looked_at, off, 0.0, "bit for bit through one kernel", remark=remark)


# fp32: the library's promise across kernels. Gradients are sums over all tokens of products of such outputs.
_TOLERANCES = {"fp64": (torch.float64, 1e-12, 1e-11), "fp32": (torch.float32, 1e-6, 1e-5)}


def kernels(subject: Subject, precision: str) -> Finding:
    """Every kernel that can compute the model beside the reference: outputs, losses and gradients."""
    subject = subject.core
    if not subject.ours and not subject.injected:
        return inapplicable("its kernels are not those of fullrank")
    dtype, outputs, steepest = _TOLERANCES[precision]
    if subject.injected and dtype.itemsize > subject.dtype.itemsize:
        return inapplicable("the model cannot compute in double precision")
    if subject.injected:  # a whole model that is not ours, parts of which are in fp32 in double precision too
        model, outputs, steepest = duplicate(subject.model).to(dtype).requires_grad_(), 1e-5, 1e-5
    else:  # without dropout and permutations: different kernels draw different random numbers
        config = everywhere(subject.model.config, cross_head=0.0)
        output = config.output.with_known(latent_dropout=0.0, latent_dropout_locked=False, tail_dropout=0.0)
        config = replace(config, dropout=DropoutConfig(locked=config.dropout.locked), output=output)
        model = subject.rebuilt(config).to(dtype)
    with kernel("reference"):
        expected = _computed(subject, model)
    scales = {key: max(1.0, float(tensor.abs().max())) for key, tensor in expected.items()}
    gradients = [key for key in expected if key.startswith("gradient")]
    scales |= dict.fromkeys(gradients, max(float(expected[key].abs().max()) for key in gradients) or 1.0)
    shares: dict[str, list[tuple[float, str]]] = {}
    ran, used = [], set[str]()
    on_cpu = () if subject.ids.is_cuda else ("triton",)  # its interpreter is for tests
    for name in (name for name in NAMES if name not in ("reference", *on_cpu)):
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
            kind, _, tensor_name = key.partition(" of ")
            share = largest(computed[key], tensor) / scales[key]
            shares.setdefault(kind, []).append((share, f"{tensor_name} ({name})"))
    worst = {kind: max(known, key=lambda pair: _order(pair[0])) for kind, known in shares.items()}
    limits = {kind: steepest if kind == "gradient" else outputs for kind in worst}
    remark = "; ".join(f"{kind} {share:.1e}" for kind, (share, _) in worst.items())
    if bad := [kind for kind, (share, _) in worst.items() if not share <= limits[kind]]:
        remark += "; worst: " + ", ".join(f"{kind} of {worst[kind][1]}" for kind in bad)
    else:
        used |= {"multilinear"} & {part.kind for part in subject.attention.values()} if subject.ours else set()
        remark += f"; attention by {', '.join(sorted(used)) or 'reference'}"
        if used == {"reference"}:
            remark += " (no fast kernel computes these stages), the vocabulary layer by its fast one"
    # one figure: how far the worst is, in the tolerance of outputs
    figure = max((share / limits[kind] * outputs for kind, (share, _) in worst.items()), key=_order)
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


def _order(share: float) -> tuple[bool, float]:
    """Key of a maximum in which nothing is worse than NaN."""
    return math.isnan(share), share


def _computed(subject: Subject, model: Any) -> dict[str, Tensor]:
    """Outputs and gradients by name; the word before ` of ` says what kind it is."""
    ids, out, half = subject.ids, dict[str, Tensor](), subject.length // 2
    targets = subject.tokens(len(ids), subject.length, 6)
    weights = torch.rand(ids.shape, generator=torch.Generator().manual_seed(4)).to(next(model.parameters()))
    sides = {"": model}
    if subject.translates:
        sides |= {f", source padded on the {side}": padded for side, padded in model.padded_sources().items()}

    def differentiate(scalar: Tensor, name: str) -> None:
        model.zero_grad(set_to_none=True)
        scalar.backward()
        for parameter, p in model.named_parameters():
            if p.requires_grad:
                out[f"gradient of {parameter}: {name}"] = torch.zeros_like(p) if p.grad is None else p.grad.clone()

    if not subject.ours:
        with mode(model, training=False):
            logits = subject.logits(ids, model=model)
            out["output of logits, evaluation"] = logits.detach()
            nll = -torch.log_softmax(logits, -1).gather(-1, targets[..., None])[..., 0]
            differentiate((nll * weights).sum(), "nll, evaluation")
        return out
    for training, where in ((False, "evaluation"), (True, "training")):
        with mode(model, training=training):
            for side, one in sides.items():
                with torch.no_grad():
                    out[f"output of logits{side}, {where}"] = subject.logits(ids, model=one)
                    out[f"output of log-probabilities{side}, {where}"] = log_prob(one, ids)
                    if subject.translates and not subject.sees_future:
                        decoder = one.decoder_of_sources()
                        twice = torch.arange(len(ids), device=ids.device).repeat_interleave(2)
                        logits = decoder(ids[twice], cache=decoder.new_cache().reorder(twice)).logits
                        out[f"output of logits of beams{side}, {where}"] = logits
                nll = one.nll(ids, targets).per_token
                out[f"nll of tokens{side}, {where}"] = nll.detach()
                if not training:  # without dropout training computes the same; there the loss is differentiated
                    differentiate((nll * weights).sum(), f"nll{side}, {where}")
            for smoothing in (0.0, 0.1) if training else ():
                loss = model.loss(ids, targets, weights, label_smoothing=smoothing)
                out[f"loss of tokens, label_smoothing {smoothing}, {where}"] = loss.detach()
                differentiate(loss, f"loss, label_smoothing {smoothing}, {where}")
            if subject.translates:
                continue
            with torch.no_grad():
                for side, mask in subject.masks().items():
                    out[f"output of logits, padding on the {side}, {where}"] = subject.logits(ids, mask, model=model)[
                        mask.bool()
                    ]
            if model.config.memory_length:
                with torch.no_grad():
                    memory = model(ids[:, :half]).memory
                    out[f"output of logits after a memory, {where}"] = logits_in(model(ids[:, half:], memory))
                memory = model(ids[:, :half]).memory
                loss = model.loss(ids[:, half:], targets[:, half:], memory=memory)
                differentiate(loss, f"loss after a memory, {where}")
    return out
