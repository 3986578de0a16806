"""Translations in a report: BLEU with its signature, compared over seeds."""

import pytest
import sacrebleu
from made_runs import draw_hypotheses, draw_references, find, make_translation_run, make_translation_table

from fullrank.comparison.compare import build_report
from fullrank.comparison.page import find_warnings


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    return build_report(make_translation_table(tmp_path_factory.mktemp("table4")))


def measure_bleu(wrong, seed):
    lines = draw_references("test")
    return float(sacrebleu.corpus_bleu(list(draw_hypotheses("test", wrong, seed, lines)), [list(lines)]).score)


def test_means_differences_and_papers_figures_are_of_bleu(content):
    plain = [measure_bleu(0.24 + 0.005 * seed, seed) for seed in (1, 2)]
    b = [measure_bleu(0.18 + 0.005 * seed, seed) for seed in (1, 2)]
    labels = {"split": "test", "checkpoint": "final"}
    assert find(content.records, "bleu_mean", row="plain", **labels).value == pytest.approx(sum(plain) / 2)
    difference = find(content.records, "bleu_difference", row="b", split="test")
    assert (difference.value, difference.unit) == (pytest.approx((sum(b) - sum(plain)) / 2), "points")
    assert find(content.records, "bleu_paper", row="b", split="test").value == 31.44
    assert find(content.records, "bleu", row="b", seed=1, **labels).value == pytest.approx(b[0])
    measures = {record.measure for record in content.records}
    assert {"chrf_mean", "tokenised_bleu_mean", "perplexity_mean", "length_ratio_mean"} <= measures


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({"lines": {"test": draw_references("test", 5)}}, "test references"),
        ({"lowercase": True}, "BLEU signature"),
        ({"tokenize": "char"}, "BLEU signature"),
    ],
)
def test_other_references_or_signatures_do_not_compare(tmp_path, options, fields):
    plain = make_translation_run(tmp_path / "plain")
    other = make_translation_run(tmp_path / "other", row="other", mix="random", **options)
    content = build_report([plain, other])
    assert f"the runs differ in {fields}." in next(find_warnings(content))
    assert not any("difference" in record.measure for record in content.records)
