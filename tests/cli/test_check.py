"""`fullrank check`: recipes, runs, saved models, translators and Hugging Face models; JSON, the table, exit status."""

import json

import peft
import pytest
import torch

import cli_runs
import fullrank as fr
import hugging_face_models as tiny
from cli_runs import SMALL, write_config, write_text
from fullrank.checking import calls, causality
from fullrank.core import registry
from fullrank.core.stages import Mixing

CHECKS = {
    *(f"future, by {how}, {when}" for how in ("perturbation", "gradient") for when in ("evaluation", "training")),
    "incremental decoding = one pass", "starts as plain attention", "kernels = reference, fp64",
    "memory in segments = one pass", "future, after training on random tokens",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    """Few steps on random tokens, few tokens changed, no rare paths; what they show is tested in tests/checking."""
    monkeypatch.setattr(calls, "RARE", False)
    monkeypatch.setattr(causality, "_STEPS", 5)
    monkeypatch.setattr(causality, "_WORK", 0)


@pytest.fixture
def called(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    return lambda *words: cli_runs.called("check", *words)


def test_a_recipe_is_made_small_and_passes(called):
    code, out, err = called("mixhead/table1-transformer-xl", "--row", "b", "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert {check["check"] for check in report["checks"]} >= CHECKS
    assert {check["verdict"] for check in report["checks"]} == {"passes"}  # it has a memory, and a mixing
    assert all(check["looked_at"] and check["reason"] for check in report["checks"])
    assert all(check["difference"] <= check["tolerance"] for check in report["checks"])
    assert report["passes"] is True
    assert (report["row"], report["scale"], report["kind"], report["full"]) == ("b", "paper", "configuration", False)
    assert "hidden_size 410 -> 16" in report["shrunk"]
    assert "memory_length 150 -> 8" in report["shrunk"]
    assert report["parameters"] < 10_000


@pytest.fixture
def leaking():
    """A mixing that reads all queries at every position, those after it too."""

    @fr.register("mix", "test_leaks")
    class Leaks(Mixing):
        starts_plain = False

        def matrix(self, query):
            """All heads of all positions are scaled by one number, which is made of all queries."""
            batch, heads, queries, _ = query.shape
            scale = query.mean((1, 2, 3))[:, None, None, None]
            return (torch.eye(heads) * scale).expand(batch, queries, heads, heads)

    yield "test_leaks"
    registry.unregister("mix", "test_leaks")


def test_a_leak_is_named_and_the_status_is_1(called, leaking, tmp_path):
    config = write_config(tmp_path / "c.yaml", tmp_path, tmp_path)
    code, out, _ = called(config, *SMALL, f"model.attention.mix={leaking}", "--quick", "--json")
    assert code == 1
    report = json.loads(out)
    assert report["passes"] is False
    assert report["leaking_layers"] == ["blocks.0.attention.attend", "blocks.1.attention.attend"]
    failed = {check["check"]: check for check in report["checks"] if check["verdict"] == "fails"}
    assert {check for check in CHECKS if check.startswith("future, by")} <= set(failed)
    assert "incremental decoding = one pass" in failed
    assert failed["future, by perturbation, evaluation"]["difference"] > 1e-3
    assert report["shrunk"] == ["vocab_size that of the data -> 32"]


@pytest.mark.full
def test_full_is_the_configuration_itself(called, tmp_path):
    """With the vocabulary of its data, and texts of its own length or a little less."""
    write_text(tmp_path)
    config = write_config(tmp_path / "c.yaml", tmp_path, tmp_path / "cache")
    code, out, err = called(config, *SMALL, "train.segment_length=30", "--full", "--json")
    assert code == 0, err
    report = json.loads(out)
    assert (report["full"], report["shrunk"], report["length"]) == (True, [], 30)
    assert report["vocab_size"] < 30


@pytest.mark.filterwarnings("ignore")
def test_every_kind_of_hugging_face_model(called, run, tmp_path, monkeypatch):
    """An injected model, an export, a model type, a function: each is loaded with its mixing."""
    plain = tiny.save(tiny.llama(), tmp_path / "plain", tokenizer=False)
    injected = fr.inject(type(tiny.llama()).from_pretrained(plain), mix="position_wise")
    tiny.save(injected, tmp_path / "injected", tokenizer=False)
    lora = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["fullrank"], r=2)
    peft.get_peft_model(injected, lora).save_pretrained(tmp_path / "peft")
    cli_runs.called("export", run, tmp_path / "export")
    (tmp_path / "mine.py").write_text(
        "import torch, hugging_face_models as t\ndef make(): return t.gpt2()\ndef bad(): return 3\n"
        "def frames(): return torch.nn.Linear(4, 5), {'input': torch.randn(2, 9, 4)}\n"
        "def crash(): return torch.nn.Linear(4, 5)\ndef logits(ids): return ids\nmodel = t.gpt2()\n"
    )
    monkeypatch.chdir(tmp_path)
    mixed = {
        "injected": False, "export": True, "hf:plain": False, "hf:gpt2": False, "python:mine:make": False,
        "python:mine:frames": False, "python:mine:model": False,
    }  # fmt: skip
    for name, has_mixing in mixed.items():
        code, out, err = called(name, "--json", *(() if has_mixing else ("--quick",)))
        assert (code, err) == (0, ""), name
        verdicts = {check["check"]: check["verdict"] for check in json.loads(out)["checks"]}
        assert verdicts.get("starts as plain attention") == ("passes" if has_mixing else None), name
    for words, expected in (
        (["python:mine:logits"], "it makes the model, without arguments"),
        (["python:mine:bad"], "must return a torch module, given int"),
        (["python:mine:crash", "--vocab-size", "7"], "raised RuntimeError"),
        (["peft"], "an adapter of PEFT; merge it into its model"),
    ):
        code, out, err = called(*words)
        assert (code, out, expected in err) == (2, "", True), err


@pytest.mark.full
def test_a_row_that_decodes_as_released_fails(called):
    code, out, _ = called("mixhead/table4", "--row", "h4-b-released", "--quick")
    assert code == 1
    last = out.splitlines()[-1]
    assert last.startswith("No later token is seen. 30 checks passed")
    assert last.endswith(" 1 failed: incremental decoding = one pass.")


MODULE = """
import math

def right(ids):
    return [math.log(5)] * len(ids)

def start(ids):
    return 0.5 + math.log(5) * len(ids)

"""


@pytest.fixture
def scores(tmp_path, monkeypatch):
    (tmp_path / "my_scores.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)


def test_a_right_scoring_function_passes(called, scores):
    code, out, err = called("--scoring", "my_scores:right", "--vocab-size", 5, "--length", 9)
    assert (code, err) == (0, "")
    assert "my_scores:right: a scoring function" in out
    assert out.count("probabilities sum to one") == 1
    assert "4 checks passed, 3 not applicable" in out


def test_a_wrong_scoring_function_fails(called, scores):
    code, out, _ = called("--scoring", "my_scores:start", "--vocab-size", 5, "--json")
    assert code == 1
    report = json.loads(out)
    assert (report["passes"], report["name"], report["length"]) == (False, "my_scores:start", 67)
    failed = [check["check"] for check in report["checks"] if check["verdict"] == "fails"]
    assert failed == ["every token is scored once"]
