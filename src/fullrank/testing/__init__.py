"""Assertions about models and scores for tests: a failing one says the code path, the positions and the layer.

    from fullrank.testing import assert_causal

    def test_no_token_sees_the_future():
        assert_causal(make_model())

Each takes the options of `fullrank.check` (or of `fullrank.check_scoring`), gives the report, and raises AssertionError.
With pytest, `leak_check` is a fixture that does the same and writes every verdict into the JUnit report.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fullrank.checking import Report

__all__ = ["assert_cache_consistent", "assert_causal", "assert_padding_invariant", "assert_scoring_true"]

CAUSAL = ("future", "rows of a batch")
CACHE = ("incremental decoding", "future, by perturbation, after a cache")
PADDING = ("padding changes nothing", "future, by perturbation, with padding")


def assert_causal(model: Any, inputs: Any = None, *, quick: bool = True, **options: Any) -> Report:
    """No token sees a later one on any code path: training, evaluation, padding, caches, sdpa and eager, scaled parameters.

    quick: the checks that take a second or two of a tiny model; False: compiled code, bfloat16 and training on random
    tokens, too.
    """
    __tracebackhide__ = True
    return check_or_raise(model, inputs, CAUSAL, "", quick=quick, **options)


def assert_cache_consistent(model: Any, inputs: Any = None, **options: Any) -> Report:
    """With its cache, token by token and in pieces, the model gives the logits of one pass. step=...: a cache of its own."""
    __tracebackhide__ = True
    return check_or_raise(model, inputs, CACHE, CACHE[0], **options)


def assert_padding_invariant(model: Any, inputs: Any = None, **options: Any) -> Report:
    """A text in a padded batch has the logits that it has alone, and no padding lets it see the future."""
    __tracebackhide__ = True
    return check_or_raise(model, inputs, PADDING, PADDING[0], **options)


def assert_scoring_true(score: Callable[..., Any], texts: Any = None, **options: Any) -> Report:
    """Probabilities behind a score sum to one, every token is scored once, none of them after seeing later ones."""
    __tracebackhide__ = True
    from fullrank.checking import check_scoring

    return require_passes(check_scoring(score, texts, **options), f"{getattr(score, '__name__', 'score')}: ")


def check_or_raise(model: Any, inputs: Any, only: tuple[str, ...], needed: str, **options: Any) -> Report:
    """needed: the check without which nothing was said."""
    __tracebackhide__ = True  # pytest then shows the line of the test
    from fullrank.checking import check

    report = require_passes(check(model, inputs, only=only, **{"quick": True} | options))
    for finding in report.findings:
        if needed and finding.check.startswith(needed) and finding.verdict == "not applicable":
            raise AssertionError(f"{finding.check}: it could not be checked: {finding.reason}")
    return report


def require_passes(report: Report, name: str = "") -> Report:
    """The report; AssertionError with its failures if it does not pass. name: of what was checked."""
    __tracebackhide__ = True
    if not report.passes:
        failures = [f"- {finding.check}: {finding.words}" for finding in report.failures]
        raise AssertionError("\n".join([name + report.headline, *failures]))
    return report
