"""`fullrank analyze context`: what it reads, what it says, what it writes, and what it refuses."""

from __future__ import annotations

import json
import math
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from cli_runs import called

from fullrank.cli import main

PHASES = "[{name: warm, steps: 5}, {name: skip_retain, skip: linear, steps: 5}, {name: vanilla, steps: 5}]"
FIFTEEN = f"""\
model: {{num_hidden_layers: 15, hidden_size: 32, num_attention_heads: 4, memory_length: 512}}
train: {{segment_length: 512, phases: {PHASES}}}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "fifteen.yaml"
    path.write_text(FIFTEEN, encoding="utf-8")
    return path


def context(*words: object) -> tuple[int, str, str]:
    return called("analyze", "context", *words)


def found(*words: object) -> dict[str, Any]:
    code, out, said = context(*words, "--json")
    assert (code, said) == (0, "")
    content: dict[str, Any] = json.loads(out)
    return content


def test_figures_by_hand(config: Path) -> None:
    """Eq. 1 with M = N = 512: p = i / 30, mean M / (1 - p), deviation M sqrt(p) / (1 - p), P(K = k) = p^k (1 - p)."""
    content = found(config, "--drifting", "300")
    assert (content["phase"], content["skip"], content["gaps"]) == ("skip_retain", "linear", "true")
    assert (content["memory_length"], content["segment_length"]) == (512, 512)
    assert [layer["layer"] for layer in content["layers"]] == list(range(15))
    for i, layer in enumerate(content["layers"]):
        p = i / 30 if i < 14 else 0.0
        assert layer["probability"] == pytest.approx(p)
        assert layer["mean"] == pytest.approx(512 / (1 - p))
        assert layer["deviation"] == pytest.approx(512 * math.sqrt(p) / (1 - p))
        assert layer["nearest_mean"] == pytest.approx(1 + 512 * p / (1 - p))
        for key, first in (("reach", 512), ("nearest", 1)):
            tokens, chances = layer[key]["tokens"], layer[key]["probabilities"]
            assert tokens == [first + 512 * k for k in range(len(tokens))]
            assert chances == pytest.approx([p**k * (1 - p) for k in range(len(tokens))])
        assert layer["drifting"]["blocks"] == pytest.approx(1 + 300 * p)
        assert layer["drifting"]["tokens"] == pytest.approx(512 * (1 + 300 * p))
    quantiles = content["layers"][13]["quantiles"]  # 1 - (13/30)^(k+1): .567 .812 .919 .965 .985 .993
    assert quantiles == {"0.5": 512, "0.9": 3 * 512, "0.99": 6 * 512}
    assert content["farthest"] == {"layers": [13], "mean": pytest.approx(512 * 30 / 17)}
    assert content["resting_layers"] == pytest.approx(91 / 30)
    assert content["published"]["equation_6"] == pytest.approx(1024 * 91 / 30)
    assert content["published"]["short_form"] == 3072
    assert content["published"]["sums_over_layers"] is True
    assert content["files"] == []


def test_the_table_and_the_sentence(config: Path) -> None:
    code, out, said = context(config)
    assert (code, said) == (0, "")
    assert "fifteen.yaml, phase skip_retain (skip: linear)" in out
    rows = [line.split() for line in out.splitlines() if line.strip()[:1].isdigit()]
    assert rows[13] == ["13", "43.3", "%", "903.5", "594.8", "512", "1,536", "3,072", "392.5"]
    assert [row[0] for row in rows] == [str(layer) for layer in range(15)]
    sentence = next(line for line in out.splitlines() if "Eq. 6" in line)
    for part in ("3,106 tokens", "3,072", "over the 15 layers", "of no layer", "904 tokens on average (layer 13)"):
        assert part in sentence


def test_no_figure_is_cut_off_in_a_narrow_terminal(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    _, out, _ = context(config, "--drifting", 4000)
    assert "…" not in out
    assert "887,979" in out  # 512 (1 + 4000 * 13 / 30)


def test_phases(config: Path) -> None:
    """The first that skips, or the one that is named; one that skips nothing, and none at all, say so."""
    named = found(config, "--phase", "vanilla")
    assert named["phase"] == "vanilla"
    assert "Phase 'vanilla' lets no layer rest" in named["remarks"][0]
    for content in (named, found(config, "train.phases=[]"), found(config, "--phase", "warm")):
        assert {layer["mean"] for layer in content["layers"]} == {512}
        assert {layer["deviation"] for layer in content["layers"]} == {0}
        assert content["published"]["equation_6"] == 0
    none = found(config, "train.phases=[]", "train.steps=3")
    assert none["phase"] is None
    assert "No phase (train.phases) lets a layer rest: every layer remembers the 512 tokens" in none["remarks"][0]
    both = (
        "train.phases=[{name: a, skip: uniform, p: 0, steps: 3}, {name: b, skip: listed, p: [0, 0.5, 0.25], steps: 3}]"
    )
    content = found(config, "model.num_hidden_layers=3", "train.segment_length=200", both)
    assert content["phase"] == "b"
    assert [layer["mean"] for layer in content["layers"]] == pytest.approx([512, 512 + 600, 512 + 200])  # j = 3
    assert content["published"]["short_form"] is None
    assert "takes memory and segment to be equal, here 512 and 200" in content["remarks"][0]


def test_what_the_figures_do_not_say(config: Path) -> None:
    drifting = "train.phases=[{name: a, skip: uniform, p: 0.1, gaps: drifting, steps: 3}]"
    content = found(config, "model.same_length=true", drifting)
    assert content["gaps"] == "drifting"
    assert any("same_length" in remark for remark in content["remarks"])
    assert any("--drifting" in remark for remark in content["remarks"])
    assert "(15 layers alike)" in content["remarks"][0]
    plain = found(config)
    assert not any("same_length" in remark or "drifting" in remark for remark in plain["remarks"])


def test_a_run_folder_and_a_row_of_a_recipe(config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(config, run / "config.yaml")
    of_run, of_file = found(run), found(config)
    assert of_run["layers"] == of_file["layers"]
    table = tmp_path / "table.yaml"
    table.write_text(
        "rows: {plain: {}, short: {set: {model.memory_length: 64}}}\n"
        "scales: {paper: {}, tiny: {train.segment_length: 32}}\n"
        f"base:\n  model: {{num_hidden_layers: 4, memory_length: 128}}\n  train: {{segment_length: 64, phases: {PHASES}}}\n",
        encoding="utf-8",
    )
    content = found(table, "--row", "short", "--scale", "tiny")
    assert (content["row"], content["scale"]) == ("short", "tiny")
    assert (content["memory_length"], content["segment_length"]) == (64, 32)
    assert found(table)["memory_length"] == 128


def test_the_figure(config: Path, tmp_path: Path) -> None:
    """Two readable files; the drawing names every layer, and is the same to the byte the next time."""
    out = tmp_path / "new" / "figures"
    content = found(config, "--out", out)
    assert content["files"] == [str(out / "context.png"), str(out / "context.svg")]
    assert sorted(path.name for path in out.iterdir()) == ["context.png", "context.svg"]
    assert (out / "context.png").read_bytes().startswith(b"\x89PNG\r\n")
    root = ET.fromstring((out / "context.svg").read_text(encoding="utf-8"))
    words = [text.strip() for text in root.itertext() if text.strip()]
    assert {str(layer) for layer in range(15)} <= set(words)
    assert {"tokens before the first query of the segment", "the paper's Eq. 6, a sum over layers"} <= set(words)
    assert "fifteen.yaml, phase skip_retain (skip: linear)" in words
    before = [(out / f"context.{kind}").read_bytes() for kind in ("png", "svg")]
    code, shown, _ = context(config, "--out", out)
    assert code == 0
    assert str(out / "context.svg") in shown.splitlines()
    assert [(out / f"context.{kind}").read_bytes() for kind in ("png", "svg")] == before


def test_figures_of_many_layers_and_odd_shapes(config: Path, tmp_path: Path) -> None:
    one = "train.phases=[{name: '$x_1$ <a>', skip: not_last, p: 0.9, steps: 3}]"
    for layers, length in ((1, 7), (60, 1600), (2, 512)):
        content = found(config, f"model.num_hidden_layers={layers}", f"model.memory_length={length}", one,
                        "--out", tmp_path / str(layers))  # fmt: skip
        assert len(content["layers"]) == layers
        root = ET.fromstring((tmp_path / str(layers) / "context.svg").read_text(encoding="utf-8"))
        assert any("phase" in text and "$x_1$ <a>" in text for text in root.itertext()) == (layers > 1)


WRONG = {
    "no memory": (["model.memory_length=0"], ["model.memory_length: 0", "set it"]),
    "unknown phase": (["--phase", "skip_retian"], ["--phase skip_retian", "did you mean 'skip_retain'"]),
    "no phases": (["--phase", "a", "train.phases=[]"], ["--phase a", "train.phases"]),
    "a layer that always rests": (
        ["train.phases=[{name: a, skip: uniform, p: 1, steps: 3}]"],
        ["train.phases.a.p", "below 1", "layer 0"],
    ),
    "too few in the list": (
        ["train.phases=[{name: a, skip: listed, p: [0.1, 0.2], steps: 3}]"],
        ["train.phases.a.p: 2 probabilities are listed, but the model has 15 layers"],
    ),
    "too often": (
        ["train.phases=[{name: a, skip: uniform, p: 0.999999999, steps: 3}]"],
        ["train.phases.a.p", "more than"],
    ),
    "unknown key": (["model.memory_lenght=5"], ["did you mean 'model.memory_length'"]),
    "a row": (["--row", "b"], ["has no row 'b'"]),
    "negative steps": (["--drifting", "-1"], ["--drifting"]),
    "a file for a folder": (["--out", "{config}"], ["--out", "a file of that name exists"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_refused(case: str, config: Path) -> None:
    words, parts = WRONG[case]
    code, out, said = context(config, *(word.format(config=config) if "{c" in word else word for word in words))
    assert (code, out) == (2, "")
    assert "Traceback" not in said
    assert all(part in said for part in parts), said


def test_help_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = context("--help")
    assert code == 0
    assert "Example" in out
    with pytest.raises(SystemExit) as stopped:
        main(["analyze", "--help"])
    assert stopped.value.code in (0, None)
    shown = capsys.readouterr().out
    assert "Example" in shown
    assert "context" in shown
