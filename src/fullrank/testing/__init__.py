"""Assertions about models and scores for tests: a failing one names the code path, the positions and the layer.

    from fullrank.testing import assert_causal

    def test_no_token_sees_the_future():
        assert_causal(make_model())

Each takes the options of `fullrank.check` (or of `fullrank.check_scoring`), returns the report, and raises AssertionError where
it does not pass. With pytest, `leak_check` is a fixture that does the same and writes every verdict into the JUnit report.
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
    """Assert that no token sees a later one on any code path, nor another text of its batch.

    Code paths are training, evaluation, padding, caches, sdpa and eager, scaled parameters and others.

    Args:
        model: a module, or a function, whose `model(input_ids)` gives logits (B, N, V).
        inputs: example inputs, as for `fullrank.check`; None: random token ids.
        quick: run the checks that take a second or two of a tiny model. False: compiled code, bfloat16 and training on random
            tokens, too.
        **options: further options of `fullrank.check`.

    Returns:
        The report.

    Raises:
        AssertionError: a token sees a later one, which names the code path, the positions and the layer; rows of a batch see
            each other; or nothing could be checked.
        InputError: the model gives no logits, or an option does not fit it.
    """
    __tracebackhide__ = True
    return check_or_raise(model, inputs, CAUSAL, "", quick=quick, **options)


def assert_cache_consistent(model: Any, inputs: Any = None, **options: Any) -> Report:
    """Assert that a model with its cache, token by token, in pieces and as beams, gives the logits of one pass.

    Args:
        model: a module, or a function, whose `model(input_ids)` gives logits (B, N, V).
        inputs: example inputs, as for `fullrank.check`; None: random token ids.
        **options: further options of `fullrank.check`; `step` for a cache of another kind than that of Hugging Face.

    Returns:
        The report.

    Raises:
        AssertionError: the logits differ, a token sees a later one after a cache, or the model has no cache.
        InputError: the model gives no logits, or an option does not fit it.
    """
    __tracebackhide__ = True
    return check_or_raise(model, inputs, CACHE, CACHE[0], **options)


def assert_padding_invariant(model: Any, inputs: Any = None, **options: Any) -> Report:
    """Assert that a text in a padded batch has the logits that it has alone, and that no padding lets it see the future.

    Args:
        model: a module, or a function, whose `model(input_ids)` gives logits (B, N, V).
        inputs: example inputs, as for `fullrank.check`; None: random token ids.
        **options: further options of `fullrank.check`.

    Returns:
        The report.

    Raises:
        AssertionError: the logits differ, a token sees a later one beside padding, or the model takes no mask.
        InputError: the model gives no logits, or an option does not fit it.
    """
    __tracebackhide__ = True
    return check_or_raise(model, inputs, PADDING, PADDING[0], **options)


def assert_scoring_true(score: Callable[..., Any], texts: Any = None, **options: Any) -> Report:
    """Assert that probabilities behind a score sum to one, and that every token is scored once, without seeing later ones.

    Args:
        score: a function from a text to its nll in nats.
        texts: texts to score, as for `fullrank.check_scoring`; None: random token ids.
        **options: further options of `fullrank.check_scoring`, such as `vocab_size`.

    Returns:
        The report.

    Raises:
        AssertionError: a check of the score fails, or its sums could not be checked.
        InputError: the function fails or returns something else.
    """
    __tracebackhide__ = True
    from fullrank.checking import check_scoring

    return require_passes(check_scoring(score, texts, **options), f"{getattr(score, '__name__', 'score')}: ")


def check_or_raise(model: Any, inputs: Any, only: tuple[str, ...], needed: str, **options: Any) -> Report:
    """Check a model, and raise AssertionError where it does not pass.

    Args:
        model: a module or a function, as for `fullrank.check`.
        inputs: example inputs; None: random token ids.
        only: beginnings of the names of checks.
        needed: beginning of the name of the check that has to apply; empty: none.
        **options: further options of `fullrank.check`; `quick` is true if it is not among them.

    Raises:
        AssertionError: a check fails, or the needed one does not apply.
    """
    __tracebackhide__ = True  # pytest then shows the line of the test
    from fullrank.checking import check

    report = require_passes(check(model, inputs, only=only, **{"quick": True} | options))
    for finding in report.findings:
        if needed and finding.check.startswith(needed) and finding.verdict == "not applicable":
            raise AssertionError(f"{finding.check}: it could not be checked: {finding.reason}")
    return report


def require_passes(report: Report, name: str = "") -> Report:
    """Return a report that passes; raise AssertionError with its failures, after `name`, if it does not pass."""
    __tracebackhide__ = True
    if not report.passes:
        failures = [f"- {finding.check}: {finding.words}" for finding in report.failures]
        raise AssertionError("\n".join([name + report.headline, *failures]))
    return report
