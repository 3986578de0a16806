"""Runs of fine-tuning over seeds: arms, baselines, what is said of them and what is not."""

from __future__ import annotations

import json
import statistics
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path

import pytest
import scipy.stats
from finetuned_runs import make_run, two_arms
from reporting_runs import make_run as make_other_run
from reporting_runs import printed

from fullrank.core.errors import InputError
from fullrank.reporting import Report, report
from fullrank.reporting.finetuning import Figure, Tuning
from fullrank.reporting.runs import read_run

BASE, OTHER = [0.412, 0.430, 0.401, 0.424, 0.419], [0.425, 0.429, 0.422, 0.431, 0.420]
KEY = ("dev", "matthews_correlation")


def figure(found: Tuning, arm: str, key: tuple[str, str] = KEY, task: int = 0) -> Figure:
    return next(one for one in found.tasks[task].arms if one.name == arm).figures[key]


def summary(folders: Sequence[Path]) -> Tuning:
    content = report(folders).content
    assert isinstance(content, Tuning)
    return content


def flat(text: str) -> str:
    return " ".join(text.split())


def test_figures_are_those_of_the_equations(tmp_path: Path) -> None:
    found = summary(two_arms(tmp_path, BASE, OTHER))
    plain, b = figure(found, "plain"), figure(found, "b")
    assert plain.values == pytest.approx([100 * score for score in BASE])
    assert (plain.stat.mean, plain.stat.count) == (pytest.approx(100 * statistics.fmean(BASE)), 5)
    assert plain.stat.deviation == pytest.approx(100 * statistics.stdev(BASE))
    assert plain.against is None
    against = b.against
    assert against is not None
    assert against.baseline == "plain"
    assert against.difference == pytest.approx(100 * (statistics.fmean(OTHER) - statistics.fmean(BASE)))
    welch = scipy.stats.ttest_ind([100 * x for x in OTHER], [100 * x for x in BASE], equal_var=False)
    assert against.welch == pytest.approx(tuple(welch.confidence_interval(0.95)))
    paired = scipy.stats.ttest_rel([100 * x for x in OTHER], [100 * x for x in BASE])
    assert against.paired == pytest.approx(tuple(paired.confidence_interval(0.95)))
    assert against.deviation_change_percent == pytest.approx(
        100 * (statistics.stdev(OTHER) / statistics.stdev(BASE) - 1)
    )
    assert against.brown_forsythe_p == pytest.approx(scipy.stats.levene(BASE, OTHER, center="median").pvalue)
    assert against.deviation_f_interval is not None
    assert against.deviation_bootstrap is not None
    assert against.deviation_f_interval.low < against.deviation_change_percent < against.deviation_f_interval.high


def test_the_order_of_folders_changes_nothing(tmp_path: Path) -> None:
    folders = two_arms(tmp_path, BASE, OTHER)
    assert report(folders).as_json() == report(folders[::-1]).as_json() == report([*folders, folders[0]]).as_json()


def test_pairs_need_the_same_seeds(tmp_path: Path) -> None:
    found = summary(two_arms(tmp_path, BASE, OTHER[:4]))
    against = figure(found, "b").against
    assert against is not None
    assert (against.pairs, against.paired) == (False, None)
    assert against.welch is not None
    assert "b and plain have not the same seeds, so nothing is paired." in found.tasks[0].remarks
    assert "other seeds" in printed(found, 100)


def test_one_seed_says_nothing_of_chance(tmp_path: Path) -> None:
    found = summary(two_arms(tmp_path, BASE[:1], OTHER[:1]))
    against = figure(found, "b").against
    assert against is not None
    assert figure(found, "b").stat.deviation is None
    assert (against.welch, against.paired, against.deviation_change_percent, against.deviation_f_interval) == (
        None,
    ) * 4
    assert (against.deviation_bootstrap, against.brown_forsythe_p, against.decided) == (None, None, None)
    text = printed(found, 100)
    assert "cannot be told from so few seeds" in flat(text)
    assert "unknown" in text
    assert "±" not in text.split("Mean ±")[0]
    json.loads(json.dumps(Report(found).as_json(), allow_nan=False))


def test_equal_scores_give_no_interval(tmp_path: Path) -> None:
    """A task that every seed answers with the larger class: a spread of 0 is not certainty."""
    found = summary(two_arms(tmp_path, [0.563] * 3, [0.563] * 3))
    against = figure(found, "b").against
    assert against is not None
    assert (against.difference, against.welch, against.paired, against.deviation_change_percent) == (
        0,
        None,
        None,
        None,
    )


def test_scores_of_squad(tmp_path: Path) -> None:
    scores = {"dev": {"f1": 0.8025, "exact_match": 0.715, "examples": 500}}
    folder = make_run(
        tmp_path / "a", 0.8025, task="squad", metrics=("f1", "exact_match"), scores=scores,
        row="b", paper={"exact_match": 81.0, "f1": 88.4},
    )  # fmt: skip
    found = summary([folder])
    assert figure(found, "b", ("dev", "exact_match")).stat.mean == pytest.approx(71.5)
    assert figure(found, "b", ("dev", "f1")).stat.mean == pytest.approx(80.25)
    text = printed(found, 100)
    assert "exact match x 100" in text
    assert "88.4" in text
    assert "server" not in text


@pytest.mark.parametrize("damage", [["f1"], {"f1": 1}, None, True])
def test_damaged_names_of_metrics(tmp_path: Path, damage: object) -> None:
    folder = make_run(tmp_path / "a", 0.5)
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    (folder / "result.json").write_text(json.dumps(result | {"metrics": [damage]}), encoding="utf-8")
    assert any("result.json: damaged (metrics: " in problem for problem in read_run(folder).problems)


def test_the_baseline_is_the_plain_arm_most_like_it(tmp_path: Path) -> None:
    grafted = {"attention": {"cross_head": 0.1}}
    folders = [
        make_run(tmp_path / "a", 0.4, model=grafted, data={"max_train": 500}),
        make_run(tmp_path / "b", 0.5),
        make_run(tmp_path / "c", 0.6, data={"max_train": 500}),
        make_run(tmp_path / "d", 0.7, model=grafted),
    ]
    arms = {arm.name: arm.baseline and arm.baseline.name for arm in summary(folders).tasks[0].arms}
    assert arms == {
        "plain · max_train None": None,
        "plain · max_train 500": "plain · max_train None",
        "cross-head 0.1 · max_train 500": "plain · max_train 500",
        "cross-head 0.1 · max_train None": "plain · max_train None",
    }


def test_without_a_plain_arm_the_first_is_the_baseline(tmp_path: Path) -> None:
    a = make_run(tmp_path / "a", 0.4, model={"attention": {"mix": "position_wise"}})
    b = make_run(
        tmp_path / "b", 0.5, model={"attention": {"cross_head": 0.1, "mix": "position_wise"}, "layers": [0, 2]}
    )
    arms = {arm.name: arm.baseline and arm.baseline.name for arm in summary([a, b]).tasks[0].arms}
    assert arms == {"position_wise": None, "position_wise, cross-head 0.1, layers 0 2": "position_wise"}


def test_what_was_watched_otherwise_is_a_seed_of_the_same_arm(tmp_path: Path) -> None:
    a = make_run(tmp_path / "a", 0.4, seed=1)
    b = make_run(tmp_path / "b", 0.5, seed=2, train={"threads": 2, "keep_model": False}, data={"dir": "/elsewhere"})
    (arm,) = summary([a, b]).tasks[0].arms
    assert arm.seeds == (1, 2)
    again = make_run(tmp_path / "c", 0.6, seed=2)  # the same seed twice is no independent sample
    assert [one.seeds for one in summary([a, b, again]).tasks[0].arms] == [(1, 2), (2,)]
    other = make_run(tmp_path / "d", 0.6, seed=3, sha256={"train": "aa", "dev": "another"})
    assert len(summary([a, b, other]).tasks[0].arms) == 2


def test_unequal_terms_are_said(tmp_path: Path) -> None:
    plain = make_run(tmp_path / "plain", 0.4, row="plain")
    longer = make_run(
        tmp_path / "b", 0.5, row="b", steps=1072, model={"attention": {"mix": "position_wise"}},
        train={"epochs": 4.0, "learning_rate": 5e-5}, sha256={"train": "another", "dev": "bb"},
        environment={"torch": "2.9.0"}, checkpoint="best",
    )  # fmt: skip
    remarks = summary([plain, longer]).tasks[0].remarks
    assert remarks[:3] == (
        "Not equal terms: b has 1,072 training steps, plain 804.",
        "Not equal terms: train.learning_rate is 5e-05 in b, 2e-05 in plain.",
        "Not equal terms: b and plain read other train examples.",
    )
    assert "it flatters them" in remarks[3]
    assert "machine and software" in remarks[4]


def test_equal_terms_are_not_remarked_on(tmp_path: Path) -> None:
    assert summary(two_arms(tmp_path, BASE, OTHER)).tasks[0].remarks == ()


@pytest.mark.parametrize(
    ("task", "metrics", "metric"),
    [
        ("glue/cola", ("matthews_correlation",), "matthews_correlation"),
        ("glue/mrpc", ("accuracy", "f1"), "f1"),
        ("glue/qqp", ("accuracy", "f1"), "f1"),
        ("glue/stsb", ("pearson", "spearman"), "spearman"),
        ("glue/rte", ("accuracy",), "accuracy"),
    ],
)
def test_the_servers_figure_stands_at_the_score_it_is_of(
    tmp_path: Path, task: str, metrics: tuple[str, ...], metric: str
) -> None:
    scores = {"dev": dict.fromkeys(metrics, 0.5)}
    found = summary(
        [make_run(tmp_path / "a", 0.5, task=task, metrics=metrics, scores=scores, row="b", paper={"test": 54.9})]
    )
    papers = {key[1]: figure(found, "b", key).paper for key in found.tasks[0].keys}
    assert {name for name, paper in papers.items() if paper} == {metric}
    stated = papers[metric]
    assert stated is not None
    assert (stated.mean, stated.deviation, stated.of) == (54.9, None, "test server")
    text = printed(found, 100)
    assert "54.9" in text
    assert "(server)" in text


def test_mismatched_splits_have_figures_of_their_own(tmp_path: Path) -> None:
    scores = {"dev": {"accuracy": 0.8}, "dev_mismatched": {"accuracy": 0.81}}
    found = summary([make_run(tmp_path / "a", 0.8, task="glue/mnli", metrics=("accuracy",), scores=scores, row="b",
                              paper={"test": 83.6, "test_mismatched": 82.8})])  # fmt: skip
    stated = [figure(found, "b", (split, "accuracy")).paper for split in ("dev", "dev_mismatched")]
    assert [paper.mean for paper in stated if paper] == [83.6, 82.8]


def test_the_papers_deviations_stand_beside_ours(tmp_path: Path) -> None:
    """Skip Cross-head, Table 4: CoLA 59.849 +- 1.23 and 58.744 +- 1.1, which is -10.6 %."""
    paper = {"plain": [59.849, 1.23], "b": [58.744, 1.1]}
    folders = [
        make_run(tmp_path / f"{row}{seed}", 0.4 + seed / 100, seed=seed, row=row,
                 paper={"matthews_correlation": paper[row]},
                 model={"attention": {"cross_head": 0.0 if row == "plain" else 0.1}})
        for row in paper for seed in (1, 2, 3)
    ]  # fmt: skip
    found = summary(folders)
    assert figure(found, "b").paper.deviation_change_percent == pytest.approx(-10.57, abs=0.01)
    text = printed(found, 100)
    assert "59.85 ± 1.23" in text
    assert "−10.6 % in the paper" in text


def test_the_table_fits_100_columns(tmp_path: Path) -> None:
    paper = {"matthews_correlation": [59.849, 1.23]}
    folders = two_arms(tmp_path, BASE, OTHER, prefix="cola-quite-long-", paper=paper)
    text = printed(summary(folders), 100)
    assert max(map(len, text.splitlines())) <= 100
    for word in (
        "41.72 ± 1.12",
        "42.54 ± 0.46",
        "59.85 ± 1.23",
        "position_wise",
        "1–5",
        "144",
        "2,000 examples (slice)",
    ):
        assert word in flat(text)
    assert "last checkpoint" in flat(text)


def test_json_holds_no_path_of_this_machine(tmp_path: Path) -> None:
    folders = [
        *two_arms(tmp_path, BASE, OTHER),
        make_run(tmp_path / "own", 0.3, model={"pretrained": str(tmp_path / "my-encoder")}),
        make_run(tmp_path / "half", None),
    ]
    document = report(folders).as_json()
    text = json.dumps(document, allow_nan=False)
    assert str(tmp_path) not in text
    assert "/somewhere" not in text
    assert "my-encoder" in text
    b = document["tasks"][0]["arms"][-1]
    assert (b["name"], b["seeds"], b["attention"]) == ("b", [1, 2, 3, 4, 5], {"mix": "position_wise"})
    assert b["figures"]["dev"]["matthews_correlation"]["against"]["deviation_bootstrap"]["samples"] == 10_000
    assert document["unfinished"][0]["name"] == "half"


def test_unfinished_and_empty_results_are_listed(tmp_path: Path) -> None:
    half = make_run(tmp_path / "half", None)
    diverged = make_run(tmp_path / "diverged", 0.0, scores={"dev": {"matthews_correlation": float("nan")}})
    damaged = make_run(tmp_path / "damaged", 0.4)
    (damaged / "result.json").write_text('{"kind": "fine', encoding="utf-8")
    found = summary([half, diverged, damaged])
    assert found.tasks == ()
    assert [run.folder.name for run in found.unfinished] == ["half", "diverged", "damaged"]
    text = flat(printed(found, 100))
    assert "no result.json" in text
    assert "holds no finite score" in text
    assert "result.json: damaged" in text


def test_a_score_of_zero_or_below_counts(tmp_path: Path) -> None:
    found = summary([make_run(tmp_path / "a", -0.02), make_run(tmp_path / "b", 0.0, seed=2)])
    assert found.tasks[0].arms[0].figures[KEY].values == (-2.0, 0.0)


def test_other_kinds_of_runs_are_refused(tmp_path: Path) -> None:
    tuned, other = make_run(tmp_path / "tuned", 0.4), make_other_run(tmp_path / "other")
    with pytest.raises(
        InputError, match=r"tuned is a run of fine-tuning and .*other is not.*make a report of each kind"
    ):
        report([other, tuned])
    with pytest.raises(InputError, match="no run folders given"):
        summary([])


def body(page: str) -> ET.Element:
    """The page as a tree: it is well formed once its void elements are closed."""
    start, end = page.index("<body>"), page.index("</body>") + len("</body>")
    text = page[start:end].replace(' checked=""', "")
    for void in ("input",):
        parts = text.split(f"<{void} ")
        text = parts[0] + "".join(f"<{void} {part.replace('>', '/>', 1)}" for part in parts[1:])
    return ET.fromstring(text)


def test_page_shows_every_figure(tmp_path: Path) -> None:
    out = report(two_arms(tmp_path / "runs", BASE, OTHER)).write(tmp_path / "report.html")
    page = out.read_text(encoding="utf-8")
    tree = body(page)
    text = " ".join("".join(tree.itertext()).split())
    for said in (
        "41.72 ± 1.12",
        "42.54 ± 0.46",
        "+0.82",
        "position_wise",
        "fullrank finetune",
        "Brown-Forsythe",
        "by F",
    ):
        assert said in text
    svg = tree.find(".//svg")
    assert svg is not None
    drawn = [part.tag for part in svg.iter() if part.get("class") == "slot-0"]
    assert (drawn.count("circle"), drawn.count("polyline")) == (5, 2), "dots; deviation and mean"
    assert "plain 41.72 ± 1.12, b 42.54 ± 0.46" in (svg.get("aria-label") or "")
    assert "<script" not in page
    assert "http" not in page.split("</style>")[1].replace("http://www.w3.org/2000/svg", "")


def test_equal_runs_give_equal_bytes(tmp_path: Path) -> None:
    folders = two_arms(tmp_path / "runs", BASE, OTHER)
    pages = [report(folders).write(tmp_path / f"{n}.html").read_bytes() for n in (1, 2)]
    assert pages[0] == pages[1]


def test_names_are_text_and_other_files_stay(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "<b>run", 0.4, row="<script>alert(1)</script>")
    page = report([folder]).write(tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<script" not in page
    assert "<b>run" not in page
    mine = tmp_path / "mine.html"
    mine.write_text("my notes", encoding="utf-8")
    with pytest.raises(InputError, match="left alone"):
        report([folder]).write(mine)


def test_one_run_and_unfinished_runs(tmp_path: Path) -> None:
    one = make_run(tmp_path / "one", 0.4)
    half = make_run(tmp_path / "half", None)
    page = report([one, half]).write(tmp_path).read_text(encoding="utf-8")
    assert "fullrank finetune" in page
    assert "half</code>" in page
    assert "±" not in page.split("</style>")[1]
    nothing = report([half]).write(tmp_path).read_text(encoding="utf-8")
    assert "No run has finished." in nothing
