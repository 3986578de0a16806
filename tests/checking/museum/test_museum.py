"""Every leak of the museum is found on its path, with the layer named; its control, the same without the fault, passes."""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import fullrank as fr
from fullrank import checking
from fullrank.checking.opening import subject_of
from fullrank.checking.report import Finding
from museum import caches, learnt, masks, mixtures, norms, others, packed, paths, summaries
from museum.exhibit import LEFT, ONE_ROW, ONES, PREFIX, SCALED, SEEDS, SWITCHED_ONES, Exhibit, future
from museum.scoring import SCORED, VOCABULARY, Scored

EXHIBITS = [
    e for module in (masks, paths, summaries, mixtures, norms, caches, packed, others, learnt) for e in module.EXHIBITS
]

each = pytest.mark.parametrize("exhibit", EXHIBITS, ids=lambda exhibit: exhibit.name)
each_score = pytest.mark.parametrize("scored", SCORED, ids=lambda scored: scored.name)

ANY = LEFT | SCALED | PREFIX | ONE_ROW | ONES | SEEDS | SWITCHED_ONES

# what is switched off together, so that no check of a family stands in for another
FAMILIES = {
    "perturbation": future("perturbation, evaluation", "perturbation, training"),
    "gradient": future("gradient, evaluation", "gradient, training"),
    "training": future("perturbation, training", "gradient, training") | {"rows of a batch are independent, training"},
    "padding": LEFT
    | future("perturbation, with padding", "perturbation, with padding, training")
    | {"padding changes nothing"},
    "implementation": future("perturbation, sdpa", "perturbation, sdpa, training"),
    "flex": future("perturbation, flex_attention", "perturbation, flex_attention, training"),
    "half precision": future("perturbation, in bfloat16", "perturbation, under autocast"),
    "fp16": future("perturbation, in float16"),
    "seeds": SEEDS,
    "a mask of ones": ONES | SWITCHED_ONES | {"padding changes nothing"},
    "compiled": future("perturbation, compiled"),
    "scaled": SCALED,
    "prefix": PREFIX,
    "one row": ONE_ROW,
    "cache": future("perturbation, after a cache") | {"incremental decoding = one pass"},
    "packed": {"packed documents are independent"},
    "trained": {"future, after training on random tokens"},
    "rows": {"rows of a batch are independent", "rows of a batch are independent, training"},
}


def few() -> list[Exhibit]:
    """Some exhibits, so that every check finds one; what a compiler makes is of the full tier."""
    missing = frozenset[str]().union(*(exhibit.fails for exhibit in EXHIBITS)) - FAMILIES["compiled"]
    chosen = []
    while missing:
        chosen.append(max(EXHIBITS, key=lambda exhibit: len(exhibit.fails & missing) / len(exhibit.fails)))
        missing -= chosen[-1].fails
    return chosen


FEW = few()
each_in_turn = pytest.mark.parametrize(
    "exhibit",
    [pytest.param(e, id=e.name, marks=() if e in FEW else pytest.mark.full) for e in EXHIBITS],
)


@each
def test_leak_is_there_and_its_control_has_none(exhibit: Exhibit) -> None:
    """With torch alone: neither depends on what the check finds."""
    assert exhibit.moved(exhibit.leaking()) > 1e-5
    assert exhibit.moved(exhibit.control()) < 1e-10


@each_in_turn
def test_leak_is_found(exhibit: Exhibit) -> None:
    """By the checks of its path and by no other: if one of them were switched off, it would be missing here."""
    findings = _findings(exhibit, exhibit.leaking())
    if exhibit.said:
        (check,) = exhibit.fails
        assert exhibit.said in next(finding.remark for finding in findings if finding.check == check)
        return
    failures = [finding for finding in findings if finding.verdict == "fails"]
    found = {finding.check for finding in failures}
    assert exhibit.fails <= found <= exhibit.fails | ANY  # these may show any leak, or hide it
    leaks = [f for f in failures if f.check in exhibit.fails and f.check.startswith("future")]
    for finding in leaks:
        assert finding.difference is not None, finding.remark  # a crash is no finding
        assert exhibit.layer in finding.layers, finding.check
    for finding in (finding for finding in leaks if finding.reproduction):
        assert _printed(finding.reproduction, exhibit) > 1e-9, finding.reproduction


@each_in_turn
def test_control_passes(exhibit: Exhibit) -> None:
    for finding in _findings(exhibit, exhibit.control()):
        assert finding.verdict != "fails", finding
        assert not finding.layers


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_a_detector_that_is_switched_off_is_missed(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some exhibit is found by this family of checks alone, and its test fails without them."""
    alone = next(exhibit for exhibit in EXHIBITS if exhibit.fails <= FAMILIES[family] and not exhibit.said)
    right = checking.list_checks

    def switched_off(*given: Any, **options: Any) -> dict[str, Any]:
        found = right(*given, **options)
        return {
            name: (lambda subject: Finding("passes")) if name in FAMILIES[family] else run
            for name, run in found.items()
        }

    monkeypatch.setattr(checking, "list_checks", switched_off)
    with pytest.raises(AssertionError):
        test_leak_is_found(alone)


@each_score
def test_wrong_score_is_found(scored: Scored) -> None:
    assert {finding.check for finding in _scored(scored, scored.leaking()).failures} == scored.fails


@each_score
def test_right_score_passes(scored: Scored) -> None:
    report = _scored(scored, scored.control())
    assert report.passes, report


def _findings(exhibit: Exhibit, model: nn.Module) -> list[Finding]:
    """Of the quick checks, and of the slow ones that the exhibit is for."""
    found = list(fr.check(model, exhibit.inputs(), quick=True, length=exhibit.length).findings)
    if exhibit.full:
        subject = subject_of(model, None, exhibit.length, exhibit.inputs())
        checks = checking.list_checks(subject)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the compiler
            found += [replace(checks[name](subject), check=name) for name in sorted(exhibit.fails)]
    return found


def _printed(lines: str, exhibit: Exhibit) -> float:
    """What the two lines print to somebody who runs them."""
    assert len(lines.splitlines()) == 2, lines
    out = io.StringIO()
    with contextlib.redirect_stdout(out), warnings.catch_warnings(), torch.compiler.set_stance("default"):
        warnings.simplefilter("ignore")
        exec(lines, {"model": exhibit.leaking(), "inputs": exhibit.inputs()})
    return float(re.findall(r"\d[\d.e+-]*", out.getvalue())[0])


def _scored(scored: Scored, score: Callable[..., Any]) -> fr.Report:
    return fr.check_scoring(score, **{"vocab_size": VOCABULARY, "length": 19, "calls": 2000, **scored.options})
