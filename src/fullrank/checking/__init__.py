"""Checks of a language model: no token sees the future, and two ways to compute the same agree."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fullrank.checking.agreement import decoding, packing, padding, prefixes
from fullrank.checking.calls import CannotRun, list_calls
from fullrank.checking.causality import independent_rows, search_by_gradient, search_by_perturbation
from fullrank.checking.learnt import check_on_random_tokens, last_position
from fullrank.checking.report import Finding, Report, inapplicable
from fullrank.checking.scoring import check_scoring
from fullrank.checking.subject import ROWS, Subject, open_subject
from fullrank.core.errors import InputError, one_line
from fullrank.core.translator import Translator

__all__ = ["Finding", "Report", "check", "check_scoring"]

_SOURCES = {
    "fullrank": "a language model of fullrank",
    "translator": "a translation model of fullrank",
    "hugging_face": "a model of Hugging Face",
    "module": "a module",
}
_SEGMENTS = 512  # of a text, for the last-position test
Check = Callable[[Subject], Finding]
_OTHER_LENGTHS = (padding, decoding, check_on_random_tokens, prefixes)  # checks that read texts of other lengths


def list_checks(subject: Subject, segments: Tensor | None = None, *, quick: bool = False) -> dict[str, Check]:
    """All checks by name, in the order in which they run. quick: only those that take a second or two of a small model."""
    checks: dict[str, Check] = {}
    for call in list_calls(subject, quick=quick):
        checks[f"future, by perturbation, {call.name}"] = partial(search_by_perturbation, call=call)
    checks["future, prefix = whole"] = prefixes
    for when, training in (("evaluation", False), ("training", True)):
        checks[f"future, by gradient, {when}"] = partial(search_by_gradient, training=training)
    for more, training in (("", False), (", training", True)):
        checks[f"rows of a batch are independent{more}"] = partial(independent_rows, training=training)
    checks["padding changes nothing"] = padding
    if not subject.ours:
        checks["packed documents are independent"] = packing
    checks["incremental decoding = one pass"] = decoding
    if not quick and (subject.ours or subject.core.ours or subject.injected):
        from fullrank.checking.definition import CHECKS  # it imports a compiler

        checks |= CHECKS
    if segments is not None:
        checks["last position"] = partial(last_position, segments=segments)
    elif not quick:
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
    text: Tensor | None = None,
    quick: bool = False,
    only: Sequence[str] = (),
    description: Mapping[str, Any] | None = None,
    shrunk: tuple[str, ...] = (),
    say: Callable[[str], None] | None = None,
) -> Report:
    """Check that the model does not see the future on any code path, and that two ways to compute the same agree.

        report = fr.check(model);  report.passes, report.failures, report.layers, report.paths

    model: any module, or function, whose `model(input_ids)` gives logits (B, N, V), first in a tuple or as `.logits`; it is
    left as it is. inputs: example inputs of a model that needs others: by argument, a tuple, or a tensor. sequence: the one
    of them along which no position may see later ones; by default decoder_input_ids, input_ids, inputs_embeds, or the first.
    vocab_size: how many token ids it knows, where it does not say it. length: tokens of the texts; by default a prime up to
    71 that no size of the model equals, since layers that leak are recognised by the dimension of positions.
    step(ids (B, n), cache or None): gives logits and the next cache, for a module with a cache of its own kind.
    text (S, N + 1) or (T,): token ids of a text it was trained for, for the last-position test; without one, a copy of a small
    model is trained on random tokens. quick: without compiling, training and rare code paths.
    only: the checks whose names begin so. description, shrunk: for the report. say: is told each verdict (`say=print`).
    Raises InputError for a model that gives no logits.
    """
    name = getattr(model, "__name__", type(model).__name__)
    if isinstance(model, Translator) and text is not None:
        raise InputError("text: for models of running text; a translation model is checked with random sentences")
    subject = open_subject(model, vocab_size, length, inputs, sequence, step)
    segments = None if text is None else read_segments(text, subject)
    checks = list_checks(subject, segments, quick=quick)
    wanted = (only,) if isinstance(only, str) else tuple(only)
    for prefix in wanted:
        if not any(title.startswith(prefix) for title in checks):
            names = "; ".join(checks)
            raise InputError(
                f"only: no check's name begins with {prefix!r}{' (quick=True)' * quick}; there are: {names}"
            )
    if wanted:
        checks = {title: run for title, run in checks.items() if title.startswith(wanted)}
    double = (2 * subject.even,) if 2 * subject.even <= subject.long_ids.shape[1] else ()
    *lengths, last = map(str, dict.fromkeys((subject.length, subject.even, *double)))
    about = {
        "model": name,
        "source": _SOURCES[subject.kind],
        "vocab_size": subject.vocab_size,
        "length": subject.length,
        "precision": str(subject.dtype).removeprefix("torch."),
        "parameters": subject.parameters,
        "texts": f"texts of {', '.join(lengths)}{' and ' * bool(lengths)}{last} tokens, {ROWS} rows and one",
        "modes": subject.has_modes,
    }
    if subject.sees_future:
        about["sees_future"] = subject.sees_future
    findings = tuple(run_checks(checks, subject, say))
    return Report(findings, {**about, **(description or {})}, shrunk)


def run_checks(checks: Mapping[str, Check], subject: Subject, say: Callable[[str], None] | None) -> Iterator[Finding]:
    """Run the checks one after the other, and say how far they are."""
    is_live = say is None and sys.stderr.isatty()
    for number, (title, run) in enumerate(checks.items(), 1):
        if is_live:
            print(f"\r\x1b[K{number}/{len(checks)} {title}", end="", file=sys.stderr, flush=True)
        finding = replace(run_guarded(run, subject), check=title)
        if say is not None:
            say(f"{title}: {finding.verdict}")
        yield finding
    if is_live:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def run_guarded(run: Check, subject: Subject) -> Finding:
    """A model that cannot be run as the check runs it fails the check; the others go on."""
    try:
        return run(subject)
    except CannotRun as reason:
        return inapplicable(str(reason))
    except Exception as error:
        remark = f"{type(error).__name__}: {one_line(error, 240)}"
        if subject.has_example and run in _OTHER_LENGTHS:
            return inapplicable(f"beside the other inputs no text of another length can be read: {remark}")
        return Finding("fails", reason="the model has to run", remark=remark)


def read_segments(text: Tensor, subject: Subject) -> Tensor:
    """Segments (S, N + 1) of a text of token ids (T,), or those that are given."""
    size = subject.length + 1
    if text.dtype not in (torch.int64, torch.int32) or text.dim() not in (1, 2):
        raise InputError(f"text: token ids (S, N + 1) or (T,), given {tuple(text.shape)} {text.dtype}")
    if text.dim() == 1:
        text = text[: len(text) // size * size].view(-1, size)[:_SEGMENTS]
    if len(text) < 2 or text.shape[1] < 3:
        raise InputError(f"text: too short for two segments of {size} tokens; give a longer one")
    least, most = int(text.min()), int(text.max())
    if least < 0 or most >= subject.vocab_size:
        raise InputError(f"text: token ids from 0 to {subject.vocab_size - 1}, given {least} to {most}")
    return text
