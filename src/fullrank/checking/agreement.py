"""Agreement of two ways to compute the same, of any model: other rows, other lengths, padding, packing, a cache."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fullrank.checking.calls import (
    NOTHING_MOVES,
    CacheStep,
    Call,
    CannotRun,
    Run,
    Step,
    list_calls,
    prepare_run,
    read_pieces,
)
from fullrank.checking.copies import InDouble, list_tensors, perturbed
from fullrank.checking.layers import Reading, find_layer_by_compiler, find_layers
from fullrank.checking.report import Finding, allow, allow_noise, divide_by_size, inapplicable, judge, largest
from fullrank.checking.subject import ROWS, Subject, agree
from fullrank.core.errors import count_things

ORDER = [1, 0, 0]  # rows as beam search may leave them


@dataclass(frozen=True, eq=False)
class Comparison:
    """A reading, and another one whose logits it has to have; `name` says what is special about the first."""

    name: str
    reading: Reading
    expected: Reading

    def name_layers(self, run: Run, least: float) -> tuple[str, ...]:
        """Name the layers where the readings come apart; none where the search fails, as there is a difference all the same."""
        with contextlib.suppress(Exception):
            if run.call.compiled:
                return find_layer_by_compiler(run.subject.model, self.expected, self.reading, least)
            return find_layers(run.subject.model, self.expected, self.reading, least)
        return ()


def measure(comparisons: Sequence[Comparison]) -> dict[Comparison, float]:
    """Measure the largest difference of each comparison, as a share of the size of logits."""
    divide = divide_by_size(comparisons[0].expected.all_logits)
    shares = {}
    for comparison in comparisons:
        shares[comparison] = largest(divide(comparison.reading.logits), divide(comparison.expected.logits))
    return shares


def measure_one(reading: Reading, expected: Reading) -> float:
    """Measure the largest difference of a reading from another, as a share of the size of logits."""
    (difference,) = measure([Comparison("", reading, expected)]).values()
    return difference


def compare(run: Run, comparisons: Sequence[Comparison], looked_at: str, remark: str = "") -> Finding:
    """Compare readings with those expected: the check passes where all logits are equal up to rounding.

    A model that is not ours may compute parts in float32. The worst comparison is then read again with these in float64. Such a
    model may also enlarge errors of rounding. The tolerance is then raised to what such errors in its parameters change.
    Layers are named by the first comparison whose positions can be recognised: their number is no other size of the model.

    Args:
        run: the run whose texts were read.
        comparisons: one or more.
        looked_at: what is compared, in words.
        remark: other observations.

    Returns:
        The finding; one that fails names the worst comparison, and the layers where the readings come apart.
    """
    shares = measure(comparisons)
    worst = max(shares, key=shares.__getitem__)
    limit, reason = run.allow()
    with contextlib.ExitStack() as stack:
        if shares[worst] > limit and run.dtype == torch.float64 and not run.subject.ours:
            limit, reason = allow(torch.float32)
            limit *= 10
            reason = f"ten times {reason}; a model that is not ours may compute parts so"
            if shares[worst] <= limit:
                double = stack.enter_context(InDouble())
                with contextlib.suppress(Exception):
                    again = measure([Comparison(worst.name, worst.reading.repeat(), worst.expected.repeat())])
                    if double.is_complete:
                        shares = again
                        (worst,) = shares
                        limit, reason = run.allow()
        if shares[worst] > limit and run.dtype == torch.float64 and not run.subject.ours:
            with perturbed(run.subject.model):
                limit, reason = allow_noise(limit, reason, measure_one(worst.expected.repeat(), worst.expected))
        fault = f"worst: {worst.name}"
        finding = judge(looked_at, shares[worst], limit, reason, fault, remark=remark, path=run.call.name)
        if finding.verdict == "passes":
            return finding
        sizes = {0, 2, 3, *(size for tensor in list_tensors(run.subject.model) for size in tensor.shape)}
        layers: tuple[str, ...] = ()
        for comparison, share in shares.items():
            if share > limit and not sizes & {comparison.reading.length, comparison.expected.length}:
                layers = comparison.name_layers(run, limit)
                break
        return replace(finding, layers=layers)


def _is_random(run: Run, logits: Tensor, ids: Tensor) -> bool:
    """Return whether random numbers are drawn beside those of dropout: with another seed the texts have other logits."""
    other = replace(run, call=replace(run.call, seed=2))(ids)
    return largest(other, logits) > run.allow()[0]


def change_rows(run: Run) -> Finding:
    """Change all tokens of a row: logits of the other rows may not change.

    A row alone is also compared with the same row in a batch.
    """
    texts = torch.cat((run.subject.ids, run.subject.ids.roll(1, 1)))
    batch = run.read(texts)
    last = len(texts) - 1
    comparisons = []
    for row, others in ((0, slice(1, None)), (last, slice(last))):
        changed = texts.clone()
        changed[row] = run.subject.change(texts)[row]
        reading = replace(run.read(changed), chosen=others)
        comparisons.append(Comparison(f"rows beside row {row}", reading, replace(batch, chosen=others)))
    if not (run.call.training and _is_random(run, batch.all_logits, texts)):
        first = replace(batch, chosen=slice(1))
        comparisons.append(Comparison("a row alone, beside the same in a batch", run.read(texts[:1]), first))
    looked_at = f"logits of rows after all tokens of another row were changed, and of a row alone; {run.call.name}"
    return compare(run, comparisons, looked_at)


def call_after_another(run: Run) -> Finding:
    """Compare the logits of texts with those of the same texts after other texts were read.

    Where they differ the check does not apply, and its reason asks, since a model may mean to keep a memory between calls.
    """
    ids = run.subject.ids
    first = run(ids)
    if _is_random(run, first, ids):
        return inapplicable("random numbers are drawn beside those of dropout")
    with run.prepared():
        run.read_rows(run.subject.change(ids))
        later = run.read_rows(ids)
    divide = divide_by_size(first)
    looked_at = "logits of texts, first and after a call with other texts"
    finding = judge(looked_at, largest(divide(later), divide(first)), *run.allow(), path=run.call.name)
    if finding.verdict == "passes":
        return finding
    return inapplicable(
        "something is kept between calls, by which a text sees those of earlier calls: is that a memory from segment to "
        "segment? If not, it is a fault"
    )


def compare_prefixes(run: Run) -> Finding:
    """Compare logits of the first tokens of a text, read alone, with those in the whole text.

    Lengths are powers of two and others. Those that the model refuses are left out.
    """
    subject = run.subject
    ids = subject.texts
    full = run.read(ids)
    size = full.length
    if _is_random(run, full.all_logits, ids):
        return inapplicable("random numbers are drawn beside those of dropout, and other ones for another length")
    if torch.equal(run(subject.change(ids)), full.all_logits):
        return inapplicable(NOTHING_MOVES)
    # the length that no size of the model equals comes first: layers are recognised by it
    powers = (1 << i for i in reversed(range(size.bit_length())))
    lengths = dict.fromkeys((subject.length, size - 1, subject.length // 2, *powers, 3))
    lengths.pop(size, None)
    suppressed = () if subject.has_example else (Exception,)  # beside other inputs one token may be read as many
    comparisons = []
    for rows in (ROWS, 1):
        whole_texts = full if rows == ROWS else run.read(ids[:rows])
        for end in lengths:
            name = f"{count_things(rows, 'row')} of {count_things(end, 'token')}"
            with contextlib.suppress(*suppressed):
                prefix = run.read(ids[:rows, :end].contiguous())
                comparisons.append(Comparison(name, prefix, replace(whole_texts, end=end)))
    if not comparisons:
        raise CannotRun(f"it reads no texts of other lengths than {size} tokens")
    shown = ", ".join(map(str, sorted({comparison.reading.length for comparison in comparisons})))
    looked_at = f"logits of the first {shown} tokens, beside those of the whole text of {size}; {run.call.name}"
    finding = compare(run, comparisons, looked_at)
    path = f"texts of other lengths{', training' * run.call.training}"
    if finding.verdict == "passes":
        return replace(finding, path=path)
    leaks = f"other logits of {finding.remark.removeprefix('worst: ')} where {size} tokens are read"
    return replace(finding, path=path, leaks=leaks)


def padding(run: Run) -> Finding:
    """Compare texts in a padded batch with each alone, and with other tokens in the padding.

    With padding on the left, a text has the logits that it has alone only where positions are counted from its start. What
    stands in the padding may be seen in no case.
    """
    subject = run.subject
    ids = subject.ids
    if subject.mask_form is None or not subject.reads_tokens:
        return inapplicable(subject.without_mask)
    plain = run(ids)
    comparisons = []
    is_used = False
    for side, mask in subject.masks().items():
        real = mask.bool()
        run_padded = replace(run, call=Call(side, mask=side))
        batch = run_padded.read(ids)
        others = run_padded.read(torch.where(real, ids, subject.change(ids)))
        # the mask is not for nothing
        is_seen = not subject.has_state and not agree(batch.all_logits[real], plain[real])
        is_used = is_used or is_seen
        for row in range(ROWS):
            start = int(real[row].int().argmax())
            part: dict[str, Any] = {"start": start, "end": start + int(real[row].sum()), "chosen": slice(row, row + 1)}
            padded = replace(batch, **part)
            if side != "left" or subject.pads_left:
                alone = replace(run.read(ids[:, start : padded.end]), chosen=padded.chosen)
                comparisons.append(Comparison(f"text {row}, padding: {side}", padded, alone))
            if is_seen:
                name = f"what stands in the padding: {side}"
                comparisons.append(Comparison(name, replace(others, **part), padded))
    remark = "" if subject.pads_left else "not alone on the left, where a text would be read at other positions"
    if not is_used:
        remark = f"{subject.mask_name} changes nothing: padding on the left is seen"
    looked_at = f"texts of unequal lengths in one batch, padding: {', '.join(subject.masks())}, beside each alone"
    return compare(run, comparisons, looked_at, remark)


def packing(run: Run, *, quick: bool = False) -> Finding:
    """Check that of two documents in one row the second one's logits do not depend on the first one."""
    subject = run.subject
    if not subject.reads_tokens:
        return inapplicable("vectors are not packed")
    if subject.first_position is None:
        return inapplicable("forward takes no position_ids that could begin again at a document")
    calls = [call for call in list_calls(subject, quick=quick) if call.is_plain or (call.attention and not call.mask)]
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
    """Change all tokens of the first of two documents in a row, and compare the logits of the second."""
    half = subject.length // 2
    text = subject.ids[:1]
    other = torch.cat((subject.change(text)[:, :half], text[:, half:]), 1)
    looked_at = "logits of a second document after all tokens of the first in its row were changed; position_ids"
    try:
        run = prepare_run(subject, replace(call, packed=True))
        changed, expected = (replace(run.read(ids), start=half) for ids in (other, text))
        return compare(run, [Comparison("the second document sees the first", changed, expected)], looked_at)
    except Exception as error:
        return inapplicable(str(error))


def decoding(run: Run) -> Finding:
    """Compare decoding with a cache, token by token, in pieces and as beams, with one pass."""
    subject = run.subject
    if subject.core.kind == "fullrank" and subject.core.model.memory_length:
        subject = subject.core  # the cache of Hugging Face is its memory, which forgets
        run = replace(run, subject=subject)
    length = subject.length
    half = subject.length // 2
    with run.prepared():
        step = CacheStep(subject)
        one_pass = run.read(subject.ids)
        comparisons = compare_pieces("token by token", one_pass, subject.ids, range(length + 1), step)
        if not subject.has_state:
            for bounds in ((0, half, length), (0, 1, length - 2, length)):
                comparisons += compare_pieces("in pieces", one_pass, subject.ids, bounds, step)
            if subject.kind == "translator" or not subject.fixed:
                with contextlib.suppress(CannotRun):
                    comparisons.append(_compare_beams(one_pass, subject.ids, step))
        names = ", ".join(dict.fromkeys(comparison.name for comparison in comparisons))
        return compare(run, comparisons, f"logits with the cache, {names}, beside one pass")


def compare_pieces(name: str, one_pass: Reading, ids: Tensor, bounds: Sequence[int], step: Step) -> list[Comparison]:
    """Compare each piece of texts, read after the state of those before, with the same tokens in one pass.

    Args:
        name: what is special about reading in these pieces, in words.
        one_pass: the reading of the whole texts.
        ids: the texts.
        bounds: positions where pieces begin and end, from 0 to the length.
        step: reads a piece after a state.
    """
    comparisons = []
    for number, logits in enumerate(read_pieces(ids, bounds, step)[0]):
        start, end = bounds[number : number + 2]
        before = partial(read_pieces, ids, bounds[: number + 1], step)
        piece = ids[:, start:end]

        def read(pieces_before: list[Tensor], state: Any, piece: Tensor = piece) -> Tensor:
            return step(piece, state)[0]

        reading = Reading(logits, read, before, past=start)
        comparisons.append(Comparison(name, reading, replace(one_pass, start=start, end=end)))
    return comparisons


def _compare_beams(one_pass: Reading, ids: Tensor, step: CacheStep) -> Comparison:
    """Compare a token, read after rows of the cache of the first half were chosen anew, with the same token in one pass."""
    half = ids.shape[1] // 2

    def choose_rows() -> tuple[Any]:
        _, state = read_pieces(ids, [0, half], step)
        return (step.reorder(state, torch.tensor(ORDER, device=ids.device)),)

    def read(state: Any) -> Tensor:
        return step(ids[ORDER, half : half + 1], state)[0]

    reading = Reading(read(*choose_rows()), read, choose_rows, past=half)
    return Comparison("as beams", reading, replace(one_pass, start=half, end=half + 1, chosen=ORDER))
