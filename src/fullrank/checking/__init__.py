"""Checks of a language model: no token sees the future, and two ways to compute the same agree."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fullrank.checking.agreement import decoding, determinism, packing, padding, prefixes, saving
from fullrank.checking.causality import by_gradient, by_perturbation, independent_rows
from fullrank.checking.definition import kernels, memory, plain_start, probabilities, whole_source
from fullrank.checking.learnt import last_position, on_random_tokens
from fullrank.checking.opening import fixed_sources, subject_of
from fullrank.checking.paths import CannotRun, code_paths
from fullrank.checking.report import Finding, Report, inapplicable
from fullrank.checking.scoring import check_scoring
from fullrank.checking.subject import ROWS, Subject
from fullrank.core.errors import InputError, one_line
from fullrank.core.translator import Translator

__all__ = ["Finding", "Report", "check", "check_scoring"]

_SOURCES = {
    "fullrank": "a language model of fullrank",
    "translator": "a translation model of fullrank",
    "hugging_face": "a model of Hugging Face",
    "module": "a module",
}
_LONG = 10.0  # seconds
Check = Callable[[Subject], Finding]


def checks_of(subject: Subject, segments: Tensor | None = None, *, quick: bool = False) -> dict[str, Check]:
    """All checks by name, in the order in which they run. quick: only those that take a second or two of a small model."""
    found: dict[str, Check] = {}
    for path in code_paths(subject, quick=quick):
        found[f"future, by perturbation, {path.name}"] = partial(by_perturbation, path=path)
    found["future, prefix = whole"] = prefixes
    for when, training in (("evaluation", False), ("training", True)):
        found[f"future, by gradient, {when}"] = partial(by_gradient, training=training)
    for when, training in (("", False), (", training", True)):
        found[f"rows of a batch are independent{when}"] = partial(independent_rows, training=training)
    if subject.translates:
        found["the whole source is seen"] = whole_source
    found["padding changes nothing"] = padding
    if not subject.ours:
        found["packed documents are independent"] = packing
    found["incremental decoding = one pass"] = decoding
    found["evaluation is deterministic"] = determinism
    if not quick:
        found["saved and loaded: same numbers"] = saving
        definition: dict[str, Check] = {
            "starts as plain attention": plain_start,
            "kernels = reference, fp64": partial(kernels, precision="fp64"),
            "kernels = reference, fp32": partial(kernels, precision="fp32"),
            "memory in segments = one pass": memory,
            "probabilities sum to one": probabilities,
        }
        if subject.ours or subject.core.ours or subject.injected:
            found |= {name: _shortened(run) for name, run in definition.items()}
    if segments is not None:
        found["last position"] = partial(last_position, segments=segments)
    elif not quick:
        found["future, after training on random tokens"] = on_random_tokens
    return found


def _shortened(run: Check) -> Check:
    return lambda subject: run(subject.short())


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

    model: any module, or function, whose `model(input_ids)` gives logits (B, N, V), first in a tuple or as `.logits`: a
    `LanguageModel`, a `Translator`, a causal or encoder-decoder model of Hugging Face, or your own. It is left as it is.
    inputs: example inputs of a model that needs others: by argument, a tuple, or a tensor. sequence: the one of them along
    which no position may see later ones; by default decoder_input_ids, input_ids, inputs_embeds, or the first. The rest
    stays fixed.
    vocab_size: how many token ids it knows, where it does not say it. length: tokens of the texts it is given; by default a
    prime up to 71 that no size of the model equals, since layers that leak are recognised by the dimension of positions.
    step(ids (B, n), cache or None): gives logits and the next cache, for a module with a cache of its own kind.
    text (S, N + 1) or (T,): token ids of a text it was trained for, for the last-position test; without one, a small model
    is trained on random tokens (a copy of it). quick: without compiling, training, saving and rare code paths.
    only: the checks whose names begin so ("future", "rows of a batch", ...); all by default.
    description, shrunk: for the report. say: is told each verdict (`say=print`); None: where stderr is a terminal, a line
    there names the check that runs, else one the checks that took long.
    Checks that do not apply are listed with the reason. Raises InputError for a model that gives no logits.
    """
    name = getattr(model, "__name__", type(model).__name__)
    if isinstance(model, Translator):
        if text is not None:
            raise InputError("text: for models of running text; a translation model is checked with random sentences")
        model = fixed_sources(model, length)
    subject = subject_of(model, vocab_size, length, inputs, sequence, step)
    segments = None if text is None else _segments(text, subject.length, subject.vocab_size)
    checks = checks_of(subject, segments, quick=quick)
    only = (only,) if isinstance(only, str) else tuple(only)
    for name in only:
        if not any(title.startswith(name) for title in checks):
            names = "; ".join(checks)
            raise InputError(f"only: no check's name begins with {name!r}{' (quick=True)' * quick}; there are: {names}")
    if only:
        checks = {title: run for title, run in checks.items() if title.startswith(only)}
    findings, live = [], say is None and sys.stderr.isatty()
    for number, (title, run) in enumerate(checks.items(), 1):
        if live:
            print(f"\r\x1b[K{number}/{len(checks)} {title}", end="", file=sys.stderr, flush=True)
        begun = time.monotonic()
        findings.append(replace(_guarded(run, subject), check=title))
        taken = time.monotonic() - begun
        if say is not None:
            say(f"{title}: {findings[-1].verdict}")
        elif taken > _LONG and not live:  # a log shows that something goes on
            line = f"{number}/{len(checks)} {title}: {findings[-1].verdict}, {taken:.0f} s"
            print(line, file=sys.stderr, flush=True)
    if live:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    about = {
        "model": name,
        "source": _SOURCES[subject.kind],
        "vocab_size": subject.vocab_size,
        "length": subject.length,
        "precision": str(subject.dtype).removeprefix("torch."),
        "parameters": subject.parameters,
    }
    lengths = dict.fromkeys((subject.length, subject.even))
    about["texts"] = f"texts of {' and '.join(map(str, lengths))} tokens, {ROWS} rows and one"
    about["modes"] = subject.has_modes
    if subject.sees_future:
        about["sees_future"] = subject.sees_future
    return Report(tuple(findings), {**about, **(description or {})}, shrunk)


def _guarded(run: Check, subject: Subject) -> Finding:
    """A model that cannot be run as the check runs it fails the check; the others go on."""
    try:
        return run(subject)
    except CannotRun as reason:
        return inapplicable(str(reason))
    except Exception as error:
        words = f"{type(error).__name__}: {one_line(error, 240)}"
        if subject.given is not None and getattr(run, "__name__", "") in _OF_OTHER_LENGTHS:
            return inapplicable(f"beside the other inputs no text of another length can be read: {words}")
        return Finding("fails", reason="the model has to run", remark=words)


_OF_OTHER_LENGTHS = (padding.__name__, decoding.__name__, on_random_tokens.__name__, prefixes.__name__)


def _segments(text: Tensor, length: int, vocab_size: int) -> Tensor:
    if text.dtype not in (torch.int64, torch.int32) or text.dim() not in (1, 2):
        raise InputError(f"text: token ids (S, N + 1) or (T,), given {tuple(text.shape)} {text.dtype}")
    if text.numel() and not 0 <= int(text.min()) <= int(text.max()) < vocab_size:
        raise InputError(f"text: token ids from 0 to {vocab_size - 1}, given {int(text.min())} to {int(text.max())}")
    if text.dim() == 1:
        count = min(len(text) // (length + 1), 512)
        text = text[: count * (length + 1)].view(count, length + 1)
    if len(text) < 2 or text.shape[1] < 3:
        raise InputError(f"text: too short for two segments of {length + 1} tokens; give a longer one")
    return text
