"""The page of a report: every figure and section stands in it, it loads nothing, and the terminal shows the same."""

import json
import re

import pytest
from made_runs import CORPUS, ENVIRONMENT, make_pairs_of_seeds, make_run, print_report

from fullrank.comparison.compare import build_report
from fullrank.comparison.page import build_page
from fullrank.records import Lines, Record, Table, declaration_to_dict
from fullrank.render.blocks import Facts, Figure, Grid, Legend
from fullrank.render.page import write_page


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    runs = make_pairs_of_seeds(tmp_path_factory.mktemp("runs"))
    for run, rank in zip(runs[:4], (2.5, 2.75, 3.5, 3.75), strict=True):
        records = [Record({"layer": layer}, "effective rank", rank + layer).to_dict() for layer in (0, 1)]
        analysis = {
            "measurement": "spectrum", "text": "test text", "segment_length": 64, "records": records,
            "tables": [declaration_to_dict(Table("layer", format=".2f"))],
            "plots": [declaration_to_dict(Lines("layer", title="Effective rank of layers"))],
        }  # fmt: skip
        (run / "analysis").mkdir()
        (run / "analysis" / "spectrum.json").write_text(json.dumps(analysis))
    analysis |= {"measurement": "words", "records": [Record({"layer": "a"}, "length", 1.0).to_dict()]}
    (run / "analysis" / "words.json").write_text(json.dumps(analysis))
    return runs


@pytest.fixture(scope="module")
def page(runs, tmp_path_factory):
    path = write_page(build_page(build_report(runs), "A title of <mine>"), tmp_path_factory.mktemp("page"))
    assert path.name == "report.html"
    return path.read_text(encoding="utf-8")


def test_every_section_and_figure_is_there(page):
    sections = re.findall(r'<section id="([^"]+)"', page)
    assert sections == ["summary", "comparison", "curves", "analyses", "settings", "unfinished"]
    for figure in (
        "111.50 ± 2.12", "−7.85%", "[−13.10%, −2.60%]", "28.67", "3,359,888", "+3,456", "655.25", "A title of &lt;mine&gt;",
        "mix: position_wise", "fullrank train", "plain, seed 2", "4.75",
        "Effective rank of layers", "reached step 400", "Some CPU", "train 700,000, valid 40,000",
        "words cannot be shown: Lines: x is",
    ):  # fmt: skip
        assert figure in page.replace("\N{NO-BREAK SPACE}", " "), figure
    titles = re.findall(r"<figcaption><b>([^<]+)</b>", page)
    assert {"Validation perplexity", "Training loss", "Learning rate", "Speed"} <= {*titles}
    assert not re.search(r'(?:src|href)="(?!#)', page)
    assert "<script" not in page


def test_a_badge_stands_in_the_first_table_alone(tmp_path):
    run = make_run(tmp_path / "run", corpus={**CORPUS, "is_slice": True})
    grids = [block for block in build_page(build_report([run])).sections[0].blocks if isinstance(block, Grid)]
    assert [grid.rows[0][0].badge for grid in grids] == ["slice", ""]


def test_rows_have_the_colours_of_their_curves_in_analyses(runs):
    sections = {section.title: list(section.blocks) for section in build_page(build_report(runs)).sections}
    colours = {}
    for title in ("Curves", "Analyses"):
        (legend,) = [block for block in sections[title] if isinstance(block, Legend)]
        colours[title] = {name.partition(",")[0]: slot for slot, name in legend.names}
    assert colours["Analyses"].items() <= colours["Curves"].items()
    (figure,) = [block for block in sections["Analyses"] if isinstance(block, Figure)]
    for slot in colours["Analyses"].values():
        assert f"var(--series-{slot})" in figure.svg


def test_an_engine_that_was_not_recorded_is_no_difference(tmp_path):
    environments = [ENVIRONMENT | {"engines": engines} for engines in ([], ["native"])]
    runs = [make_run(tmp_path / str(i), seed=i, row=f"r{i}", environment=e) for i, e in enumerate(environments)]
    (settings,) = [section for section in build_page(build_report(runs)).sections if section.title == "Settings"]
    (facts,) = [block for block in settings.blocks if isinstance(block, Facts)]
    assert ("environment.engines", "native") in facts.items


def test_many_figures_of_a_split_have_a_table_of_their_own(tmp_path):
    """A model of Hugging Face trained on a text: two measures, before and after. Such a table fits a page."""
    corpus = CORPUS | {"details": {"settings": {"kind": "pretrained"}}}
    final = {split: {"perplexity": 20.0, "bits_per_byte": 1.2} for split in ("valid", "test")}
    run = make_run(tmp_path / "run", corpus=corpus, final=final, before=final)
    section = build_page(build_report([run])).sections[0]
    groups = [block.groups for block in section.blocks if isinstance(block, Grid)]
    expected = [["test ppl", "test bits/byte"], ["valid ppl", "valid bits/byte"], ["parameters"]]
    for group, names in zip(groups[:3], expected, strict=True):
        assert [name for name, _ in group if name] == names


def test_a_name_is_no_markup(tmp_path):
    text = print_report([make_run(tmp_path / "x", row="[bold]odd[/]")])
    assert "[bold]odd[/]" in text
