from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from fullrank.core.errors import RunError
from fullrank.training.records import JsonLines, metrics_line, timing_line


def test_lines_are_as_the_interface_says() -> None:
    line = metrics_line(step=120, split="train", nll=math.log(164.0), tokens=76800, lr=0.001)
    assert (
        json.dumps(line)
        == '{"step": 120, "split": "train", "nll": 5.09986643, "ppl": 164.0, "tokens": 76800, "lr": 0.001}'
    )
    assert "lr" not in metrics_line(step=1, split="valid", nll=1.0, tokens=1)
    scored = metrics_line(step=1, split="valid", nll=1.0, tokens=1, scores={"bleu": 31.23456789012}, phase="a")
    assert list(scored) == ["step", "split", "nll", "ppl", "tokens", "bleu", "phase"]
    assert scored["bleu"] == 31.2345679
    with pytest.raises(ValueError, match="a score may not be called ppl"):
        metrics_line(step=1, split="valid", nll=1.0, tokens=1, scores={"ppl": 3.0})
    assert math.isfinite(metrics_line(step=1, split="valid", nll=1e6, tokens=1)["ppl"])
    assert timing_line(step=120, seconds=31.20004, tokens_per_second=2500.04, peak_memory_mib=512.31) == {
        "step": 120, "seconds": 31.2, "tokens_per_second": 2500.0, "peak_memory_mib": 512.3,
    }  # fmt: skip


def test_a_file_is_cut_where_the_checkpoint_says_or_after_the_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    file = JsonLines(path)
    file.write({"a": 1})
    length = file.sync()
    file.write({"a": 2})
    file.close()
    path.write_text(path.read_text() + '{"a": ' + "3" * 10_000)
    JsonLines(path).close()
    assert path.read_text() == '{"a": 1}\n{"a": 2}\n'
    again = JsonLines(path, keep=length)
    again.write({"a": 4})
    assert again.sync() == len(path.read_text())
    again.close()
    assert path.read_text() == '{"a": 1}\n{"a": 4}\n'
    empty = JsonLines(path, keep=0)
    empty.close()
    assert path.read_text() == ""
    assert empty.missing == 0


def test_a_file_shorter_than_the_checkpoint_says_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a": 1}\n{"a"')
    file = JsonLines(path, keep=100)
    file.close()
    assert file.missing == 87
    assert path.read_text() == '{"a": 1}\n'


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk that is always full")
def test_a_full_disk_is_a_run_error() -> None:
    file = JsonLines(Path("/dev/full"))
    with pytest.raises(RunError, match=r"No space left on device.*last checkpoint is intact"):
        file.write({"a": 1})
    file.close()


def test_a_folder_that_cannot_be_written_is_a_run_error(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="cannot be written"):
        JsonLines(tmp_path / "missing" / "lines.jsonl")
