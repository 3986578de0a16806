"""What a translation model has to keep to, beside what every model has to."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fullrank.checking.agreement import close, determinism, same
from fullrank.checking.finding import Check, Finding, inapplicable, judged, largest, rounding, tolerance
from fullrank.checking.given import Given
from fullrank.checking.kernels import gradients, kernels
from fullrank.checking.subject import LENGTHS, ROWS, Subject, mode, random_ids
from fullrank.core import registry
from fullrank.core.config import AttentionConfig, DropoutConfig, ModelConfig, stage_name
from fullrank.core.errors import InputError
from fullrank.kernels import kernel


def given(translator: nn.Module, length: int | None) -> Given:
    """`translator` with three random sentences, of another length than the `length` tokens of the targets.

    Raises InputError for a model without numbers.
    """
    model: Any = translator
    first = next(model.parameters())
    if first.is_meta:
        raise InputError("a model on the meta device has no numbers to check; build it on the cpu")
    longest = model.max_source_length
    taken = {size for parameter in model.parameters() for size in parameter.shape} | {length}
    allowed = [tokens for tokens in LENGTHS if longest is None or tokens <= longest]
    if not allowed:
        raise InputError(f"the model reads sentences of at most {longest} tokens; a check needs {LENGTHS[-1]}")
    count = next((tokens for tokens in allowed if tokens not in taken), allowed[0])
    return Given(model, random_ids(ROWS, count, model.encoder.config.vocab_size, 15).to(first.device))


def source_masks(subject: Subject) -> dict[str, Tensor]:
    """Masks (3, M) of the sources, by the side of the padding."""
    right = torch.ones_like(_sources(subject))
    right[1, -(right.shape[1] // 3) :] = 0
    right[2, -(right.shape[1] // 2) :] = 0
    return {"right": right, "left": right.flip(1)}


def _sources(subject: Subject) -> Tensor:
    model: Any = subject.model
    sources: Tensor = model.sources
    return sources


def _translator(subject: Subject) -> Any:
    return subject.model.translator


# -- the source is seen, padding is not -------------------------------------------------------------------------------


def whole_source(subject: Subject) -> Finding:
    """Every token of the source moves every state of the encoder, and the logits of every token of the target."""
    model, sources = _translator(subject), _sources(subject)
    unmoved, named = 0, ""
    with torch.no_grad(), mode(subject.model, training=False):

        def read(ids: Tensor) -> dict[str, Tensor]:
            return {"state": model.encode(ids).hidden, "logits of target token": model(ids, subject.ids).logits}

        before = read(sources)
        for place in range(sources.shape[1]):
            other = sources.clone()
            other[:, place] = (other[:, place] + 1) % _source_vocabulary(subject)
            for what, after in read(other).items():
                still = (after - before[what]).abs().amax(2) <= 1e-13 * float(
                    before[what].abs().max()
                )  # (3, M) or (3, N)
                unmoved += int(still.sum())
                if bool(still.any()) and not named:
                    named = f"token {place} (from 0) of the source is not seen by {what} {int(still.nonzero()[0, 1])}"
    looked_at = (
        f"encoder states and logits after each of {sources.shape[1]} tokens of the source was changed; unmoved ones"
    )
    return judged(looked_at, float(unmoved), 0.0, "each token is a part of every state", remark=named)


def padding(subject: Subject) -> Finding:
    """A pair in a padded batch has the logits that it has alone, whatever stands in the padding of source and target."""
    model, sources, ids = _translator(subject), _sources(subject), subject.ids
    pairs = []
    with torch.no_grad(), mode(subject.model, training=False):
        for side, mask in source_masks(subject).items():
            seen = mask.bool()
            other = torch.where(seen, sources, (sources + 1) % _source_vocabulary(subject))
            for read in (sources, other):
                batch = model(read, ids, mask).logits
                for row in range(ROWS):
                    alone = model(sources[row][seen[row]][None], ids[row : row + 1]).logits[0]
                    pairs.append((f"sentence {row}, padding of the source on the {side}", batch[row], alone))
            mask = _target_mask(subject, side)
            seen = mask.bool()
            other = torch.where(seen, ids, (ids + 1) % subject.vocab_size)
            for said in (True, False):
                if not said and (side == "left" or subject.sees_future):
                    continue  # padding on the right need not be said where no token sees what comes later
                batch = model(sources, other, None, mask if said else None).logits
                for row in range(ROWS):
                    alone = model(sources[row : row + 1], ids[row][seen[row]][None]).logits[0]
                    pairs.append((f"sentence {row}, padding of the target on the {side}", batch[row][seen[row]], alone))
    looked_at = "sentences of unequal lengths in one batch, source and target padded on either side, beside each alone"
    return close(subject, looked_at, pairs)


def _target_mask(subject: Subject, side: str) -> Tensor:
    mask = torch.ones_like(subject.ids)
    mask[1, -(subject.length // 3) :] = 0
    mask[2, -(subject.length // 2) :] = 0
    return mask if side == "right" else mask.flip(1)


def _source_vocabulary(subject: Subject) -> int:
    size = _translator(subject).encoder.config.vocab_size
    assert isinstance(size, int)
    return size


# -- decoding ---------------------------------------------------------------------------------------------------------

_BEAMS = [0, 0, 1, 1, 2, 2], [1, 0, 3, 3, 5, 4], [0, 2, 2, 4]  # two a sentence, other ones of them, unequal groups


def decoding(subject: Subject) -> Finding:
    """Token by token, in pieces, and as beams that share a source, with a cache, as in one pass."""
    if subject.sees_future:
        return inapplicable(f"{subject.sees_future}: a token that sees later ones cannot be read before them")
    model, sources, ids, length = _translator(subject), _sources(subject), subject.ids, subject.length
    masks: list[tuple[str, Tensor | None]] = [("", None)]
    masks += [(f", padding of the source on the {side}", mask) for side, mask in source_masks(subject).items()]
    pairs = []
    with torch.no_grad(), mode(subject.model, training=False):
        for side, mask in masks:
            expected = model(sources, ids, mask).logits
            writer = model.of_source(model.encode(sources, mask))
            for bounds in (list(range(length + 1)), [0, length // 2, length], [0, 1, length - 2, length]):
                cache, parts = writer.new_cache(), []
                for start, end in itertools.pairwise(bounds):
                    out = writer(ids[:, start:end], cache=cache)
                    cache = out.cache
                    parts.append(out.logits)
                how = "token by token" if len(bounds) > length else f"in {len(bounds) - 1} pieces"
                pairs.append((how + side, torch.cat(parts, dim=1), expected))
            pairs += [(f"beams{side}", *pair) for pair in _as_beams(model, sources, ids, mask)]
    found = close(subject, "logits with the cache, token by token, in pieces and as beams, beside one pass", pairs)
    config: ModelConfig = model.config
    if found.verdict == "fails" and config.decoder is not None and config.decoder.released_decoding:
        why = "model.decoder.released_decoding: true leaves heads unmixed while a translation is written"
        return replace(found, remark=f"{found.remark}; {why}")
    return found


def _as_beams(model: Any, sources: Tensor, ids: Tensor, mask: Tensor | None) -> list[tuple[Tensor, Tensor]]:
    """The last logits of each beam, and those of its text read whole."""
    writer = model.of_source(model.encode(sources, mask))
    texts, of = ids[:, :1], torch.arange(len(ids), device=ids.device)
    out, pairs = writer(texts, cache=writer.new_cache()), []
    for step, chosen in enumerate(_BEAMS):
        index = torch.tensor(chosen, device=ids.device)
        new = ids.flatten()[step * 5 : step * 5 + len(index), None]
        texts, of = torch.cat((texts[index], new), 1), of[index]
        out = writer(new, cache=out.cache.reorder(index))
        whole = model(sources[of], texts, None if mask is None else mask[of]).logits
        pairs.append((out.logits[:, -1], whole[:, -1]))
    return pairs


# -- definitions ------------------------------------------------------------------------------------------------------


def quiet(subject: Subject) -> Any:
    """The translator without dropout and permutations: different kernels draw different random numbers."""
    model = _translator(subject)
    config = _everywhere(model.config, cross_head=0.0)
    output = replace(config.output, latent_dropout=0.0, latent_dropout_locked=False, tail_dropout=0.0)
    config = replace(config, dropout=DropoutConfig(locked=config.dropout.locked), output=output)
    same_model = type(model)(config).to(subject.ids.device, next(model.parameters()).dtype)
    same_model.load_state_dict(model.state_dict())
    return same_model


def _everywhere(config: ModelConfig, **changes: Any) -> ModelConfig:
    """`config` with the attention of every place changed."""

    def changed(stages: AttentionConfig | None) -> AttentionConfig | None:
        return None if stages is None else replace(stages, **changes)

    encoder, decoder = config.encoder, config.decoder
    if encoder is not None:
        encoder = replace(encoder, attention=changed(encoder.attention))
    if decoder is not None:
        decoder = replace(decoder, attention=changed(decoder.attention), cross=changed(decoder.cross))
    return replace(config, attention=replace(config.attention, **changes), encoder=encoder, decoder=decoder)


def computed(subject: Subject, model: Any) -> Mapping[str, Tensor]:
    """Outputs and gradients by name; the word before ` of ` says what kind it is."""
    ids, sources, found = subject.ids, _sources(subject), {}
    targets = subject.tokens(len(ids), subject.length, 6)
    weights = torch.rand(ids.shape, generator=torch.Generator().manual_seed(4)).to(ids.device)
    sides: dict[str, Tensor | None] = {"": None, **source_masks(subject)}
    for training in (False, True):
        where = "training" if training else "evaluation"
        with mode(model, training=training):
            for side, mask in sides.items():
                padded = f", source padded on the {side}" if side else ""
                with torch.no_grad():
                    found[f"output of logits{padded}, {where}"] = model(sources, ids, mask).logits
                    log_prob = model.decoder.output.log_prob(model.hidden(sources, ids, mask))
                    found[f"output of log-probabilities{padded}, {where}"] = log_prob
                    if not subject.sees_future:
                        writer = model.of_source(model.encode(sources, mask))
                        cache = writer.new_cache().reorder(
                            torch.arange(len(ids), device=ids.device).repeat_interleave(2)
                        )
                        written = writer(ids.repeat_interleave(2, 0), cache=cache).logits
                        found[f"output of logits of beams{padded}, {where}"] = written
                model.zero_grad(set_to_none=True)
                nll = model.nll(sources, ids, targets, mask).per_token
                (nll * weights.to(nll)).sum().backward()
                found[f"nll of tokens{padded}, {where}"] = nll.detach()
                found |= gradients(model, f"nll{padded}, {where}")
            model.zero_grad(set_to_none=True)
            loss = model.loss(sources, ids, targets, weights.to(nll), label_smoothing=0.1)
            loss.backward()
            found[f"loss of tokens, label_smoothing 0.1, {where}"] = loss.detach()
            found |= gradients(model, f"loss, label_smoothing 0.1, {where}")
    model.zero_grad(set_to_none=True)
    return found


def plain_start(subject: Subject) -> Finding:
    """Where the paper says so, mixing starts as plain attention: bit for bit through one kernel."""
    own: Any = subject.own
    config: ModelConfig = own.config
    places = {"encoder": config.of_encoder(), "decoder": config.of_decoder(), "cross": config.of_cross()}
    mixes = {place: stage_name(part.attention.mix) for place, part in places.items()}
    mixed = {place: mix for place, mix in mixes.items() if mix != "none"}
    if not mixed:
        return inapplicable("no mixing: it is plain attention")
    for place, mix in mixed.items():
        if not getattr(registry.lookup("mix", mix), "starts_plain", True):
            return inapplicable(f"'{mix}' mixing ({place}) does not start as plain attention, by its definition")
    found = []
    for made in (config, _everywhere(config, mix="none")):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            found.append(type(own.translator)(made).to(subject.ids.device).eval())
    figures = {}
    with torch.no_grad():
        for name in ("reference", "auto"):
            with kernel(name):
                given, expected = (model(_sources(subject), subject.ids).logits for model in found)
            figures[name] = largest(given, expected) / max(1.0, float(expected.abs().max()))
    remark = f"fastest kernels, which need not be the same: {figures['auto']:.1e} of 1e-06"
    off = figures["reference"] if figures["auto"] <= 1e-6 else max(figures.values())
    words = ", ".join(f"{place} {mix}" for place, mix in mixed.items())
    looked_at = f"logits of a fresh model beside the same with mix: none (mix: {words}), kernel reference, fp32"
    return judged(looked_at, off, 0.0, "bit for bit through one kernel", remark=remark)


# -- files, probabilities ---------------------------------------------------------------------------------------------


def saving(subject: Subject) -> Finding:
    """Saved into a temporary folder and loaded again, the translator gives the same numbers."""
    model = _translator(subject)
    with tempfile.TemporaryDirectory() as folder:
        model.save(Path(folder))
        loaded = type(model).load(Path(folder)).to(subject.ids.device)
    with torch.no_grad(), mode(subject.model, training=False):
        given, expected = (one(_sources(subject), subject.ids).logits for one in (loaded, model))
    looked_at = "parameters and buffers, bit for bit, and logits of the loaded model"
    reason = "the same numbers, computed the same way"
    before, after = model.state_dict(), loaded.state_dict()
    wrong = sorted(set(before) ^ set(after)) or [name for name, value in before.items() if not same(after[name], value)]
    if wrong:
        return judged(looked_at, float("nan"), 0.0, reason, remark=f"not the same: {', '.join(wrong[:3])}")
    return judged(looked_at, largest(given, expected), 0.0, reason)


def probabilities(subject: Subject) -> Finding:
    """Probabilities of target tokens sum to one, and nll is that of the log-probabilities."""
    model, sources = _translator(subject), _sources(subject)
    epsilon = float(model.config.output.epsilon)
    with torch.no_grad(), mode(subject.model, training=False):
        log_prob = model.decoder.output.log_prob(model.hidden(sources, subject.ids))
        targets = subject.tokens(len(subject.ids), subject.length, 6)
        nll = model.nll(sources, subject.ids, targets).per_token
        logits = model(sources, subject.ids).logits
    total = float((log_prob.double().logsumexp(-1).exp() - 1).abs().max())
    picked = log_prob.gather(-1, targets[..., None])[..., 0]
    normalised = largest(torch.log_softmax(logits, -1), torch.log_softmax(log_prob, -1))
    limit = tolerance(subject.dtype) * max(1.0, float(log_prob.abs().max())) + subject.vocab_size * epsilon
    reason = rounding(subject.dtype) + (f", and V epsilon with model.output.epsilon {epsilon:g}" if epsilon else "")
    looked_at = (
        "sums of exp(log_prob) over the vocabulary; nll beside the log_prob of the target, logits beside log_prob"
    )
    return judged(looked_at, max(total, largest(nll, -picked), normalised), limit, reason)


def translations(subject: Subject) -> list[Check]:
    """All that come after those of the future, not yet run; by the names that they have for other models."""
    no_memory = "a translation model reads sentences, each by itself: it has no memory"
    return [
        ("the whole source is seen", lambda: whole_source(subject)),
        ("starts as plain attention", lambda: plain_start(subject)),
        ("kernels = reference, fp64", lambda: kernels(subject, "fp64", quiet, computed)),
        ("kernels = reference, fp32", lambda: kernels(subject, "fp32", quiet, computed)),
        ("padding changes nothing", lambda: padding(subject)),
        ("incremental decoding = one pass", lambda: decoding(subject)),
        ("memory in segments = one pass", lambda: inapplicable(no_memory)),
        ("evaluation is deterministic", lambda: determinism(subject)),
        ("saved and loaded: same numbers", lambda: saving(subject)),
        ("probabilities sum to one", lambda: probabilities(subject)),
    ]
