"""Every leak of the museum is found on its path, with the layer named; its control, the same without the fault, passes."""

import itertools
import re
import warnings
from dataclasses import replace

import pytest

import fullrank as fr
from fullrank import checking
from fullrank.checking.report import Finding
from fullrank.checking.subject import open_subject
from museum import caches, holdouts, learnt, masks, mixtures, norms, others, packed, paths, summaries
from museum.exhibit import future
from museum.scoring import SCORED, VOCABULARY

MODULES = (masks, paths, summaries, mixtures, norms, caches, packed, others, learnt, holdouts)
EXHIBITS = [exhibit for module in MODULES for exhibit in module.EXHIBITS]

each = pytest.mark.parametrize("exhibit", EXHIBITS, ids=lambda exhibit: exhibit.name)
each_score = pytest.mark.parametrize("scored", SCORED, ids=lambda scored: scored.name)

# checks that read other texts, masks and types than plain ones: they may show any leak, or hide it
ANY = re.compile(
    ".*(one row|rows of |special|scaled|seeds|a mask of ones|on the left|prefix|in float32|in bfloat16|in float16)"
)

# what is switched off together, so that no check of a family stands in for another
FAMILIES = {
    "perturbation": "future, by perturbation, (evaluation|training)",
    "gradient": "future, by gradient, .*",
    "training": "(future, by (perturbation|gradient), training)|rows of a batch are independent, training",
    "padding": "future, by perturbation, with padding.*|padding changes nothing",
    "padding on the left": ".*with padding on the left.*",
    "implementation": ".*, sdpa.*",
    "flex": ".*, flex_attention.*",
    "half precision": ".*(in bfloat16|under autocast).*",
    "fp32": ".*in float32.*",
    "fp16": ".*in float16.*",
    "autocast": ".*under autocast(, training)?",
    "seeds": ".*other seeds",
    "a mask of ones": ".*with a mask of ones.*|padding changes nothing",
    "a mask of ones, one row": ".*one row with a mask of ones.*",
    "compiled": ".*compiled",
    "scaled": ".*parameters scaled",
    "autocast to float16": ".*under autocast, float16.*",
    "prefix": "future, prefix = whole",
    "prefix in training": "future, prefix = whole, training",
    "padding seen": "padding changes nothing",
    "decoding": "incremental decoding = one pass",
    "one row of a block": ".*one row of 32 tokens.*",
    "rows of a block": ".*, rows of 32 tokens.*",
    "rows of two blocks": ".*, rows of 64 tokens.*",
    "one row": ".*, one row(, training)?",
    "special tokens": ".*special and repeated tokens.*",
    "cache": ".*after a cache|incremental decoding = one pass",
    "packed": "packed documents are independent",
    "trained": "future, after training on random tokens",
    "rows": "rows of a batch are independent.*",
}


def is_of(family, check):
    return re.fullmatch(FAMILIES[family], check) is not None


def few():
    """Some exhibits, so that every check finds one; what a compiler makes is of the full tier."""
    missing = frozenset[str]().union(*(exhibit.fails for exhibit in EXHIBITS)) - future("perturbation, compiled")
    chosen = []
    while missing:
        chosen.append(max(EXHIBITS, key=lambda exhibit: len(exhibit.fails & missing) / len(exhibit.fails)))
        missing -= chosen[-1].fails
    return chosen


FEW = few()
# every day few exhibits by the checks that they are for; in the full tier each by all quick checks
each_in_turn = pytest.mark.parametrize(
    ("exhibit", "only"),
    [
        *(pytest.param(e, tuple(sorted(e.fails)), id=e.name) for e in FEW),
        *(pytest.param(e, (), id=f"{e.name}, every check", marks=pytest.mark.full) for e in EXHIBITS),
    ],
)


@each
def test_leak_is_there_and_its_control_has_none(exhibit):
    """With torch alone: neither depends on what the check finds."""
    assert exhibit.moved(exhibit.leaking()) > 1e-5
    assert exhibit.moved(exhibit.control()) < 1e-10


@each_in_turn
def test_leak_is_found(exhibit, only):
    """By the checks of its path and by no other: if one of them were switched off, it would be missing here."""
    findings = _findings(exhibit, exhibit.leaking(), only)
    if exhibit.remark:
        (check,) = exhibit.fails
        assert exhibit.remark in next(finding.remark for finding in findings if finding.check == check)
        return
    failures = [finding for finding in findings if finding.verdict == "fails"]
    names = {finding.check for finding in failures}
    assert exhibit.fails <= names
    assert all(map(ANY.match, names - exhibit.fails)), names - exhibit.fails
    is_of_gradient = all("gradient" in check for check in exhibit.fails)
    for finding in failures:
        if finding.check not in exhibit.fails:
            continue
        assert finding.difference is not None, finding.remark  # a crash is no finding
        if is_of_gradient or "gradient" not in finding.check:
            assert exhibit.layer in finding.layers, finding.check


@each_in_turn
def test_control_passes(exhibit, only):
    for finding in _findings(exhibit, exhibit.control(), only):
        assert finding.verdict != "fails", finding
        assert not finding.layers


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_a_detector_that_is_switched_off_is_missed(family, monkeypatch):
    """Some exhibit is found by this family of checks alone, and its test fails without them."""

    def is_found_by_others(exhibit):
        return bool(exhibit.remark) or not all(is_of(family, check) for check in exhibit.fails)

    alone = next(itertools.filterfalse(is_found_by_others, EXHIBITS))
    right = checking.list_checks

    def switched_off(*arguments, **options):
        checks = right(*arguments, **options)
        return checks | {name: lambda subject: Finding("passes") for name in checks if is_of(family, name)}

    monkeypatch.setattr(checking, "list_checks", switched_off)
    with pytest.raises(AssertionError):
        test_leak_is_found(alone, ())


@each_score
def test_wrong_score_is_found(scored):
    assert {finding.check for finding in _scored(scored, scored.leaking()).failures} == scored.fails


@pytest.mark.parametrize(
    "scored", [pytest.param(s, id=s.name, marks=pytest.mark.full if "calls" in s.options else ()) for s in SCORED]
)
def test_right_score_passes(scored):
    report = _scored(scored, scored.control())
    assert report.passes, report


def _findings(exhibit, model, only):
    """Findings of the quick checks, or of those in `only`, and of the slow ones that the exhibit is for."""
    findings = []
    if not (exhibit.full and only):
        findings += fr.check(model, exhibit.inputs(), quick=True, length=exhibit.length, only=only).findings
    if exhibit.full:
        subject = open_subject(model, None, exhibit.length, exhibit.inputs())
        checks = checking.list_checks(subject)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the compiler
            findings += [replace(checks[name](subject), check=name) for name in sorted(exhibit.fails)]
    return findings


def _scored(scored, score):
    return fr.check_scoring(score, **{"vocab_size": VOCABULARY, "length": 19, "calls": 2000, **scored.options})
