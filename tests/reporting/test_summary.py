"""The words of a report claim what the numbers carry and no more."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
from reporting_runs import SLICE, comparison, make_run

from fullrank.reporting.summary import Summary, summarize


def summary_of(root: Path, rows: dict[str, Sequence[float]], **options: object) -> Summary:
    """The summary of rows with these test perplexities, one for each seed."""
    runs = [
        make_run(root / f"{row}-{seed}", row=row, seed=seed, test=test, mix=mix, **options)  # type: ignore[arg-type]
        for (row, tests), mix in zip(rows.items(), itertools.cycle(("none", "position_wise", "average")), strict=False)
        for seed, test in enumerate(tests, start=1)
    ]
    return summarize(comparison(runs))


def test_one_seed_each_names_the_lowest_and_decides_nothing(tmp_path: Path) -> None:
    summary = summary_of(tmp_path, {"plain": [100.0], "b": [90.0]})
    assert summary.headline == "b is lowest: test perplexity 90.00, 10.0 % below plain (one seed, no interval)"
    assert "one seed cannot decide" in " ".join(summary.paragraphs)
    assert "The first row, plain, has 100.00." in " ".join(summary.paragraphs)
    assert "655.25" in " ".join(summary.paragraphs)
    assert "best" not in summary.headline


@pytest.mark.parametrize("rows", [{"plain": [700.0], "b": [690.0]}, {"plain": [700.0], "b": [90.0]}])
def test_nobody_is_lowest_where_a_row_is_above_the_unigram(rows: dict[str, list[float]], tmp_path: Path) -> None:
    """The unigram model has 655.25: a row above it has learned nothing of the order of words."""
    summary = summary_of(tmp_path, rows)
    names = [row for row, (value,) in rows.items() if value > 655.25]
    assert summary.headline == f"{' and '.join(names)}: undertrained, perplexity above that of a unigram model"
    assert "lowest" not in " ".join([summary.headline, *summary.paragraphs])
    assert "655.25" in " ".join(summary.paragraphs)
    compared = comparison(sorted(tmp_path.iterdir()))
    assert {row.name for row in compared.rows if row.undertrained} == set(names)
    assert not any(row.best for row in compared.rows)


def test_an_interval_without_0_names_the_best(tmp_path: Path) -> None:
    """Differences of −9, −10 and −11: t(0.975, 2) = 4.3027 times 1 / sqrt(3) is 2.48, of a mean of 100."""
    summary = summary_of(tmp_path, {"plain": [99.0, 100.0, 101.0], "b": [90.0, 90.0, 90.0]})
    assert (
        summary.headline
        == "b is best: test perplexity 90.00 ± 0.00, 10.0 % below plain (95 % interval −12.5 to −7.5 %)"
    )
    assert "cannot decide" not in " ".join(summary.paragraphs)


def test_an_interval_with_0_names_nobody_best(tmp_path: Path) -> None:
    """Differences of −1 and −3: t(0.975, 1) = 12.706 times 1, of a mean of 95."""
    headline = summary_of(tmp_path, {"plain": [90.0, 100.0], "b": [89.0, 97.0]}).headline
    assert headline.startswith("b is lowest, but other seeds might turn it round: test perplexity 93.00 ± 5.66")
    assert headline.endswith("2.1 % below plain (95 % interval −15.5 to +11.3 %)")


def test_the_interval_is_welchs_where_the_seeds_differ(tmp_path: Path) -> None:
    """Variances of 2 in two runs each: t(0.975, 2) = 4.3027 times sqrt(2), of a mean of 100."""
    runs = [
        make_run(tmp_path / f"{row}-{seed}", row=row, seed=seed, test=test, mix=mix)
        for row, mix, seeds in (("plain", "none", {1: 99.0, 2: 101.0}), ("b", "average", {3: 89.0, 4: 91.0}))
        for seed, test in seeds.items()
    ]
    (_, b) = comparison(runs).rows
    assert b.intervals["test"] == pytest.approx((-0.1 - 0.0608, -0.1 + 0.0608), abs=1e-4)
    assert b.intervals.keys() == {"test"}, "validation figures that are all equal leave no interval"


def test_a_row_that_the_seeds_do_not_tell_from_the_best_is_named(tmp_path: Path) -> None:
    summary = summary_of(tmp_path, {"plain": [119.0, 121.0], "b": [89.0, 91.0], "c": [90.0, 92.0]})
    assert "These seeds do not tell b from c." in " ".join(summary.paragraphs)


def test_one_side_with_a_single_seed_is_not_decided(tmp_path: Path) -> None:
    summary = summary_of(tmp_path, {"plain": [99.0, 101.0], "b": [90.0]})
    assert summary.headline.endswith("(one seed of b, no interval)")
    assert "nothing is decided: b." in " ".join(summary.paragraphs)


def test_the_first_row_may_stay_lowest(tmp_path: Path) -> None:
    summary = summary_of(tmp_path / "1", {"plain": [90.0], "b": [95.0]})
    assert summary.headline == "plain, the first row, stays lowest: test perplexity 90.00; next is b at +5.6 %"
    assert "below" not in summary.headline + " ".join(summary.paragraphs)
    summary = summary_of(tmp_path / "2", {"plain": [89.0, 91.0], "c": [99.0, 101.0], "b": [98.0, 94.0]})
    assert summary.headline.endswith("next is b at +6.7 % (95 % interval −35.7 to +49.0 %)")


def test_equal_to_the_digits_shown_is_called_equal(tmp_path: Path) -> None:
    summary = summary_of(tmp_path, {"plain": [90.001], "b": [90.0]})
    assert "equal" in summary.headline
    assert "below" not in summary.headline


def test_a_single_row(tmp_path: Path) -> None:
    summary = summary_of(tmp_path, {"plain": [90.0]})
    assert summary.headline == "plain: test perplexity 90.00"
    assert "lowest" not in " ".join(summary.paragraphs)


def test_without_test_figures_the_validation_split_is_judged_and_said(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / row, row=row, test=None, valid=valid) for row, valid in (("plain", 100.0), ("b", 95.0))]
    summary = summarize(comparison(runs))
    assert "validation perplexity 95.00" in summary.headline
    assert "No row has a test perplexity." in " ".join(summary.paragraphs)


def test_another_winner_on_validation_is_said(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / "plain", row="plain", test=100.0, valid=90.0),
        make_run(tmp_path / "b", row="b", test=95.0, valid=99.0),
    ]
    said = " ".join(summarize(comparison(runs)).paragraphs)
    assert "On the validation split another row is lowest: plain with 90.00." in said


def test_incomparable_texts_are_warned_of_and_not_ranked(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "x", test=100.0), make_run(tmp_path / "y", row="b", test=50.0, corpus=SLICE)]
    summary = summarize(comparison(runs))
    assert len(summary.warnings) == 1
    assert "cannot be compared" in summary.warnings[0]
    assert "corpus, label, vocabulary" in summary.warnings[0]
    assert "below" not in summary.headline + " ".join(summary.paragraphs)
    assert any("slice" in caution for caution in summary.cautions)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"tokens_seen": 1000}, "equally many tokens: 1,000 to 512,000"),
        ({"protocol": "sliding window"}, "same protocol"),
        ({"environment": {"device": "cuda"}}, "same kind of machine"),
        ({"paper": {"test": 29.0}}, "levels do not compare"),
    ],
)
def test_what_weakens_a_comparison_is_said(tmp_path: Path, changed: dict[str, object], said: str) -> None:
    plain = make_run(tmp_path / "x")
    assert summarize(comparison([plain, make_run(tmp_path / "y", row="b")])).cautions == ()
    cautions = summarize(comparison([plain, make_run(tmp_path / "z", row="b", result=changed)])).cautions
    assert len(cautions) == 1
    assert said in cautions[0]


def test_nothing_finished(tmp_path: Path) -> None:
    summary = summarize(comparison([make_run(tmp_path / "x", finished=False)]))
    assert summary.headline == "No run has finished yet"
