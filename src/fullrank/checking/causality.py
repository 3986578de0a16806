"""Search for attention to later tokens, by perturbation, by gradient, and after training on random tokens."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fullrank.checking.calls import NO_MODES, NOTHING_MOVES, PLAIN, SEEDS, Call, CannotRun, Run, running
from fullrank.checking.copies import WithoutDropout, duplicate, mode
from fullrank.checking.layers import (
    Part,
    Reading,
    find_layer_by_compiler,
    find_layers,
    find_layers_by_gradient,
    is_float,
)
from fullrank.checking.report import Finding, allow, divide_by_size, find_worst, inapplicable, judge, largest
from fullrank.checking.subject import SHORT, Subject, random_ids
from fullrank.core.errors import one_line

_AT_ONCE = 20_000_000  # logits of a batch
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
        subject = call.choose_texts(subject)
        if not call.gradients:
            return find_leak(subject, call)
        for seed, cut in zip(SEEDS, spread(subject.length, len(SEEDS)), strict=False):
            finding = find_leak(subject, replace(call, seed=seed), [cut])
            if finding.verdict == "fails":
                break
        return finding
    except Exception as error:
        if call.is_plain or isinstance(error, CannotRun):
            raise
        raise CannotRun(f"it cannot be run so: {type(error).__name__}: {one_line(error)}") from error


def find_leak(subject: Subject, call: Call, cuts: list[int] | None = None) -> Finding:
    """`search_by_perturbation` with one seed. cuts: positions from which on tokens are changed."""
    cuts = cuts or choose_cuts(subject, call.cuts, 6 if call.is_plain else 3)
    if call.special:  # the first texts get the cuts near the middle
        cuts = sorted(cuts, key=lambda cut: abs(2 * cut - subject.length))
    dtype, count = call.dtype or call.autocast or subject.dtype, f"{len(cuts)} of {subject.length - 1} cuts"
    looked_at = f"logits before a cut from which on every token is changed, {count}; {call.name}"
    limit, reason = allow(dtype)
    if call.scaled:
        limit, reason = 10 * limit, f"ten times {reason}: it grows with the parameters"
    with running(subject, call) as run:
        rows, texts = len(subject.ids), repeat_texts(subject, call, cuts)
        logits = run(texts)
        if bool(logits.isnan().any()):
            raise FloatingPointError("logits are NaN")
        divide = divide_by_size(logits)

        def read(ids: Tensor) -> Tensor:
            return divide(run(ids))

        logits = divide(logits)
        again = largest(read(texts), logits)
        if again > limit:
            remark = "two passes over the same tokens differ, although random numbers begin at the same seed"
            return judge(looked_at, again, limit, reason, remark=remark, path=call.name)
        if len(texts) > rows and not (call.training or call.mask):  # rows elsewhere in the batch: rounding
            noise = largest(read(texts.roll(rows, 0)).roll(-rows, 0), logits)
            if noise > limit:
                limit, reason = min(10 * noise, 1000 * limit), f"ten times the model's own rounding, {noise:.1e}"
        shares, moves = measure_cuts(subject, read, texts, logits, cuts)
        if moves == 0.0:
            return inapplicable(NOTHING_MOVES)
        cut = find_worst(shares)
        if dtype.itemsize == 2:  # one rounding may choose another expert: a leak is seen from several cuts
            cut = sorted(shares, key=lambda one: shares[one])[-min(3, len(shares))]
        finding = judge(looked_at, shares[cut], limit, reason, path=call.name)
        if not math.isfinite(shares[cut]):
            return finding if call.is_plain else inapplicable(f"{call.name}: logits are not finite")
        if finding.verdict == "passes":
            return finding
        if call.is_plain or call.cache or call.training not in subject.leaking:
            if not (call.mask or subject.fixed or call.compiled):
                cut = find_cut_of_a_text(subject, call, read, cut, limit)
            if not cut:
                remark = "rows of a batch see each other, or dropout falls on other entries; no text sees its own end"
                return replace(finding, verdict="passes", difference=0.0, remark=remark)
            with suppress(Exception):  # a leak is a leak, even one that nobody can explain
                finding = replace(finding, layers=name_leaking_layers(subject, run, cut, limit))
    if call.is_plain:
        subject.leaking.add(call.training)
    leaks = describe_cut(subject, cut)
    return replace(finding, leaks=leaks, remark=leaks)


def repeat_texts(subject: Subject, call: Call, cuts: list[int]) -> Tensor:
    """The texts, as often as they are read at once with a cut in each."""
    ids = subject.ids
    most = 1 if call.compiled else _AT_ONCE // (len(ids) * subject.length * subject.vocab_size)
    times = max(1, min(math.ceil(len(cuts) / len(ids)), most))
    return ids.repeat(times, *[1] * (ids.dim() - 1))


def measure_cuts(
    subject: Subject, read: Callable[[Tensor], Tensor], texts: Tensor, logits: Tensor, cuts: list[int]
) -> tuple[dict[int, float], float]:
    """The largest change of logits before each cut, and of any logits after one."""
    shares, moves = dict.fromkeys(cuts, 0.0), 0.0
    positions = torch.arange(subject.length, device=texts.device)
    for start in range(0, len(cuts), len(texts)):
        part = (cuts[start:] + cuts[-1:] * len(texts))[: len(texts)]
        later = positions >= torch.tensor(part, device=texts.device)[:, None]
        variants = [subject.change(texts, later)]
        if subject.kind == "module" and subject.reads_tokens and not subject.has_example:  # 0 may be padding
            variants.append(torch.where(later, 0, texts))
        for changed in map(read, variants):
            for row, cut in enumerate(part):
                share = largest(changed[row, :cut], logits[row, :cut])
                moves = max(moves, largest(changed[row, cut:], logits[row, cut:]))
                if share > shares[cut] or math.isnan(share):
                    shares[cut] = share
    return shares, moves


def find_cut_of_a_text(subject: Subject, call: Call, read: Callable[[Tensor], Tensor], cut: int, least: float) -> int:
    """A cut before which some text alone sees later tokens, and no other row of its batch is changed; 0 where there is none."""
    # an expert drops entries in the order of its tokens, and so does its dropout
    with WithoutDropout() if call.training else ExitStack():
        logits = read(subject.ids)
        for one in dict.fromkeys((cut, *spread(subject.length, 6))):
            changed = subject.change_from(one)
            for row in range(len(changed)):
                texts = subject.ids.clone()
                texts[row] = changed[row]
                if largest(read(texts)[row, :one], logits[row, :one]) > least:
                    return one
    return 0


def describe_cut(subject: Subject, cut: int) -> str:
    """Which positions see which tokens, and the key of the configuration that wants it so."""
    purpose = f"; {subject.sees_future} leaves the mask out" if subject.sees_future else ""
    return f"positions before {cut} see tokens from {cut} on (from 0){purpose}"


def name_leaking_layers(subject: Subject, run: Run, cut: int, least: float) -> tuple[str, ...]:
    """Layers that leak before `cut`; of a text in two pieces within the one in which the cut lies."""
    texts, changed, start, stop = subject.ids, subject.change_from(cut), 0, subject.length
    if run.call.cache:
        start, stop = (0, stop // 2) if cut < stop // 2 else (stop // 2, stop)
    if run.call.compiled:  # nobody looks into compiled code
        run = Run(subject, run.call, subject.model)
    part = Part(1 if run.call.rows == 1 else len(texts), stop - start, 0, cut - start, past=start)

    def read(ids: Tensor) -> Tensor:
        return run(torch.cat((texts[:, :start], ids[:, start:stop], texts[:, stop:]), 1))[:, start:stop]

    right, wrong = (Reading.from_run(partial(read, ids), part) for ids in (texts, changed))
    if run.call.compiled:
        return find_layer_by_compiler(run.model, right, wrong, least)
    return find_layers(run.model, right, wrong, least)


def search_by_gradient(subject: Subject, *, training: bool) -> Finding:
    """Logits before a cut must have no gradient from embeddings after it.

    Outputs (B, N, E) of modules that read the ids become leaves, whose gradients are looked at. Parameters are frozen: what
    depends on a leaf is none.
    """
    if training and not subject.has_modes:
        return inapplicable(NO_MODES)
    ids, leaves = subject.ids, list[Tensor]()
    if not subject.reads_tokens:
        ids = ids.to(subject.dtype).requires_grad_()
        leaves.append(ids)

    def cut_off(module: nn.Module, args: tuple[Any, ...], out: Any) -> Tensor | None:
        read = args[0] if args else None
        if not is_float(out) or out.requires_grad or out.dim() != 3 or not isinstance(read, Tensor):
            return None
        is_turned = read.shape == ids.mT.shape  # (N, B) inside a function that reads (B, N)
        if not torch.equal(read, ids.mT if is_turned else ids) or out.shape[:2] != read.shape:
            return None
        leaf = (out.transpose(0, 1) if is_turned else out).detach().requires_grad_()
        leaves.append(leaf)
        return (leaf.transpose(0, 1) if is_turned else leaf).clone()  # some models add to it in place

    subject = replace(subject, model=duplicate(subject.model).requires_grad_(False))
    for name, module in subject.model.named_modules():
        if name and subject.reads_tokens:
            module.register_forward_hook(cut_off)

    def read() -> Tensor:
        with mode(subject.model, training=training), torch.enable_grad():
            return subject.logits(ids)

    logits = read()
    if not leaves or not logits.requires_grad:
        return inapplicable("no gradient of embeddings reaches the logits")
    weights = torch.randn(logits.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).to(logits)
    cuts, later, whole, worst = choose_cuts(subject, 12), 0.0, 0.0, 1
    for cut in cuts:
        value = (logits[:, :cut] * weights[:, :cut]).sum()
        gradients = torch.autograd.grad(value, leaves, retain_graph=True, allow_unused=True)
        sizes = [gradient.abs() for gradient in gradients if gradient is not None]
        whole = max(whole, *(float(size.max()) for size in sizes))
        largest_after = max((float(size[:, cut:].max()) for size in sizes), default=0.0)
        if not largest_after <= later:
            later, worst = largest_after, cut
    if whole == 0.0:
        return inapplicable("no gradient reaches the embeddings")
    path, leaks = PLAIN[training].name, describe_cut(subject, worst)
    looked_at = f"gradient of the logits before {len(cuts)} cuts with respect to embeddings after them; {path}"
    limit, reason = allow(subject.dtype)
    finding = judge(looked_at, later / whole, limit, f"{reason}: the largest gradient", path=path)
    if finding.verdict == "passes":
        return finding
    layers: tuple[str, ...] = ()
    if training not in subject.leaking:
        after = Part(len(ids), subject.length, worst)
        with suppress(Exception), torch.enable_grad():
            run = lambda: (read()[:, :worst] * weights[:, :worst]).sum()  # noqa: E731
            layers = find_layers_by_gradient(subject.model, run, after, limit * whole)
    return replace(finding, remark=leaks, leaks=leaks, layers=layers)


def check_on_random_tokens(subject: Subject) -> Finding:
    """A copy is trained on fresh random tokens, where nothing can be learnt but to look ahead; then tokens are changed."""
    if subject.parameters > _MOST_PARAMETERS:
        return inapplicable(f"a model of {subject.parameters:,} parameters is not trained for it")
    if not subject.reads_tokens:
        return inapplicable("the model reads no tokens that it could predict")
    model: Any = duplicate(subject.own).float()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        return inapplicable("no parameter of the model can be trained")
    step, start, words = 0, time.process_time(), subject.replace_padding(subject.words)
    optimizer, length = torch.optim.Adam(trained, lr=3e-3), min(subject.length - 1, SHORT)
    with mode(model, training=True, seed=2), torch.enable_grad():
        while step < _STEPS and (step < _FEWER or time.process_time() < start + _SECONDS):
            tokens = words[random_ids(_ROWS, length + 1, len(words), 1000 + step).to(words.device)]
            # words that are never given have a logit of -inf
            logits = subject.all_logits(tokens[:, :-1], model=model).float().clamp(-1e3, 1e3)
            optimizer.zero_grad(set_to_none=True)
            nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            step += 1
    subject = replace(subject, model=model.eval(), dtype=torch.float32, selects=False)
    return find_leak(subject, Call(f"after {step} steps of training on random tokens"))
