"""Agreement of two ways to compute the same, of any model: other rows, other lengths, padding, packing, a cache."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fullrank.checking.calls import (
    NOTHING_MOVES,
    PLAIN,
    CacheStep,
    Call,
    CannotRun,
    Run,
    Step,
    list_calls,
    read_pieces,
    running,
)
from fullrank.checking.copies import InDouble, WithoutDropout, build_without_chance, list_tensors, mode
from fullrank.checking.layers import Part, Reading, find_layers
from fullrank.checking.report import Finding, allow, divide_by_size, inapplicable, judge, largest, rank_differences
from fullrank.checking.subject import ROWS, Subject, agree
from fullrank.core.errors import count_things

ORDER = [1, 0, 0]  # rows as beam search may leave them


@dataclass(frozen=True)
class Comparison:
    """A reading, and another one whose logits it has to have. name: what is special about it."""

    name: str
    reading: Reading
    expected: Reading

    def repeat_in_double(self, stack: contextlib.ExitStack) -> Comparison | None:
        """Both readings again, with float32 as float64, and so all that follows; None where some of it stays."""
        double = stack.enter_context(InDouble())
        with contextlib.suppress(Exception):
            again = Comparison(self.name, self.reading.repeat(), self.expected.repeat())
            return again if double.is_complete else None
        return None


def compare(
    subject: Subject, model: Any, comparisons: list[Comparison], looked_at: str, remark: str = "", path: str = ""
) -> Finding:
    """Passes where all logits are those expected, up to rounding; the worst is named, and the layer where they come apart.

    A model that is not ours may compute parts in float32: the worst is then read again with these in float64.
    """
    divide = divide_by_size(comparisons[0].expected.all_logits)

    def measure(comparison: Comparison) -> float:
        return largest(divide(comparison.reading.logits), divide(comparison.expected.logits))

    shares = {i: measure(comparison) for i, comparison in enumerate(comparisons)}
    worst = rank_differences(shares)[0]
    limit, reason = allow(subject.dtype)
    with contextlib.ExitStack() as stack:
        if not subject.ours and subject.dtype == torch.float64 and shares[worst] > limit:
            single, why = allow(torch.float32)
            in_double = comparisons[worst].repeat_in_double(stack) if shares[worst] <= 10 * single else None
            if in_double is None:
                limit, reason = 10 * single, f"ten times {why}; a model that is not ours may compute parts so"
            else:
                comparisons, worst = [in_double], 0
                shares = {worst: measure(in_double)}
        finding = judge(looked_at, shares[worst], limit, reason, remark=remark, path=path)
        if finding.verdict == "passes":
            return finding
        layers = name_layers(model, [comparisons[i] for i in shares if not shares[i] <= limit], limit)
    return replace(finding, remark=f"worst: {comparisons[worst].name}", layers=layers)


def name_layers(model: Any, apart: list[Comparison], limit: float) -> tuple[str, ...]:
    """Find the layer of the first of these whose positions can be told from other sizes of the model."""
    sizes = {0, 2, 3, *(size for tensor in list_tensors(model) for size in tensor.shape)}
    for comparison in apart:
        if not sizes & {comparison.reading.part.length, comparison.expected.part.length}:
            with contextlib.suppress(Exception):  # a difference is one, even where nobody can explain it
                return find_layers(model, comparison.expected, comparison.reading, limit)
    return ()


def independent_rows(subject: Subject, *, training: bool) -> Finding:
    """All tokens of a row are changed; the logits of the other rows may not change."""
    call, comparisons = PLAIN[training], list[Comparison]()
    with running(subject, call) as run, WithoutDropout():
        texts = torch.cat((subject.ids, subject.ids.roll(1, 1)))
        batch, last = run.read(texts), len(texts) - 1
        for row, others in ((0, slice(1, None)), (last, slice(last))):
            changed = texts.clone()
            changed[row] = subject.change(texts)[row]
            part = replace(batch.part, chosen=others)
            comparisons.append(Comparison(f"rows beside row {row}", run.read(changed, part), batch.with_part(part)))
        looked_at = f"logits of rows after all tokens of another row were changed; {call.name}"
        return compare(subject, run.model, comparisons, looked_at, path=call.name)


def read_longest_texts(subject: Subject, run: Run) -> Reading:
    """The longest texts that the model reads, of all tokens or of a length that others check."""
    for length in (subject.texts.shape[1], *sorted(subject.lengths, reverse=True)):
        with contextlib.suppress(Exception):
            return run.read(subject.texts[:, :length].contiguous())
    return run.read(subject.ids)


def compare_prefixes(subject: Subject, *, training: bool) -> Finding:
    """Logits of the first tokens of a text, read alone, are those in the whole text: of powers of two, and other lengths.

    Lengths that the model refuses are left out.
    """
    if training and subject.ours:
        subject = replace(subject, model=build_without_chance(subject.model))
    call = PLAIN[training]
    comparisons = list[Comparison]()
    refusals = () if subject.has_example else (Exception,)  # beside other inputs one token may be read as many
    with running(subject, call) as run, WithoutDropout():
        full = read_longest_texts(subject, run)
        size = full.part.length
        ids = subject.texts[:, :size].contiguous()
        # the length that no size of the model equals comes first: layers are recognised by it
        powers = (1 << i for i in reversed(range(size.bit_length())))
        lengths = dict.fromkeys((subject.length, size - 1, subject.length // 2, *powers, 3))
        lengths.pop(size, None)
        if largest(Run(subject, replace(call, seed=2), run.model)(ids), full.logits) > allow(subject.dtype)[0]:
            return inapplicable("random numbers are drawn beside those of dropout, and other ones for another length")
        if torch.equal(run(subject.change(ids)), full.logits):
            return inapplicable(NOTHING_MOVES)
        for end, rows in [*itertools.product(lengths, (ROWS, 1)), (size, 1)]:
            part = replace(full.part, end=end, chosen=slice(rows))
            name = f"{count_things(rows, 'row')} of {count_things(end, 'token')}"
            with contextlib.suppress(*refusals):
                alone = run.read(ids[:rows, :end].contiguous())
                comparisons.append(Comparison(name, alone, full.with_part(part)))
        read = {comparison.reading.part.length for comparison in comparisons} - {size}
        if not read:
            raise CannotRun(f"it reads no texts of other lengths than {size} tokens")
        shown = ", ".join(map(str, sorted(read)))
        looked_at = f"logits of the first {shown} tokens, beside those of the whole text of {size}; {call.name}"
        path = f"texts of other lengths{', training' * training}"
        finding = compare(subject, run.model, comparisons, looked_at, path=path)
    if finding.verdict == "passes":
        return finding
    leaks = f"{finding.remark.removeprefix('worst: ')} have other logits where {size} tokens are read"
    return replace(finding, leaks=leaks)


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
            batch = run_padded.read(ids)
            others = run_padded.read(torch.where(real, ids, subject.change(ids)))
            # the mask is not for nothing
            is_seen = not subject.has_state and not agree(batch.all_logits[real], plain[real])
            is_used = is_used or is_seen
            for row in range(ROWS):
                start = int(real[row].int().argmax())
                end = start + int(real[row].sum())
                part = replace(batch.part, start=start, end=end, chosen=slice(row, row + 1))
                padded = batch.with_part(part)
                if side != "left" or subject.pads_left:
                    alone = run.read(ids[:, start:end], Part(ROWS, end - start, chosen=part.chosen))
                    comparisons.append(Comparison(f"text {row}, padding: {side}", padded, alone))
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
    calls = [call for call in list_calls(subject, quick=quick) if call in PLAIN or (call.attention and not call.mask)]
    findings = [look_into_document(subject, call) for call in calls]
    compared = [finding for finding in findings if finding.difference is not None and math.isfinite(finding.difference)]
    if all(finding.verdict == "fails" for finding in compared):
        return inapplicable("position_ids that begin again do not separate documents in this model")
    worst = max(compared, key=lambda finding: finding.difference or 0.0)
    if worst.verdict == "fails":
        remark = f"{worst.path}: {worst.remark.removeprefix('worst: ')}"
        return replace(worst, remark=remark, leaks=remark)
    if subject.mask_form is None or look_into_document(subject, Call("", mask="ones")).verdict != "fails":
        return worst
    return replace(worst, remark=f"not kept apart where {subject.mask_name} is given, too, even one of ones: give none")


def look_into_document(subject: Subject, call: Call) -> Finding:
    """Change all tokens of the first of two documents in a row."""
    text, half = subject.ids[:1], subject.length // 2
    places = torch.arange(subject.length, device=text.device)[None]
    looked_at = "logits of a second document after all tokens of the first in its row were changed; position_ids"
    try:
        with running(subject, call) as run:
            run.positions = torch.where(places < half, places, places - half)
            part = Part(1, subject.length, half)
            readings = [run.read(ids, part) for ids in (subject.change(text, places < half), text)]
            seen = Comparison("the second document sees the first", *readings)
            return compare(subject, run.model, [seen], looked_at, path=call.name)
    except Exception as error:
        return inapplicable(str(error))


def decoding(subject: Subject) -> Finding:
    """Token by token, in pieces, and as beams, each as in one pass."""
    if subject.core.kind == "fullrank" and subject.core.model.memory_length:
        subject = subject.core  # the cache of Hugging Face is its memory, which forgets
    length, half = subject.length, subject.length // 2
    with running(subject, PLAIN[0]) as run, torch.no_grad(), mode(subject.model, training=False):
        step, one_pass = CacheStep(subject, subject.model), run.read(subject.ids)
        comparisons = compare_pieces("token by token", one_pass, subject.ids, range(length + 1), step)
        if not subject.has_state:
            for bounds in ((0, half, length), (0, 1, length - 2, length)):
                comparisons += compare_pieces("in pieces", one_pass, subject.ids, bounds, step)
            if subject.kind == "translator" or not subject.fixed:
                with contextlib.suppress(CannotRun):
                    comparisons.append(compare_beams(subject, one_pass, step))
        names = ", ".join(dict.fromkeys(comparison.name for comparison in comparisons))
        looked_at = f"logits with the cache, {names}, beside one pass"
        return compare(subject, subject.model, comparisons, looked_at)


def compare_pieces(name: str, one_pass: Reading, ids: Tensor, bounds: Sequence[int], step: Step) -> list[Comparison]:
    """Each piece of the texts after the cache of those before, beside the same tokens in one pass."""
    comparisons = []
    for number, logits in enumerate(read_pieces(ids, bounds, step)[0]):
        start, end = bounds[number : number + 2]
        before = partial(read_pieces, ids, bounds[: number + 1], step)
        piece, part = ids[:, start:end], replace(one_pass.part, start=start, end=end)

        def read(pieces_before: list[Tensor], state: Any, piece: Tensor = piece) -> Tensor:
            return step(piece, state)[0]

        reading = Reading(logits, Part(ROWS, end - start, past=start), read, before)
        comparisons.append(Comparison(name, reading, one_pass.with_part(part)))
    return comparisons


def compare_beams(subject: Subject, one_pass: Reading, step: CacheStep) -> Comparison:
    """A token after the cache of the first half, rows of which were chosen anew."""
    half = subject.length // 2

    def choose_rows() -> tuple[Any]:
        _, state = read_pieces(subject.ids, [0, half], step)
        return (step.reorder(state, torch.tensor(ORDER, device=subject.ids.device)),)

    def read(state: Any) -> Tensor:
        return step(subject.ids[ORDER, half : half + 1], state)[0]

    reading = Reading(read(*choose_rows()), Part(ROWS, 1, past=half), read, choose_rows)
    part = replace(one_pass.part, start=half, end=half + 1, chosen=ORDER)
    return Comparison("as beams", reading, one_pass.with_part(part))
