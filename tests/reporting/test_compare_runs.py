"""Two runs and more on the translations that they have kept."""

from __future__ import annotations

from pathlib import Path

import pytest
from reported_translations import hypotheses, make_translation_run, references
from reporting_runs import make_run

from fullrank.core.errors import InputError
from fullrank.evaluation.statistics import against_first, bootstrap_interval
from fullrank.evaluation.tasks import metric_named
from fullrank.reporting import compare_runs
from fullrank.reporting.compare import compare
from fullrank.reporting.resampled import translations
from fullrank.reporting.runs import read_run


def test_against_the_first_run(tmp_path: Path) -> None:
    folders = [
        make_translation_run(tmp_path / name, row=name, wrong=wrong)
        for name, wrong in (("x", 0.3), ("y", 0.2), ("z", 0.31))
    ]
    found = compare_runs(folders, samples=100, seed=5)
    lines = references("test")
    texts = [list(hypotheses("test", wrong, 1, lines)) for wrong in (0.3, 0.2, 0.31)]
    metric = metric_named("bleu")
    counts = [metric.statistics(text, lines) for text in texts]
    for place, one in enumerate(counts[1:]):
        (pair,) = against_first([[counts[0]], [one]], metric, samples=100, seed=5)
        del pair["seeds"]
        assert found["against_first"][place] == {
            "folder": str(folders[place + 1]), "first": str(folders[0]), **pair,
        }  # fmt: skip
    alone = bootstrap_interval(counts[1], metric, samples=100, seed=5)
    assert found["runs"][1] == {"folder": str(folders[1]), "name": "y", **alone}
    assert (found["split"], found["sentences"], found["samples"], found["metric"]) == ("test", 120, 100, "bleu")
    valid = compare_runs(folders[:2], "valid", samples=50, metric="chrf")
    assert (valid["sentences"], valid["metric"]) == (60, "chrf")


def test_case_as_in_the_signature(tmp_path: Path) -> None:
    folders = [make_translation_run(tmp_path / name, row=name, lowercase=True) for name in ("x", "y")]
    shouted, _ = translations(folders[1], "test")
    (folders[1] / "translations" / "test.txt").write_text("".join(f"{line.upper()}\n" for line in shouted))
    assert compare_runs(folders, samples=50)["against_first"][0]["difference"] == 0
    folders.append(make_translation_run(tmp_path / "z", row="z"))
    with pytest.raises(InputError, match="case"):
        compare_runs([folders[0], folders[2]])


def test_tokens_as_in_the_signature(tmp_path: Path) -> None:
    """Scores of other tokens do not compare: neither here, nor in a table or its resampled differences."""
    x, y, z = (
        make_translation_run(tmp_path / name, row=name, tokenize=tokens, wrong=wrong)
        for name, tokens, wrong in (("x", "char", 0.2), ("y", "char", 0.3), ("z", "13a", 0.3))
    )
    found = compare_runs([x, y], samples=50)
    assert found["tokenize"] == "char"
    assert found["runs"][0]["score"] == pytest.approx(read_run(x).get("final", "test", "bleu"))
    with pytest.raises(InputError, match=r"tok:13a.*tok:char"):
        compare_runs([x, z])
    pair, three = ([read_run(folder) for folder in folders] for folders in ((x, y), (x, y, z)))
    (only,) = compare(pair).differences[0].rows
    assert (only.row, only.score) == ("y", pytest.approx(pair[1].get("final", "test", "bleu")))
    compared = compare(three)
    assert [row.text for row in compared.rows] == [0, 0, 1]
    assert "signature" in " ".join(compared.differences[0].left_out)


def test_lines_end_where_files_say(tmp_path: Path) -> None:
    """Characters that Python's splitlines takes for ends of lines are none, and an empty translation is a line."""
    run = make_translation_run(tmp_path / "x")
    folder = run / "translations"
    (folder / "test.txt").write_text("one\u2028two\n\nthree\x0cfour\n", encoding="utf-8")
    (folder / "test.reference.txt").write_text("a\nb\nc\n", encoding="utf-8")
    assert translations(run, "test")[0] == ["one\u2028two", "", "three\x0cfour"]
    (folder / "test.txt").write_bytes(b"one\ntwo\nthree")
    assert translations(run, "test")[0] == ["one", "two", "three"]
    (folder / "test.txt").write_bytes(b"")
    with pytest.raises(InputError, match="0 hypotheses and 3 references"):
        translations(run, "test")
    (folder / "test.txt").write_bytes(b"\xff\n\n\n")
    with pytest.raises(InputError, match="not UTF-8"):
        translations(run, "test")


def test_what_cannot_be_compared(tmp_path: Path) -> None:
    x = make_translation_run(tmp_path / "x")
    with pytest.raises(InputError, match="at least two runs"):
        compare_runs([x])
    with pytest.raises(InputError, match=r"lm/translations/test\.txt: no such file"):
        compare_runs([x, make_run(tmp_path / "lm")])
    with pytest.raises(InputError, match="not a run folder"):
        compare_runs([x, tmp_path])
    with pytest.raises(InputError, match=r"there are valid\.reference\.txt, valid\.txt"):
        compare_runs([x, make_translation_run(tmp_path / "v", keep=("valid",))])
    other = make_translation_run(tmp_path / "o", lines={"test": references("test", 3)})
    with pytest.raises(InputError, match="not scored on the same test references"):
        compare_runs([x, other])
    (tmp_path / "v" / "translations" / "valid.txt").write_text("one line\n")
    with pytest.raises(InputError, match="1 hypotheses and 60 references"):
        compare_runs([x, tmp_path / "v"], "valid")


def test_files_that_change_are_read_again(tmp_path: Path) -> None:
    folders = [make_translation_run(tmp_path / name, row=name) for name in ("x", "y")]
    assert compare_runs(folders, samples=50)["against_first"][0]["difference"] == 0
    (folders[1] / "translations" / "test.txt").write_text("".join(f"{line}\n" for line in references("test")))
    assert compare_runs(folders, samples=50)["against_first"][0]["b"] == pytest.approx(100)
