"""Tables of bytes and characters are compared by bits, others by perplexity, everywhere by the same measure."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from reporting_runs import comparison, make_run, printed, spelling_run
from test_page import Page

from fullrank.reporting import drawing as curves
from fullrank.reporting import report
from fullrank.reporting.figures import (
    BITS_PER_BYTE,
    BITS_PER_CHARACTER,
    PERPLEXITY,
    choose,
    decimals_of,
    interval,
    points,
)
from fullrank.reporting.runs import RunRecord
from fullrank.reporting.summary import summarize

PHASES = {"skip_retain": 40.8, "vanilla": 22.9}
BITS = {"parameters": "41M", "context": 1600, "valid_bits_per_character": 1.060, "test_bits_per_character": 1.037}
KINDS = {"b": "byte", "c": "character", "p": "bpe", "w": "word"}


def bytes_table(root: Path) -> list[Path]:
    """Two rows with two seeds each, in bits per byte: test 1.10 and 1.20 against 1.00 and 1.04."""
    timed = {"ms_per_step": PHASES}
    return [
        spelling_run(root / "xl-1", row="xl", seed=1, valid=1.30, test=1.10, paper={"test_bits_per_character": 1.06}),
        spelling_run(root / "xl-2", row="xl", seed=2, valid=1.40, test=1.20, paper={"test_bits_per_character": 1.06}),
        spelling_run(root / "skip-1", row="skip", seed=1, valid=1.25, test=1.00, mix="average", paper=BITS, result=timed),
        spelling_run(root / "skip-2", row="skip", seed=2, valid=1.25, test=1.04, mix="average", paper=BITS, result=timed),
    ]  # fmt: skip


def record(
    kind: str, *, finished: bool = True, paper: Mapping[str, Any] | None = None, lacks: str | None = None
) -> RunRecord:
    """A run whose tokens are of this kind; models of words have no bits. `lacks`: a split of which bits are missing."""
    final: dict[str, dict[str, float]] = {
        split: {"perplexity": 4.0}
        | ({} if kind == "word" or split == lacks else {"bits_per_byte": 2.0, "bits_per_character": 2.5})
        for split in ("valid", "test")
    }
    result = {"final": final, "paper": paper, "corpus": {"details": {"settings": {"kind": kind}}}}
    return RunRecord(Path(kind), kind, {"data": {"tokens": kind}}, result=result if finished else None)


@pytest.mark.parametrize(
    ("kinds", "paper", "expected"),
    [
        ("b", None, BITS_PER_BYTE),
        ("bb", BITS, BITS_PER_BYTE),
        ("cc", None, BITS_PER_CHARACTER),
        ("c", BITS, BITS_PER_CHARACTER),
        ("bc", None, BITS_PER_BYTE),
        ("w", None, PERPLEXITY),
        ("bw", None, PERPLEXITY),
        ("p", None, PERPLEXITY),
        ("bp", None, PERPLEXITY),
        ("p", {"test": 20.5}, PERPLEXITY),
        ("p", BITS, BITS_PER_BYTE),
        ("p", {"valid_bits_per_byte": 1.2}, BITS_PER_BYTE),
        ("w", BITS, PERPLEXITY),  # a model of words has no bits
    ],
)
def test_the_measure_follows_the_tokens_and_the_paper(
    kinds: str, paper: dict[str, Any] | None, expected: object
) -> None:
    assert choose([record(KINDS[kind], paper=paper) for kind in kinds]) is expected


def test_perplexity_where_a_finished_run_lacks_bits_of_a_split() -> None:
    assert choose([record("byte"), record("byte", lacks="test")]) is PERPLEXITY
    assert choose([record("byte"), record("byte", finished=False)]) is BITS_PER_BYTE
    assert choose([]) is PERPLEXITY


def test_tokens_of_an_unfinished_run_are_read_from_its_vocabulary(tmp_path: Path) -> None:
    run = make_run(tmp_path / "x", finished=False)  # its configuration leaves the tokens to the corpus
    assert comparison([run]).measure is PERPLEXITY
    (run / "vocabulary.json").write_text('{"kind": "byte"}', encoding="utf-8")
    assert comparison([run]).measure is BITS_PER_BYTE


def test_the_finished_runs_decide(tmp_path: Path) -> None:
    going_on = make_run(tmp_path / "x", finished=False)
    (going_on / "vocabulary.json").write_text('{"kind": "word"}', encoding="utf-8")
    assert comparison([going_on, spelling_run(tmp_path / "y")]).measure is BITS_PER_BYTE
    assert comparison([going_on]).measure is PERPLEXITY


def test_means_spread_differences_and_best_are_those_of_bits(tmp_path: Path) -> None:
    compared = comparison(bytes_table(tmp_path))
    xl, skip = compared.rows
    assert compared.measure is BITS_PER_BYTE
    assert xl.figures["test"].mean == pytest.approx(1.15)
    assert xl.figures["test"].deviation == pytest.approx(0.05 * math.sqrt(2))  # of two values 0.1 apart
    assert skip.difference["test"] == pytest.approx(1.02 / 1.15 - 1)
    assert skip.best == ("valid", "test")
    assert xl.stats(PERPLEXITY)["test"].mean == pytest.approx((2**1.1 + 2**1.2) / 2)


@pytest.mark.parametrize(
    ("difference", "low", "high", "shown"),
    [
        (0.618, 0.12, 1.103, "+0.62 (+0.12 to +1.10)"),
        (0.004, 0.0011, 0.007, "+0.004 (+0.001 to +0.007)"),  # was 0.00 beside p = 0.001
        (0.0042, 0.0004, 0.007, "+0.0042 (+0.0004 to +0.0070)"),  # no end of a decided interval looks like 0
        (0.6, 0.002, 1.2, "+0.600 (+0.002 to +1.200)"),
        (0.003, -0.81, 0.79, "0.00 (−0.81 to +0.79)"),  # of an undecided one no more digits than it has
        (-0.0007, -0.0031, 0.0022, "−0.001 (−0.003 to +0.002)"),
        (0.0, 0.0, 0.0, "0.00 (0.00 to 0.00)"),
    ],
)
def test_a_difference_has_the_digits_of_its_interval(difference: float, low: float, high: float, shown: str) -> None:
    decimals = decimals_of(difference, low, high)
    assert f"{points(difference, decimals)} ({interval(low, high, decimals)})" == shown


def test_best_is_judged_by_the_digits_shown(tmp_path: Path) -> None:
    """Equal in two decimals of perplexity, different in three of bits."""
    runs = [
        spelling_run(tmp_path / name, row=name, test=bits, mix=mix)
        for name, bits, mix in (("a", 1.001, "none"), ("b", 1.0, "average"))
    ]
    compared = comparison(runs)
    assert round(2**1.001, 2) == round(2**1.0, 2)
    assert ["test" in row.best for row in compared.rows] == [False, True]
    assert (
        summarize(compared).headline == "b is lowest: test bits per byte 1.000, 0.10 % below a (one seed, no interval)"
    )


def test_unigram_bits_take_the_tokens_of_the_run(tmp_path: Path) -> None:
    """4.75 bits a token: as many a byte of bytes, a quarter where tokens have four bytes, half where characters are tokens."""
    [by_byte] = comparison([spelling_run(tmp_path / "b")]).rows
    [by_pair] = comparison([spelling_run(tmp_path / "p", kind="bpe", bytes_per_token=4.0, paper=BITS)]).rows
    [by_character] = comparison([spelling_run(tmp_path / "c", kind="character", bytes_per_token=2.0)]).rows
    assert by_byte.unigram["test"] == pytest.approx(4.75)
    assert by_pair.unigram["test"] == pytest.approx(4.75 / 4)
    assert by_character.unigram["test"] == pytest.approx(4.75)
    assert by_byte.unigram["valid"] == pytest.approx(4.5)


def test_the_terminal_sets_the_papers_bits_beside_ours(tmp_path: Path) -> None:
    text = printed(bytes_table(tmp_path))
    table = text[text.index(" model") : text.index("Notes of")]
    lines = {line.split()[0]: line.split() for line in table.splitlines() if line.strip()}
    assert lines["xl"][1:9] == ["1.06", "1.150", "±", "0.071", "–", "1.350", "±", "0.071"]
    assert lines["xl"][-2:] == ["first", "9,000"]
    assert lines["skip"][1:9] == ["1.037", "1.020", "±", "0.028", "1.06", "1.250", "±", "0.000"]
    assert lines["unigram"][1:] == ["4.750", "4.500"]
    assert "test bits/byte" in text
    assert text.startswith("skip is lowest, but other seeds might turn it round: test bits per byte 1.020 ± 0.028")
    assert "perplexit" not in text[: text.index("Notes of ")]


def test_characters_are_called_characters(tmp_path: Path) -> None:
    run = spelling_run(tmp_path / "c", kind="character", bytes_per_token=2.0, test=1.5)
    text = printed([run])
    assert "test bits/char" in text
    assert "plain: test bits per character 1.500" in text


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    root = tmp_path_factory.mktemp("bits")
    runs = [*bytes_table(root), make_run(root / "going-on", row="going-on", finished=False)]
    with (runs[-1] / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": 400, "split": "valid", "nll": 2.125 * math.log(2), "ppl": 2**2.125}) + "\n")
    return Page(report(runs).write(root / "report.html").read_text(encoding="utf-8"))


def test_the_page_speaks_of_bits_alone(page: Page) -> None:
    named = " ".join(value or "" for _, attrs in page.elements for key, value in attrs.items() if key == "aria-label")
    said = (page.text + named).replace("not_next_token_perplexity", "")  # a key of the configuration
    notes = said[said.index("Notes of ") : said.index("Single runs")]
    assert "perplexit" not in said.replace(notes, "").lower()
    for words in (
        "Lowest test bits per byte",
        "Unigram bits per byte",
        "Bits per byte: lower is better",
        "Final test bits per byte",
        "Validation bits per token",
        "unigram bits per byte (valid / test)4.500 / 4.750",
        "skip is lowest, but other seeds might turn it round: test bits per byte 1.020\u00a0±\u00a00.028",
        "where the corpus is bytes (enwik8), a character is a byte",
    ):
        assert words in page.text


def test_the_page_has_the_figures_and_the_time_of_each_phase(page: Page) -> None:
    xl = next(cells for cells in page.cells if cells[:2] == ["xl", "2"] and len(cells) == 11)
    skip = next(cells for cells in page.cells if cells[:2] == ["skip", "2"] and len(cells) == 11)
    assert xl[2:6] == ["1.06", "1.150 ± 0.071", "–", "1.350 ± 0.071"]
    assert xl[8:] == ["9,000", "142", "57 s"]
    assert skip[2:6] == ["1.037", "1.020 ± 0.028−11.3 %−44.5 to +21.8 %", "1.06", "1.250 ± 0.000−7.4 %−54.5 to +39.7 %"]
    assert skip[9] == "skip_retain 40.8vanilla 22.9"
    singles = [cells for cells in page.cells if len(cells) == 12 and cells[0] == "skip"]
    assert [cells[2:4] for cells in singles] == [["1.250", "1.000"], ["1.250", "1.040"]]
    assert {cells[8] for cells in singles} == {"skip_retain 40.8vanilla 22.9"}


def test_the_page_shows_what_else_the_paper_states(page: Page, tmp_path: Path) -> None:
    assert ["model", "parameters", "context"] in page.cells
    assert ["skip", "41M", "1,600"] in page.cells
    assert ["xl", "–", "–"] in page.cells
    run = make_run(tmp_path / "x", paper={"parameters": "156M", "extra_parameters": 0, "valid": 30.75, "test": 29.78})
    assert "What else the paper" not in report([run]).write(tmp_path / "report.html").read_text(encoding="utf-8")


def test_an_unfinished_run_is_told_in_bits_per_token(page: Page) -> None:
    assert "reached step 400; last validation bits per token 2.125" in page.text


def test_the_figures_of_the_page_are_drawn_in_bits(page: Page, tmp_path: Path) -> None:
    named = [str(attrs["aria-label"]) for attrs in page.tags("svg") if attrs.get("class") == "figure"]
    last = "xl 1.35, skip 1.25, going-on 2.125"
    assert f"Validation bits per token over training tokens. Last values: {last}." in named
    assert "Final test bits per byte: xl 1.150 ± 0.071, skip 1.020 ± 0.028." in named
    assert "logarithmic axis" not in page.text  # though the curves fall to a tenth
    drawn = report(bytes_table(tmp_path)).page().split("Final test bits per byte</b>")[1].split("</svg>")[0]
    ticks = [float(text) for text in re.findall(r">(\d\.\d+)</text>", drawn)]
    assert len(ticks) >= 2
    assert max(ticks) < 1.3  # the perplexities begin at 2


def test_curves_are_nats_over_the_logarithm_of_two() -> None:
    lines = [{"split": "train", "step": step, "nll": 9.0, "tokens": 100 * step} for step in (10, 20)]
    lines += [{"split": "valid", "step": step, "nll": step * math.log(2), "ppl": 2.0**step} for step in (10, 20)]
    run = RunRecord(Path("x"), "x", metrics=lines)
    bits, perplexity = (
        curves.validation(run, BITS_PER_BYTE.logged_figure),
        curves.validation(run, PERPLEXITY.logged_figure),
    )
    assert bits is not None
    assert perplexity is not None
    assert bits.y.tolist() == pytest.approx([10, 20])
    assert perplexity.y.tolist() == [2.0**10, 2.0**20]


def test_json_names_the_measure_and_keeps_perplexity(tmp_path: Path) -> None:
    document = json.loads(json.dumps(report(bytes_table(tmp_path)).as_json()))
    row = document["rows"][1]
    assert [row["measure"] for row in document["rows"]] == ["bits_per_byte"] * 2
    assert row[row["measure"]]["test"]["mean"] == pytest.approx(1.02)
    assert row["bits_per_character"]["test"]["mean"] == pytest.approx(2.04)
    assert row["perplexity"]["test"]["mean"] == pytest.approx((2**1.0 + 2**1.04) / 2)
    assert row["unigram_perplexity"]["test"] == pytest.approx(2**4.75)
    assert row["unigram_bits_per_byte"]["test"] == pytest.approx(4.75)
    assert [run["bits_per_byte"]["test"] for run in row["runs"]] == pytest.approx([1.0, 1.04])
    words = report([make_run(tmp_path / "w")]).as_json()
    assert words["rows"][0]["measure"] == "perplexity"
    assert "bits_per_byte" not in words["rows"][0]


def test_a_papers_perplexities_have_no_column_among_bits(tmp_path: Path) -> None:
    run = spelling_run(tmp_path / "x", paper={"valid": 30.75, "test": 29.78})
    text = printed([run])
    assert "29.78" not in text
    assert (
        "The paper's figures are perplexities, and these runs are compared by bits per byte: they are left out." in text
    )
    words = make_run(tmp_path / "w", paper=BITS)
    assert "The paper's figures are bits per character, and these runs are compared by perplexity" in printed([words])


def test_bits_of_other_texts_are_not_compared(tmp_path: Path) -> None:
    runs = [spelling_run(tmp_path / kind, row=kind, kind=kind) for kind in ("byte", "character")]
    summary = summarize(comparison(runs))
    assert summary.warnings[0].startswith("Bits per byte of these runs cannot be compared.")
    assert "text of bytes: byte reaches test bits per byte of 1.400." in " ".join(summary.paragraphs)
