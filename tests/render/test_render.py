"""Tables, figures and pages of records: numbers and labels stand where they belong."""

import math
import re

import pytest

from fullrank.core.errors import InputError
from fullrank.records import Column, HeatMap, Lines, Record, Table
from fullrank.render import blocks
from fullrank.render.blocks import Code, Details, Facts, Group, Legend, Page, Paragraph, Section, build_grid
from fullrank.render.figures import draw_plot, draw_svg, save_plots
from fullrank.render.page import build_figure, render_page, write_page

CURVES = [
    Record({"row": row, "seed": seed, "tokens": tokens}, "perplexity", tokens + seed, "perplexity")
    for row in ("plain", "b")
    for seed in (1, 3)
    for tokens in (10, 20)
]
CHANGES = [Record({"layer": i, "head": j}, "change", i - j) for i in range(3) for j in range(2)]


def test_grid_with_a_label_as_columns():
    grid = build_grid(Table(rows="layer", columns="head", format="+.1f"), CHANGES)
    assert [heading.text for heading in grid.headings] == ["layer", "head 0", "head 1"]
    assert [cell.text for cell in grid.rows[2]] == ["2", "+2.0", "+1.0"]


@pytest.mark.parametrize(("group", "line"), [("test bits/byte", ""), ("test", "bits per byte")])
def test_a_unit_that_the_group_names_is_not_said_again(group, line):
    grid = build_grid(
        Table("row", (Column("bits", group=group),)), [Record({"row": "a"}, "bits", 1.5, "bits per byte")]
    )
    assert grid.headings[-1].line == line


@pytest.mark.parametrize(("value", "spec", "text"), [
    (1234567, "", "1,234,567"), (0.123456, "", "0.1235"), (None, "", "-"), (-1.5, "+.1f", "−1.5"), (-0.5, "", "−0.5"),
    (2.6, ",d", "3"), (math.inf, ",d", "inf"), (-math.inf, "+.2f", "−inf"),
])  # fmt: skip
def test_values_as_text(value, spec, text):
    assert blocks.format_value(value, spec) == text


def test_lines_are_means_over_the_band():
    plot = Lines(x="tokens", series=("row",), band="seed")
    line = draw_plot(plot, CURVES).axes[0].lines[0]
    assert line.get_ydata().tolist() == [12.0, 22.0]


def test_lines_without_a_positive_value_have_no_logarithms():
    assert draw_plot(Lines("layer", "change", y_scale="log"), CHANGES[1:2]).axes[0].get_yscale() == "linear"


def test_lines_over_text_name_the_label():
    with pytest.raises(InputError, match="'row' of a record is 'plain'"):
        draw_plot(Lines(x="row", y="perplexity"), CURVES)


def test_heat_map_cells_stand_at_their_labels():
    figure = draw_plot(HeatMap("head", "layer", "change"), CHANGES)
    assert figure.axes[0].images[0].get_array().tolist() == [[0, -1], [1, 0], [2, 1]]


PLOTS = [
    Lines(x="tokens", series=("row",), band="seed", title="Curves", marks=(("y", "bound"),)),
    HeatMap("seed", "tokens", "perplexity", ("row",), title="Map"),
]


@pytest.mark.parametrize("plot", PLOTS, ids=lambda plot: type(plot).__name__)
def test_figures_are_equal_bytes_and_follow_the_theme(plot, tmp_path):
    paths = save_plots([plot], CURVES, tmp_path, "figure")
    before = [path.read_bytes() for path in paths]
    assert [path.read_bytes() for path in save_plots([plot], CURVES, tmp_path, "figure")] == before
    assert "var(--ink)" in draw_svg(plot, CURVES) or "var(--muted)" in draw_svg(plot, CURVES)


def make_page():
    grid = build_grid(Table("layer", columns="head"), CHANGES)
    content = [
        Paragraph("lead <b>"), Facts([("term", "text")]), grid, Legend([(0, "plain")]),
        Group([build_figure(PLOTS[0], CURVES)]), Code("fullrank train x", "b"), Details("more", [Paragraph("inside")]),
    ]  # fmt: skip
    return Page("title", "sub", "b is best", [Paragraph("words")], [Section("First part", content, badge="perhaps")])


def test_page_holds_every_block_and_loads_nothing(tmp_path):
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
