"""Translations in a report: BLEU with its signature, compared over seeds and on resampled test sets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import sacrebleu
from reported_translations import CORPUS, hypotheses, make_translation_run, references, table4
from reporting_runs import find, make_run

from fullrank.comparison.measures import BLEU, PERPLEXITY
from fullrank.comparison.page import Report, build_report
from fullrank.comparison.resampled import compare_runs, find_baseline, read_translations
from fullrank.core.errors import InputError
from fullrank.evaluation.statistics import against_first, bootstrap_interval
from fullrank.evaluation.tasks import metric_named


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return table4(tmp_path_factory.mktemp("table4"))


@pytest.fixture(scope="module")
def content(runs: list[Path]) -> Report:
    return build_report(runs)


def bleu(wrong: float, seed: int) -> float:
    lines = references("test")
    return float(sacrebleu.corpus_bleu(list(hypotheses("test", wrong, seed, lines)), [list(lines)]).score)


def test_means_differences_and_papers_figures_are_of_bleu(content: Report) -> None:
    plain, b = ([bleu(wrong + 0.005 * seed, seed) for seed in (1, 2)] for wrong in (0.24, 0.18))
    place = {"split": "test", "checkpoint": "final"}
    assert find(content.records, "bleu_mean", row="plain", **place).value == pytest.approx(sum(plain) / 2)
    difference = find(content.records, "bleu_difference", row="b", split="test")
    assert (difference.value, difference.unit) == (pytest.approx((sum(b) - sum(plain)) / 2), "points")
    assert find(content.records, "bleu_paper", row="b", split="test").value == 31.44
    assert find(content.records, "bleu", row="b", seed=1, **place).value == pytest.approx(b[0])
    assert {"chrf_mean", "tokenised_bleu_mean", "perplexity_mean", "length_ratio_mean"} <= {
        record.measure for record in content.records
    }
    assert content.summary.headline.startswith("b is highest, but other seeds might turn it round: test BLEU")


def test_rows_are_compared_on_resampled_sentences(content: Report) -> None:
    lines, metric = references("test"), metric_named("bleu")
    counts = [
        [metric.statistics(list(hypotheses("test", wrong + 0.005 * seed, seed, lines)), lines) for seed in (1, 2)]
        for wrong in (0.24, 0.19, 0.18)
    ]
    pairs = against_first(counts, metric)
    for row, pair in zip("ab", pairs, strict=True):
        difference = find(content.records, "bleu_resampled_difference", row=row, split="test")
        assert (difference.value, difference.interval) == (pair["difference"], (pair["low"], pair["high"]))
        assert find(content.records, "bleu_resampled_p", row=row).value == pair["p_value"]
        assert find(content.records, "bleu_resampled_ahead", row=row).value == pair["wins"]["b"] / 1000


@pytest.mark.parametrize(
    ("name", "baseline"),
    [("h64-a-cross", "h64-plain"), ("h64-plain", "h64-plain"), ("a", "h4-plain"), ("h4-b", "h4-plain")],
)
def test_a_row_is_compared_with_the_plain_one_of_its_kind(name: str, baseline: str) -> None:
    assert find_baseline(name, ["h4-plain", "h4-b", "h64-plain", "h64-a-cross", "a"]) == baseline


def test_runs_that_cannot_be_resampled_are_left_out(tmp_path: Path) -> None:
    plain, a = make_translation_run(tmp_path / "plain"), make_translation_run(tmp_path / "a", row="a", mix="random")
    lost = make_translation_run(tmp_path / "lost", row="lost", mix="average", keep=("valid",))
    (a / "translations" / "test.txt").write_text("".join("other words\n" for _ in range(120)))
    records, left_out = build_report([plain, a, lost]).resampled
    assert {record.labels["split"] for record in records} <= {"valid"}
    assert any("its result says" in words for words in left_out)
    assert any("test.txt: no such file" in words for words in left_out)


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({"lines": {"test": references("test", 5)}}, "test references"),
        ({"lowercase": True}, "BLEU signature"),
        ({"tokenize": "char"}, "BLEU signature"),
    ],
)
def test_other_references_or_signatures_do_not_compare(tmp_path: Path, options: dict[str, Any], fields: str) -> None:
    plain = make_translation_run(tmp_path / "plain")
    other = make_translation_run(tmp_path / "other", row="other", mix="random", **options)
    content = build_report([plain, other])
    assert f"the runs differ in {fields}." in content.summary.warnings[0]
    assert not any("difference" in record.measure for record in content.records)


def test_bleu_is_of_text_and_a_version_is_a_caution(tmp_path: Path) -> None:
    plain = make_translation_run(tmp_path / "plain")
    corpus = {**CORPUS, "vocabulary": {"source": 10_000, "target": 10_000}}
    bpe = make_translation_run(tmp_path / "bpe", row="bpe", mix="random", corpus=corpus)
    text = (bpe / "result.json").read_text().replace(f"version:{sacrebleu.__version__}", "version:2.0.0")
    (bpe / "result.json").write_text(text)
    content = build_report([plain, bpe])
    assert len(content.compared.groups) == 1
    cautions = " ".join(content.summary.cautions)
    assert "per token, do not compare" in cautions


def test_seeds_with_other_references_are_another_row(tmp_path: Path) -> None:
    runs = [make_translation_run(tmp_path / str(seed), seed=seed) for seed in (1, 2)]
    runs.append(make_translation_run(tmp_path / "3", seed=3, lines={"test": references("test", 5)}))
    assert [len(row.runs) for row in build_report(runs).compared.rows] == [2, 1]


def test_without_bleu_perplexity_and_a_bleu_of_nothing_is_a_figure(tmp_path: Path) -> None:
    plain = make_translation_run(tmp_path / "plain")
    final = {split: {"perplexity": 4.48} for split in ("valid", "test")}
    without = make_translation_run(tmp_path / "a", row="a", mix="random", result={"final": final})
    assert build_report([plain, without]).compared.groups[0].measure is PERPLEXITY
    result = json.loads((plain / "result.json").read_text())
    for split in result["final"].values():
        split["bleu"] = 0.0
    (plain / "result.json").write_text(json.dumps(result))
    content = build_report([plain, make_translation_run(tmp_path / "b", row="b", mix="random")])
    assert content.compared.groups[0].measure is BLEU
    difference = find(content.records, "bleu_difference", row="b", split="test")
    assert difference.value == find(content.records, "bleu_mean", row="b", split="test", checkpoint="final").value


def test_translations_and_language_models_are_never_mixed(tmp_path: Path) -> None:
    runs = [make_translation_run(tmp_path / "mt", row="mt"), make_run(tmp_path / "lm", row="lm")]
    for order, kept, left in ((runs, "mt", "lm"), (runs[::-1], "lm", "mt")):
        content = build_report(order)
        assert [row.name for row in content.compared.rows] == [kept]
        assert f"left out: {left} ({tmp_path / left})" in content.summary.warnings[0]


# -- two runs and more -------------------------------------------------------------------------------------------------


def test_against_the_first_run(tmp_path: Path) -> None:
    shares = {"x": 0.3, "y": 0.2, "z": 0.31}
    folders = [make_translation_run(tmp_path / name, row=name, wrong=wrong) for name, wrong in shares.items()]
    found = compare_runs(folders, samples=100, seed=5)
    lines, metric = references("test"), metric_named("bleu")
    counts = [metric.statistics(list(hypotheses("test", wrong, 1, lines)), lines) for wrong in shares.values()]
    for place, one in enumerate(counts[1:]):
        (pair,) = against_first([[counts[0]], [one]], metric, samples=100, seed=5)
        del pair["seeds"]
        assert found["against_first"][place] == {"folder": str(folders[place + 1]), "first": str(folders[0]), **pair}
    alone = bootstrap_interval(counts[1], metric, samples=100, seed=5)
    assert found["runs"][1] == {"folder": str(folders[1]), "name": "y", **alone}
    assert (found["split"], found["sentences"], found["samples"], found["metric"]) == ("test", 120, 100, "bleu")
    valid = compare_runs(folders[:2], "valid", samples=50, metric="chrf")
    assert (valid["sentences"], valid["metric"]) == (60, "chrf")


def test_case_and_tokens_as_in_the_signature(tmp_path: Path) -> None:
    folders = [make_translation_run(tmp_path / name, row=name, lowercase=True) for name in ("x", "y")]
    lines, _ = read_translations(folders[1], "test")
    (folders[1] / "translations" / "test.txt").write_text("".join(f"{line.upper()}\n" for line in lines))
    assert compare_runs(folders, samples=50)["against_first"][0]["difference"] == 0
    for name, options in {"case": {}, "tokens": {"tokenize": "char", "lowercase": True}}.items():
        other = make_translation_run(tmp_path / name, row=name, **options)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="other signatures"):
            compare_runs([folders[0], other])
    with pytest.raises(InputError, match="at least two runs"):
        compare_runs(folders[:1])
    moved = make_translation_run(tmp_path / "other", lowercase=True, lines={"test": references("test", 5)})
    with pytest.raises(InputError, match="not scored on the same test references"):
        compare_runs([folders[0], moved])


def test_lines_end_where_files_say(tmp_path: Path) -> None:
    """Characters that Python's splitlines takes for ends of lines are none, and an empty translation is a line."""
    run = make_translation_run(tmp_path / "x")
    folder = run / "translations"
    (folder / "test.txt").write_text("one\u2028two\n\nthree\x0cfour\n", encoding="utf-8")
    (folder / "test.reference.txt").write_text("a\nb\nc\n", encoding="utf-8")
    assert read_translations(run, "test")[0] == ["one\u2028two", "", "three\x0cfour"]
    for content, words in ((b"", "0 hypotheses and 3 references"), (b"\xff\n\n\n", "not UTF-8")):
        (folder / "test.txt").write_bytes(content)
        with pytest.raises(InputError, match=words):
            read_translations(run, "test")
    (folder / "test.txt").unlink()
    with pytest.raises(InputError, match="no such file"):
        read_translations(run, "test")
