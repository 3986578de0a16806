"""Search for attention to later tokens and to other rows, by perturbation and by gradient."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from fullrank.checking.agreement import DOUBLE_ONLY
from fullrank.checking.layers import OWN_FORWARD, Given, first_by_gradient, leaking_layers, observe
from fullrank.checking.paths import NO_MODES, CannotRun, CodePath, Run, running
from fullrank.checking.report import Finding, bounded, inapplicable, largest, rounding, same, sized, tolerance
from fullrank.checking.shown import gradient_shown, reproduction
from fullrank.checking.subject import ROWS, Subject, mode
from fullrank.core.errors import one_line

_AT_ONCE = 20_000_000  # logits of a batch
_WORK = 3_000_000_000  # parameters times tokens of the texts that are read along a path
_SHOWS = 1e-4  # a leak in fp64 that is larger has to show in fp32, too


def spread(length: int, most: int) -> list[int]:
    """Positions from 1 on, all of them or `most` that are spread evenly, the first and the last among them."""
    if length - 1 <= most:
        return list(range(1, length))
    return sorted({1 + round(i * (length - 2) / (most - 1)) for i in range(most)})


def _on_purpose(subject: Subject) -> str:
    return f"; {subject.sees_future} leaves the mask out" if subject.sees_future else ""


# -- by perturbation --------------------------------------------------------------------------------------------------


def by_perturbation(subject: Subject, path: CodePath) -> Finding:
    """From a cut on, every token is changed; no logits before the cut may change.

    In fp64 where the model computes so along this path, else in fp32.
    """
    failure: Exception | None = None
    if path.how == "after a cache":
        subject = subject.stepping
    if path.how.startswith("one row"):
        subject = replace(subject, ids=subject.ids[:, : subject.even].contiguous())
    if path.how == "parameters scaled" and perturbed(subject, CodePath("")).verdict == "fails":
        return inapplicable("later tokens are seen with the parameters as they are")
    if path.how == "compiled":  # loops over positions take long to compile
        subject = subject.short(13)
    for one in (subject, subject.single):
        if one is None:
            break
        try:
            finding = perturbed(one, path)
        except CannotRun as reason:
            return inapplicable(str(reason))
        except Exception as error:
            failure = failure or error
            continue
        if one is subject and finding.verdict == "fails" and (finding.difference or 0) > _SHOWS and subject.single:
            try:
                other = perturbed(subject.single, path)
            except Exception:
                return finding
            if other.verdict == "passes":
                return replace(other, remark=DOUBLE_ONLY)
        if finding.difference is None or math.isfinite(finding.difference):
            return finding
    if failure is None:
        return finding
    if path.attention or path.how:
        return inapplicable(f"it cannot be run so: {type(failure).__name__}: {one_line(failure)}")
    raise failure


def _divided(run: Run, size: Callable[[Tensor], Tensor]) -> Any:
    """`run` with logits divided by their size."""

    def divided(ids: Tensor, **options: Any) -> Tensor:
        return size(run(ids, **options))

    divided.model, divided.size = run.model, size  # type: ignore[attr-defined]
    return divided


def perturbed(subject: Subject, path: CodePath) -> Finding:
    size, dtype = subject.length, torch.bfloat16 if path.how == "in bfloat16" else subject.dtype
    most = max(8, min(size - 1, _WORK // max(1, subject.parameters * size)))
    most = min(most, 16) if path.how.startswith("one row") else most  # read one by one
    cuts = spread(size, most)
    where = f"each of {size} positions" if len(cuts) == size - 1 else f"{len(cuts)} positions of {size}"
    when = f"{path.words(subject)}, dropout seeded" if path.training else path.words(subject)
    looked_at = f"logits before a cut from which on every token is changed, {where}; {when}"
    limit, reason = tolerance(dtype), rounding(dtype)
    if path.how == "parameters scaled":
        limit, reason = 10 * limit, f"ten times {reason}: it grows with the parameters"
    with running(subject, path) as read:
        base = subject.ids[torch.arange(len(cuts)) % ROWS]
        before = read(subject.ids)
        if bool(before.isnan().any()):
            raise FloatingPointError("logits are NaN")
        run = _divided(read, sized(before))
        if (again := largest(run(subject.ids), run.size(before))) > limit:
            remark = "two passes over the same tokens differ, although random numbers begin at the same seed"
            return Finding("fails", looked_at, again, limit, reason, remark, path=path.words(subject))
        rows = max(ROWS, min(len(cuts), _AT_ONCE // before[0].numel()) // ROWS * ROWS)
        if path.how == "compiled":
            rows = ROWS  # one size, compiled once
            cuts, base = cuts[: len(cuts) // ROWS * ROWS], base[: len(cuts) // ROWS * ROWS]
        noise = 0.0 if path.training or path.padding else _noise(run, base[:rows])
        if noise > limit:
            limit, reason = min(10 * noise, 1000 * limit), f"ten times the model's own rounding, {noise:.1e}"
        shares, moves = [0.0] * len(cuts), 0.0
        for start in range(0, len(cuts), rows):
            part = slice(start, start + rows)
            known = run(base[part])
            for variant in _variants(subject, base[part], cuts[part]):
                after = run(variant)
                for row, cut in enumerate(cuts[part]):
                    share = largest(after[row, :cut], known[row, :cut])
                    moves = max(moves, largest(after[row, cut:], known[row, cut:]))
                    if share > shares[start + row] or share != share:
                        shares[start + row] = share
        ranked = sorted(range(len(cuts)), key=lambda i: (shares[i] != shares[i], shares[i]), reverse=True)
        # in half precision one rounding may choose another expert: a leak is seen from several cuts
        worst = ranked[min(2, len(ranked) - 1) if dtype.itemsize == 2 else 0]
        if moves == 0.0:
            return inapplicable("no token changes any logits at all, so there is nothing that could leak")
        found = replace(bounded(looked_at, shares[worst], limit, reason), path=path.words(subject))
        if not math.isfinite(shares[worst]):
            return inapplicable(f"{path.how}: logits are not finite") if path.how else found
        if found.verdict == "passes":
            return found
        try:
            return _explained(subject, path, run, found, cuts[worst], limit)
        except Exception as error:  # a leak is a leak, even one that nobody can explain
            return replace(
                found, leaks=f"positions before {cuts[worst]}", remark=f"no layer: {type(error).__name__}: {error}"
            )


def _explained(subject: Subject, path: CodePath, run: Any, found: Finding, cut: int, least: float) -> Finding:
    """A finding of a leak, with the positions, the layer, and what shows it; passes where only rows see each other."""
    size, base = subject.length, subject.ids
    if (
        path.training and not path.padding
    ):  # an expert drops entries in the order of its tokens, which later ones change
        with mock.patch("torch.nn.functional.dropout", _dropout):
            if not any(_alone(subject, run, one, least) for one in (cut, *spread(size, 16))):
                return replace(found, verdict="passes", difference=0.0, remark="dropout alone falls on other entries")
    if not (path.padding or subject.fixed or path.how == "compiled" or _alone(subject, run, cut, least)):
        cuts = [one for one in spread(size, 16) if _alone(subject, run, one, least)]
        if not cuts:
            remark = "rows of a batch see each other, no text its own end"
            return replace(found, verdict="passes", difference=0.0, remark=remark)
        cut = cuts[0]
    changed = _changed(subject, base, cut)
    pairs = _pairs(subject, run, least, ROWS if path.how == "compiled" else 32)
    if pairs:
        ahead = [k - i for i, k in pairs]
        share = len(pairs) / (size * (size - 1) / 2)
        first = min(pairs, key=lambda pair: (pair[1] - pair[0], pair))
        reach = f"{min(ahead)} to {max(ahead)}" if min(ahead) < max(ahead) else f"{ahead[0]}"
        leaks = (
            f"position {first[0]} sees token {first[1]} (from 0); leaks reach {reach} ahead, "
            f"{max(share, 0.001):.1%} of all pairs"
        )
    else:
        leaks = f"positions before {cut} see what stands from {cut} on (from 0), all of it together"
    start, stop = (0, size) if "cache" not in path.how else (0, size // 2) if cut < size // 2 else (size // 2, size)

    def window(ids: Tensor) -> Tensor:  # of a text in two pieces the one in which the cut lies
        return run(torch.cat((base[:, :start], ids, base[:, stop:]), 1))[:, start:stop]

    with contextlib.ExitStack() as stack:
        if path.how == "compiled":  # nobody looks into compiled code: the same code is told that it is compiled
            stack.enter_context(mock.patch("torch.compiler.is_compiling", return_value=True))
            stack.enter_context(mock.patch("torch._dynamo.is_compiling", return_value=True))
            window = _divided(stack.enter_context(running(subject, CodePath(""))), run.size)
        clean, other = base[:, start:stop], changed[:, start:stop]
        layers = leaking_layers(run.model, window, clean, other, cut - start, least, start)
        found = replace(found, layers=() if path.how == "compiled" and layers[0].startswith(OWN_FORWARD) else layers)
    return replace(
        found, remark=leaks + _on_purpose(subject), leaks=leaks, reproduction=reproduction(subject, path, cut)
    )


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Dropout whose entries for the first rows are the same, however many rows there are."""
    if not training:
        return x
    generator = torch.Generator(x.device).manual_seed(1)
    kept = torch.rand(max(1024, len(x)), *x.shape[1:], generator=generator, device=x.device)[: len(x)] >= p
    return x * kept / (1 - p)


def _alone(subject: Subject, run: Run, cut: int, least: float) -> bool:
    """One text by itself changes before `cut`, so that no other row has to do with it."""
    changed = _changed(subject, subject.ids, cut)
    rows = range(ROWS)
    return any(largest(run(changed[r : r + 1])[:, :cut], run(subject.ids[r : r + 1])[:, :cut]) > least for r in rows)


def _noise(run: Run, ids: Tensor) -> float:
    """The largest difference between rows and the same rows elsewhere in the batch: rounding, and no effect of tokens."""
    if len(ids) < 2 * ROWS:
        return 0.0
    return largest(run(ids.roll(ROWS, 0)).roll(-ROWS, 0), run(ids))


def _variants(subject: Subject, base: Tensor, cuts: list[int]) -> Iterator[Tensor]:
    """The rows of `base`, each changed from its cut on: every token another one, or padding."""
    later = torch.arange(subject.length, device=base.device) >= torch.tensor(cuts, device=base.device)[:, None]
    yield _another(subject, base, later)
    if subject.padding_id is not None:
        yield torch.where(later, subject.padding_id, base)


def _changed(subject: Subject, ids: Tensor, cut: int) -> Tensor:
    later = (torch.arange(subject.length, device=ids.device) >= cut).expand(len(ids), -1)
    return _another(subject, ids, later)


def _another(subject: Subject, ids: Tensor, where: Tensor) -> Tensor:
    """Other tokens, or vectors, where `where` (B, N) is true."""
    generator = torch.Generator().manual_seed(11)
    if ids.is_floating_point():
        other = torch.randn(ids.shape, generator=generator).to(ids) * ids.std()
        return torch.where(where[..., None], other, ids)
    step = 1 + torch.randint(max(1, subject.vocab_size - 1), ids.shape, generator=generator).to(ids.device)
    return torch.where(where, subject.readable((ids + step) % subject.vocab_size), ids)


def _pairs(subject: Subject, run: Run, least: float, rows: int) -> list[tuple[int, int]]:
    """(i, k), i < k: logits at i change when the token at k alone is changed. At most 64 tokens are tried, spread evenly."""
    found = []
    tried = spread(subject.length, 64)
    for start in range(0, len(tried), rows):
        part = tried[start : start + rows]
        base = subject.ids[torch.arange(len(part)) % ROWS]
        at = torch.tensor(part, device=base.device)[:, None]
        where = torch.arange(subject.length, device=base.device) == at
        moved = (run(_another(subject, base, where)) - run(base)).abs().flatten(2).amax(2) > least
        found += [(int(i), part[row]) for row, i in moved.nonzero().tolist() if i < part[row]]
    return found


def independent_rows(subject: Subject, *, training: bool) -> Finding:
    """All tokens of a row are changed; the logits of the other rows may not change."""
    path = CodePath("training" if training else "evaluation", training=training)
    when = path.words(subject)
    limit = tolerance(subject.dtype)
    with running(subject, path) as run, mock.patch("torch.nn.functional.dropout", _dropout):
        ids = torch.cat((subject.ids, subject.ids.roll(1, 1)))
        run = _divided(run, sized(run(ids)))
        before, off, row = run(ids), 0.0, 0
        for changed in (0, len(ids) - 1):
            where = (torch.arange(len(ids), device=ids.device) == changed)[:, None].expand(ids.shape[:2])
            moved = (run(_another(subject, ids, where)) - before).abs().flatten(1).amax(1)
            moved[changed] = 0.0
            if not float(moved.max()) <= off:
                off, row = float(moved.max()), changed
        layers: tuple[str, ...] = ()
        if not off <= limit:
            where = (torch.arange(len(ids), device=ids.device) == row)[:, None].expand(ids.shape[:2])
            layers = _of_rows(subject, run, ids, _another(subject, ids, where), row)
    remark = "" if off <= limit else f"other rows see row {row}"
    looked_at = f"logits of rows after all tokens of another row were changed; {when}"
    return replace(bounded(looked_at, off, limit, rounding(subject.dtype), remark=remark, layers=layers), path=when)


def _of_rows(subject: Subject, run: Run, clean: Tensor, changed: Tensor, row: int) -> tuple[str, ...]:
    """The first module whose output for the other rows differs."""
    others = [i for i in range(len(clean)) if i != row]
    known, _ = observe(subject.model, lambda: run(clean), clean)
    outputs, _ = observe(subject.model, lambda: run(changed), clean)
    for called, output in outputs.items():
        expected = known.get(called)
        if expected is None or expected.shape != output.shape or len(output) != len(clean):
            continue
        if largest(output[others], expected[others]) > 100 * torch.finfo(output.dtype).eps * float(
            expected.abs().max()
        ):
            return (called[0],)
    return ()


# -- by gradient ------------------------------------------------------------------------------------------------------


def by_gradient(subject: Subject, *, training: bool) -> Finding:
    """Logits before a cut must have no gradient from embeddings after it."""
    finding = _by_gradient(subject, training)
    if finding.verdict == "fails" and not (finding.difference or 0) <= _SHOWS and subject.single:
        other = _by_gradient(subject.single, training)
        return replace(other, remark=DOUBLE_ONLY) if other.verdict == "passes" else finding
    return finding


def _by_gradient(subject: Subject, training: bool) -> Finding:
    leaves, names = list[Tensor](), list[str]()

    def cut_off(name: str, module: nn.Module, args: tuple[Any, ...], out: Any) -> Tensor | None:
        """Make the output of a module that reads the ids a leaf. Parameters are frozen: what depends on a leaf is none."""
        read, vectors = (
            (args[0] if args else None),
            isinstance(out, Tensor) and out.is_floating_point() and out.dim() == 3,
        )
        if not isinstance(read, Tensor) or read.dim() != 2 or not vectors or out.requires_grad:
            return None
        first = 0 if same(read, ids) else 1  # of (N, B) where time comes first
        if not same(read.transpose(first, 0), ids) or out.shape[:2] != read.shape:
            return None
        leaves.append(out.transpose(first, 0).detach().requires_grad_())
        names.append(name)
        return leaves[-1].transpose(first, 0).clone()  # some models add to it in place

    if training and not subject.has_modes:
        return inapplicable(NO_MODES)
    path = CodePath("training" if training else "evaluation", training=training)
    ids, shape = subject.ids, (*subject.ids.shape[:2], 0)
    if ids.is_floating_point():
        ids = ids.to(subject.dtype).requires_grad_()
        leaves.append(ids)
    with ExitStack() as stack:
        stack.enter_context(mode(subject.model, training=training))
        stack.enter_context(torch.enable_grad())
        for parameter in subject.model.parameters():
            if parameter.requires_grad:
                stack.callback(parameter.requires_grad_, True)
                parameter.requires_grad_(False)
        for name, module in subject.model.named_modules():
            if name and not leaves:
                stack.callback(module.register_forward_hook(partial(cut_off, name)).remove)
        given = Given()
        outputs, logits = observe(subject.model, lambda: subject.logits(ids), ids, inputs=given)
        if not leaves:
            return inapplicable("no module was found that turns input_ids into vectors")
        if not logits.requires_grad:
            return inapplicable("no gradient reaches the logits")
        generator = torch.Generator().manual_seed(3)
        cotangent = torch.randn(logits.shape, dtype=torch.float64, generator=generator).to(logits)
        later, own, worst = 0.0, 0.0, 1
        chosen = spread(subject.length, 12)
        for cut in chosen:
            gradients = torch.autograd.grad(
                logits[:, :cut], leaves, cotangent[:, :cut], retain_graph=True, allow_unused=True
            )
            parts = [gradient.abs() for gradient in gradients if gradient is not None]
            own = max([own, *(float(part.max()) for part in parts)])
            after = max((float(part[:, cut:].max()) for part in parts), default=0.0)
            if after > later or after != after:
                later, worst = after, cut
        if own == 0.0:
            return inapplicable("no gradient reaches the embeddings")
        limit, remark, layers = tolerance(subject.dtype), "", tuple[str, ...]()
        if not later / own <= limit:
            at_worst = (logits[:, :worst] * cotangent[:, :worst]).sum()
            layers = (first_by_gradient(outputs, given, leaves, at_worst, shape, worst, own * limit),)
            remark = f"logits before token {worst} (from 0) depend on embeddings from there on{_on_purpose(subject)}"
    looked_at = f"gradient of the logits before {len(chosen)} cuts with respect to embeddings after them; {path.name}"
    reason = f"{rounding(subject.dtype)}: the largest gradient"
    found = bounded(looked_at, later / own, limit, reason, remark=remark, layers=layers)
    shown = gradient_shown(subject, path, worst, names[0]) if layers and names else ""
    return replace(found, path=path.words(subject), leaks=remark, reproduction=shown)
