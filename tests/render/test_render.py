"""Tables, figures and pages of records: numbers and labels stand where they belong."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from fullrank.core.errors import InputError
from fullrank.records import Column, HeatMap, Lines, Plot, Record, Table
from fullrank.render.blocks import Code, Details, Facts, Group, Legend, Page, Paragraph, Section
from fullrank.render.figures import draw_svg, save_plots
from fullrank.render.page import build_figure, render_page, write_page
from fullrank.render.plots import draw_plot
from fullrank.render.tables import build_grid, format_value
from fullrank.render.terminal import print_grid, print_page

CURVES = [
    Record({"row": row, "seed": seed, "tokens": tokens}, "perplexity", tokens + seed, "perplexity")
    for row in ("plain", "b")
    for seed in (1, 3)
    for tokens in (10, 20)
]
CHANGES = [Record({"layer": i, "head": j}, "change", i - j) for i in range(3) for j in range(2)]


def texts_of(grid):
    return [[cell.text for cell in row] for row in grid.rows]


def test_grid_has_a_line_for_each_row_and_a_column_for_each_measure():
    records = [Record({"position": i}, measure, value) for i in (0, 1) for measure, value in (("a", 1.5), ("b", i))]
    grid = build_grid(Table(rows="position"), records)
    assert [heading.text for heading in grid.headings] == ["position", "a", "b"]
    assert texts_of(grid) == [["0", "1.500", "0"], ["1", "1.500", "1"]]


def test_grid_with_a_label_as_columns():
    grid = build_grid(Table(rows="layer", columns="head", format="+.1f"), CHANGES)
    assert [heading.text for heading in grid.headings] == ["layer", "head 0", "head 1"]
    assert texts_of(grid)[2] == ["2", "+2.0", "+1.0"]


def test_a_column_chooses_by_labels_and_shows_deviation_interval_and_the_best():
    records = [
        Record({"row": "plain", "split": "test"}, "ppl", 10.0),
        Record({"row": "b", "split": "test"}, "ppl", 9.0, interval=(8.5, 9.5), note="a remark"),
        Record({"row": "b", "split": "test"}, "deviation", 0.25),
        Record({"row": "b", "split": "valid"}, "ppl", 1.0),
    ]
    column = Column("ppl", "test", {"split": "test"}, ".2f", "deviation", "lowest")
    grid = build_grid(Table("row", (column,)), records)
    plain, b = (row[1] for row in grid.rows)
    assert (plain.text, plain.strong) == ("10.00", False)
    assert (b.text, b.lines, b.strong) == ("9.00 ± 0.25", ("[8.50, 9.50]",), True)
    assert grid.notes == ["a remark"]


def test_models_and_steps_tell_lines_apart_where_there_are_several():
    records = [Record({"model": model, "layer": 0}, "rank", 1.0) for model in ("x", "y")]
    assert texts_of(build_grid(Table("layer"), records)) == [["x", "0", "1"], ["y", "0", "1"]]
    assert texts_of(build_grid(Table("layer"), records[:1])) == [["0", "1"]]


@pytest.mark.parametrize(
    ("value", "spec", "text"),
    [(1234567, "", "1,234,567"), (0.123456, "", "0.1235"), (None, "", "-"), (-1.5, "+.1f", "−1.5"), (2.6, ",d", "3")],
)
def test_values_as_text(value, spec, text):
    assert format_value(value, spec) == text


def test_lines_are_means_over_the_band_and_points_show_their_values():
    plot = Lines(x="tokens", series=("row",), band="seed")
    line = draw_plot(plot, CURVES).axes[0].lines[0]
    assert line.get_ydata().tolist() == [12.0, 22.0]
    titles = re.findall("<g><title>([^<]*)</title>", draw_svg(plot, CURVES))
    assert titles == ["plain 10: 12", "plain 20: 22", "b 10: 12", "b 20: 22"]


def test_heat_map_cells_stand_at_their_labels():
    figure = draw_plot(HeatMap("head", "layer", "change"), CHANGES)
    assert figure.axes[0].images[0].get_array().tolist() == [[0, -1], [1, 0], [2, 1]]


PLOTS: list[Plot] = [
    Lines(x="tokens", series=("row",), band="seed", title="Curves", marks=(("y", "bound"),)),
    HeatMap("seed", "tokens", "perplexity", ("row",), title="Map"),
]


@pytest.mark.parametrize("plot", PLOTS, ids=lambda plot: type(plot).__name__)
def test_figures_are_equal_bytes_and_follow_the_theme(plot: Plot, tmp_path: Path):
    paths = save_plots([plot], CURVES, tmp_path, "figure")
    before = [path.read_bytes() for path in paths]
    assert [path.read_bytes() for path in save_plots([plot], CURVES, tmp_path, "figure")] == before
    assert "var(--ink)" in draw_svg(plot, CURVES) or "var(--muted)" in draw_svg(plot, CURVES)


def make_page() -> Page:
    grid = build_grid(Table("layer", columns="head"), CHANGES)
    blocks = [
        Paragraph("lead <b>"), Facts([("term", "text")]), grid, Legend([(0, "plain")]),
        Group([build_figure(PLOTS[0], CURVES)]), Code("fullrank train x", "b"), Details("more", [Paragraph("inside")]),
    ]  # fmt: skip
    return Page("title", "sub", "b is best", [Paragraph("words")], [Section("First part", blocks, badge="perhaps")])


def test_page_holds_every_block_and_loads_nothing(tmp_path: Path):
    path = write_page(make_page(), tmp_path)
    html = path.read_text()
    assert path.name == "report.html"
    assert html == render_page(make_page())
    for text in ("lead &lt;b&gt;", "perhaps", "fullrank train x", 'href="#first-part"', "inside", "<svg"):
        assert text in html
    assert not re.search(r'(?:src|href)="(?!#)', html)
    (tmp_path / "report.html").write_text("mine")
    with pytest.raises(InputError):
        write_page(make_page(), tmp_path)


def test_terminal_prints_the_same_blocks_and_leaves_out_columns_that_do_not_fit():
    console = Console(file=io.StringIO(), width=100)
    print_page(make_page(), console)
    printed = console.file.getvalue()
    assert all(text in printed for text in ("b is best", "lead <b>", "term: text", "head 1", "fullrank train x"))
    narrow = Console(file=io.StringIO(), width=20, force_terminal=True, color_system=None)
    print_grid(build_grid(Table("layer", columns="head", format=".6f"), CHANGES), narrow)
    printed = " ".join(narrow.file.getvalue().split())
    assert "head 0" in printed
    assert "Left out in 20 columns: head 1" in printed
