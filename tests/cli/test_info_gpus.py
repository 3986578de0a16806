"""`fullrank info --gpus`: lines and JSON beside those without it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fullrank.cli import main

TINY = ("mixhead/table1-vanilla", "--scale", "tiny", "model.vocab_size=500")


def told(capsys: pytest.CaptureFixture[str], *words: object, status: int = 0) -> Any:
    with pytest.raises(SystemExit) as stopped:
        main(["info", *map(str, words)])
    said = capsys.readouterr()
    assert (stopped.value.code or 0) == status, said.err
    return said.out if status == 0 else said.err


def test_lines_and_json_are_added(capsys: pytest.CaptureFixture[str]) -> None:
    plain, several = told(capsys, *TINY), told(capsys, *TINY, "--gpus", 8)
    assert several.startswith(plain)
    added = several[len(plain) :]
    assert added.startswith("on 8 GPUs (estimated, ddp, fp32): 2 of 16 rows on each\n")
    assert "tokens/s, bound by launching kernels, which are too small for this GPU" in added
    assert "assumed: memory_gib 80, fp32_tflops 67, bf16_tflops 989, utilization 0.4" in added
    without, with_gpus = (json.loads(told(capsys, *TINY, *words, "--json")) for words in ((), ("--gpus", 8)))
    gpus = with_gpus.pop("gpus")
    assert with_gpus == without
    assert gpus["bytes_sent"] == 2 * 7 * 4 * without["parameters"]["total"] // 8


def test_assumptions(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--gpus", 2, "--gpu", "a100", "--assume", "memory_gib=1", "--assume", "utilization=0.2")
    told_lines = told(capsys, *TINY, *words)
    assert "DOES NOT FIT into 1 GiB" in told_lines
    assert "assumed: memory_gib 1, fp32_tflops 19.5, bf16_tflops 312, utilization 0.2" in told_lines


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((*TINY, "--gpus", 2, "--assume", "utilization"), "--assume: NAME=VALUE with a number"),
        (("mixhead/table5", "--gpus", 2), "--gpus: for models that are trained from scratch, and this is fine-tuning"),
    ],
)
def test_errors(capsys: pytest.CaptureFixture[str], words: tuple[object, ...], message: str) -> None:
    assert message in told(capsys, *words, status=2)
