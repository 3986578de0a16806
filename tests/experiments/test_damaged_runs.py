"""A run folder on a hostile disk: what was changed in it is refused by name, and no figure changes without a word."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import fullrank as fr
from fullrank import kernels
from fullrank.cli import main
from fullrank.comparison.runs import read_run
from fullrank.config.recipe import resolve_any
from fullrank.core.errors import FullRankError, InputError
from fullrank.experiments.run import average, evaluate, resume, train
from fullrank.seal import read_record
from research.ledger import row_of, verify


def silent(text: str) -> None:
    pass


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of words, its text and its cache; tests work on a copy that they find at the same place."""
    place = tmp_path_factory.mktemp("pristine")
    draw = random.Random(0)
    (place / "here").mkdir()
    for split, lines in (("train", 120), ("valid", 12), ("test", 12)):
        words = [" ".join(draw.choices(["One", "two", "three", "four"], k=6)) for _ in range(lines)]
        (place / "here" / f"{split}.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    files = {split: str(place / "here" / f"{split}.txt") for split in ("train", "valid", "test")}
    settings = {
        "model": {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2},
        "data": {"name": "text", "tokens": "word", "cache": str(place / "here" / "cache"), **files},
        "train": {
            "batch_size": 4, "segment_length": 8, "steps": 12, "learning_rate": 0.02, "save_every_steps": 4,
            "keep_checkpoints": 2, "log_every_steps": 4, "threads": 1, "device": "cpu",
        },
        "eval": {"every_steps": 4},
    }  # fmt: skip
    (place / "config.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    train(resolve_any(str(place / "config.yaml")), place / "here" / "run", quiet=True, say=silent)
    (place / "here").rename(place / "kept")
    return place


@pytest.fixture
def run(pristine: Path) -> Iterator[Path]:
    """A copy of the run."""
    shutil.copytree(pristine / "kept", pristine / "here", symlinks=True)
    yield pristine / "here" / "run"
    shutil.rmtree(pristine / "here")


def nll(run: Path, **options: Any) -> float:
    return float(evaluate(run, "test", device_name="cpu", say=silent, **options)["nll"])


def edit(path: Path, change: Callable[[Any], object]) -> None:
    """Change the plain values in a YAML or JSON file in place."""
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    change(values)
    path.write_text(json.dumps(values), encoding="utf-8")


def unfinished(run: Path) -> Path:
    """The run as it was before its end."""
    (run / "result.json").unlink()
    return run


# -- what belongs together ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.hidden_act", "gelu"), ("train.seed", 9), ("data.lowercase", True), ("eval.segment_length", 4),
    ],
)  # fmt: skip
def test_changed_configuration_is_refused_by_every_reader(run: Path, key: str, value: object) -> None:
    section, name = key.split(".")
    edit(run / "config.yaml", lambda config: config[section].update({name: value}))
    for reads in (nll, resume, average, fr.LanguageModel.load):
        with pytest.raises(InputError, match=f"{key} is {value!r}, trained with .*begin a new run"):
            reads(run)  # type: ignore[operator]
    assert any(f"{key} is {value!r}" in problem for problem in read_run(run).problems)


def test_what_may_change(run: Path) -> None:
    """The folder moves, and with it paths, threads and device; the figure stays."""
    before = nll(run)
    edit(run / "config.yaml", lambda config: config["train"].update(threads=2, device="auto"))
    edit(run / "config.yaml", lambda config: config["data"].update(train="/gone.txt", cache=None, dir="/gone"))
    edit(
        run / "config.yaml", lambda config: config["train"].pop("seed")
    )  # what is left out has its default, which it had
    moved = run.rename(run.parent / "elsewhere")
    assert nll(moved) == before


@pytest.mark.parametrize(("name", "key"), [("vocabulary.json", "lowercase"), ("vocabulary.json", "line_end")])
def test_changed_flags_of_a_vocabulary_are_refused(run: Path, name: str, key: str) -> None:
    for folder in (run, next((run.parent / "cache" / "corpora").glob("text-*/ids"))):
        edit(folder / name, lambda meta: meta.update({key: not meta[key]}))
    with pytest.raises(InputError, match=f"{name} was changed"):
        nll(run)
    shutil.copy(run.parent.parent / "kept" / "run" / name, run / name)
    nll(run)  # the prepared text, which has the other one, is prepared again
    edit(run / name, lambda meta: meta.update({key: not meta[key], "sha256": "0" * 64}))
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(FullRankError, match="checksum"):
        fr.data.load_tokenizer(run)


def test_weights_without_their_record_are_refused(run: Path) -> None:
    model = fr.LanguageModel.load(run)
    (run / "checkpoints" / "best" / "checkpoint.json").unlink()
    with pytest.raises(InputError, match=r"best is damaged: checkpoint\.json: cannot be read"):
        nll(run)
    model.save(run.parent / "saved")
    shutil.copy(run.parent / "saved" / "model.safetensors", run / "model.safetensors")
    with pytest.raises(InputError, match=r"checkpoint\.json"):
        nll(run)  # not that of weights beside the checkpoints


def test_changed_text_is_refused_by_a_resume_and_may_go(run: Path) -> None:
    source = run.parent / "train.txt"
    text = source.read_text(encoding="utf-8")
    source.write_text(text + "one more line\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"train\.txt was changed since .*run was started on it"):
        resume(run, quiet=True, say=silent)
    source.unlink()
    resume(unfinished(run), quiet=True, say=silent)


def test_the_run_folder_itself_may_be_a_link(run: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(unfinished(run))
    resume(tmp_path / "link", quiet=True, say=silent)
    assert (run / "result.json").is_file()


def test_evaluation_writes_nothing_into_a_run(run: Path) -> None:
    """Also where it may not, and where the prepared text is gone."""

    def content() -> dict[str, tuple[int, int]]:
        return {str(path): (path.lstat().st_mtime_ns, path.lstat().st_ino) for path in [run, *run.rglob("*")]}

    for path in (run, *run.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o555 if path.is_dir() else 0o444)
    before = content()
    figure = nll(run)
    shutil.rmtree(run.parent / "cache")
    assert nll(run) == figure
    assert content() == before
    for path in (run, *run.rglob("*")):
        path.chmod(0o755)


def test_a_reader_writes_nothing_into_the_cache_that_a_run_names(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text is prepared again in the cache of the user: a run of a stranger does not choose where that is."""
    before, theirs, own = nll(run), run.parent.parent / "stranger", run.parent / "own"
    shutil.rmtree(run.parent / "cache")
    edit(run / "config.yaml", lambda config: config["data"].update(cache=str(theirs)))
    monkeypatch.setenv("FULLRANK_CACHE", str(own))
    assert nll(run) == before
    with contextlib.suppress(SystemExit):
        main(["analyze", "rank", str(run)])
    assert (own / "corpora").is_dir()
    assert not theirs.exists()


def test_a_figure_of_the_ledger_is_verified_where_its_run_exists(run: Path) -> None:
    """A row that was edited is found by its checkpoint."""
    row = row_of(run)
    assert verify([row], run.parent) == (1, [])
    verified, different = verify([row | {"final.test.perplexity": 1.5}], run.parent)
    assert verified == 1
    assert [words.split(":")[1].strip() for words in different] == ["final.test.perplexity"]


@pytest.mark.parametrize("content", ['{"name": "relative"}', '{"final": 5}', '{"final": {"valid": {}, "test": {}}}'])
def test_a_damaged_result_is_named(content: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "result.json").write_text(content, encoding="utf-8")
    with pytest.raises(SystemExit, match="2"):
        main(["train", str(run), "--quiet"])
    assert re.search(r"result\.json: damaged.* delete it, and `fullrank train", capsys.readouterr().err)


# -- files that nobody would write -------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["null", "[" * 100_000, '{"text": 5}', ""])
def test_run_record_nobody_would_write(content: str, run: Path) -> None:
    (run / "run.json").write_text(content, encoding="utf-8")
    for reads in (nll, resume, average):
        with pytest.raises(InputError, match=r"run\.json"):
            reads(run)  # type: ignore[operator]


def test_the_kernels_that_computed_are_in_the_checkpoint(run: Path) -> None:
    engines = read_record(run / "checkpoints" / "last").state["engines"]
    assert engines
    assert set(engines) <= set(kernels.NAMES)


def test_leftovers_of_a_killed_training_go_with_the_next_start(run: Path) -> None:
    left = [run / f".result.json.{99**9}", run / "analysis" / f".heads.json.{99**9}"]
    live = run / f".report.html.{os.getpid()}"
    (run / "analysis").mkdir()
    for path in (*left, live):
        path.write_text("half")
    resume(unfinished(run), quiet=True, say=silent)
    assert [path.exists() for path in (*left, live)] == [False, False, True]
