"""Translation runs in a report: BLEU is better when higher, the paper's kind beside ours, differences with intervals."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import sacrebleu
import yaml
from reported_translations import CORPUS, hypotheses, make_translation_run, references, table4
from reporting_runs import comparison, make_run, printed
from test_page import Page

from fullrank.reporting import Report, report
from fullrank.reporting.figures import BLEU, CHRF, PERPLEXITY, TOKENISED_BLEU
from fullrank.reporting.resampled import Differences, baseline_of
from fullrank.reporting.summary import summarize


def differences(runs: Sequence[Path]) -> Differences | None:
    """Differences on the first split that has any."""
    return next(iter(comparison(runs).differences), None)


SIGNATURE = f"nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:{sacrebleu.__version__}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return table4(tmp_path_factory.mktemp("table4"))


@pytest.fixture(scope="module")
def page(runs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Page:
    out = tmp_path_factory.mktemp("page")
    return Page(report(runs).write(out / "report.html").read_text(encoding="utf-8"))


def bleu(wrong: float, seed: int, split: str = "test") -> float:
    """sacreBLEU's score of the run that `make_translation_run` makes of these."""
    lines = references(split)
    return sacrebleu.BLEU().corpus_score(list(hypotheses(split, wrong, seed, lines)), [list(lines)]).score


def two_rows(root: Path, plain: float, a: float, **more: Any) -> list[Path]:
    """A run of each, with these shares of words wrong."""
    return [
        make_translation_run(root / "plain", wrong=plain, **more),
        make_translation_run(root / "a", row="a", mix="random", wrong=a, **more),
    ]


def cells_of(text: str, row: str) -> list[str]:
    """The figures in the first line of a table that begins with `row`; a spread is one figure."""
    line = next(line for line in text.splitlines() if line.split()[:1] == [row] and line.startswith(" "))
    return re.sub(r" ± ", "±", line).split()[1:]


def test_means_over_seeds_and_the_highest_is_best(runs: list[Path]) -> None:
    compared = comparison(runs)
    assert compared.measure is BLEU
    assert compared.comparable
    assert [len(row.runs) for row in compared.rows] == [2, 2, 2]
    plain, a, b = compared.rows
    expected = {"plain": 0.24, "a": 0.19, "b": 0.18}
    for row in compared.rows:
        seeds = [bleu(expected[row.name] + 0.005 * seed, seed) for seed in (1, 2)]
        assert row.figures["test"].mean == pytest.approx(statistics.fmean(seeds))
        assert row.figures["test"].deviation == pytest.approx(statistics.stdev(seeds))
    assert plain.best == ()
    highest = max(compared.rows, key=lambda row: row.figures["test"].mean)
    assert [row for row in compared.rows if "test" in row.best] == [highest]
    assert b.difference["test"] == pytest.approx(b.figures["test"].mean - plain.figures["test"].mean), "in points"
    assert a.stats(PERPLEXITY)["test"].mean < plain.stats(PERPLEXITY)["test"].mean


def test_the_terminal(runs: list[Path]) -> None:
    text, compared = printed(runs), comparison(runs)
    b = compared.rows[2]
    spread = [BLEU.spread(b.figures[split]).replace(" ", "") for split in ("test", "valid")]
    others = [CHRF.spread(b.stats(CHRF)["test"]), PERPLEXITY.spread(b.stats(PERPLEXITY)["test"])]
    assert cells_of(text, "b") == [
        "31.44", spread[0], "31.75", spread[1], *(other.replace(" ", "") for other in others), "30,013,440", "+24,576",
        "6,254",
    ]  # fmt: skip
    assert f"BLEU: sacreBLEU, {SIGNATURE}." in text
    assert "chrF: sacreBLEU, nrefs:1|case:mixed|eff:yes|nc:6" in text
    assert "tok. BLEU" not in text
    assert "test chrF" in text
    assert "unigram" not in text
    narrow = printed(runs, width=60)
    assert "± " in narrow
    assert SIGNATURE in narrow.replace("\n", "")


def test_the_papers_tokenised_bleu_stands_beside_ours_of_that_kind(tmp_path: Path) -> None:
    runs = table4(tmp_path, metric="tokenised_bleu")[:3]
    compared = comparison(runs)
    assert compared.paper_measure is TOKENISED_BLEU
    text, plain = printed(runs), compared.rows[0]
    ours, theirs = plain.figures["test"], plain.stats(TOKENISED_BLEU)["test"]
    assert ours.mean != pytest.approx(theirs.mean, abs=0.1), "the made-up text tells them apart"
    cells = cells_of(text, "plain")
    assert cells[:3] == ["27.88", BLEU.spread(theirs).replace(" ", ""), BLEU.spread(ours).replace(" ", "")]
    headings = next(line for line in text.splitlines() if "valid" in line)
    assert re.split(r"\s{2,}", headings.strip())[:6] == [
        "test tok. BLEU", "test tok. BLEU", "test BLEU", "valid tok. BLEU", "valid tok. BLEU", "valid BLEU",
    ]  # fmt: skip
    assert "tok. BLEU: tokenised, lower-cased BLEU4, as fairseq-generate printed it" in text
    page = Page(report(runs).write(tmp_path / "page").read_text())
    heads = next(cells for cells in page.cells if "paper, tok. BLEU" in cells)
    assert heads[2:8] == 2 * ["paper, tok. BLEU", "ours, tok. BLEU", "ours"]


def test_without_tokenised_bleu_of_ours_there_is_no_column_of_it(tmp_path: Path) -> None:
    run = make_translation_run(tmp_path / "plain", paper={"test_tokenised_bleu": 34.76})
    result = json.loads((run / "result.json").read_text())
    for split in result["final"].values():
        del split["tokenised_bleu"]
    (run / "result.json").write_text(json.dumps(result))
    text = printed([run])
    assert cells_of(text, "plain")[0] == "34.76"
    assert "These runs have none: their corpus is not tokenised." in text
    assert text.count("tok. BLEU") == 3, "two headings of the paper's, and what it is"
    page = Page(report([run]).write(tmp_path / "page").read_text())
    heads = next(cells for cells in page.cells if "paper, tok. BLEU" in cells)
    assert heads[1:5] == 2 * ["paper, tok. BLEU", "ours"]


def test_budgets_that_differ_by_a_few_sentences_are_equal(tmp_path: Path) -> None:
    runs = two_rows(tmp_path, 0.2, 0.1)
    for seen, said in ((1_950_300, False), (2_000_000, True)):
        result = json.loads((runs[1] / "result.json").read_text()) | {"tokens_seen": seen}
        (runs[1] / "result.json").write_text(json.dumps(result))
        cautions = summarize(comparison(runs)).cautions
        assert any("equally many tokens" in caution for caution in cautions) == said


def test_a_papers_perplexity_or_bleu_is_never_taken_for_the_other(tmp_path: Path) -> None:
    run = make_translation_run(tmp_path / "plain", paper={"valid": 30.0, "test": 31.0})
    compared = comparison([run])
    assert compared.paper_measure is None
    assert any("The paper's figures are perplexities" in text for text in summarize(compared).cautions)
    language = make_run(tmp_path / "language", paper={"valid": 35.28, "test": 34.76, "metric": "bleu"})
    assert comparison([language]).paper_measure is None
    assert any("The paper's figures are BLEU scores" in text for text in summarize(comparison([language])).cautions)


def test_differences_on_resampled_test_sets(runs: list[Path], page: Page) -> None:
    compared = comparison(runs)
    found = compared.differences[0]
    assert found is not None
    assert (found.split, {row.baseline for row in found.rows}, found.sentences) == ("test", {"plain"}, 120)
    assert {(row.baseline, row.baseline_runs) for row in found.rows} == {("plain", 2)}
    assert [(row.row, row.runs) for row in found.rows] == [("a", 2), ("b", 2)]
    assert found.left_out == ()
    for row, tested in zip(compared.rows[1:], found.rows, strict=True):
        assert tested.difference == pytest.approx(row.difference["test"], abs=1e-9)
        assert tested.score == pytest.approx(row.figures["test"].mean, abs=1e-9)
        assert tested.low < tested.difference < tested.high
        assert tested.seeds_low is not None
        assert tested.seeds_low < tested.difference
    b = found.rows[1]
    lines = [
        [line.split() for line in printed(runs).splitlines() if line.startswith(" b ")][1],
        next(cells for cells in page.cells if cells[0] == "b" and len(cells) == 7 and " to " in cells[3]),
    ]
    shown = [f"+{b.difference:.2f}", f"+{b.low:.2f} to +{b.high:.2f}", f"{b.p_value:.3f}", f"{b.ahead:.0%}"]
    assert " ".join(shown) in " ".join(lines[0])
    assert lines[1][2:6] == shown
    assert "Koehn 2004" in page.text
    assert Report(compared).as_json()["significance"][0]["rows"][1]["low"] == b.low


def test_runs_without_their_translations_are_named_and_left_out(tmp_path: Path) -> None:
    runs = [
        make_translation_run(tmp_path / "plain", row="plain"),
        make_translation_run(tmp_path / "a-1", row="a", mix="average", seed=1, wrong=0.1),
        make_translation_run(tmp_path / "a-2", row="a", mix="average", seed=2, wrong=0.1, keep=()),
        make_translation_run(tmp_path / "b", row="b", mix="position_wise", wrong=0.15, keep=("valid",)),
        make_translation_run(tmp_path / "c", row="c", mix="random", wrong=0.12),
    ]
    (runs[4] / "translations" / "test.txt").write_text("Something else.\n" * 120)
    found = differences(runs)
    assert found is not None
    assert [(row.row, row.runs) for row in found.rows] == [("a", 1)]
    assert found.left_out[0] == "a, seed 2: it has kept no translations of the test split"
    assert found.left_out[1] == "b, seed 1: it has kept no translations of the test split"
    assert re.match(
        r"c, seed 1: its translations have a BLEU of 0\.\d\d, its result says \d\d\.\d\d", found.left_out[2]
    )
    assert "Left out: b, seed 1: it has kept no translations of the test split." in printed(runs)
    (runs[4] / "translations" / "test.txt").write_text("Too short.\n")
    found = differences(runs)
    assert found is not None
    assert "1 hypotheses and 120 references" in found.left_out[2]


def test_rows_of_several_kinds_have_a_baseline_each(tmp_path: Path) -> None:
    names = ["h4-plain", "h4-a", "h4-a-cross", "h64-plain", "h64-a", "n240-plain", "other"]
    expected = ["h4-plain", "h4-plain", "h4-plain", "h64-plain", "h64-plain", "h4-plain", "h4-plain"]
    assert [baseline_of(name, names) for name in names] == expected
    assert [baseline_of(name, ["plain", "a", "a-cross"]) for name in ("plain", "a", "a-cross")] == ["plain"] * 3
    assert [baseline_of(name, ["b", "a-cross", "a-plain-2"]) for name in ("b", "a-cross", "a-plain-2")] == ["b"] * 3
    wrong = {"h4-plain": 0.3, "h4-a": 0.25, "h64-plain": 0.2, "h64-a": 0.1}
    runs = [
        make_translation_run(tmp_path / row, row=row, mix=mix, wrong=wrong[row])
        for row, mix in zip(wrong, ("none", "average", "random", "position_wise"), strict=True)
    ]
    found = differences(runs)
    assert found is not None
    assert [(row.row, row.baseline) for row in found.rows] == [("h4-a", "h4-plain"), ("h64-a", "h64-plain")]
    for row in found.rows:
        assert row.difference == pytest.approx(bleu(wrong[row.row], 1) - bleu(wrong[row.baseline], 1), abs=1e-9)
    text = printed(runs)
    assert "Test BLEU, every row against its baseline" in text
    assert f"h64-plain {bleu(0.2, 1):.2f}" in text
    page = Page(report(runs).write(tmp_path / "page").read_text())
    assert any(cells[0] == "h64-a" and cells[2:3] == [f"h64-plain {bleu(0.2, 1):.2f}"] for cells in page.cells)


def test_further_test_sets(tmp_path: Path) -> None:
    """Test sets besides `test` have their own figures and their own test of differences."""
    runs = two_rows(tmp_path, 0.2, 0.1)
    for run, wrong in zip(runs, (0.2, 0.1), strict=True):
        result, lines = json.loads((run / "result.json").read_text()), references("test", 9)
        found = list(hypotheses("test", wrong, 3, lines))
        score = sacrebleu.BLEU().corpus_score(found, [list(lines)]).score
        result["final"]["test2017"] = {"bleu": score, "perplexity": 5.5, "length_ratio": 0.987}
        (run / "result.json").write_text(json.dumps(result))
        for name, text in (("test2017.txt", found), ("test2017.reference.txt", lines)):
            (run / "translations" / name).write_text("".join(f"{line}\n" for line in text))
    compared = comparison(runs)
    first, second = compared.differences
    assert (first.split, second.split) == ("test", "test2017")
    stated = [row["other_splits"]["test2017"]["bleu"]["mean"] for row in Report(compared).as_json()["rows"]]
    assert second.rows[0].difference == pytest.approx(stated[1] - stated[0])
    assert [entry["split"] for entry in Report(compared).as_json()["significance"]] == ["test", "test2017"]
    assert "test2017 BLEU against plain" in printed(runs)
    page = Page(report(runs).write(tmp_path / "page").read_text())
    (row,) = [cells for cells in page.cells if cells[:2] == ["a", "test2017"]]
    assert row[2:] == [f"{score:.2f}", "–", "–", "5.50", "0.987"]


def test_papers_figures_by_the_ends_of_their_keys(tmp_path: Path) -> None:
    """`test_tokenised_bleu: 34.76`, as in `test_bits_per_character`."""
    for end, measure in (("bleu", BLEU), ("tokenised_bleu", TOKENISED_BLEU)):
        run = make_translation_run(tmp_path / end, paper={f"valid_{end}": 35.28, f"test_{end}": 34.76})
        compared = comparison([run])
        assert compared.paper_measure is measure
        assert [measure.paper_figure(compared.rows[0].paper, split) for split in ("valid", "test")] == [35.28, 34.76]
        page = report([run]).write(tmp_path / f"{end}-page").read_text()
        assert ">34.76<" in page
        assert "What else the paper states" not in page


def test_perplexity_of_a_decoder_that_sees_later_tokens_is_left_out(tmp_path: Path) -> None:
    """BLEU of such a decoder is one like any other: it writes from left to right."""
    runs = two_rows(tmp_path, 0.2, 0.1)
    config = yaml.safe_load((runs[1] / "config.yaml").read_text())
    config["model"]["decoder"] = {"attention": {"kind": "multilinear", "causal": "as_published"}}
    (runs[1] / "config.yaml").write_text(yaml.safe_dump(config))
    text, compared = printed(runs), comparison(runs)
    assert compared.rows[1].best == ("valid", "test")
    assert cells_of(text, "a")[-4] == "–"
    assert cells_of(text, "plain")[-4] == PERPLEXITY.spread(compared.rows[0].stats(PERPLEXITY)["test"])
    assert "Perplexity of a is left out: not a next-token perplexity" in text
    assert "†" not in text


def test_without_translations_of_the_first_row_there_is_no_test(tmp_path: Path) -> None:
    runs = [
        make_translation_run(tmp_path / "plain", keep=()),
        make_translation_run(tmp_path / "a", row="a", mix="average", wrong=0.1),
    ]
    assert differences(runs) is None
    assert report(runs).as_json()["significance"] == []
    assert "bootstrap" not in printed(runs)
    assert differences(runs[1:]) is None, "one row has nothing to be compared with"


def test_validation_translations_serve_where_there_are_no_others(tmp_path: Path) -> None:
    runs = [
        make_translation_run(tmp_path / "plain", keep=("valid",)),
        make_translation_run(tmp_path / "a", row="a", mix="average", wrong=0.1),
    ]
    found = differences(runs)
    assert found is not None
    assert (found.split, found.sentences) == ("valid", 60)
    assert "bootstrap" not in " ".join(summarize(comparison(runs)).paragraphs), "the rows are judged by the test split"


def test_the_summary_says_higher(runs: list[Path]) -> None:
    summary = summarize(comparison(runs))
    everything = " ".join((summary.headline, " ".join(summary.paragraphs), *summary.cautions))
    assert "above plain" in summary.headline
    assert " points" in summary.headline
    assert "b is highest, but other seeds might turn it round: test BLEU" in summary.headline
    assert "Paired bootstrap over test sentences, b − plain, means over their runs: +" in " ".join(summary.paragraphs)
    assert "low" not in everything.replace("below it", "").replace("lower-cased", "")
    assert "perplexity" not in everything
    assert "nigram" not in everything


@pytest.mark.parametrize(
    ("plain", "a", "headline"),
    [
        (0.1, 0.3, r"plain, the first row, stays highest: test BLEU \d\d\.\d\d; next is a at −\d\d\.\d\d"),
        (0.3, 0.1, r"a is highest: test BLEU \d\d\.\d\d, \d\d\.\d\d points above plain \(one seed, no interval\)"),
        (0.2, 0.2, r"plain, the first row, stays highest: test BLEU \d\d\.\d\d; next is a at 0\.00"),
    ],
)
def test_headlines_of_one_seed(tmp_path: Path, plain: float, a: float, headline: str) -> None:
    runs = two_rows(tmp_path, plain, a)
    summary, second = summarize(comparison(runs)), comparison(runs).rows[1]
    if plain == a:
        assert second.difference["test"] == 0
        assert second.best == ("valid", "test")
        assert "(p = 1.000)" in " ".join(summary.paragraphs)
    else:
        assert second.best == (("valid", "test") if a < plain else ())
    assert re.fullmatch(headline, summary.headline)
    assert "Paired bootstrap over test sentences, a − plain: " in " ".join(summary.paragraphs)


def test_a_lead_that_other_sentences_might_turn_round(tmp_path: Path) -> None:
    """Seeds that hardly differ, and a difference that two sentences make."""
    runs = []
    for row, mix, better in (("plain", "none", 0), ("a", "random", 1)):
        for seed in (1, 2):
            run = make_translation_run(tmp_path / f"{row}-{seed}", row=row, mix=mix, seed=seed)
            lines = list(hypotheses("test", 0.2, 7, references("test")))
            theirs = [i for i in range(120) if lines[i] != references("test")[i]]
            lines[theirs[0]] = references("test")[theirs[0]] if better else lines[theirs[0]]
            (run / "translations" / "test.txt").write_text("".join(f"{line}\n" for line in lines))
            result = json.loads((run / "result.json").read_text())
            score = sacrebleu.BLEU().corpus_score(lines, [list(references("test"))]).score
            result["final"]["test"]["bleu"] = score + 0.001 * seed
            (run / "result.json").write_text(json.dumps(result))
            runs.append(run)
    summary = summarize(comparison(runs))
    assert summary.headline.startswith("a is highest, but other sentences might turn it round: test BLEU")
    assert "holds 0: other sentences might turn it round" in " ".join(summary.paragraphs)


def test_the_page(runs: list[Path], page: Page) -> None:
    b = next(cells for cells in page.cells if cells[:2] == ["b", "2"])
    row = comparison(runs).rows[2]
    shown = [
        BLEU.spread(row.figures[split]) + f"+{row.difference[split]:.2f}" + BLEU.show_interval(*row.intervals[split])
        for split in ("test", "valid")
    ]
    assert b[2:6] == ["31.44", shown[0], "31.75", shown[1]]
    assert b[6:8] == [CHRF.spread(row.stats(CHRF)["test"]), PERPLEXITY.spread(row.stats(PERPLEXITY)["test"])]
    assert b[8:10] == ["30,013,440", "+24,576"]
    assert "BLEU: higher is better; the highest of comparable rows is set bold." in page.text
    assert "Beneath a BLEU: its difference to the first row, in points, and its 95 % interval over seeds" in page.text
    assert SIGNATURE in page.text
    assert "Highest test BLEU" in page.text
    assert "Lowest" not in page.text
    assert "Unigram" not in page.text
    for words in ("29,000 / 60 / 120", "377,000 / 790 / 1,580", "6,632 source / 8,848 target", "length ratio"):
        assert words in page.text
    assert "reached step 500; last validation BLEU" in page.text


def test_sentences_stand_beside_their_translations(runs: list[Path], page: Page) -> None:
    for file in ("test.reference.txt", "test.txt"):
        lines = (runs[0] / "translations" / file).read_text(encoding="utf-8").splitlines()
        assert lines[0] in page.text
        assert lines[5] not in page.text
    assert "The first sentences, translated by the best checkpoint of its first seed." in page.text


def test_learning_curves_of_bleu_by_epoch(page: Page) -> None:
    labels = [str(attrs["aria-label"]) for attrs in page.tags("svg") if attrs.get("class") == "figure"]
    assert labels[0].startswith("Final test BLEU")
    assert [label.split(".")[0] for label in labels[1:5]] == [
        "Validation BLEU over epochs",
        "Validation BLEU, second half over epochs",
        "Validation loss over epochs",
        "Validation loss, second half over epochs",
    ]
    ends = {name: float(value) for name, value in re.findall(r"(\w+) ([\d.]+\d)", labels[1].split("values:")[1])}
    assert ends["b"] > ends["plain"], "the curve is of BLEU, not of loss"
    assert set(ends) == {"plain", "a", "b", "k"}


def test_curves_where_bleu_was_not_measured_while_training(tmp_path: Path) -> None:
    runs = [
        make_translation_run(tmp_path / row, row=row, mix=mix, bleu_lines=False)
        for row, mix in (("x", "none"), ("y", "random"))
    ]
    labels = [
        str(attrs["aria-label"])
        for attrs in Page(report(runs).write(tmp_path / "page").read_text()).tags("svg")
        if attrs.get("class") == "figure"
    ]
    assert any(label.startswith("Validation loss over epochs") for label in labels)
    assert not any(label.startswith("Validation BLEU") for label in labels)


def test_unfinished_runs_alone(tmp_path: Path) -> None:
    """Unfinished runs do not say how long an epoch is: the curves are over training tokens."""
    runs = [make_translation_run(tmp_path / "k", row="k", finished=False)]
    page = Page(report(runs).write(tmp_path / "page").read_text())
    labels = [str(attrs["aria-label"]) for attrs in page.tags("svg") if attrs.get("class") == "figure"]
    assert labels[0].startswith("Validation BLEU over training tokens")
    assert "No run has finished yet" in printed(runs)


def test_a_run_without_bleu_is_compared_by_perplexity(tmp_path: Path) -> None:
    final = {split: {"nll": 1.5, "perplexity": 4.48, "tokens": 790} for split in ("valid", "test")}
    runs = [
        make_translation_run(tmp_path / "plain"),
        make_translation_run(tmp_path / "a", row="a", mix="random", result={"final": final}),
    ]
    compared = comparison(runs)
    assert compared.measure is PERPLEXITY
    assert compared.differences == ()
    assert compared.rows[1].figures["test"].mean == 4.48
    assert "lower is better" in report(runs).write(tmp_path / "page").read_text()


def test_a_bleu_of_nothing_is_a_figure(tmp_path: Path) -> None:
    """A model that has learnt no translation at all, as the paper's baseline at n = 240."""
    run = make_translation_run(tmp_path / "plain")
    result = json.loads((run / "result.json").read_text())
    for split in result["final"].values():
        split["bleu"] = 0.0
    (run / "result.json").write_text(json.dumps(result))
    compared = comparison([run, make_translation_run(tmp_path / "a", row="a", mix="random")])
    assert compared.rows[0].figures["test"].mean == 0
    assert compared.rows[1].difference["test"] == compared.rows[1].figures["test"].mean


@pytest.mark.parametrize("first", ["translation", "language"])
def test_translations_and_language_models_are_never_mixed(tmp_path: Path, first: str) -> None:
    runs = [make_translation_run(tmp_path / "mt", row="mt"), make_run(tmp_path / "lm", row="lm")]
    kept, left = ("mt", "lm") if first == "translation" else ("lm", "mt")
    compared = comparison(runs if first == "translation" else runs[::-1])
    assert [row.name for row in compared.rows] == [kept]
    assert [run.name for run in compared.left_out] == [left]
    assert [entry["name"] for entry in Report(compared).as_json()["left_out"]] == [left]
    (warning,) = summarize(compared).warnings
    assert f"left out: {left} ({tmp_path / left})" in warning
    assert "left out" in printed(runs)
    assert (
        f"left out: {left}"
        in report(runs if first == "translation" else runs[::-1]).write(tmp_path / "page").read_text()
    )


def test_other_references_or_signatures_do_not_compare(tmp_path: Path) -> None:
    plain = make_translation_run(tmp_path / "plain")
    other = make_translation_run(
        tmp_path / "other", row="other", mix="random", lines={"test": references("test", 5)}, wrong=0.1
    )
    lower = make_translation_run(tmp_path / "lower", row="lower", mix="random", lowercase=True, wrong=0.1)
    for run, words in ((other, "test references"), (lower, "BLEU signature")):
        compared = comparison([plain, run])
        assert not compared.comparable
        (warning,) = summarize(compared).warnings
        assert warning.startswith("BLEU scores of these runs cannot be compared.")
        assert f"They differ in: {words}" in warning
        assert compared.rows[1].difference == {}
        assert compared.differences == ()
    whole = {**CORPUS, "vocabulary": {"source": 10_000, "target": 10_000}}
    bpe = make_translation_run(tmp_path / "bpe", row="bpe", mix="random", corpus=whole)
    compared = comparison([plain, bpe])
    assert compared.comparable, "BLEU is of text, not of tokens"
    assert any("perplexities, which are per token, do not compare" in text for text in summarize(compared).cautions)


def test_seeds_with_other_references_are_another_row(tmp_path: Path) -> None:
    runs = [make_translation_run(tmp_path / str(seed), seed=seed) for seed in (1, 2)]
    assert [len(row.runs) for row in comparison(runs).rows] == [2]
    runs.append(make_translation_run(tmp_path / "3", seed=3, lines={"test": references("test", 5)}))
    assert [len(row.runs) for row in comparison(runs).rows] == [2, 1]


def test_another_version_of_sacrebleu_is_a_caution(tmp_path: Path) -> None:
    plain, older = (
        make_translation_run(tmp_path / "plain"),
        make_translation_run(tmp_path / "older", row="older", mix="random"),
    )
    text = (older / "result.json").read_text().replace(f"version:{sacrebleu.__version__}", "version:2.0.0")
    (older / "result.json").write_text(text)
    compared = comparison([plain, older])
    assert compared.comparable
    assert any("different versions of sacreBLEU" in caution for caution in summarize(compared).cautions)
    assert "version:2.0.0" in printed([plain, older])


def test_lower_cased_bleu_is_resampled_as_such(tmp_path: Path) -> None:
    runs = two_rows(tmp_path, 0.2, 0.1, lowercase=True)
    found = differences(runs)
    assert found is not None
    assert found.left_out == (), "scored with case they would not have the BLEU of their results"
    assert found.rows[0].baseline_score == pytest.approx(comparison(runs).rows[0].figures["test"].mean)


def test_json(runs: list[Path]) -> None:
    document: dict[str, Any] = report(runs).as_json()
    json.dumps(document)
    row = document["rows"][2]
    assert (row["task"], row["measure"], row["difference_in"]) == ("translation", "bleu", "points")
    assert row["bleu"]["test"]["count"] == 2
    assert row["bleu_signature"] == [SIGNATURE]
    assert {"chrf", "tokenised_bleu", "perplexity"} <= row.keys()
    assert row["runs"][0]["bleu"]["test"] == pytest.approx(bleu(0.185, 1))
    assert row["paper"] == {"extra_parameters": 24_576, "valid": 31.75, "test": 31.44, "metric": "bleu"}
