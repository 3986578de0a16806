"""A run folder on a hostile disk: what was changed in it is refused by name, and no figure changes without a word."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import fullrank as fr
from fullrank.config.recipe import resolve_any
from fullrank.core.errors import FullRankError, InputError
from fullrank.experiments.run import average, evaluate, resume, train
from fullrank.reporting.runs import read_run
from fullrank.seal import read_record, write_record


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
        ("model.hidden_act", "gelu"), ("model.norm", "post"), ("model.position", "none"),
        ("train.learning_rate", 0.5), ("train.seed", 9), ("train.steps", 24), ("train.label_smoothing", 0.1),
        ("data.lowercase", True), ("eval.segment_length", 4),
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
    for folder in (run, next((run.parent / "cache" / "corpora").glob("text-*"))):
        edit(folder / name, lambda meta: meta.update({key: not meta[key]}))
    with pytest.raises(InputError, match=f"{name} was changed"):
        nll(run)
    shutil.copy(run.parent.parent / "kept" / "run" / name, run / name)
    nll(run)  # the prepared text, which has the other one, is prepared again
    edit(run / name, lambda meta: meta.update({key: not meta[key], "sha256": "0" * 64}))
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(FullRankError, match="checksum"):
        fr.data.load_tokenizer(run)


def test_earlier_lines_of_metrics_are_sealed(run: Path) -> None:
    file = unfinished(run) / "metrics.jsonl"
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace('"tokens": 128', '"tokens": 129', 1), encoding="utf-8")
    assert file.read_text(encoding="utf-8") != text
    assert "metrics.jsonl: its lines are not those that the training wrote" in read_run(run).problems
    with pytest.raises(InputError, match=r"metrics\.jsonl: lines before the last checkpoint"):
        resume(run, quiet=True, say=silent)


def test_weights_without_their_record_are_refused(run: Path) -> None:
    model = fr.LanguageModel.load(run)
    (run / "checkpoints" / "best" / "checkpoint.json").unlink()
    with pytest.raises(InputError, match=r"best is damaged: checkpoint\.json cannot be read"):
        nll(run)
    model.save(run.parent / "saved")
    shutil.copy(run.parent / "saved" / "model.safetensors", run / "model.safetensors")
    with pytest.raises(InputError, match=r"checkpoint\.json"):
        nll(run)  # not that of weights beside the checkpoints


def rewritten(checkpoint: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the weights of a checkpoint, and seal them again."""
    weights, record = load_file(checkpoint / "model.safetensors"), read_record(checkpoint)
    change(weights)
    (checkpoint / "model.safetensors").unlink()  # kept weights are the same file
    save_file(weights, checkpoint / "model.safetensors")
    write_record(checkpoint, ("model.safetensors", "training.safetensors"), record.state, record.run)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused_by_name(run: Path, value: float, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from fullrank.hf.export import export_run

    rewritten(run / "checkpoints" / "best", lambda weights: weights["embedding.weight"][1].fill_(value))
    with pytest.raises(InputError, match=r"'embedding\.weight' holds NaN or infinite"):
        nll(run)
    with pytest.raises(InputError, match=r"'embedding\.weight' holds NaN or infinite"):
        export_run(run, tmp_path / "out")


def test_types_of_tensors_are_compared(run: Path) -> None:
    def halve(weights: dict[str, torch.Tensor]) -> None:
        weights["embedding.weight"] = weights["embedding.weight"].half()

    rewritten(run / "checkpoints" / "last", halve)
    with pytest.raises(InputError, match=r"several types \(torch.float16, torch.float32\)"):
        nll(run, checkpoint="last")
    with pytest.raises(InputError, match=r"'embedding\.weight' is torch.float16 there and torch.float32 here"):
        resume(unfinished(run), quiet=True, say=silent)


def test_changed_text_is_refused_by_a_resume_and_may_go(run: Path) -> None:
    source = run.parent / "train.txt"
    text = source.read_text(encoding="utf-8")
    source.write_text(text + "one more line\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"train\.txt was changed since .*run was started on it"):
        resume(run, quiet=True, say=silent)
    source.unlink()
    resume(unfinished(run), quiet=True, say=silent)


def test_best_is_the_best(run: Path) -> None:
    links = run / "checkpoints"
    steps = {name: read_record(links / name).state["step"] for name in ("best", "previous", "last")}
    assert len(set(steps.values())) > 1
    other = next(name for name in ("previous", "last") if steps[name] != steps["best"])
    target = (links / other).readlink()
    (links / "best").unlink()
    (links / "best").symlink_to(target)
    with pytest.raises(InputError, match=f"the checkpoint of step {steps[other]}, and the best one was of step"):
        nll(run)


def test_run_of_before_there_were_seals(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = nll(run)
    for checkpoint in (run / "checkpoints").glob("step-*"):
        state = read_record(checkpoint).state
        state.pop("metrics_sha256")
        write_record(checkpoint, ("model.safetensors", "training.safetensors"), state)
    assert nll(run) == before
    assert [record.getMessage() for record in caplog.records] == [
        f"{run}: made before seals; its configuration is not verified"
    ]
    resume(unfinished(run), quiet=True, say=silent)
