"""Seeds gathered into rows, rows compared, and their table on the terminal."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
from reporting_runs import CORPUS, SLICE, comparison, make_run, two_kinds
from rich.console import Console

from fullrank.config.recipe import load
from fullrank.reporting import Report, report
from fullrank.reporting.figures import PERPLEXITY


def test_seeds_are_gathered_into_mean_and_sample_deviation(tmp_path: Path) -> None:
    compared = comparison(two_kinds(tmp_path))
    assert [row.name for row in compared.rows] == ["plain", "b"]
    plain, b = compared.rows
    assert plain.stats(PERPLEXITY)["test"].mean == pytest.approx((120 + 122) / 2)
    assert plain.stats(PERPLEXITY)["test"].deviation == pytest.approx(math.sqrt(2))  # sqrt((1 + 1) / (2 - 1))
    assert b.stats(PERPLEXITY)["valid"].mean == pytest.approx(115.5)  # of perplexities, not exp of a mean loss
    assert b.stats(PERPLEXITY)["valid"].mean != pytest.approx(math.sqrt(114 * 117))
    assert b.stats(PERPLEXITY)["valid"].count == 2
    assert b.difference["test"] == pytest.approx(111.5 / 121 - 1)
    assert plain.difference == {}
    assert (plain.best, b.best) == ((), ("valid", "test"))
    assert (plain.extra_parameters, b.extra_parameters) == (0, 3456)
    assert b.paper["test"] == 28.67
    assert [run.name for run in compared.unfinished] == ["a-1"]


def test_runs_of_one_row_with_the_same_seed_are_no_spread(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, seed=1, test=test) for name, test in (("x", 100.0), ("y", 101.0))]
    rows = comparison(runs).rows
    assert [row.stats(PERPLEXITY)["test"].deviation for row in rows] == [None, None]
    assert len({row.name for row in rows}) == 2


def test_circumstances_make_no_other_row_but_settings_do(tmp_path: Path) -> None:
    first, second, third = (make_run(tmp_path / f"s{seed}", seed=seed) for seed in (1, 2, 3))
    _edit_config(second, "threads: null", "threads: 7")
    _edit_config(third, "hidden_size: 512", "hidden_size: 256")
    assert [len(row.runs) for row in comparison([first, second, third]).rows] == [2, 1]


def _edit_config(run: Path, old: str, new: str) -> None:
    text = (run / "config.yaml").read_text(encoding="utf-8")
    assert text.count(old) == 1
    (run / "config.yaml").write_text(text.replace(old, new), encoding="utf-8")


@pytest.mark.parametrize(
    "other",
    [
        SLICE,
        CORPUS | {"vocabulary": 9_999},
        CORPUS | {"tokens": {"train": 700_000, "valid": 40_000, "test": 40_999}},
        None,
    ],
    ids=["corpus", "vocabulary", "split", "not recorded"],
)
def test_other_texts_are_not_compared(tmp_path: Path, other: dict[str, object] | None) -> None:
    compared = comparison([make_run(tmp_path / "x"), make_run(tmp_path / "y", row="b", test=90.0, corpus=other)])
    assert not compared.comparable
    assert compared.rows[1].difference == {}
    assert [row.best for row in compared.rows] == [(), ()]


def test_a_shorter_training_split_alone_leaves_the_measurement_the_same(tmp_path: Path) -> None:
    other = CORPUS | {"tokens": CORPUS["tokens"] | {"train": 5}}  # type: ignore[operator]
    assert comparison([make_run(tmp_path / "x"), make_run(tmp_path / "y", row="b", corpus=other)]).comparable


def test_a_fingerprint_decides_where_both_record_one(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / mark, row=mark, corpus=CORPUS | {"fingerprint": mark}) for mark in "xy"]
    assert not comparison(runs).comparable
    assert comparison([runs[0], make_run(tmp_path / "z", row="z")]).comparable


def test_other_hashes_of_a_measured_split_are_another_text(tmp_path: Path) -> None:
    def run(name: str, **hashes: str) -> Path:
        return make_run(tmp_path / name, row=name, corpus=CORPUS | {"sha256": hashes})

    first = run("first", train="1", valid="2", test="3")
    assert comparison([first, run("train", train="9", valid="2", test="3")]).comparable
    assert not comparison([first, run("test", train="1", valid="2", test="9")]).comparable


def test_json_holds_everything_in_full_precision(tmp_path: Path) -> None:
    document = json.loads(json.dumps(report(two_kinds(tmp_path)).as_json()))
    assert document["comparable"] is True
    assert [row["name"] for row in document["rows"]] == ["plain", "b"]
    assert document["rows"][0]["perplexity"]["test"]["mean"] == 121.0
    assert document["rows"][1]["paper"] == {"extra_parameters": 3456, "valid": 29.65, "test": 28.67}
    assert [run["seed"] for run in document["rows"][1]["runs"]] == [1, 2]
    assert document["unfinished"][0]["folder"].endswith("a-1")


def test_the_terminal_shows_rows_paper_and_what_is_unfinished(tmp_path: Path) -> None:
    out = io.StringIO()
    report(two_kinds(tmp_path)).print(Console(file=out, width=140))
    text = out.getvalue()
    assert text.startswith(
        "b is best: test perplexity 111.50 ± 2.12, 7.9 % below plain (95 % interval −13.1 to −2.6 %)\n"
    )
    lines = [" ".join(line.split()) for line in text.splitlines()]
    place = lines.index("b 28.67 111.50 ± 2.12 29.65 115.50 ± 2.12 3,359,888 +3,456 8,654")
    assert lines[place + 1 : place + 3] == ["−7.9 % −8.0 %", "−13.1 to −2.6 % −18.1 to +2.2 %"]
    assert "Not finished" in text
    assert "a-1" in text


@pytest.mark.parametrize("width", [40, 80, 90, 200])
def test_no_width_cuts_a_name_or_a_figure(tmp_path: Path, width: int) -> None:
    out = io.StringIO()
    report(two_kinds(tmp_path)).print(Console(file=out, width=width))
    words = out.getvalue().split()
    for word in ("plain", "b", "3,359,888", "+3,456", "29.65", "115.50", "28.67", "111.50", "2.12", "8,654", "655.25"):
        assert word in words
    if width >= 80:
        assert max(len(line.rstrip()) for line in out.getvalue().splitlines()) <= width


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_terminal_breaks_no_line_and_keeps_the_figure_that_rows_are_judged_by(tmp_path: Path, width: int) -> None:
    out = io.StringIO()
    report(two_kinds(tmp_path)).print(Console(file=out, width=width, force_terminal=True, color_system=None))
    text = out.getvalue()
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    assert {"plain", "b", "28.67", "111.50"} <= set(text.split())
    assert ("tokens/s; the page has them." in " ".join(text.split())) is (width < 80)


def test_the_terminal_without_paper_has_no_paper_columns_and_takes_names_literally(tmp_path: Path) -> None:
    out = io.StringIO()
    report([make_run(tmp_path / "x", row="[bold]odd[/]")]).print(Console(file=out, width=140))
    shown, notes = out.getvalue().split("Notes of mixhead/table1-vanilla: ")
    assert "[bold]odd[/]" in shown
    assert "paper" not in shown
    assert load("mixhead/table1-vanilla").notes.startswith(" ".join(notes.splitlines()[:2]).removesuffix(" ..."))


@pytest.mark.parametrize("width", [60, 80, 140])
@pytest.mark.parametrize(
    "recipes", [["mixhead/table1-vanilla"], ["mos/table2"], [f"mixhead/table1-{one}" for one in ("vanilla", "baevski")]]
)
def test_notes_end_a_table_in_three_lines_at_most(tmp_path: Path, recipes: list[str], width: int) -> None:
    runs = [make_run(tmp_path / str(number), result={"recipe": recipe}) for number, recipe in enumerate(recipes)]
    out = io.StringIO()
    report(runs).print(Console(file=out, width=width))
    figures, notes = out.getvalue().split("Notes of ")
    assert "perplexity" in figures
    assert len(notes.splitlines()) <= 3
    assert "`fullrank recipes show" in notes


def test_rows_of_other_protocols_are_marked_everywhere(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / "plain", row="plain", result={"protocol": "blocks of 64"}),
        make_run(tmp_path / "xl", row="xl", result={"protocol": "memory of 640"}),
        make_run(tmp_path / "b", row="b", result={"protocol": "blocks of 64"}),
        make_run(tmp_path / "old", row="old", result={"protocol": None}),
    ]
    compared = comparison(runs)
    assert [compared.protocol_mark(row) for row in compared.rows] == ["[1]", "[2]", "[1]", "[3]"]
    assert [row["protocol"] for row in Report(compared).as_json()["rows"]][:2] == ["blocks of 64", "memory of 640"]
    out = io.StringIO()
    Report(compared).print(Console(file=out, width=200))
    for line in (
        "plain (protocol [1])",
        "xl (protocol [2])",
        "b (protocol [1])",
        "[2] memory of 640; [3] not recorded",
    ):
        assert line in out.getvalue()
    page = report(runs).write(tmp_path / "page.html").read_text(encoding="utf-8")
    for part in ("protocol [1]", "protocol [2]", "[1] blocks of 64; [2] memory of 640"):
        assert part in page


def test_rows_of_one_protocol_have_no_marks(tmp_path: Path) -> None:
    compared = comparison(two_kinds(tmp_path))
    assert [compared.protocol_mark(row) for row in compared.rows] == ["", ""]
    out = io.StringIO()
    Report(compared).print(Console(file=out, width=200))
    assert "[1]" not in out.getvalue()
