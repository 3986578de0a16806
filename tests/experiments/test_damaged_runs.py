"""A run folder whose files are changed or damaged: they are refused by name, and no figure changes silently."""

import json
import shutil

import pytest
import yaml

import fullrank as fr
from cli_runs import SMALL, write_config, write_text
from fullrank.comparison.runs import read_run
from fullrank.config.load import resolve_any
from fullrank.core.errors import InputError
from fullrank.experiments.run import average, evaluate, train
from run_files import resume


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """A finished run of words, its text and its cache; tests work on a copy that they find at the same place."""
    folder = tmp_path_factory.mktemp("pristine")
    text = write_text(folder / "current", 120)
    rhythm = {"steps": 12, "save_every_steps": 4, "keep_checkpoints": 2}
    config = write_config(folder / "config.yaml", text, text / "cache", **rhythm)
    train(resolve_any(str(config), overrides=[*SMALL, "eval.every_steps=4"]), text / "run", quiet=True)
    text.rename(folder / "original")
    return folder


@pytest.fixture
def run(pristine):
    """A copy of the run."""
    shutil.copytree(pristine / "original", pristine / "current", symlinks=True)
    yield pristine / "current" / "run"
    shutil.rmtree(pristine / "current")


def nll(run, **options):
    return float(evaluate(run, "test", device_name="cpu", **options)["nll"])


def edit(path, change):
    """Change the plain values in a YAML or JSON file in place."""
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    change(values)
    path.write_text(json.dumps(values), encoding="utf-8")


def unfinished(run):
    """The run without its result, as it was before its last evaluation."""
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
    edit(run / "config.yaml", lambda config: config["train"].pop("seed"))  # the default is what it was
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
