"""Checks of a language model: no token sees the future, and two ways to compute the same agree."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from fullrank.checking.agreement import call_after_another, change_rows, compare_prefixes, decoding, packing, padding
from fullrank.checking.calls import CERTAIN, PLAIN, Call, CannotRun, Run, list_calls, running
from fullrank.checking.causality import check_on_random_tokens, search_by_gradient, search_by_perturbation
from fullrank.checking.report import Finding, Report, inapplicable
from fullrank.checking.scoring import check_scoring
from fullrank.checking.subject import ROWS, Subject, open_subject
from fullrank.core.errors import InputError, one_line

logger = logging.getLogger(__name__)

__all__ = ["Finding", "Report", "check", "check_scoring"]

_SOURCES = {
    "fullrank": "a language model of fullrank",
    "translator": "a translation model of fullrank",
    "hugging_face": "a model of Hugging Face",
    "module": "a module",
}
_DOUBLE_ONLY = "in float64 alone some kernel errs, as attention of torch does with a mask in float32"
_SHOWS = 1e-4  # a leak in fp64 that is larger has to show in fp32, too


class Check(NamedTuple):
    """A row of the table of checks. call: how the model is run; find: what is looked at in such a run.

    reads_other_lengths: it reads texts of other lengths than those of the subject.
    """

    call: Call
    find: Callable[[Run], Finding]
    reads_other_lengths: bool = False

    def __call__(self, subject: Subject) -> Finding:
        with running(subject, self.call) as run:
            return self.find(run)


def list_checks(subject: Subject, *, quick: bool = False) -> dict[str, Check]:
    """All checks by name, in the order in which they run. quick: only those that take a second or two of a small model."""
    calls = {f"future, by perturbation, {call.name}": call for call in list_calls(subject, quick=quick)}
    checks = {name: Check(call, search_by_perturbation) for name, call in calls.items()}
    evaluation, training = CERTAIN
    checks["future, prefix = whole"] = Check(evaluation, compare_prefixes, True)
    if not quick:
        checks["future, prefix = whole, training"] = Check(training, compare_prefixes, True)
    for call in PLAIN:
        checks[f"future, by gradient, {call.name}"] = Check(call, search_by_gradient)
    checks["rows of a batch are independent"] = Check(evaluation, change_rows)
    checks["rows of a batch are independent, training"] = Check(training, change_rows)
    checks["the same call after another gives the same logits"] = Check(evaluation, call_after_another)
    checks["padding changes nothing"] = Check(PLAIN[0], padding, True)
    if not subject.ours:
        checks["packed documents are independent"] = Check(PLAIN[0], partial(packing, quick=quick))
    checks["incremental decoding = one pass"] = Check(PLAIN[0], decoding, True)
    if not quick and (subject.core.ours or subject.injected):
        from fullrank.checking.definition import CHECKS  # it imports a compiler

        checks |= {name: Check(PLAIN[0], find) for name, find in CHECKS.items()}
    if not quick:
        checks["future, after training on random tokens"] = Check(PLAIN[0], check_on_random_tokens, True)
    return checks


def check(
    model: Any,
    inputs: Mapping[str, Any] | tuple[Any, ...] | Tensor | None = None,
    *,
    sequence: str | None = None,
    vocab_size: int | None = None,
    length: int | None = None,
    step: Callable[..., tuple[Tensor, Any]] | None = None,
    quick: bool = False,
    only: Sequence[str] = (),
    description: Mapping[str, Any] | None = None,
    shrunk: tuple[str, ...] = (),
) -> Report:
    """Check that the model does not see the future on any code path, and that two ways to compute the same agree.

        report = fr.check(model);  report.passes, report.failures, report.layers, report.paths

    model: any module, or function, whose `model(input_ids)` gives logits (B, N, V), first in a tuple or as `.logits`; it is
    left as it is. inputs: example inputs of a model that needs others: by argument, a tuple, or a tensor. sequence: the one
    of them along which no position may see later ones; by default decoder_input_ids, input_ids, inputs_embeds, or the first.
    vocab_size: how many token ids it knows, where it does not say it. length: tokens of the texts; by default a prime up to
    71 that no size of the model equals, since layers that leak are recognised by the dimension of positions.
    step(ids (B, n), cache or None): gives logits and the next cache, for a module with a cache of its own kind.
    quick: without compiling, training a copy on random tokens, prefixes in training and rare code paths.
    only: the checks whose names begin so. description, shrunk: for the report. Each verdict is logged, as DEBUG.
    Raises InputError for a model that gives no logits.
    """
    subject = open_subject(model, vocab_size, length, inputs, sequence, step)
    checks = list_checks(subject, quick=quick)
    wanted = (only,) if isinstance(only, str) else tuple(only)
    for prefix in wanted:
        if not any(title.startswith(prefix) for title in checks):
            among = f"{' (quick=True)' * quick}; there are: {'; '.join(checks)}"
            raise InputError(f"only: no check's name begins with {prefix!r}{among}")
    about = {
        "model": getattr(model, "__name__", type(model).__name__),
        "source": _SOURCES[subject.kind],
        "vocab_size": subject.vocab_size,
        "length": subject.length,
        "precision": str(subject.dtype).removeprefix("torch."),
        "parameters": subject.parameters,
        "texts": f"texts of {', '.join(map(str, subject.lengths))} tokens, {ROWS} rows and one",
        "modes": subject.has_modes,
    }
    if subject.sees_future:
        about["sees_future"] = subject.sees_future
    findings = []
    for title, row in checks.items():
        if title.startswith(wanted or ""):
            findings.append(replace(run_guarded(row, subject), check=title))
            logger.debug(f"{title}: {findings[-1].verdict}")
    return Report(tuple(findings), {**about, **(description or {})}, shrunk)


def run_guarded(row: Check, subject: Subject) -> Finding:
    """The finding of a check in fp64; in fp32 what cannot be computed so, or shows a leak there, which has to show twice.

    A model that cannot be run as everybody runs it fails the check; the others go on.
    """
    try:
        finding = row(subject)
    except CannotRun as error:
        return inapplicable(str(error))
    except Exception as error:
        if subject.single is not None:
            return run_guarded(row, subject.single)
        remark = f"{type(error).__name__}: {one_line(error, 240)}"
        if not row.call.is_plain:
            return inapplicable(f"it cannot be run so: {remark}")
        if subject.has_example and row.reads_other_lengths:
            return inapplicable(f"beside the other inputs no text of another length can be read: {remark}")
        return Finding("fails", reason="the model has to run", remark=remark)
    if (finding.difference or 0.0) <= _SHOWS or subject.single is None:
        return finding
    other = run_guarded(row, subject.single)
    return replace(other, remark=_DOUBLE_ONLY) if other.verdict == "passes" else finding
