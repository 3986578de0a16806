"""Checks of a language model: no token sees the future, and two ways to compute the same agree."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from fullrank.checking.agreement import call_after_another, change_rows, compare_prefixes, decoding, packing, padding
from fullrank.checking.calls import CERTAIN, PLAIN, Call, CannotRun, Run, list_calls, prepare_run
from fullrank.checking.causality import check_on_random_tokens, search_by_gradient, search_by_perturbation
from fullrank.checking.report import Finding, Report, inapplicable
from fullrank.checking.scoring import check_scoring
from fullrank.checking.subject import ROWS, SHORT, Subject, open_subject
from fullrank.core.errors import InputError, one_line

logger = logging.getLogger(__name__)

__all__ = ["Finding", "Report", "check", "check_scoring"]

_SOURCES = {
    "fullrank": "a language model of fullrank",
    "translator": "a translation model of fullrank",
    "hugging_face": "a model of Hugging Face",
    "module": "a module",
}
_DOUBLE_ONLY = "it differs in float64 alone, where a kernel errs, as attention of torch does with a mask in float32"
_SHOWS = 1e-4  # a larger leak in fp64 has to show in fp32, too


class Check(NamedTuple):
    """A row of the table of checks.

    Attributes:
        call: how the model is run.
        find: makes the finding of such a run.
    """

    call: Call
    find: Callable[[Run], Finding]

    def __call__(self, subject: Subject) -> Finding:
        with warnings.catch_warnings(action="ignore"):
            return self.find(prepare_run(subject, self.call))


def list_checks(subject: Subject, *, quick: bool = False) -> dict[str, Check]:
    """List the checks by name, in the order in which they run.

    With `quick` these are the ones that take a second or two with a small model.
    """
    calls = {f"future, by perturbation, {call.name}": call for call in list_calls(subject, quick=quick)}
    checks = {name: Check(call, search_by_perturbation) for name, call in calls.items()}
    evaluation, training = CERTAIN
    checks["future, prefix = whole"] = Check(evaluation, compare_prefixes)
    if not quick:
        checks["future, prefix = whole, training"] = Check(training, compare_prefixes)
    checks |= {
        "future, by gradient, evaluation": Check(PLAIN[0], search_by_gradient),
        "future, by gradient, training": Check(PLAIN[1], search_by_gradient),
        "rows of a batch are independent": Check(evaluation, change_rows),
        "rows of a batch are independent, training": Check(training, change_rows),
        "the same call after another gives the same logits": Check(evaluation, call_after_another),
        "padding changes nothing": Check(PLAIN[0], padding),
    }
    if not subject.ours:
        checks["packed documents are independent"] = Check(PLAIN[0], partial(packing, quick=quick))
    checks["incremental decoding = one pass"] = Check(PLAIN[0], decoding)
    if not quick and (subject.core.ours or subject.injected):
        from fullrank.checking.definition import CHECKS  # it imports a compiler

        short = replace(PLAIN[0], length=min(SHORT, subject.length))
        checks |= {name: Check(short, find) for name, find in CHECKS.items()}
    if not quick:
        checks["future, after training on random tokens"] = Check(PLAIN[0], check_on_random_tokens)
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
    """Check that a model does not see the future on any code path, and that two ways to compute the same agree.

        report = fr.check(model);  report.passes, report.failures, report.layers, report.paths

    The model is left as it is. A check that fails does not stop the others. Each verdict is logged at level DEBUG.

    Args:
        model: a module, or a function, whose `model(input_ids)` gives logits (B, N, V): as a tensor, first in a tuple, or as
            `.logits`.
        inputs: example inputs of a model that needs others than token ids: a dict by argument, a tuple, or a tensor. None:
            random token ids.
        sequence: the argument along which no position may see later ones. None: decoder_input_ids, decoder_inputs_embeds,
            input_ids, inputs_embeds, or else the first tensor of the example inputs.
        vocab_size: how many token ids the model knows. None: as many as its configuration or its first embedding says.
        length: tokens of the texts. None: a prime up to 71 that no size of the model equals, since layers that leak are
            recognised by the dimension of positions. It is for random token ids: example inputs have a length of their own.
        step: `step(ids (B, n), cache or None)` gives logits and the next cache, for a module with a cache of its own kind.
        quick: leave out what takes long: compiling, training a copy on random tokens, prefixes in training, rare code paths,
            and kernels and memory of models of ours.
        only: run the checks whose names begin so; empty: all.
        description: further facts for the report, by name.
        shrunk: what was made smaller for the check, for the report.

    Returns:
        The report; `print(report)` shows a line for each check.

    Raises:
        InputError: the model gives no logits (B, N, V), an option does not fit it, or no check has a name in `only`.
    """
    subject = open_subject(model, vocab_size, length, inputs, sequence, step)
    checks = list_checks(subject, quick=quick)
    prefixes = (only,) if isinstance(only, str) else tuple(only)
    for prefix in prefixes:
        if not any(title.startswith(prefix) for title in checks):
            among = f"{' (quick=True)' * quick}; there are: {'; '.join(checks)}"
            raise InputError(f"only: no check's name begins with {prefix!r}{among}")
    facts = {
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
        facts["sees_future"] = subject.sees_future
    findings = []
    for title, row in checks.items():
        if title.startswith(prefixes or ""):
            findings.append(replace(run_guarded(row, subject), check=title))
            logger.debug(f"{title}: {findings[-1].verdict}")
    return Report(tuple(findings), {**facts, **(description or {})}, shrunk)


def run_guarded(row: Check, subject: Subject) -> Finding:
    """Run a check in fp64, and again in fp32 where fp64 is impossible or shows a leak: a leak has to show in both.

    A model that cannot be run in a plain call fails the check. Where it cannot be run in another way, the check does not apply.
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
        if subject.has_example and row.find not in (search_by_perturbation, search_by_gradient):
            return inapplicable(f"the example inputs go with no text of another length or batch: {remark}")
        return Finding("fails", reason="the model has to run", remark=remark)
    if (finding.difference or 0.0) <= _SHOWS or subject.single is None:
        return finding
    other = run_guarded(row, subject.single)
    return replace(other, remark=_DOUBLE_ONLY) if other.verdict == "passes" else finding
