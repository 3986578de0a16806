"""Search for attention to later tokens and to other rows, by perturbation and by gradient."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from fullrank.checking.calls import NO_MODES, SEEDS, Call, CannotRun, Run, describe_call, running
from fullrank.checking.compare import compare_in_both_precisions, divide_by_size, is_same, largest, rounding, tolerance
from fullrank.checking.copies import AsModule, duplicate, mode
from fullrank.checking.layers import (
    OWN_FORWARD,
    Before,
    find_layer_by_gradient,
    find_layer_of_rows,
    find_leaking_layers,
    observe,
)
from fullrank.checking.report import Finding, inapplicable, judge
from fullrank.checking.subject import ROWS, SEED, Subject
from fullrank.core.errors import one_line

_AT_ONCE = 20_000_000  # logits of a batch
_WORK = 1_000_000_000  # parameters times tokens of the texts that are read by a call
_WORD = 100  # parameters that a word of the vocabulary is worth


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


def search_by_perturbation(subject: Subject, call: Call) -> Finding:
    """From a cut on, every token is changed; no logits before the cut may change."""
    if call.scaled and False in subject.leaking:
        return inapplicable("later tokens are seen with the parameters as they are")
    try:
        subject = call.choose_texts(subject)
        if call.gradients:
            cuts = spread(subject.length, len(SEEDS))
            seeded = [(replace(call, seed=seed), [cut]) for seed, cut in zip(SEEDS, cuts, strict=False)]
            findings = [compare_in_both_precisions(find_leak)(subject, call=one, cuts=cut) for one, cut in seeded]
            return next((finding for finding in findings if finding.verdict == "fails"), findings[0])
        if call.dtype is not None or call.autocast is not None:
            return find_leak(subject, call)
        return compare_in_both_precisions(find_leak)(subject, call=call)
    except CannotRun:
        raise
    except Exception as error:
        if call.is_plain:
            raise
        return inapplicable(f"it cannot be run so: {type(error).__name__}: {one_line(error)}")


def find_leak(subject: Subject, call: Call, cuts: list[int] | None = None) -> Finding:
    """`search_by_perturbation` in one precision."""
    cuts = cuts or choose_cuts(subject, call.cuts, 6 if call.is_plain else 3)
    dtype, size, path = call.dtype or call.autocast or subject.dtype, subject.length, describe_call(subject, call)
    seeded = ", dropout seeded" if call.training else ""
    looked_at = (
        f"logits before a cut from which on every token is changed, {len(cuts)} of {size - 1} cuts; {path}{seeded}"
    )
    limit, reason = tolerance(dtype), rounding(dtype)
    if call.scaled:
        limit, reason = 10 * limit, f"ten times {reason}: it grows with the parameters"
    with running(subject, call) as run:
        texts, logits = batch_texts(subject, run, cuts)
        again = largest(run(texts), logits)
        if again > limit:
            remark = "two passes over the same tokens differ, although random numbers begin at the same seed"
            return judge(looked_at, again, limit, reason, remark=remark, path=path)
        if len(texts) > ROWS and not (call.training or call.mask):  # rows elsewhere in the batch: rounding
            noise = largest(run(texts.roll(ROWS, 0)).roll(-ROWS, 0), logits)
            if noise > limit:
                limit, reason = min(10 * noise, 1000 * limit), f"ten times the model's own rounding, {noise:.1e}"
        shares, moves = measure_cuts(subject, run, texts, logits, cuts)
        if moves == 0.0:
            return inapplicable("no token changes any logits at all, so there is nothing that could leak")
        ranked = sorted(shares, key=lambda cut: (math.isnan(shares[cut]), shares[cut]), reverse=True)
        # in half precision one rounding may choose another expert: a leak is seen from several cuts
        cut = ranked[min(2, len(ranked) - 1) if dtype.itemsize == 2 else 0]
        if not call.is_plain and not math.isfinite(shares[cut]):
            return inapplicable(f"{call.name}: logits are not finite")
        finding = judge(looked_at, shares[cut], limit, reason, path=path)
        if finding.verdict == "passes" or not math.isfinite(shares[cut]):
            return finding
        leaks = describe_cut(subject, cut)
        if not (call.is_plain or call.cache) and call.training in subject.leaking:  # the same leak once more
            return replace(finding, leaks=leaks, remark=leaks)
        try:
            finding = explain(subject, run, finding, cut, limit)
        except Exception as error:  # a leak is a leak, even one that nobody can explain
            finding = replace(finding, leaks=leaks, remark=f"no layer: {type(error).__name__}: {error}")
        if call.is_plain and finding.verdict == "fails":
            subject.leaking.add(call.training)
        return finding


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
        if subject.padding_id is not None:
            variants.append(torch.where(later, subject.padding_id, texts))
        for variant in variants:
            changed = run(variant)
            for row, cut in enumerate(part):
                share = largest(changed[row, :cut], logits[row, :cut])
                moves = max(moves, largest(changed[row, cut:], logits[row, cut:]))
                if share > shares[cut] or math.isnan(share):
                    shares[cut] = share
    return shares, moves


def explain(subject: Subject, run: Run, finding: Finding, cut: int, least: float) -> Finding:
    """A finding of a leak, with the layers and what shows it; passes where only rows see each other."""
    call = run.call
    if not (call.mask or subject.fixed or call.compiled):
        # an expert drops entries in the order of its tokens, and so does its dropout
        with mock.patch("torch.nn.functional.dropout", drop_alike) if call.training else ExitStack():
            candidates = [cut, *spread(subject.length, 16)]
            cuts = (one for one in candidates if leaks_alone(subject, run, one, least))
            cut = next(cuts, 0)
        if not cut:
            remark = "rows of a batch see each other, or dropout falls on other entries; no text sees its own end"
            return replace(finding, verdict="passes", difference=0.0, remark=remark)
    leaks = describe_cut(subject, cut)
    layers = find_layers(subject, run, cut, least)
    return replace(finding, layers=layers, remark=leaks, leaks=leaks, reproduction=show_leak(subject, call, cut))


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


def find_layers(subject: Subject, run: Run, cut: int, least: float) -> tuple[str, ...]:
    """Layers that leak before `cut`; of a text in two pieces within the one in which the cut lies."""
    texts, start, stop = subject.ids, 0, subject.length
    if run.call.cache:
        start, stop = (0, stop // 2) if cut < stop // 2 else (stop // 2, stop)
    rows = run.call.rows
    before = Before(rows, stop - start, cut - start, past=start)
    changed = subject.change_from(cut)
    if rows == 1:
        moved = [largest(run(a[None])[:, :cut], run(b[None])[:, :cut]) for a, b in zip(changed, texts, strict=True)]
        row = moved.index(max(moved))
        texts, changed = texts[row : row + 1], changed[row : row + 1]
    with ExitStack() as stack:
        runs = run
        if run.call.compiled:  # nobody looks into compiled code: the same code is told that it is compiled
            for name in ("torch.compiler.is_compiling", "torch._dynamo.is_compiling"):
                stack.enter_context(mock.patch(name, return_value=True))
            runs = stack.enter_context(running(subject, Call("evaluation")))
            runs.divide = run.divide

        def read(piece: Tensor) -> Tensor:
            return runs(torch.cat((texts[:, :start], piece, texts[:, stop:]), 1))[:, start:stop]

        pieces = (texts[:, start:stop], changed[:, start:stop])
        layers = find_leaking_layers(run.model, read, *pieces, before, least)
    return () if run.call.compiled and layers[0].startswith(OWN_FORWARD) else layers


def drop_alike(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Dropout whose entries for the first rows are the same, however many rows there are."""
    if not training:
        return x
    generator = torch.Generator(x.device).manual_seed(1)
    stays = torch.rand(max(1024, len(x)), *x.shape[1:], generator=generator, device=x.device)[: len(x)] >= p
    return x * stays / (1 - p)


def show_leak(subject: Subject, call: Call, cut: int) -> str:
    """Two lines of Python, with `model` in scope, that print the largest change of logits before `cut`.

    Empty for models of other inputs, for other calls than plain evaluation and training, and where they print no more than
    rounding: they have been run on a copy of the model as it was passed.
    """
    if subject.fixed or subject.sequence or not call.is_plain:
        return ""
    with torch.no_grad():
        out = subject.call(subject.ids)
    logits = ".logits" if hasattr(out, "logits") else '["logits"]' if isinstance(out, dict) else ""
    logits = "[0]" if isinstance(out, tuple | list) and not logits else logits
    words, train = subject.vocab_size, "train" if call.training else "eval"
    lines = (
        f"import torch; torch.manual_seed({SEED}); a = torch.randint({words}, ({ROWS}, {subject.length})); b = a.clone(); "
        f"b[:, {cut}:] = (a[:, {cut}:] + 1) % {words}{'' if isinstance(subject.own, AsModule) else f'; model.{train}()'}\n"
        f"x, y = ((torch.manual_seed(1), model(ids))[1]{logits} for ids in (a, b)); "
        f"print((x - y)[:, :{cut}].nan_to_num().abs().max())"
    )
    printed: list[float] = []
    own = duplicate(subject.own)
    scope = {"model": own.function if isinstance(own, AsModule) else own}
    scope["print"] = lambda value: printed.append(float(value))
    try:
        with mode(own, training=own.training), torch.device(subject.ids.device):
            exec(lines, scope)
    except Exception:  # a model that the two lines cannot call
        return ""
    return lines if printed[0] > 1e-4 else ""


# -- rows --------------------------------------------------------------------------------------------------------------


def independent_rows(subject: Subject, *, training: bool) -> Finding:
    """All tokens of a row are changed; the logits of the other rows may not change."""
    call = Call("training" if training else "evaluation", training)
    limit, worst, layers, remark = tolerance(subject.dtype), 0.0, tuple[str, ...](), ""
    with running(subject, call) as run, mock.patch("torch.nn.functional.dropout", drop_alike):
        texts = torch.cat((subject.ids, subject.ids.roll(1, 1)))
        run.divide = divide_by_size(run(texts))
        logits = run(texts)
        for row in (0, len(texts) - 1):
            changed = texts.clone()
            changed[row] = subject.change(texts)[row]
            others = torch.arange(len(texts)) != row
            moved = largest(run(changed)[others], logits[others])
            if not moved <= worst:
                worst = moved
                if not worst <= limit:
                    remark = f"other rows see row {row}"
                    layers = (find_layer_of_rows(run.model, run, texts, changed, row),)
    path = describe_call(subject, call)
    looked_at = f"logits of rows after all tokens of another row were changed; {path}"
    return judge(looked_at, worst, limit, rounding(subject.dtype), remark=remark, layers=layers, path=path)


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


@compare_in_both_precisions
def search_by_gradient(subject: Subject, *, training: bool) -> Finding:
    """Logits before a cut must have no gradient from embeddings after it."""
    if training and not subject.has_modes:
        return inapplicable(NO_MODES)
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
        logits = calls.logits
        if not leaves.tensors or not logits.requires_grad:
            return inapplicable("no gradient of embeddings reaches the logits")
        weights = torch.randn(logits.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).to(logits)
        cuts, later, whole, worst = choose_cuts(subject, 12), 0.0, 0.0, 1
        for cut in cuts:
            largest_of_all, largest_after = leaves.largest_gradients(logits[:, :cut], weights[:, :cut], cut)
            whole = max(whole, largest_of_all)
            if largest_after > later or math.isnan(largest_after):
                later, worst = largest_after, cut
        if whole == 0.0:
            return inapplicable("no gradient reaches the embeddings")
        path = describe_call(subject, Call("training" if training else "evaluation", training))
        looked_at = f"gradient of the logits before {len(cuts)} cuts with respect to embeddings after them; {path}"
        limit, reason = tolerance(subject.dtype), f"{rounding(subject.dtype)}: the largest gradient"
        finding = judge(looked_at, later / whole, limit, reason, path=path)
        if finding.verdict == "passes":
            return finding
        value, before = (logits[:, :worst] * weights[:, :worst]).sum(), Before(ROWS, subject.length, worst)
        layer = find_layer_by_gradient(calls, leaves.tensors, value, before, whole * limit)
        leaks = describe_cut(subject, worst)
        return replace(finding, remark=leaks, layers=(layer,), leaks=leaks)
