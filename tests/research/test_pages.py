"""Pages made from a ledger: those of this repository are up to date, and a made-up one is told in full."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_rows import RECIPE, make_row, make_rows

from fullrank.core.errors import InputError
from research import RESULTS
from research.ledger import write_ledger
from research.markdown import prose, show_difference, show_duration, show_seeds
from research.pages import make_pages, rows_at, write_pages

CURVE = {"curve": [[10, 400.0], [20, 100.0]], "settings": {"train.learning_rate": 0.5}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "claims").mkdir()
    (tmp_path / "claims" / "mixhead.yaml").write_text(
        "paper: Mixhead\nclaims:\n"
        f"  - {{table: Table 1, claim: b is better, recipe: {RECIPE}, rates: stated, better: {{row: b}}}}\n"
        "  - {table: Table 2, claim: large, why: no machine}\n"
    )
    write_ledger(tmp_path / "ledger.csv", make_rows([100, 110, 120], [90, 99, 111]))
    write_pages(tmp_path, tmp_path)
    return tmp_path


def test_the_pages_of_this_repository_are_what_its_ledger_says() -> None:
    write_pages(RESULTS, check=True)


def test_a_page_says_what_the_ledger_says(folder: Path) -> None:
    page = (folder / "mixhead.md").read_text()
    assert "**supported here** | −10.00 [−12.48 to −7.52] |" in page
    assert "`plain`: 110 ± 10 (100, 110, 120), 600,000 tokens; seeds 1–3" in page
    assert "test perplexity 100 ± 10.54 [1] | 1,000 | 600,000 | 1 min 00 s | abc |" in page
    assert "**not testable here**: no machine" in page
    assert "| [Mixhead](mixhead.md) | 1 | 0 | 0 | 0 | 0 | 1 | 6 |" in (folder / "README.md").read_text()


def test_a_changed_ledger_changes_the_pages(folder: Path) -> None:
    write_ledger(folder / "ledger.csv", make_rows([100, 110, 120], [90, 99]))
    with pytest.raises(InputError, match=r"mixhead\.md, leaderboard\.md, README\.md: not what the ledger"):
        write_pages(folder, folder, check=True)
    assert write_pages(folder, folder) == ["mixhead.md", "leaderboard.md", "README.md"]
    assert "**open**: fewer than 3 seeds" in (folder / "mixhead.md").read_text()


def test_a_leaderboard_has_the_best_first_with_curve_and_command(folder: Path) -> None:
    rows = make_rows([100, 110, 120], [90, 99, 111], **CURVE)
    taught = make_row("plain", 1, 200.0, teacher="b", settings={"train.distill.weight": 0.5})
    hidden, alone = make_row("leaks", 1, 2.0, next_token="no"), make_row("alone", 1, 3.0, corpus="another")
    write_ledger(folder / "ledger.csv", [*rows, taught, hidden, alone])
    pages = make_pages(folder / "ledger.csv", folder)
    lines = [line for line in pages["leaderboard.md"].splitlines() if line.startswith("| ") and "table1" in line]
    assert [line.split(" | ")[1] for line in lines] == ["100.0 ± 10.5", "110.0 ± 10.0", "200.0"]
    assert "--rows b --scale small --seeds 1,2,3 train.learning_rate=0.5` |" in lines[0]
    assert "--seeds 1 train.distill.weight=0.5 train.distill.run=TEACHER`" in lines[2]
    curve = pages[f"curves/{rows[3]['run']}.svg"]
    assert curve.count('points="60.0,3.0 117.0,29.0"') == 3  # steps to the right, perplexity upwards


def test_tables_of_benchmarks_follow_their_paths() -> None:
    rows = [
        {"shape": "short", "against": [{"peer": "x", "time": {"middle": 0.5}}, {"peer": "y", "time": {"middle": 2.0}}]},
        {"shape": "long", "against": [{"peer": "y"}]},
    ]
    found = list(rows_at(["rows", "*", "against", "*"], {"rows": rows}, {}))
    assert [(row["shape"], row["peer"], row.get("time.middle")) for row in found] == [
        ("short", "x", 0.5), ("short", "y", 2.0), ("long", "y", None),
    ]  # fmt: skip
    (row,) = rows_at(["same", "<file>"], {"same": {"a": True}}, {})
    assert (row["file"], row["value"]) == ("a", True)


def test_numbers_for_readers() -> None:
    assert show_difference(-10.0, (-12.483, -7.517)) == "−10.00 [−12.48 to −7.52]"
    assert show_difference(0.0004, (0.0001, 0.0007), " %") == "+0.0004 % [+0.0001 to +0.0007]"
    assert show_seeds([3, 1, 2, 7]) == "1–3, 7"
    assert [show_duration(seconds) for seconds in (4.0, 48, 723, 7500)] == [
        "4.0 s",
        "48 s",
        "12 min 03 s",
        "2 h 05 min",
    ]
    assert prose("every <eos> and `a < b` and <b>") == "every `<eos>` and `a < b` and &lt;b>"
