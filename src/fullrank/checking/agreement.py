"""Agreement of two ways to compute the same, of any model: other rows, other lengths, padding, packing, a cache."""

from __future__ import annotations

import contextlib
import itertools
import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fullrank.checking.calls import (
    NOTHING_MOVES,
    PLAIN,
    Call,
    CannotRun,
    Step,
    list_calls,
    open_cache,
    read_pieces,
    reorder_cache,
    running,
)
from fullrank.checking.copies import WithoutDropout, list_tensors, mode
from fullrank.checking.layers import Part, Reading, find_layers
from fullrank.checking.report import Finding, allow, divide_by_size, find_worst, inapplicable, judge, largest
from fullrank.checking.subject import ROWS, Subject, agree
from fullrank.core.errors import count_things

ORDER = [1, 0, 0]  # rows as beam search may leave them


@dataclass(frozen=True)
class Comparison:
    """A reading, and another one whose logits it has to have. name: of the code path."""

    name: str
    reading: Reading
    expected: Reading


def compare(
    subject: Subject, model: Any, logits: Tensor, comparisons: list[Comparison], looked_at: str,
    remark: str = "", path: str = "",
) -> Finding:  # fmt: skip
    """Passes where all logits are those expected, up to rounding; the worst is named, and the layer where they come apart.

    logits: differences are shares of their size.
    """
    limit, reason = allow(subject.dtype)
    if not subject.ours and subject.dtype == torch.float64:
        single, reason = allow(torch.float32)
        limit, reason = 10 * single, f"ten times {reason}; a model that is not ours may compute parts so"
    divide, shares = divide_by_size(logits), list[float]()
    for one in comparisons:
        shares.append(largest(divide(one.reading.logits), divide(one.expected.logits)))
    worst = find_worst(dict(enumerate(shares)))
    finding = judge(looked_at, shares[worst], limit, reason, remark=remark, path=path)
    if finding.verdict == "passes":
        return finding
    apart = [one for one, share in zip(comparisons, shares, strict=True) if not share <= limit]
    return replace(finding, remark=f"worst: {comparisons[worst].name}", layers=name_layers(model, apart, limit))


def name_layers(model: Any, apart: list[Comparison], limit: float) -> tuple[str, ...]:
    """Find the layer of the first of these whose positions can be told from other sizes of the model."""
    sizes = {0, 2, 3, *(size for tensor in list_tensors(model) for size in tensor.shape)}
    for one in apart:
        if not sizes & {one.reading.part.length, one.expected.part.length}:
            with contextlib.suppress(Exception):  # a difference is one, even where nobody can explain it
                return find_layers(model, one.expected, one.reading, limit)
    return ()


def independent_rows(subject: Subject, *, training: bool) -> Finding:
    """All tokens of a row are changed; the logits of the other rows may not change."""
    call, comparisons = PLAIN[training], list[Comparison]()
    with running(subject, call) as run, WithoutDropout():
        texts = torch.cat((subject.ids, subject.ids.roll(1, 1)))
        last, logits = len(texts) - 1, run(texts)
        for row, others in ((0, slice(1, None)), (last, slice(last))):
            changed = texts.clone()
            changed[row] = subject.change(texts)[row]
            part = Part(len(texts), subject.length, chosen=others)
            expected = Reading(part.select(logits), part, partial(run, texts))
            reading = Reading.from_run(partial(run, changed), part)
            comparisons.append(Comparison(f"rows beside row {row}", reading, expected))
        looked_at = f"logits of rows after all tokens of another row were changed; {call.name}"
        return compare(subject, run.model, logits, comparisons, looked_at, path=call.name)


def compare_prefixes(subject: Subject, *, training: bool) -> Finding:
    """Logits of the first tokens of a text, read alone, are those in the whole text: of powers of two, and other lengths."""
    if training and subject.ours:
        from fullrank.checking.definition import build_without_chance  # it imports a compiler

        subject = replace(subject, model=build_without_chance(subject))
    ids, call, comparisons = subject.long_ids, PLAIN[training], list[Comparison]()
    size = ids.shape[1]
    # the length that no size of the model equals comes first: layers are recognised by it
    powers = (1 << i for i in reversed(range(size.bit_length())))
    lengths = dict.fromkeys((subject.length, size - 1, subject.length // 2, *powers, 3))
    lengths.pop(size, None)
    with running(subject, call) as run, WithoutDropout():
        whole = run(ids)
        if largest(run(ids, seed=2), whole) > allow(subject.dtype)[0]:
            return inapplicable("random numbers are drawn beside those of dropout, and other ones for another length")
        if torch.equal(run(subject.change(ids)), whole):
            return inapplicable(NOTHING_MOVES)
        for end, rows in [*itertools.product(lengths, (ROWS, 1)), (size, 1)]:
            alone = Reading.from_run(partial(run, ids[:rows, :end].contiguous()), Part(rows, end))
            part = Part(ROWS, size, 0, end, chosen=slice(rows))
            expected = Reading(part.select(whole), part, partial(run, ids))
            comparisons.append(
                Comparison(f"{count_things(rows, 'row')} of {count_things(end, 'token')}", alone, expected)
            )
        shown = ", ".join(map(str, sorted(lengths)))
        looked_at = f"logits of the first {shown} tokens, beside those of the whole text of {size}; {call.name}"
        finding = compare(subject, run.model, whole, comparisons, looked_at)
    if finding.verdict == "passes":
        return finding
    path = f"texts of other lengths{', training' * training}"
    leaks = f"{finding.remark.removeprefix('worst: ')} have other logits where {size} tokens are read"
    return replace(finding, path=path, leaks=leaks)


def padding(subject: Subject) -> Finding:
    """A text in a padded batch has the logits that it has alone, whatever stands in the padding.

    On the left alone only where positions are counted from its start; nothing that stands there may be seen in any case.
    """
    if subject.mask_form is None or not subject.reads_tokens:
        return inapplicable(subject.without_mask)
    ids, comparisons = subject.ids, list[Comparison]()
    remark = "" if subject.pads_left else "not alone on the left, where a text would be read at other positions"
    is_used = False
    with running(subject, PLAIN[0]) as run:
        plain = run(ids)
        for side, mask in subject.masks().items():
            real = mask.bool()
            read = partial(run, ids, mask)
            read_others = partial(run, torch.where(real, ids, subject.change(ids)), mask)
            batch, others = read(), read_others()
            is_seen = not subject.has_state and not agree(batch[real], plain[real])  # the mask is not for nothing
            is_used = is_used or is_seen
            for row in range(ROWS):
                start = int(real[row].int().argmax())
                end = start + int(real[row].sum())
                part = Part(ROWS, subject.length, start, end, chosen=slice(row, row + 1))
                padded = Reading(part.select(batch), part, read)
                if side != "left" or subject.pads_left:
                    alone = Part(ROWS, end - start, chosen=part.chosen)
                    expected = Reading.from_run(partial(run, ids[:, start:end]), alone)
                    comparisons.append(Comparison(f"text {row}, padding: {side}", padded, expected))
                if is_seen:
                    reading = Reading(part.select(others), part, read_others)
                    comparisons.append(Comparison(f"what stands in the padding: {side}", reading, padded))
        if not is_used:
            remark = f"{subject.mask_name} changes nothing: padding on the left is seen"
        looked_at = f"texts of unequal lengths in one batch, padding: {', '.join(subject.masks())}, beside each alone"
        return compare(subject, run.model, plain, comparisons, looked_at, remark)


def packing(subject: Subject, *, quick: bool = False) -> Finding:
    """Two documents in one row: the second one's logits do not depend on the first one."""
    if not subject.reads_tokens:
        return inapplicable("vectors are not packed")
    if subject.first_position is None:
        return inapplicable("forward takes no position_ids that could begin again at a document")
    calls = [call for call in list_calls(subject, quick=quick) if call.is_plain or (call.attention and not call.mask)]
    findings = [look_into_document(subject, call) for call in calls]
    known = [one for one in findings if math.isfinite(one.difference or 0.0) and one.verdict != "not applicable"]
    if all(finding.verdict == "fails" for finding in known):
        return inapplicable("position_ids that begin again do not separate documents in this model")
    worst = max(known, key=lambda finding: finding.difference or 0.0)
    if worst.verdict == "fails":
        remark = f"{worst.path}: {worst.remark.removeprefix('worst: ')}"
        return replace(worst, remark=remark, leaks=remark)
    if subject.mask_form is not None and look_into_document(subject, PLAIN[0], has_mask=True).verdict == "fails":
        return replace(
            worst, remark=f"not kept apart where {subject.mask_name} is given, too, even one of ones: give none"
        )
    return worst


def look_into_document(subject: Subject, call: Call, *, has_mask: bool = False) -> Finding:
    """Change all tokens of the first of two documents, whose positions begin again at the second one."""
    text, half, first = subject.ids[:1], subject.length // 2, subject.first_position or 0
    places = torch.arange(subject.length, device=text.device)[None]
    options: dict[str, Any] = {"position_ids": places - half * (places >= half) + first}
    if has_mask:
        options[subject.mask_name] = torch.ones_like(text)
    part = Part(1, subject.length, half)
    try:
        with running(subject, call) as run:
            whole = run(text, **options)
            expected = Reading(part.select(whole), part, partial(run, text, **options))
            changed = subject.change(text, places < half)
            seen = Comparison(
                "the second document sees the first",
                Reading.from_run(partial(run, changed, **options), part),
                expected,
            )
            looked_at = (
                "logits of a second document after all tokens of the first in its row were changed; position_ids"
            )
            return compare(subject, run.model, whole, [seen], looked_at, path=call.name)
    except Exception as error:
        return inapplicable(str(error))


def decoding(subject: Subject) -> Finding:
    """Token by token, in pieces, and as beams, each as in one pass."""
    if subject.core.kind == "fullrank" and subject.core.model.memory_length:
        subject = subject.core  # the cache of Hugging Face is its memory, which forgets
    length, half = subject.length, subject.length // 2
    with torch.no_grad(), mode(subject.model, training=False):
        logits, step = subject.logits(subject.ids), open_cache(subject, subject.model, pieces=False)
        comparisons = compare_pieces(subject, "token by token", step, list(range(length + 1)), logits)
        with contextlib.suppress(CannotRun):
            step = open_cache(subject, subject.model)
            for bounds in ([0, half, length], [0, 1, length - 2, length]):
                comparisons += compare_pieces(subject, "in pieces", step, bounds, logits)
        if not subject.has_state and (subject.translates or not subject.fixed):
            with contextlib.suppress(CannotRun):
                comparisons.append(compare_step(subject, "as beams", step, [0, half], half + 1, logits, order=ORDER))
        names = ", ".join(dict.fromkeys(one.name for one in comparisons))
        looked_at = f"logits with the cache, {names}, beside one pass"
        finding = compare(subject, subject.model, logits, comparisons, looked_at)
    config = subject.model.config.decoder if subject.translates else None
    if finding.verdict == "fails" and config is not None and config.released_decoding:
        why = "model.decoder.released_decoding: true leaves heads unmixed while a translation is written"
        return replace(finding, remark=f"{finding.remark}; {why}")
    return finding


def compare_pieces(subject: Subject, name: str, step: Step, bounds: list[int], logits: Tensor) -> list[Comparison]:
    """Each piece of the texts after the cache of those before, beside the same tokens in one pass."""
    pieces, comparisons = read_pieces(subject.ids, bounds, step), list[Comparison]()
    for number, end in enumerate(bounds[1:], start=1):
        piece = pieces[:, bounds[number - 1] : end]
        comparisons.append(compare_step(subject, name, step, bounds[:number], end, logits, piece))
    return comparisons


def compare_step(
    subject: Subject, name: str, step: Step, before: list[int], end: int, logits: Tensor,
    piece: Tensor | None = None, order: list[int] | None = None,
) -> Comparison:  # fmt: skip
    """Tokens up to `end` after the cache of pieces before, whose rows are chosen by `order`. piece: their logits, if known."""
    ids, start, rows = subject.ids, before[-1], order or list(range(ROWS))

    def read_before() -> Any:
        state = None
        for first, last in itertools.pairwise(before):
            state = step(ids[:, first:last], state)[1]
        return reorder_cache(subject.model, state, torch.tensor(order, device=ids.device)) if order else state

    def read_piece(state: Any) -> Tensor:
        return step(ids[rows, start:end], state)[0]

    alone = Part(len(rows), end - start, past=start)
    reading = Reading(read_piece(read_before()) if piece is None else piece, alone, read_piece, read_before)
    part = Part(ROWS, subject.length, start, end, chosen=order)
    return Comparison(name, reading, Reading(part.select(logits), part, partial(subject.logits, ids)))
