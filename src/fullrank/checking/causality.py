"""Search for attention to later tokens and to other rows, by perturbation and by gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from fullrank.checking.compare import divide_by_size, in_both_precisions, is_same, largest, rounding, tolerance
from fullrank.checking.copies import mode
from fullrank.checking.layers import (
    OWN_FORWARD,
    Before,
    Calls,
    find_layer_by_gradient,
    find_layer_of_rows,
    find_leaking_layers,
    observe,
)
from fullrank.checking.paths import CACHE, COMPILED, NO_MODES, SCALED, SEEDS, CannotRun, CodePath, Run, running
from fullrank.checking.report import Finding, inapplicable, judge
from fullrank.checking.shown import show_leak
from fullrank.checking.subject import ROWS, Subject
from fullrank.core.errors import one_line

_AT_ONCE = 20_000_000  # logits of a batch
_WORK = 1_000_000_000  # parameters times tokens of the texts that are read along a path
_WORD = 100  # parameters that a word of the vocabulary is worth
_FEW, _FEWEST, _SEEDS = 16, 3, (2, 3, 4, 5, 6)  # cuts, where rows are read one by one, and of each of the seeds


def spread(length: int, most: int) -> list[int]:
    """Positions from 1 on, all of them or `most` that are spread evenly, the first and the last among them."""
    if length - 1 <= most:
        return list(range(1, length))
    return sorted({1 + round(i * (length - 2) / (most - 1)) for i in range(most)})


def choose_cuts(subject: Subject, most: int, least: int = 6) -> list[int]:
    """Positions from which on tokens are changed: fewer for a large model."""
    affordable = _WORK // (subject.length * (subject.parameters + _WORD * subject.vocab_size))
    return spread(subject.length, min(max(least, affordable), most))


# -- by perturbation --------------------------------------------------------------------------------------------------


def by_perturbation(subject: Subject, path: CodePath) -> Finding:
    """From a cut on, every token is changed; no logits before the cut may change."""
    if path.is_one_row:
        subject = subject.first(subject.even)
    if path.how == COMPILED:  # loops over positions take long to compile
        subject = subject.short(13)
    if path.how == SCALED and find_leak(subject, CodePath()).verdict == "fails":
        return inapplicable("later tokens are seen with the parameters as they are")
    seeds = [replace(path, seed=seed) for seed in _SEEDS] if path.how == SEEDS else [path]
    try:
        findings = [in_both_precisions(find_leak)(subject, path=one) for one in seeds]
        return next((finding for finding in findings if finding.verdict == "fails"), findings[0])
    except CannotRun:
        raise
    except Exception as error:
        if path.attention or path.how:
            return inapplicable(f"it cannot be run so: {type(error).__name__}: {one_line(error)}")
        raise


def find_leak(subject: Subject, path: CodePath) -> Finding:
    """`by_perturbation` in one precision."""
    size, dtype = subject.length, path.dtype or subject.dtype
    is_seeded, is_variant = path.how == SEEDS, bool(path.padding or path.attention)
    most = _FEWEST if is_seeded else _FEW if path.is_one_row else size
    cuts = choose_cuts(subject, most, _FEWEST if is_variant else 2 * _FEWEST)
    words = path.describe(subject)
    where = f"each of {size} positions" if len(cuts) == size - 1 else f"{len(cuts)} positions of {size}"
    seeded = ", dropout seeded" if path.training else ""
    looked_at = f"logits before a cut from which on every token is changed, {where}; {words}{seeded}"
    limit, reason = tolerance(dtype), rounding(dtype)
    if path.how == SCALED:
        limit, reason = 10 * limit, f"ten times {reason}: it grows with the parameters"
    with running(subject, path) as run:
        texts, logits = batch_texts(subject, run, 1 if path.how == COMPILED else math.ceil(len(cuts) / ROWS))
        again = 0.0 if is_seeded else largest(run(texts), logits)
        if again > limit:
            remark = "two passes over the same tokens differ, although random numbers begin at the same seed"
            return judge(looked_at, again, limit, reason, remark=remark, path=words)
        if len(texts) > ROWS and not (path.training or path.padding):  # rows elsewhere in the batch: rounding
            noise = largest(run(texts.roll(ROWS, 0)).roll(-ROWS, 0), logits)
            if noise > limit:
                limit, reason = min(10 * noise, 1000 * limit), f"ten times the model's own rounding, {noise:.1e}"
        shares, moves = measure_cuts(subject, run, texts, logits, cuts)
        if moves == 0.0:
            return inapplicable("no token changes any logits at all, so there is nothing that could leak")
        ranked = sorted(shares, key=lambda cut: (math.isnan(shares[cut]), shares[cut]), reverse=True)
        # in half precision one rounding may choose another expert: a leak is seen from several cuts
        cut = ranked[min(2, len(ranked) - 1) if dtype.itemsize == 2 else 0]
        if path.how and not math.isfinite(shares[cut]):
            return inapplicable(f"{path.how}: logits are not finite")
        finding = judge(looked_at, shares[cut], limit, reason, path=words)
        if finding.verdict == "passes" or not math.isfinite(shares[cut]):
            return finding
        try:
            return explain(subject, run, finding, cut, limit)
        except Exception as error:  # a leak is a leak, even one that nobody can explain
            remark = f"no layer: {type(error).__name__}: {error}"
            return replace(finding, leaks=describe_cut(subject, cut), remark=remark)


def batch_texts(subject: Subject, run: Run, times: int) -> tuple[Tensor, Tensor]:
    """The texts as often as they are read at once, and their logits, in units of their size."""
    logits = run(subject.ids)
    if bool(logits.isnan().any()):
        raise FloatingPointError("logits are NaN")
    run.divide = divide_by_size(logits)
    times = max(1, min(times, _AT_ONCE // (logits[..., 0].numel() * subject.vocab_size)))
    texts = subject.ids.repeat(times, *[1] * (subject.ids.dim() - 1))
    return texts, run.divide(logits) if times == 1 else run(texts)


def measure_cuts(
    subject: Subject, run: Run, texts: Tensor, logits: Tensor, cuts: list[int]
) -> tuple[dict[int, float], float]:
    """The largest change of logits before each cut, and of any logits after one."""
    shares, moves = dict.fromkeys(cuts, 0.0), 0.0
    for start in range(0, len(cuts), len(texts)):
        part = (cuts[start:] + cuts[-1:] * len(texts))[: len(texts)]
        for variant in make_variants(subject, texts, part):
            changed = run(variant)
            for row, cut in enumerate(part):
                share = largest(changed[row, :cut], logits[row, :cut])
                moves = max(moves, largest(changed[row, cut:], logits[row, cut:]))
                if share > shares[cut] or math.isnan(share):
                    shares[cut] = share
    return shares, moves


def make_variants(subject: Subject, texts: Tensor, cuts: list[int]) -> Iterator[Tensor]:
    """The texts, each changed from its cut on: every token another one, or padding."""
    later = torch.arange(subject.length, device=texts.device) >= torch.tensor(cuts, device=texts.device)[:, None]
    yield subject.change(texts, later)
    if subject.padding_id is not None:
        yield torch.where(later, subject.padding_id, texts)


def explain(subject: Subject, run: Run, finding: Finding, cut: int, least: float) -> Finding:
    """A finding of a leak, with the layers and what shows it; passes where only rows see each other."""
    path = run.path
    if not (path.padding or subject.fixed or path.how == COMPILED):
        # an expert drops entries in the order of its tokens, and so does its dropout
        with mock.patch("torch.nn.functional.dropout", drop_alike) if path.training else ExitStack():
            own = find_own_leaks(subject, run, cut, least)
        if not own:
            remark = "rows of a batch see each other, or dropout falls on other entries; no text sees its own end"
            return replace(finding, verdict="passes", difference=0.0, remark=remark)
        cut = own[0]
    leaks = describe_cut(subject, cut)
    layers = find_layers(subject, run, cut, least)
    return replace(finding, layers=layers, remark=leaks, leaks=leaks, reproduction=show_leak(subject, path, cut))


def describe_cut(subject: Subject, cut: int) -> str:
    """Which positions see which tokens, and the key of the configuration that wants it so."""
    purpose = f"; {subject.sees_future} leaves the mask out" if subject.sees_future else ""
    return f"positions before {cut} see tokens from {cut} on (from 0){purpose}"


def find_own_leaks(subject: Subject, run: Run, cut: int, least: float) -> list[int]:
    """The cut, or others, from which on one text by itself changes before it: no other row has to do with it."""

    def leaks(cut: int) -> bool:
        changed = subject.change_from(cut).split(1)
        pairs = zip(changed, subject.ids.split(1), strict=True)
        return any(largest(run(other)[:, :cut], run(text)[:, :cut]) > least for other, text in pairs)

    return [cut] if leaks(cut) else [other for other in spread(subject.length, 16) if leaks(other)]


def find_layers(subject: Subject, run: Run, cut: int, least: float) -> tuple[str, ...]:
    """Layers that leak before `cut`; of a text in two pieces within the one in which the cut lies."""
    texts, start, stop = subject.ids, 0, subject.length
    if run.path.how == CACHE:
        start, stop = (0, stop // 2) if cut < stop // 2 else (stop // 2, stop)
    before = Before(ROWS, stop - start, cut - start, past=start)
    with ExitStack() as stack:
        runs = run
        if run.path.how == COMPILED:  # nobody looks into compiled code: the same code is told that it is compiled
            for name in ("torch.compiler.is_compiling", "torch._dynamo.is_compiling"):
                stack.enter_context(mock.patch(name, return_value=True))
            runs = stack.enter_context(running(subject, CodePath()))
            runs.divide = run.divide

        def read(piece: Tensor) -> Tensor:
            return runs(torch.cat((texts[:, :start], piece, texts[:, stop:]), 1))[:, start:stop]

        pieces = (texts[:, start:stop], subject.change_from(cut)[:, start:stop])
        layers = find_leaking_layers(run.model, read, *pieces, before, least)
    return () if run.path.how == COMPILED and layers[0].startswith(OWN_FORWARD) else layers


def drop_alike(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Dropout whose entries for the first rows are the same, however many rows there are."""
    if not training:
        return x
    generator = torch.Generator(x.device).manual_seed(1)
    stays = torch.rand(max(1024, len(x)), *x.shape[1:], generator=generator, device=x.device)[: len(x)] >= p
    return x * stays / (1 - p)


# -- rows --------------------------------------------------------------------------------------------------------------


def independent_rows(subject: Subject, *, training: bool) -> Finding:
    """All tokens of a row are changed; the logits of the other rows may not change."""
    path = CodePath(training=training)
    limit, worst, layers, remark = tolerance(subject.dtype), 0.0, tuple[str, ...](), ""
    with running(subject, path) as run, mock.patch("torch.nn.functional.dropout", drop_alike):
        texts = torch.cat((subject.ids, subject.ids.roll(1, 1)))
        logits = run(texts)
        run.divide = divide_by_size(logits)
        logits = run.divide(logits)
        for row in (0, len(texts) - 1):
            changed = texts.clone()
            changed[row] = subject.change(texts)[row]
            moved = (run(changed) - logits).abs().flatten(1).amax(1)
            moved[row] = 0.0
            if not float(moved.max()) <= worst:
                worst = float(moved.max())
                if not worst <= limit:
                    remark, layers = (
                        f"other rows see row {row}",
                        (find_layer_of_rows(run.model, run, texts, changed, row),),
                    )
    words = path.describe(subject)
    looked_at = f"logits of rows after all tokens of another row were changed; {words}"
    return judge(looked_at, worst, limit, rounding(subject.dtype), remark=remark, layers=layers, path=words)


# -- by gradient ------------------------------------------------------------------------------------------------------


class Leaves:
    """Outputs of modules that read the ids, cut off: tensors (B, N, E) whose gradients are looked at."""

    def __init__(self, ids: Tensor) -> None:
        self.ids, self.tensors = ids, list[Tensor]()

    def cut_off(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> Tensor | None:
        """Make the output of a module that reads the ids a leaf. Parameters are frozen: what depends on a leaf is none."""
        read = args[0] if args else None
        if not isinstance(read, Tensor) or read.dim() != 2 or not isinstance(out, Tensor) or out.requires_grad:
            return None
        if not out.is_floating_point() or out.dim() != 3 or out.shape[:2] != read.shape:
            return None
        is_turned = not is_same(read, self.ids)  # (N, B) inside a function that reads (B, N)
        if is_turned and not is_same(read.mT, self.ids):
            return None
        leaf = (out.transpose(0, 1) if is_turned else out).detach().requires_grad_()
        self.tensors.append(leaf)
        return (leaf.transpose(0, 1) if is_turned else leaf).clone()  # some models add to it in place

    def largest_gradients(self, values: Tensor, weights: Tensor, cut: int) -> tuple[float, float]:
        """The largest gradient of the values at all positions of the leaves, and at those from `cut` on."""
        gradients = torch.autograd.grad(values, self.tensors, weights, retain_graph=True, allow_unused=True)
        sizes = [gradient.abs() for gradient in gradients if gradient is not None]
        whole = max((float(size.max()) for size in sizes), default=0.0)
        return whole, max((float(size[:, cut:].max()) for size in sizes), default=0.0)


@in_both_precisions
def by_gradient(subject: Subject, *, training: bool) -> Finding:
    """Logits before a cut must have no gradient from embeddings after it."""
    if training and not subject.has_modes:
        return inapplicable(NO_MODES)
    path = CodePath("training" if training else "evaluation", training)
    ids, leaves = subject.ids, Leaves(subject.ids)
    if not subject.reads_tokens:
        ids = ids.to(subject.dtype).requires_grad_()
        leaves.tensors.append(ids)
    with ExitStack() as stack:
        stack.enter_context(mode(subject.model, training=training))
        stack.enter_context(torch.enable_grad())
        for parameter in subject.model.parameters():
            if parameter.requires_grad:
                stack.callback(parameter.requires_grad_, True)
                parameter.requires_grad_(False)
        for name, module in subject.model.named_modules():
            if name and subject.reads_tokens:
                stack.callback(module.register_forward_hook(leaves.cut_off).remove)
        calls = observe(subject.model, lambda: subject.logits(ids))
        if not leaves.tensors:
            return inapplicable("no module was found that turns input_ids into vectors")
        if not calls.logits.requires_grad:
            return inapplicable("no gradient reaches the logits")
        return judge_gradients(subject, path, calls, leaves)


def judge_gradients(subject: Subject, path: CodePath, calls: Calls, leaves: Leaves) -> Finding:
    logits = calls.logits
    weights = torch.randn(logits.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).to(logits)
    cuts, later, whole, worst = choose_cuts(subject, 12), 0.0, 0.0, 1
    for cut in cuts:
        largest_of_all, largest_after = leaves.largest_gradients(logits[:, :cut], weights[:, :cut], cut)
        whole = max(whole, largest_of_all)
        if largest_after > later or math.isnan(largest_after):
            later, worst = largest_after, cut
    if whole == 0.0:
        return inapplicable("no gradient reaches the embeddings")
    looked_at = f"gradient of the logits before {len(cuts)} cuts with respect to embeddings after them; {path.name}"
    limit, reason = tolerance(subject.dtype), f"{rounding(subject.dtype)}: the largest gradient"
    finding = judge(looked_at, later / whole, limit, reason, path=path.describe(subject))
    if finding.verdict == "passes":
        return finding
    before = Before(ROWS, subject.length, worst)
    value = (logits[:, :worst] * weights[:, :worst]).sum()
    layer = find_layer_by_gradient(calls, leaves.tensors, value, before, whole * limit)
    leaks = describe_cut(subject, worst)
    return replace(finding, remark=leaks, layers=(layer,), leaks=leaks)
