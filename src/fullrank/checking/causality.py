"""Search for attention to later tokens, by perturbation, by gradient, and after training on random tokens."""

from __future__ import annotations

import heapq
import itertools
import math
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fullrank.checking.agreement import Comparison, measure, measure_one
from fullrank.checking.calls import NOTHING_MOVES, SEEDS, Call, Run
from fullrank.checking.copies import duplicate, mode
from fullrank.checking.layers import Place, Reading, Tensors, find_layers_by_gradient, observe
from fullrank.checking.report import Finding, allow_noise, inapplicable, judge
from fullrank.checking.subject import SHORT, Subject, equals
from fullrank.forward import logits_in

_WORK = 1_000_000_000  # parameters times tokens of the texts that are read by a call
_WORD = 100  # parameters that a word of the vocabulary is worth
_STEPS = 200  # of training on random tokens
_FEWER = 20  # steps at least
_ROWS = 16  # texts of a step
_SECONDS = 2.5  # of CPU time; a model that is slower takes fewer steps, at least `_FEWER`
_MOST_PARAMETERS = 1_000_000  # of a model that is trained for the check


def spread(length: int, most: int) -> list[int]:
    """List positions from 1 on, all of them or `most` that are spread evenly, the first and the last among them."""
    positions: list[int] = torch.linspace(1, length - 1, min(most, length - 1)).round().int().tolist()
    return positions


def _choose_cuts(subject: Subject, most: int, least: int = 6) -> list[int]:
    """Choose positions from which on tokens are changed: fewer for a large model."""
    affordable = _WORK // (subject.length * (subject.parameters + _WORD * subject.vocab_size))
    return spread(subject.length, min(max(least, affordable), most))


def search_by_perturbation(run: Run) -> Finding:
    """Change every token from a cut on: no logits before the cut may change."""
    subject = run.subject
    call = run.call
    if not call.gradients:
        most = max(call.most_cuts, len(subject.ids))  # each text has a cut of its own
        return find_leak(run, _choose_cuts(subject, most, 6 if call.is_plain else 3))
    for seed, cut in zip(SEEDS, spread(subject.length, len(SEEDS)), strict=False):
        finding = find_leak(replace(run, call=replace(call, seed=seed)), [cut])
        if finding.verdict == "fails":
            break
    return finding


def find_leak(run: Run, cuts: list[int]) -> Finding:
    """Search by perturbation with one seed; `cuts` are the positions from which on tokens are changed.

    A leak in a plain call is noted in `run.subject.leaking`. Raises FloatingPointError where logits are NaN.
    """
    subject = run.subject
    call = run.call
    if call.special:  # the first texts get the cuts near the middle
        cuts = sorted(cuts, key=lambda cut: abs(2 * cut - subject.length))
    cuts = [cut for cut in cuts if cut > run.past]
    count = f"{len(cuts)} of {subject.length - 1} cuts"
    looked_at = f"logits before a cut from which on every token is changed, {count}; {call.name}"
    texts = torch.cat([subject.ids] * math.ceil(len(cuts) / len(subject.ids)))
    base = run.read(texts)
    if bool(base.all_logits.isnan().any()):
        raise FloatingPointError("logits are NaN")
    comparisons = _compare_cuts(run, texts, base, cuts)
    if torch.equal(comparisons[0].reading.all_logits, base.all_logits):
        return inapplicable(NOTHING_MOVES)
    shares = measure(comparisons)
    # one rounding in half precision may choose another expert: a leak is seen from several cuts
    worst = heapq.nlargest(3 if run.dtype.itemsize == 2 else 1, shares, key=shares.__getitem__)[-1]
    difference = shares[worst]
    if not math.isfinite(difference) and not call.is_plain:
        return inapplicable(f"{call.name}: logits are not finite")
    limit, reason = run.allow()
    if difference > limit:
        repeated = measure_one(base.repeat(), base)
        if repeated > limit:
            remark = "two passes over the same tokens differ, although random numbers begin at the same seed: something is kept"
            return judge(looked_at, repeated, limit, reason, remark=remark, path=call.name)
        if not (call.training or call.mask):  # each text stands in several rows
            noise = measure_one(replace(base, all_logits=base.all_logits.roll(len(subject.ids), 0)), base)
            limit, reason = allow_noise(limit, reason, noise)
    finding = judge(looked_at, difference, limit, reason, path=call.name)
    if finding.verdict == "passes" or not math.isfinite(difference):
        return finding
    if call.is_plain or call.cache or call.training not in subject.leaking:
        seen: Comparison | None = worst
        if call.compiled:  # of the model as it is, modules of which are compiled one by one
            run = replace(run, subject=replace(subject, model=subject.model._orig_mod))
            (seen,) = _compare_cuts(run, texts, run.read(texts), [worst.reading.logits.shape[1]])
        if not (call.mask or subject.fixed or call.compiled):
            seen = _find_text_that_sees_its_end(run, worst, limit)
        if seen is None:
            remark = "rows of a batch see each other, or dropout falls on other entries; no text sees its own end"
            return replace(finding, verdict="passes", difference=0.0, remark=remark)
        worst = seen
        finding = replace(finding, layers=worst.name_layers(run, limit))
    if call.is_plain:
        subject.leaking.add(call.training)
    leaks = describe_cut(subject, run.past + worst.reading.logits.shape[1])
    return replace(finding, leaks=leaks, remark=leaks)


def _compare_cuts(run: Run, texts: Tensor, base: Reading, cuts: list[int]) -> list[Comparison]:
    """Compare texts, each with every token from a cut on changed, with the same texts as they are, before the cut."""
    changed = run.read(run.subject.change_from(cuts, texts))
    comparisons = []
    for row, cut in enumerate(cuts):
        part: dict[str, Any] = {"end": cut - run.past, "chosen": slice(row, row + 1)}
        comparisons.append(Comparison(f"cut {cut}", replace(changed, **part), replace(base, **part)))
    return comparisons


def _find_text_that_sees_its_end(run: Run, worst: Comparison, least: float) -> Comparison | None:
    """Find a text that sees later tokens of its own: no other row of the batch is changed."""
    texts = run.subject.ids
    length = run.subject.length
    # an expert drops entries in the order of its tokens, and so does its dropout
    run = replace(run, call=replace(run.call, is_certain=True))
    base = run.read(texts)
    first = run.past + worst.reading.logits.shape[1]
    cuts = [first, *(cut for cut in spread(length, 6) if cut > run.past)]
    for cut, row in itertools.product(cuts, range(len(texts))):
        *_, comparison = _compare_cuts(run, texts, base, [length] * row + [cut])
        if measure([comparison])[comparison] > least:
            return comparison
    return None


def describe_cut(subject: Subject, cut: int) -> str:
    """Describe which positions see which tokens, and name the key of the configuration that wants it so."""
    purpose = f"; {subject.sees_future} leaves the mask out" if subject.sees_future else ""
    return f"positions before {cut} see tokens from {cut} on (from 0){purpose}"


def search_by_gradient(run: Run) -> Finding:
    """Check that logits before a cut have no gradient with respect to embeddings after it."""
    subject = run.subject
    training = run.call.training
    ids = subject.ids
    if not subject.reads_tokens:
        ids = ids.to(subject.dtype, copy=True).requires_grad_()
    with run.prepared(), torch.enable_grad():
        trace = observe(subject.model, lambda: subject.logits(ids), view_alone)
        leaves = trace.find_embeddings(ids) if subject.reads_tokens else [ids]
        if not leaves or not trace.logits.requires_grad:
            return inapplicable("no gradient of embeddings reaches the logits")
        generator = torch.Generator().manual_seed(3)
        weights = torch.randn(trace.logits.shape, dtype=torch.float64, generator=generator)
        weighted = trace.logits * weights.to(trace.logits)
        cuts = _choose_cuts(subject, 12)
        steepest_after = dict.fromkeys(cuts, 0.0)
        steepest = 0.0
        for cut in cuts:
            value = weighted[:, :cut].sum()
            gradients = torch.autograd.grad(value, leaves, retain_graph=True, allow_unused=True, materialize_grads=True)
            for gradient in gradients:
                by_row = gradient if gradient.shape[:2] == ids.shape[:2] else gradient.transpose(0, 1)
                steepest = max(steepest, float(by_row.abs().max()))
                steepest_after[cut] = max(steepest_after[cut], float(by_row[:, cut:].abs().max()))
        if steepest == 0.0:
            return inapplicable("no gradient reaches the embeddings")
        worst = max(steepest_after, key=steepest_after.__getitem__)
        name = run.call.name
        looked_at = f"gradient of the logits before {len(cuts)} cuts with respect to embeddings after them; {name}"
        limit, reason = run.allow()
        share = steepest_after[worst] / steepest
        finding = judge(looked_at, share, limit, f"{reason}: the largest gradient", path=name)
        if finding.verdict == "passes":
            return finding
        leaks = describe_cut(subject, worst)
        layers: tuple[str, ...] = ()
        if training not in subject.leaking:
            later = Reading(trace.logits, trace.logits.clone, start=worst)
            with suppress(Exception):  # a leak is a leak, even one that nobody can explain
                layers = find_layers_by_gradient(trace, weighted[:, :worst].sum(), later, limit * steepest)
        return replace(finding, remark=leaks, leaks=leaks, layers=layers)


def view_alone(place: Place, tensors: Tensors) -> Tensors:
    """Give a module views of its inputs, so that their gradients come from that module alone."""
    return {i: tensor.view_as(tensor) for i, tensor in tensors.items()} if place[-1] == "in" else tensors


def check_on_random_tokens(run: Run) -> Finding:
    """Train a copy on fresh random tokens, where looking ahead is all that can be learnt, then search by perturbation."""
    subject = run.subject
    if subject.parameters > _MOST_PARAMETERS:
        return inapplicable(f"a model of {subject.parameters:,} parameters is not trained for it")
    if not subject.reads_tokens:
        return inapplicable("the model reads no tokens that it could predict")
    model: Any = duplicate(subject.original).float()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        return inapplicable("no parameter of the model can be trained")
    subject = replace(subject, model=model, dtype=torch.float32, selects=False)
    optimizer = torch.optim.Adam(trained, lr=3e-3)
    step = 0
    start = time.process_time()
    is_readable = equals(lambda: subject.logits(subject.ids[:, :SHORT]))
    length = min(subject.length, SHORT) if is_readable else subject.length
    with mode(model, training=True, seed=2), torch.enable_grad():
        while step < _STEPS and (step < _FEWER or time.process_time() < start + _SECONDS):
            tokens = subject.draw_tokens(length + 1, 1000 + step, rows=_ROWS)
            # words that are never given have a logit of -inf
            logits = logits_in(subject.call(tokens[:, :-1])).float().clamp(-1e3, 1e3)
            optimizer.zero_grad(set_to_none=True)
            nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            step += 1
    call = Call(f"after {step} steps of training on random tokens")
    return find_leak(Run(subject, call), _choose_cuts(subject, call.most_cuts, 3))
