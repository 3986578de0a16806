"""Agreement of two ways to compute the same, of any model: padding, other lengths, packing, cache."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fullrank.checking.calls import (
    IMPLEMENTATIONS,
    Call,
    CannotRun,
    find_implementation,
    open_cache,
    read_pieces,
    reorder_cache,
    running,
)
from fullrank.checking.copies import mode
from fullrank.checking.report import Finding, inapplicable, judge
from fullrank.checking.subject import ROWS, Subject, agree

Pair = tuple[str, Tensor, Tensor]  # a description, what was computed, what is expected
DOUBLE_ONLY = "in float64 alone some kernel errs, as attention of torch does with a mask in float32"
_SHOWS = 1e-4  # a leak in fp64 that is larger has to show in fp32, too

# for sums of some hundred terms, in proportion to the largest number compared. What a leak moves is far larger, and what
# rounding moves far smaller.
_TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}


def tolerance(dtype: torch.dtype) -> float:
    """Largest error that rounding may cause in a number of size 1."""
    return _TOLERANCES[dtype]


def rounding(dtype: torch.dtype) -> str:
    """The reason of `tolerance`."""
    return f"rounding in {str(dtype).removeprefix('torch.')}, in proportion to the largest figure"


def divide_by_size(logits: Tensor) -> Callable[[Tensor], Tensor]:
    """Function that divides logits such as these (R, .., V) by their size, so that differences are shares of it.

    The size is the largest figure, without those a thousand times as large as what moves between rows: -inf, -1e9 or the least
    number, the logits of words that are never given. Of such figures differences in proportion to themselves count.
    """
    sizes = logits[logits.isfinite()].abs().float()
    moved = (logits - logits.roll(1, 0 if len(logits) > 1 else 1)).abs().float()
    moved = moved[moved.isfinite() & (moved > 0)]
    far = 1000 * float(moved[:: 1 + len(moved) // 100_000].median()) if len(moved) else math.inf
    near = sizes[sizes <= far]
    size = (float(near.max()) if len(near) else min(far, 1.0)) or 1.0
    is_plain = len(near) == logits.numel()

    def divide(values: Tensor) -> Tensor:
        values = (values.float() if values.dtype.itemsize == 2 else values) / size
        return values if is_plain else values.nan_to_num(math.nan).asinh()

    return divide


def largest(values: Tensor, expected: Tensor) -> float:
    """max |values - expected|; NaN if one of them is not finite where the other is."""
    if values.numel() == 0:
        return 0.0
    off = (values - expected).abs()
    worst = float(off.max())
    if math.isnan(worst):
        worst = float(off.masked_fill(torch.isclose(values, expected, 0.0, 0.0, equal_nan=True), 0.0).max())
    return worst


def compare_pairs(subject: Subject, looked_at: str, pairs: list[Pair], remark: str = "", noise: float = 0.0) -> Finding:
    """Passes where every tensor equals the expected one, up to rounding; the worst is named.

    noise: what rounding to fp32 moves in a model that is not ours, which may compute parts so.
    """
    worst, name = 0.0, ""
    for description, values, expected in pairs:
        divide = divide_by_size(expected)
        share = largest(divide(values), divide(expected))
        if not share <= worst:
            worst, name = share, description
        if math.isnan(worst):
            break
    limit, reason = tolerance(subject.dtype), rounding(subject.dtype)
    if not subject.ours and subject.dtype == torch.float64:
        limit = tolerance(torch.float32)
        reason = f"{rounding(torch.float32)}; a model that is not ours may compute parts so in float64, too"
        if 3 * noise > limit:
            limit, reason = min(3 * noise, 10 * limit), f"three times the model's own rounding to float32, {noise:.1e}"
    return judge(looked_at, worst, limit, reason, remark=remark if worst <= limit else f"worst: {name}")


def compare_in_both_precisions(check: Callable[..., Finding]) -> Callable[..., Finding]:
    """The check in fp64, and in fp32 what cannot be computed in fp64 or shows a leak there, which has to show twice."""

    @functools.wraps(check)
    def run(subject: Subject, **options: Any) -> Finding:
        try:
            finding = check(subject, **options)
        except CannotRun:
            raise
        except Exception:
            if subject.single is None:
                raise
            return check(subject.single, **options)
        difference = finding.difference or 0.0
        if subject.single is None or difference <= _SHOWS:
            return finding
        with contextlib.suppress(Exception):
            other = check(subject.single, **options)
            if not math.isfinite(difference):
                return other
            if other.verdict == "passes":
                return replace(other, remark=DOUBLE_ONLY)
        return finding

    return run


@compare_in_both_precisions
def padding(subject: Subject) -> Finding:
    """A text in a padded batch has the logits that it has alone, whatever stands in the padding.

    On the left alone only where positions are counted from its start; nothing that stands there may be seen in any case.
    """
    if subject.mask_form is None or not subject.reads_tokens:
        return inapplicable(subject.without_mask)
    ids, masks, pairs = subject.ids, subject.masks(), list[Pair]()
    with torch.no_grad(), mode(subject.model, training=False):
        plain = subject.logits(ids)
        for side, mask in masks.items():
            real, options = mask.bool(), subject.positions_of(mask)
            texts = torch.where(real, ids, subject.change(ids))
            batch, other = (subject.logits(given, mask, **options) for given in (ids, texts))
            if side != "left" or subject.pads_left:
                alone = [subject.logits(ids[:, real[row]])[row] for row in range(ROWS)]
                pairs += [(f"text {r}, padding: {side}", batch[r][real[r]], alone[r]) for r in range(ROWS)]
            if not subject.has_state and not agree(batch[real], plain[real]):  # the mask is not for nothing
                pairs.append((f"what stands in the padding: {side}", other[real], batch[real]))
    looked_at = f"texts of unequal lengths in one batch, padding: {', '.join(masks)}, beside each alone"
    remark = "" if subject.pads_left else "not alone on the left, where a text would be read at other positions"
    if not any("stands in" in name for name, _, _ in pairs):
        remark = f"{subject.mask_name} changes nothing: padding on the left is seen"
    return compare_pairs(subject, looked_at, pairs, remark)


def packing(subject: Subject) -> Finding:
    """Two documents in one row: the second one's logits do not depend on the first one."""
    if not subject.reads_tokens:
        return inapplicable("vectors are not packed")
    if subject.first_position is None:
        return inapplicable("forward takes no position_ids that could begin again at a document")
    text, half, limit = subject.ids[:1], subject.length // 2, tolerance(subject.dtype)
    places = torch.arange(subject.length, device=text.device)[None]
    positions = places - half * (places >= half) + subject.first_position
    other, moved, remark = subject.change(text, places < half), dict[str, float](), ""

    def measure(call: Call, **more: Tensor) -> None:
        """How far another first document moves the second, where the model can be called so."""
        with contextlib.suppress(Exception), running(subject, call) as run:
            logits, changed = (run(ids, position_ids=positions, **more) for ids in (text, other))
            divide = divide_by_size(logits)
            if not logits.isnan().any():
                moved[call.name] = largest(divide(changed)[:, half:], divide(logits)[:, half:])

    for attention in dict.fromkeys(("", *IMPLEMENTATIONS) if find_implementation(subject.model) else ("",)):
        call = Call(attention or "evaluation", attention=attention)
        measure(call)
        measure(call.in_training())
    if not any(share <= limit for share in moved.values()):
        return inapplicable("position_ids that begin again do not separate documents in this model")
    worst = max(moved, key=lambda name: moved[name])
    if moved[worst] > limit:
        remark = f"{worst}: the second document sees the first"
    elif subject.mask_form is not None:
        measure(Call("masked"), **{subject.mask_name: torch.ones_like(text)})
        if moved.get("masked", 0.0) > limit:
            remark = f"not kept apart where {subject.mask_name} is given, too, even one of ones: give none"
    looked_at = "logits of a second document after all tokens of the first in its row were changed; position_ids"
    finding = judge(looked_at, moved[worst], limit, rounding(subject.dtype), remark=remark, path=worst)
    return replace(finding, leaks=remark) if finding.verdict == "fails" else finding


@compare_in_both_precisions
def decoding(subject: Subject) -> Finding:
    """Token by token, in pieces, and as beams, each as in one pass."""
    if subject.core.kind == "fullrank" and subject.core.model.memory_length:
        subject = subject.core  # the cache of Hugging Face is its memory, which forgets
    ids, length, half = subject.ids, subject.length, subject.length // 2
    with torch.no_grad(), mode(subject.model, training=False):
        logits, step = subject.logits(ids), open_cache(subject, subject.model, pieces=False)
        pairs = [("token by token", read_pieces(ids, list(range(length + 1)), step), logits)]
        with contextlib.suppress(CannotRun):
            step = open_cache(subject, subject.model)
            for bounds in ([0, half, length], [0, 1, length - 2, length]):
                pairs.append(("in pieces", read_pieces(ids, bounds, step), logits))
        if not subject.has_state and (subject.translates or not subject.fixed):
            order = torch.tensor([1, 2, 0, 0], device=ids.device)  # rows in another order, as beam search leaves them
            state = reorder_cache(subject.model, step(ids[:, :half], None)[1], order)
            if state is not None:
                pairs.append(("as beams", step(ids[order, half : half + 1], state)[0][:, 0], logits[order, half]))
        names = ", ".join(dict.fromkeys(name for name, _, _ in pairs))
        looked_at = f"logits with the cache, {names}, beside one pass"
        finding = compare_pairs(subject, looked_at, pairs)
        if finding.verdict == "fails" and not subject.ours and subject.single is not None:
            divide = divide_by_size(logits)
            noise = largest(divide(subject.single.logits(ids).to(logits)), divide(logits))
            finding = compare_pairs(subject, looked_at, pairs, noise=noise)
    config = subject.model.config.decoder if subject.translates else None
    if finding.verdict == "fails" and config is not None and config.released_decoding:
        why = "model.decoder.released_decoding: true leaves heads unmixed while a translation is written"
        return replace(finding, remark=f"{finding.remark}; {why}")
    return finding
