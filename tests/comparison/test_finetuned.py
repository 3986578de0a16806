"""Fine-tuning in a report: tasks are parts of one comparison, arms are its rows."""

import statistics

import pytest
import scipy.stats
from made_runs import find, make_arms, make_finetuned_run, print_report

from fullrank.comparison.compare import build_report
from fullrank.comparison.page import summarize

BASE, OTHER = [0.412, 0.430, 0.401, 0.424, 0.419], [0.425, 0.429, 0.422, 0.431, 0.420]
KEY = "matthews_correlation"


def test_figures_are_those_of_the_equations(tmp_path):
    records = build_report(make_arms(tmp_path, BASE, OTHER)).records
    plain = [100 * score for score in BASE]
    b = [100 * score for score in OTHER]
    assert find(records, f"{KEY}_mean", row="plain").value == pytest.approx(statistics.fmean(plain))
    assert find(records, f"{KEY}_deviation", row="plain").value == pytest.approx(statistics.stdev(plain))
    difference = find(records, f"{KEY}_difference", row="b", split="dev")
    assert (difference.unit, difference.protocol) == ("points", "paired over seeds")
    assert difference.value == pytest.approx(statistics.fmean(b) - statistics.fmean(plain))
    assert difference.interval == pytest.approx(tuple(scipy.stats.ttest_rel(b, plain).confidence_interval(0.95)))


def test_pairs_need_the_same_seeds_and_one_seed_says_nothing(tmp_path):
    unequal = find(build_report(make_arms(tmp_path / "x", BASE, OTHER[:4])).records, f"{KEY}_difference", row="b")
    welch = scipy.stats.ttest_ind(OTHER[:4], BASE, equal_var=False).confidence_interval(0.95)
    assert unequal.protocol == "Welch, over seeds"
    assert unequal.interval == pytest.approx((100 * welch.low, 100 * welch.high))
    lone = build_report(make_arms(tmp_path / "y", BASE[:1], OTHER[:1]))
    assert find(lone.records, f"{KEY}_difference", row="b").interval is None
    assert not any("deviation" in record.measure for record in lone.records)
    assert "no interval" in summarize(lone)[0]
    equal = build_report(make_arms(tmp_path / "z", [0.563] * 3, [0.563] * 3)).records  # a spread of 0 is not certainty
    assert find(equal, f"{KEY}_difference", row="b").interval is None


def test_splits_and_the_papers_deviations_stand_beside_ours(tmp_path):
    """Skip Cross-head, Table 4: CoLA 59.849 +- 1.23 and 58.744 +- 1.1."""
    final = {"dev": {"accuracy": 0.8}, "dev_mismatched": {"accuracy": 0.81}}
    paper = {"test": 83.6, "test_mismatched": 82.8}
    run = make_finetuned_run(
        tmp_path / "m", 0.8, task="glue/mnli", metrics=("accuracy",), final=final, row="b", paper=paper
    )
    published = [record for record in build_report([run]).records if record.measure == "accuracy_paper"]
    assert {record.labels["split"]: record.value for record in published} == {"dev": 83.6, "dev_mismatched": 82.8}
    folders = []
    for row, figure in {"plain": [59.849, 1.23], "b": [58.744, 1.1]}.items():
        model = {"attention": {"cross_head": 0.0 if row == "plain" else 0.1}}
        for seed in (1, 2, 3):
            options = {"seed": seed, "row": row, "paper": {KEY: figure}, "model": model}
            folders.append(make_finetuned_run(tmp_path / f"{row}{seed}", 0.4 + seed / 100, **options))
    assert "59.85 ± 1.23" in print_report(folders)
