"""`make faults` tells a run that may go on from one that lost something."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from research import faults

SAVED = "fullrank: stopped by SIGTERM after step 12; the run goes on from there"


@pytest.mark.parametrize(
    ("code", "output", "sent", "before", "after", "goes_on"),
    [
        (0, "", 0, 4, 8, True),
        (-9, "", 9, 4, 8, True),
        (-9, "", 9, 8, 4, False),  # a checkpoint is gone
        (1, "", 0, 4, 4, False),
        (1, "Traceback (most recent call last)", 15, 4, 8, False),
        (130, SAVED, 15, 4, 12, True),
        (130, SAVED, 15, 4, 8, False),
        (0, "last is damaged", 0, 4, 8, False),
    ],
)
def test_runs_that_may_go_on(
    code,
    output,
    sent,
    before,
    after,
    goes_on,
    tmp_path,
    monkeypatch,
):
    monkeypatch.setattr(faults, "last_step", lambda folder: after)
    training = SimpleNamespace(poll=lambda: code, output=lambda: output)
    tally = faults.Tally("plain", 1)
    assert faults.judge(training, tmp_path, sent, before, tally) is goes_on
    assert tally.lost == (not goes_on)


def test_what_differs_is_named():
    assert faults.compare({"a": 1, "b": 2}, {"a": 1, "b": 3, "c": 4}) == "b, c"
