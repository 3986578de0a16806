"""The page: complete, self-contained, escaped, deterministic, small."""

from __future__ import annotations

import json
import os
import re
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
from reporting_runs import SLICE, make_run, two_kinds

from fullrank.core.errors import InputError, RunError
from fullrank.reporting import report

VOID = {"meta", "input", "br", "hr", "link", "img"}


class Page(HTMLParser):
    """Elements, ids and text of a page; fails on tags that do not close in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.cells: list[list[str]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.cells.append([])
        if tag in ("td", "th") and self.cells:
            self.cells[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data
        if self.cells and {"td", "th"} & set(self.open):
            self.cells[-1][-1] += data

    def tags(self, name: str) -> list[dict[str, str | None]]:
        return [attrs for tag, attrs in self.elements if tag == name]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    root = tmp_path_factory.mktemp("page")
    return Page(report(two_kinds(root)).write(root / "new" / "report.html", "A title").read_text(encoding="utf-8"))


def test_every_row_stands_in_the_table_with_its_figures(page: Page) -> None:
    b = next(cells for cells in page.cells if cells[:2] == ["b", "2"])
    assert b == [
        "b",
        "2",
        "28.67",  # the split that rows are judged by comes first: a phone shows no more
        "111.50 ± 2.12−7.9 %−13.1 to −2.6 %",
        "29.65",
        "115.50 ± 2.12−8.0 %−18.1 to +2.2 %",
        "3,359,888",
        "+3,456",
        "8,654",
        "142",
        "57 s",
    ]
    assert any(cells[:2] == ["plain", "2"] for cells in page.cells)
    assert any(cells[0] == "unigramsame vocabulary" and "655.25" in cells for cells in page.cells)


def test_rows_are_explained_by_their_mechanisms(page: Page) -> None:
    assert "plain multi-head attention and one softmax over the vocabulary" in page.text
    assert "Mixhead B: each query decides how heads exchange attention weights" in page.text


def test_a_pointer_on_a_figure_shows_its_value(page: Page, tmp_path: Path) -> None:
    """A title for every dot, and for points along the curves."""
    run = make_run(tmp_path / "x", row="x", test=111.5)
    text = report([run, make_run(tmp_path / "y", row="y", test=118)]).write(tmp_path).read_text(encoding="utf-8")
    assert "<title>x: 111.5</title></circle>" in text
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    last = [line for line in steps if line["split"] == "valid"][-1]
    assert f"<title>x: perplexity {last['ppl']:,.5g} at 512k training tokens</title></circle>" in text


def test_notes_and_cautions_stand_beside_the_figures(tmp_path: Path) -> None:
    text = report(two_kinds(tmp_path)).page()
    summary, comparison, curves = (text.index(f'id="{name}"') for name in ("summary", "comparison", "curves"))
    for words in ("the levels do not compare", "<code>train.orthogonality</code>"):
        assert words in text[comparison:curves]
        assert words not in text[summary:comparison]
    assert text[curves:].count("<polygon") >= 4, "a band for each of two rows, in two figures at least"


def test_spectra_are_drawn_where_they_were_measured(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / row, row=row) for row in ("x", "y")]
    assert "Spectra of attention weights were not measured" in report(runs).page()
    (runs[0] / "analysis").mkdir()
    spectrum = {"layers": [{"after": {"curves": [[0.75, 1.0]]}}]}
    (runs[0] / "analysis" / "spectrum.json").write_text(json.dumps(spectrum), encoding="utf-8")
    text = report(runs).page()
    assert "were not measured" not in text
    assert "Not measured: y." in text
    assert "<title>x: share of their sum 0.75 at 0.5 share of the singular values</title>" in text


def test_samples_of_rows_stand_below_one_another(tmp_path: Path) -> None:
    sample = {"prompt": "the <cat>", "text": "the <cat> sat", "tokens": 50, "temperature": 0.8, "seed": 1}
    first = make_run(tmp_path / "x", row="x", result={"sample": sample})
    second = make_run(tmp_path / "y", row="y", result={"sample": sample | {"text": "the <cat> ran"}})
    text = report([first, second, make_run(tmp_path / "z", row="z")]).page()
    assert text.count("<b>the &lt;cat&gt;</b>") == 2
    assert "</b> sat</dd>" in text
    assert "</b> ran</dd>" in text
    assert "50 tokens, temperature 0.8, seed 1" in text
    assert 'id="samples"' not in report([make_run(tmp_path / "w", row="w")]).page()


def test_single_runs_configuration_environment_and_commands_are_there(page: Page) -> None:
    singles = [cells for cells in page.cells if len(cells) == 12 and cells[0] in ("plain", "b")]
    assert [cells[1] for cells in singles] == ["1", "2", "1", "2"]
    assert ["model.attention.mix", "none", "position_wise", "position_independent"] in page.cells
    assert not any(cells[0] == "model.hidden_size" for cells in page.cells)  # the same everywhere
    for words in (
        "hidden_size: 512",
        "blocks of 64 tokens",
        "Some CPU",
        "0123abc",
        "fullrank train",
        "mixhead/table1-vanilla",
        "A title",
    ):
        assert words in page.text


def test_unfinished_runs_are_listed_with_the_reason(page: Page) -> None:
    assert "no result.json: the run has not finished" in page.text
    assert "reached step 400" in page.text


def test_figures_have_names_and_no_fixed_ink(page: Page) -> None:
    figures = [attrs for attrs in page.tags("svg") if attrs.get("class") == "figure"]
    assert len(figures) == 6  # dots, perplexity twice, loss, learning rate, speed
    assert all(attrs["role"] == "img" and attrs["aria-label"] for attrs in figures)
    drawn = [attrs for tag, attrs in page.elements if tag in ("polyline", "circle", "line", "text")]
    assert any(attrs.get("class") == "slot-1" for attrs in drawn), "the page's style has the colour of the place"
    assert not any({"style", "fill", "stroke"} & attrs.keys() for attrs in drawn)


def test_nothing_comes_from_elsewhere(page: Page) -> None:
    assert not {tag for tag, _ in page.elements} & {
        "script",
        "link",
        "img",
        "iframe",
        "image",
        "use",
        "base",
        "object",
        "embed",
    }
    targets = [
        value
        for _, attrs in page.elements
        for key, value in attrs.items()
        if key in ("href", "src", "xlink:href", "srcset")
    ]
    assert targets
    assert all(target and target.startswith("#") for target in targets)


def test_no_address_at_all(tmp_path: Path) -> None:
    text = report(two_kinds(tmp_path)).write(tmp_path / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"https?:|//[a-z]|@import|url\((?!#)", text)


def test_ids_are_unique_and_links_lead_somewhere(page: Page) -> None:
    ids = [attrs["id"] for _, attrs in page.elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert {(attrs["href"] or "")[1:] for attrs in page.tags("a")} <= set(ids)


def test_tables_have_captions_and_scoped_headers(page: Page) -> None:
    assert len(page.tags("table")) == len(page.tags("caption")) == 4
    assert all(attrs.get("scope") for attrs in page.tags("th"))
    assert page.tags("html") == [{"lang": "en"}]


def test_names_are_escaped_everywhere(tmp_path: Path) -> None:
    nasty = "<script>alert('1')</script>&\"x\x00 $x_1$ 日本"
    runs = [
        make_run(tmp_path / "x", row=nasty, result={"protocol": nasty, "recipe": nasty}),
        make_run(tmp_path / "y", row="b"),
    ]
    runs.append(make_run(tmp_path / "<img src=x>", row=nasty, finished=False))
    text = report(runs).write(tmp_path / "report.html", title=nasty).read_text(encoding="utf-8")
    page = Page(text)
    assert not page.tags("script")
    assert not page.tags("img")
    assert "\x00" not in text
    assert any(cells[0].startswith("<script>alert('1')</script>&\"x") for cells in page.cells)


def test_incomparable_runs_are_warned_of_and_slices_marked(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "x"), make_run(tmp_path / "y", row="b", corpus=SLICE)]
    page = Page(report(runs).write(tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "Not comparable." in page.text
    assert any(attrs.get("class") == "badge" and attrs.get("title") == SLICE["label"] for attrs in page.tags("span"))
    assert not any("best" in (attrs.get("class") or "") for attrs in page.tags("td"))


def test_two_calls_give_equal_bytes(tmp_path: Path) -> None:
    runs = two_kinds(tmp_path)
    first, second = (report(runs).write(tmp_path / name).read_bytes() for name in ("1.html", "2.html"))
    assert first == second


def test_a_folder_as_target_gets_a_report(tmp_path: Path) -> None:
    run = make_run(tmp_path / "x")
    assert report([run]).write(tmp_path) == tmp_path / "report.html"
    assert (tmp_path / "report.html").stat().st_size > 10_000


def test_long_runs_stay_small_and_quick(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / row, row=row, lines=5000, steps=20_000, test=test)
        for row, test in zip("abcd", (100.0, 99.0, 98.0, 97.0), strict=True)
    ]
    started = time.perf_counter()
    out = report(runs).write(tmp_path / "report.html")
    assert time.perf_counter() - started < 15  # about one second on an idle machine
    assert out.stat().st_size < 500_000
    assert "centred moving average over up to 51" in out.read_text(encoding="utf-8")


def test_a_run_with_nothing_but_a_result_and_one_with_nothing_but_a_configuration(tmp_path: Path) -> None:
    bare = make_run(tmp_path / "bare")
    for name in ("config.yaml", "metrics.jsonl", "timing.jsonl"):
        (bare / name).unlink()
    fresh = make_run(tmp_path / "fresh", finished=False)
    for name in ("metrics.jsonl", "timing.jsonl"):
        (fresh / name).unlink()
    page = Page(report([bare, fresh]).write(tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "config.yaml is missing" in page.text
    assert "no step is recorded yet" in page.text


def test_only_unfinished_runs_make_a_page(tmp_path: Path) -> None:
    page = Page(
        report([make_run(tmp_path / "x", finished=False)]).write(tmp_path / "report.html").read_text(encoding="utf-8")
    )
    assert "No run has finished yet" in page.text


def test_a_damaged_line_with_odd_values_does_not_stop_the_page(tmp_path: Path) -> None:
    run = make_run(tmp_path / "x")
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(
            '{"step": "x", "split": "valid", "ppl": 3}\n{"step": 401, "split": "valid", "ppl": NaN}\n'
            '{"step": 402, "split": "valid", "ppl": -1}\n{'
        )
    text = report([run]).write(tmp_path / "report.html").read_text(encoding="utf-8")
    assert "damaged in part" in text


def test_no_run_is_refused_and_an_unwritable_place_is_a_failed_run(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        report([tmp_path / "nowhere"]).write(tmp_path / "report.html")
    run = make_run(tmp_path / "x")
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot be written"):
        report([run]).write(tmp_path / "file" / "report.html")


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_pipe_or_a_device_is_no_report(kind: str, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    os.mkfifo(out) if kind == "pipe" else out.symlink_to("/dev/null")
    with pytest.raises(InputError, match=r"page\.html: exists and is not a report of fullrank.*--out"):
        report([make_run(tmp_path / "run")]).write(out)
    assert not out.is_file()


def test_only_a_report_is_replaced(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    out = tmp_path / "page.html"
    out.write_text("<!DOCTYPE html>\n<html><head><title>My thesis</title></head></html>\n", encoding="utf-8")
    before = out.read_bytes()
    with pytest.raises(InputError, match=r"page\.html: exists and is not a report of fullrank.*--out"):
        report([run]).write(out)
    assert out.read_bytes() == before
    out.write_bytes(b"")
    report([run]).write(out, "First")
    report([run]).write(out, "Second")
    assert "<title>Second</title>" in out.read_text(encoding="utf-8")


def test_a_run_without_one_of_its_final_figures_is_reported(tmp_path: Path) -> None:
    """A figure that was not finite is missing (or null) in result.json."""
    runs = [make_run(tmp_path / name) for name in ("a", "b", "c")]
    for run, wrong in zip(runs, ({"tokens": 5}, {"tokens": 5, "nll": None, "perplexity": None}, {}), strict=True):
        file = run / "result.json"
        result = json.loads(file.read_text(encoding="utf-8"))
        result["final"]["test"] = wrong
        file.write_text(json.dumps(result), encoding="utf-8")
    assert report(runs).write(tmp_path / "page.html").is_file()
