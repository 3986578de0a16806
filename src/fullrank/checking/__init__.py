"""Checks of a language model: no token sees the future, and two ways to compute the same agree."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fullrank.checking.agreement import (
    decoding,
    determinism,
    kernels,
    memory,
    padding,
    plain_start,
    probabilities,
    saving,
    whole_source,
)
from fullrank.checking.causality import by_gradient, by_perturbation, last_position
from fullrank.checking.report import Finding, Report
from fullrank.checking.subject import Subject, fixed_sources, subject_of
from fullrank.core.errors import InputError
from fullrank.core.translator import Translator

__all__ = ["Finding", "Report", "check"]

_SOURCES = {
    "fullrank": "a language model of fullrank",
    "translator": "a translation model of fullrank",
    "hugging_face": "a causal model of Hugging Face",
    "module": "a module",
}
FUTURE: dict[str, Callable[[Subject], Finding]] = {
    "future, by perturbation, evaluation": partial(by_perturbation, training=False),
    "future, by perturbation, training": partial(by_perturbation, training=True),
    "future, by perturbation, with padding": partial(by_perturbation, training=False, padded=True),
    "future, by gradient, evaluation": partial(by_gradient, training=False),
    "future, by gradient, training": partial(by_gradient, training=True),
}
_OF_TRANSLATORS: dict[str, Callable[[Subject], Finding]] = {"the whole source is seen": whole_source}
_AGREEMENTS: dict[str, Callable[[Subject], Finding]] = {
    "starts as plain attention": plain_start,
    "kernels = reference, fp64": partial(kernels, precision="fp64"),
    "kernels = reference, fp32": partial(kernels, precision="fp32"),
    "padding changes nothing": padding,
    "incremental decoding = one pass": decoding,
    "memory in segments = one pass": memory,
    "evaluation is deterministic": determinism,
    "saved and loaded: same numbers": saving,
    "probabilities sum to one": probabilities,
}


def check(
    model: nn.Module,
    *,
    vocab_size: int | None = None,
    length: int | None = None,
    text: Tensor | None = None,
    description: Mapping[str, Any] | None = None,
    shrunk: tuple[str, ...] = (),
    say: Callable[[str], None] | None = None,
) -> Report:
    """Check that the model does not see the future, and that two ways to compute the same agree.

        report = fr.check(model);  report.passes, report.failures, report.layers

    model: a `LanguageModel`, a `Translator`, a causal model of Hugging Face, or any module whose `model(input_ids)` gives
    logits (B, N, V) or an object with `.logits`; it is left as it is. Where its forward takes `attention_mask`, padding is
    checked too. Checks that do not apply are listed with the reason.
    vocab_size: how many token ids it knows, where it does not say it. length: tokens of the texts it is given; by default a
    short prime that no size of the model equals, since layers that leak are recognised by the dimension of positions.
    text (S, N + 1) or (T,): token ids of a text it was trained for, for the last-position test; without one, a small model
    is trained on random tokens (a copy of it). description, shrunk: for the report. say: is told each verdict (`say=print`);
    None: where stderr is a terminal, a line there names the check that runs.
    Raises InputError for a model that gives no logits.
    """
    name = type(model).__name__
    if isinstance(model, Translator):
        if text is not None:
            raise InputError("text: for models of running text; a translation model is checked with random sentences")
        model = fixed_sources(model, length)
    subject = subject_of(model, vocab_size, length)
    segments = None if text is None else _segments(text, subject.length, subject.vocab_size)
    checks = FUTURE | (_OF_TRANSLATORS if subject.translates else {}) | _AGREEMENTS
    checks["last position"] = partial(last_position, segments=segments)
    findings, live = [], say is None and sys.stderr.isatty()
    for number, (title, run) in enumerate(checks.items(), 1):
        if live:
            print(f"\r\x1b[K{number}/{len(checks)} {title}", end="", file=sys.stderr, flush=True)
        findings.append(replace(_guarded(run, subject), check=title))
        if say is not None:
            say(f"{title}: {findings[-1].verdict}")
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
    if subject.sees_future:
        about["sees_future"] = subject.sees_future
    return Report(tuple(findings), {**about, **(description or {})}, shrunk)


def _guarded(run: Callable[[Subject], Finding], subject: Subject) -> Finding:
    """A model that cannot be run as the check runs it fails the check; the others go on."""
    try:
        return run(subject)
    except Exception as error:
        words = " ".join(str(error).split())[:240]
        return Finding("fails", reason="the model has to run", remark=f"{type(error).__name__}: {words}")


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
