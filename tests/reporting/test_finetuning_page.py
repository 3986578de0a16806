"""The page of runs of fine-tuning."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from finetuned_runs import make_run, two_arms

from fullrank.core.errors import InputError
from fullrank.reporting import write_report
from fullrank.reporting.finetuning import summary, write_page
from fullrank.reporting.finetuning.figure import swarm

BASE, OTHER = [0.412, 0.430, 0.401, 0.424, 0.419], [0.425, 0.429, 0.422, 0.431, 0.420]


def body(page: str) -> ET.Element:
    """The page as a tree: it is well formed once its void elements are closed."""
    start, end = page.index("<body>"), page.index("</body>") + len("</body>")
    text = page[start:end].replace(' checked=""', "")
    for void in ("input",):
        parts = text.split(f"<{void} ")
        text = parts[0] + "".join(f"<{void} {part.replace('>', '/>', 1)}" for part in parts[1:])
    return ET.fromstring(text)


def test_page_shows_every_figure(tmp_path: Path) -> None:
    out = write_page(summary(two_arms(tmp_path / "runs", BASE, OTHER)), tmp_path / "report.html")
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
    dots = [part for part in svg.iter() if (part.get("class") or "").startswith("slot-") and part.tag == "g"]
    assert len([part for part in dots if part.get("class") == "slot-0"]) == 5 + 2  # dots, deviation, mean
    assert "plain 41.72 ± 1.12, b 42.54 ± 0.46" in (svg.get("aria-label") or "")
    assert "<script" not in page
    assert "http" not in page.split("</style>")[1].replace("http://www.w3.org/2000/svg", "")


def test_equal_runs_give_equal_bytes(tmp_path: Path) -> None:
    folders = two_arms(tmp_path / "runs", BASE, OTHER)
    pages = [write_report(folders, tmp_path / f"{n}.html").read_bytes() for n in (1, 2)]
    assert pages[0] == pages[1]


def test_names_are_text_and_other_files_stay(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "<b>run", 0.4, row="<script>alert(1)</script>")
    page = write_page(summary([folder]), tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<script" not in page
    assert "<b>run" not in page
    mine = tmp_path / "mine.html"
    mine.write_text("my notes", encoding="utf-8")
    with pytest.raises(InputError, match="left alone"):
        write_page(summary([folder]), mine)


def test_one_run_and_unfinished_runs(tmp_path: Path) -> None:
    one = make_run(tmp_path / "one", 0.4)
    half = make_run(tmp_path / "half", None)
    page = write_page(summary([one, half]), tmp_path).read_text(encoding="utf-8")
    assert "fullrank finetune" in page
    assert "half</code>" in page
    assert "±" not in page.split("</style>")[1]
    nothing = write_page(summary([half]), tmp_path).read_text(encoding="utf-8")
    assert "No run has finished." in nothing


def test_dots_of_a_lane_do_not_meet() -> None:
    places = [float(x) for x in (0, 1, 2, 3, 30, 31, 100, 0, 0, 50)]
    lanes = swarm(places, 8)
    assert lanes[6] == lanes[9] == 0  # alone: in the middle
    for i in range(len(places)):
        for j in range(i):
            assert lanes[i] != lanes[j] or abs(places[i] - places[j]) >= 8
    assert set(lanes) == {0, 1, -1, 2, -2, 3}  # six dots between 0 and 3
