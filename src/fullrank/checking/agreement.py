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
    Run,
    Step,
    list_calls,
    open_cache,
    read_pieces,
    reorder_cache,
    running,
)
from fullrank.checking.copies import InDouble, WithoutDropout, list_tensors, mode
from fullrank.checking.layers import Part, Reading, find_layers
from fullrank.checking.report import Finding, allow, divide_by_size, find_worst, inapplicable, judge, largest
from fullrank.checking.subject import ROWS, Subject, agree
from fullrank.core.errors import count_things

ORDER = [1, 0, 0]  # rows as beam search may leave them


@dataclass(frozen=True)
class Comparison:
    """A reading, and another one whose logits it has to have. name: what is special about it."""

    name: str
    reading: Reading
    expected: Reading


def compare(
    subject: Subject, model: Any, comparisons: list[Comparison], looked_at: str, remark: str = "", path: str = ""
) -> Finding:
    """Passes where all logits are those expected, up to rounding; the worst is named, and the layer where they come apart.

    A model that is not ours may compute parts in float32: the worst is then read again with these in float64.
    """
    divide = divide_by_size(comparisons[0].expected.whole)

    def measure(one: Comparison) -> float:
        return largest(divide(one.reading.logits), divide(one.expected.logits))

    shares = [measure(one) for one in comparisons]
    worst = find_worst(dict(enumerate(shares)))
    limit, reason = allow(subject.dtype)
    with contextlib.ExitStack() as stack:
        if not subject.ours and subject.dtype == torch.float64 and shares[worst] > limit:
            single, why = allow(torch.float32)
            again = repeat_in_double(comparisons[worst], stack) if shares[worst] <= 10 * single else None
            if again is not None:
                comparisons, shares, worst = [again], [measure(again)], 0
            else:
                limit, reason = 10 * single, f"ten times {why}; a model that is not ours may compute parts so"
        finding = judge(looked_at, shares[worst], limit, reason, remark=remark, path=path)
        if finding.verdict == "passes":
            return finding
        apart = [one for one, share in zip(comparisons, shares, strict=True) if not share <= limit]
        layers = name_layers(model, apart, limit)
    return replace(finding, remark=f"worst: {comparisons[worst].name}", layers=layers)


def repeat_in_double(one: Comparison, stack: contextlib.ExitStack) -> Comparison | None:
    """Both readings again, with what is float32 in them in float64, and so all that follows; None where some of it stays."""
    double = stack.enter_context(InDouble())
    with contextlib.suppress(Exception):
        again = replace(one, reading=one.reading.repeat(), expected=one.expected.repeat())
        return again if double.is_complete else None
    return None


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
        last = len(texts) - 1
        whole = Reading.from_run(partial(run, texts), Part(len(texts), subject.length))
        for row, others in ((0, slice(1, None)), (last, slice(last))):
            changed = texts.clone()
            changed[row] = subject.change(texts)[row]
            part = replace(whole.part, chosen=others)
            reading = Reading.from_run(partial(run, changed), part)
            comparisons.append(Comparison(f"rows beside row {row}", reading, whole.with_part(part)))
        looked_at = f"logits of rows after all tokens of another row were changed; {call.name}"
        return compare(subject, run.model, comparisons, looked_at, path=call.name)


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
        whole = Reading.from_run(partial(run, ids), Part(ROWS, size))
        if largest(Run(subject, replace(call, seed=2), run.model)(ids), whole.logits) > allow(subject.dtype)[0]:
            return inapplicable("random numbers are drawn beside those of dropout, and other ones for another length")
        if torch.equal(run(subject.change(ids)), whole.logits):
            return inapplicable(NOTHING_MOVES)
        for end, rows in [*itertools.product(lengths, (ROWS, 1)), (size, 1)]:
            alone = Reading.from_run(partial(run, ids[:rows, :end].contiguous()), Part(rows, end))
            expected = whole.with_part(Part(ROWS, size, 0, end, chosen=slice(rows)))
            name = f"{count_things(rows, 'row')} of {count_things(end, 'token')}"
            comparisons.append(Comparison(name, alone, expected))
        shown = ", ".join(map(str, sorted(lengths)))
        looked_at = f"logits of the first {shown} tokens, beside those of the whole text of {size}; {call.name}"
        finding = compare(subject, run.model, comparisons, looked_at)
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
    ids, comparisons, is_used = subject.ids, list[Comparison](), False
    with running(subject, PLAIN[0]) as run:
        plain = run(ids)
        for side, mask in subject.masks().items():
            real = mask.bool()
            run_padded = Run(subject, Call(side, mask=side), run.model)
            batch = Reading.from_run(partial(run_padded, ids), Part(ROWS, subject.length))
            changed = torch.where(real, ids, subject.change(ids))
            others = Reading.from_run(partial(run_padded, changed), batch.part)
            is_seen = not subject.has_state and not agree(
                batch.logits[real], plain[real]
            )  # the mask is not for nothing
            is_used = is_used or is_seen
            for row in range(ROWS):
                start = int(real[row].int().argmax())
                end = start + int(real[row].sum())
                part = replace(batch.part, start=start, end=end, chosen=slice(row, row + 1))
                padded = batch.with_part(part)
                if side != "left" or subject.pads_left:
                    alone = Part(ROWS, end - start, chosen=part.chosen)
                    expected = Reading.from_run(partial(run, ids[:, start:end]), alone)
                    comparisons.append(Comparison(f"text {row}, padding: {side}", padded, expected))
                if is_seen:
                    name = f"what stands in the padding: {side}"
                    comparisons.append(Comparison(name, others.with_part(part), padded))
        remark = "" if subject.pads_left else "not alone on the left, where a text would be read at other positions"
        if not is_used:
            remark = f"{subject.mask_name} changes nothing: padding on the left is seen"
        looked_at = f"texts of unequal lengths in one batch, padding: {', '.join(subject.masks())}, beside each alone"
        return compare(subject, run.model, comparisons, looked_at, remark)


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
    if subject.mask_form is not None and look_into_document(subject, Call("", mask="ones")).verdict == "fails":
        return replace(
            worst, remark=f"not kept apart where {subject.mask_name} is given, too, even one of ones: give none"
        )
    return worst


def look_into_document(subject: Subject, call: Call) -> Finding:
    """Change all tokens of the first of two documents in a row."""
    text, half = subject.ids[:1], subject.length // 2
    first = torch.arange(subject.length, device=text.device)[None] < half
    try:
        with running(subject, replace(call, packed=True)) as run:
            part = Part(1, subject.length, half)
            readings = [Reading.from_run(partial(run, ids), part) for ids in (subject.change(text, first), text)]
            seen = Comparison("the second document sees the first", *readings)
            looked_at = (
                "logits of a second document after all tokens of the first in its row were changed; position_ids"
            )
            return compare(subject, run.model, [seen], looked_at, path=call.name)
    except Exception as error:
        return inapplicable(str(error))


def decoding(subject: Subject) -> Finding:
    """Token by token, in pieces, and as beams, each as in one pass."""
    if subject.core.kind == "fullrank" and subject.core.model.memory_length:
        subject = subject.core  # the cache of Hugging Face is its memory, which forgets
    ids, length, half = subject.ids, subject.length, subject.length // 2
    with torch.no_grad(), mode(subject.model, training=False):
        step = open_cache(subject, subject.model)
        whole = Reading.from_run(partial(subject.logits, ids), Part(ROWS, length))
        comparisons = compare_pieces("token by token", whole, ids, list(range(length + 1)), step)
        if not subject.has_state:
            for bounds in ([0, half, length], [0, 1, length - 2, length]):
                comparisons += compare_pieces("in pieces", whole, ids, bounds, step)
            if subject.translates or not subject.fixed:
                with contextlib.suppress(CannotRun):
                    comparisons.append(compare_beams(subject, whole, step))
        names = ", ".join(dict.fromkeys(one.name for one in comparisons))
        looked_at = f"logits with the cache, {names}, beside one pass"
        return compare(subject, subject.model, comparisons, looked_at)


def compare_pieces(name: str, whole: Reading, ids: Tensor, bounds: list[int], step: Step) -> list[Comparison]:
    """Each piece of the texts after the cache of those before, beside the same tokens in one pass."""
    comparisons = []
    for number, logits in enumerate(read_pieces(ids, bounds, step)[0]):
        start, end = bounds[number : number + 2]
        before = partial(read_pieces, ids, bounds[: number + 1], step)
        piece = Part(ROWS, end - start, past=start)
        reading = Reading(logits, piece, partial(read_next, step, ids[:, start:end]), before)
        expected = whole.with_part(replace(whole.part, start=start, end=end))
        comparisons.append(Comparison(name, reading, expected))
    return comparisons


def read_next(step: Step, ids: Tensor, logits_before: list[Tensor], state: Any) -> Tensor:
    return step(ids, state)[0]


def compare_beams(subject: Subject, whole: Reading, step: Step) -> Comparison:
    """A token after the cache of the first half, rows of which were chosen anew."""
    half = subject.length // 2

    def choose_rows() -> tuple[Any]:
        _, state = read_pieces(subject.ids, [0, half], step)
        return (reorder_cache(subject.model, state, torch.tensor(ORDER, device=subject.ids.device)),)

    def read(state: Any) -> Tensor:
        return step(subject.ids[ORDER, half : half + 1], state)[0]

    reading = Reading(read(*choose_rows()), Part(ROWS, 1, past=half), read, choose_rows)
    return Comparison("as beams", reading, whole.with_part(Part(ROWS, subject.length, half, half + 1, chosen=ORDER)))
