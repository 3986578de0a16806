"""`make fuzz` tells a refusal from a bug."""

from __future__ import annotations

import pytest

from research.fuzz import Case, judge

REFUSED = "fullrank: model.hidden_size: a positive whole number below 2,147,483,648, given -1\n"
FIGURE = '{"split": "test", "nll": %s}\n'


@pytest.mark.parametrize(
    ("code", "out", "err", "metrics", "ending"),
    [
        (0, "", "", FIGURE % 2.5, "well"),
        (2, "", REFUSED, "", "refused"),
        (1, "", "fullrank: out of memory: lower --batch-size\n", "", "memory"),
        (1, "", "libgomp: Thread creation failed: Resource temporarily unavailable\n", "", "memory"),
        (2, '{\n  "valid": false,\n  "problems": []\n}\n', "", "", "refused"),
        (0, "", "", FIGURE % "null", "nll"),
        (0, "", "", FIGURE % "NaN", "nll"),
        (1, "", "Traceback (most recent call last):\n", "", "a traceback"),
        (1, "", "fullrank: KeyError: 'x' (--debug shows where)\n", "", "without a message of its own"),
        (2, "", "", "", "exit status 2 without a message"),
        (-11, "", "", "", "SIGSEGV"),
        (0, "", "UserWarning: again\n" * 9, "", "flood"),
        (2, "", REFUSED * 500, "", "flood"),
        (0, "nll 1", "", "", "without a word"),
        (0, "nll 1", "fullrank: checkpoint damaged; the one of step 4 is used\n", "", "well"),
    ],
)
def test_verdicts(tmp_path, code, out, err, metrics, ending):
    folder = tmp_path / "1"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(metrics)
    for stream, text in (("out", out), ("err", err)):
        (tmp_path / f"1.{stream}").write_text(text)
    case = Case("file:1", folder, ["eval", "run"], expected=("nll 2", "") if out.startswith("nll") else None)
    found, why = judge(case, code, was_stopped=False, trains=True)
    assert ending in (why if found == "bug" else found)
