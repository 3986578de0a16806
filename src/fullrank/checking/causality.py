"""Search for attention to later tokens, by perturbation, by gradient, and after training on random tokens."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fullrank.checking.calls import NO_MODES, NOTHING_MOVES, PLAIN, SEEDS, Call, CannotRun, Run, running
from fullrank.checking.copies import WithoutDropout, duplicate, mode
from fullrank.checking.layers import (
    Part,
    Place,
    Tensors,
    find_layer_by_compiler,
    find_layers,
    find_layers_by_gradient,
    observe,
)
from fullrank.checking.report import Finding, allow, divide_by_size, inapplicable, judge, largest, rank_differences
from fullrank.checking.subject import SHORT, Subject, equals
from fullrank.core.errors import one_line

_WORK = 1_000_000_000  # parameters times tokens of the texts that are read by a call
_WORD = 100  # parameters that a word of the vocabulary is worth
_STEPS, _FEWER, _ROWS = 200, 20, 16  # of training on random tokens
_SECONDS = 2.5  # of CPU time; a model that is slower takes fewer steps, at least `_FEWER`
_MOST_PARAMETERS = 1_000_000  # of a model that is trained for the check


def spread(length: int, most: int) -> list[int]:
    """Positions from 1 on, all of them or `most` that are spread evenly, the first and the last among them."""
    if length - 1 <= most:
        return list(range(1, length))
    return sorted({1 + round(i * (length - 2) / (most - 1)) for i in range(most)})


def choose_cuts(subject: Subject, most: int, least: int = 6) -> list[int]:
    """Positions from which on tokens are changed: fewer for a large model."""
    affordable = _WORK // (subject.length * (subject.parameters + _WORD * subject.vocab_size))
    return spread(subject.length, min(max(least, affordable), most))


def search_by_perturbation(subject: Subject, call: Call) -> Finding:
    """From a cut on, every token is changed; no logits before the cut may change."""
    if call.scaled and False in subject.leaking:
        return inapplicable("later tokens are seen with the parameters as they are")
    try:
        if call.compiled or call.attention:  # a compiler may not see which words are selected
            subject = replace(subject, selects=False)
        if call.length:
            subject = subject.with_length(call.length)
        if call.special:
            subject = subject.with_special_tokens()
        if not call.gradients:
            return find_leak(subject, call, choose_cuts(subject, call.cuts, 6 if call in PLAIN else 3))
        for seed, cut in zip(SEEDS, spread(subject.length, len(SEEDS)), strict=False):
            finding = find_leak(subject, replace(call, seed=seed), [cut])
            if finding.verdict == "fails":
                break
        return finding
    except Exception as error:
        if call in PLAIN or isinstance(error, CannotRun):
            raise
        raise CannotRun(f"it cannot be run so: {type(error).__name__}: {one_line(error)}") from error


def find_leak(subject: Subject, call: Call, cuts: list[int]) -> Finding:
    """`search_by_perturbation` with one seed. cuts: positions from which on tokens are changed."""
    if call.special:  # the first texts get the cuts near the middle
        cuts = sorted(cuts, key=lambda cut: abs(2 * cut - subject.length))
    count = f"{len(cuts)} of {subject.length - 1} cuts"
    looked_at = f"logits before a cut from which on every token is changed, {count}; {call.name}"
    dtype = call.dtype or call.autocast or subject.dtype
    limit, reason = allow(dtype)
    if call.scaled:
        limit, reason = 10 * limit, f"ten times {reason}: it grows with the parameters"
    with running(subject, call) as run:
        rows = len(subject.ids)
        texts = torch.cat([subject.ids] * (1 if call.compiled else math.ceil(len(cuts) / rows)))
        search = Search(subject, run, texts)
        shares = dict[int, float]()
        for start in range(0, len(cuts), len(texts)):
            cuts_of_batch = cuts[start : start + len(texts)]
            shares |= zip(cuts_of_batch, search.move(cuts_of_batch), strict=True)
        if not search.is_moved:
            return inapplicable(NOTHING_MOVES)
        worst = rank_differences(shares)
        cut = worst[0]
        if dtype.itemsize == 2:  # one rounding may choose another expert: a leak is seen from several cuts
            cut = worst[:3][-1]
        if not math.isfinite(shares[cut]) and call not in PLAIN:
            return inapplicable(f"{call.name}: logits are not finite")
        if not shares[cut] <= limit:
            repeated = largest(search.read(texts), search.logits)
            if repeated > limit:
                remark = "two passes over the same tokens differ, although random numbers begin at the same seed"
                return judge(looked_at, repeated, limit, reason, remark=remark, path=call.name)
            if not (call.training or call.mask):
                noise = largest(search.logits.roll(rows, 0), search.logits)  # each text stands in several rows
                if noise > limit:
                    limit, reason = min(10 * noise, 1000 * limit), f"ten times the model's own rounding, {noise:.1e}"
        finding = judge(looked_at, shares[cut], limit, reason, path=call.name)
        if finding.verdict == "passes" or not math.isfinite(shares[cut]):
            return finding
        if call in PLAIN or call.cache or call.training not in subject.leaking:
            if not (call.mask or subject.fixed or call.compiled):
                cut = search.find_cut_of_a_text(cut, limit)
            if not cut:
                remark = "rows of a batch see each other, or dropout falls on other entries; no text sees its own end"
                return replace(finding, verdict="passes", difference=0.0, remark=remark)
            with suppress(Exception):  # a leak is a leak, even one that nobody can explain
                finding = replace(finding, layers=search.name_layers(cut, limit))
    if call in PLAIN:
        subject.leaking.add(call.training)
    leaks = describe_cut(subject, cut)
    return replace(finding, leaks=leaks, remark=leaks)


class Search:
    """A run whose logits of some texts are known, and how far they move with other tokens."""

    def __init__(self, subject: Subject, run: Run, texts: Tensor) -> None:
        logits = run(texts)
        if bool(logits.isnan().any()):
            raise FloatingPointError("logits are NaN")
        self.subject, self.run, self.texts, self.is_moved = subject, run, texts, False
        self.divide = divide_by_size(logits)
        self.logits = self.divide(logits)

    def read(self, texts: Tensor) -> Tensor:
        return self.divide(self.run(texts))

    def move(self, cuts: list[int]) -> list[float]:
        """The largest change of logits before the cut of each row, where tokens from there on are changed."""
        changed = self.read(self.subject.change_from(cuts, self.texts))
        self.is_moved = self.is_moved or not torch.equal(changed, self.logits)
        return [largest(changed[row, :cut], self.logits[row, :cut]) for row, cut in enumerate(cuts)]

    def find_cut_of_a_text(self, cut: int, least: float) -> int:
        """A cut before which a text sees later tokens where no other row is changed; 0 where there is none."""
        length = self.subject.length
        # an expert drops entries in the order of its tokens, and so does its dropout
        with WithoutDropout() if self.run.call.training else nullcontext():
            alone = Search(self.subject, self.run, self.subject.ids)
            for position in (cut, *spread(length, 6)):
                for row in range(len(alone.texts)):
                    if alone.move([length] * row + [position])[row] > least:
                        return position
        return 0

    def name_layers(self, cut: int, least: float) -> tuple[str, ...]:
        """Layers that leak before `cut`; of a text in two pieces within the one in which the cut lies."""
        subject, run, call = self.subject, self.run, self.run.call
        texts, start, stop = subject.ids, 0, subject.length
        changed = subject.change_from([cut] * len(texts), texts)
        if call.cache:
            start, stop = (0, stop // 2) if cut < stop // 2 else (stop // 2, stop)
            changed[:, stop:] = texts[:, stop:]
        find, rows = find_layers, 1 if call.rows == 1 else len(texts)
        if call.compiled:  # nobody looks into compiled code
            find, run = find_layer_by_compiler, Run(subject, call, subject.model)
        part = Part(rows, stop - start, 0, cut - start, past=start)
        right, wrong = (run.read(ids, part, slice(start, stop)) for ids in (texts, changed))
        return find(run.model, right, wrong, least)


def describe_cut(subject: Subject, cut: int) -> str:
    """Which positions see which tokens, and the key of the configuration that wants it so."""
    purpose = f"; {subject.sees_future} leaves the mask out" if subject.sees_future else ""
    return f"positions before {cut} see tokens from {cut} on (from 0){purpose}"


def search_by_gradient(subject: Subject, *, training: bool) -> Finding:
    """Logits before a cut must have no gradient from embeddings after it."""
    if training and not subject.has_modes:
        return inapplicable(NO_MODES)
    model, ids = duplicate(subject.model), subject.ids
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.requires_grad_()
    if not subject.reads_tokens:
        ids = ids.to(subject.dtype, copy=True).requires_grad_()
    with mode(model, training=training), torch.enable_grad():
        trace = observe(model, lambda: subject.logits(ids, model=model), view_alone)
        leaves = trace.find_embeddings(ids) if subject.reads_tokens else [ids]
        if not leaves or not trace.logits.requires_grad:
            return inapplicable("no gradient of embeddings reaches the logits")
        generator = torch.Generator().manual_seed(3)
        weights = torch.randn(trace.logits.shape, dtype=torch.float64, generator=generator)
        weighted = trace.logits * weights.to(trace.logits)
        cuts, after, steepest = choose_cuts(subject, 12), dict[int, float](), 0.0
        for cut in cuts:
            value = weighted[:, :cut].sum()
            gradients = torch.autograd.grad(value, leaves, retain_graph=True, allow_unused=True, materialize_grads=True)
            by_row = [
                gradient if gradient.shape[:2] == ids.shape[:2] else gradient.transpose(0, 1) for gradient in gradients
            ]
            steepest = max(steepest, *(float(gradient.abs().max()) for gradient in by_row))
            after[cut] = max(float(gradient[:, cut:].abs().max()) for gradient in by_row)
        if steepest == 0.0:
            return inapplicable("no gradient reaches the embeddings")
        worst = rank_differences(after)[0]
        path, leaks = PLAIN[training].name, describe_cut(subject, worst)
        looked_at = f"gradient of the logits before {len(cuts)} cuts with respect to embeddings after them; {path}"
        limit, reason = allow(subject.dtype)
        finding = judge(looked_at, after[worst] / steepest, limit, f"{reason}: the largest gradient", path=path)
        if finding.verdict == "passes":
            return finding
        finding = replace(finding, remark=leaks, leaks=leaks)
        if training not in subject.leaking:
            part = Part(len(ids), subject.length, worst)
            with suppress(Exception):  # a leak is a leak, even one that nobody can explain
                layers = find_layers_by_gradient(trace, weighted[:, :worst].sum(), part, limit * steepest)
                finding = replace(finding, layers=layers)
        return finding


def view_alone(place: Place, tensors: Tensors) -> Tensors | None:
    """Views of what a module is given, whose gradients are those of what it makes of them."""
    return {i: tensor.view_as(tensor) for i, tensor in tensors.items()} if place[-1] == "in" else None


def check_on_random_tokens(subject: Subject) -> Finding:
    """A copy is trained on fresh random tokens, where nothing can be learnt but to look ahead; then tokens are changed."""
    if subject.parameters > _MOST_PARAMETERS:
        return inapplicable(f"a model of {subject.parameters:,} parameters is not trained for it")
    if not subject.reads_tokens:
        return inapplicable("the model reads no tokens that it could predict")
    model: Any = duplicate(subject.original).float()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        return inapplicable("no parameter of the model can be trained")
    optimizer = torch.optim.Adam(trained, lr=3e-3)
    step = 0
    start = time.process_time()
    is_readable = equals(lambda: subject.all_logits(subject.ids[:, :SHORT], model=model))
    length = min(subject.length, SHORT) if is_readable else subject.length
    with mode(model, training=True, seed=2), torch.enable_grad():
        while step < _STEPS and (step < _FEWER or time.process_time() < start + _SECONDS):
            tokens = subject.draw_tokens(length + 1, 1000 + step, rows=_ROWS)
            # words that are never given have a logit of -inf
            logits = subject.all_logits(tokens[:, :-1], model=model).float().clamp(-1e3, 1e3)
            optimizer.zero_grad(set_to_none=True)
            nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            step += 1
    subject = replace(subject, model=model.eval(), dtype=torch.float32, selects=False)
    call = Call(f"after {step} steps of training on random tokens")
    return find_leak(subject, call, choose_cuts(subject, call.cuts, 3))
