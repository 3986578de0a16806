"""Agreement of two ways to compute the same, of any model: padding, other lengths, packing, cache."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace

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
    split_positions,
)
from fullrank.checking.compare import (
    Pair,
    compare_in_both_precisions,
    compare_pairs,
    divide_by_size,
    largest,
    rounding,
    tolerance,
)
from fullrank.checking.copies import mode
from fullrank.checking.layers import find_layer_of_length
from fullrank.checking.report import Finding, inapplicable, judge
from fullrank.checking.subject import ROWS, Subject


@compare_in_both_precisions
def padding(subject: Subject) -> Finding:
    """A text in a padded batch has the logits that it has alone, whatever stands in the padding."""
    if subject.mask_form is None or not subject.reads_tokens:
        return inapplicable(subject.without_mask)
    ids, masks, pairs = subject.ids, subject.masks(), list[Pair]()
    if not subject.pads_left:
        del masks["left"]
    with torch.no_grad(), mode(subject.model, training=False):
        for side, mask in masks.items():
            real = mask.bool()
            alone = [subject.with_row(row).logits(ids[row][real[row]][None])[0] for row in range(ROWS)]
            for texts in (ids, torch.where(real, ids, subject.change(ids))):
                batch = subject.logits(texts, mask, **subject.positions_of(mask))
                pairs += [(f"text {r}, padding: {side}", batch[r][real[r]], alone[r]) for r in range(ROWS)]
    looked_at = f"texts of unequal lengths in one batch, padding: {', '.join(masks)}, beside each alone"
    remark = "" if subject.pads_left else "not on the left, where a text would be read at other positions"
    return compare_pairs(subject, looked_at, pairs, remark)


@compare_in_both_precisions
def prefixes(subject: Subject) -> Finding:
    """Logits of the first tokens of a text, read alone, are those in the whole text: of powers of two, and other lengths."""
    ids = subject.long_ids
    size, pairs, wrong = ids.shape[1], list[Pair](), list[tuple[int, int]]()
    lengths = {1 << i for i in range(1, size.bit_length())} | {1, 3, subject.length // 2, subject.length, size - 1}

    def read(texts: Tensor) -> Tensor:
        with torch.no_grad(), mode(subject.model, training=False):
            return subject.logits(texts)

    whole = read(ids)
    if bool((whole == whole[:1]).all()):
        return inapplicable("no token changes any logits at all, so there is nothing that could leak")
    for rows, end in [*itertools.product((ROWS, 1), sorted(lengths - {size})), (1, size)]:
        pair = (
            f"{rows} row{'s' * (rows > 1)} of {end} tokens",
            read(ids[:rows, :end].contiguous()),
            whole[:rows, :end],
        )
        pairs.append(pair)
        if compare_pairs(subject, "", [pair]).verdict == "fails":
            wrong.append((rows, end))
    shown = ", ".join(map(str, sorted(lengths)))
    looked_at = f"logits of the first {shown} tokens, beside those of the whole text of {size}"
    finding = compare_pairs(subject, looked_at, pairs)
    if finding.verdict == "passes":
        return finding
    layers = tuple[str, ...]()
    with contextlib.suppress(Exception):
        rows, end = min(wrong)
        layers = (find_layer_of_length(subject.model, read, ids, rows, end),)
    leaks = f"{finding.remark.removeprefix('worst: ')} have other logits where {size} tokens are read"
    return replace(finding, path="texts of other lengths", leaks=leaks, layers=layers)


def packing(subject: Subject) -> Finding:
    """Two documents in one row: the second one's logits do not depend on the first one."""
    if not subject.reads_tokens:
        return inapplicable("vectors are not packed")
    options, text, half = split_positions(subject), subject.ids[:1], subject.length // 2
    other = subject.change(text, torch.arange(subject.length, device=text.device)[None] < half)

    def measure(call: Call, **more: Tensor) -> float:
        """How far another first document moves the second; infinitely where the model cannot be called so."""
        with contextlib.suppress(Exception), running(subject, call) as run:
            before = run(text, **options, **more)
            divide = divide_by_size(before)
            moved = largest(divide(run(other, **options, **more))[:, half:], divide(before)[:, half:])
            return float("nan") if bool(before.isnan().any()) else moved
        return float("nan")

    own, moved = find_implementation(subject.model), dict[str, float]()
    for attention in dict.fromkeys(("", *IMPLEMENTATIONS) if own else ("",)):
        call = Call(attention or "evaluation", attention=attention)
        for one in (call, call.in_training()):
            share = measure(one)
            if share == share:
                moved[one.name] = share
    limit = tolerance(subject.dtype)
    if not any(share <= limit for share in moved.values()):
        return inapplicable("position_ids that begin again do not separate documents in this model")
    worst, remark = max(moved, key=lambda name: moved[name]), ""
    if moved[worst] > limit:
        remark = f"{worst}: the second document sees the first"
    elif subject.mask_form is not None and measure(Call(""), **{subject.mask_name: torch.ones_like(text)}) > limit:
        remark = f"not kept apart where {subject.mask_name} is given, too, even one of ones: give none"
    looked_at = "logits of a second document after all tokens of the first in its row were changed; position_ids"
    finding = judge(looked_at, moved[worst], limit, rounding(subject.dtype), remark=remark, path=worst)
    return replace(finding, leaks=remark) if finding.verdict == "fails" else finding


@compare_in_both_precisions
def decoding(subject: Subject) -> Finding:
    """Token by token, in pieces, and as beams, each as in one pass."""
    if subject.core.kind == "fullrank" and subject.core.model.memory_length:
        subject = subject.core  # the cache of Hugging Face is its memory, which forgets
    ids, length, pairs = subject.ids, subject.length, list[Pair]()
    with torch.no_grad(), mode(subject.model, training=False):
        expected = subject.logits(ids)
        step = open_cache(subject, subject.model, pieces=False)
        pairs.append(("token by token", read_pieces(ids, list(range(length + 1)), step), expected))
        with contextlib.suppress(CannotRun):
            step = open_cache(subject, subject.model)
            for bounds in ([0, length // 2, length], [0, 1, length - 2, length]):
                pairs.append(("in pieces", read_pieces(ids, bounds, step), expected))
        pairs += pair_beams(subject, expected)
    names = ", ".join(dict.fromkeys(name for name, _, _ in pairs))
    finding = compare_pairs(subject, f"logits with the cache, {names}, beside one pass", pairs)
    config = subject.model.config.decoder if subject.translates else None
    if finding.verdict == "fails" and config is not None and config.released_decoding:
        why = "model.decoder.released_decoding: true leaves heads unmixed while a translation is written"
        return replace(finding, remark=f"{finding.remark}; {why}")
    return finding


def pair_beams(subject: Subject, expected: Tensor) -> list[Pair]:
    """Rows of a cache in another order, as beam search leaves them."""
    if subject.has_state or (subject.fixed and not subject.translates):
        return []
    step, half = open_cache(subject, subject.model, pieces=False), subject.length // 2
    order = torch.tensor([1, 2, 0, 0], device=subject.ids.device)
    _, state = step(subject.ids[:, :half], None)
    state = reorder_cache(state, order)
    if state is None:
        return []
    logits, _ = step(subject.ids[order, half : half + 1], state)
    return [("as beams", logits[:, 0], expected[order, half])]
