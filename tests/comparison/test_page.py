"""The page of a report: every figure and section stands in it, it loads nothing, and the terminal shows the same."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from made_runs import make_pairs_of_seeds, make_run, make_translation_table, print_report

from fullrank.comparison.compare import build_report
from fullrank.comparison.page import build_page, report_to_dict
from fullrank.core.errors import InputError
from fullrank.records import Lines, Record, Table, declaration_to_dict
from fullrank.render.page import write_page


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    runs = make_pairs_of_seeds(tmp_path_factory.mktemp("runs"))
    sample = {"prompt": "if", "text": "if <the> end", "tokens": 3, "temperature": 0.8, "seed": 1}
    for run, rank in zip(runs[:4], (2.5, 2.75, 3.5, 3.75), strict=True):
        result = json.loads((run / "result.json").read_text())
        (run / "result.json").write_text(json.dumps(result | {"sample": sample}))
        records = [Record({"layer": layer}, "effective rank", rank + layer).to_dict() for layer in (0, 1)]
        analysis = {
            "measurement": "spectrum", "text": "test text", "segment_length": 64, "records": records,
            "tables": [declaration_to_dict(Table("layer", format=".2f"))],
            "plots": [declaration_to_dict(Lines("layer", title="Effective rank of layers"))],
        }  # fmt: skip
        (run / "analysis").mkdir()
        (run / "analysis" / "spectrum.json").write_text(json.dumps(analysis))
    return runs


@pytest.fixture(scope="module")
def page(runs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    path = write_page(build_page(build_report(runs), "A title of <mine>"), tmp_path_factory.mktemp("page"))
    assert path.name == "report.html"
    return path.read_text(encoding="utf-8")


def test_every_section_and_figure_is_there(page: str) -> None:
    sections = re.findall(r'<section id="([^"]+)"', page)
    assert sections == [
        "summary", "comparison", "curves", "analyses", "samples", "parameters", "settings", "unfinished",
    ]  # fmt: skip
    for figure in (
        "111.50 ± 2.12", "−7.85%", "[−13.10%, −2.60%]", "28.67", "3,359,888", "+3,456", "655.25", "A title of &lt;mine&gt;",
        "if &lt;the&gt; end", "mix: position_wise", "Some CPU", "fullrank train", "plain, seed 2", "4.75",
        "Effective rank of layers", "reached step 400", "train 700,000, valid 40,000, test 41,000",
    ):  # fmt: skip
        assert figure in page.replace("\N{NO-BREAK SPACE}", " "), figure
    titles = re.findall(r"<figcaption><b>([^<]+)</b>", page)
    assert {"Validation perplexity", "Training loss", "Learning rate", "Speed"} <= {*titles}
    assert not re.search(r'(?:src|href)="(?!#)', page)
    assert "<script" not in page


def test_equal_runs_give_equal_bytes_and_another_file_stays(runs: list[Path], page: str, tmp_path: Path) -> None:
    again = write_page(build_page(build_report(runs), "A title of <mine>"), tmp_path / "x.html")
    assert again.read_text(encoding="utf-8") == page
    (tmp_path / "letter.html").write_text("dear")
    with pytest.raises(InputError):
        write_page(build_page(build_report(runs[:1])), tmp_path / "letter.html")


def test_json_has_every_number_once_and_is_plain(runs: list[Path]) -> None:
    document = json.loads(json.dumps(report_to_dict(build_report(runs)), allow_nan=False))
    assert list(document) == ["headline", "records", "runs", "unfinished", "warnings", "notes"]
    keys = [(record["measure"], *sorted(map(str, record["labels"].items()))) for record in document["records"]]
    assert len(keys) == len(set(keys))
    assert [(run["row"], run["seed"]) for run in document["runs"]] == [("plain", 1), ("plain", 2), ("b", 1), ("b", 2)]
    assert document["runs"][2]["paper"] == {"extra_parameters": 3456, "valid": 29.65, "test": 28.67}
    assert document["unfinished"][0]["folder"].endswith("a-1")
    assert list(document["notes"]) == ["mixhead/table1-vanilla"]


@pytest.mark.parametrize("width", [60, 200])
def test_no_width_cuts_a_name_or_a_figure(runs: list[Path], width: int) -> None:
    words = print_report(runs, width).split()
    for word in ("plain", "b", "3,359,888", "+3,456", "29.65", "115.50", "28.67", "111.50", "2.12", "8,654", "Notes"):
        assert word in words


def test_control_characters_of_a_name_reach_no_terminal(tmp_path: Path) -> None:
    text = print_report([make_run(tmp_path / "x", row="[bold]odd[/]\x1b[31m")])
    assert "[bold]odd[/]" in text
    assert "\x1b" not in text


def test_translations_have_curves(tmp_path: Path) -> None:
    runs = make_translation_table(tmp_path)
    page = write_page(build_page(build_report(runs)), tmp_path / "page.html").read_text(encoding="utf-8")
    titles = re.findall(r"<figcaption><b>([^<]+)</b>", page)
    assert {"Validation BLEU", "Validation loss"} <= {*titles}
