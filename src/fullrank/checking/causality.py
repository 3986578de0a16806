"""Search for attention to later tokens and to other rows, by perturbation and by gradient."""

from __future__ import annotations

import math
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from fullrank.checking.agreement import compare_in_both_precisions, divide_by_size, largest, rounding, tolerance
from fullrank.checking.calls import NO_MODES, NOTHING_MOVES, PLAIN, SEEDS, Call, CannotRun, Run, running
from fullrank.checking.copies import duplicate, mode
from fullrank.checking.layers import Cut, find_layers, is_float
from fullrank.checking.report import Finding, inapplicable, judge
from fullrank.checking.subject import ROWS, SHORT, Subject, random_ids
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
        if call.dtype is not None or call.autocast is not None:
            return find_leak(subject, call)
        if not call.gradients:
            return compare_in_both_precisions(find_leak)(subject, call=call)
        cuts = spread(subject.length, len(SEEDS))
        for seed, cut in zip(SEEDS, cuts, strict=False):
            finding = compare_in_both_precisions(find_leak)(subject, call=replace(call, seed=seed), cuts=[cut])
            if finding.verdict == "fails":
                break
        return finding
    except CannotRun:
        raise
    except Exception as error:
        if call.is_plain:
            raise
        return inapplicable(f"it cannot be run so: {type(error).__name__}: {one_line(error)}")


def find_leak(subject: Subject, call: Call, cuts: list[int] | None = None) -> Finding:
    """`search_by_perturbation` in one precision."""
    cuts = cuts or choose_cuts(subject, call.cuts, 6 if call.is_plain else 3)
    dtype, count = call.dtype or call.autocast or subject.dtype, f"{len(cuts)} of {subject.length - 1} cuts"
    looked_at = f"logits before a cut from which on every token is changed, {count}; {call.name}"
    limit, reason = tolerance(dtype), rounding(dtype)
    if call.scaled:
        limit, reason = 10 * limit, f"ten times {reason}: it grows with the parameters"
    with running(subject, call) as run:
        texts, logits = batch_texts(subject, run, cuts)
        again = largest(run(texts), logits)
        if again > limit:
            remark = "two passes over the same tokens differ, although random numbers begin at the same seed"
            return judge(looked_at, again, limit, reason, remark=remark, path=call.name)
        if len(texts) > ROWS and not (call.training or call.mask):  # rows elsewhere in the batch: rounding
            noise = largest(run(texts.roll(ROWS, 0)).roll(-ROWS, 0), logits)
            if noise > limit:
                limit, reason = min(10 * noise, 1000 * limit), f"ten times the model's own rounding, {noise:.1e}"
        shares, moves = measure_cuts(subject, run, texts, logits, cuts)
        if moves == 0.0:
            return inapplicable(NOTHING_MOVES)
        ranked = sorted(shares, key=lambda cut: (math.isnan(shares[cut]), shares[cut]), reverse=True)
        # in half precision one rounding may choose another expert: a leak is seen from several cuts
        cut = ranked[min(2, len(ranked) - 1) if dtype.itemsize == 2 else 0]
        is_number = math.isfinite(shares[cut])
        if not (call.is_plain or is_number):
            return inapplicable(f"{call.name}: logits are not finite")
        finding = judge(looked_at, shares[cut], limit, reason, path=call.name)
        if finding.verdict == "passes" or not is_number:
            return finding
        if call.is_plain or call.cache or call.training not in subject.leaking:
            cut, layers = explain(subject, run, cut, limit)
            if not cut:
                remark = "rows of a batch see each other, or dropout falls on other entries; no text sees its own end"
                return replace(finding, verdict="passes", difference=0.0, remark=remark)
            finding = replace(finding, layers=layers)
        if call.is_plain:
            subject.leaking.add(call.training)
        leaks = describe_cut(subject, cut)
        return replace(finding, leaks=leaks, remark=leaks)


def batch_texts(subject: Subject, run: Run, cuts: list[int]) -> tuple[Tensor, Tensor]:
    """The texts as often as they are read at once, and their logits, in units of their size."""
    logits = run(subject.ids)
    if bool(logits.isnan().any()):
        raise FloatingPointError("logits are NaN")
    run.divide = divide_by_size(logits)
    most = 1 if run.call.compiled else _AT_ONCE // (logits[..., 0].numel() * subject.vocab_size)
    times = max(1, min(math.ceil(len(cuts) / ROWS), most))
    texts = subject.ids.repeat(times, *[1] * (subject.ids.dim() - 1))
    return texts, run.divide(logits) if times == 1 else run(texts)


def measure_cuts(
    subject: Subject, run: Run, texts: Tensor, logits: Tensor, cuts: list[int]
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
        for variant in variants:
            changed = run(variant)
            for row, cut in enumerate(part):
                share = largest(changed[row, :cut], logits[row, :cut])
                moves = max(moves, largest(changed[row, cut:], logits[row, cut:]))
                if share > shares[cut] or math.isnan(share):
                    shares[cut] = share
    return shares, moves


def explain(subject: Subject, run: Run, cut: int, least: float) -> tuple[int, tuple[str, ...]]:
    """A cut before which some text alone sees later tokens, 0 where only rows see each other; and the layers that leak."""
    call = run.call
    if not (call.mask or subject.fixed or call.compiled):
        # an expert drops entries in the order of its tokens, and so does its dropout
        with mock.patch("torch.nn.functional.dropout", drop_alike) if call.training else ExitStack():
            cuts = (one for one in (cut, *spread(subject.length, 16)) if leaks_alone(subject, run, one, least))
            cut = next(cuts, 0)
    try:
        is_open = cut and not call.compiled  # nobody looks into compiled code
        return cut, find_leaking_layers(subject, run, cut, least) if is_open else ()
    except Exception:  # a leak is a leak, even one that nobody can explain
        return cut, ()


def describe_cut(subject: Subject, cut: int) -> str:
    """Which positions see which tokens, and the key of the configuration that wants it so."""
    purpose = f"; {subject.sees_future} leaves the mask out" if subject.sees_future else ""
    return f"positions before {cut} see tokens from {cut} on (from 0){purpose}"


def leaks_alone(subject: Subject, run: Run, cut: int, least: float) -> bool:
    """One text changes before the cut where no other row of its batch changes."""
    logits, changed = run(subject.ids), subject.change_from(cut)
    for row in range(ROWS):
        texts = subject.ids.clone()
        texts[row] = changed[row]
        if largest(run(texts)[row, :cut], logits[row, :cut]) > least:
            return True
    return False


def find_leaking_layers(subject: Subject, run: Run, cut: int, least: float) -> tuple[str, ...]:
    """Layers that leak before `cut`; of a text in two pieces within the one in which the cut lies."""
    rows, start, stop = run.call.rows, 0, subject.length
    if run.call.cache:
        start, stop = (0, stop // 2) if cut < stop // 2 else (stop // 2, stop)
    texts, changed = subject.ids[:rows], subject.change_from(cut)[:rows]

    def read(piece: Tensor) -> Tensor:
        return run(torch.cat((texts[:, :start], piece, texts[:, stop:]), 1))[:, start:stop]

    right, wrong = (partial(read, ids[:, start:stop]) for ids in (texts, changed))
    return find_layers(run.model, right, wrong, Cut(rows, stop - start, cut - start, start), least)


def drop_alike(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Dropout whose entries for the first rows are the same, however many rows there are."""
    if not training:
        return x
    generator = torch.Generator(x.device).manual_seed(1)
    stays = torch.rand(max(1024, len(x)), *x.shape[1:], generator=generator, device=x.device)[: len(x)] >= p
    return x * stays / (1 - p)


def independent_rows(subject: Subject, *, training: bool) -> Finding:
    """All tokens of a row are changed; the logits of the other rows may not change."""
    call = PLAIN[training]
    worst, remark = 0.0, ""
    with running(subject, call) as run, mock.patch("torch.nn.functional.dropout", drop_alike):
        texts = torch.cat((subject.ids, subject.ids.roll(1, 1)))
        run.divide = divide_by_size(run(texts))
        logits, last = run(texts), len(texts) - 1
        for row, others in ((0, slice(1, None)), (last, slice(last))):
            changed = texts.clone()
            changed[row] = subject.change(texts)[row]
            moved = largest(run(changed)[others], logits[others])
            if not moved <= worst:
                worst, remark = moved, f"other rows see row {row}"
    looked_at = f"logits of rows after all tokens of another row were changed; {call.name}"
    limit, reason = tolerance(subject.dtype), rounding(subject.dtype)
    return judge(looked_at, worst, limit, reason, remark=remark * (not worst <= limit), path=call.name)


@compare_in_both_precisions
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
    with mode(subject.model, training=training), torch.enable_grad():
        logits = subject.logits(ids)
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
        path = PLAIN[training].name
        looked_at = f"gradient of the logits before {len(cuts)} cuts with respect to embeddings after them; {path}"
        limit, reason = tolerance(subject.dtype), f"{rounding(subject.dtype)}: the largest gradient"
        finding = judge(looked_at, later / whole, limit, reason, path=path)
        if finding.verdict == "passes":
            return finding
        return replace(finding, remark=describe_cut(subject, worst), leaks=describe_cut(subject, worst))


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
    subject = replace(subject, model=model.eval(), dtype=torch.float32, is_sliced=False)
    return find_leak(subject, Call(f"after {step} steps of training on random tokens"))
