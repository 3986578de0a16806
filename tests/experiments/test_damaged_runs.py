"""A run folder on a hostile disk: what was changed in it is refused by name, and no figure changes without a word."""

import json
import random
import shutil

import pytest
import yaml

import fullrank as fr
from fullrank.comparison.runs import read_run
from fullrank.config.load import resolve_any
from fullrank.core.errors import InputError
from fullrank.experiments.run import average, evaluate, resume, train


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
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
    train(resolve_any(str(place / "config.yaml")), place / "here" / "run", quiet=True)
    (place / "here").rename(place / "kept")
    return place


@pytest.fixture
def run(pristine):
    """A copy of the run."""
    shutil.copytree(pristine / "kept", pristine / "here", symlinks=True)
    yield pristine / "here" / "run"
    shutil.rmtree(pristine / "here")


def nll(run, **options):
    return float(evaluate(run, "test", device_name="cpu", **options)["nll"])


def edit(path, change):
    """Change the plain values in a YAML or JSON file in place."""
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    change(values)
    path.write_text(json.dumps(values), encoding="utf-8")


def unfinished(run):
    """The run as it was before its end."""
    (run / "result.json").unlink()
    return run


@pytest.mark.parametrize("content", ['{"name": "relative"}', '{"final": 5}', '{"final": {"valid": {}, "test": {}}}'])
def test_a_result_without_figures_is_written_again(content, run):
    before = json.loads((run / "result.json").read_text(encoding="utf-8"))
    (run / "result.json").write_text(content, encoding="utf-8")
    assert resume(run)["final"] == before["final"]


@pytest.mark.parametrize(
    ("key", "value"),
    [("model.hidden_act", "gelu"), ("train.seed", 9), ("data.lowercase", True), ("eval.segment_length", 4)],
)
def test_changed_configuration_is_refused_by_every_reader(run, key, value):
    section, name = key.split(".")
    edit(run / "config.yaml", lambda config: config[section].update({name: value}))
    for reads in (nll, resume, average, fr.LanguageModel.load):
        with pytest.raises(InputError, match=f"{key} is {value!r}, trained with .*begin a new run"):
            reads(run)
    assert any(f"{key} is {value!r}" in problem for problem in read_run(run).problems)


def test_what_may_change(run):
    """The folder moves, and with it paths, threads and device; the figure stays."""
    before = nll(run)
    edit(run / "config.yaml", lambda config: config["train"].update(threads=2, device="auto"))
    edit(run / "config.yaml", lambda config: config["data"].update(train="/gone.txt", cache=None, dir="/gone"))
    edit(
        run / "config.yaml", lambda config: config["train"].pop("seed")
    )  # what is left out has its default, which it had
    moved = run.rename(run.parent / "elsewhere")
    assert nll(moved) == before


def test_a_damaged_checkpoint_says_what_to_do(run):
    (run / "checkpoints/best/checkpoint.json").write_text("{")
    with pytest.raises(InputError, match=r"best is damaged: .*; take another checkpoint or train again$"):
        nll(run)


def test_changed_text_is_refused_by_a_resume_and_may_go(run):
    source = run.parent / "train.txt"
    text = source.read_text(encoding="utf-8")
    source.write_text(text + "one more line\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"train\.txt was changed since .*run was started on it"):
        resume(run, quiet=True)
    source.unlink()
    (run / "tokenizer.json").unlink()  # which is written again
    resume(unfinished(run), quiet=True)
    assert nll(run) > 0
