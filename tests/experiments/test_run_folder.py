"""Run folders: where they lie, when they may be used, and that a corpus is found again from anywhere."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from fullrank.config.data import DataConfig
from fullrank.config.recipe import Resolved, resolve
from fullrank.config.run import RunConfig
from fullrank.config.training import TrainConfig
from fullrank.core.config import AttentionConfig, ModelConfig
from fullrank.core.errors import InputError
from fullrank.experiments.run import read_commit
from fullrank.experiments.run_folder import absolute, claim, default_folder, open_run, sort_by_table, training_of

IDENTITY = {
    "name": "x",
    "recipe": "mixhead/table1-vanilla",
    "row": "plain",
    "scale": "tiny",
    "paper": None,
    "vocabulary": "v",
}


def test_default_folders() -> None:
    assert default_folder(resolve("mixhead/table1-vanilla", "b", "tiny")) == Path(
        "runs/mixhead-table1-vanilla/b-tiny-seed1"
    )
    assert default_folder(resolve("mixhead/table1-vanilla", "b")) == Path("runs/mixhead-table1-vanilla/b-seed1")
    assert default_folder(Resolved(RunConfig(), "somewhere/my.yaml")) == Path("runs/my-seed1")


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


def test_a_run_that_never_trained_gives_its_folder_back(tmp_path: Path) -> None:
    """A mistake found after the start (an optimizer that lacks a setting) can be mended in the same place."""
    claim(tmp_path / "run", RunConfig(), IDENTITY)
    assert claim(tmp_path / "run", RunConfig(train=TrainConfig(seed=2)), IDENTITY) is False
    assert open_run(tmp_path / "run")[0].train.seed == 2


def test_an_option_taken_away_is_another_configuration(tmp_path: Path) -> None:
    def mixed(mix: object) -> RunConfig:
        return RunConfig(model=ModelConfig(attention=AttentionConfig(mix=mix)))  # type: ignore[arg-type]

    claim(tmp_path / "run", mixed({"name": "random", "std": 0.2}), IDENTITY)
    (tmp_path / "run" / "metrics.jsonl").touch()
    with pytest.raises(InputError, match=r"mix\.std is 0\.2 there, None here"):
        claim(tmp_path / "run", mixed({"name": "random"}), IDENTITY)


def test_a_start_that_was_cut_short_can_be_repeated(tmp_path: Path) -> None:
    """Killed between run.json and config.yaml: nothing was trained yet, so the folder is free."""
    claim(tmp_path / "run", RunConfig(), IDENTITY)
    (tmp_path / "run" / "config.yaml").unlink()
    assert claim(tmp_path / "run", RunConfig(), {**IDENTITY, "row": "a"}) is False
    assert open_run(tmp_path / "run")[1]["row"] == "a"


def test_a_folder_with_somebodys_config_is_not_free(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("mine", encoding="utf-8")
    with pytest.raises(InputError, match="not empty"):
        claim(tmp_path, RunConfig(), IDENTITY)
    assert (tmp_path / "config.yaml").read_text(encoding="utf-8") == "mine"


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


def test_relative_paths_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    here = tmp_path.resolve()
    data = absolute(
        RunConfig(data=DataConfig(name="text", train="a.txt", valid=["b.txt", "/c.txt"], cache="cache"))
    ).data
    assert data.train == str(here / "a.txt")
    assert data.valid == [str(here / "b.txt"), "/c.txt"]
    assert (data.test, data.dir, data.cache) == (None, None, str(here / "cache"))
    data = absolute(RunConfig(data=DataConfig(name="text", dir="books", train="a.txt"))).data
    assert data.train == str(here / "books" / "a.txt")
    assert absolute(RunConfig(data=data)).data == data


def test_table_order_begins_with_the_baseline(tmp_path: Path) -> None:
    folders = []
    for row in ("a", "b", "plain"):
        claim(tmp_path / row, RunConfig(), {**IDENTITY, "row": row})
        folders.append(tmp_path / row)
    assert [folder.name for folder in sort_by_table(folders)] == ["plain", "a", "b"]
    claim(tmp_path / "other", RunConfig(), {**IDENTITY, "recipe": "demo/builtin"})
    assert sort_by_table([*folders, tmp_path / "other"]) == [*folders, tmp_path / "other"]


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


def test_the_commit_of_a_result_is_marked_only_where_the_package_itself_has_changes(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        done = subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    package, ledger = tmp_path / "src" / "package", tmp_path / "ledger.jsonl"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    ledger.write_text("")
    git("init", "-q")
    assert read_commit(package) is None
    git("add", "-A")
    git("commit", "-qm", "first")
    commit = git("rev-parse", "--short=12", "HEAD")

    ledger.write_text("a row\n")  # as a queue writes while it trains
    assert read_commit(package) == commit
    (package / "__init__.py").write_text("changed = True\n")
    assert read_commit(package) == f"{commit}+changes"
