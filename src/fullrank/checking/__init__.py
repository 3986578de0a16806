"""Checks of a language model: no token sees the future, and two ways to compute the same agree."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from fullrank.checking.agreement import compare_prefixes, decoding, independent_rows, packing, padding
from fullrank.checking.calls import CannotRun, list_calls
from fullrank.checking.causality import check_on_random_tokens, search_by_gradient, search_by_perturbation
from fullrank.checking.report import Finding, Report, inapplicable
from fullrank.checking.scoring import check_scoring
from fullrank.checking.subject import ROWS, Subject, open_subject
from fullrank.core.errors import InputError, one_line

__all__ = ["Finding", "Report", "check", "check_scoring"]

_SOURCES = {
    "fullrank": "a language model of fullrank",
    "translator": "a translation model of fullrank",
    "hugging_face": "a model of Hugging Face",
    "module": "a module",
}
_DOUBLE_ONLY = "in float64 alone some kernel errs, as attention of torch does with a mask in float32"
_SHOWS = 1e-4  # a leak in fp64 that is larger has to show in fp32, too
Check = Callable[[Subject], Finding]
# checks that read texts of other lengths
_OTHER_LENGTHS = ("padding", "incremental decoding", "future, after training", "future, prefix")


def list_checks(subject: Subject, *, quick: bool = False) -> dict[str, Check]:
    """All checks by name, in the order in which they run. quick: only those that take a second or two of a small model."""
    checks: dict[str, Check] = {}
    for call in list_calls(subject, quick=quick):
        checks[f"future, by perturbation, {call.name}"] = partial(search_by_perturbation, call=call)
    checks["future, prefix = whole"] = partial(compare_prefixes, training=False)
    if not quick:
        checks["future, prefix = whole, training"] = partial(compare_prefixes, training=True)
    for when, training in (("evaluation", False), ("training", True)):
        checks[f"future, by gradient, {when}"] = partial(search_by_gradient, training=training)
    for more, training in (("", False), (", training", True)):
        checks[f"rows of a batch are independent{more}"] = partial(independent_rows, training=training)
    checks["padding changes nothing"] = padding
    if not subject.ours:
        checks["packed documents are independent"] = partial(packing, quick=quick)
    checks["incremental decoding = one pass"] = decoding
    if not quick and (subject.core.ours or subject.injected):
        from fullrank.checking.definition import CHECKS  # it imports a compiler

        checks |= CHECKS
    if not quick:
        checks["future, after training on random tokens"] = check_on_random_tokens
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
    say: Callable[[str], None] = lambda verdict: None,
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
    only: the checks whose names begin so. description, shrunk: for the report. say: is told each verdict (`say=print`).
    Raises InputError for a model that gives no logits.
    """
    subject = open_subject(model, vocab_size, length, inputs, sequence, step)
    checks, wanted = list_checks(subject, quick=quick), (only,) if isinstance(only, str) else tuple(only)
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
    for title, run in checks.items():
        if title.startswith(wanted or ""):
            findings.append(replace(run_guarded(run, subject, title), check=title))
            say(f"{title}: {findings[-1].verdict}")
    return Report(tuple(findings), {**about, **(description or {})}, shrunk)


def run_guarded(run: Check, subject: Subject, title: str = "") -> Finding:
    """The finding of a check in fp64; in fp32 what cannot be computed so, or shows a leak there, which has to show twice.

    A model that cannot be run as the check runs it fails the check; the others go on.
    """
    try:
        finding = run(subject)
    except Exception as error:
        if subject.single is not None:
            return run_guarded(run, subject.single, title)
        if isinstance(error, CannotRun):
            return inapplicable(str(error))
        remark = f"{type(error).__name__}: {one_line(error, 240)}"
        if subject.has_example and title.startswith(_OTHER_LENGTHS):
            return inapplicable(f"beside the other inputs no text of another length can be read: {remark}")
        return Finding("fails", reason="the model has to run", remark=remark)
    if (finding.difference or 0.0) <= _SHOWS or subject.single is None:
        return finding
    other = run_guarded(run, subject.single, title)
    return replace(other, remark=_DOUBLE_ONLY) if other.verdict == "passes" else finding
