"""Agreement of two ways to compute the same, of any model: padding, other lengths, packing, cache."""

from __future__ import annotations

import contextlib
import itertools
import math
from dataclasses import replace

import torch
from torch import Tensor

from fullrank.checking.compare import (
    Pair,
    compare_pairs,
    divide_by_size,
    in_both_precisions,
    largest,
    rounding,
    tolerance,
)
from fullrank.checking.copies import mode
from fullrank.checking.layers import find_layer_of_length
from fullrank.checking.paths import (
    IMPLEMENTATIONS,
    CannotRun,
    CodePath,
    find_implementation,
    open_cache,
    read_pieces,
    reorder_cache,
    running,
    split_positions,
)
from fullrank.checking.report import Finding, inapplicable, judge
from fullrank.checking.subject import ROWS, SIDES, Subject


@in_both_precisions
def padding(subject: Subject) -> Finding:
    """A text in a padded batch has the logits that it has alone, whatever stands in the padding."""
    if subject.mask_form is None or not subject.reads_tokens:
        return inapplicable(subject.without_mask)
    ids, masks, pairs = subject.ids, subject.masks(), list[Pair]()
    with torch.no_grad(), mode(subject.model, training=False):
        for side, mask in masks.items():
            real = mask.bool()
            alone = [subject.one_row(row).logits(ids[row][real[row]][None])[0] for row in range(ROWS)]
            for texts in (ids, torch.where(real, ids, subject.change(ids))):
                batch = subject.logits(texts, mask, **subject.positions_of(mask))
                pairs += [(f"text {r}, {SIDES[side]}", batch[r][real[r]], alone[r]) for r in range(ROWS)]
    looked_at = f"texts of unequal lengths in one batch, {', '.join(SIDES[side] for side in masks)}, beside each alone"
    remark = "" if "left" in masks else "not on the left, where such a model has to be told positions by position_ids"
    return compare_pairs(subject, looked_at, pairs, remark)


@in_both_precisions
def prefixes(subject: Subject) -> Finding:
    """Logits of the first tokens of a text, read alone, are those in the whole text: of powers of two, and other lengths."""
    ids, pairs, wrong = subject.ids, list[Pair](), list[int]()
    with torch.no_grad(), mode(subject.model, training=False):
        whole = subject.logits(ids)
        if not (subject.fixed or ids.is_cuda) and subject.reads_tokens:
            more = subject.tokens(ROWS, 2 * subject.even + 3 - subject.length, 21)
            with contextlib.suppress(Exception):  # it may be longer than the model can read
                whole = subject.logits(torch.cat((ids, more), 1))
                ids = torch.cat((ids, more), 1)
        if bool((whole == whole[:1]).all()):
            return inapplicable("no token changes any logits at all, so there is nothing that could leak")
        size = ids.shape[1]
        powers = {1 << i for i in range(1, size.bit_length())}
        lengths = sorted((powers | {1, 3, subject.length // 2, subject.length, size - 1}) - {size})
        for rows, end in [*itertools.product((ROWS, 1), lengths), (1, size)]:
            logits = subject.logits(ids[:rows, :end].contiguous())
            pairs.append((f"{rows} row{'s' * (rows > 1)} of {end} tokens", logits, whole[:rows, :end]))
            if compare_pairs(subject, "", pairs[-1:]).verdict == "fails":
                wrong.append(end)
        looked_at = (
            f"logits of the first {', '.join(map(str, lengths))} tokens, beside those of the whole text of {size}"
        )
        finding = compare_pairs(subject, looked_at, pairs)
        if finding.verdict == "passes":
            return finding
        layers = tuple[str, ...]()
        with contextlib.suppress(Exception):
            layers = (find_layer_of_length(subject.model, subject.logits, ids, min(wrong)),)
    leaks = f"{finding.remark.removeprefix('worst: ')} have other logits where {size} tokens are read"
    return replace(finding, path="texts of other lengths", leaks=leaks, layers=layers)


def packing(subject: Subject) -> Finding:
    """Two documents in one row: the second one's logits do not depend on the first one."""
    if not subject.reads_tokens:
        return inapplicable("vectors are not packed")
    options, text, half = split_positions(subject), subject.ids[:1], subject.length // 2
    other = subject.change(text, torch.arange(subject.length, device=text.device)[None] < half)

    def measure(path: CodePath, **more: Tensor) -> float:
        """How far another first document moves the second."""
        with running(subject, path) as run:
            before = run(text, **options, **more)
            if bool(before.isnan().any()):
                raise FloatingPointError("logits are NaN")
            divide = divide_by_size(before)
            return largest(divide(run(other, **options, **more))[:, half:], divide(before)[:, half:])

    own = find_implementation(subject.model)
    attending = ["", *(one for one in IMPLEMENTATIONS if own and one != own)]
    moved: dict[str, float] = {}
    for attention, training in itertools.product(attending, (False, True)):
        path = CodePath("", training, attention=attention)
        with contextlib.suppress(Exception):
            moved[path.describe(subject)] = measure(path)
    limit, remark = tolerance(subject.dtype), ""
    if not any(share <= limit for share in moved.values()):
        return inapplicable("position_ids that begin again do not separate documents in this model")
    worst = max(moved, key=lambda words: (math.isnan(moved[words]), moved[words]))
    if not moved[worst] <= limit:
        remark = f"{worst}: the second document sees the first"
    elif subject.mask_form is not None:
        with contextlib.suppress(Exception):
            if measure(CodePath(), **{subject.mask_name: torch.ones_like(text)}) > limit:
                remark = f"not kept apart where {subject.mask_name} is given, too, even one of ones: give none"
    looked_at = "logits of a second document after all tokens of the first in its row were changed; position_ids"
    finding = judge(looked_at, moved[worst], limit, rounding(subject.dtype), remark=remark, path=worst)
    return replace(finding, leaks=remark) if finding.verdict == "fails" else finding


@in_both_precisions
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
