"""Run folders: where they lie, when they may be used, and that a corpus is found again from anywhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from fullrank.config.recipe import resolve
from fullrank.config.run import RunConfig
from fullrank.config.training import TrainConfig
from fullrank.core.errors import InputError
from fullrank.experiments.run_folder import claim, open_run, training_of

IDENTITY = {
    "name": "x",
    "recipe": "mixhead/table1-vanilla",
    "row": "plain",
    "scale": "tiny",
    "paper": None,
    "vocabulary": "v",
}


def test_a_folder_is_claimed_once_and_found_again(tmp_path: Path) -> None:
    assert claim(tmp_path / "run", RunConfig(), IDENTITY) is False
    (tmp_path / "run" / "metrics.jsonl").touch()
    assert claim(tmp_path / "run", RunConfig(), IDENTITY) is True
    config, identity = open_run(tmp_path / "run")
    assert config == RunConfig()
    assert identity == IDENTITY
    with pytest.raises(InputError, match=r"train\.seed is 1 there, 2 here"):
        claim(tmp_path / "run", RunConfig(train=TrainConfig(seed=2)), IDENTITY)
    with pytest.raises(InputError, match="another text or vocabulary"):
        claim(tmp_path / "run", RunConfig(), {**IDENTITY, "vocabulary": "w"})
    with pytest.raises(InputError, match="another text or vocabulary"):
        claim(tmp_path / "run", RunConfig(), {**IDENTITY, "text": {"train": "changed"}})


def test_foreign_folders_and_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(InputError, match="a file of that name"):
        claim(tmp_path / "file", RunConfig(), IDENTITY)
    with pytest.raises(InputError, match="not empty"):
        claim(tmp_path, RunConfig(), IDENTITY)
    with pytest.raises(InputError, match="not a run folder"):
        open_run(tmp_path)
    claim(tmp_path / "run", RunConfig(), IDENTITY)
    (tmp_path / "run" / "run.json").write_text("{", encoding="utf-8")
    with pytest.raises(InputError, match="damaged"):
        open_run(tmp_path / "run")


@pytest.mark.parametrize(
    ("setting", "same"),
    [
        ("eval.test.context=5", True),
        ("eval.context=5", True),
        ("eval.test.segment_length=60", True),
        ("data.dir=/elsewhere", True),
        ("eval.segment_length=60", False),  # validation while training is cut that way
        ("eval.valid.context=5", False),
        ("eval.every_steps=7", False),  # another checkpoint may be the best
        ("train.seed=2", False),
        ("model.attention.mix=average", False),
    ],
)
def test_runs_that_differ_in_final_figures_alone_are_one_training(setting: str, same: bool) -> None:
    plain, other = (resolve("mixhead/table1-vanilla", "plain", "tiny", words).config for words in ([], [setting]))
    assert (training_of(plain) == training_of(other)) is same
    assert training_of(plain, {"text": {"train": "a"}}) != training_of(plain, {"text": {"train": "b"}})
